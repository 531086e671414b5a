"""The contract of `Storage`, as a test class: subclass it with a function that creates the storage."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from shardwright.errors import MissingKeyError, StorageBusyError, StorageError
from shardwright.storage import Reader, Storage

__all__ = ["StorageContract"]

_BAD_KEYS = ("", ".", "..", ".lock", "../x", "a/b", "/x", "A", "a b", "a\0", "a\n", "ä", "-a", "a" * 300)


class StorageContract(ABC):
    """Tests that every storage must pass. Name your subclass `Test...`, so that pytest collects it.

    >>> import tempfile
    >>> from shardwright.storage import MemoryStorage
    >>> class TestMemory(StorageContract):
    ...     def make(self, folder):
    ...         return MemoryStorage()
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     TestMemory().test_a_key_is_created_once(Path(folder))
    """

    @abstractmethod
    def make(self, folder: Path) -> Storage:
        """Return a new, empty storage; `folder` is an empty directory that it may use."""

    def test_data_written_in_any_order_is_read_by_ranges(self, tmp_path: Path) -> None:
        storage = self._prepared(tmp_path)
        writer = storage.create("data")
        writer.write([memoryview(b"lo"), memoryview(b""), memoryview(b" world")], 3)
        writer.write([memoryview(b"hel")], 0)
        writer.finish()
        with storage.open("data") as reader:
            assert reader.size == 11
            assert _read(reader, 0, 11) == b"hello world"
            assert _read(reader, 4, 3) == b"o w"
            assert _read(reader, 11, 0) == b""
            head, tail = bytearray(5), bytearray(6)
            reader.read([memoryview(head), memoryview(bytearray(0)), memoryview(tail)], 0)
            assert (bytes(head), bytes(tail)) == (b"hello", b" world")

    def test_more_buffers_than_a_system_call_takes(self, tmp_path: Path) -> None:
        storage = self._prepared(tmp_path)
        data = bytes(n % 251 for n in range(5000))
        writer = storage.create("data")
        writer.write([memoryview(data)[n : n + 1] for n in range(5000)], 0)
        writer.finish()
        buffers = [bytearray(1) for _ in range(5000)]
        with storage.open("data") as reader:
            reader.read([memoryview(buffer) for buffer in buffers], 0)
        assert b"".join(buffers) == data

    def test_threads_write_and_read_different_ranges(self, tmp_path: Path) -> None:
        storage = self._prepared(tmp_path)
        parts = [bytes([n]) * 70_001 for n in range(8)]
        writer = storage.create("data")
        _run_in_threads([partial(writer.write, [memoryview(part)], n * len(part)) for n, part in enumerate(parts)])
        writer.finish()
        received: dict[int, bytes] = {}
        with storage.open("data") as reader:

            def read(n: int) -> None:
                received[n] = _read(reader, n * 70_001, 70_001)

            _run_in_threads([partial(read, n) for n in range(8)])
        assert [received.get(n) for n in range(8)] == parts

    def test_an_object_may_be_empty(self, tmp_path: Path) -> None:
        storage = self._prepared(tmp_path)
        storage.create("data").finish()
        storage.replace("other", b"")
        for key in ("data", "other"):
            with storage.open(key) as reader:
                assert reader.size == 0
                reader.read([], 0)

    def test_a_read_returns_the_full_range_or_raises(self, tmp_path: Path) -> None:
        storage = self._prepared(tmp_path)
        storage.replace("data", b"12345")
        with storage.open("data") as reader:
            for offset, nbytes in ((0, 6), (5, 1), (100, 1), (-1, 2)):
                with _raises(StorageError):
                    _read(reader, offset, nbytes)
            assert _read(reader, 0, 5) == b"12345"

    def test_a_key_is_created_once(self, tmp_path: Path) -> None:
        storage = self._prepared(tmp_path)
        writer = storage.create("data")
        with _raises(StorageError):
            storage.create("data")
        writer.write([memoryview(b"mine")], 0)
        writer.finish()
        with _raises(StorageError):
            storage.create("data")
        assert _all(storage, "data") == b"mine"
        storage.delete("data")
        storage.create("data").finish()

    def test_an_aborted_object_is_gone(self, tmp_path: Path) -> None:
        storage = self._prepared(tmp_path)
        writer = storage.create("data")
        writer.write([memoryview(b"half")], 0)
        writer.abort()
        writer.abort()
        assert storage.list_keys() == []
        with _raises(StorageError):
            writer.write([memoryview(b"more")], 0)
        storage.create("data").finish()

    def test_abort_after_finish_changes_nothing(self, tmp_path: Path) -> None:
        storage = self._prepared(tmp_path)
        writer = storage.create("data")
        writer.write([memoryview(b"safe")], 0)
        writer.finish()
        writer.abort()
        assert _all(storage, "data") == b"safe"
        with _raises(StorageError):
            writer.write([memoryview(b"more")], 0)

    def test_opening_a_missing_key_raises(self, tmp_path: Path) -> None:
        storage = self._prepared(tmp_path)
        with _raises(MissingKeyError):
            storage.open("data")

    def test_replace_creates_and_replaces_a_key_and_leaves_no_other(self, tmp_path: Path) -> None:
        storage = self._prepared(tmp_path)
        for data in (b"one", b"the second, which is longer", b"3"):
            storage.replace("manifest.json", data)
            assert _all(storage, "manifest.json") == data
        assert storage.list_keys() == ["manifest.json"]

    def test_readers_during_a_replacement_see_the_old_or_the_new_value(self, tmp_path: Path) -> None:
        storage = self._prepared(tmp_path)
        versions = [bytes([n]) * (1000 + 7 * n) for n in range(50)]
        storage.replace("manifest.json", versions[0])
        values: list[bytes] = []

        def read() -> None:
            while not values or values[-1] != versions[-1]:
                values.append(_all(storage, "manifest.json"))

        _run_in_threads([read, lambda: [storage.replace("manifest.json", data) for data in versions]])
        indices = [versions.index(data) for data in values]  # raises for any other value
        assert indices == sorted(indices)

    def test_a_reader_survives_deletion_and_replacement(self, tmp_path: Path) -> None:
        storage = self._prepared(tmp_path)
        storage.replace("data", b"first")
        with storage.open("data") as old:
            storage.replace("data", b"another")
            with storage.open("data") as new:
                storage.delete("data")
                assert (_read(old, 0, old.size), _read(new, 0, new.size)) == (b"first", b"another")
        with _raises(MissingKeyError):
            storage.open("data")

    def test_reading_from_a_closed_reader_raises(self, tmp_path: Path) -> None:
        storage = self._prepared(tmp_path)
        storage.replace("data", b"first")
        reader = storage.open("data")
        reader.close()
        reader.close()
        with _raises(StorageError):
            _read(reader, 0, 1)

    def test_reading_an_object_during_a_write_raises(self, tmp_path: Path) -> None:
        storage = self._prepared(tmp_path)
        writer = storage.create("data")
        writer.write([memoryview(b"hel")], 0)
        try:
            reader = storage.open("data")
        except MissingKeyError:
            writer.abort()
            return  # objects are not visible before `finish`, so none grows
        with reader:
            writer.write([memoryview(b"lo")], 3)
            with _raises(StorageError):
                _read(reader, 0, 3)
        writer.finish()

    def test_delete_is_idempotent(self, tmp_path: Path) -> None:
        storage = self._prepared(tmp_path)
        storage.replace("data", b"x")
        storage.delete("data")
        storage.delete("data")
        storage.delete("never-was")
        assert storage.list_keys() == []

    def test_keys_are_listed_in_order(self, tmp_path: Path) -> None:
        storage = self._prepared(tmp_path)
        assert storage.list_keys() == []
        for key in ("b", "a-00001-0.safetensors", "9", "a"):
            storage.replace(key, b"")
        assert storage.list_keys() == ["9", "a", "a-00001-0.safetensors", "b"]

    def test_invalid_keys_are_rejected_by_every_method(self, tmp_path: Path) -> None:
        storage = self._prepared(tmp_path)
        for key in _BAD_KEYS:
            for act in (storage.create, storage.open, storage.delete, lambda key: storage.replace(key, b"")):
                with _raises(StorageError, f"key {key!r}"):
                    act(key)
        assert storage.list_keys() == []

    def test_the_lock_is_exclusive(self, tmp_path: Path) -> None:
        storage = self._prepared(tmp_path)
        with storage.lock():
            with _raises(StorageBusyError), storage.lock():
                pass
            storage.replace("data", b"")
        assert storage.list_keys() == ["data"]

    def test_the_lock_is_released_after_an_error(self, tmp_path: Path) -> None:
        storage = self._prepared(tmp_path)
        for _ in range(2):
            with _raises(ZeroDivisionError), storage.lock():
                raise ZeroDivisionError

    def test_prepare_keeps_existing_keys(self, tmp_path: Path) -> None:
        storage = self._prepared(tmp_path)
        storage.replace("data", b"kept")
        storage.prepare()
        assert _all(storage, "data") == b"kept"

    def _prepared(self, folder: Path) -> Storage:
        storage = self.make(folder)
        storage.prepare()
        return storage


def _read(reader: Reader, offset: int, nbytes: int) -> bytes:
    data = bytearray(nbytes)
    reader.read([memoryview(data)], offset)
    return bytes(data)


def _all(storage: Storage, key: str) -> bytes:
    with storage.open(key) as reader:
        return _read(reader, 0, reader.size)


@contextmanager
def _raises(kind: type[Exception], text: str = "") -> Iterator[None]:
    """Like `pytest.raises`, but this package does not require pytest."""
    try:
        yield
    except kind as error:
        assert text in str(error), f"{text!r} is not in {str(error)!r}"  # noqa: PT017  this is pytest.raises
        return
    raise AssertionError(f"{kind.__name__} was not raised")


def _run_in_threads(tasks: Sequence[Callable[[], object]]) -> None:
    """Run each task in a thread of its own; raise the first error of any."""
    errors: list[BaseException] = []

    def run(task: Callable[[], object]) -> None:
        try:
            task()
        except BaseException as error:  # noqa: BLE001  raised below
            errors.append(error)

    threads = [threading.Thread(target=run, args=(task,), daemon=True) for task in tasks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
