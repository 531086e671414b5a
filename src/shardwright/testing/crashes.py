"""Enumerate the states in which a crash of the machine may leave a directory, on a strict file system.

Of every write that was not flushed, all, none, half or only the length may persist; every change of a directory that
was not flushed may persist or not, independently of later changes. Flushing a file makes its contents durable, but not
its name; flushing a directory makes the names in it durable, but not the contents of the files.
"""

from __future__ import annotations

import itertools
import os
import random
import shutil
import stat
import threading
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias, final

from shardwright.storage import Calls

__all__ = [
    "CrashModel",
    "Event",
    "Flush",
    "Link",
    "RecordedCalls",
    "Remove",
    "Tree",
    "Write",
    "crash_states",
    "put_tree",
]

Tree: TypeAlias = dict[str, bytes | None]
"""The paths below a directory: the contents of a file, or None for a directory."""


@final
@dataclass(frozen=True, slots=True)
class Write:
    """Bytes written to a file. Files are identified by number, because their names may change."""

    file: int
    offset: int
    data: bytes


@final
@dataclass(frozen=True, slots=True)
class Link:
    """A name that was created for, or changed to, this file or directory."""

    path: str
    file: int
    is_folder: bool = False


@final
@dataclass(frozen=True, slots=True)
class Remove:
    """A name that was removed."""

    path: str


@final
@dataclass(frozen=True, slots=True)
class Flush:
    """A flush of a file, by its number, or of a directory, by its path."""

    target: int | str


Event: TypeAlias = tuple[Write | Link | Remove | Flush, ...]
"""The changes made by one call. A rename makes two, and a crash may keep either."""


class RecordedCalls(Calls):
    """Performs the calls of a `LocalStorage` below `root` and records them in `events`.

    >>> import tempfile
    >>> from shardwright.storage import LocalStorage
    >>> with tempfile.TemporaryDirectory() as root:
    ...     calls = RecordedCalls(root)
    ...     LocalStorage(root, calls).replace("manifest.json", b"{}")
    >>> [type(change).__name__ for event in calls.events for change in event]
    ['Link', 'Write', 'Flush', 'Link', 'Remove', 'Flush']
    """

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self.root = os.path.abspath(os.fspath(root))
        self.start: Tree = _tree(Path(self.root))
        self.events: list[Event] = []
        self._numbers: dict[str, int] = {path: number for number, path in enumerate(sorted(self.start))}
        self._next = itertools.count(len(self._numbers))
        self._files: dict[int, int | str] = {}
        self._guard = threading.Lock()

    def open(self, path: str, flags: int, mode: int = 0o666) -> int:
        """Open a file; a new file is recorded as a link."""
        new = bool(flags & os.O_CREAT) and not os.path.lexists(path)
        fd = super().open(path, flags, mode)
        with self._guard:
            name = self._name(path)
            if new:
                self._numbers[name] = next(self._next)
                self.events.append((Link(name, self._numbers[name]),))
            if name in self._numbers or not name:
                is_folder = stat.S_ISDIR(os.fstat(fd).st_mode)
                self._files[fd] = name if is_folder else self._numbers[name]
        return fd

    def close(self, fd: int) -> None:
        """Close a file."""
        with self._guard:
            self._files.pop(fd, None)
        super().close(fd)

    def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        """Write to a file."""
        data = b"".join(buffers)
        written = super().pwritev(fd, buffers, offset)
        with self._guard:
            file = self._files[fd]
            assert isinstance(file, int)  # directories are not written to
            self.events.append((Write(file, offset, data[:written]),))
        return written

    def fsync(self, fd: int) -> None:
        """Record a flush, without the cost of performing it."""
        with self._guard:
            if fd in self._files:
                self.events.append((Flush(self._files[fd]),))

    def rename(self, source: str, target: str) -> None:
        """Rename a file."""
        super().rename(source, target)
        with self._guard:
            old, new = self._name(source), self._name(target)
            self._numbers[new] = self._numbers.pop(old)
            self.events.append((Link(new, self._numbers[new]), Remove(old)))

    def unlink(self, path: str) -> None:
        """Remove a file."""
        super().unlink(path)
        with self._guard:
            del self._numbers[self._name(path)]
            self.events.append((Remove(self._name(path)),))

    def mkdir(self, path: str) -> None:
        """Create a directory."""
        super().mkdir(path)
        with self._guard:
            name = self._name(path)
            self._numbers[name] = next(self._next)
            self.events.append((Link(name, self._numbers[name], is_folder=True),))

    def _name(self, path: str) -> str:
        """Return the path relative to the root; "" for the root itself."""
        name = os.path.relpath(path, self.root)
        return "" if name == "." else name


@dataclass(slots=True)
class _Folder:
    names: dict[str, int] = field(default_factory=dict)
    pending: list[Link | Remove] = field(default_factory=list)


@dataclass(slots=True)
class _File:
    data: bytes = b""
    pending: list[Write] = field(default_factory=list)


@final
class CrashModel:
    """The durable state of a directory, and the changes that are not flushed yet.

    >>> model = CrashModel({"a": b"old"})
    >>> model.apply((Write(0, 0, b"NEW"),))
    >>> sorted(set(state["a"] for state in model.states(limit=100, seed=0)))
    [b'NEW', b'Nld', b'old']
    >>> model.apply((Flush(0),))
    >>> list(model.states(limit=100, seed=0))
    [{'a': b'NEW'}]
    """

    def __init__(self, start: Tree) -> None:
        self._files: dict[int, _File | _Folder] = {-1: _Folder()}
        self._folders: dict[str, int] = {"": -1}
        for number, path in enumerate(sorted(start)):
            data = start[path]
            self._files[number] = _Folder() if data is None else _File(data)
            if data is None:
                self._folders[path] = number
            self._parent(path).names[os.path.basename(path)] = number

    def apply(self, event: Event) -> None:
        """Apply one recorded call."""
        for change in event:
            match change:
                case Write():
                    file = self._files[change.file]
                    assert isinstance(file, _File)  # as it was recorded
                    file.pending.append(change)
                case Link():
                    if change.file not in self._files:
                        self._files[change.file] = _Folder() if change.is_folder else _File()
                    if change.is_folder:
                        self._folders[change.path] = change.file
                    self._parent(change.path).pending.append(change)
                case Remove():
                    self._parent(change.path).pending.append(change)
                case Flush(target=int(number)):
                    file = self._files[number]
                    assert isinstance(file, _File)  # as it was recorded
                    file.data, file.pending = _written(file.data, [(write, "all") for write in file.pending]), []
                case Flush(target=str(path)):
                    folder = self._files[self._folders[path]]
                    assert isinstance(folder, _Folder)  # as it was recorded
                    folder.names, folder.pending = _changed(folder.names, folder.pending), []

    def states(self, limit: int, seed: int) -> Iterator[Tree]:
        """Yield the states a crash may leave now: all of them if there are at most `limit`, else a random selection.

        States in which all, none, or all but one of the changes persist are always included.
        """
        writes = [write for file in self._files.values() if isinstance(file, _File) for write in file.pending]
        changes = [c for folder in self._files.values() if isinstance(folder, _Folder) for c in folder.pending]
        options = [_WRITE_EFFECTS] * len(writes) + [("all", "nothing")] * len(changes)
        seen: set[tuple[str, ...]] = set()
        for effects in _choices(options, limit, random.Random(seed)):
            if effects not in seen:
                seen.add(effects)
                effect_of = {id(change): effect for change, effect in zip((*writes, *changes), effects, strict=True)}
                yield self._after_crash("", -1, effect_of)

    def _after_crash(self, path: str, number: int, effect_of: dict[int, str]) -> Tree:
        folder = self._files[number]
        assert isinstance(folder, _Folder)
        tree: Tree = {}
        kept = [change for change in folder.pending if effect_of[id(change)] == "all"]
        for name, inner in sorted(_changed(folder.names, kept).items()):
            below = os.path.join(path, name)
            match self._files[inner]:
                case _File(data=data, pending=pending):
                    tree[below] = _written(data, [(write, effect_of[id(write)]) for write in pending])
                case _Folder():
                    tree[below] = None
                    tree |= self._after_crash(below, inner, effect_of)
        return tree

    def _parent(self, path: str) -> _Folder:
        folder = self._files[self._folders[os.path.dirname(path)]]
        assert isinstance(folder, _Folder)
        return folder


_WRITE_EFFECTS = ("all", "nothing", "half", "length")


def _choices(options: Sequence[tuple[str, ...]], limit: int, generator: random.Random) -> Iterator[tuple[str, ...]]:
    count = 1
    for effects in options:
        count *= len(effects)
    if count <= limit:
        yield from itertools.product(*options)
        return
    everything, nothing = ("all",) * len(options), ("nothing",) * len(options)
    yield everything
    yield nothing
    for index, effects in enumerate(options):
        yield (*nothing[:index], "all", *nothing[index + 1 :])
        yield (*everything[:index], *nothing[index:])  # in order
        for effect in effects[1:]:
            yield (*everything[:index], effect, *everything[index + 1 :])
    for _ in range(limit):
        yield tuple(generator.choice(effects) for effects in options)


def _written(data: bytes, writes: Sequence[tuple[Write, str]]) -> bytes:
    result = bytearray(data)
    for write, effect in writes:
        if effect == "nothing":
            continue
        end = write.offset + len(write.data)
        kept = write.data[: len(write.data) // 2] if effect == "half" else b"" if effect == "length" else write.data
        if effect == "half":
            end = write.offset + len(kept)
        result.extend(bytes(max(0, end - len(result))))
        result[write.offset : write.offset + len(kept)] = kept
    return bytes(result)


def _changed(names: dict[str, int], changes: Sequence[Link | Remove]) -> dict[str, int]:
    result = dict(names)
    for change in changes:
        name = os.path.basename(change.path)
        if isinstance(change, Link):
            result[name] = change.file
        else:
            result.pop(name, None)
    return result


def crash_states(start: Tree, events: Sequence[Event], *, limit: int = 64, seed: int = 0) -> Iterator[tuple[int, Tree]]:
    """Yield (number of calls made, tree) for the states a crash may leave after each call; each tree once per call.

    >>> events = [(Link("a", 0),), (Write(0, 0, b"x"),), (Flush(0),)]
    >>> [(number, tree) for number, tree in crash_states({}, events) if number == 3]
    [(3, {'a': b'x'}), (3, {})]
    """
    model = CrashModel(start)
    for number in range(len(events) + 1):
        if number:
            model.apply(events[number - 1])
        seen: set[tuple[tuple[str, bytes | None], ...]] = set()
        for tree in model.states(limit, seed + number):
            key = tuple(tree.items())
            if key not in seen:
                seen.add(key)
                yield number, tree


def put_tree(tree: Tree, folder: Path) -> None:
    """Replace the contents of a directory with a tree.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     put_tree({"run": None, "run/log": b"done"}, Path(folder))
    ...     (Path(folder) / "run/log").read_text()
    'done'
    """
    with suppress(FileNotFoundError):
        shutil.rmtree(folder)
    folder.mkdir(parents=True)
    for path, data in tree.items():
        if data is None:
            (folder / path).mkdir()
        else:
            (folder / path).write_bytes(data)


def _tree(folder: Path) -> Tree:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes() if path.is_file() else None
        for path in sorted(folder.rglob("*"))
    }
