"""Run work in separate processes: a call with invalid arguments may crash its process, but must not end the proof.

Some of torch's kernels do not check their arguments. A wrong rule, or a strategy that is only tried, can pass them an
index out of bounds; the crash of the process is then reported as a result.
"""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, Generic, TypeVar

__all__ = ["Ended", "run_in_workers"]

T = TypeVar("T")
R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class Ended:
    """Work without a result: the process died with this exit code, or timed out (None)."""

    code: int | None


@dataclass(slots=True)
class _Worker(Generic[T]):
    process: Any
    connection: Connection
    item: T | None = None
    since: float = 0.0


def run_in_workers(
    work: Callable[[T], R], items: Iterable[T], *, workers: int = 2, timeout: float = 120.0
) -> Iterator[tuple[T, R | Ended]]:
    """Yield each item with the result of `work`, in order of completion; `work` must be a module-level function.

    >>> sorted(run_in_workers(abs, [-1, -2], workers=1))
    [(-2, 2), (-1, 1)]
    """
    waiting = list(items)[::-1]
    pool: list[_Worker[T]] = [_start_worker(work) for _ in range(min(workers, len(waiting)))]
    try:
        while waiting or any(worker.item is not None for worker in pool):
            for worker in pool:
                if worker.item is None and waiting:
                    worker.item, worker.since = waiting.pop(), time.monotonic()
                    worker.connection.send(worker.item)
            busy = {worker.connection: worker for worker in pool if worker.item is not None}
            for ready in multiprocessing.connection.wait(list(busy), timeout=1.0):
                worker = busy[ready]  # type: ignore[index]  # one of the Connections given
                yield _receive(worker, pool, work)
            for worker in [w for w in pool if w.item is not None and time.monotonic() - w.since > timeout]:
                worker.process.kill()
                yield _receive(worker, pool, work, timed_out=True)
    finally:
        for worker in pool:
            worker.process.kill()
            worker.process.join()


def _receive(
    worker: _Worker[T], pool: list[_Worker[T]], work: Callable[[T], R], timed_out: bool = False
) -> tuple[T, R | Ended]:
    item = worker.item
    assert item is not None
    try:
        reply = worker.connection.recv()
    except (EOFError, ConnectionError):
        worker.process.join()
        pool[pool.index(worker)] = _start_worker(work)
        return item, Ended(None if timed_out else worker.process.exitcode)
    worker.item = None
    if isinstance(reply, Exception):
        reply.add_note(f"while working on {item!r}")
        raise reply
    return item, reply


def _start_worker(work: Callable[[T], R]) -> _Worker[T]:
    context = multiprocessing.get_context("spawn")
    parent_end, child_end = context.Pipe()
    process = context.Process(target=_serve, args=(work, child_end), daemon=True)
    process.start()
    child_end.close()
    return _Worker(process, parent_end)


def _serve(work: Callable[[Any], Any], connection: Connection) -> None:
    while True:
        try:
            item = connection.recv()
        except EOFError:
            return
        try:
            connection.send(work(item))
        except Exception as error:  # noqa: BLE001  # raised in the caller's process
            connection.send(error)
