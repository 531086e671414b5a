"""LocalStorage: the order of flushes, files of other kinds, and error messages for system errors."""

from __future__ import annotations

import errno
import os
import re
import signal
import socket
import stat
import threading
import time

import pytest

from shardwright import comm
from shardwright.errors import MissingKeyError, RankLostError, StorageBusyError, StorageError
from shardwright.storage import Calls, LocalStorage
from shardwright.testing import Died, Returned, outcomes
from shardwright.testing.crashes import Flush, Link, RecordedCalls, Remove, Write

NEEDS_OTHER_USER = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")


def fill(storage: LocalStorage, key: str, data: bytes = b"data") -> None:
    writer = storage.create(key)
    try:
        writer.write([memoryview(data)], 0)
        writer.finish()
    except StorageError:
        writer.abort()
        raise


def read(storage: LocalStorage, key: str) -> bytes:
    with storage.open(key) as reader:
        data = bytearray(reader.size)
        reader.read([memoryview(data)], 0)
    return bytes(data)


class Failing(Calls):
    """One call fails: the first of this name."""

    def __init__(self, name: str, code: int) -> None:
        self.made: list[str] = []
        right = getattr(self, name)

        def fail(*args):
            if name not in self.made:
                self.made.append(name)
                raise OSError(code, os.strerror(code))
            return right(*args)

        setattr(self, name, fail)


# What is flushed, and when.


def test_finish_flushes_the_file_and_then_its_directory(tmp_path):
    calls = RecordedCalls(tmp_path)
    fill(LocalStorage(tmp_path, calls), "data")
    assert calls.events == [
        (Link("data", 0),),
        (Write(0, 0, b"data"),),
        (Flush(0),),
        (Flush(""),),
    ]


def test_replace_flushes_the_file_before_the_rename_and_the_directory_after_it(tmp_path):
    (tmp_path / "manifest.json").write_bytes(b"old")
    calls = RecordedCalls(tmp_path)
    LocalStorage(tmp_path, calls).replace("manifest.json", b"new")
    ((made,), *_) = calls.events
    assert re.fullmatch(r"manifest\.json\.[0-9a-f]{12}\.tmp", made.path)
    assert calls.events == [
        (Link(made.path, 1),),
        (Write(1, 0, b"new"),),
        (Flush(1),),
        (Link("manifest.json", 1), Remove(made.path)),
        (Flush(""),),
    ]


def test_prepare_flushes_the_parent_of_every_new_directory(tmp_path):
    calls = RecordedCalls(tmp_path)
    LocalStorage(tmp_path / "a/b/c", calls).prepare()
    assert calls.events == [
        (Link("a", 0, is_folder=True),),
        (Flush(""),),
        (Link("a/b", 1, is_folder=True),),
        (Flush("a"),),
        (Link("a/b/c", 2, is_folder=True),),
        (Flush("a/b"),),
    ]


def test_prepare_flushes_a_directory_created_by_a_killed_save(tmp_path):
    (tmp_path / "a").mkdir()  # and killed
    calls = RecordedCalls(tmp_path)
    LocalStorage(tmp_path / "a/b", calls).prepare()
    assert calls.events[0] == (Flush(""),)


# What hostile files do.


@pytest.mark.parametrize("flags", ["link", "dangling", "folder", "pipe", "socket"])
def test_opening_anything_but_a_regular_file_raises_without_blocking(tmp_path, flags):
    (tmp_path / "real").write_bytes(b"secret")
    path = tmp_path / "data"
    match flags:
        case "link":
            path.symlink_to(tmp_path / "real")
        case "dangling":
            path.symlink_to(tmp_path / "nothing")
        case "folder":
            path.mkdir()
        case "pipe":
            os.mkfifo(path)
        case "socket":
            with socket.socket(socket.AF_UNIX) as made:
                made.bind(str(path))
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(StorageError, match=re.escape(str(path))) as caught:
        LocalStorage(tmp_path).open("data")
    assert not isinstance(caught.value, MissingKeyError)
    assert len(os.listdir("/proc/self/fd")) == before
    with pytest.raises(StorageError, match="exists"):
        LocalStorage(tmp_path).create("data")
    assert (tmp_path / "real").read_bytes() == b"secret"


def test_replace_replaces_a_symbolic_link_instead_of_following_it(tmp_path):
    (tmp_path / "real").write_bytes(b"secret")
    (tmp_path / "manifest.json").symlink_to(tmp_path / "real")
    LocalStorage(tmp_path).replace("manifest.json", b"new")
    assert (tmp_path / "real").read_bytes() == b"secret"
    assert read(LocalStorage(tmp_path), "manifest.json") == b"new"


@pytest.mark.parametrize("kind", ["link", "pipe"])
def test_a_lock_file_that_is_not_a_regular_file_raises(tmp_path, kind):
    (tmp_path / "real").write_bytes(b"")
    if kind == "link":
        (tmp_path / ".lock").symlink_to(tmp_path / "real")
    else:
        os.mkfifo(tmp_path / ".lock")
    with pytest.raises(StorageError, match=r"\.lock is"), LocalStorage(tmp_path).lock():
        pass


@pytest.mark.parametrize("size", [2, 9])
def test_a_file_that_changes_size_while_open_raises(tmp_path, size):
    (tmp_path / "data").write_bytes(b"12345")
    with LocalStorage(tmp_path).open("data") as reader:
        os.truncate(tmp_path / "data", size)
        with pytest.raises(StorageError, match=f"had 5 bytes when it was opened and (ends at|has) {size}"):
            reader.read([memoryview(bytearray(5))], 0)


# Calls that do a part of what they were asked for.


class Stingy(Calls):
    """Takes and gives a few bytes at a time."""

    def pwritev(self, fd, buffers, offset):
        return os.pwrite(fd, buffers[0][:3], offset)

    def preadv(self, fd, buffers, offset):
        return os.preadv(fd, [buffers[0][:2]], offset)


def test_short_writes_and_reads_are_continued(tmp_path):
    storage = LocalStorage(tmp_path, Stingy())
    pieces = [b"hello ", b"", b"w", b"orld, and", b"", b" more"]
    writer = storage.create("data")
    writer.write([memoryview(piece) for piece in pieces], 0)
    writer.finish()
    places = [bytearray(len(piece)) for piece in pieces]
    with storage.open("data") as reader:
        reader.read([memoryview(place) for place in places], 0)
    assert places == pieces


def test_short_writes_of_wide_elements_continue_at_the_right_byte(tmp_path):
    class Wide(Stingy):
        def pwritev(self, fd, buffers, offset):
            return os.pwrite(fd, buffers[0].cast("B")[:3], offset)

    storage = LocalStorage(tmp_path, Wide())
    fill(storage, "data", memoryview(bytes(range(16))).cast("i"))
    assert read(LocalStorage(tmp_path), "data") == bytes(range(16))


def test_a_write_of_zero_bytes_raises_instead_of_looping(tmp_path):
    class Full(Calls):
        def pwritev(self, fd, buffers, offset):
            return 0

    with pytest.raises(StorageError, match="takes no more bytes"):
        fill(LocalStorage(tmp_path, Full()), "data")


def test_signals_do_not_interrupt_reads_and_writes(tmp_path):
    """EINTR is retried, by the interpreter: a handler that returns is all that happens."""
    caught = []
    before = signal.signal(signal.SIGALRM, lambda *_: caught.append(1))
    signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)
    try:
        data = os.urandom(1 << 22)
        for number in range(4):
            fill(LocalStorage(tmp_path), f"data{number}", data)
            assert read(LocalStorage(tmp_path), f"data{number}") == data
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert caught


def test_storage_works_without_vectored_system_calls(tmp_path, monkeypatch):
    monkeypatch.delattr(os, "preadv")
    monkeypatch.delattr(os, "pwritev")
    monkeypatch.setattr("shardwright.storage.calls._sync_file_range", None)
    storage = LocalStorage(tmp_path)
    writer = storage.create("data")
    writer.write([memoryview(b"ab"), memoryview(b""), memoryview(b"cde")], 0)
    writer.finish()
    assert read(storage, "data") == b"abcde"


def test_full_fsync_is_used_where_the_platform_has_it(tmp_path, monkeypatch):
    done = []
    monkeypatch.setattr("shardwright.storage.calls._FULL_FSYNC", 51)
    monkeypatch.setattr("fcntl.fcntl", lambda fd, what: done.append(what))
    fill(LocalStorage(tmp_path), "data")
    assert done == [51, 51]


def test_a_file_system_that_cannot_flush_directories_is_accepted(tmp_path):
    class NoFolders(Calls):
        def fsync(self, fd):
            if stat.S_ISDIR(os.fstat(fd).st_mode):
                raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
            super().fsync(fd)

    storage = LocalStorage(tmp_path / "new", NoFolders())
    storage.prepare()
    fill(storage, "data")
    storage.replace("manifest.json", b"{}")
    assert storage.list_keys() == ["data", "manifest.json"]


# What the system's errors become.


@pytest.mark.parametrize(
    ("code", "text"),
    [
        (errno.ENOSPC, "no space is left on the device"),
        (errno.EDQUOT, "quota"),
        (errno.EROFS, "read-only"),
        (errno.EACCES, "permission denied"),
        (errno.EIO, "Input/output error"),
    ],
)
@pytest.mark.parametrize("name", ["open", "pwritev", "fsync", "close"])
def test_a_file_that_cannot_be_written_raises_and_is_removed(tmp_path, name, code, text):
    storage = LocalStorage(tmp_path, Failing(name, code))
    with pytest.raises(StorageError, match=re.escape(str(tmp_path / "data")) + ".*" + text):
        fill(storage, "data")
    assert storage.list_keys() == []


@pytest.mark.parametrize("name", ["open", "pwritev", "fsync", "close", "rename"])
def test_a_failed_replace_keeps_the_old_file_and_nothing_else(tmp_path, name):
    (tmp_path / "manifest.json").write_bytes(b"old")
    with pytest.raises(StorageError, match=r"cannot replace .*manifest\.json: no space"):
        LocalStorage(tmp_path, Failing(name, errno.ENOSPC)).replace("manifest.json", b"new")
    assert os.listdir(tmp_path) == ["manifest.json"]
    assert (tmp_path / "manifest.json").read_bytes() == b"old"


def test_a_failed_flush_is_not_retried(tmp_path):
    class Once(Calls):
        count = 0

        def fsync(self, fd):
            self.count += 1
            raise OSError(errno.EIO, "lost")

    calls = Once()
    storage = LocalStorage(tmp_path, calls)
    writer = storage.create("data")
    with pytest.raises(StorageError, match="flush"):
        writer.finish()
    writer.abort()
    assert calls.count == 1
    assert os.listdir(tmp_path) == []


def test_a_failed_directory_flush_raises_and_the_file_can_be_discarded(tmp_path):
    class NoFolder(Calls):
        def fsync(self, fd):
            if stat.S_ISDIR(os.fstat(fd).st_mode):
                raise OSError(errno.EIO, "lost")

    storage = LocalStorage(tmp_path, NoFolder())
    writer = storage.create("data")
    with pytest.raises(StorageError, match="flush"):
        writer.finish()
    writer.abort()
    assert os.listdir(tmp_path) == []
    with pytest.raises(StorageError, match="in place, but may not outlive a crash"):
        storage.replace("manifest.json", b"new")


def test_a_file_in_place_of_the_directory_raises(tmp_path):
    (tmp_path / "file").write_bytes(b"")
    for path in (tmp_path / "file", tmp_path / "file/below"):
        with pytest.raises(StorageError, match=re.escape(f"{tmp_path / 'file'} exists and is not a directory")):
            LocalStorage(path).prepare()
    with pytest.raises(StorageError, match="cannot list"):
        LocalStorage(tmp_path / "file").list_keys()


def test_a_directory_that_does_not_exist_has_no_keys(tmp_path):
    assert LocalStorage(tmp_path / "nowhere").list_keys() == []
    with pytest.raises(MissingKeyError):
        LocalStorage(tmp_path / "nowhere").open("manifest.json")


@NEEDS_OTHER_USER
def test_permission_denied_raises_with_the_user(tmp_path):
    (tmp_path / "locked").mkdir(mode=0o700)
    os.seteuid(65534)
    try:
        with pytest.raises(StorageError, match="permission denied to user 65534"):
            LocalStorage(tmp_path / "locked").create("data")
    finally:
        os.seteuid(0)


def test_a_full_disk_raises_and_leaves_no_partial_file(small_disk):
    storage = LocalStorage(small_disk)
    fill(storage, "old", b"x" * 1000)
    with pytest.raises(StorageError, match="no space is left"):
        fill(storage, "data", bytes(1 << 22))
    assert storage.list_keys() == ["old"]
    fill(storage, "next", b"x" * 100_000)


# The lock.


def test_a_lock_is_released_when_its_process_is_killed(tmp_path):
    def body() -> str:
        if comm.world().rank == 1:
            with LocalStorage(tmp_path).lock():
                comm.gather_bytes(b"it is held")
                comm.gather_bytes(b"and was found to be")
                os.kill(os.getpid(), signal.SIGKILL)
        comm.gather_bytes(b"it is held")
        with pytest.raises(StorageBusyError, match=re.escape(str(tmp_path))), LocalStorage(tmp_path).lock():
            pass
        comm.gather_bytes(b"and was found to be")
        with pytest.raises(RankLostError):
            comm.gather_bytes(b"it is dead")
        deadline = time.monotonic() + 5  # its connection may close before its files do
        while True:
            try:
                with LocalStorage(tmp_path).lock():
                    return "let go of"
            except StorageBusyError:
                assert time.monotonic() < deadline

    assert outcomes(2, body) == [Returned("let go of"), Died(-signal.SIGKILL)]


def test_a_lock_is_released_while_a_forked_child_is_alive(tmp_path):
    """A worker that was forked during a save has the lock file open for as long as it lives, as a duplicate has."""

    class Forked(Calls):
        def lock(self, fd):
            super().lock(fd)
            self.of_child = os.dup(fd)

    calls = Forked()
    with LocalStorage(tmp_path, calls).lock():
        pass
    with LocalStorage(tmp_path).lock():
        pass
    os.close(calls.of_child)


def test_two_threads_do_not_hold_the_lock_at_once(tmp_path):
    inside, most = [], []

    def work():
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline:
            try:
                with LocalStorage(tmp_path).lock():
                    inside.append(1)
                    most.append(len(inside))
                    time.sleep(0.001)
                    inside.pop()
                    return
            except StorageBusyError:
                time.sleep(0.0005)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == [1] * 8


def test_a_file_system_without_locks_raises_unless_locks_is_false(tmp_path):
    calls = Failing("lock", errno.ENOSYS)
    with pytest.raises(StorageError, match="locks=False"), LocalStorage(tmp_path, calls).lock():
        pass
    with LocalStorage(tmp_path, Failing("lock", errno.ENOSYS), locks=False).lock():
        pass
