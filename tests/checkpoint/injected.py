"""Errors of the file system, injected into every system call that a checkpoint makes; see `test_injected_errors`."""

from __future__ import annotations

import errno
import os
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from shardwright.storage import Calls

CALLS = (
    *("open", "close", "pwritev", "preadv", "fsync", "fstat", "stat", "rename", "unlink", "mkdir", "rmdir", "listdir"),
    *("lock", "lock_shared", "unlock"),
)
CODES = (errno.EIO, errno.ESTALE, errno.ENOSPC, errno.EACCES, errno.ETIMEDOUT)
LATE = ("rename", "unlink", "fsync", "mkdir", "rmdir")  # of these the answer may be lost after they were done


@dataclass
class Injection:
    """Which call fails, counted from the beginning, with what; `stays` if all later calls of its name fail, too.

    `is_late` if the call is done before it fails, as where the answer of a server is lost. Nothing fails at -1.
    """

    at: int = -1
    code: int = errno.EIO
    stays: bool = False
    is_late: bool = False
    made: list[str] = field(default_factory=list)

    @classmethod
    def chosen(cls, made: list[str], chance: random.Random) -> Injection:
        """One of the calls that were made without any: each name is as likely as another."""
        name = chance.choice(sorted(set(made)))
        at = chance.choice([place for place, one in enumerate(made) if one == name])
        late = name in LATE and chance.random() < 0.4
        return cls(at, chance.choice(CODES), chance.random() < 0.3, late)

    def __str__(self) -> str:
        what = self.made[self.at] if 0 <= self.at < len(self.made) else "nothing"
        how = ("done, and then " if self.is_late else "") + ("from then on" if self.stays else "once")
        return f"{what} (call {self.at}) fails with {errno.errorcode[self.code]}, {how}"

    def fails(self, name: str) -> bool:
        """Note a call, and return whether it fails."""
        place = len(self.made)
        self.made.append(name)
        return place == self.at or (self.stays and self.made[self.at : self.at + 1] == [name] and place > self.at >= 0)


@contextmanager
def injected(injection: Injection) -> Iterator[None]:
    """Let calls fail, in all storages of this process."""
    real = {name: getattr(Calls, name) for name in CALLS}

    def guarded(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def guarded(self: Calls, *args: Any, **options: Any) -> Any:
            if not injection.fails(name):
                return call(self, *args, **options)
            if injection.is_late or name == "close":  # a file is closed whatever close says
                call(self, *args, **options)
            raise OSError(injection.code, os.strerror(injection.code))

        return guarded

    for name, call in real.items():
        setattr(Calls, name, guarded(name, call))
    try:
        yield
    finally:
        for name, call in real.items():
            setattr(Calls, name, call)
