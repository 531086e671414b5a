"""Shard a tensor, compute with it, redistribute it: ordinary torch code, and nothing hidden.

torchrun --nproc-per-node 4 examples/01_shard_a_tensor.py       (or: python examples/01_shard_a_tensor.py)
"""

from __future__ import annotations

import os

import torch

import shardwright as sw


def main() -> None:
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    mesh = sw.init_device_mesh("cpu", (ranks,), mesh_dim_names=("dp",))
    whole = torch.arange(30.0).reshape(10, 3)  # 10 rows on 4 ranks: uneven shards are ordinary

    x = sw.distribute_tensor(whole, mesh, [sw.Shard(0)])
    w = sw.distribute_tensor(torch.ones(3, 2), mesh, [sw.Replicate()]).requires_grad_()

    # Torch functions see the global tensor; each rank computes its part.
    y = torch.relu(x @ w) / 10
    loss = y.sum()  # Partial: every rank has the sum of its own rows, until the value is needed
    loss.backward()  # each rank used w with other rows, so its gradient is summed: one all-reduce

    # A redistribution, and the bytes that this rank received for it: the rows it did not hold.
    with sw.trace() as seen:
        moved = y.redistribute(placements=[sw.Replicate()])

    torch.testing.assert_close(w.grad.full_tensor(), whole.sum(0)[:, None].expand(3, 2) / 10)
    torch.testing.assert_close(moved.to_local(), torch.relu(whole @ torch.ones(3, 2)) / 10)
    total = loss.item()
    if mesh.get_rank() == 0:
        sw.visualize(x)
        print(f"x      {x.sharding}\ny      {y.sharding}\nloss   {loss.sharding} = {total}\nw.grad {w.grad.sharding}")
        print(f"to replicate y, this rank received {seen.received} bytes")


if __name__ == "__main__":
    main()
