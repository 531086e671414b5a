"""Quantiles: a local call along a replicated dimension; read from the sorted values along a sharded one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from shardwright.layout import Layout
from shardwright.tensor.base.gradient_types import SUM
from shardwright.tensor.base.registry import composite, rule
from shardwright.tensor.base.strategy import Label, Local, LocalContext, Operand, Strategies, index_strategies
from shardwright.tensor.base.tagging import no_torch_function, tag, tag_replicated
from shardwright.tensor.dispatch.arguments import tensors_in
from shardwright.tensor.redistribute.implicit import replicated
from shardwright.tensor.rules.shared.shards import flat_shards_of, shards_of

__all__: list[str] = []


@rule("quantile", "nanquantile")
def _quantile(
    input: Operand, q: Any, dim: Any = None, keepdim: bool = False, *, interpolation: str = "linear"
) -> Strategies:
    axis = None if dim is None or not input.ndim else input.dim(dim)
    labels: list[Label] = [None if axis is None or d == axis else d for d in range(input.ndim)]
    out = labels if keepdim else [label for label in labels if label is not None]
    operands, ins = [input], [labels]
    if isinstance(q, Operand):
        operands.append(q)
        ins.append(["q"] * q.ndim)
        out = [*["q"] * q.ndim, *out]

    def run(context: LocalContext) -> Local | None:
        """torch rejects empty inputs: return an empty result, so that every rank has the same graph."""
        if torch.Size(context.ins[0].local_shape(context.rank)).numel():
            return None
        shape = context.outs[0].local_shape(context.rank)

        def empty(_: Any, args: Any, kwargs: dict[str, Any]) -> Any:
            given = [tensor.reshape(-1)[:0] for tensor in tensors_in((*args, *kwargs.values()))]
            # Only linear interpolation has a gradient for `q`.
            return (given[0] + given[-1] if interpolation == "linear" else given[0]).reshape(shape)

        return empty

    return Strategies(index_strategies(operands, ins, [out], reduction=None), run=run)


def _quantile_sharded(ignores_nan: bool) -> Callable[..., Any]:
    def positions(ordered: Any, q: Any) -> Any:
        """Return the positions of the quantiles in the order, between elements; NaN comes last."""
        last = ordered.shape[-1] - 1
        is_nan = ordered.detach().isnan()
        if ignores_nan:
            return q * (is_nan.logical_not().sum(-1, keepdim=True) - 1).clamp(min=0)
        return (q * last).expand(*ordered.shape[:-1], -1).masked_fill(is_nan.any(-1, keepdim=True), last)

    def compose(input: Any, q: Any, dim: Any = None, keepdim: bool = False, *, interpolation: str = "linear") -> Any:
        if not input.ndim or not input.numel() or not input.is_floating_point():
            return NotImplemented
        shards = flat_shards_of(input._layout) if dim is None else shards_of(input._layout, dim)
        wanted = _as_tensor(q, input)
        if shards is None or wanted.ndim > 1 or wanted.dtype != input.dtype or not _are_probabilities(wanted):
            return NotImplemented
        row = input.reshape(-1) if dim is None else input.movedim(dim, -1)
        ordered = row.sort()[0]
        result = _interpolated(ordered, positions(ordered, wanted.reshape(-1)), interpolation)
        if result is None:
            return NotImplemented
        return _arranged(result, input.ndim, dim, keepdim, several=wanted.ndim == 1)

    return compose


def _elements_at(ordered: Any, indices: Any) -> Any:
    """Return elements of the sorted values; if those are sharded, as a partial sum to which one rank contributes."""
    shards = shards_of(ordered._layout, -1)
    if shards is None:
        return ordered.gather(-1, indices)
    target = [SUM if p.is_shard() else p for p in ordered._layout.placements]
    with no_torch_function():
        size = ordered.shape[0]
        local = indices - shards.start
        padded = torch.cat([ordered, ordered.new_zeros(1)])
        chosen = padded[torch.where((local >= 0) & (local < size), local, size)]
        return tag(chosen, Layout(ordered._layout.mesh, target, indices.shape))


def _as_tensor(q: Any, like: Any) -> Any:
    if isinstance(q, torch.Tensor):
        return replicated("quantile", q)  # type: ignore[arg-type]  # it is a DTensor
    mesh = like._layout.mesh
    value = torch.tensor(q, dtype=like.dtype, device=like.device)
    return tag_replicated(value, mesh)


def _are_probabilities(q: Any) -> bool:
    return q.is_meta or bool(((q >= 0) & (q <= 1)).all().item())


def _interpolated(ordered: Any, positions: Any, interpolation: str) -> Any:
    """Interpolate between the sorted values below and above these positions."""
    if interpolation not in ("linear", "midpoint", "lower", "higher", "nearest"):
        return None
    rounded = {"lower": torch.floor, "higher": torch.ceil, "nearest": torch.round}.get(interpolation)
    positions = positions if rounded is None else rounded(positions)
    below = positions.detach().long()
    values = _elements_at(ordered, below)
    if rounded is not None:
        return values
    weight = torch.full_like(positions, 0.5) if interpolation == "midpoint" else positions - below
    return values.lerp(_elements_at(ordered, positions.detach().ceil().long()), weight)


def _arranged(result: Any, ndim: int, dim: Any, keepdim: bool, several: bool) -> Any:
    """Move the quantiles from the last dimension to torch's: first if there are several."""
    result = result.movedim(-1, 0) if several else result.squeeze(-1)
    if not keepdim:
        return result
    return result.reshape(*result.shape, *[1] * ndim) if dim is None else result.unsqueeze(several + dim % ndim)


composite("quantile")(_quantile_sharded(ignores_nan=False))
composite("nanquantile")(_quantile_sharded(ignores_nan=True))
