"""The threads of this process that wait in a collective, and for what. Updating it takes under a microsecond."""

from __future__ import annotations

import sys
import sysconfig
import threading
from pathlib import Path
from types import FrameType
from typing import Protocol

import torch

from shardwright.comm.flight import Flight
from shardwright.comm.group import Group

__all__ = ["Waiting", "line_of", "main_line", "threads", "waiting"]


class Waiting(Protocol):
    """A collective that a thread waits for."""

    kind: str
    group: Group
    number: int | None  # of the collective in its group; None for messages between two ranks
    at: Flight | None  # the operation it waits for at present


waiting: dict[int, Waiting] = {}  # by thread
threads: set[int] = set()  # that have ever waited

_SKIPPED = (
    str(Path(__file__).resolve().parent.parent),
    str(Path(torch.__file__).resolve().parent),
    sysconfig.get_paths()["stdlib"],
    "<",  # frozen and generated modules
)


def line_of(thread: int) -> str:
    """Return the current source line of a thread in the user's program; "" if there is none.

    >>> line_of(-1)
    ''
    """
    frame: FrameType | None = sys._current_frames().get(thread)
    while frame is not None:
        if not frame.f_code.co_filename.startswith(_SKIPPED):
            return f"{frame.f_code.co_filename}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


def main_line() -> str:
    """Return the current source line of the main thread in the user's program.

    >>> isinstance(main_line(), str)
    True
    """
    return line_of(threading.main_thread().ident or -1)
