"""Choose a strategy for an operator, one mesh dimension at a time: the cheapest that keeps chosen layouts. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import NamedTuple

from shardwright.errors import RuleError
from shardwright.layout import Layout, Partial, Placement, Ragged, Shard
from shardwright.tensor.base.gradient_types import ENTERED, REPLICATE, Entered
from shardwright.tensor.base.strategy import Operand, Strategies, Strategy
from shardwright.tensor.dispatch.kept import Kept, keep_layouts

__all__ = ["Choice", "Impossible", "choose"]


class Choice(NamedTuple):
    """The layouts to which the inputs are redistributed, those of the outputs, and what decided, by mesh dimension."""

    ins: list[Layout]
    outs: list[Layout]
    rules: list[str]


IN_PLACE = "in place"


class Impossible(Exception):  # noqa: N818  # a signal between choose and its callers, never shown
    """No strategy for `mesh_dim` keeps the layout of the input that is written to."""

    def __init__(self, mesh_dim: int) -> None:
        self.mesh_dim = mesh_dim
        super().__init__(mesh_dim)


def choose(operands: Sequence[Operand], strategies: Strategies, out_shapes: Sequence[tuple[int, ...]]) -> Choice:
    """Choose the layouts to which the inputs are redistributed, and thereby the layouts of the outputs."""
    mesh = operands[0].layout.mesh
    chosen: list[Strategy] = []
    rules: list[str] = []
    usual = tuple(range(mesh.ndim))
    # The order in which mesh dimensions shard a parameter does not matter to others if it is gathered.
    leading = [operand for operand in operands if operand.use is None or not operand.use.gathered] or operands
    if strategies.unmoved is not None:
        leading = [operands[strategies.unmoved]]
    order = next((operand.layout.order for operand in leading if operand.layout.order != usual), None)
    for mesh_dim in range(mesh.ndim):
        candidates = [strategy for strategy in strategies.at(mesh_dim) if _nests(strategy, chosen, order is None)]
        if strategies.unmoved is not None:
            here = operands[strategies.unmoved].layout.placements[mesh_dim]
            candidates = [
                strategy for strategy in candidates if strategy.ins[strategies.unmoved] == here == strategy.outs[0]
            ]
            if not candidates:
                raise Impossible(mesh_dim)
        if not candidates:
            raise RuleError(
                f"no strategy of the rule for mesh dimension {mesh.label(mesh_dim)} is compatible with those chosen "
                "for earlier mesh dimensions: a dimension can be split into given sizes only once, and first. Add a "
                "strategy with everything replicated"
            )
        kept = Kept(candidates, IN_PLACE)
        if strategies.unmoved is None:
            kept = keep_layouts(candidates, operands, mesh_dim)
        chosen.append(_cheapest(kept.strategies, operands, chosen, out_shapes))
        rules.append(kept.rule)
    ins = []
    for index, operand in enumerate(operands):
        placements = [_entering(strategy, index, mesh.shape[m]) for m, strategy in enumerate(chosen)]
        ins.append(Layout(mesh, placements, operand.shape, order))
    outs = [
        Layout(mesh, [strategy.outs[index] for strategy in chosen], shape, order)
        for index, shape in enumerate(out_shapes)
    ]
    return Choice(ins, outs, rules)


def _nests(strategy: Strategy, before: Sequence[Strategy], in_order: bool) -> bool:
    """Return whether a strategy is compatible with those of earlier mesh dimensions: Ragged must split first."""
    for earlier in before:
        for first, then in zip((*earlier.ins, *earlier.outs), (*strategy.ins, *strategy.outs), strict=True):
            both = isinstance(first, Shard | Ragged) and isinstance(then, Shard | Ragged) and first.dim == then.dim
            if both and (isinstance(then, Ragged) or (isinstance(first, Ragged) and not in_order)):
                return False
    return True


def _entering(strategy: Strategy, index: int, ranks: int) -> Placement:
    """Return the placement of an input: Entered if it is replicated beside inputs that differ between ranks."""
    placement = strategy.ins[index]
    if placement != REPLICATE or ranks == 1 or all(other == REPLICATE for other in strategy.ins):
        return placement
    return ENTERED


def _cheapest(
    candidates: list[Strategy],
    operands: Sequence[Operand],
    chosen: Sequence[Strategy],
    out_shapes: Sequence[tuple[int, ...]],
) -> Strategy:
    """Return the cheapest strategy for the next mesh dimension, given those chosen for earlier ones."""
    mesh_dim, mesh = len(chosen), operands[0].layout.mesh
    ranks = mesh.shape[mesh_dim]
    current = [operand.layout.placements[mesh_dim] for operand in operands]
    for strategy in candidates:
        if list(strategy.ins) == current:
            return strategy
    if all(isinstance(placement, Partial) or placement == REPLICATE for placement in current):
        # No input is sharded: all-reduce a partial sum rather than shard it along an arbitrary dimension.
        unsharded = [strategy for strategy in candidates if not any(p.is_shard() for p in strategy.ins)]
        candidates = unsharded or candidates

    def cost(strategy: Strategy) -> tuple[bool, float, int, bool]:
        moved, changed = 0.0, 0
        for operand, now, then in zip(operands, current, strategy.ins, strict=True):
            # Prefer to redistribute parameters rather than activations (weight 1:4).
            weight = 1 if operand.parameter else 4
            moved += weight * _cost(now, then, ranks) * prod(operand.shape) * operand.dtype.itemsize
            changed += prod(operand.shape) if now != then else 0
        due = 0.0  # cost of reducing partial results later
        for placement, shape in zip(strategy.outs, out_shapes, strict=True):
            if isinstance(placement, Partial):
                due += 6 * prod(shape) * operands[0].dtype.itemsize * (ranks - 1) / ranks
        # Prefer no communication, then the fewest bytes, then the fewest elements redistributed, then even shards:
        # backends reduce-scatter only those natively, and no rank is idle.
        uneven = any(
            now != then and not _divides(index, then, operand, chosen, mesh.shape)
            for index, (operand, now, then) in enumerate(zip(operands, current, strategy.ins, strict=True))
        )
        return moved > 0, moved + due, changed, uneven

    return min(candidates, key=cost)


def _divides(
    index: int, placement: Placement, operand: Operand, before: Sequence[Strategy], mesh: tuple[int, ...]
) -> bool:
    """Return whether a placement, after those of earlier mesh dimensions, gives even shards or does not shard."""
    if not isinstance(placement, Shard):
        return True
    nested = [m for m, strategy in enumerate(before) if strategy.ins[index].is_shard(placement.dim)]
    return not operand.shape[placement.dim] % prod(mesh[m] for m in (*nested, len(before)))


def _cost(now: Placement, then: Placement, ranks: int) -> float:
    """Return the bytes received per rank, as a fraction of the global tensor."""
    part = (ranks - 1) / ranks
    if now == then:
        return 0.0
    match now, then:
        case (Shard() | Ragged(), Shard() | Ragged()):
            return part / ranks
        case (Shard() | Ragged(), _):
            return part
        case (Partial(), Shard() | Ragged()):
            return part
        case (Partial(), _):
            return 2 * part
        case (_, Entered()):
            return 0.0
        case _:
            return 0.0  # slicing, or zeroing: no communication
