"""Activations that are not element by element alone: halves of a dimension, and slopes per channel."""

from __future__ import annotations

from typing import Any

import torch

from shardwright.tensor.base.registry import rule
from shardwright.tensor.base.strategy import Labels, Local, LocalContext, Operand, Strategies, index_strategies
from shardwright.tensor.dispatch.autocast import autocast_dtype

__all__: list[str] = []


@rule("glu")
def _glu(input: Operand, dim: int = -1) -> Strategies:
    """One half of a dimension opens and shuts the other: that dimension is whole."""
    labels = list(range(input.ndim))
    return Strategies(index_strategies([input], [labels], [labels], whole={input.dim(dim)}, reduction=None))


@rule("prelu")
def _prelu(input: Operand, weight: Operand) -> Strategies:
    """A slope for everything, or one for each channel, which is cut as the channels are."""
    labels = list(range(input.ndim))
    channel = min(1, input.ndim - 1)
    slopes: Labels = [channel if size > 1 else None for size in weight.shape]
    return Strategies(index_strategies([input, weight], [labels, slopes], [labels]), run=_slope_by_slope)


def _slope_by_slope(context: LocalContext) -> Local | None:
    """Torch counts the slopes, and a rank that has none of the channels has none of them."""
    if not any(context.ins[1].placements[m].is_shard() for m in range(context.ins[1].mesh.ndim)):
        return None

    def local(_: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        given: list[Any] = [*args, *kwargs.values()]
        dtype = autocast_dtype(given[0])
        input, weight = (tensor.to(dtype) for tensor in given)
        return torch._prelu_kernel(input, weight.reshape(-1, *[1] * max(0, input.ndim - 2)))

    return local
