"""Hostile manifests and data files raise typed errors in bounded memory and time."""

from __future__ import annotations

import hashlib
import json
import os
import random
import resource
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import crc32c
import numpy as np
import pytest
import torch

from shardwright import checkpoint
from shardwright.checkpoint.format.data_file import FileEntry
from shardwright.checkpoint.format.manifest import Manifest
from shardwright.checkpoint.format.tiling import tiles
from shardwright.checkpoint.format.values import DTYPES
from shardwright.checkpoint.reading.collective_read import read_alone
from shardwright.checkpoint.reading.contents import check_sizes
from shardwright.checkpoint.reading.data_reader import FileReader
from shardwright.checkpoint.reading.targets import Target
from shardwright.errors import CheckpointError, CorruptionError, FormatError, MissingKeyError, StorageError
from shardwright.layout import Region
from shardwright.storage import LocalStorage, Reader
from tests.checkpoint.fuzz import mutated_bytes, mutated_structure, mutated_values, signed, unsigned, written
from tests.peak_memory import peak_memory

FULL = os.environ.get("SHARDWRIGHT_BUDGET") == "full"
MUTATIONS = 100_000 if FULL else 10_000

Fields = dict[str, Any]


@pytest.fixture
def one(tmp_path: Path) -> Path:
    """A small checkpoint of one rank."""
    path = tmp_path / "one"
    state = {
        "w": torch.arange(24.0).reshape(4, 6),
        "b": torch.ones(6, dtype=torch.int64),
        "t": torch.tensor([True, False, True]),
        "n": {"epoch": 3, "list": [1.5, None, ("a", b"b")]},
    }
    checkpoint.save(state, path)
    return path


def change(path: Path, how: Callable[[Fields], object]) -> None:
    """Changes what a manifest says, and signs it."""
    manifest = path / "manifest.json"
    fields = json.loads(manifest.read_bytes())
    how(fields)
    manifest.write_bytes(written(fields))


def put(*keys: Any, to: Any) -> Callable[[Fields], None]:
    def how(fields: Fields) -> None:
        holder: Any = fields
        for key in keys[:-1]:
            holder = holder[key]
        holder[keys[-1]] = to

    return how


def nested(depth: int, kind: str = "l") -> Any:
    node: Any = ["v", 1]
    for _ in range(depth):
        node = [kind, node] if kind == "l" else ["e", "A", "B", node]
    return node


# tensors: [names, dtypes, dtype of each, spreads, shardings, sharding of each]; files: [ranks, sizes, headers, digests]
LIES: dict[str, tuple[Callable[[Fields], None], str]] = {
    "version 2": (put("shardwright", to=2), "version 2"),
    "a path as save id": (put("save", to="../../etc/x"), "save id must be .* got '../../etc/x'"),
    "an absolute path": (put("save", to="/etc/passwd"), "save id"),
    "a save id with a NUL": (put("save", to="abcdef\0"), "save id"),
    "a long save id": (put("save", to="a" * 1000), "save id"),
    "10 GB in a shape": (put("tensors", 4, 0, 1, to=[5 << 30, 2]), "the tensors have .* bytes, but the files hold"),
    "an exabyte": (put("tensors", 4, 0, 1, to=[1 << 61, 1]), "the tensors have|exceeds the limit"),
    "a size past 64 bits": (put("tensors", 4, 0, 1, to=[1 << 64]), "invalid size|out of range"),
    "a shape with zero and huge sizes": (put("tensors", 4, 0, 1, to=[0, 1 << 62]), "invalid size"),
    "a zero size and an overflowing product": (put("tensors", 4, 0, 1, to=[0, 1 << 40, 1 << 40]), "exceeds the limit"),
    "a negative size": (put("tensors", 4, 0, 1, to=[-4, 6]), "invalid size -4"),
    "100,000 dimensions": (put("tensors", 4, 0, 1, to=[1] * 100_000), "dimensions"),
    "a tensor of another size": (put("tensors", 4, 0, 1, to=[4, 7]), "the tensors have"),
    "an itemsize that is not its dtype's": (put("tensors", 1, 0, to=["float32", 8]), "dtype 'float32' of 8 bytes"),
    "a dtype that is a function": (put("tensors", 1, 0, to=["load", 4]), "dtype 'load'"),
    "a quantised dtype": (put("tensors", 1, 0, to=["quint8", 1]), "dtype 'quint8'"),
    "two tensors of one name": (put("tensors", 0, to=["w", "w", "t"]), "two tensors have the same name"),
    "more names than tensors": (put("tensors", 0, to=["w", "b", "t", "x"]), "4 names, 3 dtypes"),
    "an unknown dtype index": (put("tensors", 2, to=[0, 1, 9]), "indices must be below"),
    "an unknown sharding index": (put("tensors", 5, to=[0, 1, -1]), "indices must be below"),
    "an unknown mesh index": (put("tensors", 4, 0, 0, to=7), "indices must be below"),
    "a mesh of too many ranks": (put("tensors", 3, 0, 0, to=[1 << 19]), "mesh"),
    "a mesh of many dimensions": (put("tensors", 3, 0, 0, to=[1] * 17), "mesh"),
    "a mesh of unknown ranks": (put("tensors", 3, 0, to=[[2], None, None, [["s", 0]], None]), "files"),
    "many ranks and one file": (put("tensors", 3, 0, to=[[1 << 16], None, None, [["r"]], None]), "no file of rank"),
    "a rank that is too large": (put("tensors", 3, 0, 2, to=[1 << 62]), "ranks"),
    "a rank twice": (put("tensors", 3, 0, to=[[2], None, [0, 0], [["r"]], None]), "repeats a rank"),
    "an unknown placement": (put("tensors", 3, 0, 3, to=[["p", 1]]), "placement"),
    "a shard of a missing dimension": (put("tensors", 3, 0, 3, to=[["s", 5]]), "out of range"),
    "overlapping pieces": (
        put("tensors", 4, 0, to=[-1, [4, 6], [0, 0, 1, 0], [3, 6, 3, 6], [0, 0]]),
        "do not tile it: overlap",
    ),
    "pieces with a gap": (put("tensors", 4, 0, to=[-1, [4, 6], [0, 0], [3, 6], [0]]), "do not tile it: gap"),
    "pieces outside": (put("tensors", 4, 0, to=[-1, [4, 6], [1, 0], [4, 6], [0]]), "do not tile it: outside"),
    "pieces that do not add up": (put("tensors", 4, 0, to=[-1, [4, 6], [0], [4, 6], [0]]), "1 offsets, 2 sizes"),
    "pieces past 64 bits": (put("tensors", 4, 0, to=[-1, [4], [1 << 63], [4], [0]]), "invalid size|range"),
    "pieces in 40 dimensions": (put("tensors", 4, 0, to=[-1, [2] * 40, [0] * 40, [1] * 40, [0]]), "do not tile it"),
    "a tensor without dimensions, twice": (put("tensors", 4, 0, to=[-1, [], [], [], [0, 0]]), "it must have one"),
    "a file without a header": (put("files", 2, 0, to=0), "invalid size"),
    "a header longer than its file": (put("files", 2, 0, to=1 << 20), "invalid size"),
    "a header of gigabytes": (put("files", to=[[0], [1 << 34], [1 << 33], ["0" * 32]]), "invalid size"),
    "a file of a rank that is too large": (put("files", 0, 0, to=1 << 40), "ranks"),
    "a rank's file twice": (put("files", to=[[0, 0], [5000] * 2, [4096] * 2, ["0" * 32] * 2]), "a rank is repeated"),
    "an invalid digest": (put("files", 3, 0, to="../" * 10), "invalid size .* digest"),
    "no files": (put("files", to=[[], [], [], []]), "the files hold 0"),
    "an unknown tensor": (put("tree", to=99), "refers to tensor 99, but there are 3"),
    "a bool for a tensor": (put("tree", to=True), "unknown kind of node"),
    "a half as an array": (
        lambda fields: (put("tensors", 1, 1, to=["bfloat16", 2])(fields), put("tree", to=["a", 1])(fields))[0],
        "numpy has no bfloat16",
    ),
    "a dict with a key twice": (put("tree", to=["d", "a", 0, "a", 1]), "repeats a key"),
    "a dict with a key and no value": (put("tree", to=["d", "a"]), "without a value"),
    "a dict with a list for a key": (put("tree", to=["d", [], 0]), "key that is not a str"),
    "per-rank values of one rank twice": (put("tree", to=["r", [0, 0], [0, 1]]), "unknown kind of node"),
    "an unknown node": (put("tree", to=["pickle", "gASV"]), "cannot be read"),
    "a tree 65 deep": (put("tree", to=nested(65)), "more than 64 deep"),
    "an enum 900 deep": (put("tree", to=nested(900, "e")), "cannot be read|deep"),
    "an integer of 5,000 digits": (put("tree", to=["i", "9" * 5000]), "digits"),
    "a timedelta out of range": (put("tree", to=["timedelta", 10**15, 0, 0]), "cannot be read"),
    "a bool that is 7": (put("tree", to=["n", "bool", "Bw=="]), "do not encode a bool"),
    "a numpy object scalar": (put("tree", to=["n", "object", "AAAAAAAAAAA="]), "not a numeric dtype"),
    "a dtype that imports": (put("tree", to=["dtype", "_inductor"]), "cannot be read"),
}  # fmt: skip


@pytest.mark.parametrize(("how", "text"), LIES.values(), ids=LIES)
def test_an_inconsistent_manifest_raises_with_little_memory(
    one: Path, how: Callable[[Fields], None], text: str
) -> None:
    change(one, how)
    before, size = time.monotonic(), (one / "manifest.json").stat().st_size
    with peak_memory() as peak:
        with pytest.raises(FormatError, match=text):
            checkpoint.read(one)
        assert peak() < 64 * size + (32 << 20)
    assert time.monotonic() - before < 10
    assert not checkpoint.verify(one)


def test_reading_a_manifest_imports_no_module_that_it_names(one: Path) -> None:
    before = set(sys.modules)
    change(one, put("tree", to=["dtype", "onnx"]))
    with pytest.raises(FormatError):
        checkpoint.read(one)
    assert "torch.onnx" in before or "torch.onnx" not in sys.modules


RAW: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "a field twice": (lambda text: text + b'"save":"bbbbbb",', "repeats a field"),
    "a field twice, once escaped": (lambda text: text + b'"\\u0073ave":"bbbbbb",', "repeats a field"),
    "space between fields": (lambda text: text + b" ", "repeats a field, or has whitespace|cannot be read"),
    "bad UTF-8": (lambda text: text + b'"x":"\xff\xfe",', "cannot be read"),
    "half a surrogate": (lambda text: text.replace(b'"w"', b'"\\ud800"'), "cannot be read"),
    "an unescaped NUL": (lambda text: text.replace(b'"w"', b'"\0"'), "cannot be read"),
    "unclosed brackets": (lambda text: text + b'"x":' + b"[" * 100_000, "cannot be read"),
    "deeply nested brackets": (lambda text: text + b'"x":' + b"[" * 100_000 + b"]" * 100_000 + b",", "cannot be read"),
    "braces in the tree": (
        lambda text: text.replace(b'"tree":', b'"tree":' + b"[" * 5000 + b"]" * 5000 + b',"t":'),
        "cannot be read",
    ),
    "no tree": (lambda text: text.replace(b'"tree":', b'"trie":'), "no field 'tree'"),
    "only the version": (lambda text: b'{"shardwright":1,', "no field"),
}


@pytest.mark.parametrize(("how", "text"), RAW.values(), ids=RAW)
def test_a_malformed_manifest_raises(one: Path, how: Callable[[bytes], bytes], text: str) -> None:
    manifest = one / "manifest.json"
    manifest.write_bytes(signed(how(unsigned(manifest.read_bytes()))))
    with pytest.raises(FormatError, match=text):
        checkpoint.read(one)


@pytest.mark.parametrize("data", [b"", b"{}", b"null", b"PK\x03\x04", b"\x80\x04K\x01.", b'{"shardwright":'])
def test_a_file_that_is_not_a_manifest_raises_with_that_reason(one: Path, data: bytes) -> None:
    (one / "manifest.json").write_bytes(data)
    with pytest.raises(FormatError, match="not a shardwright manifest"):
        checkpoint.open(one)


def test_an_unknown_manifest_field_is_accepted(one: Path) -> None:
    change(one, put("from the future", to={"a": [1, 2.5, None]}))
    assert checkpoint.read(one)["n"]["epoch"] == 3


def test_names_may_contain_any_unicode_and_nul_characters(tmp_path: Path) -> None:
    state = {"a\0b": torch.ones(1), "": torch.ones(2), "ａ": torch.ones(3), "a": torch.ones(4), "../x": torch.ones(5)}
    checkpoint.save(state, tmp_path)
    found = checkpoint.read(tmp_path)
    assert {name: tensor.numel() for name, tensor in found.items()} == {
        name: tensor.numel() for name, tensor in state.items()
    }
    assert sorted(path.suffix for path in tmp_path.iterdir() if path.name != ".lock") == [".json", ".safetensors"]


def test_a_manifest_that_claims_more_bytes_than_its_files_allocates_no_memory(one: Path) -> None:
    """The manifest agrees with itself about 8 GB; the file is small."""

    def lie(fields: Fields) -> None:
        fields["tensors"][4][0][1] = [1 << 31, 1]
        fields["files"][1][0] += (1 << 33) - 96

    change(one, lie)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(CorruptionError, match="bytes, but the manifest says"):
        checkpoint.read(one)
    with checkpoint.open(one) as ckpt, pytest.raises(CorruptionError, match="bytes, but the manifest says"):
        ckpt["w"][:]
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 1 << 20  # KiB


def test_a_huge_sparse_data_file_raises(one: Path) -> None:
    """A file of 10 GiB that takes up no room, and a manifest that claims as much: its header is not the right one."""
    (file,) = one.glob("*.safetensors")
    size = file.stat().st_size + (10 << 30)

    def lie(fields: Fields) -> None:
        fields["tensors"][4][0][1] = [24 + (10 << 28)]
        fields["files"][1][0] = size

    change(one, lie)
    os.truncate(file, size)
    for read in (checkpoint.read, lambda path: checkpoint.open(path)["w"][:]):
        with pytest.raises((CorruptionError, FormatError), match=r"header|predicted"):
            read(one)
    with pytest.raises(CheckpointError):
        checkpoint.load({"w": torch.zeros(4, 6)}, one, strict=False)


def header_of(path: Path) -> bytes:
    data = path.read_bytes()
    return data[: 8 + int.from_bytes(data[:8], "little")]


def sign_header(one: Path, header: bytes) -> None:
    """Puts a header in place, and its digest into the manifest."""
    (file,) = one.glob("*.safetensors")
    file.write_bytes(header + file.read_bytes()[len(header) :])
    change(one, put("files", 3, 0, to=hashlib.blake2b(header, digest_size=16).hexdigest()))


HEADERS: dict[str, Callable[[bytes], bytes]] = {
    "another length": lambda header: (1 << 40).to_bytes(8, "little") + header[8:],
    "wrong offsets": lambda header: header.replace(b'"data_offsets":[0,', b'"data_offsets":[9,'),
    "another shape": lambda header: header.replace(b'"shape":[4,6]', b'"shape":[6,4]'),
    "invalid checksums": lambda header: header[:35] + b"zz" + header[37:],
    "checksums in capitals": lambda header: header[:35] + b"ABCDEF01" + header[43:],
    "spaces for checksums": lambda header: header[:35] + b" " * 8 + header[43:],
    "a byte past ASCII": lambda header: header[:35] + b"\xff" + header[36:],
    "a key twice": lambda header: header.replace(b'"b":', b'"w":'),
    "invalid padding": lambda header: header[:-1] + b"\0",
}


@pytest.mark.parametrize("how", HEADERS.values(), ids=HEADERS)
def test_a_header_that_contradicts_the_manifest_raises_despite_a_valid_digest(
    one: Path, how: Callable[[bytes], bytes]
) -> None:
    header = header_of(next(one.glob("*.safetensors")))
    other = how(header)
    assert other != header
    assert len(other) == len(header)
    sign_header(one, other)
    with pytest.raises(FormatError, match="its header does not match the manifest"):
        checkpoint.read(one)
    assert not checkpoint.verify(one)


def test_a_header_with_a_wrong_digest_raises(one: Path) -> None:
    (file,) = one.glob("*.safetensors")
    data = bytearray(file.read_bytes())
    data[len(header_of(file)) - 1] = 9
    file.write_bytes(data)
    with pytest.raises(CorruptionError, match="its header is corrupted"):
        checkpoint.read(one)


def test_a_bool_byte_other_than_0_and_1_raises(one: Path) -> None:
    """Its checksum is right: whoever wrote it meant it. Torch would take it for true here and false there."""
    (file,) = one.glob("*.safetensors")
    header = header_of(file)
    file.write_bytes(file.read_bytes()[:-3] + b"\x07\x00\x01")
    old, new = f"{crc32c.crc32c(bytes([1, 0, 1])):08x}".encode(), f"{crc32c.crc32c(bytes([7, 0, 1])):08x}".encode()
    assert header.count(old) == 1
    sign_header(one, header.replace(old, new))
    assert "other than 0 and 1" in str(checkpoint.verify(one))
    with pytest.raises(CorruptionError, match="bool tensor 't' contains"):
        checkpoint.read(one)
    with checkpoint.open(one) as ckpt, pytest.raises(CorruptionError, match="bool tensor 't' contains"):
        ckpt["t"][:]


def link(path: Path) -> None:
    target = path.with_name("elsewhere")
    path.rename(target)
    path.symlink_to(target)


def pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize("what", [link, pipe, folder])
@pytest.mark.parametrize("name", ["manifest.json", "*.safetensors"])
def test_only_regular_files_are_opened(one: Path, what: Callable[[Path], None], name: str) -> None:
    what(next(one.glob(name)))
    with pytest.raises((StorageError, CorruptionError), match=r"regular file|missing|directory"):
        checkpoint.read(one)


@pytest.mark.parametrize("grow", [-1, 1, 4096])
def test_a_data_file_of_the_wrong_length_raises(one: Path, grow: int) -> None:
    (file,) = one.glob("*.safetensors")
    os.truncate(file, file.stat().st_size + grow)
    with pytest.raises(CorruptionError, match="bytes, but the manifest says"):
        checkpoint.read(one)


def test_an_oversized_manifest_raises_before_it_is_read(one: Path) -> None:
    os.truncate(one / "manifest.json", 1 << 40)
    with pytest.raises(CorruptionError, match="but the maximum is"):
        checkpoint.open(one)


def use(manifest: Manifest) -> None:
    """Does with a manifest what reading does, short of reading: plans, predictions, what each tensor is."""
    for number in range(min(len(manifest.tensors), 8)):
        manifest.locator.parts(number, Region.whole(manifest.tensors.shape(number)))
    for rank in list(manifest.files)[:4]:
        assert manifest.file(rank).header_size > 0
    Manifest.decode(manifest.encode())


def read_tensors(path: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a checkpoint, by the name that its file has for it."""
    storage = LocalStorage(path)
    manifest = Manifest.decode((path / "manifest.json").read_bytes())
    check_sizes(storage, manifest)
    table, made = manifest.tensors, []
    for number, name in enumerate(table.names):
        dtype, whole = DTYPES[table.dtypes[number]], Region.whole(table.shape(number))
        made.append(Target(name, number, torch.empty(whole.size, dtype=dtype), whole, dtype))
    read_alone(storage, manifest, made, threads=1, progress=None)
    return {target.name: target.tensor for target in made}


@contextmanager
def memory_bound(nbytes: int) -> Iterator[None]:
    """Lets this process take so much more memory than it has, and no more."""
    limits = resource.getrlimit(resource.RLIMIT_AS)
    now = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (now + nbytes, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)


@pytest.mark.timeout(1200)  # all of them take minutes
@pytest.mark.parametrize("how", [mutated_bytes, mutated_values, mutated_structure])
def test_mutated_manifests_are_read_correctly_or_raise(
    saved: Path, how: Callable[[bytes, random.Random], bytes]
) -> None:
    original = (saved / "manifest.json").read_bytes()
    right = read_tensors(saved)
    with memory_bound(2 << 30):
        _read_or_refuse(saved, how, original, right)


def _read_or_refuse(
    saved: Path, how: Callable[[bytes, random.Random], bytes], original: bytes, right: dict[str, torch.Tensor]
) -> None:
    read = refused = 0
    loads = 2000 if FULL else 100
    longest = 0.0
    for number in range(MUTATIONS // 2):
        data = how(original, random.Random(number))
        start = time.monotonic()
        try:
            use(Manifest.decode(data))
            read += 1
            if read <= loads:
                (saved / "manifest.json").write_bytes(data)
                for name, tensor in read_tensors(saved).items():  # what is read is what was stored under that name
                    assert tensor.numel() == 0 or same_bytes(tensor, right[name]), name
                checkpoint.read(saved)
        except (FormatError, CorruptionError, MissingKeyError):
            refused += 1
        except Exception as error:
            raise AssertionError(f"{how.__name__} {number}: {type(error).__name__}: {error}") from error
        longest = max(longest, time.monotonic() - start)
    assert refused > MUTATIONS // 10
    assert read > MUTATIONS // 100
    assert longest < 20


def same_bytes(one: torch.Tensor, other: torch.Tensor) -> bool:
    alike = one.shape == other.shape and one.dtype == other.dtype
    return alike and torch.equal(one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8))


def bomb(tensors: Any, size: int) -> Callable[[Fields], None]:
    """A manifest of these tensors, in one file of so many bytes of data."""

    def how(fields: Fields) -> None:
        fields["tensors"], fields["tree"] = tensors, ["d", *(n for i in range(len(tensors[0])) for n in (f"w{i}", i))]
        fields["files"] = [[0], [(1 << 18) + size], [1 << 18], ["0" * 32]]

    return how


def guillotine(dims: int, rank: int) -> list[Any]:
    """Boxes that tile a tensor of two in each dimension, and cut all of them."""
    offsets = [n for i in range(dims) for n in [1] * i + [0] * (dims - i)] + [1] * dims
    sizes = [n for i in range(dims) for n in [1] * (i + 1) + [2] * (dims - i - 1)] + [1] * dims
    return [-1, [2] * dims, offsets, sizes, [rank + n for n in range(dims + 1)]]


def bytes_of(spreads: list[Any], shardings: list[Any]) -> list[Any]:
    """The tensors of a manifest: one of bytes for each placing."""
    numbers = range(len(shardings))
    return [[f"w{n}" for n in numbers], [["uint8", 1]], [0] * len(shardings), spreads, shardings, [*numbers]]


ALL = 1 << 18  # ranks
MANY = range(100)
BOMBS = {
    "one piece in 23 dimensions": bomb(bytes_of([], [[-1, [2] * 23, [0] * 23, [1] * 23, [0]]]), 1 << 23),
    "tilings that split 17 dimensions": bomb(bytes_of([], [guillotine(17, n) for n in range(16)]), 16 << 17),
    "meshes of all ranks": bomb(
        bytes_of([[[ALL], [f"n{n}"], None, [["r"]], None] for n in MANY], [[n, [1]] for n in MANY]), 100
    ),
    "shapes sharded over all ranks": bomb(
        bytes_of([[[ALL], None, None, [["s", 0]], None]], [[0, [1, n + 1]] for n in MANY]), 5050
    ),
    "thousands of shapes on all ranks": bomb(
        bytes_of([[[ALL], None, None, [["r"]], None]], [[0, [n + 1]] for n in range(3000)]), 4501500
    ),
}


@pytest.mark.timeout(180)
@pytest.mark.parametrize("how", BOMBS.values(), ids=BOMBS)
def test_a_small_manifest_needs_little_memory_whatever_it_claims(one: Path, how: Callable[[Fields], None]) -> None:
    change(one, how)
    assert (one / "manifest.json").stat().st_size < 1 << 17
    fields = json.loads((one / "manifest.json").read_bytes())
    with (one / f"{fields['save']}-00000-0.safetensors").open("wb") as file:
        file.truncate(fields["files"][1][0])  # as large as it is said to be, so that all is planned
    with memory_bound(1 << 30):
        with pytest.raises((FormatError, CorruptionError)):
            checkpoint.read(one)
        assert not checkpoint.verify(one)


def test_boxes_tile_a_shape_if_they_contain_every_element_once() -> None:
    chance = random.Random(3)
    seen = {True: 0, False: 0}
    for _ in range(2000):
        shape = tuple(chance.randrange(0, 4) for _ in range(chance.randrange(1, 4)))
        boxes = [([0] * len(shape), list(shape))]
        for _ in range(chance.randrange(6)):
            offset, size = boxes.pop(chance.randrange(len(boxes)))
            dim = chance.randrange(len(shape))
            cut = chance.randint(0, size[dim])
            low, high, after = list(size), list(size), list(offset)
            low[dim], high[dim], after[dim] = cut, size[dim] - cut, offset[dim] + cut
            boxes += [(offset, low), (after, high)]
        if chance.random() < 0.5:
            place = chance.randrange(len(boxes))
            boxes[place][chance.randrange(2)][chance.randrange(len(shape))] += chance.choice([-1, 1])
        offsets = np.array([offset for offset, _ in boxes]).reshape(-1, len(shape))
        sizes = np.array([size for _, size in boxes]).reshape(-1, len(shape))
        held = np.zeros([extent + 2 for extent in shape], np.int64)
        inside = (offsets >= 0).all() and (sizes >= 0).all() and (offsets + sizes <= shape).all()
        if inside:
            for offset, size in zip(offsets, sizes, strict=True):
                held[tuple(slice(a, a + n) for a, n in zip(offset, size, strict=True))] += 1
        right = bool(inside and (held[tuple(map(slice, shape))] == 1).all())
        assert tiles(shape, offsets, sizes) == right
        seen[right] += 1
    assert min(seen.values()) > 300


class Bytes(Reader):
    """A file in memory."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    @property
    def size(self) -> int:
        return len(self._data)

    def read(self, buffers: Sequence[memoryview], offset: int) -> None:
        for buffer in buffers:
            buffer[:] = self._data[offset : offset + buffer.nbytes]
            offset += buffer.nbytes

    def close(self) -> None:
        pass


def test_mutated_headers_raise(saved: Path) -> None:
    manifest = Manifest.decode((saved / "manifest.json").read_bytes())
    name = manifest.file_name(1)
    data, file, expected = (saved / name).read_bytes(), manifest.file(1), manifest.files[1]
    chance = random.Random(7)
    for _ in range(MUTATIONS // 4):
        header = bytearray(data[: expected.header_size])
        for _ in range(chance.choice([1, 2, 30])):
            header[chance.choice([chance.randrange(len(header)), chance.randrange(700)])] = chance.randrange(256)
        if chance.random() < 0.5:  # a checksum that could be: it is only found when its block is read
            digits = f"{chance.getrandbits(32):08x}".encode()
            header[27 + 8 : 27 + 16] = digits
        said = FileEntry(expected.size, expected.header_size, hashlib.blake2b(header, digest_size=16).hexdigest())
        try:
            FileReader(Bytes(bytes(header) + data[len(header) :]), file, said)
        except (FormatError, CorruptionError):
            continue
        rest = slice(8 + 27 + 8 * int(file.blocks.sum()), None)
        assert bytes(header)[rest] == data[: expected.header_size][rest]
