"""The memory a save needs beside the state is bounded, whatever the tensor sizes."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from shardwright import checkpoint
from shardwright.checkpoint.format.data_file import BLOCK
from shardwright.checkpoint.writing import data_writer as write
from shardwright.errors import CheckpointError
from shardwright.storage import Calls, LocalStorage

MIB = 1 << 20

MEASURE = """
import resource, sys, torch
from shardwright import checkpoint

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

whole = torch.ones(20 << 20).view(2560, -1)  # 80 MiB
pairs = torch.view_as_complex(whole.view(2560, -1, 2))
states = {
    "contiguous": {"w": whole},
    "many": {str(n): row for n, row in enumerate(whole)},
    "sliced": {"w": whole[:, 1:]},
    "strided": {"w": whole.t()},
    "conjugated": {"w": pairs.conj()},
}
before = peak()
for kind, state in states.items():
    checkpoint.save(state, sys.argv[1])
    print(kind, peak() - before)
"""


def test_save_needs_less_than_64_mb_of_extra_memory(tmp_path: Path) -> None:
    ran = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", MEASURE, tmp_path], capture_output=True, text=True, timeout=120
    )
    assert ran.returncode == 0, ran.stderr
    found = {kind: int(more) for kind, more in (line.split() for line in ran.stdout.splitlines())}
    assert len(found) == 5
    assert max(found.values()) < 64 * MIB, found


class Counted(Calls):
    """Remembers how many bytes each write had."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        self.sizes.append(sum(buffer.nbytes for buffer in buffers))
        return super().pwritev(fd, buffers, offset)


@pytest.mark.parametrize("memory", [BLOCK, 3 * MIB, 5 * MIB, None])
def test_save_respects_the_memory_limit(tmp_path: Path, memory: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    empty = torch.empty

    def counting(*args: object, **how: object) -> torch.Tensor:
        found = empty(*args, **how)  # type: ignore[call-overload]  # whatever was given
        if found.dtype == torch.uint8:
            made.append(found.nbytes)
        return found  # type: ignore[no-any-return]  # likewise

    monkeypatch.setattr(write.torch, "empty", counting)
    calls = Counted()
    weights = torch.rand(1024, 8 * 1024)
    checkpoint.save({"a": weights.t(), "b": weights[:, ::2]}, LocalStorage(tmp_path, calls), memory=memory)
    monkeypatch.undo()
    assert made
    assert sum(made) <= (memory if memory is not None else 16 * MIB)
    assert max(calls.sizes) <= max(made)
    loaded = checkpoint.read(tmp_path)
    assert torch.equal(loaded["a"], weights.t())
    assert torch.equal(loaded["b"], weights[:, ::2])


@pytest.mark.parametrize("again", [checkpoint.save, checkpoint.async_save])
def test_a_memory_limit_below_one_block_raises(tmp_path: Path, again: object) -> None:
    with pytest.raises(CheckpointError, match=r"memory must be at least 1048576 bytes \(one block\), got 1000"):
        again({"w": torch.ones(1)}, tmp_path, memory=1000)  # type: ignore[operator]  # either function
    assert list(tmp_path.iterdir()) == []
