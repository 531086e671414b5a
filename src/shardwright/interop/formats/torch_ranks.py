"""Files that each rank wrote with `torch.save`, with parts of DTensors in them: joined by the specs of the DTensors.

Plain tensors and values that are the same on all ranks are one; where ranks differ, each rank's is kept, as `PerRank`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import ExitStack
from math import prod
from typing import Any, NamedTuple, final

from shardwright.checkpoint.format.data_file import digest
from shardwright.checkpoint.format.names import joined
from shardwright.errors import FormatError, LayoutError
from shardwright.interop.formats.contents import ForeignContents, StoredChunk, TableBuilder
from shardwright.interop.formats.inert_tree import TreeBuilder
from shardwright.interop.formats.pickled import Instance
from shardwright.interop.formats.pickled.values import DTensorRef, TensorRef
from shardwright.interop.formats.stored import ArchiveRange
from shardwright.interop.formats.torch_archive import Archive
from shardwright.layout import Layout, Mesh, Placement, Region, Replicate, Shard
from shardwright.layout.placement import StridedShard
from shardwright.storage import LocalStorage

__all__ = ["read_torch_ranks", "sets_of_ranks"]

_RANK = re.compile(r"(?P<name>.*?)(?:[._-]?world_size_\d+)?[._-]?rank[._-]?(?P<rank>\d{1,6})\.(?:pt|pth|bin)")
_MAX_DEPTH = 60


def sets_of_ranks(names: Sequence[str]) -> dict[str, list[str]] | None:
    """Return the files of each set that all ranks wrote, by rank; None unless every file belongs to one.

    >>> sets_of_ranks(["model_world_size_2_rank_1.pt", "model_world_size_2_rank_0.pt"])
    {'model': ['model_world_size_2_rank_0.pt', 'model_world_size_2_rank_1.pt']}
    """
    found: dict[str, dict[int, str]] = {}
    for name in names:
        match = _RANK.fullmatch(name)
        if match is None or int(match["rank"]) in found.setdefault(match["name"], {}):
            return None
        found[match["name"]][int(match["rank"])] = name
    if not found or any(sorted(files) != list(range(len(files))) for files in found.values()):
        return None
    return {name: [files[rank] for rank in range(len(files))] for name, files in found.items()}


def read_torch_ranks(storage: LocalStorage, sets: dict[str, list[str]]) -> ForeignContents:
    """Return the contents of these sets of files; each set is under its name, if there are several."""
    table = TableBuilder(storage.path)
    sizes: dict[str, int] = {}
    checksums = []
    tree: list[Any] = ["d"]
    with ExitStack() as opened:
        for name, files in sets.items():
            archives = []
            for file in files:
                reader = opened.enter_context(storage.open_file(file))
                archives.append(Archive(reader, 0, reader.size, file))
                sizes[file] = reader.size
                checksums.append(sorted(archives[-1].checksums().items()))
            prefix = name if len(sets) > 1 else ""
            tree += [name, _Joining(table, files, archives).node([each.value for each in archives], prefix, 0)]
    whole = tree if len(sets) > 1 else tree[2]
    identity = digest(repr((sorted(sizes.items()), checksums)).encode())
    ranges = {file: [ArchiveRange(0, size, "")] for file, size in sizes.items()}
    return table.build("torch", identity[:16], storage, whole, ranges, sizes)


class _Spec(NamedTuple):
    """The layout of a DTensor, and the rank in its mesh that wrote the file."""

    layout: Layout
    mesh_rank: int


@final
class _Joining:
    """Joins the values of all ranks of one set."""

    def __init__(self, table: TableBuilder, files: Sequence[str], archives: Sequence[Archive]) -> None:
        self._table, self._files, self._archives = table, files, archives
        self._numbers: dict[Any, int] = {}  # of tensors that were added, so that tied ones are one

    def node(self, values: Sequence[Any], name: str, depth: int) -> Any:
        """Return the node of what the ranks have under one name."""
        first = values[0]
        if depth > _MAX_DEPTH:
            raise FormatError(f"{self._files[0]}: values are nested more than {_MAX_DEPTH} deep")
        if all(isinstance(value, DTensorRef) for value in values):
            return self._dtensor(values, name)
        if all(type(value) is dict and value.keys() == first.keys() for value in values):
            parts: list[Any] = ["d"]
            for key in first:
                if type(key) not in (str, int, float, bool, type(None)):
                    return ["opaque", "dict", f"a key has the type {type(key).__name__}"]
                parts += [key, self.node([value[key] for value in values], joined(name, key), depth + 1)]
            return parts
        if type(first) in (list, tuple) and all(
            type(value) is type(first) and len(value) == len(first) for value in values
        ):
            items = [self.node(item, joined(name, at), depth + 1) for at, item in enumerate(zip(*values, strict=True))]
            return ["l" if type(first) is list else "t", *items]
        if all(isinstance(value, TensorRef) for value in values):
            identities = {self._identity(rank, value) for rank, value in enumerate(values)}
            if len(identities) == 1:
                return self._build(0, first, name)
        nodes = [self._build(rank, value, f"{name}.rank{rank}") for rank, value in enumerate(values)]
        has_tensors = any(isinstance(value, TensorRef | DTensorRef | dict | list | tuple) for value in values)
        if not has_tensors and all(node == nodes[0] for node in nodes):
            return nodes[0]
        return ["r", *([rank, node] for rank, node in enumerate(nodes))]

    def _identity(self, rank: int, value: TensorRef) -> tuple[Any, ...]:
        """Return what tensors with the same elements have in common: their geometry and the checksum of their bytes."""
        record = self._archives[rank].record_of(value.storage)
        return value.dtype, value.size, value.stride, value.offset, record.nbytes, record.crc32

    def _build(self, rank: int, value: Any, name: str) -> Any:
        def add(name: str, ref: TensorRef | DTensorRef) -> int:
            if isinstance(ref, DTensorRef):
                raise FormatError(f"{self._files[rank]}: {name!r} is a DTensor on some ranks only")
            key = rank, ref
            if key not in self._numbers:
                location = self._archives[rank].locate(ref)
                chunk = StoredChunk(Region.whole(ref.size), self._files[rank], location.start, location)
                self._numbers[key] = self._table.add(self._table.free_name(name), ref.dtype, ref.size, [chunk])
            return self._numbers[key]

        return TreeBuilder(self._files[rank], add).build(value, name)

    def _dtensor(self, values: Sequence[DTensorRef], name: str) -> int:
        locals_of = [_local(value, f"{file}: {name!r}") for value, file in zip(values, self._files, strict=True)]
        key = tuple(local for local, _ in locals_of)
        if key in self._numbers:
            return self._numbers[key]
        layout = locals_of[0][1].layout
        chunks: dict[Region, StoredChunk] = {}
        for rank, (local, spec) in enumerate(locals_of):
            where = f"{self._files[rank]}: {name!r}"
            if spec.layout is not layout or local.dtype is not values[0].dtype:
                raise FormatError(f"{where} is {spec.layout}, but {layout} in {self._files[0]}")
            region = layout.region(spec.mesh_rank)
            if local.size != region.size:
                raise FormatError(f"{where} has a local tensor of {list(local.size)}, but its spec gives it {region}")
            if region not in chunks and not region.is_empty:
                location = self._archives[rank].locate(local)
                chunks[region] = StoredChunk(region, self._files[rank], location.start, location)
        number = self._table.add(self._table.free_name(name), values[0].dtype, layout.shape, list(chunks.values()))
        self._numbers[key] = number
        return number


def _local(value: DTensorRef, where: str) -> tuple[TensorRef, _Spec]:
    """Return the local tensor of a DTensor, and what its spec says."""
    state = value.state[1] if isinstance(value.state, tuple) and len(value.state) == 2 else value.state
    match state:
        case {"_local_tensor": TensorRef() as local, "_spec": Instance(state=dict(spec))}:
            pass
        case _:
            raise FormatError(f"{where}: a DTensor without a local tensor and a spec")
    mesh = spec.get("mesh")
    fields = mesh.state if isinstance(mesh, Instance) and isinstance(mesh.state, dict) else {}
    shape = _mesh_shape(fields, where)
    coordinate = fields.get("_coordinate_on_dim")
    if not isinstance(coordinate, tuple | list) or len(coordinate) != len(shape):
        raise FormatError(f"{where}: its mesh does not say which of its ranks wrote the file")
    index = 0
    for extent, position in zip(shape, coordinate, strict=True):
        if type(position) is not int or not 0 <= position < extent:
            raise FormatError(f"{where}: {coordinate} is not a coordinate of a mesh of shape {list(shape)}")
        index = index * extent + position
    placements = spec.get("placements")
    if not isinstance(placements, tuple | list):
        raise FormatError(f"{where}: its spec has no placements")
    try:
        layout = Layout(Mesh(shape), [_placement(each, where) for each in placements], value.size)
    except LayoutError as error:
        raise FormatError(f"{where}: {error}") from None
    return local, _Spec(layout, index)


def _mesh_shape(fields: dict[str, Any], where: str) -> tuple[int, ...]:
    """Return the shape of a mesh: of its layout, or of its tensor in older versions of PyTorch."""
    layout, tensor = fields.get("_layout"), fields.get("mesh")
    shape: Any = None
    if isinstance(layout, Instance) and isinstance(layout.state, dict):
        axes = layout.state.get("axes")
        if isinstance(axes, tuple | list):
            sizes = [
                axis.state.get("shape") for axis in axes if isinstance(axis, Instance) and type(axis.state) is dict
            ]
            shape = tuple(prod(size) if isinstance(size, tuple | list) else size for size in sizes)
        else:
            shape = layout.state.get("shape")
    elif isinstance(tensor, TensorRef):
        shape = tensor.size
    if isinstance(shape, int):
        shape = (shape,)
    if not isinstance(shape, tuple) or not all(type(size) is int and 0 < size < 1 << 20 for size in shape):
        raise FormatError(f"{where}: its mesh has no shape that is known")
    if not shape or prod(shape) > 1 << 18:
        raise FormatError(f"{where}: a mesh of shape {list(shape)[:16]}")
    return shape


def _placement(value: Any, where: str) -> Placement:
    fields = value.state if isinstance(value, Instance) and isinstance(value.state, dict) else {}
    name = value.kind.name.rpartition(".")[2] if isinstance(value, Instance) else type(value).__name__
    match name, fields.get("dim"), fields.get("split_factor"):
        case "Replicate", _, _:
            return Replicate()
        case "Shard", int(dim), _:
            return Shard(dim)
        case "_StridedShard", int(dim), int(factor):
            return StridedShard(dim, factor)
    raise FormatError(f"{where} has the placement {name}, which is not read")
