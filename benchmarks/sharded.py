"""What ShardedTensors cost: the metadata of 100,000 shards for 4,096 ranks, a reshard and an embedding on 4 ranks.

    python benchmarks/sharded.py [--rounds 5] [--json FILE]

The metadata part is arithmetic in one process, with a goal of 2 s for all of it; PyTorch's own figures stand beside
it, where it has such a step, also for fewer shards, as some of its steps grow with the square. The other two parts run
on 4 local processes over gloo, ours and PyTorch's in turns; bytes are what each rank receives.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import statistics
import time
import warnings
from collections.abc import Callable
from datetime import date
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._shard.sharded_tensor as torch_sharded
from torch.distributed._shard.metadata import ShardMetadata as TorchShardMetadata
from torch.distributed._shard.sharded_tensor.metadata import TensorProperties as TorchTensorProperties
from torch.distributed._shard.sharding_spec import ChunkShardingSpec as TorchChunkShardingSpec
from torch.distributed._shard.sharding_spec._internals import check_tensor, validate_non_overlapping_shards_metadata
from torch.nn import functional

from shardwright import comm, sharded
from shardwright.sharded import ChunkShardingSpec, EnumerableShardingSpec, ShardMetadata, TensorProperties
from shardwright.testing import run_ranks

SHARDS, RANKS, GOAL = 100_000, 4096, 2.0
Boxes = list[tuple[list[int], list[int]]]
Times = dict[str, list[float]]


# Metadata.


def rows(count: int, size: tuple[int, int]) -> Boxes:
    step = -(-size[0] // count)
    starts = [min(step * n, size[0]) for n in range(count)]
    return [([start, 0], [min(step, size[0] - start), size[1]]) for start in starts]


def grid(count: int, size: tuple[int, int]) -> Boxes:
    side = round(count**0.5)
    cuts = [[extent * n // side for n in range(side + 1)] for extent in size]
    spans = [[(a, b - a) for a, b in pairwise(cut)] for cut in cuts]
    return [([a, b], [m, n]) for a, m in spans[0] for b, n in spans[1]]


def scattered(count: int, size: tuple[int, int], seed: int) -> Boxes:
    """Boxes of any sizes, by cutting the longer side somewhere in its middle half, again and again."""
    rng, boxes = random.Random(seed), [(0, 0, *size)]
    for number in range(count - 1):  # the oldest box, hence about the largest, is cut
        top, left, height, width = boxes[number]
        if height > width:
            at = rng.randint(height // 4, 3 * height // 4)
            boxes += [(top, left, at, width), (top + at, left, height - at, width)]
        else:
            at = rng.randint(width // 4, 3 * width // 4)
            boxes += [(top, left, height, at), (top, left + at, height, width - at)]
    return [([top, left], [height, width]) for top, left, height, width in boxes[count - 1 :]]


def enumerated(boxes: Boxes, first: int) -> EnumerableShardingSpec:
    return EnumerableShardingSpec(
        [ShardMetadata(o, s, f"rank:{(n + first) % RANKS}/cpu") for n, (o, s) in enumerate(boxes)]
    )


def kinds() -> dict[str, tuple[tuple[int, int], Callable[[], Any], Callable[[], Any]]]:
    """For each kind of tiling: the tensor's size, the spec it has, and the one it is brought to."""
    tall, square = (1_000_003, 64), (100_000, 100_000)
    old, new = grid(SHARDS, square), grid(SHARDS * 5 // 4, square)
    some, others = scattered(SHARDS, square, 1), scattered(SHARDS, square, 2)
    places = [[f"rank:{n * step % RANKS}/cpu" for n in range(count)] for step, count in ((1, SHARDS), (7, SHARDS - 5))]
    return {
        "chunks of rows": (tall, lambda: ChunkShardingSpec(0, places[0]), lambda: ChunkShardingSpec(0, places[1])),
        "a grid": (square, lambda: enumerated(old, 0), lambda: enumerated(new, 5)),
        "scattered boxes": (square, lambda: enumerated(some, 0), lambda: enumerated(others, 5)),
    }


def metadata_round(size: tuple[int, int], source: Callable[[], Any], target: Callable[[], Any], times: Times) -> str:
    """Every step once; what moves, in words."""

    def timed(what: str, call: Callable[[], Any]) -> Any:
        start = time.perf_counter()
        result = call()
        times.setdefault(what, []).append(time.perf_counter() - start)
        return result

    def owner(placement: Any) -> int:
        return placement.rank()

    properties = TensorProperties()
    spec = timed("the spec", source)
    metadata = timed("build_metadata", lambda: spec.build_metadata(torch.Size(size), properties))
    timed("validate", metadata.validate)
    table = timed("as a table", lambda: metadata.table(owner))
    other = timed("the new spec", target)
    wanted = timed("its build_metadata", lambda: other.build_metadata(torch.Size(size), properties))
    timed("its validate", wanted.validate)
    wanted_table = timed("its table", lambda: wanted.table(owner))
    moves = timed("the moves of all ranks", lambda: sharded.plan_transfer(table, wanted_table))
    timed("the moves of one rank", lambda: sharded.plan_transfer_for_rank(table, wanted_table, 7))
    return str(moves)


def summary(seconds: list[float]) -> dict[str, float]:
    return {"median s": statistics.median(seconds), "low s": min(seconds), "high s": max(seconds)}


def measure_metadata(rounds: int) -> dict[str, Any]:
    results: dict[str, Any] = {}
    for kind, (size, source, target) in kinds().items():
        times: Times = {}
        for _ in range(rounds):
            moved = metadata_round(size, source, target, times)
        totals = [sum(parts) for parts in zip(*times.values(), strict=True)]
        results[kind] = {what: summary(seconds) for what, seconds in {**times, "all of it": totals}.items()}
        print(f"\n{kind}: {moved}")
        for what, row in results[kind].items():
            bound = f"   goal {GOAL:.0f} s" if what == "all of it" else ""
            print(f"  {what:<24}{row['median s']:>9.3f} s   ({row['low s']:.3f} to {row['high s']:.3f}){bound}")
    return results


def measure_theirs(rounds: int) -> dict[str, Any]:
    """PyTorch's steps, beside ours, for as many shards as each can stand."""

    def ours(boxes: Boxes, size: tuple[int, int]) -> Callable[[], object]:
        shards = [ShardMetadata(o, s, f"rank:{n % RANKS}/cpu") for n, (o, s) in enumerate(boxes)]
        return sharded.ShardedTensorMetadata(shards, torch.Size(size)).validate

    def theirs(boxes: Boxes, size: tuple[int, int]) -> Callable[[], object]:
        shards = [TorchShardMetadata(o, s, f"rank:{n % RANKS}/cpu") for n, (o, s) in enumerate(boxes)]
        return lambda: (validate_non_overlapping_shards_metadata(shards), check_tensor(shards, torch.Size(size)))

    works: dict[str, tuple[Callable[[], object], Callable[[], object]]] = {}
    for count in (10_000, SHARDS):
        places = [f"rank:{n % RANKS}/cpu" for n in range(count)]
        one, other = ChunkShardingSpec(0, places), TorchChunkShardingSpec(0, places)
        size = torch.Size([1_000_003, 64])
        works[f"build_metadata, {count:,} chunks of rows"] = (
            lambda one=one, size=size: one.build_metadata(size, TensorProperties()),
            lambda other=other, size=size: other.build_metadata(size, TorchTensorProperties()),
        )
    for count in (10_000, SHARDS):
        given = rows(count, (1_000_000, 64)), (1_000_000, 64)
        works[f"validate, {count:,} chunks of rows"] = (ours(*given), theirs(*given))
    for count in (1_024, 2_025, 4_096):
        given = grid(count, (100_000, 100_000)), (100_000, 100_000)
        works[f"validate, a grid of {count:,}"] = (ours(*given), theirs(*given))
    results = {}
    print("\nbeside PyTorch's: median seconds, ours and theirs")
    for what, pair in works.items():
        results[what] = compare(*in_turns(pair, rounds))
        show(what, results[what])
    return results


def in_turns(works: tuple[Callable[[], object], Callable[[], object]], rounds: int) -> tuple[list[float], list[float]]:
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(rounds):
        for work, seconds in zip(works, times, strict=True):
            start = time.perf_counter()
            work()
            seconds.append(time.perf_counter() - start)
    return times


def compare(ours: list[float], theirs: list[float]) -> dict[str, float]:
    """Medians, and their ratio with the quartiles of the rounds' own."""
    ratios = sorted(a / b for a, b in zip(ours, theirs, strict=True))
    middle = statistics.median(ours), statistics.median(theirs)
    return {
        "shardwright s": middle[0],
        "torch s": middle[1],
        "ratio": middle[0] / middle[1],
        "ratio low": ratios[len(ratios) // 4],
        "ratio high": ratios[-1 - len(ratios) // 4],
    }


def show(what: str, row: dict[str, float]) -> None:
    ratio = f"ratio {row['ratio']:.3f} ({row['ratio low']:.3f} to {row['ratio high']:.3f})"
    print(f"  {what:<48}{row['shardwright s']:>10.4f}{row['torch s']:>10.4f}   {ratio}")


# On ranks.


def reshard_times(rounds: int) -> list[Any]:
    """64 MB of float32, cut along rows and brought to columns: seconds of each round, and bytes received."""
    side, places = 4096, [f"rank:{rank}/cpu" for rank in range(4)]
    kinds = {sharded.rand: ChunkShardingSpec, torch_sharded.rand: TorchChunkShardingSpec}
    times: list[list[float]] = [[], []]
    received = 0
    for number in range(rounds + 1):
        for which, (make, spec) in enumerate(kinds.items()):
            tensor = make(spec(0, places), side, side)
            dist.barrier()
            start = time.perf_counter()
            with comm.count() as traffic:
                tensor.reshard(spec(1, places))
            dist.barrier()
            if number:  # the first opens the connections
                times[which].append(time.perf_counter() - start)
            received = max(received, traffic.bytes)
    return [*times, received]


def embedding_times(rounds: int, batch: int = 4096) -> list[Any]:
    """Forward and backward of a row-sharded table of 200,000 x 64, every rank looking up indices of its own."""
    places = [f"rank:{rank}/cpu" for rank in range(4)]
    size, rank = (200_000, 64), dist.get_rank()
    kinds = {sharded.rand: ChunkShardingSpec, torch_sharded.rand: TorchChunkShardingSpec}
    tables = [make(spec(0, places), *size, requires_grad=True) for make, spec in kinds.items()]
    with torch.no_grad():
        tables[1].local_shards()[0].tensor.copy_(tables[0].local_shards()[0].tensor)
    indices = torch.randint(0, size[0], (batch,), generator=torch.Generator().manual_seed(rank))
    times: list[list[float]] = [[], []]
    for number in range(rounds + 1):
        rows = []
        for table, seconds in zip(tables, times, strict=True):
            table.local_shards()[0].tensor.grad = None
            dist.barrier()
            start = time.perf_counter()
            found = functional.embedding(indices, table)
            found.square().sum().backward()
            dist.barrier()
            if number:
                seconds.append(time.perf_counter() - start)
            rows.append(found.detach())
        torch.testing.assert_close(*rows)
    return times


def measure_ranks(rounds: int) -> dict[str, Any]:
    results: dict[str, Any] = {}
    print("\non 4 ranks: median seconds of rank 0, ours and theirs")
    ours, theirs, received = run_ranks(4, reshard_times, 3 * rounds, timeout=600.0)[0]
    results["reshard of 64 MB, rows to columns"] = compare(ours, theirs)
    show("reshard of 64 MB, rows to columns", results["reshard of 64 MB, rows to columns"])
    print(f"  a rank receives {received:,} bytes, the least there is: 3 of the 4 quarters of its 16 MiB")
    name = "embedding of 4,096 rows, forward and backward"
    results[name] = compare(*run_ranks(4, embedding_times, 4 * rounds, timeout=600.0)[0])
    show(name, results[name])
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    warnings.simplefilter("ignore", FutureWarning)  # PyTorch's say that its ShardedTensor is deprecated
    print(
        f"torch {torch.__version__}, {platform.machine()}, {os.cpu_count()} cores; medians of {options.rounds} rounds"
    )
    print(f"metadata of {SHARDS:,} shards for {RANKS:,} ranks")
    metadata = measure_metadata(options.rounds)
    results = {"metadata": metadata, "beside torch": measure_theirs(options.rounds)}
    results["on 4 ranks"] = measure_ranks(options.rounds)
    if options.json:
        about = {"date": str(date.today()), "torch": torch.__version__, "cores": os.cpu_count(), "goal s": GOAL}
        options.json.write_text(json.dumps({**about, "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
