"""Work in threads: every part runs once, a slow thread does not block the others, and system calls are few."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from shardwright import checkpoint
from shardwright.checkpoint.runtime.parallel import Stop, in_threads
from shardwright.checkpoint.writing import staging
from shardwright.storage import Calls, LocalStorage

MIB = 1 << 20
PARTS = [(number, number + 1) for number in range(7)]


@pytest.mark.parametrize("threads", [None, 1, 2, 20])
def test_every_part_runs_once_in_at_most_the_given_threads(threads: int | None) -> None:
    done: list[int] = []
    seen: set[int] = set()

    def work(first: int, last: int, stop: Stop) -> None:
        seen.add(threading.get_ident())
        done.extend(range(first, last))

    in_threads(work, PARTS, threads)
    assert sorted(done) == list(range(7))
    assert len(seen) <= (threads or 7)


def test_a_slow_thread_does_not_block_the_others() -> None:
    rest = threading.Event()
    done: list[int] = []

    def work(first: int, last: int, stop: Stop) -> None:
        if first == 0:
            assert rest.wait(30)  # it ends only because somebody else does all the others
        done.append(first)
        if len(done) == 6:
            rest.set()

    in_threads(work, PARTS, threads=2)
    assert done == [1, 2, 3, 4, 5, 6, 0]


def test_work_runs_in_the_calling_thread_if_no_thread_can_start(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    done: list[int] = []
    in_threads(lambda first, last, stop: done.append(first), PARTS)
    assert done == list(range(7))


def test_no_part_starts_after_an_error() -> None:
    begun: list[int] = []

    def work(first: int, last: int, stop: Stop) -> None:
        begun.append(first)
        if first == 2:
            raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        in_threads(work, PARTS, threads=1)
    assert begun == [0, 1, 2]


def test_copying_in_small_pieces_stores_the_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staging, "_MIN_PER_THREAD", MIB)
    monkeypatch.setattr(staging, "_BYTES_PER_TURN", 2 * MIB)
    monkeypatch.setattr(staging, "_PIECE", 1000)
    state = {str(n): torch.randint(0, 256, (n * 700_001,), dtype=torch.uint8) for n in range(1, 6)}
    checkpoint.async_save(state, tmp_path, threads=3).wait()
    loaded = checkpoint.read(tmp_path)
    assert all(torch.equal(loaded[name], tensor) for name, tensor in state.items())


class Reads(Calls):
    """The buffers of every call that reads."""

    def __init__(self) -> None:
        self.sizes: list[list[int]] = []

    def preadv(self, fd: int, buffers: Any, offset: int) -> int:
        self.sizes.append([buffer.nbytes for buffer in buffers])
        return super().preadv(fd, buffers, offset)


def reads_of(sizes: Sequence[int], folder: Path) -> list[list[int]]:
    """What is read when tensors of so many bytes are loaded: the calls for their data."""
    state = {f"{n:05}": torch.randint(0, 256, (size,), dtype=torch.uint8) for n, size in enumerate(sizes)}
    checkpoint.save(state, folder)
    reads = Reads()
    target = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    checkpoint.load(target, LocalStorage(folder, reads), threads=1)
    assert all(torch.equal(target[name], tensor) for name, tensor in state.items())
    while sum(map(sum, reads.sizes)) > sum(sizes):  # the manifest and the header come before
        del reads.sizes[0]
    return reads.sizes


def test_adjacent_tensors_are_read_with_one_call(tmp_path: Path) -> None:
    quarter = MIB // 4
    assert reads_of([2 * MIB + quarter, MIB + quarter, quarter], tmp_path) == [
        [MIB],
        [MIB],
        [quarter, MIB],
        [quarter, quarter],
    ]


def test_many_small_tensors_are_read_with_few_calls(tmp_path: Path) -> None:
    assert [len(call) for call in reads_of([10_000] * 400, tmp_path)] == [105, 105, 105, 85]
    assert [len(call) for call in reads_of([10] * 2500, tmp_path)] == [1000, 1000, 500]
