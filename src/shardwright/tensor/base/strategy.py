"""Strategies: for one mesh dimension, which placements of the inputs give which placements of the outputs.

Most operators can be written in index notation. Every dimension of every input and output gets a label, and dimensions
with the same label are sharded together. The strategies for one mesh dimension follow from the labels:

- everything replicated;
- for each label: inputs with the label are sharded there, the others are replicated; outputs with the label are
  sharded, outputs without it are partial sums (the label was contracted);
- if the operator is linear: partial in, partial out.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

import torch

from shardwright.layout import Layout, Partial, Placement, Ragged, Shard
from shardwright.tensor.base.gradient_types import REPLICATE, SUM

__all__ = [
    "Labels",
    "MeshStrategy",
    "Operand",
    "ParameterUse",
    "Run",
    "Strategies",
    "Strategy",
    "common_use",
    "index_strategies",
    "spell",
]

Label: TypeAlias = Hashable  # None: this dimension is never sharded (it is broadcast, or needed whole)
Labels: TypeAlias = Sequence[Label]


@dataclass(frozen=True, slots=True)
class ParameterUse:
    """The mesh dimensions over which a parameter is gathered where it is used; over all others it stays sharded.

    With a `dtype`, the parameter is cast to it before it is gathered (mixed precision), and then, if that differs, to
    the dtype of the activations it meets. It is recorded with `set_parameter_use`.

    >>> ParameterUse(frozenset({0})).gathered
    frozenset({0})
    """

    gathered: frozenset[int] = frozenset()
    dtype: torch.dtype | None = None


@dataclass(frozen=True, slots=True)
class Operand:
    """A tensor argument as a rule sees it: metadata, never values."""

    layout: Layout
    dtype: torch.dtype
    grad: bool  # whether it requires grad
    parameter: bool = False  # whether it is an nn.Parameter
    use: ParameterUse | None = None  # of a parameter, or of the parameters it was computed from

    @property
    def shape(self) -> tuple[int, ...]:
        return self.layout.shape

    @property
    def ndim(self) -> int:
        return len(self.layout.shape)

    def dim(self, dim: int) -> int:
        """Return a dimension as a non-negative number."""
        if not -max(self.ndim, 1) <= dim < max(self.ndim, 1):
            raise IndexError(f"dimension {dim} is out of range for a tensor of {self.ndim} dimensions")
        return dim % max(self.ndim, 1)


def common_use(uses: Iterable[ParameterUse]) -> ParameterUse:
    """Return the use of a value computed from parameters with these uses."""
    known = list(uses)
    dtypes = {use.dtype for use in known}
    return ParameterUse(frozenset().union(*(use.gathered for use in known)), dtypes.pop() if len(dtypes) == 1 else None)


class Strategy(NamedTuple):
    """A way to run an operator on one mesh dimension: the placements it needs and those of its outputs."""

    ins: tuple[Placement, ...]
    outs: tuple[Placement, ...]


class LocalContext(NamedTuple):
    """The context of a local call: layouts of the redistributed inputs and of the outputs, and this process's rank."""

    ins: tuple[Layout, ...]
    outs: tuple[Layout, ...]
    rank: int


Local: TypeAlias = Callable[..., Any]  # (func, args, kwargs) -> result, on local tensors
Run: TypeAlias = Callable[[LocalContext], Local | None]  # None: the same call on local tensors


@dataclass(frozen=True, slots=True)
class Strategies:
    """The strategies of an operator, chosen for each mesh dimension separately: `at(mesh_dim)` lists them."""

    at: Callable[[int], list[Strategy]]
    run: Run | None = None  # None: the same call on local tensors
    fresh: bool = True  # whether the result is always a new tensor object
    shapes: tuple[tuple[int, ...], ...] | None = None  # of the outputs, if a call on meta tensors does not give them
    unmoved: int | None = None  # an input that must keep its layout, because it is written to: the first, if any
    written_back: bool = False  # in place: if no strategy keeps the target's layout, compute replicated and write back
    copied: bool = False  # the result looks like a view, but is none
    draws: bool = False  # whether a call takes a key of the random number generator


@dataclass(frozen=True, slots=True)
class MeshStrategy:
    """A strategy for all mesh dimensions at once, if they cannot be decided one by one."""

    ins: tuple[Layout, ...]
    outs: tuple[Layout, ...]
    run: Run | None = None
    fresh: bool = True
    copied: bool = False  # the result looks like a view, but is none
    draws: bool = False  # whether a call takes a key of the random number generator


@dataclass(slots=True)
class _Split:
    """A label and one way of splitting it: evenly (None), or into given sizes."""

    label: Label
    sizes: tuple[int, ...] | None

    def placement(self, labels: Labels) -> Placement | None:
        if self.label not in labels:
            return None
        dim = list(labels).index(self.label)
        return Shard(dim) if self.sizes is None else Ragged(dim, self.sizes)


@dataclass(slots=True)
class Contraction:
    """How outputs without a label are reduced if that label is sharded; None: it must not be sharded."""

    op: str | None = "sum"
    labels: dict[Label, str | None] = field(default_factory=dict)


def spell(*terms: str) -> list[list[str]]:
    """Return labels from strings with one letter per dimension: `spell("mk", "kn")`."""
    return [list(term) for term in terms]


def index_strategies(
    operands: Sequence[Operand],
    ins: Sequence[Labels],
    outs: Sequence[Labels],
    *,
    terms: Sequence[Sequence[int]] | None = None,
    reduction: str | None = "sum",
    whole: frozenset[Label] | set[Label] = frozenset(),
) -> Callable[[int], list[Strategy]]:
    """Return the strategies of an operator in index notation, for `Strategies(at=...)`.

    `terms` lists what the operator is linear in, as a sum of products of inputs given by index (`[[0], [1]]` for an
    addition, `[[0, 1]]` for a product). Inputs in no term are used non-linearly. `reduction` is how a contracted label
    reduces (None: contracted labels are not sharded). Labels in `whole` are never sharded.
    """
    labels = [label for term in ins for label in term if label is not None and label not in whole]
    unique = list(dict.fromkeys(labels))
    replicated = Strategy((REPLICATE,) * len(ins), (REPLICATE,) * len(outs))
    linear = _linear_strategies(len(ins), len(outs), terms) if terms is not None else []

    def at(mesh_dim: int) -> list[Strategy]:
        strategies = [replicated]
        for label in unique:
            for split in _splits(label, operands, ins, mesh_dim):
                strategy = _sharded_strategy(split, ins, outs, terms, reduction)
                if strategy is not None:
                    strategies.append(strategy)
        # Offer partial inputs only if one is partial already: a partial value has the size of the global tensor.
        partial = any(operand.layout.placements[mesh_dim].is_partial() for operand in operands)
        return strategies + linear if partial else strategies

    return at


def _splits(label: Label, operands: Sequence[Operand], ins: Sequence[Labels], mesh_dim: int) -> list[_Split]:
    """Return the ways to split a label: evenly, and as any input is split already."""
    sizes: list[tuple[int, ...] | None] = [None]
    for operand, labels in zip(operands, ins, strict=True):
        placement = operand.layout.placements[mesh_dim]
        if isinstance(placement, Ragged) and labels[placement.dim] == label and placement.sizes not in sizes:
            sizes.append(placement.sizes)
    return [_Split(label, size) for size in sizes]


def _sharded_strategy(
    split: _Split,
    ins: Sequence[Labels],
    outs: Sequence[Labels],
    terms: Sequence[Sequence[int]] | None,
    reduction: str | None,
) -> Strategy | None:
    placed = [split.placement(labels) for labels in ins]
    out = [split.placement(labels) for labels in outs]
    if all(placement is not None for placement in out):
        return Strategy(tuple(p or REPLICATE for p in placed), tuple(p or REPLICATE for p in out))
    if reduction is None:
        return None
    if reduction == "sum" and terms is not None:
        # A term without the label would be added on every rank: make one of its factors partial.
        for term in terms:
            if all(placed[i] is None for i in term):
                placed[term[0]] = SUM
    return Strategy(tuple(p or REPLICATE for p in placed), tuple(p or Partial(reduction) for p in out))


def _linear_strategies(inputs: int, outputs: int, terms: Sequence[Sequence[int]]) -> list[Strategy]:
    """Return the strategies with partial inputs and outputs: one factor of every term is partial."""
    choices: list[list[int]] = [[]]
    for term in terms:
        choices = [[*chosen, factor] for chosen in choices for factor in term]
    strategies = []
    for chosen in choices:
        ins: list[Placement] = [REPLICATE] * inputs
        for factor in chosen:
            ins[factor] = SUM
        strategies.append(Strategy(tuple(ins), (SUM,) * outputs))
    return strategies
