"""One tensor, stored by rows from two ranks and loaded by rows or columns."""

from __future__ import annotations

from typing import Any

import torch

import shardwright as sw
from shardwright import checkpoint, comm


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
