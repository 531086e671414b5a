"""Quantiles: along a whole dimension a local call, along a cut one they are read off its order."""

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
from shardwright.tensor.rules.shared.pieces import pieces_of, pieces_of_all

__all__: list[str] = []


@rule("quantile", "nanquantile")
def _quantile(
    input: Operand, q: Any, dim: Any = None, keepdim: bool = False, *, interpolation: str = "linear"
) -> Strategies:
    place = None if dim is None or not input.ndim else input.dim(dim)
    labels: list[Label] = [None if place is None or d == place else d for d in range(input.ndim)]
    out = labels if keepdim else [label for label in labels if label is not None]
    operands, ins = [input], [labels]
    if isinstance(q, Operand):
        operands.append(q)
        ins.append(["q"] * q.ndim)
        out = [*["q"] * q.ndim, *out]

    def run(context: LocalContext) -> Local | None:
        """Torch refuses to take quantiles of nothing: there are none, but every rank has the same graph."""
        if torch.Size(context.ins[0].local_shape(context.rank)).numel():
            return None
        shape = context.outs[0].local_shape(context.rank)

        def nothing(_: Any, args: Any, kwargs: dict[str, Any]) -> Any:
            given = [tensor.reshape(-1)[:0] for tensor in tensors_in((*args, *kwargs.values()))]
            # Torch has a gradient for `q` where quantiles move with it.
            return (given[0] + given[-1] if interpolation == "linear" else given[0]).reshape(shape)

        return nothing

    return Strategies(index_strategies(operands, ins, [out], reduction=None), run=run)


def _of_order(ignores_nan: bool) -> Callable[..., Any]:
    def ranks(ordered: Any, q: Any) -> Any:
        """The places of the quantiles in the order, between elements; what is no number comes last in it."""
        last = ordered.shape[-1] - 1
        strange = ordered.detach().isnan()
        if ignores_nan:
            return q * (strange.logical_not().sum(-1, keepdim=True) - 1).clamp(min=0)
        return (q * last).expand(*ordered.shape[:-1], -1).masked_fill(strange.any(-1, keepdim=True), last)

    def compose(input: Any, q: Any, dim: Any = None, keepdim: bool = False, *, interpolation: str = "linear") -> Any:
        if not input.ndim or not input.numel() or not input.is_floating_point():
            return NotImplemented
        cut = pieces_of_all(input._layout) if dim is None else pieces_of(input._layout, dim)
        wanted = _as_tensor(q, input)
        if cut is None or wanted.ndim > 1 or wanted.dtype != input.dtype or not _are_shares(wanted):
            return NotImplemented
        row = input.reshape(-1) if dim is None else input.movedim(dim, -1)
        ordered = row.sort()[0]
        found = _between(ordered, ranks(ordered, wanted.reshape(-1)), interpolation)
        if found is None:
            return NotImplemented
        return _arranged(found, input.ndim, dim, keepdim, several=wanted.ndim == 1)

    return compose


def _at(ordered: Any, places: Any) -> Any:
    """Elements of the order; where it is cut, each is on one rank, and the others add nothing to it."""
    cut = pieces_of(ordered._layout, -1)
    if cut is None:
        return ordered.gather(-1, places)
    target = [SUM if p.is_shard() else p for p in ordered._layout.placements]
    with no_torch_function():
        size = ordered.shape[0]
        at = places - cut.start
        padded = torch.cat([ordered, ordered.new_zeros(1)])
        chosen = padded[torch.where((at >= 0) & (at < size), at, size)]
        return tag(chosen, Layout(ordered._layout.mesh, target, places.shape))


def _as_tensor(q: Any, beside: Any) -> Any:
    if isinstance(q, torch.Tensor):
        return replicated("quantile", q)  # type: ignore[arg-type]  # it is a DTensor
    mesh = beside._layout.mesh
    value = torch.tensor(q, dtype=beside.dtype, device=beside.device)
    return tag_replicated(value, mesh)


def _are_shares(q: Any) -> bool:
    return q.is_meta or bool(((q >= 0) & (q <= 1)).all().item())


def _between(ordered: Any, ranks: Any, interpolation: str) -> Any:
    """The elements of the order at these places, or between those below and above."""
    if interpolation not in ("linear", "midpoint", "lower", "higher", "nearest"):
        return None
    rounded = {"lower": torch.floor, "higher": torch.ceil, "nearest": torch.round}.get(interpolation)
    ranks = ranks if rounded is None else rounded(ranks)
    below = ranks.detach().long()
    values = _at(ordered, below)
    if rounded is not None:
        return values
    weight = torch.full_like(ranks, 0.5) if interpolation == "midpoint" else ranks - below
    return values.lerp(_at(ordered, ranks.detach().ceil().long()), weight)


def _arranged(found: Any, ndim: int, dim: Any, keepdim: bool, several: bool) -> Any:
    """Quantiles, which are last, where torch has them: first, if there are several."""
    found = found.movedim(-1, 0) if several else found.squeeze(-1)
    if not keepdim:
        return found
    return found.reshape(*found.shape, *[1] * ndim) if dim is None else found.unsqueeze(several + dim % ndim)


composite("quantile")(_of_order(ignores_nan=False))
composite("nanquantile")(_of_order(ignores_nan=True))
