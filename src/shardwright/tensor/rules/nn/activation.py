"""Activations that are not purely pointwise: glu and prelu."""

from __future__ import annotations

from typing import Any

import torch

from shardwright.tensor.base.registry import rule
from shardwright.tensor.base.strategy import Labels, Local, LocalContext, Operand, Strategies, index_strategies
from shardwright.tensor.dispatch.autocast import autocast_dtype

__all__: list[str] = []


@rule("glu")
def _glu(input: Operand, dim: int = -1) -> Strategies:
    """One half of the dimension gates the other, so it must be replicated."""
    labels = list(range(input.ndim))
    return Strategies(index_strategies([input], [labels], [labels], whole={input.dim(dim)}, reduction=None))


@rule("prelu")
def _prelu(input: Operand, weight: Operand) -> Strategies:
    """One slope, or one per channel, sharded as the channels are."""
    labels = list(range(input.ndim))
    channel = min(1, input.ndim - 1)
    slopes: Labels = [channel if size > 1 else None for size in weight.shape]
    return Strategies(index_strategies([input, weight], [labels, slopes], [labels]), run=_local_prelu)


def _local_prelu(context: LocalContext) -> Local | None:
    """torch checks the number of slopes, which fails on ranks without channels: call the kernel directly."""
    if not any(context.ins[1].placements[m].is_shard() for m in range(context.ins[1].mesh.ndim)):
        return None

    def local(_: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        given: list[Any] = [*args, *kwargs.values()]
        dtype = autocast_dtype(given[0])
        input, weight = (tensor.to(dtype) for tensor in given)
        return torch._prelu_kernel(input, weight.reshape(-1, *[1] * max(0, input.ndim - 2)))

    return local
