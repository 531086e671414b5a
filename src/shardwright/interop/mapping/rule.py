"""One rule of a mapping, parsed and proved to be a bijection when it is made: pure.

Every tensor of a rule is a sum of terms (see `expression`), and a binding that is in the names of one side only is an
axis of the terms of that side. A rule is a bijection if every term on the left is paired with a term on the right that
has the same axes: both are then the same box of indices. Terms with the same axes are paired in the order in which they
are written. Terms with an axis of padding are left without a partner.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple, final

from shardwright.errors import MappingError
from shardwright.interop.mapping.expression import Expression, is_padding, parse_expressions
from shardwright.interop.mapping.names import STAR, NamePattern, PatternError, parse_names

__all__ = ["Rule", "Side", "TermKey", "parse_rules"]


class TermKey(NamedTuple):
    """A term of a side: the index of its tensor, and its index among the terms of that tensor."""

    tensor: int
    term: int


@final
@dataclass(frozen=True)
class Side:
    """One side of a rule: its names, and their index expressions; no expressions if shapes stay as they are."""

    names: tuple[NamePattern, ...]
    expressions: tuple[Expression, ...] | None = None

    @property
    def bindings(self) -> frozenset[str]:
        """The bindings in any of its names."""
        return frozenset(binding for name in self.names for binding in name.bindings)

    def axes(self) -> frozenset[str]:
        """Return the axes of its expressions."""
        return frozenset(axis for expression in self.expressions or () for axis in expression.axes())

    def terms(self, name_axes: frozenset[str]) -> Iterator[tuple[TermKey, tuple[str, ...]]]:
        """Yield the terms with their axes, as often as they occur; `name_axes` are the bindings that are axes."""
        for tensor, (name, expression) in enumerate(zip(self.names, self.expressions or (), strict=True)):
            for term, axes in enumerate(expression.term_axes()):
                yield TermKey(tensor, term), (*axes, *sorted(name.bindings & name_axes))

    def __str__(self) -> str:
        return ", ".join(map(str, self.names)) or "-"


@final
@dataclass(frozen=True)
class Rule:
    """A rule: two sides, and the pairs of their terms.

    `axes` are the bindings that are axes: each is in the names of one side and in the expressions of the other. `pairs`
    is empty for a rule that renames one tensor, or drops what has the names of its only side.
    """

    line: int
    text: str
    left: Side
    right: Side
    axes: frozenset[str] = frozenset()
    pairs: tuple[tuple[TermKey, TermKey], ...] = ()

    @property
    def drops(self) -> bool:
        """True if one side has no names."""
        return not (self.left.names and self.right.names)

    @property
    def is_default(self) -> bool:
        """True for `* = *`, which keeps all names that no other rule matches."""
        return all(str(side) == STAR for side in (self.left, self.right))

    def swapped(self) -> Rule:
        """Return the rule with its sides exchanged."""
        return replace(self, left=self.right, right=self.left, pairs=tuple((b, a) for a, b in self.pairs))

    def error(self, problem: str) -> MappingError:
        """Return the error for a problem with this rule."""
        return _error(self.line, self.text, problem)

    def __str__(self) -> str:
        names = f"{self.left} = {self.right}"
        if self.left.expressions is None or self.right.expressions is None:
            return names
        sides = (", ".join(map(str, side.expressions or ())) for side in (self.left, self.right))
        return f"{names} : {' = '.join(sides)}"


def parse_rules(text: str) -> Iterator[Rule]:
    """Yield the rules of a text. A rule that renames several tensors is several."""
    for number, rule in _lines(text):
        try:
            yield from _parse(number, rule)
        except PatternError as error:
            raise _error(number, rule, str(error)) from None


def _lines(text: str) -> Iterator[tuple[int, str]]:
    """Yield the rules as text, with their line. A line that ends with ':', '=' or ',' goes on in the next."""
    first, pending = 0, ""
    for number, line in enumerate(text.splitlines(), 1):
        rule = line.partition("#")[0].strip()
        if not rule:
            continue
        first, pending = (first, f"{pending} {rule}") if pending else (number, rule)
        if rule[-1] not in ":=,":
            yield first, pending
            pending = ""
    if pending:
        yield first, pending


def _error(line: int, text: str, problem: str) -> MappingError:
    return MappingError(f"line {line}: `{text}`: {problem}")


def _parse(line: int, text: str) -> Iterator[Rule]:
    names, colon, indices = text.partition(":")
    sides = _halves(names, "names")
    if sides == ("-", "-"):
        raise PatternError("both sides are '-'; write a name on one of them")
    left, right = (Side(() if side == "-" else parse_names(side)) for side in sides)
    rule = Rule(line, text, left, right)
    if rule.drops:
        if colon:
            raise PatternError("a rule that drops tensors has no index expressions; leave out ':' and what follows")
        yield rule
        return
    if not colon:
        yield from _renames(rule)
        return
    first, second = map(parse_expressions, _halves(indices, "index expressions"))
    yield _proved(replace(rule, left=replace(left, expressions=first), right=replace(right, expressions=second)))


def _halves(text: str, what: str) -> tuple[str, str]:
    halves = [half.strip() for half in text.split("=")]
    if len(halves) != 2:
        raise PatternError(f"a rule has two sides of {what} with one '=' between them, got {len(halves) - 1} '='")
    return halves[0], halves[1]


def _renames(rule: Rule) -> Iterator[Rule]:
    left, right = rule.left.names, rule.right.names
    if len(left) != len(right):
        raise PatternError(
            f"{len(left)} names on the left and {len(right)} on the right; to join or split tensors, write their index "
            "expressions after ':'"
        )
    for old, new in zip(left, right, strict=True):
        unbound = sorted(old.bindings ^ new.bindings)
        if unbound:
            raise PatternError(
                f"{_shown(unbound[0])} is on one side only, so that several names would become one; write it on both "
                "sides, or use it as an axis in index expressions after ':'"
            )
        yield replace(rule, left=Side((old,)), right=Side((new,)))


def _shown(binding: str) -> str:
    return STAR if binding == STAR else f"{{{binding}}}"


def _proved(rule: Rule) -> Rule:
    """Return the rule with its pairs of terms, or raise an error that says why it is not a bijection."""
    for side, of in ((rule.left, "left"), (rule.right, "right")):
        if len(side.names) != len(side.expressions or ()):
            raise PatternError(
                f"{len(side.names)} names on the {of} ({side}), but {len(side.expressions or ())} index expressions; "
                "write one for each name, with commas between them"
            )
    axes = _name_axes(rule.left, rule.right) | _name_axes(rule.right, rule.left)
    numbered = [
        replace(side, names=tuple(name.with_numbers(axes) for name in side.names)) for side in (rule.left, rule.right)
    ]
    rule = replace(rule, left=numbered[0], right=numbered[1], axes=axes)
    return replace(rule, pairs=tuple(_pairs(rule)))


def _name_axes(side: Side, other: Side) -> frozenset[str]:
    """Return the bindings in the names of a side that are axes on the other, after checking all its bindings."""
    found: set[str] = set()
    for binding in sorted(side.bindings):
        shown = _shown(binding)
        if binding in other.bindings:
            if not all(binding in name.bindings for each in (side, other) for name in each.names):
                raise PatternError(f"{shown} is on both sides, but not in every name of the rule; write it in all")
            if binding in side.axes() | other.axes():
                raise PatternError(
                    f"{shown} is in the names of both sides, so it cannot be an axis too; give the axis another name"
                )
        elif binding in other.axes():
            if is_padding(binding):
                raise PatternError(f"{shown} cannot be bound: the axis {binding!r} is padding")
            found.add(binding)
        else:
            raise PatternError(
                f"{shown} is not bound on the other side: write it in the names there, or use {binding!r} as an axis "
                "of their index expressions"
            )
    return frozenset(found)


def _pairs(rule: Rule) -> Iterator[tuple[TermKey, TermKey]]:
    by_axes: list[defaultdict[frozenset[str], list[TermKey]]] = []
    for side in (rule.left, rule.right):
        found: defaultdict[frozenset[str], list[TermKey]] = defaultdict(list)
        padded = dict.fromkeys(range(len(side.names)), True)
        for key, axes in side.terms(rule.axes):
            twice = [axis for axis, count in Counter(axes).items() if count > 1]
            if twice:
                raise PatternError(
                    f"the axis {twice[0]!r} occurs twice in one part of {str(side.names[key.tensor])!r}; axes of one "
                    "part need different names"
                )
            if not any(map(is_padding, axes)):
                padded[key.tensor] = False
                found[frozenset(axes)].append(key)
        for tensor, only in padded.items():
            if only:
                raise PatternError(
                    f"{str(side.names[tensor])!r} is all padding; padding is one part of a sum, as in '(v + pad) e'"
                )
        by_axes.append(found)
    left, right = by_axes
    for common in dict.fromkeys([*left, *right]):
        if len(left[common]) != len(right[common]):
            raise PatternError(_unpaired(common, len(left[common]), len(right[common])))
        yield from zip(left[common], right[common], strict=True)


def _unpaired(axes: frozenset[str], left: int, right: int) -> str:
    shown = f"with the axes {' '.join(sorted(axes))}" if axes else "without axes"
    return (
        f"it is not a bijection: {left} part{'s' * (left != 1)} on the left and {right} on the right {shown}; every "
        "part needs one with the same axes on the other side, and padding is called 'pad'"
    )
