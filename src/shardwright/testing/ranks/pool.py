"""A pool of rank processes that tests borrow: joining a world costs milliseconds, importing torch nothing."""

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
from shardwright.testing.ranks.worker import Task, Welcome

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

    A rank that dies or hangs is replaced, and after any failure the ranks join a fresh world. `run_ranks`,
    `outcomes` and `on_ranks` use one shared pool; make your own to keep processes apart.

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
        """What the function returned on each of n ranks; `RanksError` with every failing rank's own words."""
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
        """What became of each of n ranks that ran the function. Once one has failed, the others have `grace`."""
        if n < 1:
            raise RanksError(f"{n} ranks: at least one is needed")
        call = dumps_call(function, args, kwargs)
        with self._lock:
            self._grow(n)
            if self._size != n:
                self._worlds += 1
                self._size = n
            self._send(n, call)
            found = self._gather(n, timeout, grace)
            self._recover(found)
        return [found[rank] for rank in range(n)]

    @property
    def pids(self) -> list[int]:
        """The rank processes, by rank."""
        return [worker.pid for worker in self._workers]

    def close(self) -> None:
        """Ends the rank processes."""
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
            self._workers.append(self._hire())

    def _hire(self) -> _Worker:
        pid, sock = self._server.fork()
        worker = _Worker(pid, Connection(sock.detach()), self._folder / f"{pid}.stacks")
        worker.connection.send_bytes(dumps(Welcome(self._store.port, str(worker.stacks))))
        return worker

    def _send(self, n: int, call: bytes) -> None:
        path, filters = list(sys.path), current_filters()
        for rank in range(n):
            task = Task(f"world-{self._worlds}", rank, n, call, path, filters)
            try:
                self._workers[rank].connection.send_bytes(dumps(task))
            except ConnectionError:
                continue  # it died while idle: found when its answer is awaited

    def _gather(self, n: int, timeout: float, grace: float) -> dict[int, Outcome]:
        found: dict[int, Outcome] = {}
        waiting = {self._workers[rank].connection: rank for rank in range(n)}
        deadline = time.monotonic() + timeout
        why = f"no answer within {timeout:g} s"
        while waiting:
            left = deadline - time.monotonic()
            ready = wait(list(waiting), max(left, 0))
            if not ready and left <= 0:
                break
            for connection in ready:
                rank = waiting.pop(connection)  # type: ignore[call-overload]  # a Connection, as those given
                outcome = found[rank] = self._answer(rank)
                if not isinstance(outcome, Returned) and time.monotonic() + grace < deadline:
                    deadline = time.monotonic() + grace
                    verb = "raised" if isinstance(outcome, Raised) else "died"
                    why = f"still waiting {grace:g} s after rank {rank} {verb}"
        for rank in waiting.values():
            found[rank] = Hung(why, self._stacks(self._workers[rank]))
        return found

    def _answer(self, rank: int) -> Outcome:
        worker = self._workers[rank]
        try:
            outcome, exception = loads(worker.connection.recv_bytes())
        except (EOFError, ConnectionError):
            return Died(self._server.exit_code(worker.pid))
        if isinstance(outcome, Raised) and exception:
            # Any code may run here, and fail: the text is there already.
            with contextlib.suppress(Exception):
                return dataclasses.replace(outcome, exception=loads(exception))
        found: Outcome = outcome
        return found

    def _stacks(self, worker: _Worker) -> str:
        os.kill(worker.pid, signal.SIGUSR2)
        deadline = time.monotonic() + 1.0
        text = ""
        # The handler writes while we read: take it when it has stopped growing.
        while time.monotonic() < deadline:
            time.sleep(0.05)
            before, text = text, worker.stacks.read_text()
            if text and text == before:
                break
        return text

    def _recover(self, found: dict[int, Outcome]) -> None:
        if all(isinstance(outcome, Returned) for outcome in found.values()):
            return
        self._size = 0  # the next call joins a fresh world
        for rank, outcome in found.items():
            worker = self._workers[rank]
            if isinstance(outcome, Hung):
                os.kill(worker.pid, signal.SIGKILL)
                self._server.exit_code(worker.pid)
            if isinstance(outcome, Died | Hung):
                worker.connection.close()
                self._workers[rank] = self._hire()


_shared: RankPool | None = None


def _pool() -> RankPool:
    global _shared
    if _shared is None:
        _shared = RankPool()
        atexit.register(_shared.close)
    return _shared


def run_ranks(n: int, function: Callable[..., T], *args: Any, timeout: float = TIMEOUT, **kwargs: Any) -> list[T]:
    """What `function(*args, **kwargs)` returned on each of n ranks, which share a gloo process group.

    Functions may be lambdas, closures or local; results come back pickled. If any rank raises, dies or does
    not answer within `timeout` seconds, a `RanksError` holds every failing rank's traceback or stacks, the
    likely cause first.

    >>> run_ranks(2, lambda: comm.world().ranks)
    [(0, 1), (0, 1)]
    """
    return _pool().run(n, function, *args, timeout=timeout, **kwargs)


def outcomes(
    n: int, function: Callable[..., Any], *args: Any, timeout: float = TIMEOUT, grace: float = GRACE, **kwargs: Any
) -> list[Outcome]:
    """What became of each of n ranks: `Returned`, `Raised`, `Died` or `Hung`. For tests about failure.

    Once a rank has raised or died the others have `grace` seconds to answer before they count as hung.

    >>> outcomes(1, lambda: 6 * 7)
    [Returned(value=42)]
    >>> outcomes(1, lambda: os._exit(3))
    [Died(exitcode=3)]
    """
    return _pool().outcomes(n, function, *args, timeout=timeout, grace=grace, **kwargs)


def on_ranks(n: int, *, timeout: float = TIMEOUT) -> Callable[[Callable[P, None]], Callable[P, None]]:
    """Makes a test's body run on each of n ranks; fixtures and parameters are passed on, pickled.

    >>> @on_ranks(2)
    ... def test_there_are_two_of_us():
    ...     assert comm.world().size == 2
    >>> test_there_are_two_of_us()
    """

    def decorate(test: Callable[P, None]) -> Callable[P, None]:
        @functools.wraps(test)
        def on_each(*args: P.args, **kwargs: P.kwargs) -> None:
            _pool().run(n, test, *args, timeout=timeout, **kwargs)

        return on_each

    return decorate
