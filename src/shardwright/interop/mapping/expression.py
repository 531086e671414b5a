"""Index expressions in the notation of einops, with `+` for joining along an axis: pure.

`(g (n + 1 + 1) d) e` is a tensor of two dimensions; the first is composed of `g`, a sum of three parts, and `d`. A
choice of one part in every sum is a *term*: this tensor has three, with the axes `g n d e`, `g d e` and `g d e`. The
terms tile the tensor, and within a term each index along a dimension is a sum of steps along the term's axes.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod
from typing import NamedTuple, TypeAlias, final

from shardwright.interop.mapping.names import PatternError

__all__ = ["Axis", "Expression", "Node", "Product", "Sum", "Term", "is_padding", "length", "parse_expressions"]

_TOKEN = re.compile(r"\s*([A-Za-z_]\w*|[0-9]+|[()+])")
_PADDING = re.compile(r"pad[0-9]*")


def is_padding(axis: str) -> bool:
    """Return True for the names of padding: `pad`, `pad1`, `pad2`, ...

    >>> is_padding("pad"), is_padding("pad2"), is_padding("padded")
    (True, True, False)
    """
    return _PADDING.fullmatch(axis) is not None


@final
@dataclass(frozen=True, slots=True)
class Axis:
    """An elementary axis. A number is an axis of that length, and must be the same number on the other side."""

    name: str

    def __str__(self) -> str:
        return self.name


@final
@dataclass(frozen=True, slots=True)
class Product:
    """Axes composed into one, the last varying fastest; without factors, an axis of length 1."""

    factors: tuple[Node, ...]

    def __str__(self) -> str:
        return " ".join(f"({node})" if isinstance(node, Sum) else str(node) for node in self.factors) or "1"


@final
@dataclass(frozen=True, slots=True)
class Sum:
    """Parts joined along one axis."""

    parts: tuple[Node, ...]

    def __str__(self) -> str:
        return " + ".join(map(str, self.parts))


Node: TypeAlias = Axis | Product | Sum


class Term(NamedTuple):
    """One term of a tensor: its offset in every dimension, and the dimension and step of every axis.

    Axes of one dimension are ordered from the outermost to the innermost.
    """

    offset: tuple[int, ...]
    steps: dict[str, tuple[int, int]]


@final
@dataclass(frozen=True, slots=True)
class Expression:
    """The index expression of one tensor: one node per dimension."""

    dims: tuple[Node, ...]

    def axes(self) -> frozenset[str]:
        """Return the names of all its axes."""
        return frozenset(name for axes in self.term_axes() for name in axes)

    def term_axes(self) -> list[tuple[str, ...]]:
        """Return the axes of every term, as often as they occur in it."""
        return _axes(Product(self.dims))

    def shape(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        """Return the shape for these sizes of the axes."""
        return tuple(length(node, sizes) for node in self.dims)

    def terms(self, sizes: Mapping[str, int]) -> list[Term]:
        """Return the terms for these sizes, in the order of `term_axes`."""
        terms = [Term((), {})]
        for dim, node in enumerate(self.dims):
            terms = [
                Term((*term.offset, offset), term.steps | {axis: (dim, step) for axis, step in steps.items()})
                for term in terms
                for offset, steps in _placed(node, sizes)
            ]
        return terms

    def __str__(self) -> str:
        return " ".join(str(node) if isinstance(node, Axis) else f"({node})" for node in self.dims)


def length(node: Node, sizes: Mapping[str, int]) -> int:
    """Return the length of an axis, composed or elementary, for these sizes."""
    match node:
        case Axis(name):
            return int(name) if name.isdecimal() else sizes[name]
        case Product(factors):
            return prod(length(factor, sizes) for factor in factors)
        case Sum(parts):
            return sum(length(part, sizes) for part in parts)


def _axes(node: Node) -> list[tuple[str, ...]]:
    match node:
        case Axis(name):
            return [(name,)]
        case Product(factors):
            found: list[tuple[str, ...]] = [()]
            for factor in factors:
                found = [(*before, *after) for before in found for after in _axes(factor)]
            return found
        case Sum(parts):
            return [axes for part in parts for axes in _axes(part)]


def _placed(node: Node, sizes: Mapping[str, int]) -> list[tuple[int, dict[str, int]]]:
    """Return, for every term of a node, its offset and the step of each axis, the outermost first."""
    match node:
        case Axis(name):
            return [(0, {name: 1})]
        case Product(factors):
            found: list[tuple[int, dict[str, int]]] = [(0, {})]
            for factor in factors:
                size = length(factor, sizes)
                found = [
                    (offset * size + more, {axis: step * size for axis, step in steps.items()} | inner)
                    for offset, steps in found
                    for more, inner in _placed(factor, sizes)
                ]
            return found
        case Sum(parts):
            joined: list[tuple[int, dict[str, int]]] = []
            start = 0
            for part in parts:
                joined += [(start + offset, steps) for offset, steps in _placed(part, sizes)]
                start += length(part, sizes)
            return joined


def parse_expressions(text: str) -> tuple[Expression, ...]:
    """Return the comma-separated expressions of one side of a rule; an empty one for a tensor with no dimensions.

    >>> [expression] = parse_expressions("(g (n + 1 + 1) d) e")
    >>> expression.term_axes()
    [('g', 'n', 'd', 'e'), ('g', 'd', 'e'), ('g', 'd', 'e')]
    >>> expression.shape({"g": 2, "n": 4, "d": 8, "e": 3})
    (96, 3)
    """
    return tuple(_Parser(part).parse() for part in text.split(","))


@final
class _Parser:
    def __init__(self, text: str) -> None:
        self._text = text.strip()
        self._tokens: list[str] = []
        position = 0
        while position < len(self._text):
            found = _TOKEN.match(self._text, position)
            if found is None:
                bad = self._text[position:].strip()[0]
                raise self._error(f"{bad!r} is not part of the notation: names, numbers, parentheses and '+' are")
            self._tokens.append(found.group(1))
            position = found.end()
        self._next = 0

    def parse(self) -> Expression:
        nodes = self._nodes()
        if self._next < len(self._tokens):
            if self._tokens[self._next] == "+":
                raise self._error("'+' joins parts of one dimension: put them in parentheses, as in '(v + pad) e'")
            raise self._error("')' without '('")
        return Expression(tuple(nodes))

    def _nodes(self) -> list[Node]:
        nodes: list[Node] = []
        while self._next < len(self._tokens) and self._tokens[self._next] not in (")", "+"):
            token = self._tokens[self._next]
            self._next += 1
            nodes.append(self._parentheses() if token == "(" else self._axis(token))
        return nodes

    def _parentheses(self) -> Node:
        parts = [self._nodes()]
        while self._next < len(self._tokens) and self._tokens[self._next] == "+":
            self._next += 1
            parts.append(self._nodes())
        if self._next == len(self._tokens):
            raise self._error("'(' without ')'")
        self._next += 1
        if len(parts) > 1 and not all(parts):
            raise self._error("'+' needs a part on both sides")
        nodes = [_product(part) for part in parts]
        return nodes[0] if len(nodes) == 1 else Sum(tuple(nodes))

    def _axis(self, token: str) -> Node:
        if token.isdecimal():
            if int(token) == 0 or token != str(int(token)):
                raise self._error(f"the length {token!r} must be a positive number without leading zeros")
            return Product(()) if token == "1" else Axis(token)
        return Axis(token)

    def _error(self, problem: str) -> PatternError:
        return PatternError(f"`{self._text}`: {problem}")


def _product(nodes: Iterable[Node]) -> Node:
    """Return the product of these factors; products within it are written out."""
    factors: list[Node] = []
    for node in nodes:
        factors += node.factors if isinstance(node, Product) else [node]
    return factors[0] if len(factors) == 1 else Product(tuple(factors))
