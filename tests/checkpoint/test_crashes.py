"""A machine crash at any moment of a save leaves exactly the old state or exactly the new one.

Every system call of the save is a crash point. `shardwright.testing.crashes` enumerates the file system states that a
crash may leave; each one is loaded, and another save follows it.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from shardwright.checkpoint import read, save
from shardwright.errors import CheckpointError, NotACheckpointError, StorageError
from shardwright.storage import Calls, LocalStorage
from shardwright.testing import RecordedCalls, crash_states, put_tree
from shardwright.testing.crashes import Event, Flush, Link, Remove, Tree, Write

pytestmark = pytest.mark.timeout(900)  # in full

FULL = os.environ.get("SHARDWRIGHT_BUDGET") == "full"
LIMIT = 400 if FULL else 40  # states tried of those that are possible at one point
PLACE = "runs/step-10"
NOTHING = "nothing"


class Unflushed(Calls):
    """For what happens after the crash: the machine does not crash again."""

    def fsync(self, fd: int) -> None:
        """Nothing."""


def state(number: int) -> dict[str, Any]:
    """Several writes: two tensors that lie in memory as they are stored, two that do not."""
    generator = torch.Generator().manual_seed(number)
    return {
        "number": number,
        "a": torch.randn(40, generator=generator),
        "b": torch.randn(8, 6, generator=generator).t(),
        "c": torch.randn(5, 7, generator=generator)[:, ::2],
        "d": torch.randint(0, 9, (11,), generator=generator),
    }


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return one.keys() == other.keys() and all(
        torch.equal(one[key], other[key]) if isinstance(one[key], torch.Tensor) else one[key] == other[key]
        for key in one
    )


def found(folder: Path) -> str:
    """What a folder holds: "old", "new", "nothing", or what is wrong with it."""
    try:
        loaded = read(LocalStorage(folder))
    except NotACheckpointError:
        return NOTHING
    except (CheckpointError, StorageError) as error:
        return f"{type(error).__name__}: {error}"
    return {1: "old", 2: "new"}[loaded["number"]] if same(loaded, state(loaded["number"])) else "a mixture"


class SlowCalls(RecordedCalls):
    """Many short writes in place of a few long ones: more to lose."""

    def pwritev(self, fd, buffers, offset):
        return super().pwritev(fd, [buffers[0].cast("B")[:600]], offset)


def recorded(root: Path, number: int) -> tuple[Tree, list[Event]]:
    """Saves a state: the tree before, and the calls."""
    calls = SlowCalls(root)
    save(state(number), LocalStorage(root / PLACE, calls))
    return calls.start, calls.events


@pytest.fixture
def ram(tmp_path: Path) -> Iterator[Path]:
    """Where thousands of small folders are made: in memory, where that can be had."""
    if not os.access("/dev/shm", os.W_OK):
        yield tmp_path / "crashed"
        return
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="shardwright-crashes-") as folder:
        yield Path(folder) / "crashed"


@pytest.fixture
def first_save(tmp_path: Path) -> tuple[Tree, list[Event]]:
    """A save of state 2 into folders that are not there yet."""
    return recorded(tmp_path, 2)


@pytest.fixture
def replacement(tmp_path: Path) -> tuple[Tree, list[Event]]:
    """A save of state 2 over state 1, among leftovers of saves that failed."""
    recorded(tmp_path, 1)
    for name in ("0123456789ab-00000-0.safetensors", "0123456789ab-00001-0.safetensors", "manifest.json.tmp"):
        (tmp_path / PLACE / name.replace("json.tmp", "json.0123456789ab.tmp")).write_bytes(b"half of")
    return recorded(tmp_path, 2)


def bad_states(
    start: Tree,
    events: Sequence[Event],
    allowed: Callable[[int], set[str]],
    folder: Path,
    *,
    go_on: bool = False,
    limit: int = LIMIT,
) -> tuple[list[tuple[int, str]], int, dict[str, int]]:
    """The crash states that load as something that is not allowed; how many were tried; and what they loaded as.

    With `go_on`, a next save is tried in each; without, the first bad one will do.
    """
    bad, tried, seen = [], 0, dict[str, int]()
    known: dict[tuple[tuple[str, bytes | None], ...], str] = {}
    for point, tree in crash_states(start, events, limit=limit, seed=7):
        tried += 1
        key = tuple(tree.items())
        if key not in known:
            put_tree(tree, folder)
            known[key] = found(folder / PLACE)
            if go_on:
                save(state(1), LocalStorage(folder / PLACE, Unflushed()))
                assert found(folder / PLACE) == "old", point
                assert leftovers(folder / PLACE) == [], point
        seen[known[key]] = seen.get(known[key], 0) + 1
        if known[key] not in allowed(point):
            bad.append((point, known[key]))
            if not go_on:
                break
    return bad, tried, seen


def leftovers(folder: Path) -> list[str]:
    """What there is beside the manifest, the lock and one data file."""
    names = sorted(name for name in os.listdir(folder) if name not in ("manifest.json", ".lock"))
    return names[1:] if names and names[0].endswith("-00000-0.safetensors") else names


def commit(events: Sequence[Event]) -> int:
    """How many calls there are up to the rename of the manifest."""
    return 1 + next(n for n, event in enumerate(events) if any(is_manifest(change) for change in event))


def is_manifest(change: Any) -> bool:
    return isinstance(change, Link) and change.path.endswith("/manifest.json")


def allowed_in_replacement(events: Sequence[Event]) -> Callable[[int], set[str]]:
    commit_point, last = commit(events), len(events)
    return lambda point: {"old"} if point < commit_point else {"new"} if point == last else {"old", "new"}


def allowed_in_first_save(events: Sequence[Event]) -> Callable[[int], set[str]]:
    commit_point, last = commit(events), len(events)
    return lambda point: {NOTHING} if point < commit_point else {"new"} if point == last else {NOTHING, "new"}


def test_a_crash_during_a_replacement_leaves_the_old_or_the_new_checkpoint(replacement, ram, capsys):
    start, events = replacement
    bad, tried, seen = bad_states(start, events, allowed_in_replacement(events), ram, go_on=True)
    with capsys.disabled():
        report("a replacement", events, tried, seen)
    assert bad == []
    assert len(events) >= 12
    assert tried > (1500 if FULL else 300)
    assert set(seen) == {"old", "new"}


def test_a_crash_during_a_first_save_leaves_no_checkpoint_or_the_new_one(first_save, ram, capsys):
    start, events = first_save
    bad, tried, seen = bad_states(start, events, allowed_in_first_save(events), ram, go_on=True)
    with capsys.disabled():
        report("a first save", events, tried, seen)
    assert bad == []
    assert len(events) >= 15
    assert tried > (1500 if FULL else 300)
    assert set(seen) == {NOTHING, "new"}


def report(what: str, events: Sequence[Event], tried: int, seen: dict[str, int]) -> None:
    print(f"\n{what}: {len(events) + 1} crash points, {tried} states: {seen}", end=" ")  # noqa: T201  asked for


class Killed(BaseException):
    """In place of kill -9: nothing catches it, and no call is made after it."""


class KilledCalls(SlowCalls):
    """The process ends before call number `last`, counting those that change something."""

    last = -1

    def _check(self) -> None:
        if self.last >= 0 and len(self.events) >= self.last:
            raise Killed

    def open(self, path: str, flags: int, mode: int = 0o666) -> int:
        self._check()
        return super().open(path, flags, mode)

    def pwritev(self, fd, buffers, offset):
        self._check()
        return super().pwritev(fd, buffers, offset)

    def fsync(self, fd: int) -> None:
        self._check()
        super().fsync(fd)

    def rename(self, source: str, target: str) -> None:
        self._check()
        super().rename(source, target)

    def unlink(self, path: str) -> None:
        self._check()
        super().unlink(path)

    def mkdir(self, path: str) -> None:
        self._check()
        super().mkdir(path)


def test_a_save_after_a_killed_save_survives_every_crash(tmp_path, ram):
    """What the killed one made, and had not flushed, is flushed by the next, if it needs it."""
    (tmp_path / "whole").mkdir()
    _, events = recorded(tmp_path / "whole", 2)
    points = range(len(events))
    for point in points if FULL else points[::4]:
        root = tmp_path / f"killed-{point}"
        root.mkdir()
        calls = KilledCalls(root)
        calls.last = point
        with pytest.raises(Killed):
            save(state(1), LocalStorage(root / PLACE, calls))
        killed = len(calls.events)
        assert killed == point
        calls.last = -1
        save(state(2), LocalStorage(root / PLACE, calls))
        commit_point, last = commit(calls.events[killed:]) + killed, len(calls.events)
        if point >= commit(events):
            before = {"old", NOTHING}  # it was killed after its commit, which need not have been flushed
        else:
            before = {NOTHING}

        def allowed(number, killed=killed, commit_point=commit_point, last=last, before=before):
            return {"new"} if number == last else before if number < commit_point else before | {"new"}

        bad, tried, _ = (
            bad_states(calls.start, calls.events, allowed, ram, limit=8) if FULL else last_states(calls, ram)
        )
        assert bad == [], point
        assert tried


def last_states(calls: RecordedCalls, folder: Path) -> tuple[list[tuple[int, str]], int, dict[str, int]]:
    """Only what a crash after the last call may leave."""
    bad, tried = [], 0
    for point, tree in crash_states(calls.start, calls.events, limit=LIMIT):
        if point == len(calls.events):
            tried += 1
            put_tree(tree, folder)
            if found(folder / PLACE) != "new":
                bad.append((point, found(folder / PLACE)))
    return bad, tried, {}


# The proof can fail: each of these is a save with one mistake, and a crash that shows it is found.


def without_flush(number: int) -> Callable[[list[Event]], list[Event]]:
    """The save without its flush of this number."""

    def change(events: list[Event]) -> list[Event]:
        place = flushes(events)[number]
        return events[:place] + events[place + 1 :]

    return change


def flushes(events: Sequence[Event]) -> list[int]:
    return [place for place, event in enumerate(events) if isinstance(event[0], Flush)]


def rename_before_flush(events: list[Event]) -> list[Event]:
    place = commit(events) - 1
    assert isinstance(events[place - 1][0], Flush)
    return [*events[: place - 1], events[place], events[place - 1], *events[place + 1 :]]


def unlink_before_commit(events: list[Event]) -> list[Event]:
    place = commit(events) - 1
    removed = [event for event in events[place + 1 :] if isinstance(event[0], Remove)]
    assert removed
    return [*events[:place], *removed, *(event for event in events[place:] if event not in removed)]


def unlink_before_the_folder_is_flushed(events: list[Event]) -> list[Event]:
    place = commit(events)
    assert isinstance(events[place][0], Flush)
    return [*events[:place], *events[place + 1 :], events[place]]


def write_after_flush(events: list[Event]) -> list[Event]:
    """The header, which comes last, after the flush of its file."""
    place = next(
        n for n, event in enumerate(events) if isinstance(event[0], Flush) and isinstance(event[0].target, int)
    )
    assert isinstance(events[place - 1][0], Write)
    return [*events[: place - 1], events[place], events[place - 1], *events[place + 1 :]]


MISTAKES = {
    "rename before flush": rename_before_flush,
    "unlink before commit": unlink_before_commit,
    "unlink before the folder is flushed": unlink_before_the_folder_is_flushed,
    "write after flush": write_after_flush,
}


@pytest.mark.parametrize("mistake", MISTAKES.values(), ids=MISTAKES.keys())
def test_a_wrong_order_of_calls_in_a_replacement_is_detected(mistake, replacement, ram):
    start, events = replacement
    wrong = mistake(list(events))
    bad, _, _ = bad_states(start, wrong, allowed_in_replacement(wrong), ram)
    assert bad


def test_omitting_any_flush_of_a_first_save_is_detected(first_save, ram):
    """But that of the lowest folder that was there: it is needed where a killed save had made that folder."""
    start, events = first_save
    count = len(flushes(events))
    assert count == 6  # two folders into their parents; the data, its name; the manifest, its name
    for number in range(count):
        wrong = without_flush(number)(list(events))
        bad, _, _ = bad_states(start, wrong, allowed_in_first_save(wrong), ram)
        assert bad, f"flush {number}: {events[flushes(events)[number]]}"


def test_omitting_any_flush_of_a_replacement_is_detected(replacement, ram):
    start, events = replacement
    places = flushes(events)
    assert [events[place][0].target for place in places if isinstance(events[place][0].target, str)] == [
        "runs",
        PLACE,
        PLACE,
    ]
    for number in range(1, len(places)):  # the first is that of a folder which is there for good
        wrong = without_flush(number)(list(events))
        bad, _, _ = bad_states(start, wrong, allowed_in_replacement(wrong), ram)
        assert bad, f"flush {number}: {events[places[number]]}"


def test_omitting_the_flush_of_a_directory_created_by_a_killed_save_is_detected(tmp_path, ram):
    calls = KilledCalls(tmp_path)
    calls.last = 1
    with pytest.raises(Killed):
        save(state(1), LocalStorage(tmp_path / PLACE, calls))
    assert calls.events == [(Link("runs", 0, is_folder=True),)]
    calls.last = -1
    save(state(2), LocalStorage(tmp_path / PLACE, calls))
    assert last_states(calls, ram)[0] == []
    calls.events.remove((Flush(""),))
    assert last_states(calls, ram)[0]
