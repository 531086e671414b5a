"""What a crash of the machine may leave of a folder: a strict file system, where nothing is safe until it is flushed.

Of every write that was not flushed, all, nothing, a half or only the length may be there; every change of a folder
that was not flushed may be there or not, each on its own, whatever came later. Flushing a file keeps its contents, but
not its name; flushing a folder keeps the names in it, but not what is in the files.
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
"""The paths below a folder: the contents of a file, or None for a folder."""


@final
@dataclass(frozen=True, slots=True)
class Write:
    """Bytes written to a file, which is known by a number: its name may change."""

    file: int
    offset: int
    data: bytes


@final
@dataclass(frozen=True, slots=True)
class Link:
    """A name that now means this file, or this folder."""

    path: str
    file: int
    is_folder: bool = False


@final
@dataclass(frozen=True, slots=True)
class Remove:
    """A name that is gone."""

    path: str


@final
@dataclass(frozen=True, slots=True)
class Flush:
    """A file flushed, by its number, or a folder, by its path."""

    what: int | str


Event: TypeAlias = tuple[Write | Link | Remove | Flush, ...]
"""What one call did. A rename does two things, and a crash may keep either."""


class RecordedCalls(Calls):
    """The calls of a `LocalStorage` below `root`, done and written down in `events`.

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
        """Opens; a file that is new is a link to it."""
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
        """Closes."""
        with self._guard:
            self._files.pop(fd, None)
        super().close(fd)

    def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        """Writes."""
        data = b"".join(buffers)
        written = super().pwritev(fd, buffers, offset)
        with self._guard:
            file = self._files[fd]
            assert isinstance(file, int)  # nobody writes to a folder
            self.events.append((Write(file, offset, data[:written]),))
        return written

    def fsync(self, fd: int) -> None:
        """Flushes; really doing it would only cost time."""
        with self._guard:
            if fd in self._files:
                self.events.append((Flush(self._files[fd]),))

    def rename(self, source: str, target: str) -> None:
        """Renames."""
        super().rename(source, target)
        with self._guard:
            old, new = self._name(source), self._name(target)
            self._numbers[new] = self._numbers.pop(old)
            self.events.append((Link(new, self._numbers[new]), Remove(old)))

    def unlink(self, path: str) -> None:
        """Removes."""
        super().unlink(path)
        with self._guard:
            del self._numbers[self._name(path)]
            self.events.append((Remove(self._name(path)),))

    def mkdir(self, path: str) -> None:
        """Makes a folder."""
        super().mkdir(path)
        with self._guard:
            name = self._name(path)
            self._numbers[name] = next(self._next)
            self.events.append((Link(name, self._numbers[name], is_folder=True),))

    def _name(self, path: str) -> str:
        """A path below the root; "" for the root itself."""
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
    """A folder as the disk has it, and what is still on its way there.

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
        """One call was made."""
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
                case Flush(what=int(number)):
                    file = self._files[number]
                    assert isinstance(file, _File)  # as it was recorded
                    file.data, file.pending = _written(file.data, [(write, "all") for write in file.pending]), []
                case Flush(what=str(path)):
                    folder = self._files[self._folders[path]]
                    assert isinstance(folder, _Folder)  # as it was recorded
                    folder.names, folder.pending = _changed(folder.names, folder.pending), []

    def states(self, limit: int, seed: int) -> Iterator[Tree]:
        """What a crash now may leave: all of it, if there are at most `limit` ways, else as many, chosen at random.

        Those in which all, nothing, or all but one of the changes got there are always among them.
        """
        writes = [write for file in self._files.values() if isinstance(file, _File) for write in file.pending]
        changes = [c for folder in self._files.values() if isinstance(folder, _Folder) for c in folder.pending]
        options = [_WAYS] * len(writes) + [("all", "nothing")] * len(changes)
        seen: set[tuple[str, ...]] = set()
        for ways in _choices(options, limit, random.Random(seed)):
            if ways not in seen:
                seen.add(ways)
                how = {id(change): way for change, way in zip((*writes, *changes), ways, strict=True)}
                yield self._left("", -1, how)

    def _left(self, path: str, number: int, how: dict[int, str]) -> Tree:
        folder = self._files[number]
        assert isinstance(folder, _Folder)
        found: Tree = {}
        kept = [change for change in folder.pending if how[id(change)] == "all"]
        for name, inner in sorted(_changed(folder.names, kept).items()):
            below = os.path.join(path, name)
            match self._files[inner]:
                case _File(data=data, pending=pending):
                    found[below] = _written(data, [(write, how[id(write)]) for write in pending])
                case _Folder():
                    found[below] = None
                    found |= self._left(below, inner, how)
        return found

    def _parent(self, path: str) -> _Folder:
        folder = self._files[self._folders[os.path.dirname(path)]]
        assert isinstance(folder, _Folder)
        return folder


_WAYS = ("all", "nothing", "half", "length")


def _choices(options: Sequence[tuple[str, ...]], limit: int, chance: random.Random) -> Iterator[tuple[str, ...]]:
    count = 1
    for ways in options:
        count *= len(ways)
    if count <= limit:
        yield from itertools.product(*options)
        return
    everything, nothing = ("all",) * len(options), ("nothing",) * len(options)
    yield everything
    yield nothing
    for place, ways in enumerate(options):
        yield (*nothing[:place], "all", *nothing[place + 1 :])
        yield (*everything[:place], *nothing[place:])  # in order
        for way in ways[1:]:
            yield (*everything[:place], way, *everything[place + 1 :])
    for _ in range(limit):
        yield tuple(chance.choice(ways) for ways in options)


def _written(data: bytes, writes: Sequence[tuple[Write, str]]) -> bytes:
    result = bytearray(data)
    for write, way in writes:
        if way == "nothing":
            continue
        end = write.offset + len(write.data)
        given = write.data[: len(write.data) // 2] if way == "half" else b"" if way == "length" else write.data
        if way == "half":
            end = write.offset + len(given)
        result.extend(bytes(max(0, end - len(result))))
        result[write.offset : write.offset + len(given)] = given
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
    """What a crash may leave after each number of calls, from none to all: (number, tree), each tree once for each.

    >>> made = [(Link("a", 0),), (Write(0, 0, b"x"),), (Flush(0),)]
    >>> [(number, tree) for number, tree in crash_states({}, made) if number == 3]
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
    """Makes a folder hold exactly this.

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
