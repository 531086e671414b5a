"""How rules are written: for one mesh dimension, which placements of the inputs give which of the outputs.

Most operators are an index notation. Every dimension of every input and output gets a label; what carries the same
label is cut together. From that alone follow the strategies to run it on one mesh dimension:

- everything replicated;
- for each label: inputs that carry it are cut there, the others are whole; outputs that carry it are cut, outputs
  that do not are partial sums (the label was contracted);
- where the operator is linear: partial in, partial out.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

import torch

from shardwright.layout import Layout, Partial, Placement, Ragged, Shard
from shardwright.tensor.base.gradient_types import REPLICATE, SUM

__all__ = ["Labels", "MeshStrategy", "Operand", "Run", "Strategies", "Strategy", "index_strategies", "spell"]

Label: TypeAlias = Hashable  # None: this dimension is never cut (it is broadcast, or used whole)
Labels: TypeAlias = Sequence[Label]


@dataclass(frozen=True, slots=True)
class Operand:
    """What a rule knows of a tensor argument: never its values."""

    layout: Layout
    dtype: torch.dtype
    grad: bool  # whether a gradient will be asked for
    parameter: bool = False  # whether it is an nn.Parameter

    @property
    def shape(self) -> tuple[int, ...]:
        return self.layout.shape

    @property
    def ndim(self) -> int:
        return len(self.layout.shape)

    def dim(self, dim: int) -> int:
        """A dimension by number, negative ones from the end."""
        if not -max(self.ndim, 1) <= dim < max(self.ndim, 1):
            raise IndexError(f"dimension {dim} is out of range for a tensor of {self.ndim} dimensions")
        return dim % max(self.ndim, 1)


class Strategy(NamedTuple):
    """One strategy to run an operator on one mesh dimension: the inputs' placements, and the outputs' that follow."""

    ins: tuple[Placement, ...]
    outs: tuple[Placement, ...]


class LocalContext(NamedTuple):
    """What a local call is made for: layouts of the inputs (as moved) and outputs, and this process's rank."""

    ins: tuple[Layout, ...]
    outs: tuple[Layout, ...]
    rank: int


Local: TypeAlias = Callable[..., Any]  # (func, args, kwargs) -> result, on local tensors
Run: TypeAlias = Callable[[LocalContext], Local | None]  # None: the same call on local tensors


@dataclass(frozen=True, slots=True)
class Strategies:
    """A rule's answer, mesh dimension by mesh dimension: `at(mesh_dim)` lists the strategies there."""

    at: Callable[[int], list[Strategy]]
    run: Run | None = None  # None: the same call on local tensors
    fresh: bool = True  # whether the result is always a new tensor object
    shapes: tuple[tuple[int, ...], ...] | None = None  # of the outputs, where running on meta tensors cannot tell
    unmoved: int | None = None  # an input that must stay where it is, because it is written to: the first, if any
    written_back: bool = False  # in place, where no strategy keeps the target's layout: computed whole and written back
    copied: bool = False  # the result looks like a view, but is none
    draws: bool = False  # whether a call takes a key of the random number generator


@dataclass(frozen=True, slots=True)
class MeshStrategy:
    """A rule's answer for the mesh as a whole, where its dimensions cannot be decided one by one."""

    ins: tuple[Layout, ...]
    outs: tuple[Layout, ...]
    run: Run | None = None
    fresh: bool = True
    copied: bool = False  # the result looks like a view, but is none
    draws: bool = False  # whether a call takes a key of the random number generator


@dataclass(slots=True)
class _Cut:
    """A label and one manner of cutting it: evenly (None), or into given sizes."""

    label: Label
    sizes: tuple[int, ...] | None

    def place(self, labels: Labels) -> Placement | None:
        if self.label not in labels:
            return None
        dim = list(labels).index(self.label)
        return Shard(dim) if self.sizes is None else Ragged(dim, self.sizes)


@dataclass(slots=True)
class Contraction:
    """What an output that lacks a label becomes when that label is cut: a partial reduction, or it is not allowed."""

    op: str | None = "sum"
    labels: dict[Label, str | None] = field(default_factory=dict)


def spell(*terms: str) -> list[list[str]]:
    """Labels from strings, a letter a dimension: `spell("mk", "kn")`."""
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
    """The strategies of an operator in index notation, for `Strategies(at=...)`.

    `terms` says in what the operator is linear: a sum of products of inputs, given by their places
    (`[[0], [1]]` for an addition, `[[0, 1]]` for a product). Inputs in no term enter non-linearly. `reduction` is
    how a contracted label reduces (None: contracted labels are not cut). Labels in `whole` are never cut.
    """
    labels = [label for term in ins for label in term if label is not None and label not in whole]
    unique = list(dict.fromkeys(labels))
    replicated = Strategy((REPLICATE,) * len(ins), (REPLICATE,) * len(outs))
    linear = _linear_strategies(len(ins), len(outs), terms) if terms is not None else []

    def at(mesh_dim: int) -> list[Strategy]:
        strategies = [replicated]
        for label in unique:
            for cut in _cuts(label, operands, ins, mesh_dim):
                strategy = _cut_strategy(cut, ins, outs, terms, reduction)
                if strategy is not None:
                    strategies.append(strategy)
        # A cut is never made a partial sum for nothing: every rank would hold the whole.
        partial = any(operand.layout.placements[mesh_dim].is_partial() for operand in operands)
        return strategies + linear if partial else strategies

    return at


def _cuts(label: Label, operands: Sequence[Operand], ins: Sequence[Labels], mesh_dim: int) -> list[_Cut]:
    """Evenly, and as any input is cut now."""
    sizes: list[tuple[int, ...] | None] = [None]
    for operand, labels in zip(operands, ins, strict=True):
        placement = operand.layout.placements[mesh_dim]
        if isinstance(placement, Ragged) and labels[placement.dim] == label and placement.sizes not in sizes:
            sizes.append(placement.sizes)
    return [_Cut(label, size) for size in sizes]


def _cut_strategy(
    cut: _Cut,
    ins: Sequence[Labels],
    outs: Sequence[Labels],
    terms: Sequence[Sequence[int]] | None,
    reduction: str | None,
) -> Strategy | None:
    placed = [cut.place(labels) for labels in ins]
    out = [cut.place(labels) for labels in outs]
    if all(placement is not None for placement in out):
        return Strategy(tuple(p or REPLICATE for p in placed), tuple(p or REPLICATE for p in out))
    if reduction is None:
        return None
    if reduction == "sum" and terms is not None:
        # A term that does not carry the label is added on every rank: one of its factors must be partial instead.
        for term in terms:
            if all(placed[i] is None for i in term):
                placed[term[0]] = SUM
    return Strategy(tuple(p or REPLICATE for p in placed), tuple(p or Partial(reduction) for p in out))


def _linear_strategies(inputs: int, outputs: int, terms: Sequence[Sequence[int]]) -> list[Strategy]:
    """Partial sums in, partial sums out: one factor of every term is partial."""
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
