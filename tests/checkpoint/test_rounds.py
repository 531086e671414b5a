"""A load uses as few rounds of messages as possible, with extra rounds only if a rank asks for them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import shardwright as sw
from shardwright import checkpoint, comm
from shardwright.comm.coordinate import Channel
from shardwright.errors import CorruptionError, LoadMismatchError, RankFailedError
from shardwright.testing import run_ranks
from tests.checkpoint.stateful import CountingState


@contextmanager
def rounds() -> Iterator[list[str]]:
    """What ranks say to each other in the meantime, by the names of their rounds."""
    said: list[str] = []
    really = Channel.round

    def noted(self: Channel, payload: bytes, what: str, timeout: float) -> list[bytes]:
        said.append(what)
        return really(self, payload, what, timeout)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Channel, "round", noted)
        yield said


def rounds_of_load(state: Any, folder: str, **options: Any) -> list[str]:
    with rounds() as said:
        checkpoint.load(state, folder, **options)
    return said


def rows(value: float, placement: Any = None) -> sw.DTensor:
    mesh = sw.init_device_mesh("cpu", (comm.world().size,))
    return sw.distribute_tensor(torch.full((64, 8), value), mesh, [placement or sw.Shard(0)])


PLAIN = ["load", "load: checking", "load: reading"]


def _ordinary(folder: str) -> list[list[str]]:
    checkpoint.save({"w": rows(1.0), "b": [rows(2.0)]}, f"{folder}/tensors")
    state = {"w": rows(0.0), "b": [rows(0.0)]}
    found = [rounds_of_load(state, f"{folder}/tensors")]
    assert state["w"].full_tensor().eq(1).all()
    assert state["b"][0].full_tensor().eq(2).all()
    checkpoint.save({"w": rows(1.0), "step": 7}, f"{folder}/values")
    values = {"w": rows(0.0), "step": 0}
    found.append(rounds_of_load(values, f"{folder}/values"))
    assert values["step"] == 7
    return found


def test_loading_takes_four_rounds_for_tensors_and_one_more_for_plain_values(tmp_path: Path) -> None:
    assert run_ranks(4, _ordinary, str(tmp_path)) == [[PLAIN, [*PLAIN, "load: filling the state"]]] * 4


def _stages(folder: str) -> list[str]:
    """Each rank has a stage of its own, and lacks the names of the others'."""
    me = comm.rank()
    checkpoint.save({f"stage{me}": torch.full((4,), float(me))}, folder)
    state = {f"stage{me}": torch.zeros(4)}
    said = rounds_of_load(state, folder)
    assert state[f"stage{me}"].eq(me).all()
    return said


def test_ranks_with_different_names_plan_shared_reads_in_extra_rounds(tmp_path: Path) -> None:
    more = ["load: planning", "load: opening its files"]
    assert run_ranks(3, _stages, str(tmp_path)) == [[*PLAIN[:2], *more, "load: reading"]] * 3


def _columns(folder: str) -> list[str]:
    checkpoint.save({"w": rows(1.0)}, folder)
    state = {"w": rows(0.0, sw.Shard(1))}
    said = rounds_of_load(state, folder)
    assert state["w"].full_tensor().eq(1).all()
    return said


def test_shared_reads_take_three_more_rounds(tmp_path: Path) -> None:
    more = ["load: opening the window", "load: the window is open", "load: opening its files"]
    assert run_ranks(2, _columns, str(tmp_path)) == [[*PLAIN[:2], *more, "load: reading"]] * 2


def _lacking_on_one_rank(folder: str) -> tuple[list[str], list[str]]:
    checkpoint.save({"o": CountingState(a=1, b=2)}, folder)
    holder = CountingState(a=0) if comm.rank() else CountingState(a=0, b=0)
    said = rounds_of_load({"o": holder}, folder)
    return said, sorted(holder.state)


def test_missing_state_on_one_rank_is_created_in_three_more_rounds(tmp_path: Path) -> None:
    grown = ["load: comparing what ranks have", "load: creating missing state", "load: checking what was created"]
    said = [*PLAIN[:2], *grown, "load: reading", "load: filling the state"]
    # What the first rank has is the first rank's, and is not made for the second.
    assert run_ranks(2, _lacking_on_one_rank, str(tmp_path)) == [(said, ["a", "b"]), (said, ["a"])]


def _damage_on_one_rank(folder: str) -> tuple[str, int, int]:
    checkpoint.save({"w": rows(1.0), "count": CountingState(value=5)}, folder)
    if comm.rank() == 0:
        (file,) = Path(folder).glob("*-00001-0.safetensors")
        data = bytearray(file.read_bytes())
        data[-1] ^= 1
        file.write_bytes(data)
    comm.agree(lambda: None, what="damaging a file")
    holder = CountingState(value=0)
    with pytest.raises(RankFailedError) as error:
        checkpoint.load({"w": rows(0.0), "count": holder}, folder)
    return error.value.failures[0].kind, holder.state["value"], holder.given


def test_load_state_dict_is_called_on_no_rank_if_one_rank_cannot_read(tmp_path: Path) -> None:
    assert run_ranks(2, _damage_on_one_rank, str(tmp_path)) == [("CorruptionError", 0, 0)] * 2


def _misfit_and_missing_file(folder: str) -> tuple[str, bool]:
    checkpoint.save({"w": rows(1.0), "b": torch.ones(3)}, folder)
    if comm.rank() == 0:
        next(Path(folder).glob("*-00001-0.safetensors")).unlink()
    comm.agree(lambda: None, what="removing a file")
    target = rows(0.0)
    state = {"w": target, "b": torch.zeros(3) if comm.rank() else torch.zeros(4)}
    with pytest.raises((LoadMismatchError, CorruptionError, RankFailedError)) as error:
        checkpoint.load(state, folder)
    return type(error.value).__name__, bool(target.to_local().any())


def test_mismatches_are_raised_before_file_errors(tmp_path: Path) -> None:
    assert run_ranks(2, _misfit_and_missing_file, str(tmp_path)) == [("LoadMismatchError", False)] * 2
