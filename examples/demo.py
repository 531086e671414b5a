"""The main job in miniature, on four ranks: shard a tensor, look at it, move it to another layout, prove it equal.

make demo        (or: torchrun --nproc-per-node 4 examples/demo.py)
"""

from __future__ import annotations

import time

import torch
import torch.distributed as dist
from rich.console import Console

from shardwright import Layout, Mesh, Region, Replicate, Shard, comm
from shardwright.layout import picture

SHAPE = (6, 10)


def move(local: torch.Tensor, source: Layout, target: Layout, rank: int) -> tuple[torch.Tensor, int]:
    """This rank's part under `target`, by exchanging only what is missing; and how many bytes that was."""
    have, want = source.region(rank), target.region(rank)
    moved = torch.empty(want.size, dtype=local.dtype)
    kept = want.intersect(have)
    if kept is not None:
        moved[kept.slices(want)] = local[kept.slices(have)]
    sends = {peer: [piece for piece, sender in missing(source, target, peer) if sender == rank] for peer in range(4)}
    receives = missing(source, target, rank)
    buffers = {
        peer: torch.empty(sum(piece.volume for piece, sender in receives if sender == peer)) for peer in range(4)
    }
    comm.exchange(
        {
            peer: torch.cat([local[p.slices(have)].reshape(-1) for p in pieces])
            for peer, pieces in sends.items()
            if pieces
        },
        {peer: buffer for peer, buffer in buffers.items() if buffer.numel()},
    )
    taken = dict.fromkeys(buffers, 0)
    for piece, sender in receives:
        start = taken[sender]
        moved[piece.slices(want)] = buffers[sender][start : start + piece.volume].reshape(piece.size)
        taken[sender] += piece.volume
    return moved, sum(piece.volume for piece, _ in receives) * local.element_size()


def missing(source: Layout, target: Layout, rank: int) -> list[tuple[Region, int]]:
    """What a rank lacks for `target`, piece by piece, each with the rank that sends it: arithmetic, no messages."""
    pieces = []
    for lacking in target.region(rank).subtract(source.region(rank)):
        for part, holders in source.holders(lacking):
            pieces.append((part, holders[rank % len(holders)]))
    return pieces


def main() -> None:
    dist.init_process_group("gloo")
    rank, console = dist.get_rank(), Console(quiet=dist.get_rank() != 0, highlight=False)
    started = time.perf_counter()
    mesh = Mesh((2, 2), names=("dp", "tp"))
    source = Layout(mesh, [Shard(0), Shard(1)], SHAPE)
    target = Layout(mesh, [Replicate(), Shard(0)], SHAPE)
    whole = torch.arange(60.0).reshape(SHAPE)

    console.print(f"[bold]1.[/] {dist.get_world_size()} ranks, {mesh!r}, a tensor of shape {list(SHAPE)}:\n")
    console.print(picture(source))
    local = whole[source.region(rank).slices()].clone()

    console.print("\n[bold]2.[/] The same tensor, to be laid out otherwise:\n")
    console.print(picture(target))

    console.print("\n[bold]3.[/] Every rank works out alone what it lacks and who has it; then only that moves:\n")
    with comm.count() as traffic:
        moved, expected = move(local, source, target, rank)
    for line in comm.gather_bytes(f"rank {rank} received {traffic.bytes:>3} bytes, and lacked {expected}".encode()):
        console.print(f"   {line.decode()}")

    def prove() -> None:
        if not torch.equal(moved, whole[target.region(rank).slices()]):
            raise AssertionError(f"{moved} is not {target.region(rank)} of the tensor")
        if traffic.bytes != expected:
            raise AssertionError(f"{traffic.bytes} bytes received, {expected} lacked")

    comm.agree(prove, what="comparing with the original")
    seconds = time.perf_counter() - started
    console.print(
        f"\n[bold green]Shown:[/] {source} became {target} on 4 ranks, equal to the original in every element, "
        f"and no rank received a byte it already had ({seconds:.1f} s).",
        soft_wrap=True,
    )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
