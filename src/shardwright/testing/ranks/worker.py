"""The main loop of a rank process: receive a task, join its world, run it, send the outcome.

It runs in a child of the fork server, where torch and shardwright are already imported.
"""

from __future__ import annotations

import faulthandler
import signal
import sys
import traceback
import warnings
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

import torch

from shardwright import comm
from shardwright.comm.forked import close_in_children
from shardwright.testing.ranks.filters import Filter, apply_filters
from shardwright.testing.ranks.outcome import Raised, Returned
from shardwright.testing.ranks.pickling import dumps, loads

if TYPE_CHECKING:
    from torch._C._distributed_c10d import TCPStore

__all__ = ["Setup", "Task", "serve"]


@dataclass(frozen=True, slots=True)
class Setup:
    """The first message to a rank process: the port of the store, and the file for its stacks on SIGUSR2."""

    port: int
    stacks: str


@dataclass(frozen=True, slots=True)
class Task:
    """A function to run, pickled with its arguments, as one rank of the world `world`."""

    world: str
    rank: int
    size: int
    call: bytes
    path: list[str]
    filters: list[Filter]


def serve(descriptor: int) -> None:
    """Run tasks until the connection is closed."""
    connection = Connection(descriptor)
    close_in_children(connection)  # otherwise a child of a killed rank would keep its connection open
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process that runs the tests handles Ctrl-C
    try:
        setup: Setup = loads(connection.recv_bytes())
        with open(setup.stacks, "w") as stacks:
            faulthandler.register(signal.SIGUSR2, file=stacks, all_threads=True)
            store = comm.reach_store(setup.port)
            world = ""  # the world that this process has joined
            while True:
                task: Task = loads(connection.recv_bytes())
                reply = _run_task(task, store, world)
                world = task.world
                connection.send_bytes(reply)
    except (EOFError, ConnectionError):
        return  # the pool was closed


def _run_task(task: Task, store: TCPStore, world: str) -> bytes:
    """Run a task after joining its world, unless this process is in it; return the pickled outcome."""
    try:
        if task.world != world:
            comm.leave()
            comm.join(task.rank, task.size, store, task.world)
        sys.path[:] = task.path
        with warnings.catch_warnings():
            apply_filters(task.filters)
            function, args, kwargs = loads(task.call)
            return _pickled(function(*args, **kwargs), task.rank)
    except BaseException as error:  # noqa: BLE001  whatever a test raises is its outcome
        return _pickled_error(error)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()


def _pickled(value: Any, rank: int) -> bytes:
    try:
        return dumps((Returned(value), b""))
    except Exception as error:
        raise TypeError(f"rank {rank}: the result of type {type(value).__name__} cannot be pickled: {error}") from error


def _pickled_error(error: BaseException) -> bytes:
    # The exception is pickled separately from its text: many cannot be pickled, others cannot be unpickled.
    raised = Raised(type(error).__name__, str(error), "".join(traceback.format_exception(error)))
    try:
        exception = dumps(error)
    except Exception:  # noqa: BLE001  then only its text is sent
        exception = b""
    return dumps((raised, exception))
