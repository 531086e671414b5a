"""What a save from GPU memory costs: how long an async save blocks, beside a pinned copy, a sync save, and DCP's.

    python benchmarks/checkpoint_gpu.py [--gb 4.3] [--rounds 5] [--folder DIR] [--json FILE]

A state of large matrices on one GPU. "pinned copy" is the same bytes to pinned host memory that is there already.
"""

from __future__ import annotations

import argparse
import json
import platform
import shutil
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

import shardwright as sw
from shardwright import checkpoint


def timed(work: Callable[[], Any]) -> tuple[float, Any]:
    torch.cuda.synchronize()
    start = time.perf_counter()
    result = work()
    return time.perf_counter() - start, result


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--gb", type=float, default=4.3)
    options.add_argument("--rounds", type=int, default=5)
    options.add_argument("--folder", type=Path)
    options.add_argument("--json", type=Path)
    chosen = options.parse_args()
    if not torch.cuda.is_available():
        print("no CUDA device: nothing to measure")
        return
    folder = chosen.folder or Path(tempfile.mkdtemp())
    sw.init_device_mesh("cuda", (1,))
    count = round(chosen.gb * 1e9 / (4096 * 4096 * 4))
    state = {f"w{n}": torch.randn(4096, 4096, device="cuda") for n in range(count)}
    pinned = {name: torch.empty(t.shape, dtype=t.dtype, pin_memory=True) for name, t in state.items()}
    target = {name: torch.zeros_like(t) for name, t in state.items()}

    def copy() -> None:
        for name, t in state.items():
            pinned[name].copy_(t, non_blocking=True)
        torch.cuda.synchronize()

    times: dict[str, list[float]] = {}
    for number in range(chosen.rounds + 1):
        rows: dict[str, float] = {}
        rows["pinned copy"] = timed(copy)[0]
        rows["async save, blocked"], handle = timed(lambda: checkpoint.async_save(state, folder / "ours"))
        rows["async save, until written"] = rows["async save, blocked"] + timed(handle.wait)[0]
        rows["save"] = timed(lambda: checkpoint.save(state, folder / "ours"))[0]
        rows["load"] = timed(lambda: checkpoint.load(target, folder / "ours"))[0]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            shutil.rmtree(folder / "theirs", ignore_errors=True)
            rows["DCP save"] = timed(lambda: dcp.save(state, checkpoint_id=folder / "theirs"))[0]
            rows["DCP load"] = timed(lambda: dcp.load(target, checkpoint_id=folder / "theirs"))[0]
        if number == 0:
            print(f"the first async save blocks {rows['async save, blocked']:.3f} s")
            continue
        for name, seconds in rows.items():
            times.setdefault(name, []).append(seconds)
    assert all(torch.equal(target[name], t) for name, t in state.items())
    results: dict[str, Any] = {
        "date": date.today().isoformat(),
        "machine": f"{torch.cuda.get_device_name()}, {platform.machine()}, torch {torch.__version__}",
        "bytes": sum(t.nbytes for t in state.values()),
    }
    for name, seconds in times.items():
        results[name] = {"median s": statistics.median(seconds), "low s": min(seconds), "high s": max(seconds)}
        print(f"  {name:<28}{statistics.median(seconds):>8.3f} s  ({min(seconds):.3f} to {max(seconds):.3f})")
    shutil.rmtree(folder, ignore_errors=True)
    if chosen.json:
        chosen.json.write_text(json.dumps(results, indent=1) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
