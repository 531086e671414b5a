"""Fully sharded training: every parameter, gradient and optimizer state is cut over all ranks, gathered at use.

torchrun --nproc-per-node 4 examples/03_fully_sharded_training.py   (or: python examples/03_fully_sharded_training.py)
"""

from __future__ import annotations

import os

import torch
from torch import nn
from transformer import Transformer

import shardwright as sw


def fully_shard(model: nn.Module, mesh: sw.DeviceMesh) -> nn.Module:
    """The model with every parameter cut along its first dimension, and its buffers replicated."""

    def partition(_: str, module: nn.Module, mesh: sw.DeviceMesh) -> None:
        for key, parameter in module.named_parameters(recurse=False):
            module.register_parameter(key, sw.distribute_tensor(parameter, mesh, [sw.Shard(0)]))

    return sw.distribute_module(model, mesh, partition)


def main(steps: int = 5, micro_batches: int = 2) -> list[float]:
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    mesh = sw.init_device_mesh("cpu", (ranks,), mesh_dim_names=("dp",))

    sw.manual_seed(0)
    with torch.device("meta"):
        model = Transformer(layers=2)
    fully_shard(model, mesh).to_empty(device="cpu")
    model.reset()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    losses = []
    for step in range(steps):
        total = 0.0
        # Gradients add up over the micro-batches where they arise, and are reduced once, at the end.
        with sw.defer_gradient_reduction():
            for micro in range(micro_batches):
                seed = step * micro_batches + micro
                tokens = torch.randint(0, 96, (8, 33), generator=torch.Generator().manual_seed(seed))
                batch = sw.distribute_tensor(tokens, mesh, [sw.Shard(0)], src_data_rank=None)
                # The batch is cut, so each parameter is gathered for its use, and its gradient reduce-scattered.
                loss = model(batch) / micro_batches
                loss.backward()
                total += loss.item()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    if mesh.get_rank() == 0:
        held = sum(p.to_local().numel() for p in model.parameters())
        print(f"rank 0 holds {held:,} of {sum(p.numel() for p in model.parameters()):,} parameters")
        print("losses", " ".join(f"{loss:.6f}" for loss in losses))
    return losses


if __name__ == "__main__":
    main()
