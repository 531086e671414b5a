"""The memory a load needs beside the state is bounded, native allocations included."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import shardwright as sw
from shardwright import checkpoint
from shardwright.testing import run_ranks

MIB = 1 << 20
HONEST = {"MALLOC_MMAP_THRESHOLD_": "16384", "MALLOC_TRIM_THRESHOLD_": "0"}  # freed memory is not there to be had again

PEAK = """
def now(field):
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith(field))

def peak_of(work):
    with open("/proc/self/clear_refs", "w") as refs:
        refs.write("5")  # the highest is what it is now
    before = now("VmRSS:")
    work()
    return now("VmHWM:") - before
"""

MEASURE = (
    PEAK
    + """
import sys, torch
from shardwright import checkpoint

checkpoint.save({"w": torch.ones(3)}, sys.argv[1])
checkpoint.load({"w": torch.zeros(3)}, sys.argv[1], cast=True)
whole = torch.arange(20 << 20, dtype=torch.float32).view(2560, -1)  # 80 MiB
checkpoint.save({"w": whole, "many": {str(n): row.clone() for n, row in enumerate(whole)}}, sys.argv[1])
del whole

def measure(kind, state, only, **how):
    print(kind, peak_of(lambda: checkpoint.load(state, sys.argv[1], only=only, **how)), flush=True)

whole = torch.ones(2560, 8192)
many = {str(n): row for n, row in enumerate(whole)}
measure("plain", {"w": whole}, "w")
measure("many", {"many": many}, "many.*")
measure("strided", {"w": torch.ones(8192, 2560).t()}, "w")
measure("reversed", {"w": torch.ones(2560, 2 * 8192)[:, ::2]}, "w")
measure("narrower", {"w": whole.to(torch.bfloat16)}, "w", cast=True)
measure("wider", {"w": whole.double()}, "w", cast=True)
small = 1 << 20
measure("plain,1MiB", {"w": whole}, "w", memory=small)
measure("strided,1MiB", {"w": torch.ones(8192, 2560).t()}, "w", memory=small)
measure("narrower,1MiB", {"w": whole.to(torch.bfloat16)}, "w", cast=True, memory=small)
del whole, many
print("made", peak_of(lambda: checkpoint.read(sys.argv[1])) - 160 * (1 << 20), flush=True)
"""
)


def test_load_needs_less_than_64_mb_of_extra_memory_and_respects_the_limit(tmp_path: Path) -> None:
    ran = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", MEASURE, tmp_path],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, **HONEST},
    )
    assert ran.returncode == 0, ran.stderr
    found = {kind: int(more) for kind, more in (line.split() for line in ran.stdout.splitlines())}
    assert len(found) == 10
    assert max(found.values()) < 64 * MIB, found
    assert max(more for kind, more in found.items() if kind.endswith("1MiB")) < 8 * MIB, found


def _measured() -> Callable[[Callable[[], object]], int]:
    names: dict[str, Any] = {}
    exec(PEAK, names)
    measure: Callable[[Callable[[], object]], int] = names["peak_of"]
    return measure


def _load_otherwise(folder: str) -> dict[str, int]:
    peak_of = _measured()
    mesh = sw.init_device_mesh("cpu", (4,))
    rows = {f"w{n}": sw.zeros(4096, 2048, mesh=mesh, placements=[sw.Shard(0)]) for n in range(4)}  # 128 MiB in all
    checkpoint.save(rows, folder)
    checkpoint.load(rows, folder)
    found = {"rows": peak_of(lambda: checkpoint.load(rows, folder))}
    for kind, placement in (("columns", sw.Shard(1)), ("replicas", sw.Replicate())):
        state = {f"w{n}": sw.ones(4096, 2048, mesh=mesh, placements=[placement]) for n in range(4)}
        found[kind] = peak_of(lambda state=state: checkpoint.load(state, folder))
        narrow = {
            f"w{n}": sw.ones(4096, 2048, mesh=mesh, placements=[placement], dtype=torch.float16) for n in range(4)
        }
        found[f"{kind}, cast"] = peak_of(lambda state=narrow: checkpoint.load(state, folder, cast=True))
        found[f"{kind}, little"] = peak_of(lambda state=state: checkpoint.load(state, folder, memory=4 * MIB))
        found[f"{kind}, each alone"] = peak_of(lambda state=state: checkpoint.load(state, folder, memory=2 * MIB))
    return found


def test_shared_reads_need_less_than_64_mb_of_extra_memory_per_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in HONEST.items():
        monkeypatch.setenv(name, value)
    for found in run_ranks(4, _load_otherwise, str(tmp_path)):
        assert max(found.values()) < 64 * MIB, found
        few = {kind: more for kind, more in found.items() if kind.endswith(("little", "alone"))}
        assert max(few.values()) < 16 * MIB, few
