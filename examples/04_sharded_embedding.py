"""Train an embedding table that is cut by rows, several shards on each rank, under a small dense head.

torchrun --nproc-per-node 4 examples/04_sharded_embedding.py    (or: python examples/04_sharded_embedding.py)
"""

from __future__ import annotations

import os

import torch
from torch import Tensor, nn

import shardwright as sw
from shardwright import comm, sharded

ITEMS, WIDTH, BASKETS = 1000, 16, 64


class Recommender(nn.Module):
    """A basket of items in, a score out: ordinary torch code, whatever the table is."""

    def __init__(self) -> None:
        super().__init__()
        self.items = nn.EmbeddingBag(ITEMS, WIDTH, mode="mean", padding_idx=0, device="meta")
        self.head = nn.Sequential(nn.Linear(WIDTH, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, baskets: Tensor) -> Tensor:
        return self.head(self.items(baskets)).squeeze(-1)


def baskets_of(step: int) -> tuple[Tensor, Tensor]:
    """A batch, the same on every rank: baskets of up to ten items, 0 for none, and what they are worth."""
    generator = torch.Generator().manual_seed(step)
    baskets = torch.randint(0, ITEMS, (BASKETS, 10), generator=generator)
    return baskets, (baskets % 7 == 3).float().sum(1)


def main(steps: int = 12) -> list[float]:
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    rank = sw.init_device_mesh("cpu", (ranks,)).get_rank()

    # Three shards on each rank, as tables are held whose parts were given out by size. No rank makes the whole table,
    # and its numbers are the same however it is cut.
    sw.manual_seed(0)
    torch.manual_seed(0)
    spec = sharded.ChunkShardingSpec(0, [f"rank:{owner}/cpu" for owner in range(ranks)] * 3)
    model = Recommender()
    model.items.weight = nn.Parameter(sharded.randn(spec, ITEMS, WIDTH))
    optimizer = sharded.ShardedOptimizer(dict(model.named_parameters()), torch.optim.Adagrad, lr=0.1)

    losses = []
    for step in range(steps):
        baskets, worth = baskets_of(step)
        mine = slice(rank, None, ranks)
        # Rows come from the ranks that hold them, and their gradients, summed over all ranks, go back there.
        loss = (model(baskets[mine]) - worth[mine]).square().sum() / BASKETS
        loss.backward()
        for parameter in model.head.parameters():  # the head is on every rank: so is the sum of its gradients
            parameter.grad = comm.all_reduce(parameter.grad)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(comm.all_reduce(loss.detach()).item())

    with comm.count() as traffic:
        model(baskets_of(0)[0][rank::ranks])
    if rank == 0:
        held = sum(shard.tensor.shape[0] for shard in model.items.weight.local_shards())
        print(f"rank 0 holds {held} of {ITEMS} rows, in {len(model.items.weight.local_shards())} shards")
        print(f"for its part of a batch it receives {traffic.received['exchange'] // (4 * WIDTH)} rows")
        print("losses", " ".join(f"{loss:.6f}" for loss in losses))
    return losses


if __name__ == "__main__":
    main()
