"""A training step of a Llama-like model on 4 ranks, beside PyTorch's FSDP2 (and tensor parallelism), in turns.

    python benchmarks/parallel.py [--rounds 7] [--json FILE]

Both libraries train the same model (7.5 M parameters) from the same weights on the same batches, over gloo:

- `dp=4`: every block a unit of `fully_shard`, plain per-rank batches;
- `2x2`: fully sharded over `dp`, tensor and sequence parallel over `tp`, by the same plan.

Printed: seconds of forward and backward, and of a step with gradient clipping and AdamW, as medians over rounds with
their spread; the peak of memory that a step takes beside what rests between steps; the bytes that each rank receives in
a step. Losses are compared to show that both compute the same.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.tensor.parallel as torch_parallel
import torch.utils._python_dispatch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import Replicate as TorchReplicate
from torch.distributed.tensor import Shard as TorchShard
from torch.nn import functional

import shardwright as sw
from shardwright import comm
from shardwright.testing import run_ranks

LAYERS, WIDTH, HEADS, HIDDEN, VOCABULARY, LENGTH, BATCH = 8, 256, 8, 704, 4096, 128, 8
GOALS = {
    ("dp=4", "forward and backward"): 0.85,
    ("2x2", "forward and backward"): 0.7,
    ("2x2", "step"): 0.6,
    ("dp=4", "peak memory"): 0.95,
    ("2x2", "peak memory"): 0.95,
    ("dp=4", "bytes"): 1.0,
    ("2x2", "bytes"): 1.0,
}


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        batch, length = x.shape[:2]
        q, k, v = (part(x).view(batch, length, -1, WIDTH // HEADS).transpose(1, 2) for part in (self.q, self.k, self.v))
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o(attended.transpose(1, 2).reshape(batch, length, -1))


class FeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(WIDTH, HIDDEN, bias=False) for _ in range(2))
        self.down = nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(functional.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention_norm, self.norm = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.attention, self.feed_forward = Attention(), FeedForward()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.feed_forward(self.norm(x))


class Llama(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = nn.RMSNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def model() -> Llama:
    torch.manual_seed(0)
    return Llama()


def batch(number: int) -> Tensor:
    """Return the tokens of a global batch."""
    return torch.randint(0, VOCABULARY, (BATCH, LENGTH + 1), generator=torch.Generator().manual_seed(number))


Trainer = tuple[nn.Module, Callable[[int], Any], Callable[[Any], float]]  # the model, its loss, the loss as a number


def loss_of(logits: Tensor, tokens: Tensor) -> Tensor:
    return functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def per_rank(trained: nn.Module, part: int, parts: int) -> Callable[[int], Any]:
    """Return a function that computes the loss of this rank's part of a batch."""

    def loss(number: int) -> Tensor:
        tokens = batch(number).chunk(parts)[part]
        return loss_of(trained(tokens[:, :-1]), tokens)

    return loss


def mean_over_ranks(loss: Tensor) -> float:
    total = loss.detach().clone()
    dist.all_reduce(total)
    return float(total) / dist.get_world_size()


def ours_fully_sharded() -> Trainer:
    mesh = sw.init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))
    trained = model()
    for block in trained.blocks:
        sw.fully_shard(block, mesh=mesh)
    sw.fully_shard(trained, mesh=mesh)
    return trained, per_rank(trained, dist.get_rank(), 4), mean_over_ranks


def theirs_fully_sharded() -> Trainer:
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))
    trained = model()
    for block in trained.blocks:
        torch_fully_shard(block, mesh=mesh)
    torch_fully_shard(trained, mesh=mesh)
    return trained, per_rank(trained, dist.get_rank(), 4), mean_over_ranks


def two_dimensional_plan(styles: Any, shard: Any, replicate: Any) -> dict[str, Any]:
    """Return the plan of tensor and sequence parallelism, in the styles of one library or the other."""
    sequence, whole = shard(1), replicate()
    colwise, rowwise = styles.ColwiseParallel, styles.RowwiseParallel
    gathered = {"input_layouts": sequence, "desired_input_layouts": whole}
    block = {
        "attention_norm": styles.SequenceParallel(),
        "attention": styles.PrepareModuleInput(**gathered),
        **{f"attention.{name}": colwise() for name in "qkv"},
        "attention.o": rowwise(output_layouts=sequence),
        "norm": styles.SequenceParallel(),
        "feed_forward": styles.PrepareModuleInput(**gathered),
        "feed_forward.gate": colwise(),
        "feed_forward.up": colwise(),
        "feed_forward.down": rowwise(output_layouts=sequence),
    }
    return {
        "embedding": rowwise(input_layouts=whole, output_layouts=sequence),
        **{f"blocks.*.{name}": style for name, style in block.items()},
        "norm": styles.SequenceParallel(),
        "head": colwise(input_layouts=sequence, output_layouts=whole),
    }


def ours_two_dimensional() -> Trainer:
    mesh = sw.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    trained = model()
    sw.parallelize(trained, mesh, two_dimensional_plan(sw, sw.Shard, sw.Replicate))

    def loss(number: int) -> Any:
        tokens = sw.shard_batch(batch(number), mesh, check=False)
        return loss_of(trained(tokens[:, :-1]), tokens)

    return trained, loss, lambda value: float(value.full_tensor())


def theirs_two_dimensional() -> Trainer:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    trained = model()
    plan = two_dimensional_plan(torch_parallel, TorchShard, TorchReplicate)
    torch_parallel.parallelize_module(trained, mesh["tp"], plan)
    for block in trained.blocks:
        torch_fully_shard(block, mesh=mesh["dp"])
    torch_fully_shard(trained, mesh=mesh["dp"])
    return trained, per_rank(trained, dist.get_rank() // 2, 2), mean_over_ranks


CASES = {"dp=4": (ours_fully_sharded, theirs_fully_sharded), "2x2": (ours_two_dimensional, theirs_two_dimensional)}


class ReceivedBytes(torch.utils._python_dispatch.TorchDispatchMode):
    """Add up what this rank receives in torch's collectives: the payload from others, as `comm.count` counts ours."""

    def __init__(self) -> None:
        super().__init__()
        self.total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func._schema.name
        if name == "c10d::_allgather_base_":
            self.total += args[0].nbytes - args[1].nbytes
        elif name == "c10d::_reduce_scatter_base_":
            self.total += args[1].nbytes - args[0].nbytes
        elif name == "_c10d_functional::all_reduce":
            ranks = dist.get_world_size(dist.distributed_c10d._resolve_process_group(args[2]))
            self.total += 2 * args[0].nbytes * (ranks - 1) // ranks
        elif name == "_c10d_functional::all_gather_into_tensor":
            self.total += args[0].nbytes * (args[1] - 1)
        elif name == "_c10d_functional::reduce_scatter_tensor":
            self.total += args[0].nbytes * (args[2] - 1) // args[2]
        elif name.startswith(("c10d::", "_c10d_functional::")) and not any(
            word in name for word in ("barrier", "wait", "wrap")
        ):
            raise NotImplementedError(f"do not know how many bytes {name} receives")
        return result


def received_bytes(name: str, loss: Callable[[int], Any]) -> int:
    """Return the bytes that this rank receives in a forward and backward pass."""
    if name == "ours":
        with comm.count() as ours:
            loss(0).backward()
        return ours.bytes
    with ReceivedBytes() as theirs:
        loss(0).backward()
    return theirs.total


def peak_bytes(loss: Callable[[int], Any]) -> int:
    """Return the most bytes of tensors that a forward and backward pass has at once, beside those before it."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        loss(0).backward()
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]  # type: ignore[union-attr]  # set by the end of the profile
    live = most = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        live += event.nbytes()
        most = max(most, live)
    return most


def timed(work: Callable[[], Any]) -> tuple[float, Any]:
    dist.barrier()
    start = time.perf_counter()
    result = work()
    dist.barrier()
    return time.perf_counter() - start, result


def measure(case: str, rounds: int) -> dict[str, Any]:
    """Train with both libraries in turns; return the figures of each."""
    torch.set_num_threads(1)
    names = ("ours", "theirs")
    trainers = dict(zip(names, (make() for make in CASES[case]), strict=True))
    optimizers = {name: torch.optim.AdamW(trainers[name][0].parameters(), lr=1e-3, foreach=True) for name in names}
    seconds: dict[str, dict[str, list[float]]] = {name: {"forward and backward": [], "step": []} for name in names}
    losses: dict[str, list[float]] = {name: [] for name in names}
    for number in range(rounds + 2):
        for name in names if number % 2 else names[::-1]:
            trained, loss, as_number = trainers[name]
            optimizer = optimizers[name]

            def forward_and_backward(loss: Callable[[int], Any] = loss, number: int = number) -> Any:
                value = loss(number)
                value.backward()
                return value

            def update(trained: nn.Module = trained, optimizer: torch.optim.Optimizer = optimizer) -> None:
                torch.nn.utils.clip_grad_norm_(trained.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()

            forward, value = timed(forward_and_backward)
            rest, _ = timed(update)
            losses[name].append(as_number(value))
            if number >= 2:  # the first opens connections and makes plans
                seconds[name]["forward and backward"].append(forward)
                seconds[name]["step"].append(forward + rest)
    figures: dict[str, Any] = {"seconds": seconds, "losses": losses, "peak memory": {}, "bytes": {}}
    for name in names:
        trained, loss, _ = trainers[name]
        figures["bytes"][name] = received_bytes(name, loss)
        trained.zero_grad()
        figures["peak memory"][name] = peak_bytes(loss)
        trained.zero_grad()
    return figures


def show(case: str, figures: dict[str, Any]) -> dict[str, Any]:
    """Print the figures of a case, and return them for the JSON file."""
    results: dict[str, Any] = {}
    for what in ("forward and backward", "step"):
        ours, theirs = (figures["seconds"][name][what] for name in ("ours", "theirs"))
        medians = [statistics.median(times) for times in (ours, theirs)]
        spreads = [(min(times), max(times)) for times in (ours, theirs)]
        ratio = statistics.median(a / b for a, b in zip(ours, theirs, strict=True))
        results[what] = {"ours": medians[0], "theirs": medians[1], "spread": spreads, "ratio": ratio}
        texts = [
            f"{m * 1e3:7.1f} ms ({a * 1e3:.0f} to {b * 1e3:.0f})" for m, (a, b) in zip(medians, spreads, strict=True)
        ]
        print(f"  {what:22} ours {texts[0]}, theirs {texts[1]}: {ratio:.2f} {_goal(case, what)}")
    for what in ("peak memory", "bytes"):
        ours, theirs = figures[what]["ours"], figures[what]["theirs"]
        results[what] = {"ours": ours, "theirs": theirs, "ratio": ours / theirs}
        sizes = f"ours {ours / 1e6:.2f} MB, theirs {theirs / 1e6:.2f} MB"
        print(f"  {what:22} {sizes}: {ours / theirs:.2f} {_goal(case, what)}")
    difference = max(abs(a - b) for a, b in zip(*figures["losses"].values(), strict=True))
    results["largest difference of losses"] = difference
    print(f"  losses differ by at most {difference:.1e} over {len(figures['losses']['ours'])} steps")
    return results


def _goal(case: str, what: str) -> str:
    goal = GOALS.get((case, what))
    return "" if goal is None else f"(goal {goal})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--case", choices=CASES, action="append")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    count = sum(parameter.numel() for parameter in model().parameters())
    print(f"torch {torch.__version__}, {os.cpu_count()} cores, 4 ranks over gloo; {count / 1e6:.1f} M parameters")
    results = {}
    for case in options.case or CASES:
        print(case)
        results[case] = show(case, run_ranks(4, measure, case, options.rounds, timeout=1200.0)[0])
    if options.json:
        about = {"date": str(date.today()), "torch": torch.__version__, "machine": platform.machine()}
        options.json.write_text(json.dumps({**about, "cores": os.cpu_count(), "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
