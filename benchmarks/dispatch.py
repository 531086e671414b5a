"""What a DTensor costs over plain torch: ours and torch.distributed.tensor's, in one process, in turns.

    python benchmarks/dispatch.py [--device cuda] [--rounds 15] [--json FILE]

Overhead is time less that of plain torch, on a mesh of one rank, one thread, small tensors. Three parts: single
operators, ten multiplies forward and backward, and a training step (forward, backward, AdamW) of a 4-layer
transformer of width 64. Then captured programs (`sw.compile`), forward and backward, beside the same local program
written by hand: how much longer they take.
"""

from __future__ import annotations

import argparse
import copy
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
COMPILED_GOAL = 1.1  # of the time of the program written by hand
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


def programs(device: str) -> dict[str, dict[str, Work]]:
    """The same programs by hand (plain torch), eager and captured: forward and backward."""
    mesh = sw.init_device_mesh(device, (1,), mesh_dim_names=("dp",))

    def ten(x: torch.Tensor) -> torch.Tensor:
        y = x
        for _ in range(10):
            y = y * x
        return y.sum()

    def run(loss: Callable[..., torch.Tensor], leaves: list[torch.Tensor], *args: torch.Tensor) -> None:
        loss(*args).backward()
        for leaf in leaves:
            leaf.grad = None

    works: dict[str, dict[str, Work]] = {}
    plain = torch.randn(8, 8, device=device).requires_grad_()
    ours = sw.distribute_tensor(plain.detach(), mesh, [sw.Replicate()]).requires_grad_()
    compiled_ten = sw.compile(ten)
    works["ten multiplies"] = {
        "by hand": lambda: run(ten, [plain], plain),
        "eager": lambda: run(ten, [ours], ours),
        "compiled": lambda: run(compiled_ten, [ours], ours),
    }
    mlp = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 1))
    tokens = torch.randint(0, 96, (4, 33), device=device)
    models = {"MLP": (mlp, torch.randn(8, 32, device=device)), "transformer": (Transformer(dropout=0.0), tokens)}
    for name, (model, batch) in models.items():
        model = model.to(device)
        if isinstance(model, Transformer):
            model.reset()
        spread = sw.distribute_module(copy.deepcopy(model), mesh)
        cut = sw.distribute_tensor(batch, mesh, [sw.Shard(0)])

        def loss(x: torch.Tensor, model: nn.Module = model) -> torch.Tensor:
            return model(x).mean()

        def ours_loss(x: torch.Tensor, model: nn.Module = spread) -> torch.Tensor:
            return model(x).mean()

        held, spread_held = list(model.parameters()), list(spread.parameters())
        compiled = sw.compile(ours_loss)
        works[name] = {
            "by hand": lambda f=loss, p=held, x=batch: run(f, p, x),
            "eager": lambda f=ours_loss, p=spread_held, x=cut: run(f, p, x),
            "compiled": lambda f=compiled, p=spread_held, x=cut: run(f, p, x),
        }
    return works


def captured(times: dict[str, list[float]]) -> dict[str, float]:
    """Medians in microseconds, and how long the captured program takes in terms of the one by hand."""
    ratios = sorted(c / h for h, c in zip(times["by hand"], times["compiled"], strict=True))
    middle = {f"{who} µs": statistics.median(rounds) * 1e6 for who, rounds in times.items()}
    quarter = len(ratios) // 4
    return {
        **middle,
        "ratio": statistics.median(ratios),
        "ratio low": ratios[quarter],
        "ratio high": ratios[-1 - quarter],
    }


def show_captured(results: dict[str, dict[str, float]]) -> None:
    line = "{:<34}" + "{:>14}" * 3 + "{:>24}{:>8}"
    print("\n" + line.format("forward+backward", "by hand", "eager", "compiled", "compiled / by hand", "goal"))
    for name, row in results.items():
        ratio = f"{row['ratio']:.3f} ({row['ratio low']:.3f}–{row['ratio high']:.3f})"
        print(line.format(name, *(f"{row[key]:.1f}" for key in list(row)[:3]), ratio, f"≤ {COMPILED_GOAL}"))


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

    compiled = {
        name: captured(in_turns(works, options.rounds, 10 if name == "transformer" else 200, finish))
        for name, works in programs(options.device).items()
    }

    name = torch.cuda.get_device_name() if options.device == "cuda" else platform.machine()
    print(f"torch {torch.__version__}, {name}, one thread; medians of {options.rounds} rounds, µs")
    head = ("", "plain", "shardwright", "torch DTensor", "our overhead", "torch's", "ratio (quartiles)", "goal")
    print(("{:<34}" + "{:>14}" * 5 + "{:>24}{:>8}").format(*head))
    for name, row in results.items():
        goal = GOALS["operator"] if name in ("add", "mm", "view", "softmax") else GOALS[name.split(", ")[-1]]
        cells = [f"{row[key]:.1f}" for key in list(row)[:5]]
        ratio = f"{row['ratio']:.3f} ({row['ratio low']:.3f}–{row['ratio high']:.3f})"
        print(("{:<34}" + "{:>14}" * 5 + "{:>24}{:>8}").format(name, *cells, ratio, f"≤ {goal}"))
    show_captured(compiled)
    if options.json:
        about = {"date": str(date.today()), "torch": torch.__version__, "device": options.device, "goals": GOALS}
        options.json.write_text(json.dumps({**about, "results": results, "compiled": compiled}, indent=1) + "\n")


if __name__ == "__main__":
    main()
