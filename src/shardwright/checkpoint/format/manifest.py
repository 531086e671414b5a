"""The manifest: what a checkpoint holds, as JSON. docs/format.md is its specification; this is its only reader.

One object of known fields, without whitespace; everything within is arrays, so no key can come twice. What the bytes
say is checked before anything is built from it: counts, bounds, names, that regions tile their tensors.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from typing import Any, final

import msgspec
import numpy as np

from shardwright.checkpoint.format.data_file import MAX_HEADER, DataFile, FileEntry, digest, file_name
from shardwright.checkpoint.format.locate import ChunkLocator
from shardwright.checkpoint.format.tensor_table import Pieces, Sharding, TensorTable
from shardwright.checkpoint.format.tiling import tiles
from shardwright.checkpoint.format.tree import check_tree
from shardwright.checkpoint.format.values import DTYPES
from shardwright.errors import CorruptionError, FormatError, LayoutError, StateError, UnknownVersionError
from shardwright.layout import Layout, Mesh, Placement, Ragged, Region, Replicate, Shard

__all__ = ["FIELDS", "KEY", "MAX_BYTES", "VERSION", "Manifest", "sharding_from_json", "sharding_to_json"]

KEY = "manifest.json"
FIELDS = frozenset({"shardwright", "save", "tree", "tensors", "files", "digest"})
VERSION = 1
MAX_BYTES = 1 << 28
"""Bytes of a manifest: what it says takes many times as many when it is read."""
_MAX_DIMENSIONS = 64
_MAX_MESH_DIMENSIONS = 16
_MAX_RANKS = 1 << 18
_MAX_PLACES = 1 << 25  # ranks of the meshes of all placings together, and
_PLACES_PER_BYTE = 64  # so many more for each byte of a manifest
_MAX_CORNERS = 1 << 12  # that are looked at to say where boxes do not tile
_MAX_DATA = 1 << 62
_LEAST_ENTRY = 40  # bytes of a chunk's entry in a header
_ZEROS = b"0" * 32
_END = b'"digest":"%s"}'
_BEGIN = re.compile(rb'\{"shardwright":([0-9]{1,9}),')
_NAME = re.compile(r"[0-9a-z]{6,32}")
_DIGEST = re.compile(r"[0-9a-f]{32}")


@final
@dataclass(frozen=True, eq=False)
class Manifest:
    """A checkpoint's tree of values, its tensors, and the files of each rank that wrote any.

    `extra` has the fields that this version does not know: values, or their JSON as it was read.
    """

    save_id: str
    tree: Any
    tensors: TensorTable
    files: Mapping[int, FileEntry]
    extra: Mapping[str, Any] = field(default_factory=dict)

    @cached_property
    def locator(self) -> ChunkLocator:
        """Where the stored bytes of a region lie."""
        return ChunkLocator(self.tensors, self.files)

    def file(self, rank: int) -> DataFile:
        """The data file that a rank wrote."""
        return DataFile(self.locator.file(rank), self.save_id)

    @cached_property
    def names(self) -> frozenset[str]:
        """The names of all data files."""
        return frozenset(map(self.file_name, self.files))

    def file_name(self, rank: int) -> str:
        """The name of the data file that a rank wrote."""
        return file_name(self.save_id, rank)

    def encode(self) -> bytes:
        """The bytes of the manifest, its own digest at the end."""
        ranks = sorted(self.files)
        tensors = msgspec.json.encode(_tensors_to_json(self.tensors))
        fields: dict[str, Any] = {
            "shardwright": VERSION,
            "save": self.save_id,
            "tree": self.tree,
            "tensors": msgspec.Raw(tensors),
            "files": [
                ranks,
                [self.files[rank].size for rank in ranks],
                [self.files[rank].header_size for rank in ranks],
                [self.files[rank].digest for rank in ranks],
            ],
            **self.extra,
        }
        body = msgspec.json.encode(fields)[:-1] + b","
        if len(body) + len(_END) + 32 > MAX_BYTES:
            raise StateError(
                f"the manifest would have {len(body)} bytes, and at most {MAX_BYTES} are read: store large values as "
                "tensors or arrays"
            )
        places = sum(sharding.mesh.size for sharding in self.tensors.shardings if isinstance(sharding, Layout))
        if places > _places_of(len(tensors)):
            raise StateError(
                f"the state has {len(self.tensors.shardings)} different shapes and layouts on meshes of {places} ranks "
                f"together, and at most {_places_of(len(tensors))} are read: use fewer"
            )
        return body + _END % digest(body + _END % _ZEROS).encode()

    @classmethod
    def decode(cls, data: bytes) -> Manifest:
        """The manifest in these bytes; it raises where they are damaged, unknown, or make no sense."""
        fields = _fields(data)
        try:
            save_id = msgspec.json.decode(fields["save"], type=str)
            if not _NAME.fullmatch(save_id):
                raise FormatError(f"save id {save_id!r}: six to thirty-two small letters and digits are expected")
            tree = msgspec.json.decode(fields["tree"])
            tensors = _tensors_from_json(fields["tensors"])
            files = _files_from_json(fields["files"])
            extra = {name: raw.copy() for name, raw in fields.items() if name not in FIELDS}
            for raw in extra.values():
                bytes(raw).decode()  # nothing else looks whether it is text
            check_tree(tree, tensors.dtypes)
            _check_claims(tensors, files)
        except FormatError:
            raise
        except KeyError as error:
            raise FormatError(f"the manifest has no field {error}") from None
        except (msgspec.MsgspecError, RecursionError, OverflowError, TypeError, ValueError) as error:
            raise FormatError(f"the manifest cannot be read: {error}") from None
        return cls(save_id, tree, tensors, files, extra)


def _fields(data: bytes) -> dict[str, msgspec.Raw]:
    """The fields of the object, once the digest is right: none of them twice."""
    length = len(_END % _ZEROS)
    begins = _BEGIN.match(data)
    if len(data) < length or begins is None:
        raise FormatError("this is no manifest of shardwright")
    said = data[-34:-2]
    if digest(data[:-length] + _END % _ZEROS).encode() != said or data[-length:] != _END % said:
        raise CorruptionError("the manifest is damaged: its digest is not that of its bytes")
    # Only now: every version ends with its digest, so that a damaged digit is not taken for another version.
    if int(begins[1]) != VERSION:
        raise UnknownVersionError(
            f"the manifest has version {int(begins[1])}, and this library reads version {VERSION}"
        )
    try:
        fields = msgspec.json.decode(data, type=dict[str, msgspec.Raw])
    except (msgspec.MsgspecError, RecursionError, ValueError) as error:
        raise FormatError(f"the manifest cannot be read: {error}") from None
    plain = 1 + sum(len(msgspec.json.encode(name)) + 2 + len(bytes(raw)) for name, raw in fields.items())
    if plain != len(data):
        raise FormatError("the manifest has a field twice, or space between its fields")
    return fields


def _tensors_to_json(table: TensorTable) -> list[Any]:
    """[names, dtypes, dtype of each, placings, placing of each]."""
    dtypes = list(dict.fromkeys(table.dtypes))
    number = {name: index for index, name in enumerate(dtypes)}
    itemsize = {name: int(size) for name, size in zip(table.dtypes, table.itemsizes.tolist(), strict=True)}
    return [
        list(table.names),
        [[name, itemsize[name]] for name in dtypes],
        [number[name] for name in table.dtypes],
        *_shardings_to_json(table),
    ]


def _shardings_to_json(table: TensorTable) -> tuple[list[Any], list[Any], list[int]]:
    """Spreads (a mesh with placements), each once; placings, with their spread's number; the placing of each tensor."""
    spreads: dict[str, int] = {}
    listed: list[Any] = []
    shardings: list[Any] = []
    for sharding in table.shardings:
        spread, *rest = sharding_to_json(sharding)
        if spread != -1:
            key = repr(spread)
            if key not in spreads:
                spreads[key] = len(listed)
                listed.append(spread)
            spread = spreads[key]
        shardings.append([spread, *rest])
    return listed, shardings, table.kinds.tolist()


def sharding_to_json(sharding: Sharding) -> list[Any]:
    """A layout as [spread, shape]; pieces as [-1, shape, offsets, sizes, ranks], all regions' numbers in a row."""
    if isinstance(sharding, Layout):
        return [_spread_to_json(sharding), list(sharding.shape)]
    offsets = [n for region in sharding.regions for n in region.offset]
    sizes = [n for region in sharding.regions for n in region.size]
    return [-1, list(sharding.shape), offsets, sizes, list(sharding.ranks)]


def _spread_to_json(layout: Layout) -> list[Any]:
    """[mesh shape, its names, its ranks, placements, order]: names, ranks and order are null where they are usual."""
    mesh = layout.mesh
    ranks = list(mesh.ranks)
    placements: list[Any] = []
    for placement in layout.placements:
        match placement:
            case Shard(dim=dim):
                placements.append(["s", dim])
            case Ragged(dim=dim, sizes=sizes):
                placements.append(["g", dim, list(sizes)])
            case Replicate():
                placements.append(["r"])
            case _:
                raise LayoutError(f"{layout} cannot be stored: it holds {placement}")
    usual = layout.order == tuple(range(mesh.ndim))
    return [
        list(mesh.shape),
        None if mesh.names is None else list(mesh.names),
        None if ranks == list(range(mesh.size)) else ranks,
        placements,
        None if usual else list(layout.order),
    ]


def _tensors_from_json(raw: msgspec.Raw) -> TensorTable:
    names, dtypes, kinds_of_dtype, spreads, shardings, kinds = msgspec.json.decode(
        raw,
        type=tuple[
            list[str],
            list[tuple[str, int]],
            list[int],
            list[tuple[list[int], list[str] | None, list[int] | None, list[list[Any]], list[int] | None]],
            list[list[Any]],
            list[int],
        ],
    )
    if not len(names) == len(kinds_of_dtype) == len(kinds):
        raise FormatError(f"{len(names)} names, {len(kinds_of_dtype)} dtypes and {len(kinds)} placings: one each")
    if len(set(names)) != len(names):
        raise FormatError("two tensors have one name")
    _check_numbers(kinds_of_dtype, len(dtypes), "dtype")
    _check_numbers(kinds, len(shardings), "placing")
    for name, itemsize in dtypes:
        if name not in DTYPES or DTYPES[name].itemsize != itemsize:
            raise FormatError(f"dtype {name[:60]!r} of {itemsize} bytes is unknown to this PyTorch")
    _check_places(shardings, spreads, len(bytes(raw)))
    built = [sharding_from_json(_numbered(sharding, spreads)) for sharding in shardings]
    return TensorTable(
        tuple(names),
        tuple(dtypes[number][0] for number in kinds_of_dtype),
        np.array([dtypes[number][1] for number in kinds_of_dtype], np.int64),
        np.array(kinds, np.int64),
        tuple(built),
    )


def _check_places(shardings: list[list[Any]], spreads: list[Any], nbytes: int) -> None:
    """Refuse more than a manifest of this size can be about, before anything is made for it."""
    sizes = [prod(max(1, size) for size in mesh_shape) for mesh_shape, *_ in spreads]
    if any(size > _MAX_RANKS for size in sizes):
        raise FormatError(f"a mesh of {max(sizes)} ranks is larger than any: {_MAX_RANKS} are the most")
    numbers = (sharding[0] for sharding in shardings if sharding and type(sharding[0]) is int)
    places = sum(sizes[number] for number in numbers if 0 <= number < len(sizes))
    if places > _places_of(nbytes):
        raise FormatError(f"{len(shardings)} placings on meshes of {places} ranks together are more than any")


def _places_of(nbytes: int) -> int:
    """Return how many ranks the meshes of all placings have together, at most, in a manifest of so many bytes."""
    return _MAX_PLACES + _PLACES_PER_BYTE * nbytes


def _numbered(value: list[Any], spreads: list[Any]) -> list[Any]:
    """A placing with its spread in place of the number of it."""
    if not value or not isinstance(value[0], int):
        raise FormatError(f"placing {str(value)[:60]} does not begin with the number of a spread")
    if value[0] == -1:
        return value
    _check_numbers(value[:1], len(spreads), "spread")
    return [spreads[value[0]], *value[1:]]


def sharding_from_json(value: list[Any]) -> Sharding:
    """What `sharding_to_json` wrote, checked."""
    spread, *rest = value
    if spread == -1:
        shape, offsets, sizes, ranks = (msgspec.convert(column, list[int]) for column in rest)
        _check_shape(shape)
        return _pieces(tuple(shape), offsets, sizes, ranks)
    (shape,) = (msgspec.convert(column, list[int]) for column in rest)
    _check_shape(shape)
    mesh_shape, names, ranks, placements, order = spread
    if len(mesh_shape) > _MAX_MESH_DIMENSIONS or prod(max(1, size) for size in mesh_shape) > _MAX_RANKS:
        raise FormatError(f"a mesh of shape {str(mesh_shape)[:80]} is larger than any")
    if ranks is not None:
        _check_ranks(ranks, distinct=True)
    return Layout(Mesh(mesh_shape, names, ranks), [_placement(entry) for entry in placements], shape, order)


def _placement(entry: list[Any]) -> Placement:
    match entry:
        case ["s", int(dim)]:
            return Shard(dim)
        case ["g", int(dim), list(sizes)]:
            return Ragged(dim, sizes)
        case ["r"]:
            return Replicate()
    raise FormatError(f"placement {entry!r} is unknown")


def _pieces(shape: tuple[int, ...], offsets: list[int], sizes: list[int], ranks: list[int]) -> Pieces:
    ndim = len(shape)
    if not len(offsets) == len(sizes) == ndim * len(ranks):
        raise FormatError(f"{len(ranks)} pieces of {ndim} dimensions with {len(offsets)} offsets, {len(sizes)} sizes")
    _check_shape(offsets, every=False)
    _check_shape(sizes, every=False)
    _check_ranks(ranks)
    if not ndim and len(ranks) != 1:
        raise FormatError(f"{len(ranks)} pieces of a tensor without dimensions: it is held once")
    grid = (len(ranks), ndim)
    is_tiled = tiles(shape, np.array(offsets, np.int64).reshape(grid), np.array(sizes, np.int64).reshape(grid))
    regions = tuple(
        Region(offsets[ndim * n : ndim * (n + 1)], sizes[ndim * n : ndim * (n + 1)]) for n in range(len(ranks))
    )
    if not is_tiled:
        few = len(ranks) << ndim <= _MAX_CORNERS
        where = f": {Region.whole(shape).covers(regions)}" if few else ""
        raise FormatError(f"pieces of a tensor of shape {shape} do not tile it{where}")
    return Pieces(shape, regions, tuple(ranks))


def _files_from_json(raw: msgspec.Raw) -> dict[int, FileEntry]:
    ranks, sizes, headers, digests = msgspec.json.decode(raw, type=tuple[list[int], list[int], list[int], list[str]])
    if not len(ranks) == len(sizes) == len(headers) == len(digests) == len(set(ranks)):
        raise FormatError("the files' columns have different lengths, or a rank comes twice")
    _check_ranks(ranks)
    for rank, size, header, said in zip(ranks, sizes, headers, digests, strict=True):
        if not (8 < header <= min(size, MAX_HEADER + 8) and size < _MAX_DATA and _DIGEST.fullmatch(said)):
            raise FormatError(f"the file of rank {rank}: size {size}, header {header}, digest {said[:40]!r} cannot be")
    return {
        rank: FileEntry(size, header, said)
        for rank, size, header, said in zip(ranks, sizes, headers, digests, strict=True)
    }


def _check_claims(table: TensorTable, files: Mapping[int, FileEntry]) -> None:
    """Sees that the files can hold the tensors, so that nothing is planned or made for tensors that cannot be there.

    Every element is stored once, so the bytes are exactly as many; every chunk has an entry in a header.
    """
    counts = np.bincount(table.kinds, minlength=len(table.shardings)).tolist()
    volumes = [prod(sharding.shape) for sharding in table.shardings]
    claimed = sum(
        volumes[kind] * itemsize for kind, itemsize in zip(table.kinds.tolist(), table.itemsizes.tolist(), strict=True)
    )
    there = sum(file.size - file.header_size for file in files.values())
    if claimed != there or there >= _MAX_DATA:
        raise FormatError(f"the tensors have {claimed} bytes, and the files hold {there}")
    chunks = sum(
        count * (max(1, len(sharding.regions)) if isinstance(sharding, Pieces) else 1)
        for count, sharding in zip(counts, table.shardings, strict=True)
    )
    if chunks * _LEAST_ENTRY > sum(file.header_size for file in files.values()):
        raise FormatError(f"the headers of {len(files)} files have no room for {chunks} chunks")
    for sharding in table.shardings:
        if isinstance(sharding, Layout) and sharding.mesh.size > len(files) and 0 not in sharding.shape:
            pieces = prod(_pieces_along(sharding, dim) for dim in range(sharding.ndim))
            if pieces > len(files):
                raise FormatError(
                    f"a tensor lies in {pieces} pieces on as many ranks, and there are {len(files)} files"
                )


def _pieces_along(layout: Layout, dim: int) -> int:
    """Return into how many pieces that are not empty a dimension is cut: counted, not listed."""
    lengths = {layout.shape[dim]: 1}  # of the pieces, and how many have each
    for mesh_dim in layout.cut_by(dim):
        placement, ranks = layout.placements[mesh_dim], layout.mesh.shape[mesh_dim]
        if isinstance(placement, Ragged):  # it cuts first
            lengths = dict(Counter(placement.sizes))
            continue
        shorter: Counter[int] = Counter()
        for length, count in lengths.items():
            chunk = -(-length // ranks)
            if chunk:
                shorter[chunk] += count * (length // chunk)
                shorter[length % chunk] += count
        lengths = shorter
    return sum(count for length, count in lengths.items() if length)


def _check_ranks(ranks: list[int], *, distinct: bool = False) -> None:
    if ranks and not (min(ranks) >= 0 and max(ranks) < _MAX_RANKS):
        raise FormatError(f"ranks {min(ranks)} to {max(ranks)} cannot be: they are 0 to {_MAX_RANKS - 1}")
    if distinct and len(set(ranks)) != len(ranks):
        raise FormatError("a mesh has a rank twice")


def _check_numbers(numbers: list[int], count: int, what: str) -> None:
    if numbers and not (min(numbers) >= 0 and max(numbers) < count):
        raise FormatError(f"a {what} has number {min(numbers)} to {max(numbers)}, and there are {count}")


def _check_shape(shape: list[int], *, every: bool = True) -> None:
    volume = 1
    for size in shape:
        if not 0 <= size < _MAX_DATA:
            raise FormatError(f"size {size} cannot be")
        if every:
            volume *= max(1, size)
    if len(shape) > _MAX_DIMENSIONS and every:
        raise FormatError(f"a shape of {len(shape)} dimensions: {_MAX_DIMENSIONS} are the most")
    if volume >= _MAX_DATA:
        raise FormatError(f"shape {shape} is larger than any")
