"""Keep the layouts that the user chose: drop strategies that break one, as long as a strategy is left that does not.

For one mesh dimension, a sharded parameter beside activations is either *gathered* there, and activations keep their
placements, or it *stays*, and activations are brought to it:

- a recorded `ParameterUse` says which;
- without one, a parameter is gathered if an activation is sharded over the same mesh dimension (data parallelism), and
  stays if none is (tensor parallelism). Inputs that match a strategy as they are never move.

A parameter whose use has a dtype is cast to it where it meets activations (mixed precision).

Operators whose operands are parameters only, as in an optimizer step, and in-place operators choose by cost. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from shardwright.tensor.base.gradient_types import REPLICATE
from shardwright.tensor.base.strategy import Operand, ParameterUse, Strategy, common_use

__all__ = ["CHEAPEST", "Kept", "computed_in", "keep_layouts", "use_of_result"]

CHEAPEST = "cheapest"
MATCHES = "no redistribution needed"
GATHERED = "parameters are gathered, activations stay"
STAYING = "parameters stay sharded"


class Kept(NamedTuple):
    """The strategies to choose from, and the rule that decided which they are."""

    strategies: list[Strategy]
    rule: str


def is_activation(operand: Operand) -> bool:
    """Return whether an operand is neither a parameter, nor computed from parameters alone, nor a single number."""
    return operand.use is None and not operand.parameter and operand.ndim > 0


def keep_layouts(candidates: list[Strategy], operands: Sequence[Operand], mesh_dim: int) -> Kept:
    """Return those strategies for a mesh dimension that keep the layouts the user chose, or all if none does."""
    current = tuple(operand.layout.placements[mesh_dim] for operand in operands)
    matching = [strategy for strategy in candidates if strategy.ins == current]
    gathered, staying = _sharded_parameters(operands, mesh_dim)
    if matching and not (gathered and any(operands[index].use is not None for index in gathered)):
        return Kept(matching, MATCHES)
    if not gathered and not staying:
        return Kept(candidates, CHEAPEST)

    def keeping(indices: Sequence[int]) -> Callable[[Strategy], bool]:
        return lambda strategy: all(strategy.ins[index] == current[index] for index in indices)

    kept = _those(candidates, keeping(staying))
    if not gathered:
        return Kept(kept, STAYING)
    activations = [index for index, operand in enumerate(operands) if is_activation(operand)]
    sharded = [index for index in activations if current[index].is_shard()]
    kept = _those(_those(kept, keeping(sharded)), keeping(activations))
    kept = _those(kept, lambda strategy: all(strategy.ins[index] == REPLICATE for index in gathered))
    return Kept(kept, f"{GATHERED}; {STAYING}" if staying else GATHERED)


def _those(strategies: list[Strategy], wanted: Callable[[Strategy], bool]) -> list[Strategy]:
    return [strategy for strategy in strategies if wanted(strategy)] or strategies


def _sharded_parameters(operands: Sequence[Operand], mesh_dim: int) -> tuple[list[int], list[int]]:
    """Return the parameters, by index, that are gathered over a mesh dimension, and those that stay sharded."""
    gathered: list[int] = []
    staying: list[int] = []
    activations = [operand for operand in operands if is_activation(operand)]
    if not activations:
        return gathered, staying
    data_parallel = any(operand.layout.placements[mesh_dim].is_shard() for operand in activations)
    for index, operand in enumerate(operands):
        placement = operand.layout.placements[mesh_dim]
        if operand.use is not None and mesh_dim in operand.use.gathered:
            is_gathered = placement != REPLICATE  # a row of it, `w[0]`, is a partial value
        else:
            is_gathered = operand.parameter and operand.use is None and data_parallel and placement.is_shard()
        if is_gathered:
            gathered.append(index)
        elif placement.is_shard() and (operand.parameter or operand.use is not None):
            staying.append(index)
    return gathered, staying


def computed_in(operands: Sequence[Operand]) -> tuple[torch.dtype | None, ...] | None:
    """Return the dtypes that parameters are cast to (None: left as they are); None if none is.

    The dtype is that of the activations, which were cast by the program; if there is none, as for an embedding, that of
    the use.
    """
    activations = [operand for operand in operands if is_activation(operand)]
    if not activations or all(operand.use is None or operand.use.dtype is None for operand in operands):
        return None
    common: torch.dtype | None = None
    for operand in activations:
        if operand.dtype.is_floating_point:
            common = operand.dtype if common is None else torch.promote_types(common, operand.dtype)
    casts: list[torch.dtype | None] = []
    for operand in operands:
        sent = None if operand.use is None or not operand.dtype.is_floating_point else operand.use.dtype
        wanted = sent if sent is None else common or sent
        casts.append(None if sent == wanted == operand.dtype else wanted)
    return tuple(casts) if any(casts) else None


def use_of_result(operands: Sequence[Operand]) -> ParameterUse | None:
    """Return the use of a result computed from these operands: None unless they are parameters, and one has a use."""
    uses = [operand.use for operand in operands if operand.use is not None]
    return None if not uses or any(is_activation(operand) for operand in operands) else common_use(uses)
