"""Work in processes of its own: a call with nonsense in it may end the process, and must not end the proof.

Some of torch's kernels trust their arguments. A rule that is wrong, or a strategy that is only tried, can hand them an
index beyond the end; what is left is a process that died, and that is a finding like any other.
"""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, Generic, TypeVar

__all__ = ["Ended", "apart"]

T = TypeVar("T")
R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class Ended:
    """What became of work that gave no answer: the process died with this code, or was given up (None)."""

    code: int | None


@dataclass(slots=True)
class _Worker(Generic[T]):
    process: Any
    connection: Connection
    item: T | None = None
    since: float = 0.0


def apart(
    work: Callable[[T], R], items: Iterable[T], *, workers: int = 2, timeout: float = 120.0
) -> Iterator[tuple[T, R | Ended]]:
    """Each item with what `work` made of it, in the order they are done; `work` is a function of a module.

    >>> sorted(apart(abs, [-1, -2], workers=1))
    [(-2, 2), (-1, 1)]
    """
    waiting = list(items)[::-1]
    crew: list[_Worker[T]] = [_hire(work) for _ in range(min(workers, len(waiting)))]
    try:
        while waiting or any(worker.item is not None for worker in crew):
            for worker in crew:
                if worker.item is None and waiting:
                    worker.item, worker.since = waiting.pop(), time.monotonic()
                    worker.connection.send(worker.item)
            busy = {worker.connection: worker for worker in crew if worker.item is not None}
            for ready in multiprocessing.connection.wait(list(busy), timeout=1.0):
                worker = busy[ready]  # type: ignore[index]  # a Connection, as those given
                yield _answer(worker, crew, work)
            for worker in [one for one in crew if one.item is not None and time.monotonic() - one.since > timeout]:
                worker.process.kill()
                yield _answer(worker, crew, work, given_up=True)
    finally:
        for worker in crew:
            worker.process.kill()
            worker.process.join()


def _answer(
    worker: _Worker[T], crew: list[_Worker[T]], work: Callable[[T], R], given_up: bool = False
) -> tuple[T, R | Ended]:
    item = worker.item
    assert item is not None
    try:
        answer = worker.connection.recv()
    except (EOFError, ConnectionError):
        worker.process.join()
        crew[crew.index(worker)] = _hire(work)
        return item, Ended(None if given_up else worker.process.exitcode)
    worker.item = None
    if isinstance(answer, Exception):
        answer.add_note(f"while working on {item!r}")
        raise answer
    return item, answer


def _hire(work: Callable[[T], R]) -> _Worker[T]:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(work, theirs), daemon=True)
    process.start()
    theirs.close()
    return _Worker(process, ours)


def _serve(work: Callable[[Any], Any], connection: Connection) -> None:
    while True:
        try:
            item = connection.recv()
        except EOFError:
            return
        try:
            connection.send(work(item))
        except Exception as error:  # noqa: BLE001  # it is raised where the work was given out
            connection.send(error)
