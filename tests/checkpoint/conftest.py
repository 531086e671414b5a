"""A checkpoint written by four ranks with every kind of sharding, and the values it holds."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import shardwright as sw
from shardwright import checkpoint, sharded
from shardwright.testing import run_ranks


def _tensors() -> dict[str, torch.Tensor]:
    """The tensors, whole, by name."""
    generator = torch.Generator().manual_seed(5)
    return {
        "rows": torch.randn(37, 24, generator=generator),
        "columns": torch.randint(-(2**40), 2**40, (6, 50), generator=generator),
        "grid": torch.randn(9, 10, 3, generator=generator).to(torch.bfloat16),
        "big": torch.randn(1300, 1024, generator=generator),  # 5 MB: several blocks for every rank
        "replica": torch.randn(3000, 7, generator=generator, dtype=torch.float64),
        "plain": torch.arange(5, dtype=torch.int16),
        "complex": torch.randn(4, 5, generator=generator, dtype=torch.complex128),
        "truths": torch.arange(11) % 3 == 0,
        "scalar": torch.tensor(2.5),
        "empty": torch.zeros(0, 4),
        "pieces": torch.randn(10, 6, generator=generator),
        "w@[0:2]": torch.tensor([7, 8], dtype=torch.uint8),
        "__metadata__": torch.tensor([1, 2, 3], dtype=torch.int32),
    }


def _save(path: str) -> None:
    whole = _tensors()
    mesh = sw.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    line = sw.init_device_mesh("cpu", (4,))
    rank = torch.distributed.get_rank()

    def spread(name: str, over: Any, *placements: Any) -> Any:
        return sw.distribute_tensor(whole[name], over, list(placements))

    boxes = [((0, 0), (10, 2)), ((0, 2), (4, 4)), ((4, 2), (6, 1)), ((4, 3), (6, 3))]
    offset, size = boxes[rank]
    own = whole["pieces"][offset[0] : offset[0] + size[0], offset[1] : offset[1] + size[1]].contiguous()
    state = {
        "rows": spread("rows", line, sw.Shard(0)),
        "columns": spread("columns", line, sw.Shard(1)),
        "grid": spread("grid", mesh, sw.Shard(0), sw.Shard(1)),
        "big": spread("big", mesh, sw.Shard(0), sw.Replicate()),
        "replica": spread("replica", mesh, sw.Replicate(), sw.Replicate()),
        "pieces": sharded.init_from_local_shards(
            [sharded.Shard.from_tensor_and_offsets(own, list(offset), rank)], (10, 6)
        ),
        **{name: whole[name] for name in ("plain", "complex", "truths", "scalar", "empty", "w@[0:2]", "__metadata__")},
        "alias": whole["plain"],
        "array": np.arange(6.0).reshape(2, 3),
        "epoch": 3,
        "nested": {"a": [1, (2.5, None)], "b": b"bytes", "empty": {}},
        "own": checkpoint.PerRank({"seed": rank, "state": torch.full((3,), rank)}),
    }
    checkpoint.save(state, path)


@pytest.fixture(scope="session")
def whole() -> dict[str, torch.Tensor]:
    """The tensors that the four ranks have saved between them, whole."""
    return _tensors()


@pytest.fixture(scope="session")
def _master(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("four-ranks") / "checkpoint"
    run_ranks(4, _save, str(path))
    return path


@pytest.fixture
def saved(_master: Path, tmp_path: Path) -> Path:
    """The checkpoint of four ranks, a copy to do with as one likes."""
    path = tmp_path / "checkpoint"
    shutil.copytree(_master, path)
    return path
