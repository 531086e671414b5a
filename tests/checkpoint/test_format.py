"""The format, read by an independent reader written from docs/format.md without the library's checkpoint code.

Headers are predicted from the manifest alone and compared byte for byte, so the files hold what the document says about
chunks, their order, their keys and how replicas are split.
"""

from __future__ import annotations

import base64
import hashlib
import json
import struct
from itertools import product
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import crc32c
import numpy as np
import numpy.typing as npt
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

import shardwright as sw
from shardwright import checkpoint
from shardwright.testing import run_ranks

BLOCK = 1 << 20
TYPES = {
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2", "float8_e4m3fnuz": "F8_E4M3FNUZ", "float8_e5m2fnuz": "F8_E5M2FNUZ",
    "float8_e8m0fnu": "F8_E8M0", "int64": "I64", "int32": "I32", "int16": "I16", "int8": "I8", "uint8": "U8",
    "uint16": "U16", "uint32": "U32", "uint64": "U64", "bool": "BOOL", "complex64": "C64",
}  # fmt: skip


class Box(NamedTuple):
    """Where it starts and how far it reaches."""

    offset: tuple[int, ...]
    size: tuple[int, ...]


class Chunk(NamedTuple):
    """A box of the tensor of a number."""

    tensor: int
    box: Box


class Spread(NamedTuple):
    """A mesh with placements."""

    shape: list[int]
    ranks: list[int]
    placements: list[list[Any]]
    order: list[int]

    @classmethod
    def of(cls, row: list[Any]) -> Spread:
        shape, _, ranks, placements, order = row
        return cls(shape, ranks or list(range(prod(shape))), placements, order or list(range(len(shape))))

    def place(self, rank: int) -> tuple[int, ...]:
        return tuple(map(int, np.unravel_index(self.ranks.index(rank), self.shape)))

    def region(self, rank: int, shape: list[int]) -> Box:
        offset, size, place = [0] * len(shape), list(shape), self.place(rank)
        for axis in self.order:
            match self.placements[axis]:
                case ["s", d]:
                    c = -(-size[d] // self.shape[axis])
                    start = min(place[axis] * c, size[d])
                    offset[d], size[d] = offset[d] + start, min(c, size[d] - start)
                case ["g", d, sizes]:
                    offset[d], size[d] = sum(sizes[: place[axis]]), sizes[place[axis]]
        return Box(tuple(offset), tuple(size))

    def replicas(self, rank: int) -> tuple[int, ...]:
        place = self.place(rank)
        axes = [
            range(extent) if placement == ["r"] else [here]
            for extent, placement, here in zip(self.shape, self.placements, place, strict=True)
        ]
        return tuple(self.ranks[int(np.ravel_multi_index(spot, self.shape))] for spot in product(*axes))


def granularity(size: tuple[int, ...], itemsize: int, total: int, count: int) -> int:
    m = max(4096, total // count // 64) // itemsize
    g = prod(size)
    for extent in size:
        if g <= m:
            break
        g //= extent
    return g if g > 1 else max(1, min(m, 1024))


def boxes(box: Box, a: int, b: int) -> list[Box]:
    if a >= b:
        return []
    if not box.size:
        return [box]
    w = prod(box.size[1:])

    def rows(first: int, last: int) -> Box:
        return Box((box.offset[0] + first, *box.offset[1:]), (last - first, *box.size[1:]))

    def within(row: int, first: int, last: int) -> list[Box]:
        inner = boxes(Box(box.offset[1:], box.size[1:]), first, last)
        return [Box((box.offset[0] + row, *one.offset), (1, *one.size)) for one in inner]

    if w == 1 or (a % w == 0 and b % w == 0):
        return [rows(a // w, b // w)]
    if a // w == b // w:
        return within(a // w, a % w, b % w)
    found = within(a // w, a % w, w) if a % w else []
    first, last = -(-a // w), b // w
    if first < last:
        found.append(rows(first, last))
    return found + (within(last, 0, b % w) if b % w else [])


class Manifest:
    """A manifest, as the text describes it."""

    def __init__(self, folder: Path) -> None:
        data = (folder / "manifest.json").read_bytes()
        assert data.startswith(b'{"shardwright":1,')
        digest = data[-34:-2]
        zeroed = data[:-34] + b"0" * 32 + b'"}'
        assert hashlib.blake2b(zeroed, digest_size=16).hexdigest().encode() == digest
        fields = json.loads(data)
        self.folder, self.save, self.tree = folder, fields["save"], fields["tree"]
        self.names, dtypes, of_dtype, spreads, self.shardings, self.kinds = fields["tensors"]
        self.dtypes = [dtypes[number] for number in of_dtype]
        self.spreads = [Spread.of(row) for row in spreads]
        self.files = dict(zip(fields["files"][0], zip(*fields["files"][1:], strict=True), strict=True))

    def shape(self, tensor: int) -> list[int]:
        return list(self.shardings[self.kinds[tensor]][1])

    def chunks(self, rank: int) -> list[Chunk]:
        """What a rank writes, in order."""
        found: list[Chunk] = []
        shares: dict[tuple[int, ...], list[int]] = {}
        for tensor, kind in enumerate(self.kinds):
            spread, shape, *rest = self.shardings[kind]
            if spread == -1:
                found += self.pieces(tensor, rank, shape, *rest)
                continue
            mesh = self.spreads[spread]
            if 0 in shape:
                found += [Chunk(tensor, Box((0,) * len(shape), tuple(shape)))] if mesh.ranks[0] == rank else []
            elif rank in mesh.ranks:
                shares.setdefault(mesh.replicas(rank), []).append(tensor)
        for ranks, tensors in shares.items():
            found += self.share(rank, ranks, tensors)
        return sorted(found, key=lambda chunk: (-self.dtypes[chunk.tensor][1], chunk.tensor))

    def pieces(
        self, tensor: int, rank: int, shape: list[int], offsets: list[int], sizes: list[int], ranks: list[int]
    ) -> list[Chunk]:
        n = len(shape)
        every = [
            Chunk(tensor, Box(tuple(offsets[n * i : n * i + n]), tuple(sizes[n * i : n * i + n])))
            for i in range(len(ranks))
        ]
        mine = [chunk for chunk, owner in zip(every, ranks, strict=True) if owner == rank]
        if 0 in shape and not mine and rank == min(ranks, default=0):
            return [Chunk(tensor, Box((0,) * n, tuple(shape)))]
        return mine

    def share(self, rank: int, ranks: tuple[int, ...], tensors: list[int]) -> list[Chunk]:
        regions = [self.spreads[self.shardings[self.kinds[t]][0]].region(rank, self.shape(t)) for t in tensors]
        sizes = [prod(box.size) * self.dtypes[t][1] for t, box in zip(tensors, regions, strict=True)]
        total, count, q = sum(sizes), len(ranks), ranks.index(rank)
        found: list[Chunk] = []
        start = 0
        for tensor, box, nbytes in zip(tensors, regions, sizes, strict=True):
            volume, itemsize = prod(box.size), self.dtypes[tensor][1]

            def point(b: int, s: int = start, v: int = volume, i: int = itemsize, box: Box = box) -> int:
                if b <= s:
                    return 0
                if b >= s + v * i:
                    return v
                g = granularity(box.size, i, total, count)
                return min(v, g * ((2 * (b - s) + g * i) // (2 * g * i)))

            if count == 1:
                found += [Chunk(tensor, box)] if volume else []
            else:
                part = point(q * total // count), point((q + 1) * total // count)
                found += [Chunk(tensor, one) for one in boxes(box, *part)]
            start += nbytes
        return found

    def header(self, rank: int, checksums: bytes) -> bytes:
        """The bytes before the data."""
        text = b'{"__metadata__":{"crc32c":"' + checksums
        text += f'","format":"pt","shardwright":"1","save":"{self.save}"}}'.encode()
        start = 0
        for chunk in self.chunks(rank):
            name, (dtype, itemsize), size = self.names[chunk.tensor], self.dtypes[chunk.tensor], chunk.box.size
            _, at, tail = name.rpartition("@[")
            special = (at and tail.endswith("]") and not set(tail[:-1]) - set("0123456789:,")) or name == "__metadata__"
            key = name
            if list(size) != self.shape(chunk.tensor) or special:
                ranges = ",".join(f"{o}:{o + s}" for o, s in zip(*chunk.box, strict=True))
                key = f"{name}@[{ranges}]"
            shape = list(size) if dtype in TYPES else [*size, itemsize]
            stop = start + prod(size) * itemsize
            entry = {"dtype": TYPES.get(dtype, "U8"), "shape": shape, "data_offsets": [start, stop]}
            text += f",{json.dumps(key, ensure_ascii=False)}:{json.dumps(entry, separators=(',', ':'))}".encode()
            start = stop
        text += b"}"
        length = -(-(8 + len(text)) // 4096) * 4096 - 8
        return struct.pack("<Q", length) + text.ljust(length)

    def read(self) -> dict[str, npt.NDArray[np.uint8]]:
        """Every tensor as bytes, with a dimension of its itemsize; everything that can be checked is."""
        found = {name: np.full((*self.shape(t), self.dtypes[t][1]), 255, np.uint8) for t, name in enumerate(self.names)}
        written = {name: np.zeros(self.shape(t), np.int64) for t, name in enumerate(self.names)}
        for rank, (size, header_size, digest) in self.files.items():
            data = (self.folder / f"{self.save}-{rank:05d}-0.safetensors").read_bytes()
            assert len(data) == size
            assert hashlib.blake2b(data[:header_size], digest_size=16).hexdigest() == digest
            chunks = self.chunks(rank)
            nbytes = [prod(chunk.box.size) * self.dtypes[chunk.tensor][1] for chunk in chunks]
            blocks = sum(-(-n // BLOCK) for n in nbytes)
            sums = data[35 : 35 + 8 * blocks]
            assert self.header(rank, sums) == data[:header_size]
            at, block = header_size, 0
            for chunk, n in zip(chunks, nbytes, strict=True):
                for begin in range(at, at + n, BLOCK):
                    part = data[begin : min(begin + BLOCK, at + n)]
                    assert f"{crc32c.crc32c(part):08x}".encode() == sums[8 * block : 8 * block + 8]
                    block += 1
                where = tuple(slice(o, o + s) for o, s in zip(*chunk.box, strict=True))
                name = self.names[chunk.tensor]
                bytes_of = np.frombuffer(data[at : at + n], np.uint8)
                found[name][where] = bytes_of.reshape((*chunk.box.size, self.dtypes[chunk.tensor][1]))
                written[name][where] += 1
                at += n
            assert at == size
        assert all((count == 1).all() for count in written.values())
        return found


def as_bytes(tensor: torch.Tensor) -> npt.NDArray[np.uint8]:
    flat = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
    return flat.reshape((*tensor.shape, tensor.itemsize))


def test_crc32c_matches_its_reference_value() -> None:
    assert f"{crc32c.crc32c(b'123456789'):08x}" == "e3069283"


def test_an_independent_reader_reads_a_checkpoint_of_four_ranks(saved: Path, whole: dict[str, torch.Tensor]) -> None:
    manifest = Manifest(saved)
    found = manifest.read()
    for name, tensor in whole.items():
        stored = "__metadata__~2" if name == "__metadata__" else name
        dtype = manifest.dtypes[manifest.names.index(stored)][0]
        assert dtype == str(tensor.dtype).removeprefix("torch.")
        np.testing.assert_array_equal(found[stored], as_bytes(tensor), name)
    for rank in range(4):
        np.testing.assert_array_equal(found[f"own.state.rank{rank}"], as_bytes(torch.full((3,), rank)))


def value(node: Any, rank: int) -> Any:
    """A node's value; a tensor is its number."""
    match node:
        case int():
            return node
        case ["a", number]:
            return number
        case ["d", *items]:
            return {key: value(child, rank) for key, child in zip(items[::2], items[1::2], strict=True)}
        case ["l", *items]:
            return [value(item, rank) for item in items]
        case ["t", *items]:
            return tuple(value(item, rank) for item in items)
        case ["r", *entries]:
            return {owner: value(inner, rank) for owner, inner in entries}[rank]
        case ["v", x]:
            return x
        case ["b", text]:
            return base64.b64decode(text)
    raise AssertionError(node)


def test_an_independent_reader_reads_the_state_tree(saved: Path) -> None:
    manifest = Manifest(saved)
    state = value(manifest.tree, 2)
    assert state["epoch"] == 3
    assert state["nested"] == {"a": [1, (2.5, None)], "b": b"bytes", "empty": {}}
    assert state["alias"] == state["plain"] == manifest.names.index("plain")
    assert state["own"] == {"seed": 2, "state": manifest.names.index("own.state.rank2")}


def test_data_files_are_valid_safetensors(saved: Path, whole: dict[str, torch.Tensor]) -> None:
    """Put together by what the safetensors package finds in the files: keys, shapes, values."""
    found: dict[str, torch.Tensor] = {}
    for path in saved.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            assert file.metadata()["format"] == "pt"
            for key in file.keys():  # noqa: SIM118  # it is no dict
                name, at, ranges = key.rpartition("@[")
                if not at:
                    found[key] = file.get_tensor(key)
                    continue
                where = tuple(slice(*map(int, one.split(":"))) for one in ranges[:-1].split(",") if one)
                target = found.setdefault(name, torch.zeros_like(whole[name]))
                target[where] = file.get_tensor(key).view(target.dtype).reshape(target[where].shape)
    for name in ("rows", "columns", "grid", "big", "replica", "pieces", "plain", "truths", "scalar", "w@[0:2]"):
        assert torch.equal(found[name], whole[name]), name


def test_a_model_saved_by_one_rank_is_a_safetensors_model_file(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.BatchNorm1d(16), torch.nn.Linear(16, 2).bfloat16())
    checkpoint.save(model, tmp_path)
    (file,) = tmp_path.glob("*.safetensors")
    loaded = load_file(file)
    assert loaded.keys() == model.state_dict().keys()
    for name, tensor in model.state_dict().items():
        assert loaded[name].dtype == tensor.dtype
        assert torch.equal(loaded[name], tensor)


def _save_cut(path: str, seed: int) -> dict[str, torch.Tensor]:
    chance = torch.Generator().manual_seed(seed)

    def number(low: int, high: int) -> int:
        return int(torch.randint(low, high, (), generator=chance))

    meshes = [sw.init_device_mesh("cpu", (3,)), sw.init_device_mesh("cpu", (1, 3))]
    dtypes = [torch.float32, torch.float64, torch.bfloat16, torch.int8, torch.complex128, torch.bool]
    state, whole = {}, {}
    for place in range(8):
        shape = [number(0, [2000, 60, 12, 5][d]) for d in range(number(0, 4))]
        tensor = torch.randint(0, 2, shape, generator=chance).to(dtypes[number(0, len(dtypes))])
        mesh = meshes[number(0, 2)]
        placements: list[Any] = [
            sw.Shard(number(0, len(shape))) if shape and number(0, 2) else sw.Replicate() for _ in range(mesh.ndim)
        ]
        name = ["a", 'b\n"q"', "é/ü", "\x01", "", "x@[1:2]", "~", "z"][place]
        whole[name] = tensor
        state[name] = sw.distribute_tensor(tensor, mesh, placements) if number(0, 4) else tensor
    checkpoint.save(state, path)
    return whole


@pytest.mark.parametrize("seed", range(6))
def test_an_independent_reader_reads_split_replicas_and_shards(tmp_path: Path, seed: int) -> None:
    whole, *_ = run_ranks(3, _save_cut, str(tmp_path), seed)
    manifest = Manifest(tmp_path)
    found = manifest.read()
    names = {"": "state"}
    for name, tensor in whole.items():
        np.testing.assert_array_equal(found[names.get(name, name)], as_bytes(tensor), name)
