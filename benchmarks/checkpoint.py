"""What checkpoints cost, beside torch.distributed.checkpoint (DCP), torch.save and safetensors, in one run.

    python benchmarks/checkpoint.py [--rounds 7] [--gb 0.95] [--folder DIR] [--only save,load,...] [--json FILE]

Every work is done in turns, with fresh files each time; figures are medians with the lowest and highest of the rounds,
and ratios to a plain raw write or read of the same bytes in the same rounds. `raw` is one thread writing (reading) the
same memory in calls of 4 MiB, with one fsync at the end; `raw, early` asks for writeback after every call, with two
threads. Loads are into the same memory as the raw read, and on as many threads. Checksums are computed and verified,
and data is flushed, wherever the library can.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import platform
import shutil
import statistics
import threading
import time
import warnings
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard as TorchShard
from torch.distributed.tensor import distribute_tensor as torch_distribute

import shardwright as sw
from shardwright import checkpoint, comm
from shardwright.checkpoint.format.data_file import FileEntry
from shardwright.checkpoint.format.locate import ChunkLocator
from shardwright.checkpoint.format.tensor_table import TensorTable
from shardwright.checkpoint.format.write_layout import file_plan
from shardwright.checkpoint.reading.host_sharing import ReadRequest, shared
from shardwright.checkpoint.reading.read_assignment import ReadAssignment
from shardwright.checkpoint.runtime.address_space import memory_at
from shardwright.layout import Layout, Mesh, Shard
from shardwright.storage import Calls, LocalStorage
from shardwright.testing import run_ranks

CALL = 4 << 20
Times = dict[str, list[float]]


def a_model(gigabytes: float) -> dict[str, torch.Tensor]:
    """291 tensors, as a transformer has them: most of the bytes in matrices, and many small ones."""
    torch.manual_seed(0)
    width = max(8, int((gigabytes * 1e9 / 4 / 32 / 12) ** 0.5) // 8 * 8)
    state = {"embed": torch.randn(width, width)}
    for layer in range(32):
        for name, rows in (("q", 1), ("k", 1), ("v", 1), ("o", 1), ("up", 4), ("down", 4)):
            state[f"layers.{layer}.{name}"] = torch.randn(rows * width, width)
        for name in ("norm1", "norm2", "bias"):
            state[f"layers.{layer}.{name}"] = torch.randn(width)
    state["norm"], state["head"] = torch.randn(width), torch.randn(width, width // 8)
    return state


# The rulers.


def pieces(state: dict[str, torch.Tensor]) -> list[memoryview]:
    return [memory_at(t.data_ptr(), t.nbytes) for t in state.values() if t.nbytes]


def calls(state: dict[str, torch.Tensor]) -> list[tuple[list[memoryview], int]]:
    """The bytes of the state as a list of calls: some buffers, and where they go."""
    found, batch, waiting, start = [], [], 0, 0
    for piece in pieces(state):
        for at in range(0, len(piece), CALL):
            part = piece[at : at + CALL]
            if waiting + len(part) > CALL or len(batch) == 1000:
                found.append((batch, start))
                batch, start, waiting = [], start + waiting, 0
            batch.append(part)
            waiting += len(part)
    return [*found, (batch, start)]


def raw_write(state: dict[str, torch.Tensor], path: Path, threads: int = 1, early: bool = False) -> None:
    fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY)
    work, system = calls(state), Calls()

    def part(number: int) -> None:
        for buffers, start in work[len(work) * number // threads : len(work) * (number + 1) // threads]:
            size = sum(map(len, buffers))
            assert os.pwritev(fd, buffers, start) == size
            if early:
                system.write_back(fd, start, size)

    in_threads(part, threads)
    os.fsync(fd)
    os.close(fd)


def raw_read(state: dict[str, torch.Tensor], path: Path, threads: int) -> None:
    fd = os.open(path, os.O_RDONLY)
    work = calls(state)

    def part(number: int) -> None:
        for buffers, start in work[len(work) * number // threads : len(work) * (number + 1) // threads]:
            assert os.preadv(fd, buffers, start) == sum(map(len, buffers))

    in_threads(part, threads)
    os.close(fd)


def in_threads(work: Callable[[int], None], count: int) -> None:
    others = [threading.Thread(target=work, args=(number,)) for number in range(1, count)]
    for thread in others:
        thread.start()
    work(0)
    for thread in others:
        thread.join()


def flushed(path: Path, _: object = None) -> None:
    """Flushes what was written to a path just before."""
    for file in [path, *path.rglob("*")] if path.is_dir() else [path]:
        if file.is_file():
            fd = os.open(file, os.O_RDONLY)
            os.fsync(fd)
            os.close(fd)


def forget_pages(folder: Path) -> None:
    """Has the kernel drop what it keeps of the files, so that the next read is of the disk."""
    os.sync()
    for file in folder.rglob("*"):
        if file.is_file():
            fd = os.open(file, os.O_RDONLY)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)


def dcp_save(state: dict[str, Any], path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(state, checkpoint_id=path, storage_writer=dcp.FileSystemWriter(path, sync_files=True))


def dcp_load(state: dict[str, Any], path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(state, checkpoint_id=path)


# What is measured.


def rounds_of(
    works: dict[str, Callable[[Path], None]], folder: Path, rounds: int, before: Callable[[Path], None] | None = None
) -> tuple[Times, Times]:
    """Wall and CPU seconds of every work, in turns; each has its own path, emptied first, or prepared by `before`."""
    wall: Times = {name: [] for name in works}
    cpu: Times = {name: [] for name in works}
    for number in range(rounds + 1):  # the first is not counted
        for name, work in works.items():
            path = folder / name.replace(" ", "-").replace(",", "")
            if before is None:
                shutil.rmtree(path, ignore_errors=True)
                path.unlink(missing_ok=True)
            else:
                before(path)
            start, used = time.perf_counter(), time.process_time()
            work(path)
            if number:
                wall[name].append(time.perf_counter() - start)
                cpu[name].append(time.process_time() - used)
    return wall, cpu


def table(title: str, times: Times, ruler: str | None, unit: float = 1.0, suffix: str = "s") -> dict[str, Any]:
    print(f"\n{title}")
    results = {}
    base = statistics.median(times[ruler]) if ruler else None
    for name, seconds in times.items():
        scaled = [second * unit for second in seconds]
        row: dict[str, Any] = {"median": statistics.median(scaled), "low": min(scaled), "high": max(scaled)}
        if ruler and base:
            row[f"x {ruler}"] = statistics.median(seconds) / base
        results[name] = row
        ratio = f"   {row[f'x {ruler}']:.2f} x {ruler}" if ruler else ""
        print(f"  {name:<28}{row['median']:>9.3f} {suffix}  ({row['low']:.3f} to {row['high']:.3f}){ratio}")
    return results


def measure_save(state: dict[str, torch.Tensor], folder: Path, rounds: int) -> dict[str, Any]:
    works: dict[str, Callable[[Path], None]] = {
        "raw": lambda path: raw_write(state, path),
        "raw, early": lambda path: raw_write(state, path, threads=2, early=True),
        "shardwright": lambda path: checkpoint.save(state, path),
        "DCP": lambda path: dcp_save(state, path),
        "torch.save": lambda path: flushed(path, torch.save(state, path)),
        "safetensors": lambda path: flushed(path, save_file(state, path)),
    }
    size = sum(t.nbytes for t in state.values()) / 1e9
    wall, _ = rounds_of(works, folder, rounds)
    results = table(f"save {size:.2f} GB in {len(state)} tensors, one process, flushed", wall, "raw")
    early = statistics.median(wall["shardwright"]) / statistics.median(wall["raw, early"])
    print(f"  shardwright is {early:.2f} x raw, early")
    return {**results, "shardwright x raw, early": early}


def measure_load(state: dict[str, torch.Tensor], folder: Path, rounds: int) -> dict[str, Any]:
    target = {name: torch.zeros_like(t) for name, t in state.items()}
    raw_path = folder / "raw.bin"
    raw_path.unlink(missing_ok=True)
    raw_write(state, raw_path)
    checkpoint.save(state, folder / "ours")
    dcp_save(state, folder / "dcp")
    torch.save(state, folder / "torch.pt")
    save_file(state, folder / "file.safetensors")

    def from_safetensors(_: Path) -> None:
        loaded = load_file(folder / "file.safetensors")
        for name, t in target.items():
            t.copy_(loaded[name])

    def from_torch(_: Path) -> None:
        loaded = torch.load(folder / "torch.pt")
        for name, t in target.items():
            t.copy_(loaded[name])

    works: dict[str, Callable[[Path], None]] = {
        "raw": lambda _: raw_read(target, raw_path, threads=2),
        "shardwright": lambda _: checkpoint.load(target, folder / "ours") and None,
        "DCP": lambda _: dcp_load(target, folder / "dcp"),
        "torch.load": from_torch,
        "safetensors": from_safetensors,
    }
    results = {}
    for kind, before in (("cold", lambda _: forget_pages(folder)), ("warm", lambda _: None)):
        wall, _ = rounds_of(works, folder, rounds, before)
        results[kind] = table(f"load it, {kind}, verified by shardwright alone", wall, "raw")
    return results


def measure_small(folder: Path, rounds: int) -> dict[str, Any]:
    state = {f"t{n}": torch.randn(2560) for n in range(4000)}
    target = {name: torch.zeros_like(t) for name, t in state.items()}

    def from_safetensors(path: Path) -> None:
        loaded = load_file(path)
        for name, t in target.items():
            t.copy_(loaded[name])

    saves: dict[str, Callable[[Path], None]] = {
        "shardwright": lambda path: checkpoint.save(state, path),
        "DCP": lambda path: dcp_save(state, path),
        "safetensors": lambda path: flushed(path, save_file(state, path)),
    }
    loads: dict[str, Callable[[Path], None]] = {
        "shardwright": lambda path: checkpoint.load(target, path) and None,
        "DCP": lambda path: dcp_load(target, path),
        "safetensors": from_safetensors,
    }
    title = "4,000 tensors of 10 KB, CPU microseconds per tensor"
    _, cpu = rounds_of(saves, folder, rounds)
    results = {"save": table(f"{title}, save", cpu, None, 1e6 / 4000, "µs")}
    _, cpu = rounds_of(loads, folder, rounds, lambda _: None)
    return {**results, "load": table(f"{title}, load", cpu, None, 1e6 / 4000, "µs")}


class Counting(Calls):
    """The calls, with the bytes that were read."""

    def __init__(self) -> None:
        self.read = 0

    def preadv(self, fd: int, buffers: Any, offset: int) -> int:
        got = super().preadv(fd, buffers, offset)
        self.read += got
        return got


def on_ranks(folder: str, rounds: int, rows: int) -> dict[str, Any]:
    """Save and load on 4 ranks under Shard(0), and a load under Shard(1): seconds, and bytes read in the last."""
    torch.set_num_threads(1)
    mesh = init_device_mesh("cpu", (4,))
    where = Path(folder)
    whole = [torch.randn(rows, 2048, generator=torch.Generator().manual_seed(n)) for n in range(8)]
    ours = {f"w{n}": sw.distribute_tensor(t, mesh, [sw.Shard(0)], src_data_rank=None) for n, t in enumerate(whole)}
    theirs = {f"w{n}": torch_distribute(t, mesh, [TorchShard(0)], src_data_rank=None) for n, t in enumerate(whole)}
    columns = {name: t.redistribute(placements=[sw.Shard(1)]) for name, t in ours.items()}
    their_columns = {name: t.redistribute(placements=[TorchShard(1)]) for name, t in theirs.items()}
    times: Times = {}
    read: dict[str, int] = {}

    def timed(what: str, work: Callable[[], Any]) -> None:
        comm.agree(lambda: None, what="start")
        start = time.perf_counter()
        work()
        comm.agree(lambda: None, what="end")
        times.setdefault(what, []).append(time.perf_counter() - start)

    def all_alone() -> None:
        """Every rank reads and verifies everything, and takes its columns."""
        everything = checkpoint.read(where / "ours")
        for name, t in columns.items():
            t.to_local().copy_(everything[name][t.sharding.region(comm.rank()).slices()])

    for number in range(rounds + 1):
        if comm.rank() == 0:
            for name in ("ours", "theirs"):
                shutil.rmtree(where / name, ignore_errors=True)
        if number == 1:
            times.clear()
        timed("save, shardwright", lambda: checkpoint.save(ours, where / "ours"))
        timed("save, DCP", lambda: dcp_save(theirs, where / "theirs"))
        timed("load, shardwright", lambda: checkpoint.load(ours, where / "ours"))
        timed("load, DCP", lambda: dcp_load(theirs, where / "theirs"))
        counting = Counting()
        timed(
            "rows to columns, shardwright", lambda c=counting: checkpoint.load(columns, LocalStorage(where / "ours", c))
        )
        timed("rows to columns, DCP", lambda: dcp_load(their_columns, where / "theirs"))
        timed("rows to columns, each reads all", all_alone)
        read["shardwright"] = counting.read
    for name, t in columns.items():
        wanted = whole[int(name[1:])][t.sharding.region(comm.rank()).slices()]
        assert torch.equal(t.to_local(), wanted)
    return {"times": times, "read": read, "state": sum(t.nbytes for t in whole)}


def measure_ranks(folder: Path, rounds: int, rows: int) -> dict[str, Any]:
    state = {f"w{n}": torch.randn(rows, 2048) for n in range(8)}
    rulers: dict[str, Callable[[Path], None]] = {"raw": lambda path: raw_write(state, path)}
    wall, _ = rounds_of(rulers, folder, rounds)
    reads: dict[str, Callable[[Path], None]] = {"raw": lambda path: raw_read(state, path, threads=2)}
    read, _ = rounds_of(reads, folder, rounds, lambda _: None)
    found = run_ranks(4, on_ranks, str(folder), rounds, rows, timeout=600)
    size = found[0]["state"]
    print(f"\n4 ranks, {size / 1e6:.0f} MB; raw is of one process")
    results: dict[str, Any] = {}
    for name, seconds in found[0]["times"].items():
        base = statistics.median((wall if name.startswith("save") else read)["raw"])
        row = {"median": statistics.median(seconds), "low": min(seconds), "high": max(seconds)}
        results[name] = {**row, "x raw": row["median"] / base}
        spread = f"({row['low']:.3f} to {row['high']:.3f})"
        print(f"  {name:<34}{row['median']:>8.3f} s  {spread}   {row['median'] / base:.2f} x raw")
    results["bytes read, x state"] = sum(one["read"]["shardwright"] for one in found) / size
    print(f"  rows to columns: system calls read {results['bytes read, x state']:.3f} x the state")
    return results


def measure_async(state: dict[str, torch.Tensor], folder: Path, rounds: int) -> dict[str, Any]:
    copy = {name: torch.empty_like(t) for name, t in state.items()}

    def memcpy() -> None:
        for name, t in state.items():
            ctypes.memmove(copy[name].data_ptr(), t.data_ptr(), t.nbytes)

    memcpy()
    blocked, copied, whole = [], [], []
    for _ in range(rounds + 1):
        start = time.perf_counter()
        memcpy()
        copied.append(time.perf_counter() - start)
        start = time.perf_counter()
        handle = checkpoint.async_save(state, folder / "async")
        blocked.append(time.perf_counter() - start)
        handle.wait()
        whole.append(time.perf_counter() - start)
    base = statistics.median(copied)
    print(f"\nasync save: blocked, beside a one-thread memcpy of {base:.3f} s")
    print(f"  the first  {blocked[0]:.3f} s  {blocked[0] / base:.2f} x memcpy")
    later = statistics.median(blocked[1:])
    print(f"  from the second on  {later:.3f} s  {later / base:.2f} x memcpy")
    print(f"  until it is written {statistics.median(whole):.3f} s")
    return {"memcpy s": base, "first x memcpy": blocked[0] / base, "later x memcpy": later / base}


def measure_plans(rounds: int) -> dict[str, Any]:
    names = [f"model.layers.{n // 10}.block.{n % 10}.weight" for n in range(10_000)]
    shapes = [(4096 * (1 + n % 20), 128) for n in range(10_000)]

    def tables(ranks: int, dim: int) -> TensorTable:
        shardings = [Layout(Mesh((ranks,)), [Shard(dim)], shape) for shape in shapes]
        return TensorTable.of(names, ["float32"] * 10_000, [4] * 10_000, shardings)

    stored = tables(4096, 0)
    columns = tables(64, 1)
    requests = [ReadRequest(tensor, columns.sharding(tensor)) for tensor in range(10_000)]
    sizes = {rank: FileEntry(4096 + file_plan(stored, rank).size, 4096, "") for rank in range(4096)}
    times: Times = {}
    for _ in range(rounds):
        start = time.perf_counter()
        file_plan(stored, 77)
        times.setdefault("save plan of one rank", []).append(time.perf_counter() - start)
        for ranks in (4096, 512, 64):
            wanted = tables(ranks, 0)
            locator = ChunkLocator(stored)
            start = time.perf_counter()
            for tensor in range(10_000):
                locator.parts(tensor, wanted.sharding(tensor).region(3))
            times.setdefault(f"load plan on {ranks} ranks", []).append(time.perf_counter() - start)
        locator = ChunkLocator(stored, sizes)
        start = time.perf_counter()
        assert all(shared(requests, locator, range(64)))
        assignment = ReadAssignment(requests, locator, range(64), 4 << 20)
        times.setdefault("load plan, Shard(1), 64 ranks", []).append(time.perf_counter() - start)
        start = time.perf_counter()
        segments = assignment.segments(3)
        while next(segments).file.rank == assignment.files_of(3)[0]:
            pass
        times.setdefault("its next file, as it is read", []).append(time.perf_counter() - start)
    return table("10,000 tensors saved by 4,096 ranks, Shard(0)", times, None, 1e3, "ms")


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--rounds", type=int, default=7)
    options.add_argument("--gb", type=float, default=0.95)
    options.add_argument("--folder", type=Path, default=Path("/tmp/shardwright-benchmark"))
    options.add_argument("--only", default="save,load,small,ranks,async,plans")
    options.add_argument("--json", type=Path)
    chosen = options.parse_args()
    shutil.rmtree(chosen.folder, ignore_errors=True)
    chosen.folder.mkdir(parents=True)
    state = a_model(chosen.gb)
    works: dict[str, Callable[[], dict[str, Any]]] = {
        "save": lambda: measure_save(state, chosen.folder, chosen.rounds),
        "load": lambda: measure_load(state, chosen.folder, chosen.rounds),
        "small": lambda: measure_small(chosen.folder, chosen.rounds),
        "ranks": lambda: measure_ranks(chosen.folder, chosen.rounds, round(chosen.gb * 1e9 / 8 / 2048 / 4 / 8) * 8),
        "async": lambda: measure_async(state, chosen.folder, chosen.rounds),
        "plans": lambda: measure_plans(min(chosen.rounds, 3)),
    }
    results: dict[str, Any] = {
        "date": date.today().isoformat(),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}",
    }
    try:
        for name in chosen.only.split(","):
            results[name] = works[name]()
            for file in chosen.folder.iterdir():
                shutil.rmtree(file, ignore_errors=True) if file.is_dir() else file.unlink()
    finally:
        shutil.rmtree(chosen.folder, ignore_errors=True)
    if chosen.json:
        chosen.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
