"""Convolutions: batch and channels as a contraction has them, space by rows from neighbours."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, final

import torch
from torch import Tensor

from shardwright.layout import Ragged
from shardwright.tensor.base.registry import rule
from shardwright.tensor.base.strategy import (
    Labels,
    Local,
    LocalContext,
    Operand,
    Strategies,
    Strategy,
    index_strategies,
)
from shardwright.tensor.dispatch.autocast import autocast_dtype
from shardwright.tensor.redistribute.halo import gather_halo
from shardwright.tensor.rules.shared.neighbourhood import (
    Reach,
    Sliding,
    by_halo,
    connected_zero,
    each,
    halo_of,
    pieces_on,
    where_cut,
    with_halo,
)

__all__: list[str] = []


@final
@dataclass(frozen=True, slots=True)
class _Spread:
    """Every input adds to a window of outputs: the transposed convolution."""

    size: int
    result: int
    kernel: int  # dilation included
    stride: int
    before: int

    def needed(self, start: int, stop: int) -> tuple[int, int]:
        """All inputs whose windows touch these outputs."""
        first = -(-(start + self.before - self.kernel + 1) // self.stride)
        return first, max(first, (stop - 1 + self.before) // self.stride + 1)

    def border(self, place: int) -> int:
        """By the middle of the window."""
        return place * self.stride - self.before + (self.kernel - self.stride + 1) // 2


@final
@dataclass(frozen=True, slots=True)
class _How:
    """The numbers of a convolution, one per spatial dimension."""

    spatial: int
    transposed: bool
    stride: tuple[int, ...]
    pads: tuple[tuple[int, int], ...]  # before and behind
    dilation: tuple[int, ...]
    groups: int
    output_padding: tuple[int, ...]

    def reaches(self, sizes: tuple[int, ...], kernels: tuple[int, ...], first: int) -> dict[int, Reach]:
        found: dict[int, Reach] = {}
        for d, (size, kernel) in enumerate(zip(sizes, kernels, strict=True)):
            reach, stride, (before, behind) = self.dilation[d] * (kernel - 1) + 1, self.stride[d], self.pads[d]
            if self.transposed:
                result = (size - 1) * stride - before - behind + reach + self.output_padding[d]
                found[first + d] = _Spread(size, result, reach, stride, before)
            else:
                result = (size + before + behind - reach) // stride + 1
                found[first + d] = Sliding(size, result, reach, stride, before)
        return found


def _padded(padding: Any, kernels: tuple[int, ...], dilation: tuple[int, ...]) -> tuple[tuple[int, int], ...] | None:
    """How much padding there is before and behind; None where torch does not know the word."""
    if padding == "valid":
        return ((0, 0),) * len(kernels)
    if padding == "same":
        totals = [step * (kernel - 1) for kernel, step in zip(kernels, dilation, strict=True)]
        return tuple((total // 2, total - total // 2) for total in totals)
    return None if isinstance(padding, str) else tuple((pad, pad) for pad in each(padding, len(kernels)))


def _conv(
    spatial: int,
    halo: bool,
    input: Operand,
    weight: Operand,
    bias: Operand | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Strategies | None:
    dilations = each(dilation, spatial)
    pads = _padded(padding, weight.shape[2:], dilations)
    if pads is None:
        return None
    how = _How(spatial, False, each(stride, spatial), pads, dilations, groups, (0,) * spatial)
    return _ways(how, halo, input, weight, bias)


def _conv_transpose(
    spatial: int,
    halo: bool,
    input: Operand,
    weight: Operand,
    bias: Operand | None = None,
    stride: Any = 1,
    padding: Any = 0,
    output_padding: Any = 0,
    groups: int = 1,
    dilation: Any = 1,
) -> Strategies | None:
    pads = tuple((pad, pad) for pad in each(padding, spatial))
    extra = each(output_padding, spatial)
    how = _How(spatial, True, each(stride, spatial), pads, each(dilation, spatial), groups, extra)
    return _ways(how, halo, input, weight, bias)


def _ways(how: _How, halo: bool, input: Operand, weight: Operand, bias: Operand | None) -> Strategies | None:
    numbers = (how.stride, how.pads, how.dilation, how.output_padding)
    if any(len(each_one) != how.spatial for each_one in numbers) or 0 in (*how.stride, *weight.shape):
        return None  # torch says what is wrong with it
    if weight.ndim != how.spatial + 2 or input.ndim not in (how.spatial + 1, how.spatial + 2):
        return None
    batch = ["n"] * (input.ndim - how.spatial - 1)
    reaches = how.reaches(input.shape[len(batch) + 1 :], weight.shape[2:], len(batch) + 1)
    # What looks at no neighbour and keeps its place is as independent as the batch is.
    alone = zip(weight.shape[2:], how.stride, how.pads, how.output_padding, strict=True)
    places = [d if numbers == (1, 1, (0, 0), 0) else None for d, numbers in zip(reaches, alone, strict=True)]
    reaches = {d: reach for d, reach in reaches.items() if d not in places}
    into, out_of = ("c", "o") if how.groups == 1 else ("g", "g")
    channels = [into, out_of] if how.transposed else [out_of, into]
    if how.groups > 1:
        channels[1] = "within"  # the channels of a group
    ins: list[Labels] = [[*batch, into, *places], [*channels, *[None] * how.spatial], [out_of]]
    operands = [operand for operand in (input, weight, bias) if operand is not None]
    out: Labels = [*batch, out_of, *places]
    terms = [[0, 1], [2]][: len(operands) - 1]
    at = index_strategies(operands, ins[: len(operands)], [out], terms=terms, whole={"within"})
    if how.groups > 1:
        at = _whole_groups(at, how, input, weight, len(batch))
    if halo:
        at = with_halo(at, input, reaches, len(operands) - 1, 1)
    return Strategies(at, run=partial(_local, how, reaches))


def _whole_groups(at: Any, how: _How, input: Operand, weight: Operand, channel: int) -> Any:
    """Only strategies in which every rank has whole groups, of inputs and of outputs."""
    single = (input.shape[channel], *weight.shape[:2]) == (how.groups, how.groups, 1)
    divides = how.groups % input.layout.mesh.size == 0

    def filtered(mesh_dim: int) -> list[Strategy]:
        return [
            strategy
            for strategy in at(mesh_dim)
            if not strategy.ins[0].is_shard(channel) or single or (divides and not isinstance(strategy.ins[0], Ragged))
        ]

    return filtered


def _operands(input: Tensor, weight: Tensor, bias: Tensor | None = None, *_: Any, **__: Any) -> Any:
    return input, weight, bias


def _local(how: _How, reaches: dict[int, Reach], context: LocalContext) -> Local | None:
    """torch's own call, but where rows are borrowed, groups are fewer, or there is nothing to compute."""
    source, rank = context.ins[0], context.rank
    shape = context.outs[0].local_shape(rank)
    first = source.ndim - how.spatial
    is_empty = 0 in shape or any(0 in layout.local_shape(rank) for layout in context.ins)
    cut = where_cut(source, reaches)
    groups_cut = how.groups > 1 and bool(source.cut_by(first - 1))
    if not (is_empty or cut or groups_cut):
        return None
    halo = halo_of(source, context.outs[0], reaches) if cut else None
    pieces = pieces_on(source, context.outs[0], reaches, rank)
    name = f"conv{'_transpose' * how.transposed}{how.spatial}d"

    def local(_: Any, args: Any, kwargs: Any) -> Tensor:
        x, weight, bias = _operands(*args, **kwargs)
        if halo is not None:
            x = gather_halo(x, halo, name)
        if 0 in shape or 0 in weight.shape or 0 in (x.shape if how.transposed else x.shape[:first]):
            dtype = autocast_dtype(x)
            result: Tensor = x.new_zeros(shape, dtype=dtype) + connected_zero(x, weight, bias).to(dtype)
            return result if bias is None else result + bias.to(dtype).reshape(-1, *[1] * how.spatial)
        groups = 1 if how.groups == 1 else x.shape[first - 1] * how.groups // source.shape[first - 1]
        return run(how, groups, pieces, x, weight, bias)

    run = _transposed if how.transposed else _plain
    return local


def _plain(how: _How, groups: int, pieces: dict[int, Any], x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """A convolution of windows: what lies beyond the ends is padded by hand, where there is an end."""
    first = x.ndim - how.spatial
    by_hand: list[int] = []
    by_torch: list[int] = []
    for d, (before, behind) in enumerate(how.pads):
        piece = pieces.get(first + d)
        left, right = before, behind
        if piece is not None:
            (start, stop), (low, high) = piece.needed, piece.window
            left = min(max(-start, 0), stop - start)
            right = stop - start - (high - low) - left
        even = left == right
        by_torch.append(left if even else 0)
        by_hand = [0, 0, *by_hand] if even else [left, right, *by_hand]
    x = torch.constant_pad_nd(x, by_hand) if any(by_hand) else x
    conv = (torch.conv1d, torch.conv2d, torch.conv3d)[how.spatial - 1]
    return conv(x, weight, bias, how.stride, by_torch, how.dilation, groups)


def _transposed(
    how: _How, groups: int, pieces: dict[int, Any], x: Tensor, weight: Tensor, bias: Tensor | None
) -> Tensor:
    """A transposed convolution of windows, cut to the outputs that are asked for; some may get nothing but the bias."""
    first = x.ndim - how.spatial
    fit: list[int] = []
    pads, extra = [before for before, _ in how.pads], list(how.output_padding)
    for d in range(how.spatial):
        piece = pieces.get(first + d)
        if piece is None:
            fit = [0, 0, *fit]
            continue
        (start, stop), (low, high) = piece.out, piece.window
        begins = low * how.stride[d] - pads[d]
        ends = begins if high == low else begins + (high - low - 1) * how.stride[d] + _reach(how, weight, d)
        fit = [begins - start, stop - ends, *fit]
        pads[d] = extra[d] = 0
    convs = (torch.conv_transpose1d, torch.conv_transpose2d, torch.conv_transpose3d)
    result = convs[how.spatial - 1](x, weight, None, how.stride, pads, extra, groups, how.dilation)
    result = torch.constant_pad_nd(result, fit) if any(fit) else result
    return result if bias is None else result + bias.reshape(-1, *[1] * how.spatial)


def _reach(how: _How, weight: Tensor, d: int) -> int:
    return how.dilation[d] * (int(weight.shape[2 + d]) - 1) + 1


for _n in (1, 2, 3):
    for _name, _rule in ((f"conv{_n}d", _conv), (f"conv_transpose{_n}d", _conv_transpose)):
        rule(_name)(partial(_rule, _n, False))
        by_halo(_name, getattr(torch, _name), partial(_rule, _n, True), _n)
