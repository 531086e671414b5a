"""Fourier transforms: local along replicated dimensions, and linear, so partial sums stay partial."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from shardwright.tensor.base.registry import composite, rule
from shardwright.tensor.base.strategy import Label, Labels, Local, LocalContext, Operand, Strategies, index_strategies
from shardwright.tensor.rules.matrix.linalg import with_meta_shapes

__all__: list[str] = []

KINDS = "fft ifft rfft irfft hfft ihfft".split()


def _transform(input: Operand, dims: Any) -> Strategies:
    whole = {input.dim(d) for d in dims}
    labels: list[Label] = [None if d in whole else d for d in range(input.ndim)]
    return Strategies(index_strategies([input], [labels], [labels], terms=[[0]]), run=_pad_empty)


def _pad_empty(context: LocalContext) -> Local | None:
    """torch rejects empty tensors: a rank with an empty shard transforms zeros and drops the result."""
    mine, result = (layout.local_shape(context.rank) for layout in (context.ins[0], context.outs[0]))
    if all(mine) or not all(context.ins[0].shape):
        return None

    def local(func: Any, args: Any, kwargs: Any) -> Any:
        source = args[0]
        for dim, size in enumerate(mine):
            if size == 0:
                shape = [*source.shape[:dim], 1, *source.shape[dim + 1 :]]
                source = torch.cat([source, source.new_zeros(shape)], dim)
        return func(source, *args[1:], **kwargs)[tuple(slice(0, size) for size in result)]

    return local


@rule(*(f"fft_{kind}" for kind in KINDS))
def _fft(input: Operand, n: int | None = None, dim: int = -1, norm: str | None = None) -> Strategies:
    del n, norm
    return _transform(input, [dim])


@rule(*(f"fft_{kind}2" for kind in KINDS))
def _fft2(input: Operand, s: Any = None, dim: Any = (-2, -1), norm: str | None = None) -> Strategies:
    del s, norm
    return _transform(input, [dim] if isinstance(dim, int) else dim)


@rule(*(f"fft_{kind}n" for kind in KINDS))
def _fftn(input: Operand, s: Any = None, dim: Any = None, norm: str | None = None) -> Strategies:
    """Along the given dimensions; else along the last len(s) dimensions; else along all."""
    del norm
    if dim is None:
        dim = range(-(input.ndim if s is None else len(s)), 0)
    return _transform(input, [dim] if isinstance(dim, int) else dim)


def _shift_dims(input: Any, dim: Any) -> list[int]:
    if dim is None:
        return list(range(input.ndim))
    return [d % max(input.ndim, 1) for d in ([dim] if isinstance(dim, int) else dim)]


@rule("fft_fftshift", "fft_ifftshift")
def _shift(input: Operand, dim: Any = None) -> Strategies:
    return _transform(input, _shift_dims(input, dim))


def _shift_sharded(input: Any, dim: Any, forward: bool) -> Any:
    """Compose from roll, which sends rows only to the ranks that need them."""
    dims = _shift_dims(input, dim)
    if not any(input._layout.cut_by(d) for d in dims):
        return NotImplemented
    return torch.roll(input, [input.shape[d] // 2 if forward else (input.shape[d] + 1) // 2 for d in dims], dims)


@composite("fft_fftshift")
def _fftshift(input: Any, dim: Any = None) -> Any:
    return _shift_sharded(input, dim, forward=True)


@composite("fft_ifftshift")
def _ifftshift(input: Any, dim: Any = None) -> Any:
    return _shift_sharded(input, dim, forward=False)


def _signals(input: Operand, window: Operand | None, dims: int, linear_in_window: bool) -> Strategies:
    """A batch of signals (if there is a dimension before the last `dims`) with a replicated window."""
    labels: list[Label] = [*range(input.ndim - dims), *[None] * dims]
    operands = [input] if window is None else [input, window]
    terms = [[0, 1]] if window is not None and linear_in_window else [[0]]
    ins: list[Labels] = [labels, [None]]
    at = index_strategies(operands, ins[: len(operands)], [labels[: input.ndim - dims]], terms=terms)
    return Strategies(at, run=_pad_empty)


@rule("stft")
def _stft(
    input: Operand,
    n_fft: int,
    hop_length: int | None = None,
    win_length: int | None = None,
    window: Operand | None = None,
    *_: Any,
    **__: Any,
) -> Strategies:
    del n_fft, hop_length, win_length
    return _signals(input, window, 1, linear_in_window=True)


@rule("istft")
def _istft(
    input: Operand,
    n_fft: int,
    hop_length: int | None = None,
    win_length: int | None = None,
    window: Operand | None = None,
    center: bool = True,
    normalized: bool = False,
    onesided: bool | None = None,
    length: int | None = None,
    return_complex: bool = False,
) -> Strategies:
    """Linear in the transform only: the result is divided by the window's squares. Not implemented on meta tensors."""
    del win_length, normalized, onesided
    if length is None:
        hop = n_fft // 4 if hop_length is None else hop_length
        length = n_fft + hop * (input.shape[-1] - 1) - (n_fft // 2 * 2 if center else 0)
    dtype = input.dtype if return_complex else input.dtype.to_real()

    def run(context: LocalContext) -> Local:
        shaped, real = with_meta_shapes([dtype])(context), _pad_empty(context)
        return lambda func, args, kwargs: (real if real and not args[0].is_meta else shaped)(func, args, kwargs)

    return replace(_signals(input, window, 2, False), run=run, shapes=((*input.shape[:-2], length),))
