"""The run that the pages on the command line show: four ranks, two steps, a small transformer."""

from __future__ import annotations

from typing import Any

import torch

import shardwright as sw
from shardwright.checkpoint import CheckpointManager
from shardwright.testing import run_ranks


def weights(step: int) -> dict[str, torch.Tensor]:
    """Return the tensors of a step, whole, by name."""
    generator = torch.Generator().manual_seed(step)
    tensors = {"tok.weight": torch.randn(100, 32, generator=generator).bfloat16()}
    for layer in range(4):
        tensors[f"layers.{layer}.wq.weight"] = torch.randn(64, 32, generator=generator)
        tensors[f"layers.{layer}.norm.weight"] = torch.ones(32)
    return tensors


def save_run(root: str) -> None:
    """Save steps 100 and 200 of the run under `root`, from four ranks."""
    run_ranks(4, _save, root)


def _save(root: str) -> None:
    mesh = sw.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    placements = {"tok": [sw.Shard(0), sw.Replicate()], "wq": [sw.Shard(0), sw.Shard(1)], "norm": [sw.Replicate()] * 2}
    with CheckpointManager(root) as manager:
        for step, loss in ((100, 2.5), (200, 1.25)):
            model: dict[str, Any] = {}
            for name, tensor in weights(step).items():
                kind = name.split(".")[-2]
                model[name] = sw.distribute_tensor(tensor, mesh, placements[kind])
            model["head.weight"] = model["tok.weight"]
            manager.save(step, {"model": model, "step": step, "lr": 1e-3}, {"loss": loss})
