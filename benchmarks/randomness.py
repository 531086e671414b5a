"""What layout-independent random numbers cost beside torch's own, on one CPU thread.

python benchmarks/randomness.py
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

from shardwright.layout import Region
from shardwright.tensor.random import fill_integers, fill_normal, fill_scaled_mask, fill_uniform

SIZES = (10_000, 1_000_000, 10_000_000)


def seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def compare(what: str, bound: str, torchs: Callable[[], object], ours: Callable[[], object], rounds: int) -> None:
    """Time both in turns, and print medians with their spread."""
    torchs(), ours()
    times = [(seconds(torchs), seconds(ours)) for _ in range(rounds)]
    cells = []
    for column in zip(*times, strict=True):
        median, low, high = (1e3 * at for at in (statistics.median(column), min(column), max(column)))
        cells.append(f"{median:9.3f} ({low:.3f} to {high:.3f})")
    ratio = statistics.median(ours for _, ours in times) / statistics.median(torchs for torchs, _ in times)
    print(f"{what:<34}{cells[0]:>34}{cells[1]:>34}{ratio:9.2f}  {bound}")


def whole(n: int, rounds: int) -> None:
    """All of a tensor of n elements: also what a shard of n rows' worth costs, as it is one run."""
    region, shape, x = Region.whole((n,)), (n,), torch.randn(n)
    of = f"of {n:,}"
    compare(
        f"rand {of}", "≤ 3", lambda: torch.rand(n), lambda: fill_uniform(torch.empty(n), region, shape, 0, 1), rounds
    )

    def dropout() -> torch.Tensor:
        return x * fill_scaled_mask(torch.empty_like(x), region, shape, 0, 1, 0.9)

    compare(f"dropout {of}", "≤ 3", lambda: torch.dropout(x, 0.1, True), dropout, rounds)
    compare(f"randn {of}", "", lambda: torch.randn(n), lambda: fill_normal(torch.empty(n), region, shape, 0, 1), rounds)

    def integers() -> torch.Tensor:
        return fill_integers(torch.empty(n, dtype=torch.int64), region, shape, 0, 1, 0, 50_257)

    compare(f"randint {of}", "", lambda: torch.randint(0, 50_257, (n,)), integers, rounds)


def columns(ranks: int) -> None:
    """One rank's columns of a square matrix: many short runs."""
    shape, width = (4096, 4096), 4096 // ranks
    region = Region((0, width), (4096, width))

    def ours() -> torch.Tensor:
        return fill_uniform(torch.empty(region.size), region, shape, 0, 1)

    compare(f"rand, Shard(1) over {ranks} ranks", "", lambda: torch.rand(region.size), ours, 7)


def main() -> None:
    torch.set_num_threads(1)
    print(f"{'milliseconds: median (range)':<34}{'torch':>34}{'shardwright':>34}{'ratio':>9}")
    for n in SIZES:
        whole(n, rounds=9 if n == max(SIZES) else 31)
    for ranks in (2, 8, 64):
        columns(ranks)


if __name__ == "__main__":
    main()
