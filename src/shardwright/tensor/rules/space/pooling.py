"""Pooling: batch and channels are independent; sharded spatial dimensions exchange halos."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, final

import torch
import torch.nn.functional as F  # noqa: N812  # torch's own short name
from torch import Tensor

from shardwright.layout import Layout
from shardwright.tensor.base.registry import composite, rule
from shardwright.tensor.base.strategy import Labels, Local, LocalContext, Operand, Strategies, index_strategies
from shardwright.tensor.redistribute.halo import gather_halo
from shardwright.tensor.rules.shared.basic_index import first_tensor, sharded_over
from shardwright.tensor.rules.shared.neighbourhood import (
    Reach,
    ShardWindow,
    Sliding,
    empty_results,
    halo_of,
    per_dim,
    register_halo,
    sharded_dims,
    skip_empty,
    windows_on,
    with_halo,
)

__all__: list[str] = []

_POOLS: dict[str, tuple[Callable[..., Any], ...]] = {
    "avg": (F.avg_pool1d, F.avg_pool2d, F.avg_pool3d),
    "max": (F.max_pool1d, F.max_pool2d, F.max_pool3d),
}


@final
@dataclass(frozen=True, slots=True)
class _PoolOptions:
    """Parameters of a pooling, one per spatial dimension."""

    kind: str  # avg or max
    spatial: int
    indices: bool
    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    ceil_mode: bool
    extra: dict[str, Any]  # further options of avg_pool

    def reaches(self, sizes: Sequence[int], first: int) -> dict[int, Sliding]:
        reaches = {}
        for d, size in enumerate(sizes):
            kernel, stride, pad = self.dilation[d] * (self.kernel[d] - 1) + 1, self.stride[d], self.padding[d]
            over = size + 2 * pad - kernel
            result = (-(-over // stride) if self.ceil_mode else over // stride) + 1
            if self.ceil_mode and (result - 1) * stride >= size + pad:
                result -= 1  # no window starts in the padding behind
            reaches[first + d] = Sliding(size, result, kernel, stride, pad)
        return reaches

    def call(self, x: Tensor, padding: Sequence[int]) -> Any:
        """Pool a local tensor with this padding."""
        pool = _POOLS[self.kind][self.spatial - 1]
        if self.kind == "avg":
            return pool(x, self.kernel, self.stride, padding, self.ceil_mode, **self.extra)
        return pool(x, self.kernel, self.stride, padding, self.dilation, self.ceil_mode, return_indices=self.indices)


def _avg_pool(
    spatial: int,
    halo: bool,
    input: Operand,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> Strategies | None:
    kernel = per_dim(kernel_size, spatial)
    extra: dict[str, Any] = {"count_include_pad": count_include_pad}
    if divisor_override is not None:
        extra["divisor_override"] = divisor_override
    steps = per_dim(stride, spatial) if stride or stride == 0 else kernel
    options = _PoolOptions(
        "avg", spatial, False, kernel, steps, per_dim(padding, spatial), (1,) * spatial, ceil_mode, extra
    )
    return _pool_strategies(options, halo, input)


def _max_pool(
    spatial: int,
    indices: bool,
    halo: bool,
    input: Operand,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    dilation: Any = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
) -> Strategies | None:
    del return_indices  # implied by the operator's name
    kernel = per_dim(kernel_size, spatial)
    steps = per_dim(stride, spatial) if stride or stride == 0 else kernel
    options = _PoolOptions(
        "max", spatial, indices, kernel, steps, per_dim(padding, spatial), per_dim(dilation, spatial), ceil_mode, {}
    )
    return _pool_strategies(options, halo, input)


def _pool_strategies(options: _PoolOptions, halo: bool, input: Operand) -> Strategies | None:
    first = input.ndim - options.spatial
    parameters = (options.kernel, options.stride, options.padding, options.dilation)
    if first not in (1, 2) or 0 in options.stride or any(len(values) != options.spatial for values in parameters):
        return None  # torch raises the error
    reaches = options.reaches(input.shape[first:], first)
    independent = [d for d, reach in reaches.items() if (reach.kernel, reach.stride, reach.before) == (1, 1, 0)]
    labels: Labels = [d if d < first or (d in independent and not options.indices) else None for d in range(input.ndim)]
    outs = 2 if options.indices else 1
    at = index_strategies(
        [input], [labels], [labels] * outs, terms=[[0]] if options.kind == "avg" else None, reduction=None
    )
    near: dict[int, Reach] = {d: reach for d, reach in reaches.items() if labels[d] is None}
    if halo and not any(options.dilation[d] > 1 and options.padding[d] for d in range(options.spatial)):
        at = with_halo(at, input, near, 0, outs)
    return Strategies(at, run=partial(_local, options, near))


def _local(options: _PoolOptions, reaches: dict[int, Reach], context: LocalContext) -> Local | None:
    """Return a local call if rows come from neighbours or this rank has no work."""
    source, rank = context.ins[0], context.rank
    if not sharded_dims(source, reaches):
        return skip_empty(context)
    halo = halo_of(source, context.outs[0], reaches)
    windows = windows_on(source, context.outs[0], reaches, rank)
    is_empty = 0 in context.outs[0].local_shape(rank)
    name = f"{options.kind}_pool{options.spatial}d"

    def local(_: Any, args: Any, kwargs: Any) -> Any:
        x = gather_halo(first_tensor(args, kwargs), halo, name)
        if is_empty:
            return empty_results(context, x)
        return _pool(options, windows, source, x)

    return local


def _pool(options: _PoolOptions, windows: dict[int, ShardWindow], source: Layout, x: Tensor) -> Any:
    """Pool windows.

    torch pads both ends or neither: rows are added at the other end, and the outputs that depend on them dropped.
    """
    first = x.ndim - options.spatial
    padding = list(options.padding)
    added: list[tuple[int, int]] = [(0, 0)] * options.spatial
    offsets = [0] * options.spatial  # start of the pooled region in the global tensor
    kept: dict[int, tuple[int, int]] = {}
    for dim, window in windows.items():
        d = dim - first
        if window.needed[0] >= 0 and window.needed[1] <= source.shape[dim]:
            padding[d] = 0
        else:
            added[d], before = _added_rows(options, d, window, source.shape[dim])
            kept[dim] = (before, window.out[1] - window.out[0])
        offsets[d] = window.window[0] - added[d][0]
    if any(map(any, added)):
        x = torch.constant_pad_nd(x, [pad for both in reversed(added) for pad in both])
    result = options.call(x, padding)
    pooled, indices = result if options.indices else (result, None)
    for dim, (before, count) in kept.items():
        pooled = pooled.narrow(dim, before, count)
        indices = None if indices is None else indices.narrow(dim, before, count)
    if indices is None:
        return pooled.contiguous()
    return pooled.contiguous(), _global_indices(indices, x.shape[first:], offsets, source.shape[first:])


def _added_rows(options: _PoolOptions, d: int, window: ShardWindow, size: int) -> tuple[tuple[int, int], int]:
    """Return the rows to add in front of and behind a window, and the number of extra outputs before ours.

    Windows must stay aligned with ours, and there must be at least one window of rows, or torch raises.
    """
    (start, stop), (low, high), stride, padding = window.needed, window.window, options.stride[d], options.padding[d]
    lacking = max(0, options.dilation[d] * (options.kernel[d] - 1) + 1 - (high - low))
    if start < 0:
        return (0, lacking if stop <= size else 0), window.out[0]
    front = -padding % stride
    front += -(-max(0, lacking - front) // stride) * stride
    return (front, 0), (front + padding) // stride


def _global_indices(indices: Tensor, sizes: Sequence[int], offsets: Sequence[int], shape: Sequence[int]) -> Tensor:
    """Convert flat indices of a window of these sizes to flat indices of the global tensor."""
    result, step = torch.zeros_like(indices), 1
    for size, offset, extent in zip(reversed(sizes), reversed(offsets), reversed(shape), strict=True):
        result += (indices % size + offset) * step
        indices, step = indices // size, step * extent
    return result


def _adaptive(
    spatial: int, results: int, linear: bool, input: Operand, output_size: Any, **options: Any
) -> Strategies | None:
    """Batch, channels and unchanged dimensions are independent; other spatial dimensions are replicated."""
    outs = 1 if options.get("return_indices") is False else results  # torch's own always return indices
    first = input.ndim - spatial
    wanted = per_dim(output_size, spatial)
    if first not in (1, 2) or len(wanted) != spatial:
        return None  # torch raises the error
    kept = [first + d for d, size in enumerate(wanted) if outs == 1 and size in (None, input.shape[first + d])]
    labels: Labels = [d if d < first or d in kept else None for d in range(input.ndim)]
    at = index_strategies([input], [labels], [labels] * outs, terms=[[0]] if linear else None, reduction=None)

    def run(context: LocalContext) -> Local | None:
        shape = context.outs[0].local_shape(context.rank)
        if 0 in shape or not any(context.ins[0].cut_by(d) for d in kept):
            return skip_empty(context)
        return lambda func, args, kwargs: func(first_tensor(args, kwargs), shape[first:], **options)

    return Strategies(at, run=run)


def _window_sizes(input: Any, output_size: Any, spatial: int) -> list[int] | None:
    """Return the window size if all windows have the same; None otherwise, or if space is not sharded."""
    layout = input._layout
    first = layout.ndim - spatial
    sizes, given = layout.shape[first:], per_dim(output_size, spatial)
    if first < 1 or len(given) != spatial:
        return None
    wanted = [size if out is None else out for out, size in zip(given, sizes, strict=True)]
    if not any(sharded_over(layout, dim) for dim in range(first, layout.ndim)) or 0 in wanted:
        return None
    return [size // out for size, out in zip(sizes, wanted, strict=True)] if _divide(sizes, wanted) else None


def _divide(sizes: Sequence[int], parts: Sequence[int]) -> bool:
    return all(part and size and size % part == 0 for size, part in zip(sizes, parts, strict=True))


def _adaptive_avg(spatial: int, input: Any, output_size: Any) -> Any:
    """A mean over a sharded dimension is a partial sum; windows of equal size are ordinary pooling."""
    window = _window_sizes(input, output_size, spatial)
    if window is None:
        return NotImplemented
    first = input.ndim - spatial
    reduced = [first + d for d, size in enumerate(window) if size == input.shape[first + d]]
    if reduced:
        input = input.mean(dim=reduced, keepdim=True)
        window = [1 if first + d in reduced else size for d, size in enumerate(window)]
    return input if all(size == 1 for size in window) else _POOLS["avg"][spatial - 1](input, window)


def _adaptive_max(spatial: int, input: Any, output_size: Any, return_indices: bool | None = None) -> Any:
    window = _window_sizes(input, output_size, spatial)
    if window is None or any(size == extent for size, extent in zip(window, input.shape[-spatial:], strict=True)):
        return NotImplemented  # one rank would do all the work
    return _POOLS["max"][spatial - 1](input, window, return_indices=return_indices is not False)


def _unpool(spatial: int, input: Operand, indices: Operand, *_: Any, **__: Any) -> Strategies:
    labels = [d if d < input.ndim - spatial else None for d in range(input.ndim)]
    at = index_strategies([input, indices], [labels, labels], [labels], terms=[[0]], reduction=None)
    return Strategies(at, run=skip_empty)


@rule("max_pool2d_with_indices_backward", "max_pool3d_with_indices_backward")
def _max_pool_backward(grad_output: Operand, self: Operand, *args: Any, **named: Any) -> Strategies:
    indices = next(value for value in (*args, *named.values()) if isinstance(value, Operand))
    spatial = 2 if self.ndim < 5 else 3
    labels = [d if d < self.ndim - spatial else None for d in range(self.ndim)]
    at = index_strategies([grad_output, self, indices], [labels] * 3, [labels], terms=[[0]], reduction=None)
    return Strategies(at, run=skip_empty)


def _fractional(spatial: int, input: Operand, *args: Any, **named: Any) -> Strategies | None:
    """With random samples given, one set per image and channel."""
    samples = args[-1] if args else None
    if named or not isinstance(samples, Operand):
        return None  # nn.functional's: its body calls torch's
    leading = range(input.ndim - spatial)
    labels: Labels = [*leading, *[None] * spatial]
    # Without a batch, the samples have a batch of 1.
    drawn: Labels = [*[None] * (2 - len(leading)), *leading, None]
    return Strategies(index_strategies([input, samples], [labels, drawn], [labels] * 2, reduction=None), run=skip_empty)


def _without_indices(spatial: int, input: Any, *args: Any, **options: Any) -> Any:
    """nn.functional's function of the same name as torch's, which always returns indices: drop them."""
    if "return_indices" not in options:
        return NotImplemented
    pool = (F.fractional_max_pool2d_with_indices, F.fractional_max_pool3d_with_indices)[spatial - 2]
    return pool(input, *args, **options)[0]


for _n in (1, 2, 3):
    for _name, _rule in (
        (f"avg_pool{_n}d", partial(_avg_pool, _n)),
        (f"max_pool{_n}d", partial(_max_pool, _n, False)),
        (f"max_pool{_n}d_with_indices", partial(_max_pool, _n, True)),
    ):
        rule(_name)(partial(_rule, False))
        register_halo(_name, getattr(F, _name), partial(_rule, True), _n)
    rule(f"adaptive_avg_pool{_n}d")(partial(_adaptive, _n, 1, True))
    rule(f"adaptive_max_pool{_n}d", f"adaptive_max_pool{_n}d_with_indices")(partial(_adaptive, _n, 2, False))
    composite(f"adaptive_avg_pool{_n}d")(partial(_adaptive_avg, _n))
    composite(f"adaptive_max_pool{_n}d", f"adaptive_max_pool{_n}d_with_indices")(partial(_adaptive_max, _n))
    rule(f"max_unpool{_n}d")(partial(_unpool, _n))
for _n in (2, 3):
    rule(f"fractional_max_pool{_n}d")(partial(_fractional, _n))
    composite(f"fractional_max_pool{_n}d")(partial(_without_indices, _n))
