"""The sizes of the axes of a rule, inferred from the shapes of its tensors: pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from shardwright.interop.mapping.expression import Expression, Node, length
from shardwright.interop.mapping.rule import Rule

__all__ = ["KnownShape", "check_known", "infer_sizes"]


class KnownShape(NamedTuple):
    """A tensor of a rule whose shape is known."""

    name: str
    expression: Expression
    shape: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.name!r} of shape {list(self.shape)} as `{self.expression}`"


class _Equation(NamedTuple):
    """The length of one dimension of a tensor."""

    tensor: KnownShape
    dim: int
    node: Node
    unknown: frozenset[str]

    @property
    def size(self) -> int:
        return self.tensor.shape[self.dim]


def infer_sizes(rule: Rule, tensors: Sequence[KnownShape], given: Mapping[str, int]) -> dict[str, int]:
    """Return the sizes of all axes of a rule that follow from those given and the shapes; see `check_known`."""
    for tensor in tensors:
        if len(tensor.shape) != len(tensor.expression.dims):
            raise rule.error(
                f"{tensor} has {len(tensor.shape)} dimensions, but the expression has {len(tensor.expression.dims)}"
            )
    equations = [
        _Equation(tensor, dim, node, _names(node))
        for tensor in tensors
        for dim, node in enumerate(tensor.expression.dims)
    ]
    wanted = _wanted(rule)
    sizes = {name: size for name, size in given.items() if name in wanted}
    progress = True
    while progress:
        progress = False
        for equation in equations:
            unknown = equation.unknown - sizes.keys()
            if len(unknown) == 1:
                (name,) = unknown
                size = _solve(rule, equation, name, sizes)
                if size is not None:
                    sizes[name] = size
                    progress = True
    for equation in equations:
        if equation.unknown <= sizes.keys() and length(equation.node, sizes) != equation.size:
            raise rule.error(
                f"{equation.tensor} does not fit: dimension {equation.dim} has length {equation.size}, but "
                f"`{equation.node}` has {length(equation.node, sizes)} with {_listed(equation.unknown, sizes)}"
            )
    return sizes


def check_known(rule: Rule, tensors: Sequence[KnownShape], sizes: Mapping[str, int]) -> None:
    """Raise an error if the size of an axis of the rule is not known."""
    missing = sorted(_wanted(rule) - sizes.keys())
    if missing:
        known = "; ".join(map(str, tensors[:4]))
        raise rule.error(
            f"the size{'s' * (len(missing) > 1)} of {', '.join(missing)} cannot be inferred from {known}: pass "
            f"{' or '.join(f'{name}=' for name in missing)} to Mapping"
        )


def _wanted(rule: Rule) -> frozenset[str]:
    axes = rule.left.axes() | rule.right.axes() | rule.axes
    return frozenset(name for name in axes if not name.isdecimal())


def _names(node: Node) -> frozenset[str]:
    return frozenset(name for name in Expression((node,)).axes() if not name.isdecimal())


def _solve(rule: Rule, equation: _Equation, name: str, sizes: Mapping[str, int]) -> int | None:
    """Return the size of the one unknown axis of an equation; None if any size would do.

    An axis occurs once in each term, so that the length is linear in its size.
    """
    base = length(equation.node, {**sizes, name: 0})
    slope = length(equation.node, {**sizes, name: 1}) - base
    if slope == 0:
        return None
    size, rest = divmod(equation.size - base, slope)
    if rest or size < 0:
        known = _listed(equation.unknown - {name}, sizes)
        with_sizes = f" with {known}" if known else ""
        raise rule.error(
            f"{equation.tensor} does not fit: dimension {equation.dim} has length {equation.size}, for which no size "
            f"of the axis {name!r} makes `{equation.node}`{with_sizes} right"
        )
    return size


def _listed(names: Iterable[str], sizes: Mapping[str, int]) -> str:
    return ", ".join(f"{name}={sizes[name]}" for name in sorted(names))
