"""Repeats, padding, unfolding and indexed writes match torch for every layout."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812  # torch's own short name
from torch import Tensor


def real(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(shape, dtype=torch.float64, generator=generator).requires_grad_()


def count(*shape: int, high: int) -> Tensor:
    return torch.randint(high, shape, generator=torch.Generator().manual_seed(high))


ARRANGED = [
    ("tril", lambda x: x.tril(), [real(5, 4)]),
    ("triu", lambda x: torch.triu(x, -1), [real(2, 4, 5)]),
    ("triu of a slice", lambda x: torch.triu(input=x[1:], diagonal=1), [real(6, 4)]),
    ("roll", lambda x: x.roll(1, 0), [real(4, 2)]),
    ("roll all", lambda x: x.roll(3), [real(4, 2)]),
    ("flip", lambda x: x.flip(0), [real(4, 2)]),
    ("fliplr", lambda x: torch.fliplr(x), [real(4, 2)]),
    ("flipud", lambda x: torch.flipud(x), [real(4, 2)]),
    ("rot90", lambda x: torch.rot90(x, 1, [0, 1]), [real(4, 2)]),
    ("pad columns", lambda x: F.pad(x, (1, 2)), [real(4, 2)]),
    ("pad rows with a value", lambda x: F.pad(x, (0, 0, 2, 1), value=3.0), [real(4, 2)]),
    ("pad and cut off", lambda x: F.pad(x, (1, -1, -1, 1)), [real(4, 2)]),
    ("pad by reflection", lambda x: F.pad(x, (1, 1), mode="reflect"), [real(2, 4, 3)]),
    ("repeat", lambda x: x.repeat(2, 1, 3), [real(4, 2)]),
    ("tile", lambda x: x.tile(2), [real(4, 2)]),
    ("repeat_interleave", lambda x: x.repeat_interleave(2, 0), [real(4, 2)]),
    ("repeat_interleave, sized", lambda x: torch.repeat_interleave(x, 2, dim=0, output_size=8), [real(4, 2)]),
    ("repeat_interleave all", lambda x: x.repeat_interleave(3), [real(4, 2)]),
    ("diagonal", lambda x: x.diagonal(), [real(4, 2)]),
    ("diagonal of matrices", lambda x: torch.linalg.diagonal(x), [real(4, 2, 3)]),
    ("diag", lambda x: x.diag(), [real(4)]),
    ("diag_embed", lambda x: torch.diag_embed(x), [real(4, 2)]),
    ("trace", lambda x: x.trace(), [real(4, 3)]),
    ("unfold", lambda x: x.unfold(0, 2, 1), [real(5, 2)]),
    ("sort", lambda x: x.sort(0), [real(5, 2)]),
    ("argsort", lambda x: x.argsort(dim=-1, descending=True), [real(5, 2)]),
    ("msort", lambda x: torch.msort(x), [real(5, 2)]),
    ("topk", lambda x: x.topk(2, 0), [real(5, 2)]),
    ("kthvalue", lambda x: torch.kthvalue(x, 2, dim=0, keepdim=True), [real(5, 2)]),
    ("isin", lambda x, y: torch.isin(x, y), [count(5, high=4), count(5, high=3)]),
    ("bucketize", lambda x, y: torch.bucketize(x, y), [real(5), torch.tensor([-1.0, 0.0, 1.0], dtype=torch.float64)]),
    ("unique", lambda x: torch.unique(x), [count(5, high=4)]),
]


def test_repeat_pad_and_unfold_match_torch(against_torch: Callable[..., None]) -> None:
    against_torch((3,), ARRANGED)
    against_torch((2, 2), ARRANGED[::3], max_combinations=9)


CHOSEN = [
    ("index_add", lambda x, i, v: x.index_add(0, i, v), [real(4, 2), count(3, high=4), real(3, 2)]),
    ("index_copy", lambda x, v: x.index_copy(1, x.new_ones(1, dtype=torch.long), v), [real(4, 2), real(4, 1)]),
    ("index_fill", lambda x, i: x.index_fill(0, i, 2.5), [real(4, 2), count(2, high=4)]),
    ("scatter", lambda x, i, v: x.scatter(0, i, v), [real(4, 2), torch.tensor([[3, 0]]), real(1, 2)]),
    ("scatter a value", lambda x, i: x.scatter(1, i, 2.5), [real(4, 2), count(4, 1, high=2)]),
    ("scatter_add", lambda x, i, v: x.scatter_add(1, i, v), [real(4, 2), count(4, 3, high=2), real(4, 3)]),
    ("reduced", lambda x, i, v: x.scatter_reduce(0, i, v, "amax"), [real(4, 2), count(2, 2, high=4), real(2, 2)]),
    ("index_put", lambda x, i, v: x.index_put((i,), v, accumulate=True), [real(4, 2), count(3, high=4), real(3, 2)]),
    ("masked_scatter", lambda x, v: x.masked_scatter(x.detach() > 0, v), [real(4, 2), real(4, 2, seed=1)]),
]


def test_indexed_writes_match_torch(against_torch: Callable[..., None]) -> None:
    against_torch((3,), CHOSEN, max_combinations=20)
    against_torch((2, 2), CHOSEN[::3], max_combinations=9)


def test_in_place_writes_keep_the_layout_and_the_values(against_torch: Callable[..., None]) -> None:
    def inside(write: Callable[..., Any]) -> Callable[..., Any]:
        def call(x: Any, *others: Any) -> Any:
            target = x * 1
            before = getattr(target, "placements", None)
            assert write(target, *others) is target
            assert getattr(target, "placements", None) == before
            return target

        return call

    cases = [
        ("index_add_", lambda x, i, v: x.index_add_(0, i, v), [real(4, 2), count(3, high=4), real(3, 2)]),
        ("index_copy_", lambda x, i, v: x.index_copy_(0, i, v), [real(4, 2), torch.tensor([2, 0]), real(2, 2)]),
        ("index_fill_", lambda x, i: x.index_fill_(0, i, 2.5), [real(4, 2), count(2, high=4)]),
        ("scatter_", lambda x, i: x.scatter_(0, i, 2.5), [real(4, 2), count(1, 2, high=2)]),
        ("scatter_add_", lambda x, i, v: x.scatter_add_(1, i, v), [real(4, 2), count(4, 3, high=2), real(4, 3)]),
        ("index_put_", lambda x, i, v: x.index_put_((i,), v), [real(4, 2), torch.tensor([3, 1]), real(2, 2)]),
        ("put_", lambda x, i, v: x.put_(i, v), [real(4, 2), torch.tensor([3, 1]), real(2)]),
        ("masked_scatter_", lambda x, v: x.masked_scatter_(x.detach() > 0, v), [real(4, 2), real(4, 2, seed=1)]),
        ("tril_", lambda x: x.tril_(1), [real(4, 3)]),
        ("fill_diagonal_", lambda x: x.fill_diagonal_(2.5), [real(4, 3)]),
    ]
    against_torch((3,), [(name, inside(write), tensors) for name, write, tensors in cases], max_combinations=20)
