"""A training step of about a billion parameters on one GPU: plain torch, FSDP2, `fully_shard` and `parallelize`.

    python benchmarks/parallel_gpu.py [--layers 16] [--width 2048] [--rounds 12] [--turns 4] [--json FILE]

A world of one over NCCL: nothing is sent, so the step shows what each library adds to plain torch. The model is a
Llama, with parameters in bfloat16; a step is forward, backward and AdamW. All four train in turns from the same weights
on the same batches; their losses are compared. Printed are medians over rounds with their spread, the ratio to plain
torch, and the peak of GPU memory in a step.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import statistics
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.nn import functional

import shardwright as sw

VOCABULARY, LENGTH, BATCH = 32_000, 1024, 12


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm, self.norm = nn.RMSNorm(width), nn.RMSNorm(width)
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in range(4))
        hidden = width * 11 // 4
        self.gate, self.up = (nn.Linear(width, hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        normed = self.attention_norm(x)
        q, k, v = (
            part(normed).view(batch, length, self.heads, -1).transpose(1, 2) for part in (self.q, self.k, self.v)
        )
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(attended.transpose(1, 2).reshape(batch, length, -1))
        normed = self.norm(x)
        return x + self.down(functional.silu(self.gate(normed)) * self.up(normed))


class Llama(nn.Module):
    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(Block(width, width // 128) for _ in range(layers))
        self.norm = nn.RMSNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def model(layers: int, width: int) -> Llama:
    torch.manual_seed(0)
    with torch.device("cuda"):
        return Llama(layers, width).to(torch.bfloat16)


def batch(number: int) -> Tensor:
    generator = torch.Generator(device="cuda").manual_seed(number)
    return torch.randint(0, VOCABULARY, (BATCH, LENGTH + 1), generator=generator, device="cuda")


def loss_of(trained: Any, tokens: Any) -> Any:
    return functional.cross_entropy(trained(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


Loss = Callable[[int], Any]


def plain(layers: int, width: int) -> tuple[nn.Module, Loss]:
    trained = model(layers, width)
    return trained, lambda number: loss_of(trained, batch(number))


def fsdp2(layers: int, width: int) -> tuple[nn.Module, Loss]:
    mesh = sw.init_device_mesh("cuda", (1,), mesh_dim_names=("dp",))
    trained = model(layers, width)
    for block in trained.blocks:
        torch_fully_shard(block, mesh=mesh)
    torch_fully_shard(trained, mesh=mesh)
    return trained, lambda number: loss_of(trained, batch(number))


def fully_sharded(layers: int, width: int) -> tuple[nn.Module, Loss]:
    mesh = sw.init_device_mesh("cuda", (1,), mesh_dim_names=("dp",))
    trained = model(layers, width)
    for block in trained.blocks:
        sw.fully_shard(block, mesh=mesh)
    sw.fully_shard(trained, mesh=mesh)
    return trained, lambda number: loss_of(trained, batch(number))


def parallelized(layers: int, width: int) -> tuple[nn.Module, Loss]:
    mesh = sw.init_device_mesh("cuda", (1,), mesh_dim_names=("dp",))
    trained = sw.parallelize(model(layers, width), mesh, {})
    return trained, lambda number: loss_of(trained, sw.shard_batch(batch(number), mesh, check=False))


KINDS = {"plain torch": plain, "FSDP2": fsdp2, "fully_shard": fully_sharded, "parallelize": parallelized}


def measure(make: Callable[[int, int], tuple[nn.Module, Loss]], layers: int, width: int, rounds: int) -> dict[str, Any]:
    """Train one kind alone, so that its memory is its own."""
    trained, loss = make(layers, width)
    optimizer = torch.optim.AdamW(trained.parameters(), lr=1e-5, fused=True)
    losses, milliseconds = [], []
    for number in range(rounds + 3):
        if number == 3:  # the first steps make plans, states and kernels
            torch.cuda.reset_peak_memory_stats()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()  # type: ignore[no-untyped-call]  # torch's is untyped
        value = loss(number)
        value.backward()
        optimizer.step()
        optimizer.zero_grad()
        end.record()  # type: ignore[no-untyped-call]  # likewise
        torch.cuda.synchronize()
        whole = value.detach().full_tensor() if isinstance(value, sw.DTensor) else value.detach()
        losses.append(float(whole))
        if number >= 3:
            milliseconds.append(begin.elapsed_time(end))  # type: ignore[no-untyped-call]  # likewise
    return {"losses": losses, "ms": milliseconds, "peak": torch.cuda.max_memory_allocated()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("no CUDA device: nothing to measure")
        return
    count = sum(parameter.numel() for parameter in model(options.layers, options.width).parameters())
    name = torch.cuda.get_device_name()
    print(f"torch {torch.__version__}, {name}; {count / 1e6:.0f} M parameters in bfloat16, {BATCH} x {LENGTH} tokens")
    figures: dict[str, Any] = {kind: {"ms": [], "peak": 0, "losses": []} for kind in KINDS}
    for turn in range(options.turns):
        for kind in KINDS if turn % 2 else reversed(KINDS):
            seen = measure(KINDS[kind], options.layers, options.width, options.rounds)
            figures[kind]["ms"] += seen["ms"]
            figures[kind]["peak"], figures[kind]["losses"] = seen["peak"], seen["losses"]
            gc.collect()  # the model is in cycles of hooks
            torch.cuda.empty_cache()
    base = statistics.median(figures["plain torch"]["ms"])
    for kind, seen in figures.items():
        median = statistics.median(seen["ms"])
        difference = max(abs(a - b) for a, b in zip(seen["losses"], figures["plain torch"]["losses"], strict=True))
        print(
            f"  {kind:12} {median:7.1f} ms ({min(seen['ms']):.1f} to {max(seen['ms']):.1f}), {median / base:.3f} of "
            f"plain; peak {seen['peak'] / 2**30:.2f} GiB; losses within {difference:.1e}"
        )
    if options.json:
        about = {"date": str(date.today()), "torch": torch.__version__, "device": name, "machine": platform.machine()}
        results = {
            kind: {"median ms": statistics.median(seen["ms"]), "ms": seen["ms"], "peak bytes": seen["peak"]}
            for kind, seen in figures.items()
        }
        options.json.write_text(json.dumps({**about, "cores": os.cpu_count(), "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
