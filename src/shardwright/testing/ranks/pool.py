"""A pool of rank processes shared by tests: joining a world takes milliseconds, and torch is already imported."""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import functools
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, ParamSpec, TypeVar, final

from shardwright import comm
from shardwright.errors import RanksError
from shardwright.testing.ranks.filters import current_filters
from shardwright.testing.ranks.forkserver import ForkServer
from shardwright.testing.ranks.outcome import Died, Hung, Outcome, Raised, Returned, report
from shardwright.testing.ranks.pickling import dumps, dumps_call, loads
from shardwright.testing.ranks.worker import Setup, Task

__all__ = ["RankPool", "on_ranks", "outcomes", "run_ranks"]

P = ParamSpec("P")
T = TypeVar("T")

TIMEOUT = 60.0
GRACE = 10.0


@dataclass(frozen=True, slots=True)
class _Worker:
    pid: int
    connection: Connection
    stacks: Path


@final
class RankPool:
    """Rank processes on this machine, kept between calls; as many as the largest call has needed.

    A rank that dies or hangs is replaced, and after any failure the ranks join a new world. `run_ranks`, `outcomes` and
    `on_ranks` use one shared pool; create another to isolate processes.

    >>> with RankPool() as pool:
    ...     pool.run(2, lambda: comm.world().rank)
    [0, 1]
    """

    def __init__(self) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="shardwright-ranks-"))
        self._store = comm.host_store()
        self._server = ForkServer(self._folder)
        self._workers: list[_Worker] = []
        self._worlds = 0
        self._size = 0
        self._lock = threading.Lock()

    def run(self, n: int, function: Callable[..., T], *args: Any, timeout: float = TIMEOUT, **kwargs: Any) -> list[T]:
        """Run the function on n ranks and return its results; raise `RanksError` with the errors of failing ranks."""
        results = self.outcomes(n, function, *args, timeout=timeout, **kwargs)
        values = [outcome.value for outcome in results if isinstance(outcome, Returned)]
        if len(values) == n:
            return values
        raise RanksError(report(results))

    def outcomes(
        self,
        n: int,
        function: Callable[..., Any],
        *args: Any,
        timeout: float = TIMEOUT,
        grace: float = GRACE,
        **kwargs: Any,
    ) -> list[Outcome]:
        """Run the function on n ranks and return their outcomes. After the first failure the others have `grace` s."""
        if n < 1:
            raise RanksError(f"the number of ranks must be at least 1, got {n}")
        call = dumps_call(function, args, kwargs)
        with self._lock:
            self._grow(n)
            if self._size != n:
                self._worlds += 1
                self._size = n
            self._send(n, call)
            results = self._gather(n, timeout, grace)
            self._recover(results)
        return [results[rank] for rank in range(n)]

    @property
    def pids(self) -> list[int]:
        """The process ids of the ranks, by rank."""
        return [worker.pid for worker in self._workers]

    def close(self) -> None:
        """End the rank processes."""
        for worker in self._workers:
            worker.connection.close()
        self._workers.clear()
        self._server.close()

    def __enter__(self) -> RankPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _grow(self, n: int) -> None:
        while len(self._workers) < n:
            self._workers.append(self._start_worker())

    def _start_worker(self) -> _Worker:
        pid, sock = self._server.fork()
        worker = _Worker(pid, Connection(sock.detach()), self._folder / f"{pid}.stacks")
        worker.connection.send_bytes(dumps(Setup(self._store.port, str(worker.stacks))))
        return worker

    def _send(self, n: int, call: bytes) -> None:
        path, filters = list(sys.path), current_filters()
        for rank in range(n):
            task = Task(f"world-{self._worlds}", rank, n, call, path, filters)
            try:
                self._workers[rank].connection.send_bytes(dumps(task))
            except ConnectionError:
                continue  # it died while idle: detected when its answer is read

    def _gather(self, n: int, timeout: float, grace: float) -> dict[int, Outcome]:
        results: dict[int, Outcome] = {}
        waiting = {self._workers[rank].connection: rank for rank in range(n)}
        deadline = time.monotonic() + timeout
        why = f"no answer within {timeout:g} s"
        while waiting:
            remaining = deadline - time.monotonic()
            ready = wait(list(waiting), max(remaining, 0))
            if not ready and remaining <= 0:
                break
            for connection in ready:
                rank = waiting.pop(connection)  # type: ignore[call-overload]  # one of the Connections given
                outcome = results[rank] = self._answer(rank)
                if not isinstance(outcome, Returned) and time.monotonic() + grace < deadline:
                    deadline = time.monotonic() + grace
                    verb = "raised" if isinstance(outcome, Raised) else "died"
                    why = f"still waiting {grace:g} s after rank {rank} {verb}"
        for rank in waiting.values():
            results[rank] = Hung(why, self._stacks(self._workers[rank]))
        return results

    def _answer(self, rank: int) -> Outcome:
        worker = self._workers[rank]
        try:
            outcome, exception = loads(worker.connection.recv_bytes())
        except (EOFError, ConnectionError):
            return Died(self._server.exit_code(worker.pid))
        if isinstance(outcome, Raised) and exception:
            # Unpickling an exception may run any code, and fail: then the text remains.
            with contextlib.suppress(Exception):
                return dataclasses.replace(outcome, exception=loads(exception))
        received: Outcome = outcome
        return received

    def _stacks(self, worker: _Worker) -> str:
        os.kill(worker.pid, signal.SIGUSR2)
        deadline = time.monotonic() + 1.0
        text = ""
        # The handler writes while we read: wait until the file has stopped growing.
        while time.monotonic() < deadline:
            time.sleep(0.05)
            before, text = text, worker.stacks.read_text()
            if text and text == before:
                break
        return text

    def _recover(self, results: dict[int, Outcome]) -> None:
        if all(isinstance(outcome, Returned) for outcome in results.values()):
            return
        self._size = 0  # the next call joins a new world
        for rank, outcome in results.items():
            worker = self._workers[rank]
            if isinstance(outcome, Hung):
                os.kill(worker.pid, signal.SIGKILL)
                self._server.exit_code(worker.pid)
            if isinstance(outcome, Died | Hung):
                worker.connection.close()
                self._workers[rank] = self._start_worker()


_shared: RankPool | None = None


def _pool() -> RankPool:
    global _shared
    if _shared is None:
        _shared = RankPool()
        atexit.register(_shared.close)
    return _shared


def run_ranks(n: int, function: Callable[..., T], *args: Any, timeout: float = TIMEOUT, **kwargs: Any) -> list[T]:
    """Run `function(*args, **kwargs)` on n ranks, which share a gloo process group, and return its results by rank.

    Lambdas, closures and local functions work; results are pickled. If any rank raises, dies or does not answer within
    `timeout` seconds, a `RanksError` with every failing rank's traceback or stacks is raised, the likely cause first.

    >>> run_ranks(2, lambda: comm.world().ranks)
    [(0, 1), (0, 1)]
    """
    return _pool().run(n, function, *args, timeout=timeout, **kwargs)


def outcomes(
    n: int, function: Callable[..., Any], *args: Any, timeout: float = TIMEOUT, grace: float = GRACE, **kwargs: Any
) -> list[Outcome]:
    """Run a function on n ranks and return the outcome of each: `Returned`, `Raised`, `Died` or `Hung`.

    For tests of failures. Once a rank has raised or died, the others have `grace` seconds before they count as hung.

    >>> outcomes(1, lambda: 6 * 7)
    [Returned(value=42)]
    >>> outcomes(1, lambda: os._exit(3))
    [Died(exitcode=3)]
    """
    return _pool().outcomes(n, function, *args, timeout=timeout, grace=grace, **kwargs)


def on_ranks(n: int, *, timeout: float = TIMEOUT) -> Callable[[Callable[P, None]], Callable[P, None]]:
    """Decorate a test to run its body on each of n ranks; fixtures and parameters are pickled.

    >>> @on_ranks(2)
    ... def test_world_size():
    ...     assert comm.world().size == 2
    >>> test_world_size()
    """

    def decorate(test: Callable[P, None]) -> Callable[P, None]:
        @functools.wraps(test)
        def on_each(*args: P.args, **kwargs: P.kwargs) -> None:
            _pool().run(n, test, *args, timeout=timeout, **kwargs)

        return on_each

    return decorate
