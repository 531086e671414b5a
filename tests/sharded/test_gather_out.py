"""gather validates `out` on all ranks before any communication, and fills every valid buffer."""

from __future__ import annotations

from typing import Any

import torch

from shardwright import comm, sharded
from shardwright.sharded import (
    ChunkShardingSpec,
)
from shardwright.testing import run_ranks
from tests.sharded.specs_and_errors import chunks, error_or_result

HERE = ChunkShardingSpec(0, ["rank:0/cpu"] * 2)


def test_gather_into_an_invalid_buffer_raises_on_all_ranks() -> None:
    def work() -> list[str]:
        x = ChunkShardingSpec(1, ["rank:0/cpu", "rank:1/cpu"]).shard(torch.arange(8.0).reshape(2, 4))
        bad: list[Any] = [
            "x",
            torch.zeros(1, 1).expand(2, 4),
            torch.zeros(8).as_strided((2, 4), (1, 1)),
            torch.zeros(2, 4).to_sparse(),
            torch.zeros(2, 4, device="meta"),
            sharded.zeros(chunks(0, 1), 2, 4),
        ]
        found = [error_or_result(lambda out=out: x.gather(0, None if comm.rank() else out)) for out in bad]
        found.append(error_or_result(lambda: x.gather(0, dtype="float32")))
        interlaced = torch.zeros(10).as_strided((2, 4), (3, 2))  # 0 2 4 6 and 3 5 7 9: unusual strides without overlap
        for fine in (torch.zeros(7, 9)[::5, ::2][:, :4], interlaced):
            got = x.gather(0, out=None if comm.rank() else fine)
            assert got is None or torch.equal(got, torch.arange(8.0).reshape(2, 4))
        return found

    first, second = run_ranks(2, work)
    assert first == second
    wanted = [
        "`out` must be a plain tensor, got str",
        "share memory",
        "share memory",
        "torch.sparse_coo on cpu",
        "on meta",
    ]
    wanted += ["`out` must be a plain tensor, got ShardedTensor", "dtype must be a torch.dtype, got 'float32'"]
    for text, part in zip(first, wanted, strict=True):
        assert part in text


def test_gather_fills_a_negative_view() -> None:
    base = torch.zeros(4, dtype=torch.complex64)
    out = base.conj().imag
    assert out.is_neg()
    assert sharded.ones(HERE, 4).gather(out=out) is out
    assert out.tolist() == [1.0] * 4
    assert base.imag.tolist() == [-1.0] * 4
