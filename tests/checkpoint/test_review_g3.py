"""Runs that were sent back, ranks that are slow or killed while they load, and what a load tells, takes and reads."""

from __future__ import annotations

import io
import json
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import shardwright as sw
from shardwright import checkpoint, comm
from shardwright.checkpoint import CheckpointManager, CheckpointWarning
from shardwright.checkpoint.reading import collective_read, host_window
from shardwright.checkpoint.reading.host_window import HostWindow, Process
from shardwright.checkpoint.runtime import progress
from shardwright.checkpoint.runtime.windows import window_size
from shardwright.errors import ArgumentTypeError, CheckpointError, RankLostError, RegionError, StorageError
from shardwright.storage import Calls, LocalStorage
from shardwright.testing import Died, Raised, outcomes, run_ranks

MIB = 1 << 20


def state(value: float) -> dict[str, Any]:
    return {"w": torch.full((10,), float(value))}


def noting(sizes: list[Any]) -> Any:
    """torch.empty, which notes what it makes."""
    empty = torch.empty

    def noted(*size: Any, **kind: Any) -> torch.Tensor:
        sizes.append(size[0])
        return empty(*size, **kind)

    return noted


def fill_up(root: Path, *steps: int, sign: int = 1, **options: Any) -> None:
    with CheckpointManager(root, **options) as run:
        for step in steps:
            run.save(step, state(sign * step), {"loss": 1 / step})


def restored(root: Path, step: int | None = None) -> tuple[int | None, float]:
    """What a new process would go on from."""
    with CheckpointManager(root) as run:
        target = state(0)
        return run.restore(target, step), float(target["w"][0])


def go_back(root: Path, to: int, *steps: int, **options: Any) -> CheckpointManager:
    run = CheckpointManager(root, **options)
    run.restore(state(0), step=to)
    for step in steps:
        run.save(step, state(-step), {"loss": float(step)})
    return run


# Going back


def test_after_going_back_and_a_crash_the_new_run_is_continued_and_the_old_is_still_there(tmp_path: Path) -> None:
    fill_up(tmp_path, *range(10, 110, 10))
    run = go_back(tmp_path, 50)
    assert (run.latest(), run.superseded(), restored(tmp_path)) == (100, [], (100, 100))  # nothing was saved yet
    run.save(60, state(-60))
    assert run.steps() == list(range(10, 110, 10))
    assert (run.latest(), run.superseded()) == (60, [70, 80, 90, 100])
    assert restored(tmp_path) == (60, -60)
    assert restored(tmp_path, step=100) == (100, 100)
    with CheckpointManager(tmp_path).reading() as path:
        assert path == run.path(60)
    fresh = CheckpointManager(tmp_path)
    assert fresh.restore(state(0)) == 60
    fresh.save(70, state(-70), {"loss": 9.0})  # in place of what was left behind
    fresh.save(75, state(-75), {"loss": 9.0})
    assert (fresh.latest(), fresh.superseded(), fresh.best("loss")) == (75, [80, 90, 100], 50)
    fresh.remove(60)  # whichever step of the new run is left knows it
    assert restored(tmp_path) == (75, -75)
    said = json.loads(Path(fresh.path(75), "manifest.json").read_bytes())["manager"]
    assert (said["parent"], said["line"], sorted(said["superseded"])) == (60, 1, ["100", "80", "90"])


def test_what_was_left_behind_goes_by_the_rules_once_the_run_has_passed_it_and_takes_no_place(tmp_path: Path) -> None:
    fill_up(tmp_path, 10, 20, 30, 40, 50)
    run = go_back(tmp_path, 20, 25, keep_last=2)
    assert run.steps() == [20, 25, 30, 40, 50]
    run.save(35, state(-35))
    assert (run.steps(), run.superseded()) == ([25, 30, 35, 40, 50], [30, 40, 50])  # 30 is not older than the last two
    run.save(45, state(-45))
    assert run.steps() == [35, 40, 45, 50]
    run.save(55, state(-55))
    assert (run.steps(), run.superseded(), restored(tmp_path)) == ([45, 50, 55], [50], (55, -55))
    run.save(65, state(-65))
    assert (run.steps(), run.superseded()) == ([55, 65], [])


def test_who_returns_to_a_run_that_was_left_behind_continues_that(tmp_path: Path) -> None:
    fill_up(tmp_path, 10, 20, 30)
    go_back(tmp_path, 10, 15)
    assert restored(tmp_path) == (15, -15)
    go_back(tmp_path, 30, 40)
    run = CheckpointManager(tmp_path)
    assert (run.superseded(), run.latest()) == ([15], 40)
    run.remove(40)
    assert restored(tmp_path) == (15, -15)  # nobody is left who knows better
    go_back(tmp_path, 30, 40)
    with open(next(Path(run.path(40)).glob("*.safetensors")), "r+b") as file:
        file.truncate(5000)
    with pytest.warns(CheckpointWarning, match="step 40"):
        assert restored(tmp_path) == (30, 30)


def _save_and_wait(run: CheckpointManager, step: int) -> None:
    run.save(step, state(-step))
    run.wait()


def test_a_first_save_that_fails_marks_nothing_and_the_next_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise StorageError("the disk is gone")

    fill_up(tmp_path, 10, 20, 30)
    for background in (False, True):
        run = go_back(tmp_path, 10, background=background)
        with monkeypatch.context() as patched:
            patched.setattr(LocalStorage, "replace", fail)
            with pytest.raises(StorageError, match="gone"):
                _save_and_wait(run, 15)
        assert CheckpointManager(tmp_path).latest() == 30
        _save_and_wait(run, 15)
        assert restored(tmp_path) == (15, -15)
        run.remove(15)


def _go_back_on_ranks(folder: str) -> list[Any]:
    root = Path(folder)
    fill_up(root, 10, 20, 30)
    run = CheckpointManager(root, save_every=10)
    run.restore(state(0))
    run.save(40, state(40))
    run.restore(state(0), step=10)
    run.step_end(40, state(-40))  # the number that this manager saved last, of another run now
    return [run.latest(), run.superseded(), restored(root)]


def test_all_ranks_go_back_together_within_one_manager(tmp_path: Path) -> None:
    assert run_ranks(2, _go_back_on_ranks, str(tmp_path)) == [[40, [20, 30], (40, -40)]] * 2


def test_a_step_that_was_asked_for_and_is_the_newest_begins_no_line(tmp_path: Path) -> None:
    fill_up(tmp_path, 10, 20)
    run = go_back(tmp_path, 20, 30)
    said = json.loads(Path(run.path(30), "manifest.json").read_bytes())["manager"]
    assert (said["parent"], said["line"], said["superseded"]) == (20, 0, {})


# Slow ranks, killed ranks


def stored(folder: str, rows: int = 512) -> None:
    mesh = sw.init_device_mesh("cpu", (2,))
    whole = torch.arange(rows * 4096.0).reshape(rows, 4096)
    checkpoint.save({"w": sw.distribute_tensor(whole, mesh, [sw.Shard(0)], src_data_rank=None)}, folder)


def wanted(dim: int, rows: int = 512) -> dict[str, Any]:
    mesh = sw.init_device_mesh("cpu", (2,))
    return {"w": sw.zeros(rows, 4096, mesh=mesh, placements=[sw.Shard(dim)])}


def is_right(found: dict[str, Any], dim: int, rows: int = 512) -> bool:
    whole = torch.arange(rows * 4096.0).reshape(rows, 4096)
    return torch.equal(found["w"].to_local(), whole.chunk(2, dim)[comm.rank()])


def _load_slowly(folder: str) -> list[bool]:
    stored(folder)
    os.environ["SHARDWRIGHT_TIMEOUT"] = "0.6"
    collective_read._MIN_BYTES_PER_SECOND = 2 * MIB

    def slow(done: int, total: int) -> None:
        time.sleep(1.2 * 4 * MIB / total if done >= total and comm.rank() else 0)

    try:
        return [is_right(checkpoint.load(wanted(dim), folder, progress=slow), dim) for dim in (0, 1)]
    finally:
        del os.environ["SHARDWRIGHT_TIMEOUT"]
        collective_read._MIN_BYTES_PER_SECOND = 5 * MIB


def test_a_rank_that_is_slow_but_alive_is_waited_for(tmp_path: Path) -> None:
    assert run_ranks(2, _load_slowly, str(tmp_path)) == [[True, True]] * 2


def _load_and_die(folder: str) -> None:
    stored(folder, rows=4096)

    def die(done: int, total: int) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    began = time.monotonic()
    try:
        checkpoint.load(wanted(1, rows=4096), folder, progress=die if comm.rank() else None)
    except RankLostError as error:
        raise RuntimeError(f"lost {error.ranks} after {time.monotonic() - began:.2f} s") from error


def test_a_rank_that_is_killed_while_ranks_read_together_is_named_at_once(tmp_path: Path) -> None:
    first, second = outcomes(2, _load_and_die, str(tmp_path), grace=30)
    assert isinstance(second, Died)
    assert isinstance(first, Raised)
    message = str(first)
    assert "lost (1,) after" in message
    assert float(message.split(" after ")[1].split()[0]) < 5


def test_a_process_is_gone_when_it_has_ended_even_if_nobody_has_collected_it() -> None:
    own = Process.own()
    assert own is not None
    assert not own.is_gone()
    assert own._replace(began="1").is_gone()  # its number is another's now
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
    began = host_window._state_of(child)[1]
    assert own._replace(pid=child, began=began).is_gone()
    os.waitpid(child, 0)
    assert own._replace(pid=child, began=began).is_gone()


# What a load tells and takes


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


def test_a_load_tells_the_bytes_that_this_rank_fills_whatever_memory_it_may_use(tmp_path: Path) -> None:
    for found in run_ranks(2, _hear, str(tmp_path)):
        for right, heard in found:
            assert right
            assert {total for _, total in heard} == {8 * MIB}
            assert [done for done, _ in heard] == sorted({done for done, _ in heard})
            assert heard[-1][0] == 8 * MIB


def test_a_plain_load_tells_its_bytes_and_takes_no_more_memory_than_it_may(
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


def test_a_load_that_takes_long_shows_a_bar_on_a_terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_the_slots_of_the_window_fit_in_the_memory_of_every_rank(tmp_path: Path) -> None:
    assert run_ranks(2, _windows, str(tmp_path)) == [[4 * MIB, MIB, 2 * MIB]] * 2  # in 3 MiB: each read alone


def test_the_manager_passes_on_memory_progress_and_what_may_be_missing(tmp_path: Path) -> None:
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


# Verifying


def test_verify_reports_truths_that_are_neither(tmp_path: Path) -> None:
    good, bad = torch.ones(2 * MIB, dtype=torch.bool), torch.ones(2 * MIB, dtype=torch.uint8)
    bad[MIB + 5] = 2
    checkpoint.save({"good": good, "bad": bad.view(torch.bool), "other": bad}, tmp_path)
    report = checkpoint.verify(tmp_path)
    assert not report
    (damage,) = report.corruptions
    assert (damage.tensor, damage.block) == ("bad", 1)
    assert "neither 0 nor 1" in str(damage)


# Slices


class Counting(Calls):
    """The calls, with the bytes that were read."""

    def __init__(self) -> None:
        self.read = 0

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        got = super().preadv(fd, buffers, offset)
        self.read += got
        return got


def test_a_slice_with_a_wide_step_reads_and_holds_only_what_it_wants(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = torch.arange(8000 * 600, dtype=torch.int32).reshape(8000, 600)
    cube = torch.arange(40 * 30 * 5000, dtype=torch.int32).reshape(40, 30, 5000)
    truths = torch.arange(4 * MIB).reshape(4, MIB) % 3 == 0
    checkpoint.save({"w": whole, "c": cube, "t": truths}, tmp_path)
    calls = Counting()
    with checkpoint.open(LocalStorage(str(tmp_path), calls)) as saved:
        assert torch.equal(saved["w"][:1], whole[:1])
        sizes: list[Any] = []
        before = calls.read
        with monkeypatch.context() as patched:
            patched.setattr(torch, "empty", noting(sizes))
            assert torch.equal(saved["w"][::4000], whole[::4000])
        assert calls.read - before <= 3 * MIB
        assert [2, 600] in sizes
        assert [4001, 600] not in sizes
        rows: list[Any] = [np.s_[::-3000], np.s_[7000:10:-2500, 5:9], np.s_[None, ::5000, None, ::-7], np.s_[::3, 3]]
        for index in rows:
            assert np.array_equal(saved.numpy("w")[index], whole.numpy()[index]), index
        layers: list[Any] = [np.s_[::-9, ::11, 3:7], np.s_[..., ::29, ::2], np.s_[3, None, ::-14], np.s_[5:5:20]]
        for index in [*layers, np.s_[::20]]:
            assert np.array_equal(saved.numpy("c")[index], cube.numpy()[index]), index
        assert torch.equal(saved["t"][::2], truths[::2])


def test_a_slice_that_makes_no_sense_is_refused_with_its_dimension(tmp_path: Path) -> None:
    checkpoint.save({"w": torch.ones(4, 4)}, tmp_path)
    with checkpoint.open(tmp_path) as saved:
        with pytest.raises(RegionError, match=r"slice\(None, None, 0\) of dimension 1: the step must not be 0"):
            saved["w"][:, ::0]
        with pytest.raises(ArgumentTypeError, match=r"slice\('a', None, None\) of dimension 0"):
            saved["w"]["a":]
