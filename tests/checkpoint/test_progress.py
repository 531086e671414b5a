"""Progress of a save: reported to a callback, or shown as a bar on a terminal if the save is long."""

from __future__ import annotations

import io
import sys
import threading
from pathlib import Path

import pytest
import torch

from shardwright import checkpoint, comm
from shardwright.checkpoint.runtime import progress
from shardwright.checkpoint.runtime.progress import Meter, reporting
from shardwright.errors import RankFailedError
from shardwright.testing import run_ranks

MIB = 1 << 20


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("background", [False, True])
def test_the_callback_reports_every_byte_once_in_order(tmp_path: Path, background: bool) -> None:
    heard: list[tuple[int, int]] = []
    state = {"a": torch.rand(6 * MIB), "b": torch.rand(100, MIB // 20).t(), "c": torch.ones(3)}
    if background:
        checkpoint.async_save(state, tmp_path, progress=lambda *said: heard.append(said)).wait()
    else:
        checkpoint.save(state, tmp_path, progress=lambda *said: heard.append(said))
    total = sum(tensor.numel() * 4 for tensor in state.values())
    assert len(heard) > 3
    assert {said for _, said in heard} == {total}
    done = [said for said, _ in heard]
    assert done == sorted(set(done))
    assert done[-1] == total


def test_each_rank_reports_its_own_bytes(tmp_path: Path) -> None:
    def body(folder: str) -> tuple[int, int]:
        last = (0, 0)

        def hear(done: int, total: int) -> None:
            nonlocal last
            last = (done, total)

        checkpoint.save({"w": torch.ones(4 * MIB)}, folder, progress=hear)
        return last

    assert run_ranks(4, body, str(tmp_path)) == [(4 * MIB, 4 * MIB)] * 4


def test_a_callback_that_raises_aborts_the_save_and_keeps_the_checkpoint(tmp_path: Path) -> None:
    def fail(done: int, total: int) -> None:
        raise ZeroDivisionError("no more")

    checkpoint.save({"w": torch.ones(2)}, tmp_path)
    with pytest.raises(RankFailedError, match="ZeroDivisionError: no more"):
        checkpoint.save({"w": torch.zeros(2)}, tmp_path, progress=fail)
    with pytest.raises(RankFailedError, match="ZeroDivisionError: no more"):
        checkpoint.async_save({"w": torch.zeros(2)}, tmp_path, progress=fail).wait()
    assert checkpoint.read(tmp_path)["w"].tolist() == [1, 1]
    assert len(list(tmp_path.glob("*.safetensors"))) == 1


def test_progress_sums_over_threads() -> None:
    heard: list[int] = []
    meter = Meter(8000, lambda done, total: heard.append(done))
    threads = [threading.Thread(target=lambda: [meter(1) for _ in range(1000)]) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert heard == list(range(1, 8001))


def test_no_progress_bar_is_printed_without_a_terminal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress, "_BAR_DELAY", 0)
    checkpoint.save({"w": torch.ones(MIB)}, tmp_path)
    checkpoint.async_save({"w": torch.ones(MIB)}, tmp_path).wait()
    assert capfd.readouterr() == ("", "")


def test_a_long_save_prints_a_progress_bar_on_a_terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "_BAR_DELAY", 0)
    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    checkpoint.save({"w": torch.ones(3 * MIB)}, tmp_path)
    assert "saving" in terminal.getvalue()
    assert "12.6" in terminal.getvalue()  # MB


def test_short_saves_and_saves_with_a_callback_print_no_progress_bar(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "_BAR_DELAY", 60)
    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    checkpoint.save({"w": torch.ones(MIB)}, tmp_path)
    monkeypatch.setattr(progress, "_BAR_DELAY", 0)
    checkpoint.save({"w": torch.ones(MIB)}, tmp_path, progress=lambda done, total: None)
    checkpoint.async_save({"w": torch.ones(MIB)}, tmp_path).wait()  # a bar would cut through what the program prints
    assert terminal.getvalue() == ""


def test_only_rank_0_prints_a_progress_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "_BAR_DELAY", 0)
    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    with reporting("saving", 10, None, comm.Group((0, 1), 1, None)) as meter:
        meter(10)
    assert terminal.getvalue() == ""
    with reporting("saving", 10, None, comm.Group((0, 1), 0, None)) as meter:
        meter(10)
    assert "saving" in terminal.getvalue()
