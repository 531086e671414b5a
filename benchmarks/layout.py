"""What a layout of 16,384 ranks costs: one rank's region, all regions, and a check that they tile the tensor.

python benchmarks/layout.py
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

from shardwright import Layout, Mesh, Region, Replicate, Shard


def measure(call: Callable[[], object], calls: int, rounds: int = 9) -> tuple[float, float, float]:
    """Median, fastest and slowest seconds of one call, over rounds of several calls."""
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        for _ in range(calls):
            call()
        times.append((time.perf_counter() - start) / calls)
    return statistics.median(times), min(times), max(times)


def report(what: str, times: tuple[float, float, float], unit: float, name: str, bound: str) -> None:
    median, low, high = (seconds / unit for seconds in times)
    print(f"{what:<64}{median:>9.2f} {name}   ({low:.2f} to {high:.2f})   {bound}")


def forget(layout: Layout) -> Layout:
    """The layout without the arithmetic it remembers, so that every round does all the work."""
    layout.__dict__.pop("_pieces", None)
    layout.__dict__.pop("_cuts", None)
    return layout


def measure_layout(layout: Layout) -> None:
    """Print what one layout's answers cost."""
    ranks = iter([*range(0, layout.mesh.size, 7)] * 100)
    held = measure(lambda: layout.region(next(ranks)), 500)
    report("which region does rank r hold", held, 1e-6, "µs", "bound 20 µs")
    listed = measure(lambda: forget(layout).regions(), 1)
    report("all regions with their owners, as Regions", listed, 1e-3, "ms", "bound 50 ms")
    report("all regions, as arrays", measure(lambda: forget(layout).table(), 1), 1e-3, "ms", "")
    regions, whole = [region for region, _ in layout.regions()], Region.whole(layout.shape)
    if not whole.covers(regions):
        raise SystemExit(f"{layout} does not tile its tensor")
    tiled = measure(lambda: whole.covers(regions), 1)
    report(f"do its {len(regions):,} regions tile the tensor", tiled, 1e-3, "ms", "")


def main() -> None:
    mesh = Mesh((64, 16, 16), ("dp", "tp", "pp"))
    print(f"{mesh!r}: {mesh.size:,} ranks; median (fastest to slowest) of 9 rounds")
    for kind, layout in {
        "two dimensions cut": Layout(mesh, [Shard(0), Shard(1), Replicate()], (8192, 50257)),
        "one dimension cut three times": Layout(mesh, [Shard(0)] * 3, (1_000_003, 64)),
    }.items():
        print(f"\n{kind}: {layout}")
        measure_layout(layout)


if __name__ == "__main__":
    main()
