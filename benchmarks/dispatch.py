"""What a DTensor costs over plain torch: ours and torch.distributed.tensor's, in one process, in turns.

    python benchmarks/dispatch.py [--device cuda] [--rounds 15] [--json FILE]

Overhead is time less that of plain torch, on a mesh of one rank, one thread, small tensors. Three parts: single
operators, ten multiplies forward and backward, and a training step (forward, backward, AdamW) of a 4-layer
transformer of width 64.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path

import torch
import torch.distributed.tensor as theirs
from torch import nn

import shardwright as sw

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))
from transformer import Transformer  # the path is set just above

Work = Callable[[], object]
GOALS = {"operator": 0.4, "forward+backward": 0.08, "training step": 0.15}


def in_turns(works: dict[str, Work], rounds: int, calls: int, finish: Work) -> dict[str, list[float]]:
    """Seconds per call of each, round by round, one after the other in every round."""
    times: dict[str, list[float]] = {name: [] for name in works}
    for work in works.values():
        for _ in range(3):
            work()
    finish()
    for _ in range(rounds):
        for name, work in works.items():
            start = time.perf_counter()
            for _ in range(calls):
                work()
            finish()
            times[name].append((time.perf_counter() - start) / calls)
    return times


def tensors(device: str) -> dict[str, torch.Tensor]:
    """The same matrix, plain and under both libraries: whole, so that no operator has to move it."""
    mesh = sw.init_device_mesh(device, (1,), mesh_dim_names=("dp",))
    plain = torch.randn(8, 8, device=device)
    return {
        "plain": plain,
        "shardwright": sw.distribute_tensor(plain, mesh, [sw.Replicate()]),
        "torch": theirs.distribute_tensor(plain, mesh, [theirs.Replicate()]),
    }


def operators(device: str) -> dict[str, dict[str, Work]]:
    """Single operators, without gradients."""
    given = tensors(device)
    calls: dict[str, Callable[[torch.Tensor], object]] = {
        "add": lambda x: x + x,
        "mm": lambda x: torch.mm(x, x),
        "view": lambda x: x.view(8, 2, 4),
        "softmax": lambda x: torch.softmax(x, -1),
    }
    return {name: {who: (lambda x=x, call=call: call(x)) for who, x in given.items()} for name, call in calls.items()}


def forward_backward(device: str) -> dict[str, Work]:
    """Ten multiplies and their gradients."""

    def ten(x: torch.Tensor) -> None:
        y = x
        for _ in range(10):
            y = y * x
        y.sum().backward()
        x.grad = None

    leaves = {who: x.detach().requires_grad_() for who, x in tensors(device).items()}
    return {who: (lambda x=x: ten(x)) for who, x in leaves.items()}


def training_step(device: str) -> dict[str, Work]:
    """Forward, backward and AdamW of a small transformer."""
    mesh = sw.init_device_mesh(device, (1,), mesh_dim_names=("dp",))
    tokens = torch.randint(0, 96, (4, 33), device=device)
    works: dict[str, Work] = {}
    for who in ("plain", "shardwright", "torch"):
        torch.manual_seed(0)
        model = Transformer(dropout=0.0).to(device)
        model.reset()
        batch = tokens
        if who == "shardwright":
            model = sw.distribute_module(model, mesh)
            batch = sw.distribute_tensor(tokens, mesh, [sw.Shard(0)])
        elif who == "torch":
            model = theirs.distribute_module(model, mesh)
            batch = theirs.distribute_tensor(tokens, mesh, [theirs.Shard(0)])
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

        def step(model: nn.Module = model, batch: torch.Tensor = batch, opt: torch.optim.Optimizer = optimizer) -> None:
            opt.zero_grad()
            model(batch).backward()
            opt.step()

        works[who] = step
    return works


def overheads(times: dict[str, list[float]]) -> dict[str, float]:
    """Medians in microseconds, overheads over plain, and the ratio of ours to theirs with its spread."""
    plain, ours, peer = (times[who] for who in ("plain", "shardwright", "torch"))
    ratios = sorted((o - p) / (t - p) for p, o, t in zip(plain, ours, peer, strict=True))
    middle = {who: statistics.median(rounds) * 1e6 for who, rounds in times.items()}
    return {
        **{f"{who} µs": value for who, value in middle.items()},
        "overhead µs": middle["shardwright"] - middle["plain"],
        "torch's overhead µs": middle["torch"] - middle["plain"],
        "ratio": (middle["shardwright"] - middle["plain"]) / (middle["torch"] - middle["plain"]),
        "ratio low": ratios[len(ratios) // 4],
        "ratio high": ratios[-1 - len(ratios) // 4],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    finish = torch.cuda.synchronize if options.device == "cuda" else (lambda: None)
    results: dict[str, dict[str, float]] = {}
    with torch.no_grad():
        for name, works in operators(options.device).items():
            results[name] = overheads(in_turns(works, options.rounds, 2000, finish))
    works = forward_backward(options.device)
    results["ten multiplies, forward+backward"] = overheads(in_turns(works, options.rounds, 200, finish))
    results["training step"] = overheads(in_turns(training_step(options.device), options.rounds, 4, finish))

    name = torch.cuda.get_device_name() if options.device == "cuda" else platform.machine()
    print(f"torch {torch.__version__}, {name}, one thread; medians of {options.rounds} rounds, µs")
    head = ("", "plain", "shardwright", "torch DTensor", "our overhead", "torch's", "ratio (quartiles)", "goal")
    print(("{:<34}" + "{:>14}" * 5 + "{:>24}{:>8}").format(*head))
    for name, row in results.items():
        goal = GOALS["operator"] if name in ("add", "mm", "view", "softmax") else GOALS[name.split(", ")[-1]]
        cells = [f"{row[key]:.1f}" for key in list(row)[:5]]
        ratio = f"{row['ratio']:.3f} ({row['ratio low']:.3f}–{row['ratio high']:.3f})"
        print(("{:<34}" + "{:>14}" * 5 + "{:>24}{:>8}").format(name, *cells, ratio, f"≤ {goal}"))
    if options.json:
        about = {"date": str(date.today()), "torch": torch.__version__, "device": options.device, "goals": GOALS}
        options.json.write_text(json.dumps({**about, "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
