"""`Layout`: which rank holds which region of a tensor, by arithmetic."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from functools import cached_property
from itertools import product
from types import MappingProxyType
from typing import Any, NamedTuple, final
from weakref import WeakValueDictionary

import numpy as np
import numpy.typing as npt

from shardwright.errors import ArgumentTypeError, LayoutError, MeshError, PlacementError, RegionError
from shardwright.layout.gc import gc_paused
from shardwright.layout.integers import integers
from shardwright.layout.mesh import Mesh
from shardwright.layout.placement import Placement, Ragged, Replicate, Shard, StridedShard, as_placement
from shardwright.layout.region import Region, region_unchecked

__all__ = ["Holding", "Layout", "RegionTable"]

_interned: WeakValueDictionary[tuple[object, ...], Layout] = WeakValueDictionary()
_lock = threading.Lock()
_NOTHING: Mapping[Any, Any] = MappingProxyType({})  # attached to a new layout


class Holding(NamedTuple):
    """A region, and the ranks that hold it.

    >>> Holding(Region((0,), (4,)), ranks=(0, 2))
    Holding(region=Region[0:4], ranks=(0, 2))
    """

    region: Region
    ranks: tuple[int, ...]


class RegionTable(NamedTuple):
    """The region of every rank, as arrays: row i belongs to rank `ranks[i]`, in the order of the mesh.

    >>> table = Layout(Mesh((2,)), [Shard(0)], (5,)).table()
    >>> table.ranks.tolist(), table.offsets.tolist(), table.sizes.tolist()
    ([0, 1], [[0], [3]], [[3], [2]])
    """

    ranks: npt.NDArray[np.int64]
    offsets: npt.NDArray[np.int64]
    sizes: npt.NDArray[np.int64]


@final
class Layout:
    """How a tensor of a given shape is distributed over a mesh: one placement per mesh dimension.

    All queries are pure arithmetic, for any rank, in any process. Layouts are interned: equal layouts are the same
    object, so comparing and hashing are cheap.

    If several mesh dimensions shard the same tensor dimension, they apply from left to right, unless `order` (mesh
    dimensions by index or name) says otherwise.

    >>> layout = Layout(Mesh((2, 2), ("dp", "tp")), [Shard(0), Replicate()], (64, 128))
    >>> print(layout)
    [64, 128] (dp: S(0), tp: R)
    >>> layout.region(3)
    Region[32:64, 0:128]
    >>> layout.replicas(3)
    (2, 3)
    """

    mesh: Mesh
    placements: tuple[Placement, ...]
    shape: tuple[int, ...]
    order: tuple[int, ...]
    attached: Any  # room for one mapping of a higher layer, which lives as long as the layout; see `attach`

    def __new__(
        cls,
        mesh: object,
        placements: Iterable[object],
        shape: Iterable[int],
        order: Iterable[int | str] | None = None,
    ) -> Layout:
        mesh = Mesh.of(mesh)
        shape = integers(shape, "tensor shape")
        if any(size < 0 for size in shape):
            raise LayoutError(f"tensor shape must not have negative sizes, got {shape}")
        checked = _checked_placements(placements, mesh, shape)
        if any(isinstance(placement, StridedShard) for placement in checked):
            if order is not None:
                raise PlacementError(f"placements {checked} imply an order: do not pass `order` as well")
            checked, order = _resolve_strided(checked, mesh)
        full_order = _checked_order(order, checked, mesh)
        _check_ragged(checked, full_order, mesh, shape)
        return _intern(mesh, checked, shape, full_order)

    @property
    def ndim(self) -> int:
        """The number of dimensions of the tensor."""
        return len(self.shape)

    def region(self, rank: int) -> Region:
        """Return the region of the tensor that this rank holds; it may be empty.

        >>> Layout(Mesh((4,)), [Shard(0)], (5,)).region(2)
        Region[4:5]
        """
        coordinate = self.mesh.coordinate(rank)
        offset, size = [0] * len(self.shape), list(self.shape)
        for mesh_dim, dim in self._sharded:
            index = coordinate[mesh_dim]
            placement = self.placements[mesh_dim]
            if isinstance(placement, Ragged):
                offset[dim] += sum(placement.sizes[:index])
                size[dim] = placement.sizes[index]
            else:
                extent = size[dim]
                chunk = -(-extent // self.mesh.shape[mesh_dim])
                start = min(index * chunk, extent)
                offset[dim] += start
                size[dim] = min(chunk, extent - start)
        return region_unchecked(tuple(offset), tuple(size))

    def local_shape(self, rank: int) -> tuple[int, ...]:
        """Return the shape of this rank's local tensor.

        >>> Layout(Mesh((4,)), [Shard(0)], (5, 3)).local_shape(3)
        (0, 3)
        """
        return self.region(rank).size

    def table(self) -> RegionTable:
        """Return the region of every rank as arrays, for thousands of ranks at once.

        >>> Layout(Mesh((2,)), [Shard(0)], (5,)).table().sizes.tolist()
        [[3], [2]]
        """
        mesh, ndim = self.mesh, len(self.shape)
        offsets = np.zeros((*mesh.shape, ndim), np.int64)
        sizes = np.empty_like(offsets)
        for dim in range(ndim):
            starts, lengths = self._pieces[dim]
            sharding = self.cut_by(dim)
            # Pieces have one axis per mesh dimension that shards `dim`, in sharding order: transpose to mesh order.
            axes = np.argsort(sharding)
            grid = tuple(mesh.shape[m] if m in sharding else 1 for m in range(mesh.ndim))
            offsets[..., dim] = starts.transpose(axes).reshape(grid)
            sizes[..., dim] = lengths.transpose(axes).reshape(grid)
        return RegionTable(mesh.array.reshape(-1), offsets.reshape(mesh.size, ndim), sizes.reshape(mesh.size, ndim))

    def regions(self) -> tuple[Holding, ...]:
        """Return every non-empty region with the ranks that hold it, in row-major order of the mesh.

        Ranks that hold partial values of one region are listed together, as replicas are.

        >>> for region, ranks in Layout(Mesh((2, 2)), [Replicate(), Shard(0)], (4,)).regions():
        ...     print(region, ranks)
        [0:2] (0, 2)
        [2:4] (1, 3)
        """
        table, mesh = self.table(), self.mesh
        sharding = sorted(mesh_dim for mesh_dim, _ in self._sharded)
        others = [m for m in range(mesh.ndim) if m not in sharding]
        rows = np.arange(mesh.size).reshape(mesh.shape).transpose(*sharding, *others)
        rows = rows.reshape(-1, int(np.prod([mesh.shape[m] for m in others], dtype=np.int64)))
        rows = rows[table.sizes[rows[:, 0]].all(axis=1)]
        with gc_paused():
            offsets = map(tuple, table.offsets[rows[:, 0]].tolist())
            sizes = map(tuple, table.sizes[rows[:, 0]].tolist())
            owners = map(tuple, table.ranks[rows].tolist())
            return tuple(map(Holding, map(region_unchecked, offsets, sizes), owners))

    def holders(self, region: Region) -> tuple[Holding, ...]:
        """Return the parts of `region` that ranks hold, each with its ranks. Costs only as much as there are parts.

        >>> Layout(Mesh((4,)), [Shard(0)], (8,)).holders(Region((3,), (3,)))
        (Holding(region=Region[3:4], ranks=(1,)), Holding(region=Region[4:6], ranks=(2,)))
        """
        if not Region.whole(self.shape).contains(region):
            raise RegionError(f"region {region} is not inside the tensor of shape {self.shape}")
        if region.is_empty:
            return ()
        candidates = []
        for dim, (start, size) in enumerate(zip(region.offset, region.size, strict=True)):
            starts, lengths = (pieces.reshape(-1) for pieces in self._pieces[dim])
            candidates.append(
                np.flatnonzero((lengths > 0) & (starts < start + size) & (starts + lengths > start)).tolist()
            )
        holdings = []
        for combination in product(*candidates):
            fixed: dict[int, int] = {}
            offset, size_ = [], []
            for dim, piece in enumerate(combination):
                starts, lengths = self._pieces[dim]
                index = np.unravel_index(piece, starts.shape)
                fixed.update(zip(self.cut_by(dim), map(int, index), strict=True))
                offset.append(int(starts[index]))
                size_.append(int(lengths[index]))
            part = region.intersect(region_unchecked(tuple(offset), tuple(size_)))
            assert part is not None  # candidates overlap the region
            selection = tuple(fixed.get(m, slice(None)) for m in range(self.mesh.ndim))
            holdings.append(Holding(part, tuple(np.atleast_1d(self.mesh.array[selection]).reshape(-1).tolist())))
        return tuple(holdings)

    def replicas(self, rank: int) -> tuple[int, ...]:
        """Return the ranks that hold the same values as this one, including itself, in the order of the mesh.

        >>> Layout(Mesh((2, 2)), [Shard(0), Replicate()], (4,)).replicas(1)
        (0, 1)
        """
        coordinate = self.mesh.coordinate(rank)
        selection = tuple(
            slice(None) if isinstance(placement, Replicate) else index
            for placement, index in zip(self.placements, coordinate, strict=True)
        )
        return tuple(np.atleast_1d(self.mesh.array[selection]).reshape(-1).tolist())

    def cut_by(self, dim: int) -> tuple[int, ...]:
        """Return the mesh dimensions that shard a tensor dimension, in the order in which they apply.

        >>> Layout(Mesh((2, 2)), [Shard(0), Shard(0)], (8,), order=(1, 0)).cut_by(0)
        (1, 0)
        """
        return tuple(mesh_dim for mesh_dim, sharded in self._sharded if sharded == dim)

    @cached_property
    def is_partial(self) -> bool:
        """True if any placement is `Partial`."""
        return any(placement.is_partial() for placement in self.placements)

    @cached_property
    def is_replicated(self) -> bool:
        """True if all placements are `Replicate`."""
        return all(placement.is_replicate() for placement in self.placements)

    def replace(
        self,
        *,
        mesh: object | None = None,
        placements: Iterable[object] | None = None,
        shape: Iterable[int] | None = None,
        order: Iterable[int | str] | None = None,
    ) -> Layout:
        """Return the layout with some attributes replaced; the order is kept as long as the placements are.

        >>> print(Layout(Mesh((2,)), [Shard(0)], (4, 6)).replace(placements=[Shard(1)]))
        [4, 6] (0: S(1))
        """
        if order is None and placements is None and mesh is None:
            order = self.order
        return Layout(
            self.mesh if mesh is None else mesh,
            self.placements if placements is None else placements,
            self.shape if shape is None else shape,
            order,
        )

    def to_json(self) -> dict[str, Any]:
        """Return plain values for JSON. The default order is left out.

        >>> Layout(Mesh((2,)), [Shard(0)], (4,)).to_json()
        {'mesh': {'shape': [2]}, 'placements': [{'kind': 'shard', 'dim': 0}], 'shape': [4]}
        """
        value: dict[str, Any] = {
            "mesh": self.mesh.to_json(),
            "placements": [placement.to_json() for placement in self.placements],
            "shape": list(self.shape),
        }
        if self._reordered:
            value["order"] = list(self.order)
        return value

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Layout:
        """Build the layout from the output of `to_json`.

        >>> layout = Layout(Mesh((2,)), [Shard(0)], (4,))
        >>> Layout.from_json(layout.to_json()) is layout
        True
        """
        placements = [Placement.from_json(placement) for placement in value["placements"]]
        return cls(Mesh.from_json(value["mesh"]), placements, value["shape"], value.get("order"))

    @cached_property
    def _sharded(self) -> tuple[tuple[int, int], ...]:
        """(mesh dimension, tensor dimension) of every sharding, in the order in which they apply."""
        sharded = []
        for mesh_dim in self.order:
            placement = self.placements[mesh_dim]
            if isinstance(placement, Shard | Ragged):
                sharded.append((mesh_dim, placement.dim))
        return tuple(sharded)

    @cached_property
    def _pieces(self) -> tuple[tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]], ...]:
        """Starts and lengths of the pieces of each tensor dimension, with one axis per sharding, in order."""
        pieces = []
        for dim, extent in enumerate(self.shape):
            start, size = np.zeros((), np.int64), np.array(extent, np.int64)
            for mesh_dim in self.cut_by(dim):
                placement = self.placements[mesh_dim]
                if isinstance(placement, Ragged):
                    length = np.array(placement.sizes, np.int64)
                    step = np.cumsum(length) - length
                else:
                    ranks = self.mesh.shape[mesh_dim]
                    chunk = -(-size[..., None] // ranks)
                    step = np.minimum(chunk * np.arange(ranks), size[..., None])
                    length = np.minimum(chunk, size[..., None] - step)
                start, size = start[..., None] + step, length
            pieces.append((start, size))
        return tuple(pieces)

    @property
    def _reordered(self) -> bool:
        return self.order != tuple(range(self.mesh.ndim))

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"a Layout is frozen: cannot set {name!r}")

    def __reduce__(self) -> tuple[type[Layout], tuple[object, ...]]:
        return Layout, (self.mesh, self.placements, self.shape, self.order)

    def __str__(self) -> str:
        parts = []
        for mesh_dim, placement in enumerate(self.placements):
            position = ""
            if self._reordered and isinstance(placement, Shard | Ragged):
                sharding = self.cut_by(placement.dim)
                # "@0" applies first; shown only if the order is not left to right.
                position = f"@{sharding.index(mesh_dim)}" if len(sharding) > 1 else ""
            parts.append(f"{self.mesh.label(mesh_dim)}: {placement}{position}")
        return f"[{', '.join(map(str, self.shape))}] ({', '.join(parts)})"

    def __repr__(self) -> str:
        return f"Layout({self}, {self.mesh!r})"


def _intern(mesh: Mesh, placements: tuple[Placement, ...], shape: tuple[int, ...], order: tuple[int, ...]) -> Layout:
    key = (mesh, placements, shape, order)
    with _lock:
        layout = _interned.get(key)
        if layout is None:
            layout = object.__new__(Layout)
            layout.__dict__.update(mesh=mesh, placements=placements, shape=shape, order=order, attached=_NOTHING)
            _interned[key] = layout
    return layout


def _checked_placements(placements: Iterable[object], mesh: Mesh, shape: tuple[int, ...]) -> tuple[Placement, ...]:
    if isinstance(placements, Placement) or not isinstance(placements, Iterable):
        raise ArgumentTypeError(
            f"placements must be a sequence with one placement per mesh dimension, got {placements!r}"
        )
    converted = tuple(as_placement(placement) for placement in placements)
    if len(converted) != mesh.ndim:
        raise PlacementError(
            f"{mesh!r} has {mesh.ndim} dimensions, but {len(converted)} placements were given: "
            f"({', '.join(map(str, converted))}). Pass one per mesh dimension"
        )
    checked: list[Placement] = []
    for mesh_dim, placement in enumerate(converted):
        if isinstance(placement, Shard | Ragged | StridedShard):
            dim = placement.dim
            if not -len(shape) <= dim < len(shape):
                raise PlacementError(
                    f"{placement} on mesh dimension {mesh.label(mesh_dim)} is out of range: "
                    f"a tensor of shape {shape} has {len(shape)} dimensions"
                )
            if dim < 0:
                placement = _with_dim(placement, dim + len(shape))
        checked.append(placement)
    return tuple(checked)


def _with_dim(placement: Shard | Ragged | StridedShard, dim: int) -> Placement:
    match placement:
        case Shard():
            return Shard(dim)
        case Ragged():
            return Ragged(dim, placement.sizes)
        case StridedShard():
            return StridedShard(dim, placement.split_factor)


def _checked_order(order: Iterable[int | str] | None, placements: tuple[Placement, ...], mesh: Mesh) -> tuple[int, ...]:
    """Return the order of all mesh dimensions in canonical form, so that equal layouts have equal orders."""
    if order is None:
        return tuple(range(mesh.ndim))
    if not isinstance(order, Iterable) or isinstance(order, str):
        raise ArgumentTypeError(f"order must be a sequence of mesh dimensions, got {order!r}")
    dims_in_order = tuple(mesh.dim(which) for which in order)
    if sorted(dims_in_order) != list(range(mesh.ndim)):
        raise MeshError(f"order must name each of the {mesh.ndim} dimensions of {mesh!r} once, got {dims_in_order}")
    full = list(range(mesh.ndim))
    dims = [placement.dim if isinstance(placement, Shard | Ragged) else None for placement in placements]
    for dim in {dim for dim in dims if dim is not None}:
        slots = [mesh_dim for mesh_dim in range(mesh.ndim) if dims[mesh_dim] == dim]
        for slot, mesh_dim in zip(slots, (m for m in dims_in_order if dims[m] == dim), strict=True):
            full[slot] = mesh_dim
    return tuple(full)


def _check_ragged(
    placements: tuple[Placement, ...], order: tuple[int, ...], mesh: Mesh, shape: tuple[int, ...]
) -> None:
    sharded: set[int] = set()
    for mesh_dim in order:
        placement = placements[mesh_dim]
        if isinstance(placement, Ragged):
            if len(placement.sizes) != mesh.shape[mesh_dim]:
                raise PlacementError(
                    f"{placement} has {len(placement.sizes)} sizes, but mesh dimension {mesh.label(mesh_dim)} "
                    f"has {mesh.shape[mesh_dim]} ranks: give one size per rank"
                )
            if sum(placement.sizes) != shape[placement.dim]:
                raise PlacementError(
                    f"the sizes of {placement} add up to {sum(placement.sizes)}, but dimension {placement.dim} of "
                    "shape "
                    f"{shape} has {shape[placement.dim]}"
                )
            if placement.dim in sharded:
                raise PlacementError(
                    f"{placement} on mesh dimension {mesh.label(mesh_dim)} shards dimension {placement.dim} after "
                    "another "
                    "mesh dimension: Ragged sizes refer to the full dimension, so it must come first (see `order`)"
                )
        if isinstance(placement, Shard | Ragged):
            sharded.add(placement.dim)


def _resolve_strided(placements: tuple[Placement, ...], mesh: Mesh) -> tuple[tuple[Placement, ...], tuple[int, ...]]:
    """Convert PyTorch's strided shards to plain shards and an explicit order.

    A split factor is the number of pieces that mesh dimensions further right have made before. So, from right to left,
    each mesh dimension is inserted after as many of those already in the order as make that number of pieces.
    """
    order: list[int] = []
    for mesh_dim in reversed(range(mesh.ndim)):
        placement = placements[mesh_dim]
        position, pieces = 0, 1
        if isinstance(placement, Shard | StridedShard):
            factor = placement.split_factor if isinstance(placement, StridedShard) else 1
            while pieces != factor and position < len(order):
                before = placements[order[position]]
                if isinstance(before, Shard | StridedShard) and before.dim == placement.dim:
                    pieces *= mesh.shape[order[position]]
                position += 1
            if pieces != factor:
                raise PlacementError(
                    f"{placement} on mesh dimension {mesh.label(mesh_dim)} has split factor {factor}, which the mesh "
                    f"dimensions to its right do not give: {mesh!r} with {placements}"
                )
        order.insert(position, mesh_dim)
    plain = tuple(Shard(p.dim) if isinstance(p, StridedShard) else p for p in placements)
    return plain, tuple(order)


def attach(layout: Layout, value: Mapping[Any, Any]) -> None:
    """Keep a mapping of a higher layer with a layout, as `layout.attached`: equal layouts are one object."""
    layout.__dict__["attached"] = value


def detach_all() -> None:
    """Drop what is attached to any layout."""
    with _lock:
        for layout in list(_interned.values()):
            layout.__dict__["attached"] = _NOTHING
