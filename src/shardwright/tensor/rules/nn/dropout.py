"""Dropout: a product with a mask that follows from the global index, so a replicate has one mask everywhere."""

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

_SELU_FLOOR = -1.7580993408473766  # what an infinitely negative number becomes in SELU: alpha dropout's "off"


def _register(name: str, *, features: bool, alpha: bool) -> None:
    """A rule for one kind of dropout: of elements or of whole features, to zero or to SELU's floor."""

    def answer(
        input: Operand, p: float = 0.5, training: bool = True, inplace: bool = False, **given: Any
    ) -> Strategies | None:
        training = given.get("train", training)
        if inplace:
            return None  # its body says dropout_
        labels: Labels = list(range(input.ndim))
        if not 0 <= p <= 1:
            raise ValueError(f"{name}: p = {p} is not in [0, 1], where probabilities are")
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

    rule(name)(answer)


def _drop(source: Tensor, layout: Layout, p: float, features: bool, alpha: bool, inplace: bool) -> Tensor:
    shape = (*source.shape[:2], *(1,) * (source.ndim - 2)) if features else source.shape
    mask = torch.empty(shape, dtype=source.dtype, device=source.device)
    if not alpha or p == 1:
        fill_local(mask, layout, fill_scaled_mask, features=features, keep_probability=1 - p)
        return source.mul_(mask) if inplace else source * mask
    fill_local(mask, layout, fill_bernoulli, features=features, p=1 - p)
    # Scaled and shifted so that mean and variance stay what they were.
    scale = ((1 - p) * (1 + p * _SELU_FLOOR**2)) ** -0.5
    shift = (1 - mask) * (scale * _SELU_FLOOR) - p * scale * _SELU_FLOOR
    mask = mask * scale
    return source.mul_(mask).add_(shift) if inplace else source * mask + shift


_register("dropout", features=False, alpha=False)
_register("feature_dropout", features=True, alpha=False)
_register("alpha_dropout", features=False, alpha=True)
_register("feature_alpha_dropout", features=True, alpha=True)
