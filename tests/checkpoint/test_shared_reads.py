"""Bytes that several ranks of a host need are read and verified once."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import shardwright as sw
from shardwright import checkpoint, comm
from shardwright.checkpoint.reading import collective_read, host_window
from shardwright.errors import RankFailedError
from shardwright.storage import LocalStorage
from shardwright.testing import run_ranks
from tests.checkpoint.calls import CountingReads

ROWS, COLUMNS, TENSORS = 1024, 512, 3


def whole(number: int) -> torch.Tensor:
    return torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(number))


def stored(folder: str) -> None:
    """A checkpoint of tensors cut by rows over four ranks, and of a small one that all have."""
    mesh = sw.init_device_mesh("cpu", (4,))
    state: dict[str, Any] = {
        f"w{n}": sw.distribute_tensor(whole(n), mesh, [sw.Shard(0)], src_data_rank=None) for n in range(TENSORS)
    }
    checkpoint.save({**state, "small": torch.arange(1000)}, folder)


def wanted(placement: sw.Placement) -> dict[str, Any]:
    mesh = sw.init_device_mesh("cpu", (4,))
    state: dict[str, Any] = {
        f"w{n}": sw.zeros(ROWS, COLUMNS, mesh=mesh, placements=[placement]) for n in range(TENSORS)
    }
    return {**state, "small": torch.zeros(1000, dtype=torch.int64)}


def is_right(state: dict[str, Any]) -> bool:
    layout = state["w0"].sharding
    right = all(
        torch.equal(state[f"w{n}"].to_local(), whole(n)[layout.region(comm.rank()).slices()]) for n in range(TENSORS)
    )
    return right and torch.equal(state["small"], torch.arange(1000))


def _load_all_ways(folder: str) -> dict[str, tuple[bool, int]]:
    stored(folder)
    found = {}
    for placement in (sw.Shard(0), sw.Shard(1), sw.Replicate()):
        counting = CountingReads()
        state = checkpoint.load(wanted(placement), LocalStorage(folder, counting))
        found[str(placement)] = (is_right(state), counting.read)
    return found


def test_four_ranks_together_read_every_byte_once(tmp_path: Path) -> None:
    found = run_ranks(4, _load_all_ways, str(tmp_path / "saved"))
    size = ROWS * COLUMNS * 4 * TENSORS + 8000
    # Each rank reads the manifest, too, and the headers of the files it reads from.
    manifest = (tmp_path / "saved" / "manifest.json").stat().st_size
    for placement in found[0]:
        assert all(one[placement][0] for one in found)
        read = sum(one[placement][1] for one in found)
        assert size <= read - 4 * manifest <= 1.05 * size, placement


def _load_without_a_window(folder: str) -> bool:
    stored(folder)
    collective_read.open_window = lambda *_: None  # type: ignore[assignment]  # as where /dev/shm is full
    try:
        return is_right(checkpoint.load(wanted(sw.Shard(1)), folder))
    finally:
        collective_read.open_window = host_window.open_window


def test_each_rank_reads_alone_without_shared_memory(tmp_path: Path) -> None:
    assert all(run_ranks(4, _load_without_a_window, str(tmp_path)))


def _load_damaged(folder: str) -> tuple[str, float]:
    stored(folder)
    if comm.rank() == 0:
        (file,) = Path(folder).glob("*-00002-0.safetensors")
        with open(file, "r+b") as data:
            data.seek(file.stat().st_size - 5)
            byte = data.read(1)[0]
            data.seek(-1, os.SEEK_CUR)
            data.write(bytes([byte ^ 4]))
    comm.agree(lambda: None, what="damaging a file")
    start = time.monotonic()
    with pytest.raises(RankFailedError) as error:
        checkpoint.load(wanted(sw.Shard(1)), folder)
    return str(error.value), time.monotonic() - start


def test_corruption_found_by_one_reader_raises_on_all_within_seconds(tmp_path: Path) -> None:
    found = run_ranks(4, _load_damaged, str(tmp_path))
    assert len({message for message, _ in found}) == 1
    assert "CorruptionError" in found[0][0]
    assert "00002-0.safetensors" in found[0][0]
    assert "already changed, in whole or in part: 'w0', 'w1', 'w2'" in found[0][0]
    assert max(seconds for _, seconds in found) < 10


def _leftovers(folder: str) -> list[str]:
    stored(folder)
    checkpoint.load(wanted(sw.Shard(1)), folder)
    return [name for name in os.listdir("/dev/shm") if name.startswith(f"shardwright-{os.getpid()}-")]


def test_shared_reads_leave_nothing_in_shared_memory(tmp_path: Path) -> None:
    assert run_ranks(4, _leftovers, str(tmp_path)) == [[]] * 4
