"""Pooling: batch and channels are independent of each other, space is pooled by rows from neighbours."""

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
from shardwright.tensor.rules.shared.neighbourhood import (
    Piece,
    Reach,
    Sliding,
    by_halo,
    each,
    empty_results,
    halo_of,
    or_nothing,
    pieces_on,
    where_cut,
    with_halo,
)
from shardwright.tensor.rules.shared.pick import cutting, first_tensor

__all__: list[str] = []

_POOLS: dict[str, tuple[Callable[..., Any], ...]] = {
    "avg": (F.avg_pool1d, F.avg_pool2d, F.avg_pool3d),
    "max": (F.max_pool1d, F.max_pool2d, F.max_pool3d),
}


@final
@dataclass(frozen=True, slots=True)
class _How:
    """The numbers of a pooling, one per spatial dimension."""

    kind: str  # avg or max
    spatial: int
    indices: bool
    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    ceil_mode: bool
    extra: dict[str, Any]  # what averages have beyond that

    def reaches(self, sizes: Sequence[int], first: int) -> dict[int, Sliding]:
        found = {}
        for d, size in enumerate(sizes):
            kernel, stride, pad = self.dilation[d] * (self.kernel[d] - 1) + 1, self.stride[d], self.padding[d]
            over = size + 2 * pad - kernel
            result = (-(-over // stride) if self.ceil_mode else over // stride) + 1
            if self.ceil_mode and (result - 1) * stride >= size + pad:
                result -= 1  # no window begins in the padding behind
            found[first + d] = Sliding(size, result, kernel, stride, pad)
        return found

    def call(self, x: Tensor, padding: Sequence[int]) -> Any:
        """The pooling of a local tensor, padded so."""
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
    kernel = each(kernel_size, spatial)
    extra: dict[str, Any] = {"count_include_pad": count_include_pad}
    if divisor_override is not None:
        extra["divisor_override"] = divisor_override
    steps = each(stride, spatial) if stride or stride == 0 else kernel
    how = _How("avg", spatial, False, kernel, steps, each(padding, spatial), (1,) * spatial, ceil_mode, extra)
    return _ways(how, halo, input)


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
    del return_indices  # the name of the operator says it
    kernel = each(kernel_size, spatial)
    steps = each(stride, spatial) if stride or stride == 0 else kernel
    how = _How("max", spatial, indices, kernel, steps, each(padding, spatial), each(dilation, spatial), ceil_mode, {})
    return _ways(how, halo, input)


def _ways(how: _How, halo: bool, input: Operand) -> Strategies | None:
    first = input.ndim - how.spatial
    numbers = (how.kernel, how.stride, how.padding, how.dilation)
    if first not in (1, 2) or 0 in how.stride or any(len(each_one) != how.spatial for each_one in numbers):
        return None  # torch says what is wrong with it
    reaches = how.reaches(input.shape[first:], first)
    alone = [d for d, reach in reaches.items() if (reach.kernel, reach.stride, reach.before) == (1, 1, 0)]
    labels: Labels = [d if d < first or (d in alone and not how.indices) else None for d in range(input.ndim)]
    outs = 2 if how.indices else 1
    at = index_strategies(
        [input], [labels], [labels] * outs, terms=[[0]] if how.kind == "avg" else None, reduction=None
    )
    near: dict[int, Reach] = {d: reach for d, reach in reaches.items() if labels[d] is None}
    if halo and not any(how.dilation[d] > 1 and how.padding[d] for d in range(how.spatial)):
        at = with_halo(at, input, near, 0, outs)
    return Strategies(at, run=partial(_local, how, near))


def _local(how: _How, reaches: dict[int, Reach], context: LocalContext) -> Local | None:
    """torch's own call, but where rows are borrowed, or there is nothing to compute."""
    source, rank = context.ins[0], context.rank
    if not where_cut(source, reaches):
        return or_nothing(context)
    halo = halo_of(source, context.outs[0], reaches)
    pieces = pieces_on(source, context.outs[0], reaches, rank)
    is_empty = 0 in context.outs[0].local_shape(rank)
    name = f"{how.kind}_pool{how.spatial}d"

    def local(_: Any, args: Any, kwargs: Any) -> Any:
        x = gather_halo(first_tensor(args, kwargs), halo, name)
        if is_empty:
            return empty_results(context, x)
        return _pool(how, pieces, source, x)

    return local


def _pool(how: _How, pieces: dict[int, Piece], whole: Layout, x: Tensor) -> Any:
    """A pooling of windows. torch pads both ends or none: rows are made up at the other, and what sees them dropped."""
    first = x.ndim - how.spatial
    padding = list(how.padding)
    made_up: list[tuple[int, int]] = [(0, 0)] * how.spatial
    offsets = [0] * how.spatial  # where what is pooled begins in the whole tensor
    kept: dict[int, tuple[int, int]] = {}
    for dim, piece in pieces.items():
        d = dim - first
        if piece.needed[0] >= 0 and piece.needed[1] <= whole.shape[dim]:
            padding[d] = 0
        else:
            made_up[d], before = _made_up(how, d, piece, whole.shape[dim])
            kept[dim] = (before, piece.out[1] - piece.out[0])
        offsets[d] = piece.window[0] - made_up[d][0]
    if any(map(any, made_up)):
        x = torch.constant_pad_nd(x, [pad for both in reversed(made_up) for pad in both])
    result = how.call(x, padding)
    pooled, places = result if how.indices else (result, None)
    for dim, (before, count) in kept.items():
        pooled = pooled.narrow(dim, before, count)
        places = None if places is None else places.narrow(dim, before, count)
    if places is None:
        return pooled.contiguous()
    return pooled.contiguous(), _in_whole(places, x.shape[first:], offsets, whole.shape[first:])


def _made_up(how: _How, d: int, piece: Piece, size: int) -> tuple[tuple[int, int], int]:
    """How many rows to make up before and behind a window at an end, and how many outputs come before ours then.

    Windows must begin in step with ours, and there must be as many rows as a window has, or torch refuses.
    """
    (start, stop), (low, high), stride, padding = piece.needed, piece.window, how.stride[d], how.padding[d]
    lacking = max(0, how.dilation[d] * (how.kernel[d] - 1) + 1 - (high - low))
    if start < 0:
        return (0, lacking if stop <= size else 0), piece.out[0]
    front = -padding % stride
    front += -(-max(0, lacking - front) // stride) * stride
    return (front, 0), (front + padding) // stride


def _in_whole(places: Tensor, sizes: Sequence[int], offsets: Sequence[int], whole: Sequence[int]) -> Tensor:
    """Places counted through a window of these sizes, counted through the whole."""
    found, step = torch.zeros_like(places), 1
    for size, offset, extent in zip(reversed(sizes), reversed(offsets), reversed(whole), strict=True):
        found += (places % size + offset) * step
        places, step = places // size, step * extent
    return found


def _adaptive(
    spatial: int, results: int, linear: bool, input: Operand, output_size: Any, **options: Any
) -> Strategies | None:
    """Batch and channels are independent, and places that stay as they are; the rest of space is whole."""
    outs = 1 if options.get("return_indices") is False else results  # torch's own always give the places
    first = input.ndim - spatial
    wanted = each(output_size, spatial)
    if first not in (1, 2) or len(wanted) != spatial:
        return None  # torch says what is wrong with it
    kept = [first + d for d, size in enumerate(wanted) if outs == 1 and size in (None, input.shape[first + d])]
    labels: Labels = [d if d < first or d in kept else None for d in range(input.ndim)]
    at = index_strategies([input], [labels], [labels] * outs, terms=[[0]] if linear else None, reduction=None)

    def run(context: LocalContext) -> Local | None:
        shape = context.outs[0].local_shape(context.rank)
        if 0 in shape or not any(context.ins[0].cut_by(d) for d in kept):
            return or_nothing(context)
        return lambda func, args, kwargs: func(first_tensor(args, kwargs), shape[first:], **options)

    return Strategies(at, run=run)


def _window(input: Any, output_size: Any, spatial: int) -> list[int] | None:
    """How many places make one, where all windows are of one size; None where they are not, or nothing is cut."""
    layout = input._layout
    first = layout.ndim - spatial
    sizes, given = layout.shape[first:], each(output_size, spatial)
    if first < 1 or len(given) != spatial:
        return None
    wanted = [size if out is None else out for out, size in zip(given, sizes, strict=True)]
    if not any(cutting(layout, dim) for dim in range(first, layout.ndim)) or 0 in wanted:
        return None
    return [size // out for size, out in zip(sizes, wanted, strict=True)] if _divide(sizes, wanted) else None


def _divide(sizes: Sequence[int], parts: Sequence[int]) -> bool:
    return all(part and size and size % part == 0 for size, part in zip(sizes, parts, strict=True))


def _adaptive_avg(spatial: int, input: Any, output_size: Any) -> Any:
    """A mean over all of a cut dimension is a partial sum; windows of one size are an ordinary pooling."""
    window = _window(input, output_size, spatial)
    if window is None:
        return NotImplemented
    first = input.ndim - spatial
    whole = [first + d for d, size in enumerate(window) if size == input.shape[first + d]]
    if whole:
        input = input.mean(dim=whole, keepdim=True)
        window = [1 if first + d in whole else size for d, size in enumerate(window)]
    return input if all(size == 1 for size in window) else _POOLS["avg"][spatial - 1](input, window)


def _adaptive_max(spatial: int, input: Any, output_size: Any, return_indices: bool | None = None) -> Any:
    window = _window(input, output_size, spatial)
    if window is None or any(size == extent for size, extent in zip(window, input.shape[-spatial:], strict=True)):
        return NotImplemented  # one rank would have all the work
    return _POOLS["max"][spatial - 1](input, window, return_indices=return_indices is not False)


def _unpool(spatial: int, input: Operand, indices: Operand, *_: Any, **__: Any) -> Strategies:
    labels = [d if d < input.ndim - spatial else None for d in range(input.ndim)]
    at = index_strategies([input, indices], [labels, labels], [labels], terms=[[0]], reduction=None)
    return Strategies(at, run=or_nothing)


@rule("max_pool2d_with_indices_backward", "max_pool3d_with_indices_backward")
def _max_pool_backward(grad_output: Operand, self: Operand, *numbers: Any, **named: Any) -> Strategies:
    indices = next(value for value in (*numbers, *named.values()) if isinstance(value, Operand))
    spatial = 2 if self.ndim < 5 else 3
    labels = [d if d < self.ndim - spatial else None for d in range(self.ndim)]
    at = index_strategies([grad_output, self, indices], [labels] * 3, [labels], terms=[[0]], reduction=None)
    return Strategies(at, run=or_nothing)


def _fractional(spatial: int, input: Operand, *numbers: Any, **named: Any) -> Strategies | None:
    """With given random samples, one set per image and channel."""
    samples = numbers[-1] if numbers else None
    if named or not isinstance(samples, Operand):
        return None  # nn.functional's: its body calls torch's own
    leading = range(input.ndim - spatial)
    labels: Labels = [*leading, *[None] * spatial]
    # Without a batch, the samples have one of 1.
    drawn: Labels = [*[None] * (2 - len(leading)), *leading, None]
    return Strategies(index_strategies([input, samples], [labels, drawn], [labels] * 2, reduction=None), run=or_nothing)


def _without_indices(spatial: int, input: Any, *args: Any, **options: Any) -> Any:
    """nn.functional's, of the same name as torch's own: the places are there anyway, and not asked for."""
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
        by_halo(_name, getattr(F, _name), partial(_rule, True), _n)
    rule(f"adaptive_avg_pool{_n}d")(partial(_adaptive, _n, 1, True))
    rule(f"adaptive_max_pool{_n}d", f"adaptive_max_pool{_n}d_with_indices")(partial(_adaptive, _n, 2, False))
    composite(f"adaptive_avg_pool{_n}d")(partial(_adaptive_avg, _n))
    composite(f"adaptive_max_pool{_n}d", f"adaptive_max_pool{_n}d_with_indices")(partial(_adaptive_max, _n))
    rule(f"max_unpool{_n}d")(partial(_unpool, _n))
for _n in (2, 3):
    rule(f"fractional_max_pool{_n}d")(partial(_fractional, _n))
    composite(f"fractional_max_pool{_n}d")(partial(_without_indices, _n))
