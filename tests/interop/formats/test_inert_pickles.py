"""Pickles are read by a machine that executes nothing: plain values come back, everything else is refused by name."""

from __future__ import annotations

import collections
import contextlib
import json
import pickle
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwright.errors import PickleError
from shardwright.interop.formats.pickled import METADATA, STATE, read_pickle

SCALARS = st.none() | st.booleans() | st.integers(-(1 << 70), 1 << 70) | st.floats(allow_nan=False) | st.text()
KEYS = st.none() | st.booleans() | st.integers(-(1 << 59), 1 << 59) | st.text() | st.binary()
VALUES = st.recursive(
    SCALARS | st.binary() | st.builds(bytearray, st.binary()),
    lambda inner: (
        st.lists(inner)
        | st.lists(inner).map(tuple)
        | st.dictionaries(KEYS | st.tuples(KEYS, KEYS), inner)
        | st.dictionaries(st.text(), inner).map(collections.OrderedDict)
    ),
    max_leaves=6,
)


@given(VALUES, st.sampled_from([2, 3, 4, 5]))
def test_plain_values_are_read_as_python_reads_them(value: Any, protocol: int) -> None:
    data = pickle.dumps(value, protocol)
    if b"bytearray" in data and protocol < 5:  # created by a call of builtins.bytearray, which nothing here needs
        with pytest.raises(PickleError, match="bytearray"):
            read_pickle(data, STATE, "x")
        return
    assert read_pickle(data, STATE, "x") == pickle.loads(data)


@given(st.sets(KEYS), st.sampled_from([4, 5]))
def test_sets_are_read(value: set[Any], protocol: int) -> None:
    assert read_pickle(pickle.dumps(value, protocol), {}, "x") == value
    assert read_pickle(pickle.dumps(frozenset(value), protocol), {}, "x") == value


@given(st.binary(max_size=200))
def test_any_bytes_give_a_value_or_a_typed_error(data: bytes) -> None:
    for table in (STATE, METADATA):
        with contextlib.suppress(PickleError):
            read_pickle(b"\x80\x04" + data, table, "x")


@given(VALUES, st.integers(0, 1 << 30), st.integers(1, 255))
def test_a_flipped_byte_gives_a_value_or_a_typed_error(value: Any, where: int, flip: int) -> None:
    data = bytearray(pickle.dumps(value, 4))
    data[where % len(data)] ^= flip
    with contextlib.suppress(PickleError):
        read_pickle(bytes(data), STATE, "x")


def test_a_key_that_is_set_twice_is_refused() -> None:
    with pytest.raises(PickleError, match="a key twice"):
        read_pickle(b"\x80\x04}(X\x01\0\0\0aK\x01X\x01\0\0\0aK\x02u.", {}, "x")


P = b"\x80\x04"


def text(value: str) -> bytes:
    return b"\x8c" + bytes([len(value)]) + value.encode()


def stack_global(module: str, name: str) -> bytes:
    return text(module) + text(name) + b"\x93"


TOUCH = text("touch executed")
HOSTILE = {
    "GLOBAL and REDUCE": P + b"cposix\nsystem\n" + TOUCH + b"\x85R.",
    "STACK_GLOBAL and REDUCE": P + stack_global("os", "system") + TOUCH + b"\x85R.",
    "a name with dots": P + stack_global("torch", "serialization.os.system") + TOUCH + b"\x85R.",
    "a known module, another name": P + stack_global("collections", "_sys.modules") + b".",
    "a name that is not a str": P + b"K\x01K\x02\x93.",
    "a name that is a tuple": P + text("torch") + b")\x93.",
    "getattr": P + stack_global("builtins", "getattr") + stack_global("torch", "Size") + text("__class__") + b"\x86R.",
    "eval": P + stack_global("builtins", "eval") + text("open('executed','w')") + b"\x85R.",
    "__import__": P + stack_global("builtins", "__import__") + text("antigravity") + b"\x85R.",
    "torch.load in a pickle": P + stack_global("torch.serialization", "load") + text("x") + b"\x85R.",
    "torch.hub": P + stack_global("torch.hub", "load") + text("x") + b"\x85R.",
    "a module that would be imported": P + stack_global("antigravity", "geohash") + b".",
    "copyreg": P + stack_global("copyreg", "_reconstructor") + b")R.",
    "copyreg.__newobj__": P + stack_global("copyreg", "__newobj__") + stack_global("torch", "Size") + b"\x85R.",
    "INST": P + b"(" + TOUCH + b"iposix\nsystem\n.",
    "OBJ": P + b"(cposix\nsystem\n" + TOUCH + b"o.",
    "EXT1": P + b"\x82\x01.",
    "EXT2": P + b"\x83\x01\x00.",
    "EXT4": P + b"\x84\x01\x00\x00\x00.",
    "NEXT_BUFFER": P + b"\x97.",
    "READONLY_BUFFER": P + b"N\x98.",
    "NEWOBJ of a function": P + stack_global("posix", "system") + TOUCH + b"\x85\x81.",
    "NEWOBJ_EX": P + stack_global("torch", "Size") + b")}" + text("a") + b"K\x01s\x92.",
    "REDUCE of an instance": P + stack_global("argparse", "Namespace") + b")\x81)R.",
    "REDUCE of a constant": P + stack_global("torch", "float32") + b")R.",
    "REDUCE of a text": P + text("system") + TOUCH + b"\x85R.",
    "BUILD of a type": P + stack_global("argparse", "Namespace") + b"N}" + text("__call__") + b"K\x01s\x86b.",
    "BUILD of a list": P + b"]}b.",
    "BUILD twice": P + stack_global("argparse", "Namespace") + b")\x81}b}b.",
    "a persistent id": P + text("x") + b"Q.",
    "PERSID": P + b"Px\n.",
    "a tuple that hashes deeply": P + b")" + b"\x85" * 200_000 + b"}" + b"0" + b"}" + b"2" + b".",
    "a key that hashes deeply": P + b"}" + b")" + b"\x85" * 200_000 + b"Ns.",
    "keys that collide": P
    + b"}("
    + b"".join(b"\x8a\x0a" + (n * ((1 << 61) - 1)).to_bytes(10, "little") + b"N" for n in range(50_000))
    + b"u.",
    "a list that contains itself as a key": P + b"}]q\x00h\x00Ns.",
    "a memo entry far away": P + b"Nr\xff\xff\xff\x7f.",
    "a memo entry that does not exist": P + b"j\xff\xff\xff\x7f.",
    "many sparse memo entries": P
    + b"N"
    + b"".join(b"r" + struct.pack("<I", 10 * n + 9) for n in range(200_000))
    + b".",
    "a memo of everything": P + b"N" + b"\x94" * 2_000_000 + b".",
    "a frame of 2^63 bytes": P + b"\x95" + b"\xff" * 7 + b"\x7f" + b"N.",
    "a text of 2^63 bytes": P + b"\x8d" + b"\xff" * 7 + b"\x7f" + b"N.",
    "bytes of 2^40": P + b"\x8e" + struct.pack("<Q", 1 << 40) + b"N.",
    "a bytearray of 2^40": P + b"\x96" + struct.pack("<Q", 1 << 40) + b"N.",
    "an integer of 2^31 bytes": P + b"\x8b\xff\xff\xff\x7f.",
    "two million dicts": P + b"}" * 2_000_000 + b".",
    "half a million sets": P + b"\x8f" * 500_000 + b".",
    "three million marks": P + b"(" * 3_000_000 + b".",
    "three million values": P + b"N" * 3_000_000 + b".",
    "a second protocol": P + b"\x80\x05N.",
    "protocol 0": b"cposix\nsystem\n(S'touch executed'\ntR.",
    "an unfinished value": P + b"NN.",
    "no end": P + b"N",
    "an empty stack": P + b".",
    "nothing": b"",
}
NAMED = ("posix.system", "os.system", "builtins.getattr", "builtins.eval", "copyreg._reconstructor", "antigravity")

PROGRAM = """
import json, os, resource, sys, time, torch
from shardwright.errors import PickleError
from shardwright.interop.formats.pickled import METADATA, STATE, read_pickle
name, folder = sys.argv[1:]
os.chdir(folder)
data = open(f"{folder}/hostile", "rb").read()
before, used, began = set(sys.modules), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
messages = []
for table in (STATE, METADATA):
    try:
        read_pickle(data, table, name)
        messages.append("a value")
    except PickleError as error:
        messages.append(str(error))
print(json.dumps([
    messages, sorted(set(sys.modules) - before), time.process_time() - began,
    resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - used, os.listdir(folder),
]))
"""


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Read every hostile pickle in one process of its own, each in an empty folder."""
    folder = tmp_path_factory.mktemp("hostile")
    for number, data in enumerate(HOSTILE.values()):
        Path(folder, str(number)).mkdir()
        Path(folder, str(number), "hostile").write_bytes(data)
    program = f"""
import io, json, sys, contextlib
program = compile({PROGRAM!r}, "hostile", "exec")
for number in range({len(HOSTILE)}):
    sys.argv = ["hostile", str(number), f"{folder}/{{number}}"]
    exec(program)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300, check=True)
    return dict(zip(HOSTILE, map(json.loads, done.stdout.splitlines()), strict=True))


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_pickle_executes_nothing_in_bounded_time_and_memory(name: str, outcomes: dict[str, Any]) -> None:
    messages, imported, seconds, kilobytes, files = outcomes[name]
    if name not in ("a tuple that hashes deeply", "a memo entry far away"):  # these are values, and cost nothing
        assert "a value" not in messages
    assert imported == []
    assert files == ["hostile"]
    assert seconds / 2 < 1  # for both tables
    assert kilobytes < 200_000


@pytest.mark.parametrize("name", NAMED)
def test_a_refusal_names_what_was_refused(name: str, outcomes: dict[str, Any]) -> None:
    assert any(f"'{name}" in message for messages, *_ in outcomes.values() for message in messages), name


def test_the_known_names_resolve_to_nothing_that_can_be_imported() -> None:
    for table in (STATE, METADATA):
        for kind in table.values():
            assert kind.make is None or kind.make.__module__.startswith("shardwright."), kind
