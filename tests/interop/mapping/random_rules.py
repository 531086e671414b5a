"""Random rules of mappings, and what they do to arrays, by numpy's reshape, transpose, split and concatenate.

Nothing here uses the library: a rule is drawn as a tree, printed in the notation, and evaluated on whole arrays.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.int64]
Node = Any  # "axis", ("*", nodes) for a composed axis, ("+", nodes) for a sum


def size_of(node: Node, sizes: dict[str, int]) -> int:
    if isinstance(node, str):
        return 1 if node == "1" else sizes[node]
    parts = [size_of(each, sizes) for each in node[1]]
    return prod(parts) if node[0] == "*" else sum(parts)


def printed(node: Node) -> str:
    if isinstance(node, str):
        return node
    if node[0] == "*":
        return "(" + " ".join(map(printed, node[1])) + ")" if node[1] else "1"
    return "(" + " + ".join(map(printed, node[1])) + ")"


def split(array: Array, dims: Sequence[Node], sizes: dict[str, int]) -> list[tuple[tuple[str, ...], Array]]:
    """Return the terms of an array in their order, each with the names of its axes."""
    for index, node in enumerate(dims):
        if isinstance(node, str) and node != "1":
            continue
        if node == "1" or node[0] == "*":
            factors = [] if node == "1" else list(node[1])
            shape = (*array.shape[:index], *(size_of(each, sizes) for each in factors), *array.shape[index + 1 :])
            return split(array.reshape(shape), [*dims[:index], *factors, *dims[index + 1 :]], sizes)
        ends = np.cumsum([size_of(part, sizes) for part in node[1]])[:-1]
        return [
            term
            for part, piece in zip(node[1], np.split(array, ends, axis=index), strict=True)
            for term in split(piece, [*dims[:index], part, *dims[index + 1 :]], sizes)
        ]
    return [(tuple(dims), array)]


def join(terms: list[tuple[tuple[str, ...], Array]], dims: Sequence[Node], sizes: dict[str, int]) -> Array:
    """Return the array that these terms make; they are taken from the front of the list."""
    for index, node in enumerate(dims):
        if isinstance(node, str) and node != "1":
            continue
        if node == "1" or node[0] == "*":
            factors = [] if node == "1" else list(node[1])
            inner = join(terms, [*dims[:index], *factors, *dims[index + 1 :]], sizes)
            rest = inner.shape[index + len(factors) :]
            return inner.reshape((*inner.shape[:index], size_of(node, sizes), *rest))
        parts = [join(terms, [*dims[:index], part, *dims[index + 1 :]], sizes) for part in node[1]]
        return np.concatenate(parts, axis=index)
    axes, array = terms.pop(0)
    return array.transpose([axes.index(axis) for axis in dims])


@dataclass
class Tensor:
    """A tensor of a rule: its name with `{x}` for the axes in it, its dimensions, and the ids of its terms in order."""

    name: str
    dims: list[Node]
    terms: list[int | None]  # None: padding
    name_axes: list[str] = field(default_factory=list)


@dataclass
class RandomRule:
    """A rule, its sizes, and its two sides."""

    sizes: dict[str, int]
    axes: list[tuple[str, ...]]  # of every term, by id
    left: list[Tensor]
    right: list[Tensor]

    @property
    def text(self) -> str:
        names = " = ".join(", ".join(tensor.name for tensor in side) for side in (self.left, self.right))
        indices = " = ".join(
            ", ".join(" ".join(map(printed, tensor.dims)) for tensor in side) for side in (self.left, self.right)
        )
        return f"{names} : {indices}"

    def sources(self) -> dict[str, Array]:
        """Return arrays for the left side, with a different number in every element."""
        found: dict[str, Array] = {}
        start = 1
        for tensor in self.left:
            shape = tuple(size_of(node, self.sizes) for node in tensor.dims)
            for name, _ in names_of(tensor, self.sizes):
                found[name] = np.arange(start, start + prod(shape)).reshape(shape)
                start += prod(shape)
        return found

    def expected(self, arrays: dict[str, Array], backwards: bool = False) -> dict[str, Array]:
        """Return what the rule makes of these arrays."""
        here, there = (self.right, self.left) if backwards else (self.left, self.right)
        terms: dict[int, tuple[tuple[str, ...], Array]] = {}
        for tensor in here:
            whole = np.stack([arrays[name] for name, _ in names_of(tensor, self.sizes)])
            whole = whole.reshape((*(self.sizes[axis] for axis in tensor.name_axes), *whole.shape[1:]))
            found = split(whole, [*tensor.name_axes, *tensor.dims], self.sizes)
            terms |= {number: term for number, term in zip(tensor.terms, found, strict=True) if number is not None}
        made: dict[str, Array] = {}
        for tensor in there:
            dims = [*tensor.name_axes, *tensor.dims]
            parts = [
                terms[number] if number is not None else (axes, np.zeros([self.sizes[axis] for axis in axes], np.int64))
                for number, axes in zip(tensor.terms, expanded(dims), strict=True)
            ]
            whole = join(parts, dims, self.sizes)
            for name, index in names_of(tensor, self.sizes):
                made[name] = whole[index]
        return made


def expanded(dims: Sequence[Node]) -> list[tuple[str, ...]]:
    """Return the axes of every term, in the order of `split`."""
    for index, node in enumerate(dims):
        if isinstance(node, str) and node != "1":
            continue
        if node == "1" or node[0] == "*":
            factors = [] if node == "1" else list(node[1])
            return expanded([*dims[:index], *factors, *dims[index + 1 :]])
        return [axes for part in node[1] for axes in expanded([*dims[:index], part, *dims[index + 1 :]])]
    return [tuple(dims)]


def names_of(tensor: Tensor, sizes: dict[str, int]) -> list[tuple[str, tuple[int, ...]]]:
    found: list[tuple[str, tuple[int, ...]]] = []
    for index in np.ndindex(*(sizes[axis] for axis in tensor.name_axes)):
        name = tensor.name
        for axis, number in zip(tensor.name_axes, index, strict=True):
            name = name.replace(f"{{{axis}}}", str(number))
        found.append((name, index))
    return found


def draw_rule(rng: random.Random) -> RandomRule:
    """Draw a rule: terms, tensors of both sides that are made of them, axes in names, and padding."""
    axes = [f"a{index}" for index in range(rng.randint(1, 5))]
    sizes = {axis: rng.choice([1, 2, 2, 3, 3, 4, 5]) for axis in axes}
    count = rng.choice([1, 1, 2, 2, 3, 4])
    shared = rng.sample(axes, rng.randint(0, len(axes)))
    others = [axis for axis in axes if axis not in shared]
    terms = [tuple(sorted({*shared, *rng.sample(others, rng.randint(0, len(others)))})) for _ in range(count)]
    used = {axis for term in terms for axis in term}
    sizes = {axis: size for axis, size in sizes.items() if axis in used}
    rule = RandomRule(sizes, terms, [], [])
    for side, letter in ((rule.left, "l"), (rule.right, "r")):
        side += _draw_side(rng, terms, letter)
    _move_axes_into_names(rng, rule)
    for side in (rule.left, rule.right):
        if rng.random() < 0.25:
            _add_padding(rng, rng.choice(side), rule.sizes)
    return rule


def _draw_side(rng: random.Random, terms: list[tuple[str, ...]], letter: str) -> list[Tensor]:
    """Distribute the terms over tensors, in an order that keeps terms with the same axes in theirs."""
    slots = list(range(len(terms)))
    rng.shuffle(slots)
    order: list[int] = []
    for slot in slots:  # the k-th place for these axes is that of the k-th term with these axes
        taken = sum(terms[number] == terms[slot] for number in order)
        order.append([number for number in range(len(terms)) if terms[number] == terms[slot]][taken])
    side: list[Tensor] = []
    while order:
        take = rng.randint(1, len(order))
        ids, order = order[:take], order[take:]
        factors = _draw_factors(rng, [terms[number] for number in ids])
        side.append(Tensor(f"{letter}{len(side)}.w", _draw_dims(rng, factors), list(ids)))
    return side


def _draw_factors(rng: random.Random, terms: list[tuple[str, ...]]) -> list[Node]:
    if len(terms) == 1:
        factors: list[Node] = list(terms[0])
        rng.shuffle(factors)
        return factors
    common = sorted(set(terms[0]).intersection(*terms[1:]))
    outside = [axis for axis in common if rng.random() < 0.7]
    rest = [tuple(axis for axis in term if axis not in outside) for term in terms]
    cuts = sorted(rng.sample(range(1, len(rest)), rng.randint(1, len(rest) - 1)))
    parts = []
    for start, stop in zip([0, *cuts], [*cuts, len(rest)], strict=True):
        inner = _draw_factors(rng, rest[start:stop])
        parts.append(inner[0] if len(inner) == 1 else ("*", inner) if inner else "1")
    factors = [*outside, ("+", parts)]
    rng.shuffle(factors)
    return factors


def _draw_dims(rng: random.Random, factors: list[Node]) -> list[Node]:
    dims: list[Node] = []
    while factors:
        take = min(len(factors), rng.choice([1, 1, 1, 2, 2, 3]))
        group, factors = factors[:take], factors[take:]
        dims.append(group[0] if len(group) == 1 else ("*", group))
    if rng.random() < 0.15:
        dims.insert(rng.randint(0, len(dims)), "1")
    return dims


def _move_axes_into_names(rng: random.Random, rule: RandomRule) -> None:
    """Make an axis that a tensor has as a dimension of its own a part of its name."""
    if rng.random() < 0.5:
        tensor = rng.choice(rng.choice([rule.left, rule.right]))
        if candidates := [node for node in tensor.dims if isinstance(node, str) and node != "1"]:
            axis = rng.choice(candidates)
            tensor.dims.remove(axis)
            tensor.name_axes.append(axis)
            tensor.name = tensor.name.replace(".w", f".{{{axis}}}.w")


def _add_padding(rng: random.Random, tensor: Tensor, sizes: dict[str, int]) -> None:
    if not tensor.dims:
        return
    name = f"pad{len([axis for axis in sizes if axis.startswith('pad')]) or ''}"
    sizes[name] = rng.choice([0, 1, 2, 3])
    index = rng.randrange(len(tensor.dims))
    parts = [tensor.dims[index], name]
    if rng.random() < 0.3:
        parts.reverse()
    before = expanded([*tensor.name_axes, *tensor.dims])
    tensor.dims[index] = ("+", parts)
    real = iter(tensor.terms)
    after = expanded([*tensor.name_axes, *tensor.dims])
    tensor.terms = [None if name in axes else next(real) for axes in after]
    assert len(before) == len([number for number in tensor.terms if number is not None])
