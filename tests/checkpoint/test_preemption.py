"""SIGTERM: recorded, agreed on by all ranks, followed by a save; the previous handler is restored."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import shardwright as sw
from shardwright import checkpoint, comm
from shardwright.checkpoint import CheckpointManager
from shardwright.checkpoint.manage.preemption import Preemption
from shardwright.errors import CheckpointError
from shardwright.testing import run_ranks


@pytest.fixture(autouse=True)
def _handler_as_before() -> Iterator[None]:
    before = signal.getsignal(signal.SIGTERM)
    yield
    assert signal.getsignal(signal.SIGTERM) == before
    signal.signal(signal.SIGTERM, before)


def test_the_previous_handler_is_called_and_restored() -> None:
    heard: list[int] = []
    first = signal.signal(signal.SIGTERM, lambda number, _frame: heard.append(number))
    try:
        mine = signal.getsignal(signal.SIGTERM)
        preemption = Preemption()
        assert not preemption.on_any_rank(comm.world())
        os.kill(os.getpid(), signal.SIGTERM)
        assert preemption.on_any_rank(comm.world())
        assert heard == [signal.SIGTERM]
        preemption.close()
        assert signal.getsignal(signal.SIGTERM) is mine
    finally:
        signal.signal(signal.SIGTERM, first)


def test_a_handler_installed_later_is_not_replaced() -> None:
    preemption = Preemption()
    later = signal.SIG_IGN
    ours = signal.signal(signal.SIGTERM, later)
    try:
        preemption.close()
        assert signal.getsignal(signal.SIGTERM) is later
    finally:
        signal.signal(signal.SIGTERM, ours)
        preemption.close()


def test_installing_the_handler_outside_the_main_thread_raises() -> None:
    raised: list[str] = []

    def listen() -> None:
        try:
            Preemption()
        except CheckpointError as error:
            raised.append(str(error))

    thread = threading.Thread(target=listen)
    thread.start()
    thread.join()
    assert raised == ["save_on_sigterm: Python lets only the main thread handle signals"]


def test_the_manager_restores_the_handler_even_if_the_loop_raises(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)

    def train() -> None:
        with CheckpointManager(tmp_path, save_on_sigterm=True):
            assert signal.getsignal(signal.SIGTERM) != before
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        train()
    assert signal.getsignal(signal.SIGTERM) == before


@pytest.mark.parametrize("background", [False, True])
def test_sigterm_saves_the_step_and_ends_the_loop(tmp_path: Path, background: bool) -> None:
    state = {"w": torch.zeros(3)}
    with CheckpointManager(tmp_path, save_every=100, save_on_sigterm=True, background=background) as manager:
        for step in range(1, 1000):
            state["w"] += 1
            if step == 7:
                os.kill(os.getpid(), signal.SIGTERM)
            if manager.step_end(step, state, {"loss": 0.5}):
                break
        assert checkpoint.read(manager.path(7))["w"].tolist() == [7.0] * 3  # it is safe before step_end returns
        assert (step, manager.steps(), manager.metrics(7)) == (7, [7], {"loss": 0.5})


def test_sigterm_does_not_save_a_step_twice(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path, save_on_sigterm=True) as manager:
        manager.save(5, {"w": torch.ones(1)})
        before = os.stat(Path(manager.path(5), "manifest.json")).st_ino
        os.kill(os.getpid(), signal.SIGTERM)
        assert manager.step_end(5, {"w": torch.ones(1)})
        assert os.stat(Path(manager.path(5), "manifest.json")).st_ino == before


def _train_until_told(root: str, pids: str, background: bool) -> tuple[int, bool, list[int]]:
    """Trains; rank 2 alone gets a real SIGTERM from another process, at a moment of its own."""
    rank = comm.world().rank
    mesh = sw.init_device_mesh("cpu", (4,))
    weights = sw.distribute_tensor(torch.arange(10.0), mesh, [sw.Shard(0)])
    state = {"w": weights, "step": 0}
    with CheckpointManager(root, save_every=50, keep_last=1, save_on_sigterm=True, background=background) as manager:
        if rank == 2:
            Path(pids).write_text(str(os.getpid()))
        for step in range(1, 100_000):
            weights += 1
            state["step"] = step
            if manager.step_end(step, state):
                return step, signal.getsignal(signal.SIGTERM) != signal.SIG_DFL, manager.steps()
    raise AssertionError("nobody was told")


@pytest.mark.parametrize("background", [False, True])
def test_sigterm_on_one_rank_saves_the_same_step_on_all(tmp_path: Path, background: bool) -> None:
    note = tmp_path / "pid"
    stop = threading.Event()

    def send() -> None:
        while not stop.wait(0.05):
            if note.exists() and note.read_text():
                stop.wait(0.2)
                os.kill(int(note.read_text()), signal.SIGTERM)
                return

    sender = threading.Thread(target=send)
    sender.start()
    try:
        found = run_ranks(4, _train_until_told, str(tmp_path / "run"), str(note), background)
    finally:
        stop.set()
        sender.join()
    step = found[0][0]
    assert found == [(step, True, [step])] * 4
    loaded = checkpoint.read(tmp_path / "run" / f"step-{step:08d}")
    assert loaded["step"] == step
    assert loaded["w"].tolist() == [value + step for value in range(10)]
