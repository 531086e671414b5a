"""Convolutions: batch and channels are a contraction; sharded spatial dimensions exchange halos."""

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
    connected_zero,
    halo_of,
    per_dim,
    register_halo,
    sharded_dims,
    windows_on,
    with_halo,
)

__all__: list[str] = []


@final
@dataclass(frozen=True, slots=True)
class _Spread:
    """Transposed convolution: every input contributes to a window of outputs."""

    size: int
    result: int
    kernel: int  # dilation included
    stride: int
    before: int

    def needed(self, start: int, stop: int) -> tuple[int, int]:
        """Return all inputs whose windows touch these outputs."""
        first = -(-(start + self.before - self.kernel + 1) // self.stride)
        return first, max(first, (stop - 1 + self.before) // self.stride + 1)

    def first_output(self, index: int) -> int:
        """Assign outputs by the centre of the window."""
        return index * self.stride - self.before + (self.kernel - self.stride + 1) // 2


@final
@dataclass(frozen=True, slots=True)
class _ConvOptions:
    """Parameters of a convolution, one per spatial dimension."""

    spatial: int
    transposed: bool
    stride: tuple[int, ...]
    pads: tuple[tuple[int, int], ...]  # in front and behind
    dilation: tuple[int, ...]
    groups: int
    output_padding: tuple[int, ...]

    def reaches(self, sizes: tuple[int, ...], kernels: tuple[int, ...], first: int) -> dict[int, Reach]:
        reaches: dict[int, Reach] = {}
        for d, (size, kernel) in enumerate(zip(sizes, kernels, strict=True)):
            reach, stride, (before, behind) = self.dilation[d] * (kernel - 1) + 1, self.stride[d], self.pads[d]
            if self.transposed:
                result = (size - 1) * stride - before - behind + reach + self.output_padding[d]
                reaches[first + d] = _Spread(size, result, reach, stride, before)
            else:
                result = (size + before + behind - reach) // stride + 1
                reaches[first + d] = Sliding(size, result, reach, stride, before)
        return reaches


def _padding(padding: Any, kernels: tuple[int, ...], dilation: tuple[int, ...]) -> tuple[tuple[int, int], ...] | None:
    """Return the padding in front and behind; None for a mode torch does not know."""
    if padding == "valid":
        return ((0, 0),) * len(kernels)
    if padding == "same":
        totals = [step * (kernel - 1) for kernel, step in zip(kernels, dilation, strict=True)]
        return tuple((total // 2, total - total // 2) for total in totals)
    return None if isinstance(padding, str) else tuple((pad, pad) for pad in per_dim(padding, len(kernels)))


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
    dilations = per_dim(dilation, spatial)
    pads = _padding(padding, weight.shape[2:], dilations)
    if pads is None:
        return None
    options = _ConvOptions(spatial, False, per_dim(stride, spatial), pads, dilations, groups, (0,) * spatial)
    return _conv_strategies(options, halo, input, weight, bias)


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
    pads = tuple((pad, pad) for pad in per_dim(padding, spatial))
    extra = per_dim(output_padding, spatial)
    options = _ConvOptions(spatial, True, per_dim(stride, spatial), pads, per_dim(dilation, spatial), groups, extra)
    return _conv_strategies(options, halo, input, weight, bias)


def _conv_strategies(
    options: _ConvOptions, halo: bool, input: Operand, weight: Operand, bias: Operand | None
) -> Strategies | None:
    parameters = (options.stride, options.pads, options.dilation, options.output_padding)
    if any(len(values) != options.spatial for values in parameters) or 0 in (*options.stride, *weight.shape):
        return None  # torch raises the error
    if weight.ndim != options.spatial + 2 or input.ndim not in (options.spatial + 1, options.spatial + 2):
        return None
    batch = ["n"] * (input.ndim - options.spatial - 1)
    reaches = options.reaches(input.shape[len(batch) + 1 :], weight.shape[2:], len(batch) + 1)
    # Dimensions with kernel 1, stride 1 and no padding are as independent as the batch.
    steps = zip(weight.shape[2:], options.stride, options.pads, options.output_padding, strict=True)
    spatial_labels = [d if values == (1, 1, (0, 0), 0) else None for d, values in zip(reaches, steps, strict=True)]
    reaches = {d: reach for d, reach in reaches.items() if d not in spatial_labels}
    into, out_of = ("c", "o") if options.groups == 1 else ("g", "g")
    channels = [into, out_of] if options.transposed else [out_of, into]
    if options.groups > 1:
        channels[1] = "within"  # the channels of a group
    ins: list[Labels] = [[*batch, into, *spatial_labels], [*channels, *[None] * options.spatial], [out_of]]
    operands = [operand for operand in (input, weight, bias) if operand is not None]
    out: Labels = [*batch, out_of, *spatial_labels]
    terms = [[0, 1], [2]][: len(operands) - 1]
    at = index_strategies(operands, ins[: len(operands)], [out], terms=terms, whole={"within"})
    if options.groups > 1:
        at = _complete_groups(at, options, input, weight, len(batch))
    if halo:
        at = with_halo(at, input, reaches, len(operands) - 1, 1)
    return Strategies(at, run=partial(_local, options, reaches))


def _complete_groups(at: Any, options: _ConvOptions, input: Operand, weight: Operand, channel: int) -> Any:
    """Keep only the strategies in which every rank has complete groups of inputs and outputs."""
    single = (input.shape[channel], *weight.shape[:2]) == (options.groups, options.groups, 1)
    divides = options.groups % input.layout.mesh.size == 0

    def filtered(mesh_dim: int) -> list[Strategy]:
        return [
            strategy
            for strategy in at(mesh_dim)
            if not strategy.ins[0].is_shard(channel) or single or (divides and not isinstance(strategy.ins[0], Ragged))
        ]

    return filtered


def _operands(input: Tensor, weight: Tensor, bias: Tensor | None = None, *_: Any, **__: Any) -> Any:
    return input, weight, bias


def _local(options: _ConvOptions, reaches: dict[int, Reach], context: LocalContext) -> Local | None:
    """Return a local call if rows come from neighbours, groups are sharded or this rank has no work."""
    source, rank = context.ins[0], context.rank
    shape = context.outs[0].local_shape(rank)
    first = source.ndim - options.spatial
    is_empty = 0 in shape or any(0 in layout.local_shape(rank) for layout in context.ins)
    sharded = sharded_dims(source, reaches)
    groups_sharded = options.groups > 1 and bool(source.cut_by(first - 1))
    if not (is_empty or sharded or groups_sharded):
        return None
    halo = halo_of(source, context.outs[0], reaches) if sharded else None
    windows = windows_on(source, context.outs[0], reaches, rank)
    name = f"conv{'_transpose' * options.transposed}{options.spatial}d"

    def local(_: Any, args: Any, kwargs: Any) -> Tensor:
        x, weight, bias = _operands(*args, **kwargs)
        if halo is not None:
            x = gather_halo(x, halo, name)
        if 0 in shape or 0 in weight.shape or 0 in (x.shape if options.transposed else x.shape[:first]):
            dtype = autocast_dtype(x)
            result: Tensor = x.new_zeros(shape, dtype=dtype) + connected_zero(x, weight, bias).to(dtype)
            return result if bias is None else result + bias.to(dtype).reshape(-1, *[1] * options.spatial)
        groups = 1 if options.groups == 1 else x.shape[first - 1] * options.groups // source.shape[first - 1]
        return run(options, groups, windows, x, weight, bias)

    run = _transposed if options.transposed else _forward
    return local


def _forward(
    options: _ConvOptions, groups: int, windows: dict[int, Any], x: Tensor, weight: Tensor, bias: Tensor | None
) -> Tensor:
    """Convolve windows; pad explicitly where a window exceeds the tensor."""
    first = x.ndim - options.spatial
    explicit: list[int] = []
    symmetric: list[int] = []
    for d, (before, behind) in enumerate(options.pads):
        window = windows.get(first + d)
        left, right = before, behind
        if window is not None:
            (start, stop), (low, high) = window.needed, window.window
            left = min(max(-start, 0), stop - start)
            right = stop - start - (high - low) - left
        even = left == right
        symmetric.append(left if even else 0)
        explicit = [0, 0, *explicit] if even else [left, right, *explicit]
    x = torch.constant_pad_nd(x, explicit) if any(explicit) else x
    conv = (torch.conv1d, torch.conv2d, torch.conv3d)[options.spatial - 1]
    return conv(x, weight, bias, options.stride, symmetric, options.dilation, groups)


def _transposed(
    options: _ConvOptions, groups: int, windows: dict[int, Any], x: Tensor, weight: Tensor, bias: Tensor | None
) -> Tensor:
    """Transposed convolution of windows, cropped or padded to this rank's outputs (some get only the bias)."""
    first = x.ndim - options.spatial
    fit: list[int] = []
    pads, extra = [before for before, _ in options.pads], list(options.output_padding)
    for d in range(options.spatial):
        window = windows.get(first + d)
        if window is None:
            fit = [0, 0, *fit]
            continue
        (start, stop), (low, high) = window.out, window.window
        begins = low * options.stride[d] - pads[d]
        ends = begins if high == low else begins + (high - low - 1) * options.stride[d] + _reach(options, weight, d)
        fit = [begins - start, stop - ends, *fit]
        pads[d] = extra[d] = 0
    convs = (torch.conv_transpose1d, torch.conv_transpose2d, torch.conv_transpose3d)
    result = convs[options.spatial - 1](x, weight, None, options.stride, pads, extra, groups, options.dilation)
    result = torch.constant_pad_nd(result, fit) if any(fit) else result
    return result if bias is None else result + bias.reshape(-1, *[1] * options.spatial)


def _reach(options: _ConvOptions, weight: Tensor, d: int) -> int:
    return options.dilation[d] * (int(weight.shape[2 + d]) - 1) + 1


for _n in (1, 2, 3):
    for _name, _rule in ((f"conv{_n}d", _conv), (f"conv_transpose{_n}d", _conv_transpose)):
        rule(_name)(partial(_rule, _n, False))
        register_halo(_name, getattr(torch, _name), partial(_rule, _n, True), _n)
