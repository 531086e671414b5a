"""The manifest: the contents of a checkpoint as JSON. docs/format.md specifies it; this is its only reader.

One object with known fields and no whitespace; everything inside it is arrays, so no key can be repeated. Everything is
checked before anything is built from it: counts, bounds, names, and that regions tile their tensors.
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
"""Maximum size of a manifest in bytes: decoding takes many times as much memory."""
_MAX_DIMENSIONS = 64
_MAX_MESH_DIMENSIONS = 16
_MAX_RANKS = 1 << 18
_MAX_PLACES = 1 << 25  # limit on the total size of the meshes of all shardings, plus
_PLACES_PER_BYTE = 64  # this many for each byte of the manifest
_MAX_CORNERS = 1 << 12  # limit up to which an error says where boxes do not tile
_MAX_DATA = 1 << 62
_MIN_ENTRY = 40  # minimum size of a chunk's entry in a header, in bytes
_ZEROS = b"0" * 32
_END = b'"digest":"%s"}'
_BEGIN = re.compile(rb'\{"shardwright":([0-9]{1,9}),')
_NAME = re.compile(r"[0-9a-z]{6,32}")
_DIGEST = re.compile(r"[0-9a-f]{32}")


@final
@dataclass(frozen=True, eq=False)
class Manifest:
    """A checkpoint's tree of values, its tensor table, and the data file of each rank that wrote one.

    `extra` has the fields that this version does not know: values, or their JSON as read.
    """

    save_id: str
    tree: Any
    tensors: TensorTable
    files: Mapping[int, FileEntry]
    extra: Mapping[str, Any] = field(default_factory=dict)

    @cached_property
    def locator(self) -> ChunkLocator:
        """Locates regions of tensors in the data files."""
        return ChunkLocator(self.tensors, self.files)

    def file(self, rank: int) -> DataFile:
        """Return the data file that a rank wrote."""
        return DataFile(self.locator.file(rank), self.save_id)

    @cached_property
    def names(self) -> frozenset[str]:
        """The names of all data files."""
        return frozenset(map(self.file_name, self.files))

    def file_name(self, rank: int) -> str:
        """Return the name of the data file that a rank wrote."""
        return file_name(self.save_id, rank)

    def encode(self) -> bytes:
        """Return the bytes of the manifest, with its own digest at the end."""
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
                f"the manifest would have {len(body)} bytes, but at most {MAX_BYTES} can be read; store large values "
                "as tensors or arrays"
            )
        total_ranks = sum(sharding.mesh.size for sharding in self.tensors.shardings if isinstance(sharding, Layout))
        if total_ranks > _max_total_ranks(len(tensors)):
            raise StateError(
                f"the state has {len(self.tensors.shardings)} different shapes and layouts on meshes of {total_ranks} "
                f"ranks in total, but at most {_max_total_ranks(len(tensors))} can be read; use fewer"
            )
        return body + _END % digest(body + _END % _ZEROS).encode()

    @classmethod
    def decode(cls, data: bytes) -> Manifest:
        """Decode and check a manifest; raise if it is corrupted, of an unknown version, or inconsistent."""
        fields = _fields(data)
        try:
            save_id = msgspec.json.decode(fields["save"], type=str)
            if not _NAME.fullmatch(save_id):
                raise FormatError(f"save id must be 6 to 32 lowercase letters and digits, got {save_id!r}")
            tree = msgspec.json.decode(fields["tree"])
            tensors = _tensors_from_json(fields["tensors"])
            files = _files_from_json(fields["files"])
            extra = {name: raw.copy() for name, raw in fields.items() if name not in FIELDS}
            for raw in extra.values():
                bytes(raw).decode()  # the only check that it is valid UTF-8
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
    """Verify the digest and return the fields of the object, each of which occurs once."""
    length = len(_END % _ZEROS)
    match = _BEGIN.match(data)
    if len(data) < length or match is None:
        raise FormatError("not a shardwright manifest")
    stored_digest = data[-34:-2]
    if digest(data[:-length] + _END % _ZEROS).encode() != stored_digest or data[-length:] != _END % stored_digest:
        raise CorruptionError("the manifest is corrupted: its digest does not match its contents")
    # After the digest: every version ends with one, so a corrupted digit is not mistaken for another version.
    if int(match[1]) != VERSION:
        raise UnknownVersionError(f"the manifest has version {int(match[1])}, but this library reads version {VERSION}")
    try:
        fields = msgspec.json.decode(data, type=dict[str, msgspec.Raw])
    except (msgspec.MsgspecError, RecursionError, ValueError) as error:
        raise FormatError(f"the manifest cannot be read: {error}") from None
    plain = 1 + sum(len(msgspec.json.encode(name)) + 2 + len(bytes(raw)) for name, raw in fields.items())
    if plain != len(data):
        raise FormatError("the manifest repeats a field, or has whitespace between fields")
    return fields


def _tensors_to_json(table: TensorTable) -> list[Any]:
    """Return [names, dtypes, dtype of each tensor, distributions, shardings, sharding of each tensor]."""
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
    """Return the distinct distributions (mesh and placements), the shardings, and the sharding of each tensor."""
    distributions: dict[str, int] = {}
    listed: list[Any] = []
    shardings: list[Any] = []
    for sharding in table.shardings:
        distribution, *rest = sharding_to_json(sharding)
        if distribution != -1:
            key = repr(distribution)
            if key not in distributions:
                distributions[key] = len(listed)
                listed.append(distribution)
            distribution = distributions[key]
        shardings.append([distribution, *rest])
    return listed, shardings, table.kinds.tolist()


def sharding_to_json(sharding: Sharding) -> list[Any]:
    """Encode a layout as [distribution, shape], and pieces as [-1, shape, offsets, sizes, ranks] with flat lists."""
    if isinstance(sharding, Layout):
        return [_distribution_to_json(sharding), list(sharding.shape)]
    offsets = [n for region in sharding.regions for n in region.offset]
    sizes = [n for region in sharding.regions for n in region.size]
    return [-1, list(sharding.shape), offsets, sizes, list(sharding.ranks)]


def _distribution_to_json(layout: Layout) -> list[Any]:
    """Encode as [mesh shape, names, ranks, placements, order]; names, ranks and order are null by default."""
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
    names, dtypes, kinds_of_dtype, distributions, shardings, kinds = msgspec.json.decode(
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
        raise FormatError(f"{len(names)} names, {len(kinds_of_dtype)} dtypes and {len(kinds)} shardings do not match")
    if len(set(names)) != len(names):
        raise FormatError("two tensors have the same name")
    _check_indices(kinds_of_dtype, len(dtypes), "dtype")
    _check_indices(kinds, len(shardings), "sharding")
    for name, itemsize in dtypes:
        if name not in DTYPES or DTYPES[name].itemsize != itemsize:
            raise FormatError(f"dtype {name[:60]!r} of {itemsize} bytes is not known to this version of PyTorch")
    _check_mesh_sizes(shardings, distributions, len(bytes(raw)))
    built = [sharding_from_json(_with_distribution(sharding, distributions)) for sharding in shardings]
    return TensorTable(
        tuple(names),
        tuple(dtypes[number][0] for number in kinds_of_dtype),
        np.array([dtypes[number][1] for number in kinds_of_dtype], np.int64),
        np.array(kinds, np.int64),
        tuple(built),
    )


def _check_mesh_sizes(shardings: list[list[Any]], distributions: list[Any], nbytes: int) -> None:
    """Reject shardings that are too large for a manifest of this size, before anything is allocated for them."""
    sizes = [prod(max(1, size) for size in mesh_shape) for mesh_shape, *_ in distributions]
    if any(size > _MAX_RANKS for size in sizes):
        raise FormatError(f"a mesh has {max(sizes)} ranks, but at most {_MAX_RANKS} are supported")
    indices = (sharding[0] for sharding in shardings if sharding and type(sharding[0]) is int)
    total_ranks = sum(sizes[index] for index in indices if 0 <= index < len(sizes))
    if total_ranks > _max_total_ranks(nbytes):
        raise FormatError(f"{len(shardings)} shardings on meshes of {total_ranks} ranks in total exceed the limit")


def _max_total_ranks(nbytes: int) -> int:
    """Return the limit on the total size of the meshes of all shardings in a manifest of this many bytes."""
    return _MAX_PLACES + _PLACES_PER_BYTE * nbytes


def _with_distribution(value: list[Any], distributions: list[Any]) -> list[Any]:
    """Replace the index of a sharding's distribution by the distribution itself."""
    if not value or not isinstance(value[0], int):
        raise FormatError(f"sharding {str(value)[:60]} does not begin with the index of a distribution")
    if value[0] == -1:
        return value
    _check_indices(value[:1], len(distributions), "distribution")
    return [distributions[value[0]], *value[1:]]


def sharding_from_json(value: list[Any]) -> Sharding:
    """Decode and check what `sharding_to_json` encoded."""
    distribution, *rest = value
    if distribution == -1:
        shape, offsets, sizes, ranks = (msgspec.convert(column, list[int]) for column in rest)
        _check_shape(shape)
        return _pieces(tuple(shape), offsets, sizes, ranks)
    (shape,) = (msgspec.convert(column, list[int]) for column in rest)
    _check_shape(shape)
    mesh_shape, names, ranks, placements, order = distribution
    if len(mesh_shape) > _MAX_MESH_DIMENSIONS or prod(max(1, size) for size in mesh_shape) > _MAX_RANKS:
        raise FormatError(f"a mesh of shape {str(mesh_shape)[:80]} exceeds the limit")
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
    raise FormatError(f"unknown placement {entry!r}")


def _pieces(shape: tuple[int, ...], offsets: list[int], sizes: list[int], ranks: list[int]) -> Pieces:
    ndim = len(shape)
    if not len(offsets) == len(sizes) == ndim * len(ranks):
        raise FormatError(f"{len(ranks)} pieces of {ndim} dimensions with {len(offsets)} offsets, {len(sizes)} sizes")
    _check_shape(offsets, every=False)
    _check_shape(sizes, every=False)
    _check_ranks(ranks)
    if not ndim and len(ranks) != 1:
        raise FormatError(f"a tensor without dimensions has {len(ranks)} pieces; it must have one")
    grid = (len(ranks), ndim)
    is_tiled = tiles(shape, np.array(offsets, np.int64).reshape(grid), np.array(sizes, np.int64).reshape(grid))
    regions = tuple(
        Region(offsets[ndim * n : ndim * (n + 1)], sizes[ndim * n : ndim * (n + 1)]) for n in range(len(ranks))
    )
    if not is_tiled:
        is_small = len(ranks) << ndim <= _MAX_CORNERS
        detail = f": {Region.whole(shape).covers(regions)}" if is_small else ""
        raise FormatError(f"the pieces of a tensor of shape {shape} do not tile it{detail}")
    return Pieces(shape, regions, tuple(ranks))


def _files_from_json(raw: msgspec.Raw) -> dict[int, FileEntry]:
    ranks, sizes, headers, digests = msgspec.json.decode(raw, type=tuple[list[int], list[int], list[int], list[str]])
    if not len(ranks) == len(sizes) == len(headers) == len(digests) == len(set(ranks)):
        raise FormatError("the columns of the files have different lengths, or a rank is repeated")
    _check_ranks(ranks)
    for rank, size, header, stored_digest in zip(ranks, sizes, headers, digests, strict=True):
        if not (8 < header <= min(size, MAX_HEADER + 8) and size < _MAX_DATA and _DIGEST.fullmatch(stored_digest)):
            raise FormatError(
                f"the file of rank {rank} has an invalid size {size}, header {header} or digest {stored_digest[:40]!r}"
            )
    return {
        rank: FileEntry(size, header, stored_digest)
        for rank, size, header, stored_digest in zip(ranks, sizes, headers, digests, strict=True)
    }


def _check_claims(table: TensorTable, files: Mapping[int, FileEntry]) -> None:
    """Check that the files can hold the tensors, before anything is planned or allocated for them.

    Every element is stored once, so the byte counts must be equal; every chunk has an entry in a header.
    """
    counts = np.bincount(table.kinds, minlength=len(table.shardings)).tolist()
    volumes = [prod(sharding.shape) for sharding in table.shardings]
    claimed = sum(
        volumes[kind] * itemsize for kind, itemsize in zip(table.kinds.tolist(), table.itemsizes.tolist(), strict=True)
    )
    available = sum(file.size - file.header_size for file in files.values())
    if claimed != available or available >= _MAX_DATA:
        raise FormatError(f"the tensors have {claimed} bytes, but the files hold {available}")
    chunks = sum(
        count * (max(1, len(sharding.regions)) if isinstance(sharding, Pieces) else 1)
        for count, sharding in zip(counts, table.shardings, strict=True)
    )
    if chunks * _MIN_ENTRY > sum(file.header_size for file in files.values()):
        raise FormatError(f"the headers of {len(files)} files are too small for {chunks} chunks")
    for sharding in table.shardings:
        if isinstance(sharding, Layout) and sharding.mesh.size > len(files) and 0 not in sharding.shape:
            pieces = prod(_pieces_along(sharding, dim) for dim in range(sharding.ndim))
            if pieces > len(files):
                raise FormatError(
                    f"a tensor is stored in {pieces} pieces on as many ranks, but there are {len(files)} files"
                )


def _pieces_along(layout: Layout, dim: int) -> int:
    """Return the number of non-empty pieces along a dimension, counted without listing them."""
    lengths = {layout.shape[dim]: 1}  # lengths of the pieces, with their counts
    for mesh_dim in layout.cut_by(dim):
        placement, ranks = layout.placements[mesh_dim], layout.mesh.shape[mesh_dim]
        if isinstance(placement, Ragged):  # Ragged splits first
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
        raise FormatError(f"ranks must be 0 to {_MAX_RANKS - 1}, got {min(ranks)} to {max(ranks)}")
    if distinct and len(set(ranks)) != len(ranks):
        raise FormatError("a mesh repeats a rank")


def _check_indices(indices: list[int], count: int, kind: str) -> None:
    if indices and not (min(indices) >= 0 and max(indices) < count):
        raise FormatError(f"{kind} indices must be below {count}, got {min(indices)} to {max(indices)}")


def _check_shape(shape: list[int], *, every: bool = True) -> None:
    volume = 1
    for size in shape:
        if not 0 <= size < _MAX_DATA:
            raise FormatError(f"invalid size {size}")
        if every:
            volume *= max(1, size)
    if len(shape) > _MAX_DIMENSIONS and every:
        raise FormatError(f"a shape has {len(shape)} dimensions, but at most {_MAX_DIMENSIONS} are supported")
    if volume >= _MAX_DATA:
        raise FormatError(f"shape {shape} exceeds the limit")
