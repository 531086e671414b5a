"""Files of each rank with DTensors of PyTorch in them are joined by the specs of the DTensors."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import tensor as theirs

import shardwright as sw
from shardwright import checkpoint, comm
from shardwright.errors import CheckpointError, FormatError
from shardwright.testing import run_ranks


def values() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return {name: torch.randn(37, 25, generator=generator) for name in ("rows", "grid", "replica", "strided", "tied")}


def write(folder: str) -> None:
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    whole, rank = values(), comm.rank()
    strided = theirs.placement_types._StridedShard(0, split_factor=2)
    placements: dict[str, Any] = {
        "rows": [theirs.Replicate(), theirs.Shard(0)],
        "grid": [theirs.Shard(1), theirs.Shard(0)],
        "replica": [theirs.Replicate(), theirs.Replicate()],
    }
    state: dict[str, Any] = {name: theirs.distribute_tensor(whole[name], mesh, how) for name, how in placements.items()}
    layout = sw.Layout(sw.Mesh((2, 2)), [strided, theirs.Shard(0)], (37, 25))
    local = whole["strided"][layout.region(rank).slices()].clone()
    state["strided"] = theirs.DTensor.from_local(
        local, mesh, [strided, theirs.Shard(0)], run_check=False, shape=torch.Size((37, 25)), stride=(25, 1)
    )
    state["tied"] = state["rows"]
    state["buffer"] = torch.ones(3)
    state["own"] = torch.full((2,), rank)
    torch.save(state, f"{folder}/model_world_size_4_rank_{rank}.pt")
    torch.save({"lr": 0.5, "seed": rank, "steps": [1, 2]}, f"{folder}/extra_state_world_size_4_rank_{rank}.pt")


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ranks")
    run_ranks(4, write, str(folder))
    return folder


def test_the_parts_of_all_ranks_are_one_tensor(written: Path) -> None:
    state = checkpoint.read(written)
    whole = values()
    for name in ("rows", "grid", "replica", "strided"):
        assert torch.equal(state["model"][name], whole[name]), name
    assert torch.equal(state["model"]["tied"], whole["rows"])
    assert torch.equal(state["model"]["buffer"], torch.ones(3))
    assert state["extra_state"]["lr"] == 0.5
    assert state["extra_state"]["steps"] == [1, 2]
    assert checkpoint.verify(written)


def test_what_ranks_have_of_their_own_is_theirs(written: Path) -> None:
    with checkpoint.open(written) as opened:
        assert opened.format == "torch"
        for rank in range(4):
            assert opened.value("extra_state.seed", rank=rank) == rank
            assert torch.equal(opened.tree(rank=rank)["model"]["own"].tensor(), torch.full((2,), rank))


def test_they_are_loaded_on_other_ranks_under_other_layouts(written: Path) -> None:
    def load(folder: str, whole: dict[str, torch.Tensor]) -> None:
        mesh = sw.init_device_mesh("cpu", (3,))
        state = {name: sw.distribute_tensor(torch.zeros(37, 25), mesh, [sw.Shard(1)]) for name in ("grid", "strided")}
        checkpoint.load({"model": state}, folder, only="model.*")
        for name, value in state.items():
            assert torch.equal(value.full_tensor(), whole[name])

    run_ranks(3, load, str(written), values())


def test_a_rank_whose_file_is_missing_is_noticed(written: Path, tmp_path: Path) -> None:
    for file in written.glob("model*"):
        shutil.copy(file, tmp_path)
    (tmp_path / "model_world_size_4_rank_3.pt").unlink()
    with pytest.raises(FormatError, match="do not tile it: gap"):
        checkpoint.read(tmp_path)
    with pytest.raises(CheckpointError, match="files of all ranks"):
        checkpoint.read(tmp_path / "model_world_size_4_rank_0.pt")
