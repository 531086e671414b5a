"""Which threads of this process wait in a collective, and for what. Setting it costs a fraction of a microsecond."""

from __future__ import annotations

import sys
import sysconfig
import threading
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from shardwright.comm.pending import Pending

__all__ = ["line_of", "main_line", "threads", "waiting"]

waiting: dict[int, Pending[Any]] = {}  # by thread
threads: set[int] = set()  # those that have ever waited

_SKIPPED = (
    str(Path(__file__).resolve().parent.parent),
    str(Path(torch.__file__).resolve().parent),
    sysconfig.get_paths()["stdlib"],
    "<",  # frozen and made-up modules
)


def line_of(thread: int) -> str:
    """Return the line of the user's program that a thread of this process is at; "" if there is none.

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
    """Return the line of the user's program that the main thread is at.

    >>> isinstance(main_line(), str)
    True
    """
    return line_of(threading.main_thread().ident or -1)
