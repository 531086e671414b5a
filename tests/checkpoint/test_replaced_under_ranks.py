"""If files are gone because the checkpoint was replaced, all ranks read the new one together."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import shardwright as sw
from shardwright import checkpoint, comm
from shardwright.checkpoint.reading.match import Match, match_state
from shardwright.errors import CorruptionError, RankFailedError
from shardwright.testing import run_ranks


def _load_while_it_is_replaced(folder: str) -> list[float]:
    """The checkpoint is replaced, and the old files removed, after the ranks have read its manifest."""
    mesh = sw.init_device_mesh("cpu", (2,))

    def state(value: float) -> dict[str, sw.DTensor]:
        return {"w": sw.distribute_tensor(torch.full((8,), value), mesh, [sw.Shard(0)])}

    checkpoint.save(state(1.0), folder)
    matched = 0

    def late(*args: Any, **options: Any) -> Match:
        nonlocal matched
        matched += 1
        if matched == 1:
            checkpoint.save(state(2.0), folder)
        return match_state(*args, **options)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(sys.modules["shardwright.checkpoint.load"], "match_state", late)
        found = checkpoint.load(state(0.0), folder)["w"].full_tensor()
    assert matched == 2
    values: list[float] = found.tolist()
    return values


def test_ranks_load_the_new_checkpoint_if_files_of_the_old_one_are_gone(tmp_path: Path) -> None:
    assert run_ranks(2, _load_while_it_is_replaced, str(tmp_path)) == [[2.0] * 8] * 2


def _load_without_a_file(folder: str) -> tuple[str, bool]:
    mesh = sw.init_device_mesh("cpu", (2,))
    whole = torch.arange(8.0)
    checkpoint.save({"w": sw.distribute_tensor(whole, mesh, [sw.Shard(0)])}, folder)
    if comm.rank() == 0:
        next(Path(folder).glob("*-00001-0.safetensors")).unlink()
    comm.agree(lambda: None, what="removing a file")
    target = sw.zeros(8, mesh=mesh, placements=[sw.Shard(0)])
    with pytest.raises(RankFailedError) as error:
        checkpoint.load({"w": target}, folder)
    return str(error.value), bool(target.to_local().any())


def test_a_missing_file_raises_on_all_ranks_before_any_tensor_is_filled(tmp_path: Path) -> None:
    found = run_ranks(2, _load_without_a_file, str(tmp_path))
    assert found[0] == found[1]
    assert "00001-0.safetensors does not exist" in found[0][0]
    assert not found[0][1]


def test_one_error_lists_all_corrupted_files(tmp_path: Path) -> None:
    def four_files(folder: str) -> None:
        mesh = sw.init_device_mesh("cpu", (4,))
        checkpoint.save({"w": sw.zeros(8, mesh=mesh, placements=[sw.Shard(0)])}, folder)

    run_ranks(4, four_files, str(tmp_path))
    files = sorted(tmp_path.glob("*.safetensors"))
    for file in (files[1], files[3]):
        file.write_bytes(file.read_bytes().replace(b'"dtype"', b'"dtypf"'))
    target = torch.ones(8)
    with pytest.raises(CorruptionError) as error:
        checkpoint.load({"w": target}, tmp_path)
    assert files[1].name in str(error.value)
    assert files[3].name in str(error.value)
    assert target.all()
