"""Progress and memory of a load."""

from __future__ import annotations

import io
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from shardwright import checkpoint, comm
from shardwright.checkpoint import CheckpointManager
from shardwright.checkpoint.reading import collective_read, host_window
from shardwright.checkpoint.reading.host_window import HostWindow
from shardwright.checkpoint.runtime import progress
from shardwright.checkpoint.runtime.windows import window_size
from shardwright.errors import CheckpointError
from shardwright.testing import run_ranks
from tests.checkpoint.allocations import noting
from tests.checkpoint.two_ranks import is_right, stored, wanted

MIB = 1 << 20


def state(value: float) -> dict[str, Any]:
    return {"w": torch.full((10,), float(value))}


def _hear(folder: str) -> list[tuple[bool, list[tuple[int, int]]]]:
    stored(folder, rows=1024)
    found = []
    for dim in (0, 1):
        for memory in (None, MIB, 4 * MIB, 64 * MIB):
            heard: list[tuple[int, int]] = []
            state = checkpoint.load(
                wanted(dim, 1024), folder, memory=memory, progress=lambda *said, to=heard: to.append(said)
            )
            found.append((is_right(state, dim, 1024), heard))
    return found


def test_load_reports_the_bytes_filled_on_this_rank_for_any_memory_limit(tmp_path: Path) -> None:
    for found in run_ranks(2, _hear, str(tmp_path)):
        for right, heard in found:
            assert right
            assert {total for _, total in heard} == {8 * MIB}
            assert [done for done, _ in heard] == sorted({done for done, _ in heard})
            assert heard[-1][0] == 8 * MIB


def test_load_and_read_report_progress_and_respect_the_memory_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint.save({"w": torch.ones(3000, 1000), "b": torch.ones(5)}, tmp_path)
    made: list[Any] = []
    for memory in (None, MIB, 5 * MIB):
        heard: list[tuple[int, int]] = []
        target = {"w": torch.zeros(1000, 3000).t(), "b": torch.zeros(5)}  # strided: through windows
        with monkeypatch.context() as patched:
            patched.setattr(torch, "empty", noting(made))
            checkpoint.load(target, tmp_path, memory=memory, progress=lambda *said, to=heard: to.append(said))
        assert bool((target["w"] == 1).all())
        assert heard[-1] == (12_000_020, 12_000_020)
        assert sum(size for size in made if isinstance(size, int)) <= (16 * MIB if memory is None else memory)
        made.clear()
    assert window_size(MIB, 2) == (MIB, 1)
    heard = []
    checkpoint.read(tmp_path, progress=lambda *said: heard.append(said))
    assert heard[-1] == (12_000_020, 12_000_020)
    with pytest.raises(CheckpointError, match=r"memory must be at least 1048576 bytes \(one block\), got 1000"):
        checkpoint.load(target, tmp_path, memory=1000)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_long_load_shows_a_progress_bar_on_a_terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint.save({"w": torch.ones(MIB)}, tmp_path)
    for patience, shows in ((60, False), (0, True)):
        terminal = Terminal()
        monkeypatch.setattr(progress, "_BAR_DELAY", patience)
        monkeypatch.setattr(sys, "stderr", terminal)
        checkpoint.load({"w": torch.zeros(MIB)}, tmp_path)
        checkpoint.read(tmp_path)
        monkeypatch.undo()
        assert ("loading" in terminal.getvalue()) == shows


def _windows(folder: str) -> list[int]:
    stored(folder)
    sizes = []
    opened = host_window.open_window

    def note(*args: Any) -> HostWindow | None:
        window = opened(*args)
        sizes.append(0 if window is None else window.slot)
        return window

    collective_read.open_window = note  # type: ignore[attr-defined,assignment]  # to look on
    try:
        for memory in (None, 3 * MIB, 4 * MIB, 11 * MIB):
            # What one rank cannot afford, none does.
            checkpoint.load(wanted(1), folder, memory=memory if comm.rank() else None)
    finally:
        collective_read.open_window = opened  # type: ignore[attr-defined]  # as it was
    return sizes


def test_window_slots_fit_the_memory_limit_of_every_rank(tmp_path: Path) -> None:
    assert run_ranks(2, _windows, str(tmp_path)) == [[4 * MIB, MIB, 2 * MIB]] * 2  # in 3 MiB: each read alone


def test_the_manager_passes_memory_progress_and_on_missing_to_load(tmp_path: Path) -> None:
    run = CheckpointManager(tmp_path, save_every=2)
    saved: list[Any] = []
    loaded: list[Any] = []
    run.save(1, state(1), memory=MIB, check_replicas=True, progress=lambda *said: saved.append(said))
    run.step_end(2, state(2), memory=MIB, check_replicas=True, progress=lambda *said: saved.append(said))
    assert saved == [(40, 40)] * 2
    target = {**state(0), "new": torch.ones(2)}
    assert run.restore(target, on_missing="keep", memory=MIB, progress=lambda *said: loaded.append(said)) == 2
    assert loaded == [(40, 40)]
    assert target["new"].tolist() == [1, 1]
    with pytest.raises(CheckpointError, match=r"memory must be at least 1048576 bytes \(one block\), got 7"):
        run.save(3, state(3), memory=7)
    with pytest.raises(CheckpointError, match=r"memory must be at least 1048576 bytes \(one block\), got 7"):
        run.restore(state(0), memory=7)
