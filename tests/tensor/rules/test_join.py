"""Joins and splits match torch for every layout of every input."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

import shardwright as sw
from shardwright.testing import run_ranks


def real(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(shape, dtype=torch.float64, generator=generator).requires_grad_()


JOINS = [
    ("cat rows", lambda x, y: torch.cat([x, y]), [real(5, 2), real(2, 2)]),
    ("cat columns", lambda x, y: torch.cat((x, y, x), dim=-1), [real(4, 2), real(4, 1)]),
    ("cat vectors", lambda x, y: torch.concat([x, y], axis=0), [real(4), real(1)]),
    ("cat with nothing", lambda x: torch.cat([x, x.new_zeros(0)]), [real(4, 2)]),
    ("cat of types", lambda x, y: torch.cat([x.float(), y]), [real(4), real(3)]),
    ("stack", lambda x, y: torch.stack([x, y], 1), [real(4, 2), real(4, 2, seed=1)]),
    ("stack in front of the last", lambda x, y: torch.stack([x, y], -1), [real(4), real(4, seed=1)]),
    ("hstack", lambda x, y: torch.hstack([x, y]), [real(4, 2), real(4, 3)]),
    ("hstack of vectors", lambda x, y: torch.hstack((x, y)), [real(4), real(3)]),
    ("vstack", lambda x, y: torch.vstack([x, y]), [real(4), real(2, 4)]),
    ("dstack", lambda x, y: torch.dstack([x, y]), [real(4), real(4, seed=1)]),
    ("column_stack", lambda x, y: torch.column_stack([x, y]), [real(4), real(4, 2)]),
    ("meshgrid", lambda x, y: torch.meshgrid(x, y, indexing="ij"), [real(4), real(2)]),
    ("meshgrid as in pictures", lambda x, y: torch.meshgrid([x, y], indexing="xy"), [real(4), real(2)]),
    ("cartesian_prod", lambda x, y: torch.cartesian_prod(x, y), [real(4), real(2)]),
    ("block_diag", lambda x, y: torch.block_diag(x, y), [real(4, 1), real(2, 3)]),
]


def test_joins_match_torch_for_every_layout(against_torch: Callable[..., None]) -> None:
    against_torch((3,), JOINS)
    against_torch((2, 2), JOINS[:6], max_combinations=12)


SPLITS = [
    ("split", lambda x: x.split(2), [real(5, 2)]),
    ("split into sizes", lambda x: torch.split(x, [1, 0, 4], dim=0), [real(5, 2)]),
    ("split columns", lambda x: torch.split(tensor=x, split_size_or_sections=2, dim=-1), [real(2, 5)]),
    ("split_with_sizes", lambda x: x.split_with_sizes([2, 3]), [real(5, 2)]),
    ("unsafe_split", lambda x: x.unsafe_split(3), [real(5, 2)]),
    ("chunk", lambda x: x.chunk(3), [real(7, 2)]),
    ("chunk all", lambda x: x.chunk(1, 1), [real(4, 2)]),
    ("unsafe_chunk", lambda x: torch.unsafe_chunk(x, 2), [real(5, 2)]),
    ("tensor_split", lambda x: x.tensor_split(3), [real(5, 2)]),
    ("tensor_split at indices", lambda x: torch.tensor_split(x, (3, 1, 9)), [real(5, 2)]),
    ("hsplit", lambda x: torch.hsplit(x, 2), [real(3, 4)]),
    ("vsplit", lambda x: torch.vsplit(x, [1, 3]), [real(4, 3)]),
    ("dsplit", lambda x: torch.dsplit(x, 2), [real(2, 1, 4)]),
    ("unbind columns", lambda x: x.unbind(1), [real(5, 2)]),
    ("split and joined again", lambda x: torch.cat([part * 2 for part in x.split(2)]), [real(5, 2)]),
]


def test_splits_match_torch_for_every_layout(against_torch: Callable[..., None]) -> None:
    against_torch((3,), SPLITS)
    against_torch((2, 2), SPLITS[:10:3], max_combinations=12)


def test_joining_along_a_sharded_dimension_gives_every_rank_its_share() -> None:
    def check() -> str:
        mesh = sw.init_device_mesh("cpu", (3,))
        x = sw.distribute_tensor(torch.arange(5.0), mesh, [sw.Shard(0)])
        return str(torch.cat([x, x + 5, x[:1]]).sharding)

    assert run_ranks(3, check)[0] == "[11] (0: S(0))"


def test_splits_of_a_sharded_dimension_are_views_of_the_original() -> None:
    def check() -> None:
        mesh = sw.init_device_mesh("cpu", (3,))
        x = sw.distribute_tensor(torch.zeros(7), mesh, [sw.Shard(0)])
        with sw.communication("explicit"):
            for index, part in enumerate(x.split(3)):
                part += index
            x.chunk(2)[1].mul_(10)
        assert x.tolist() == [0, 0, 0, 1, 10, 10, 20]

    run_ranks(3, check)
