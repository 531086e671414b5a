"""Samples for rules of order, counts and selection: sizes that 3 ranks do not divide, small ones, and zero."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

T = torch.Tensor


def S(func: Any, *args: Any, **kwargs: Any) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:  # noqa: N802  # short, for long tables
    return func, args, kwargs


def r(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(sum(shape)))


def i(*shape: int, low: int = -4, high: int = 5) -> Tensor:
    return torch.randint(low, high, shape, generator=torch.Generator().manual_seed(sum(shape)))


def ordered(*shape: int) -> Tensor:
    return i(*shape).sort()[0].double()


def plain(*shape: int) -> Tensor:
    """Without requires_grad, for operators that have no gradient."""
    return r(*shape).detach()


SAMPLES: dict[str, list[tuple[Any, tuple[Any, ...], dict[str, Any]]]] = {
    "sort": [S(torch.sort, i(7, 4), 0, True), S(torch.sort, r(0, 4), 1), S(T.sort, r(7), stable=True)],
    "argsort": [S(torch.argsort, r(2, 7)), S(torch.argsort, r(7, 1), 0)],
    "msort": [S(torch.msort, r(7, 2))],
    "topk": [S(torch.topk, r(7, 4), 2, 0), S(torch.topk, r(2, 7), 3, largest=False)],
    "kthvalue": [S(torch.kthvalue, r(7, 4), 2, 0), S(torch.kthvalue, r(2, 7), 3, keepdim=True)],
    "isin": [
        S(torch.isin, i(4, 2), i(7)), S(torch.isin, i(4), i(7, 2), invert=True), S(torch.isin, i(4), i(0)),
        S(torch.isin, i(4), 2),
    ],
    "bucketize": [
        S(torch.bucketize, plain(4, 2), ordered(7)), S(torch.bucketize, plain(4), ordered(2), right=True),
        S(torch.bucketize, plain(4), ordered(0), out_int32=True),
    ],
    "searchsorted": [
        S(torch.searchsorted, ordered(7), plain(4, 2)), S(torch.searchsorted, ordered(4, 7), plain(4, 2)),
        S(torch.searchsorted, ordered(2, 7), plain(2, 4), right=True), S(torch.searchsorted, ordered(5), plain()),
        S(torch.searchsorted, i(4, 7).double(), plain(4, 2), sorter=i(4, 7).argsort()),
        S(torch.searchsorted, ordered(7), plain(4), side="right", out_int32=True),
    ],
    "histc": [
        S(torch.histc, plain(7, 2), 4, -1, 1), S(torch.histc, plain(7), 4), S(torch.histc, plain(0, 4), 3, 0, 1),
        S(torch.histc, plain(2), bins=3, min=-2, max=2),
    ],
    "histogram": [
        S(torch.histogram, plain(7, 2), 4, range=(-1.0, 1.0)), S(torch.histogram, plain(7), 4),
        S(torch.histogram, plain(7, 2), ordered(5).unique()), S(torch.histogram, plain(7), 4, density=True),
        S(torch.histogram, plain(4, 2), 3, range=(-1.0, 1.0), weight=plain(4, 2)),
    ],
    "histogramdd": [
        S(torch.histogramdd, plain(7, 2), [3, 4], range=[-1.0, 1.0, -2.0, 2.0]), S(torch.histogramdd, plain(7, 2), 3),
        S(torch.histogramdd, plain(7, 2), [ordered(5).unique(), ordered(7).unique()]),
        S(torch.histogramdd, plain(7, 1), [3], range=[-1.0, 1.0], weight=plain(7)),
    ],
    "hash_tensor": [
        S(torch.hash_tensor, plain(7, 2)), S(torch.hash_tensor, i(7, 2), 0), S(torch.hash_tensor, plain(4, 1), 1),
        S(torch.hash_tensor, plain(2, 4), 0, keepdim=True),
    ],
    "quantile": [
        S(torch.quantile, r(7, 4), 0.3, 0), S(torch.quantile, r(7, 2), r(4).sigmoid(), 1),
        S(torch.quantile, r(2, 7), r(4).sigmoid(), dim=1, keepdim=True), S(torch.quantile, r(7), 0.5),
        S(torch.quantile, r(7, 4), 0.7, -1, interpolation="nearest"),
    ],
    "nanquantile": [
        S(torch.nanquantile, torch.where(i(7, 4) > 2, torch.nan, r(7, 4)), 0.3, 0),
        S(torch.nanquantile, r(2, 7), r(4).sigmoid(), dim=1, keepdim=True),
    ],
    "take": [
        S(torch.take, r(7, 2), i(4, low=-14, high=14)), S(torch.take, r(2, 4), i(4, 2, low=0, high=8)),
        S(T.take, r(7), i(0)), S(torch.take, r(2), i(1, low=0, high=2)),
    ],
    "put": [
        S(torch.put, r(7, 2), torch.tensor([3, -1, 0, 8]), r(4)), S(torch.put, r(7), i(5, low=-7, high=7), r(5), True),
        S(torch.put, r(2, 4), torch.tensor([[1, 7]]), r(2)), S(T.put_, r(7), torch.tensor([2, 5]), r(2)),
        S(T.put_, r(7, 2), i(4, low=0, high=14), r(4), accumulate=True),
    ],
}  # fmt: skip
