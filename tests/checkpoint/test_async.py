"""Background saves store the state at the time of the call, report every failure, and reuse bounded buffers."""

from __future__ import annotations

import copy
import errno
import os
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import shardwright as sw
from shardwright import checkpoint, comm
from shardwright.checkpoint.format.data_file import BLOCK, DataFile
from shardwright.checkpoint.format.tensor_table import TensorTable
from shardwright.checkpoint.format.write_layout import file_plan
from shardwright.checkpoint.writing import staging
from shardwright.checkpoint.writing.data_writer import Blocks
from shardwright.errors import CheckpointError, RankFailedError, SaveTimeoutError, StateError, StorageError
from shardwright.layout import Layout, Mesh, Replicate
from shardwright.storage import Calls, LocalStorage
from shardwright.testing import Died, Raised, outcomes, run_ranks
from tests.checkpoint.calls import Gate

MIB = 1 << 20


class Full(Calls):
    """A disk without space, while `full`."""

    full = True

    def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        if self.full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return super().pwritev(fd, buffers, offset)


def test_async_save_stores_the_state_at_the_time_of_the_call(tmp_path: Path) -> None:
    state = {"w": torch.arange(300_000.0).reshape(500, 600).t(), "epoch": 3}
    before = state["w"].clone()
    gate = Gate()
    saving = checkpoint.async_save(state, LocalStorage(tmp_path, gate))
    state["w"].zero_()
    state["epoch"] = 4
    gate.opened.set()
    saving.wait()
    loaded = checkpoint.read(tmp_path)
    assert torch.equal(loaded["w"], before)
    assert loaded["epoch"] == 3
    assert saving.done()
    assert saving.path == str(tmp_path)
    assert saving.progress == (1_200_000, 1_200_000)


DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.bool, torch.complex64, torch.float8_e5m2)


@st.composite
def states(draw: st.DrawFn) -> dict[str, Any]:
    """Tensors of many dtypes, whole, strided, empty, conjugated, shared; arrays; values."""
    dice = torch.Generator().manual_seed(draw(st.integers(0, 1 << 30)))
    state: dict[str, Any] = {"values": [1, {"lr": 0.1}], "step": draw(st.integers(0, 9))}
    for number in range(draw(st.integers(1, 6))):
        shape = tuple(draw(st.lists(st.integers(0, 40), max_size=3)))
        dtype = draw(st.sampled_from(DTYPES))
        tensor = torch.randint(0, 2, shape, generator=dice).to(dtype)
        match draw(st.sampled_from(["plain", "turned", "sliced", "conj", "alias", "array"])):
            case "turned" if tensor.ndim > 1:
                tensor = tensor.transpose(0, -1)
            case "sliced" if tensor.ndim and tensor.shape[0] > 1:
                tensor = tensor[1::2]
            case "conj" if tensor.is_complex():
                tensor = tensor.conj()
            case "alias":
                state[f"same{number}"] = tensor
            case "array" if dtype not in (torch.bfloat16, torch.float8_e5m2):
                state[f"t{number}"] = tensor.numpy().copy()
                continue
        state[f"t{number}"] = tensor
    if draw(st.booleans()):
        state["large"] = torch.rand(700_000, generator=dice)  # some blocks
    return state


def _spoil(value: Any) -> None:
    match value:
        case torch.Tensor():
            value.copy_(torch.ones_like(value, dtype=torch.float32).mul(3).to(value.dtype))
        case np.ndarray():
            value[...] = 7
        case dict():
            for each in list(value.values()):
                _spoil(each)
            value["later"] = 1
        case list():
            for each in value:
                _spoil(each)
            value.append("later")


def _same(one: Any, other: Any) -> bool:
    match one:
        case torch.Tensor():
            # bit by bit: float8 has no equality
            raw = [torch.empty(t.shape, dtype=t.dtype).copy_(t).view(-1).view(torch.uint8) for t in (one, other)]
            return one.dtype == other.dtype and one.shape == other.shape and torch.equal(*raw)
        case np.ndarray():
            return one.dtype == other.dtype and np.array_equal(one, other)
        case dict():
            return one.keys() == other.keys() and all(_same(one[key], other[key]) for key in one)
        case list():
            return len(one) == len(other) and all(map(_same, one, other))
    return bool(one == other)


@given(state=states(), memory=st.sampled_from([None, BLOCK, 2 * BLOCK + 5]))
def test_changes_after_async_save_are_not_stored(
    tmp_path_factory: pytest.TempPathFactory, state: dict[str, Any], memory: int | None
) -> None:
    folder = tmp_path_factory.mktemp("async")
    before = copy.deepcopy(state)
    gate = Gate()
    if memory is not None:  # windows are written before it returns
        gate.opened.set()
    saving = checkpoint.async_save(state, LocalStorage(folder, gate), memory=memory)
    _spoil(state)
    gate.opened.set()
    saving.wait()
    assert _same(checkpoint.read(folder), before)


def test_each_rank_copies_only_the_bytes_it_writes_and_aliases_once(tmp_path: Path) -> None:
    def body(folder: str) -> tuple[int, int]:
        weights = torch.arange(4.0 * MIB)
        saving = checkpoint.async_save({"w": weights, "tied": weights, "rank": checkpoint.PerRank(comm.rank())}, folder)
        weights.zero_()
        saving.wait()
        kept = staging.buffers.kept
        checkpoint.release_buffers()
        return saving.progress.total, kept

    found = run_ranks(4, body, str(tmp_path))
    assert [total for total, _ in found] == [4 * MIB] * 4  # 16 MiB, held by all
    assert [kept for _, kept in found] == [4 * MIB] * 4
    loaded = checkpoint.read(tmp_path)
    assert torch.equal(loaded["w"], torch.arange(4.0 * MIB))
    assert loaded["w"] is loaded["tied"]


def test_ranks_can_communicate_during_background_saves(tmp_path: Path) -> None:
    def body(folder: str) -> list[int]:
        mesh = sw.init_device_mesh("cpu", (4,))
        whole = torch.arange(40_000.0).reshape(200, 200)
        sharded, turned = (sw.distribute_tensor(whole, mesh, [sw.Shard(dim)]) for dim in (0, 1))
        handles = []
        seen = []
        for step in range(3):
            state = {"a": sharded, "b": turned, "step": step, "own": checkpoint.PerRank(torch.tensor([comm.rank()]))}
            handles.append(checkpoint.async_save(state, f"{folder}/{step}"))
            for _ in range(5):
                sharded.add_(1)
                turned.mul_(2)
                seen.append(int(comm.all_reduce(torch.tensor([comm.rank()])).item()))
                comm.agree(lambda: None, what="a step")
        for handle in handles:
            handle.wait()
        return seen

    assert run_ranks(4, body, str(tmp_path)) == [[6] * 15] * 4
    whole = torch.arange(40_000.0).reshape(200, 200)
    for step in range(3):
        loaded = checkpoint.read(tmp_path / str(step))
        assert torch.equal(loaded["a"], whole + 5 * step)
        assert torch.equal(loaded["b"], whole * 2 ** (5 * step))
        assert loaded["step"] == step


def test_the_next_save_waits_until_staging_buffers_are_free(tmp_path: Path) -> None:
    checkpoint.release_buffers()
    gate = Gate()
    state = {"w": torch.ones(MIB)}
    allocations = staging.buffers.allocations
    first = checkpoint.async_save(state, LocalStorage(tmp_path / "1", gate))
    started: list[checkpoint.AsyncSave] = []
    second = threading.Thread(target=lambda: started.append(checkpoint.async_save(state, tmp_path / "2")))
    second.start()
    second.join(0.3)
    assert second.is_alive()
    assert not first.done()
    with pytest.raises(SaveTimeoutError, match=r"has not ended after 0.01 s: 0 of 4194304 bytes"):
        first.wait(0.01)
    gate.opened.set()
    second.join(30)
    started[0].wait()
    first.wait()
    assert staging.buffers.allocations == allocations + 1
    assert staging.buffers.kept == 4 * MIB


def test_a_second_save_allocates_its_own_buffers_if_memory_allows(tmp_path: Path) -> None:
    checkpoint.release_buffers()
    gate = Gate()
    state = {"w": torch.ones(MIB)}
    allocations = staging.buffers.allocations
    first = checkpoint.async_save(state, LocalStorage(tmp_path / "1", gate))
    second = checkpoint.async_save(state, tmp_path / "2", memory=8 * MIB)
    assert not first.done()
    gate.opened.set()
    second.wait()
    assert first.done()  # they are written in order
    assert staging.buffers.allocations == allocations + 2
    checkpoint.release_buffers()
    assert staging.buffers.kept == 0


def test_background_saves_to_one_directory_run_in_order(tmp_path: Path) -> None:
    for step in range(4):
        checkpoint.async_save({"w": torch.full((MIB,), float(step))}, tmp_path, memory=64 * MIB)
    checkpoint.save({"w": torch.full((3,), 9.0)}, tmp_path / "other")  # waits for all of them
    assert checkpoint.read(tmp_path)["w"].unique().tolist() == [3.0]


def test_async_save_blocks_until_only_the_last_window_is_unwritten_if_memory_is_small(tmp_path: Path) -> None:
    checkpoint.release_buffers()
    state = {"a": torch.rand(MIB), "b": torch.rand(3, MIB // 2).t(), "c": torch.rand(7)}
    before = copy.deepcopy(state)
    saving = checkpoint.async_save(state, tmp_path, memory=2 * MIB)
    total = 10 * MIB + 28
    assert saving.progress.total == total
    assert saving.progress.written >= total - 2 * MIB
    for tensor in state.values():
        tensor.zero_()
    saving.wait()
    assert staging.buffers.kept == 2 * MIB
    assert _same(checkpoint.read(tmp_path), before)


@given(st.lists(st.integers(0, 5 * BLOCK), max_size=6), st.integers(BLOCK, 7 * BLOCK))
def test_windows_contain_every_block_once_and_respect_the_memory_limit(sizes: list[int], memory: int) -> None:
    shardings = [Layout(Mesh((1,)), [Replicate()], (size,)) for size in sizes]
    names = [str(number) for number in range(len(sizes))]
    file = DataFile(file_plan(TensorTable.of(names, ["uint8"] * len(sizes), [1] * len(sizes), shardings), 0), "")
    nbytes = Blocks.of(file, np.zeros(len(file.plan.tensors), np.int64)).nbytes
    runs = staging.windows(file, memory)
    assert [block for first, last in runs for block in range(first, last)] == list(range(len(nbytes)))
    for number, (first, last) in enumerate(runs):
        assert nbytes[first:last].sum() <= memory
        if number:
            assert nbytes[first - 1 : last].sum() > memory  # none could be longer


def test_wait_raises_the_failure_and_the_old_checkpoint_is_kept(tmp_path: Path) -> None:
    checkpoint.save({"w": torch.ones(3)}, tmp_path)
    saving = checkpoint.async_save({"w": torch.zeros(3)}, LocalStorage(tmp_path, Full()))
    for _ in range(2):
        with pytest.raises(StorageError, match="no space is left on the device"):
            saving.wait()
    assert saving.done()
    assert "failed" in repr(saving)
    assert checkpoint.read(tmp_path)["w"].tolist() == [1, 1, 1]
    assert [path.name for path in tmp_path.iterdir() if path.suffix == ".safetensors"] != []
    checkpoint.save({"w": torch.zeros(3)}, tmp_path)  # it was told: nothing is raised here
    assert checkpoint.read(tmp_path)["w"].tolist() == [0, 0, 0]


@pytest.mark.parametrize("again", [checkpoint.save, checkpoint.async_save])
def test_an_unreported_failure_is_raised_by_the_next_save_to_any_directory(tmp_path: Path, again: Any) -> None:
    saving = checkpoint.async_save({"w": torch.zeros(3)}, LocalStorage(tmp_path / "full", Full()))
    while not saving.done():
        pass
    with pytest.raises(CheckpointError, match=r"(?s)to .*full has failed: .*no space is left") as raised:
        again({"w": torch.ones(1)}, tmp_path / "next")
    assert isinstance(raised.value.__cause__, StorageError)
    assert not (tmp_path / "next").exists()
    handle = again({"w": torch.ones(1)}, tmp_path / "next")
    if handle is not None:
        handle.wait()
    assert checkpoint.read(tmp_path / "next")["w"].tolist() == [1]


def test_a_background_failure_on_one_rank_is_raised_on_all(tmp_path: Path) -> None:
    def body(folder: str) -> tuple[str, bool]:
        place = LocalStorage(folder, Full() if comm.rank() == 2 else None)
        saving = checkpoint.async_save({"w": torch.zeros(MIB)}, place)
        comm.agree(lambda: None, what="something else")
        with pytest.raises(RankFailedError) as raised:
            saving.wait()
        checkpoint.async_save({"w": torch.ones(MIB)}, folder).wait()
        return str(raised.value), os.path.exists(f"{folder}/manifest.json")

    found = run_ranks(4, body, str(tmp_path))
    assert len(set(found)) == 1
    assert "rank 2: StorageError" in found[0][0]
    assert checkpoint.read(tmp_path)["w"].unique().tolist() == [1]
    assert len(list(tmp_path.glob("*.safetensors"))) == 4


def test_a_rank_killed_during_a_background_save_is_named_on_the_others(tmp_path: Path) -> None:
    class Deadly(Calls):
        def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
            os.kill(os.getpid(), signal.SIGKILL)
            return 0

    def body(folder: str) -> None:
        checkpoint.save({"w": torch.zeros(MIB)}, folder)
        place = LocalStorage(folder, Deadly() if comm.rank() == 1 else None)
        checkpoint.async_save({"w": torch.ones(MIB)}, place).wait(15)

    found = outcomes(3, body, str(tmp_path), timeout=40)
    assert isinstance(found[1], Died)
    for other in (found[0], found[2]):
        assert isinstance(other, Raised)
        assert other.kind == "RankLostError"
        assert "rank 1" in str(other)
    assert checkpoint.read(tmp_path)["w"].unique().tolist() == [0]


EXIT = """
import os, sys, time, torch
from shardwright import checkpoint
from shardwright.checkpoint import background
from shardwright.storage import Calls, LocalStorage

class Slow(Calls):
    def pwritev(self, fd, buffers, offset):
        while weights[0]:  # however busy the machine is, it is not done before the process is
            time.sleep(0.01)
        time.sleep(0.5)
        return super().pwritev(fd, buffers, offset)

class Full(Calls):
    def pwritev(self, fd, buffers, offset):
        raise OSError(28, "No space")

background._EXIT_NOTICE_DELAY = 0.1
weights = torch.ones(5 << 20)  # enough for several threads
checkpoint.async_save({"w": weights}, sys.argv[3]).wait()
checkpoint.async_save({"w": weights}, LocalStorage(sys.argv[1], Slow()), memory=64 << 20)
child = os.fork()
if child == 0:  # it has no part in the save, and no buffers
    checkpoint.async_save({"w": weights[:1000]}, sys.argv[3]).wait()
    sys.exit(0)
assert os.waitpid(child, 0)[1] == 0
checkpoint.async_save({"w": weights}, LocalStorage(sys.argv[2], Full()), memory=64 << 20)
weights.zero_()
"""


def test_process_exit_waits_for_background_saves_and_prints_their_failures(tmp_path: Path) -> None:
    good, bad, child = tmp_path / "good", tmp_path / "bad", tmp_path / "child"
    ended = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", EXIT, good, bad, child], capture_output=True, text=True, timeout=120
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stderr.count(f"shardwright: finishing the save to {good}: ") == 1
    assert checkpoint.read(child)["w"].shape == (1000,)
    assert checkpoint.read(good)["w"].unique().tolist() == [1]
    assert f"shardwright: the save to {bad} has failed: StorageError: cannot write " in ended.stderr
    assert "no space is left on the device" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_forget_waits_for_background_saves(tmp_path: Path) -> None:
    def body(folder: str) -> bool:
        saving = checkpoint.async_save({"w": torch.ones(4 * MIB)}, folder)
        comm.forget()
        return saving.done()

    assert run_ranks(3, body, str(tmp_path)) == [True] * 3
    assert checkpoint.read(tmp_path)["w"].unique().tolist() == [1]


def test_async_save_raises_state_errors_immediately(tmp_path: Path) -> None:
    with pytest.raises(StateError, match=r"hook: builtins\.builtin_function"):
        checkpoint.async_save({"hook": print}, tmp_path)
    checkpoint.async_save({}, tmp_path).wait()  # the lock was let go, and nothing is nothing
    assert checkpoint.read(tmp_path) == {}


def test_async_save_releases_the_callers_tensors_once_they_are_copied(tmp_path: Path) -> None:
    gate = Gate()
    array = np.ones(1000, np.float32)
    memory = weakref.ref(array)
    state = {"w": torch.from_numpy(array), "sharded": {"v": torch.zeros(3)}}
    saving = checkpoint.async_save(state, LocalStorage(tmp_path, gate))
    del state, array
    assert memory() is None
    gate.opened.set()
    saving.wait()
    assert checkpoint.read(tmp_path)["w"].unique().tolist() == [1]
