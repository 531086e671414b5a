"""The main job in miniature, on four ranks: shard a tensor, look at it, move it, train a sharded model, prove it equal.

make demo        (or: torchrun --nproc-per-node 4 examples/demo.py)
"""

from __future__ import annotations

import time
from importlib import import_module

import torch
import torch.distributed as dist
from rich.console import Console
from transformer import Transformer

import shardwright as sw
from shardwright import comm
from shardwright.tensor import picture
from shardwright.tensor.redistribute import plan

STEPS = 6
shard = import_module("02_tensor_parallel").shard


def move(console: Console, mesh: sw.DeviceMesh) -> None:
    """A tensor under two layouts, and what lies between them."""
    whole = torch.arange(60.0).reshape(6, 10)
    x = sw.distribute_tensor(whole, mesh, [sw.Shard(0), sw.Shard(1)])
    console.print(f"[bold]1.[/] {comm.world().size} ranks as {x.sharding.mesh!r}, and a tensor of shape [6, 10]:\n")
    console.print(picture(x.sharding))
    target = x.sharding.replace(placements=[sw.Replicate(), sw.Shard(0)])
    console.print("\n[bold]2.[/] The same tensor, to be laid out otherwise:\n")
    console.print(picture(target))
    steps = plan(x.sharding, target, itemsize=4)
    console.print(f"\n   Every rank plans alone what it lacks; then only that moves.\n\n{steps}\n")
    with comm.count() as traffic:
        moved = x.redistribute(placements=target.placements)

    def prove() -> None:
        if not torch.equal(moved.to_local(), whole[target.region(comm.rank()).slices()]):
            raise AssertionError("the tensor has changed on its way")
        if traffic.bytes != steps.received_bytes(comm.rank()):
            raise AssertionError(f"{traffic.bytes} bytes received, {steps.received_bytes(comm.rank())} planned")

    comm.agree(prove, what="comparing with the original")
    for line in comm.gather_bytes(f"rank {comm.rank()} received {traffic.bytes:>3} bytes, as planned".encode()):
        console.print(f"   {line.decode()}")


def train(mesh: sw.DeviceMesh | sw.Mesh, batch_placements: list[sw.Placement]) -> list[float]:
    """The losses of a few steps of AdamW, with dropout; the model is plain torch."""
    sw.manual_seed(0)
    model = Transformer(layers=2)
    shard(model, mesh)
    model.reset()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for step in range(STEPS):
        tokens = torch.randint(0, 96, (8, 33), generator=torch.Generator().manual_seed(step))
        loss = model(sw.distribute_tensor(tokens, mesh, batch_placements, src_data_rank=None))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def main() -> None:
    started = time.perf_counter()
    mesh = sw.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    console = Console(quiet=comm.rank() != 0, highlight=False)
    move(console, mesh)

    console.print("\n[bold]3.[/] A transformer, trained on batches cut over dp and weights cut over tp, dropout on:\n")
    parallel = train(mesh, [sw.Shard(0), sw.Replicate()])
    alone = train(sw.Mesh((1, 1), ("dp", "tp"), ranks=(comm.rank(),)), [sw.Shard(0), sw.Replicate()])
    for name, losses in (("4 ranks", parallel), ("1 rank", alone)):
        console.print(f"   losses on {name:<8}" + " ".join(f"{loss:.6f}" for loss in losses))
    worst = max(abs(a - b) / abs(b) for a, b in zip(parallel, alone, strict=True))

    def prove() -> None:
        if worst > 1e-5:
            raise AssertionError(f"the losses differ by {worst:.1e}")

    comm.agree(prove, what="comparing the losses")
    console.print(
        f"\n[bold green]Shown:[/] a tensor moved between layouts without a byte too many, and a model trained on 4 "
        f"ranks to one rank's losses (within {worst:.0e}), in {time.perf_counter() - started:.1f} s.",
        soft_wrap=True,
    )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
