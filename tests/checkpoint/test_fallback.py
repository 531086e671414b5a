"""`restore` loads exactly one step, or raises and says that the state is undefined; it never mixes two steps."""

from __future__ import annotations

import importlib
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

import shardwright as sw
from shardwright import comm
from shardwright.checkpoint import CheckpointManager, CheckpointWarning
from shardwright.errors import CheckpointError, CorruptionError, LoadMismatchError, StorageError
from shardwright.storage import Calls
from shardwright.testing import run_ranks

manager_module: Any = importlib.import_module("shardwright.checkpoint.manager")
SIZE = 300_000  # more than one block


def full(number: float) -> torch.Tensor:
    return torch.full((SIZE,), float(number))


def damage_end_of(manager: CheckpointManager, step: int) -> None:
    """Flip the last bit of every data file: what comes before it is read by then."""
    for path in Path(manager.path(step)).glob("*.safetensors"):
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)


def two_steps(root: Path) -> CheckpointManager:
    """Step 20 has a tensor that step 10 lacks, and is damaged in its last block."""
    manager = CheckpointManager(root)
    manager.save(10, {"z": full(10)})
    manager.save(20, {"a": full(20), "z": full(20)})
    damage_end_of(manager, 20)
    return manager


@pytest.mark.parametrize("on_missing", ["keep", lambda _name: "keep"])
def test_restore_with_on_missing_keep_leaves_no_values_of_a_corrupted_step(tmp_path: Path, on_missing: Any) -> None:
    manager = two_steps(tmp_path)
    state = {"a": full(0), "z": full(0), "new": full(5)}
    with pytest.warns(CheckpointWarning, match="skipped\n  step 20: CorruptionError"):
        assert manager.restore(state, on_missing=on_missing) == 10
    assert [state[name].unique().tolist() for name in ("a", "z", "new")] == [[0], [10], [5]]


def test_restore_leaves_no_values_of_a_corrupted_step_on_any_rank(tmp_path: Path) -> None:
    def body() -> list[list[float]]:
        mesh = sw.init_device_mesh("cpu", (2,))

        def cut(number: float) -> sw.DTensor:
            return sw.distribute_tensor(full(number), mesh, [sw.Shard(0)])

        manager = CheckpointManager(tmp_path)
        manager.save(10, {"z": cut(10)})
        manager.save(20, {"a": cut(20), "z": cut(20)})
        if comm.rank() == 0:
            damage_end_of(manager, 20)
        comm.gather_bytes(b"damaged")
        state = {"a": cut(0), "z": cut(0)}
        with pytest.warns(CheckpointWarning, match="step 20"):
            assert manager.restore(state, on_missing="keep") == 10
        return [state[name].to_local().unique().tolist() for name in ("a", "z")]

    assert run_ranks(2, body) == [[[0.0], [10.0]]] * 2


def test_restore_does_not_verify_a_step_if_an_older_one_has_all_its_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager = CheckpointManager(tmp_path)
    for step in (10, 20, 30):
        manager.save(step, {"a": full(step)})
    damage_end_of(manager, 30)
    verified: list[int] = []
    monkeypatch.setattr(manager_module.CheckpointManager, "_verify", lambda _self, step: verified.append(step))
    state = {"a": full(0), "b": full(1)}
    with pytest.warns(CheckpointWarning, match="step 30"):
        assert manager.restore(state, on_missing="keep") == 20
    assert (verified, state["a"].unique().tolist(), state["b"].unique().tolist()) == ([], [20], [1])


def test_corruption_after_verification_raises_with_the_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    manager = two_steps(tmp_path)
    monkeypatch.setattr(manager_module.CheckpointManager, "_verify", lambda _self, _step: None)  # it was good then
    state = {"a": full(0), "z": full(0)}
    with pytest.raises(CheckpointError, match=r"step 20 is corrupted.*step 10 does not have 'a'.*undefined.*step=10"):
        manager.restore(state, on_missing="keep")
    fresh = {"a": full(0), "z": full(0)}
    assert manager.restore(fresh, step=10, on_missing="keep") == 10


def test_a_mismatch_with_an_older_step_notes_that_the_state_is_undefined(tmp_path: Path) -> None:
    manager = two_steps(tmp_path)
    with pytest.raises(LoadMismatchError) as raised:
        manager.restore({"a": full(0), "z": full(0)})
    assert raised.value.__notes__ == [
        "the state is undefined: it may hold values of corrupted steps that were tried first: 20"
    ]


def test_an_io_error_during_verification_is_not_treated_as_corruption(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager = two_steps(tmp_path)
    real = Calls.preadv

    def fail(self: Calls, fd: int, buffers: Any, offset: int) -> int:
        if offset > 100_000:
            raise OSError(5, "Input/output error")
        return real(self, fd, buffers, offset)

    monkeypatch.setattr(Calls, "preadv", fail)
    state = {"a": full(0), "z": full(0)}
    with pytest.raises(StorageError, match="Input/output error"):
        manager.restore(state, on_missing="keep")
    assert state["a"].unique().tolist() == [0]
    with pytest.raises(StorageError, match=r"already changed, in whole or in part: 'a', 'z'"):
        manager.restore(state, step=20)


def test_restore_raises_if_the_only_step_is_corrupted(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path)
    manager.save(10, {"a": full(10)})
    damage_end_of(manager, 10)
    with warnings.catch_warnings(), pytest.raises(CheckpointError, match="the state may have been changed") as raised:
        manager.restore({"a": full(0), "b": full(0)}, on_missing="keep")
    assert isinstance(raised.value.__cause__, CorruptionError)
