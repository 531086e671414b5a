"""Random sequences of calls have the same effect on a storage as on a dict."""

from __future__ import annotations

import shutil
import tempfile

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, rule

from shardwright.errors import MissingKeyError, StorageError
from shardwright.storage import Calls, LocalStorage, MemoryStorage, Storage, Writer

pytestmark = pytest.mark.timeout(900)  # in full

KEYS = st.sampled_from(["a", "b-0.safetensors", "manifest.json"])
DATA = st.binary(max_size=40)


def read(reader, offset: int, nbytes: int) -> bytes:
    data = bytearray(nbytes)
    reader.read([memoryview(data)], offset)
    return bytes(data)


class Machine(RuleBasedStateMachine):
    """`expected` is the dict; writers and readers keep the bytes they should have."""

    writers = Bundle("writers")
    readers = Bundle("readers")

    def __init__(self) -> None:
        super().__init__()
        self.expected: dict[str, bytearray] = {}
        self.storage = self.make()
        self.storage.prepare()

    def make(self) -> Storage:
        return MemoryStorage()

    @rule(target=writers, key=KEYS)
    def create(self, key):
        if key in self.expected:
            with pytest.raises(StorageError):
                self.storage.create(key)
            return (None, key, bytearray(), [])
        self.expected[key] = bytearray()
        return (self.storage.create(key), key, self.expected[key], [])

    @rule(writer=writers, pieces=st.lists(DATA, max_size=4), offset=st.integers(0, 60))
    def write(self, writer, pieces, offset):
        made, _, data, ended = writer
        if made is None:
            return
        assert isinstance(made, Writer)
        if ended:
            with pytest.raises(StorageError):
                made.write([memoryview(piece) for piece in pieces], offset)
            return
        made.write([memoryview(piece) for piece in pieces], offset)
        joined = b"".join(pieces)
        if joined:  # nothing, written far out, makes no file longer
            data.extend(bytes(max(0, offset + len(joined) - len(data))))
            data[offset : offset + len(joined)] = joined

    @rule(writer=writers)
    def finish(self, writer):
        made, _, _, ended = writer
        if made is not None and not ended:
            made.finish()
            ended.append(True)

    @rule(writer=writers)
    def abort(self, writer):
        made, key, data, ended = writer
        if made is None:
            return
        if not ended and self.expected.get(key) is not data and key in self.expected:
            return  # removed and made anew meanwhile: nobody aborts then, as names are not used twice
        made.abort()
        if not ended:
            self.expected.pop(key, None)
            ended.append(True)

    @rule(key=KEYS, data=DATA)
    def replace(self, key, data):
        self.storage.replace(key, data)
        self.expected[key] = bytearray(data)

    @rule(key=KEYS)
    def delete(self, key):
        self.storage.delete(key)
        self.expected.pop(key, None)

    @rule(target=readers, key=KEYS)
    def open(self, key):
        if key not in self.expected:
            with pytest.raises(MissingKeyError):
                self.storage.open(key)
            return (None, b"", 0)
        return (self.storage.open(key), self.expected[key], len(self.expected[key]))

    @rule(reader=readers, offset=st.integers(0, 50), nbytes=st.integers(0, 50))
    def read(self, reader, offset, nbytes):
        opened, data, size = reader
        if opened is None:
            return
        assert opened.size == size
        if len(data) != size or offset + nbytes > size:
            with pytest.raises(StorageError):
                read(opened, offset, nbytes)
        else:
            assert read(opened, offset, nbytes) == data[offset : offset + nbytes]

    @invariant()
    def keys_are_those_of_the_dict(self):
        assert self.storage.list_keys() == sorted(self.expected)


class LocalMachine(Machine):
    def make(self) -> Storage:
        self.folder = tempfile.mkdtemp(prefix="shardwright-machine-")
        return LocalStorage(self.folder, Unflushed())

    def teardown(self) -> None:
        shutil.rmtree(self.folder)


class Unflushed(Calls):
    def fsync(self, fd: int) -> None:
        """Nothing: the machine is not going to crash."""


TestMemoryStorage = Machine.TestCase
TestLocalStorage = LocalMachine.TestCase
