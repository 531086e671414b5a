"""Both storages satisfy the storage contract, and the contract detects storages that do not."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest

from shardwright.errors import StorageError
from shardwright.storage import LocalStorage, MemoryStorage, Storage
from shardwright.testing import StorageContract


class TestLocalStorage(StorageContract):
    def make(self, folder: Path) -> Storage:
        return LocalStorage(folder / "place")


class TestMemoryStorage(StorageContract):
    def make(self, folder: Path) -> Storage:
        return MemoryStorage()


def broken(test: str, method: str, folder: Path, body) -> None:
    """Runs a test of the contract on a storage one method of which is wrong."""

    class Broken(StorageContract):
        def make(self, folder: Path) -> Storage:
            storage = LocalStorage(folder / "place")
            right = getattr(storage, method)
            setattr(storage, method, lambda *args: body(storage, right, *args))
            return storage

    getattr(Broken(), test)(folder)


def replace_in_place(storage, right, key, data):
    with open(f"{storage.path}/{key}", "wb") as file:
        for byte in data:
            file.write(bytes([byte]))
            file.flush()


BROKEN = {
    "create takes a key twice": (
        "test_a_key_is_created_once",
        "create",
        lambda storage, right, key: (storage.delete(key), right(key))[1],
    ),
    "replace writes in place": (
        "test_readers_during_a_replacement_see_the_old_or_the_new_value",
        "replace",
        replace_in_place,
    ),
    "replace is seen by old readers": ("test_a_reader_survives_deletion_and_replacement", "replace", replace_in_place),
    "keys are not sorted": (
        "test_keys_are_listed_in_order",
        "list_keys",
        lambda storage, right: right()[::-1],
    ),
}


@pytest.mark.parametrize(("test", "method", "body"), BROKEN.values(), ids=BROKEN.keys())
def test_the_storage_contract_detects_broken_storages(test, method, body, tmp_path):
    with pytest.raises((AssertionError, StorageError, ValueError)):
        broken(test, method, tmp_path, body)


def test_pickling_a_memory_storage_raises():
    with pytest.raises(StorageError, match="lives in one process"):
        pickle.dumps(MemoryStorage())
