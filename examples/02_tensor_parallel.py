"""A transformer trained with data × tensor parallelism, by saying where each parameter lies. The model is plain torch.

torchrun --nproc-per-node 4 examples/02_tensor_parallel.py       (or: python examples/02_tensor_parallel.py)
"""

from __future__ import annotations

import os

import torch
from torch import nn
from transformer import Transformer

import shardwright as sw

# Per parameter, how the tensor-parallel mesh dimension cuts it: columns first, then rows, so that a block needs
# one reduction after attention and one after the feed-forward network. What is not named is replicated.
TENSOR_PARALLEL = {
    "query": sw.Shard(0),
    "key": sw.Shard(0),
    "value": sw.Shard(0),
    "output.weight": sw.Shard(1),
    "up": sw.Shard(0),
    "down.weight": sw.Shard(1),
    "embedding.weight": sw.Shard(0),  # the vocabulary
    "head.weight": sw.Shard(0),  # so the loss is computed on cut logits
}


def placement(name: str) -> sw.Placement:
    """Where the tensor-parallel dimension puts a parameter."""
    return next((where for part, where in TENSOR_PARALLEL.items() if part in name), sw.Replicate())


def shard(model: nn.Module, mesh: sw.DeviceMesh) -> nn.Module:
    """The model with its parameters and buffers on the mesh, whose last dimension is tensor parallel."""

    def partition(name: str, module: nn.Module, mesh: sw.DeviceMesh) -> None:
        for key, parameter in module.named_parameters(recurse=False):
            placements = [sw.Replicate()] * (mesh.ndim - 1) + [placement(f"{name}.{key}")]
            module.register_parameter(key, sw.distribute_tensor(parameter, mesh, placements))

    return sw.distribute_module(model, mesh, partition)


def main(steps: int = 5) -> list[float]:
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    mesh = sw.init_device_mesh("cpu", (ranks // min(ranks, 2), min(ranks, 2)), mesh_dim_names=("dp", "tp"))

    sw.manual_seed(0)
    with torch.device("meta"):
        model = Transformer(layers=2)
    shard(model, mesh).to_empty(device="cpu")  # every rank makes room for its shards only
    model.reset()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    losses = []
    for step in range(steps):
        tokens = torch.randint(0, 96, (8, 33), generator=torch.Generator().manual_seed(step))
        batch = sw.distribute_tensor(tokens, mesh, [sw.Shard(0), sw.Replicate()], src_data_rank=None)
        loss = model(batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    if mesh.get_rank() == 0:
        weight = model.blocks[0].up.weight
        print(f"{sum(p.numel() for p in model.parameters()):,} parameters; blocks.0.up.weight is {weight.sharding}")
        print("losses", " ".join(f"{loss:.6f}" for loss in losses))
    return losses


if __name__ == "__main__":
    main()
