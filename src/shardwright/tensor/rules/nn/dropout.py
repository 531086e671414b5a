"""Dropout: a product with a mask that depends on the global index only, so replicas have the same mask."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from shardwright.layout import Layout
from shardwright.tensor.base.registry import rule
from shardwright.tensor.base.strategy import Labels, Local, LocalContext, Operand, Strategies, index_strategies
from shardwright.tensor.random import fill_bernoulli, fill_scaled_mask
from shardwright.tensor.random.local import fill_local

__all__: list[str] = []

_SELU_LIMIT = -1.7580993408473766  # limit of SELU for large negative inputs: the value alpha dropout sets


def _register(name: str, *, features: bool, alpha: bool) -> None:
    """Register the rule of one kind of dropout: of elements or of feature maps, to zero or to the limit of SELU."""

    def find_strategies(
        input: Operand, p: float = 0.5, training: bool = True, inplace: bool = False, **given: Any
    ) -> Strategies | None:
        training = given.get("train", training)
        if inplace:
            return None  # its body calls dropout_
        labels: Labels = list(range(input.ndim))
        if not 0 <= p <= 1:
            raise ValueError(f"{name}: p must be between 0 and 1, got {p}")
        off = not training or p == 0
        at = index_strategies([input], [labels], [labels], terms=None if alpha and not off else [[0]])
        if off:
            return Strategies(at, fresh=False, shapes=(input.shape,))

        def run(context: LocalContext) -> Local:
            def local(func: Any, args: Any, kwargs: dict[str, Any]) -> Tensor:
                source = args[0] if args else kwargs["input"]
                return _drop(source, context.ins[0], p, features, alpha, func.__name__.endswith("_"))

            return local

        return Strategies(at, run=run, shapes=(input.shape,), draws=True)

    rule(name)(find_strategies)


def _drop(source: Tensor, layout: Layout, p: float, features: bool, alpha: bool, inplace: bool) -> Tensor:
    shape = (*source.shape[:2], *(1,) * (source.ndim - 2)) if features else source.shape
    mask = torch.empty(shape, dtype=source.dtype, device=source.device)
    if not alpha or p == 1:
        fill_local(mask, layout, fill_scaled_mask, features=features, keep_probability=1 - p)
        return source.mul_(mask) if inplace else source * mask
    fill_local(mask, layout, fill_bernoulli, features=features, p=1 - p)
    # Scaled and shifted to keep mean and variance.
    scale = ((1 - p) * (1 + p * _SELU_LIMIT**2)) ** -0.5
    shift = (1 - mask) * (scale * _SELU_LIMIT) - p * scale * _SELU_LIMIT
    mask = mask * scale
    return source.mul_(mask).add_(shift) if inplace else source * mask + shift


_register("dropout", features=False, alpha=False)
_register("feature_dropout", features=True, alpha=False)
_register("alpha_dropout", features=False, alpha=True)
_register("feature_alpha_dropout", features=True, alpha=True)
