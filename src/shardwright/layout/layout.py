"""`Layout`: who holds which region of a tensor, answered by arithmetic."""

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
    """The region of every rank, as arrays: row i is the rank `ranks[i]`, in the mesh's order.

    >>> table = Layout(Mesh((2,)), [Shard(0)], (5,)).table()
    >>> table.ranks.tolist(), table.offsets.tolist(), table.sizes.tolist()
    ([0, 1], [[0], [3]], [[3], [2]])
    """

    ranks: npt.NDArray[np.int64]
    offsets: npt.NDArray[np.int64]
    sizes: npt.NDArray[np.int64]


@final
class Layout:
    """A tensor's shape spread over a mesh by placements, one per mesh dimension.

    It answers who holds what by arithmetic alone, for any rank, in any process. Layouts are interned: equal ones
    are one object, so comparing and hashing cost nothing.

    Where several mesh dimensions cut the same tensor dimension, the leftmost cuts first; `order` (mesh dimensions
    by number or name) says otherwise.

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
            raise LayoutError(f"tensor shape {shape} holds a negative size: sizes are 0 or more")
        checked = _checked_placements(placements, mesh, shape)
        if any(isinstance(placement, StridedShard) for placement in checked):
            if order is not None:
                raise PlacementError(f"placements {checked} carry an order of their own: do not give `order` as well")
            checked, order = _resolve_strided(checked, mesh)
        full_order = _checked_order(order, checked, mesh)
        _check_ragged(checked, full_order, mesh, shape)
        return _intern(mesh, checked, shape, full_order)

    @property
    def ndim(self) -> int:
        """How many dimensions the tensor has."""
        return len(self.shape)

    def region(self, rank: int) -> Region:
        """The region of the tensor that this rank holds; it may be empty.

        >>> Layout(Mesh((4,)), [Shard(0)], (5,)).region(2)
        Region[4:5]
        """
        coordinate = self.mesh.coordinate(rank)
        offset, size = [0] * len(self.shape), list(self.shape)
        for mesh_dim, dim in self._cuts:
            here = coordinate[mesh_dim]
            placement = self.placements[mesh_dim]
            if isinstance(placement, Ragged):
                offset[dim] += sum(placement.sizes[:here])
                size[dim] = placement.sizes[here]
            else:
                extent = size[dim]
                chunk = -(-extent // self.mesh.shape[mesh_dim])
                start = min(here * chunk, extent)
                offset[dim] += start
                size[dim] = min(chunk, extent - start)
        return region_unchecked(tuple(offset), tuple(size))

    def local_shape(self, rank: int) -> tuple[int, ...]:
        """The shape of the tensor that this rank holds.

        >>> Layout(Mesh((4,)), [Shard(0)], (5, 3)).local_shape(3)
        (0, 3)
        """
        return self.region(rank).size

    def table(self) -> RegionTable:
        """The region of every rank, as arrays: for thousands of ranks at once.

        >>> Layout(Mesh((2,)), [Shard(0)], (5,)).table().sizes.tolist()
        [[3], [2]]
        """
        mesh, ndim = self.mesh, len(self.shape)
        offsets = np.zeros((*mesh.shape, ndim), np.int64)
        sizes = np.empty_like(offsets)
        for dim in range(ndim):
            starts, lengths = self._pieces[dim]
            cutting = self.cut_by(dim)
            # Pieces have one axis per cutting mesh dimension, in cutting order: bring them to the mesh's order.
            axes = np.argsort(cutting)
            grid = tuple(mesh.shape[m] if m in cutting else 1 for m in range(mesh.ndim))
            offsets[..., dim] = starts.transpose(axes).reshape(grid)
            sizes[..., dim] = lengths.transpose(axes).reshape(grid)
        return RegionTable(mesh.array.reshape(-1), offsets.reshape(mesh.size, ndim), sizes.reshape(mesh.size, ndim))

    def regions(self) -> tuple[Holding, ...]:
        """Every region with the ranks that hold it, in row-major order of the mesh; empty ones are left out.

        Ranks that hold addends of one `Partial` region are listed together, as replicas are.

        >>> for region, ranks in Layout(Mesh((2, 2)), [Replicate(), Shard(0)], (4,)).regions():
        ...     print(region, ranks)
        [0:2] (0, 2)
        [2:4] (1, 3)
        """
        table, mesh = self.table(), self.mesh
        cutting = sorted(mesh_dim for mesh_dim, _ in self._cuts)
        others = [m for m in range(mesh.ndim) if m not in cutting]
        places = np.arange(mesh.size).reshape(mesh.shape).transpose(*cutting, *others)
        places = places.reshape(-1, int(np.prod([mesh.shape[m] for m in others], dtype=np.int64)))
        places = places[table.sizes[places[:, 0]].all(axis=1)]
        with gc_paused():
            offsets = map(tuple, table.offsets[places[:, 0]].tolist())
            sizes = map(tuple, table.sizes[places[:, 0]].tolist())
            owners = map(tuple, table.ranks[places].tolist())
            return tuple(map(Holding, map(region_unchecked, offsets, sizes), owners))

    def holders(self, region: Region) -> tuple[Holding, ...]:
        """Who holds any part of `region`: the parts, each with its ranks. It looks only where the parts are.

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
        found = []
        for places in product(*candidates):
            fixed: dict[int, int] = {}
            offset, size_ = [], []
            for dim, place in enumerate(places):
                starts, lengths = self._pieces[dim]
                index = np.unravel_index(place, starts.shape)
                fixed.update(zip(self.cut_by(dim), map(int, index), strict=True))
                offset.append(int(starts[index]))
                size_.append(int(lengths[index]))
            part = region.intersect(region_unchecked(tuple(offset), tuple(size_)))
            assert part is not None  # the candidates are those that meet it
            where = tuple(fixed.get(m, slice(None)) for m in range(self.mesh.ndim))
            found.append(Holding(part, tuple(np.atleast_1d(self.mesh.array[where]).reshape(-1).tolist())))
        return tuple(found)

    def replicas(self, rank: int) -> tuple[int, ...]:
        """The ranks that hold the very same values as this one, itself included, in the mesh's order.

        >>> Layout(Mesh((2, 2)), [Shard(0), Replicate()], (4,)).replicas(1)
        (0, 1)
        """
        coordinate = self.mesh.coordinate(rank)
        where = tuple(
            slice(None) if isinstance(placement, Replicate) else here
            for placement, here in zip(self.placements, coordinate, strict=True)
        )
        return tuple(np.atleast_1d(self.mesh.array[where]).reshape(-1).tolist())

    def cut_by(self, dim: int) -> tuple[int, ...]:
        """The mesh dimensions that cut a tensor dimension, first cut first.

        >>> Layout(Mesh((2, 2)), [Shard(0), Shard(0)], (8,), order=(1, 0)).cut_by(0)
        (1, 0)
        """
        return tuple(mesh_dim for mesh_dim, cut in self._cuts if cut == dim)

    @cached_property
    def is_partial(self) -> bool:
        """Whether any mesh dimension holds addends."""
        return any(placement.is_partial() for placement in self.placements)

    @cached_property
    def is_replicated(self) -> bool:
        """Whether every rank holds the whole value."""
        return all(placement.is_replicate() for placement in self.placements)

    def replace(
        self,
        *,
        mesh: object | None = None,
        placements: Iterable[object] | None = None,
        shape: Iterable[int] | None = None,
        order: Iterable[int | str] | None = None,
    ) -> Layout:
        """The same layout with something else changed; the order is kept while the placements are.

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
        """Plain values, for JSON. The order is left out where it is the usual one.

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
        """The layout that `to_json` wrote.

        >>> layout = Layout(Mesh((2,)), [Shard(0)], (4,))
        >>> Layout.from_json(layout.to_json()) is layout
        True
        """
        placements = [Placement.from_json(placement) for placement in value["placements"]]
        return cls(Mesh.from_json(value["mesh"]), placements, value["shape"], value.get("order"))

    @cached_property
    def _cuts(self) -> tuple[tuple[int, int], ...]:
        """(mesh dimension, tensor dimension) of everything that cuts, in cutting order."""
        cuts = []
        for mesh_dim in self.order:
            placement = self.placements[mesh_dim]
            if isinstance(placement, Shard | Ragged):
                cuts.append((mesh_dim, placement.dim))
        return tuple(cuts)

    @cached_property
    def _pieces(self) -> tuple[tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]], ...]:
        """Per tensor dimension: where its pieces start and how long they are, an axis per cut, in cutting order."""
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
            turn = ""
            if self._reordered and isinstance(placement, Shard | Ragged):
                cutting = self.cut_by(placement.dim)
                # "@0" cuts first: said only where it is not simply left to right.
                turn = f"@{cutting.index(mesh_dim)}" if len(cutting) > 1 else ""
            parts.append(f"{self.mesh.label(mesh_dim)}: {placement}{turn}")
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
        raise ArgumentTypeError(f"placements {placements!r} are not a sequence: give one placement per mesh dimension")
    given = tuple(as_placement(placement) for placement in placements)
    if len(given) != mesh.ndim:
        raise PlacementError(
            f"{mesh!r} has {mesh.ndim} dimensions, but {len(given)} placements were given: "
            f"({', '.join(map(str, given))}). Give one per mesh dimension"
        )
    checked: list[Placement] = []
    for mesh_dim, placement in enumerate(given):
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
    """A full order of mesh dimensions, in the one form in which equal layouts have equal orders."""
    if order is None:
        return tuple(range(mesh.ndim))
    if not isinstance(order, Iterable) or isinstance(order, str):
        raise ArgumentTypeError(f"order {order!r} is not a sequence of mesh dimensions")
    given = tuple(mesh.dim(which) for which in order)
    if sorted(given) != list(range(mesh.ndim)):
        raise MeshError(
            f"order {given} is not an arrangement of the {mesh.ndim} dimensions of {mesh!r}: name each once"
        )
    full = list(range(mesh.ndim))
    dims = [placement.dim if isinstance(placement, Shard | Ragged) else None for placement in placements]
    for dim in {dim for dim in dims if dim is not None}:
        slots = [mesh_dim for mesh_dim in range(mesh.ndim) if dims[mesh_dim] == dim]
        for slot, mesh_dim in zip(slots, (m for m in given if dims[m] == dim), strict=True):
            full[slot] = mesh_dim
    return tuple(full)


def _check_ragged(
    placements: tuple[Placement, ...], order: tuple[int, ...], mesh: Mesh, shape: tuple[int, ...]
) -> None:
    cut: set[int] = set()
    for mesh_dim in order:
        placement = placements[mesh_dim]
        if isinstance(placement, Ragged):
            if len(placement.sizes) != mesh.shape[mesh_dim]:
                raise PlacementError(
                    f"{placement} gives {len(placement.sizes)} sizes for mesh dimension {mesh.label(mesh_dim)} "
                    f"of {mesh.shape[mesh_dim]} ranks: give one size per rank"
                )
            if sum(placement.sizes) != shape[placement.dim]:
                raise PlacementError(
                    f"{placement} adds up to {sum(placement.sizes)}, but dimension {placement.dim} of shape {shape} "
                    f"has {shape[placement.dim]}"
                )
            if placement.dim in cut:
                raise PlacementError(
                    f"{placement} on mesh dimension {mesh.label(mesh_dim)} cuts dimension {placement.dim} after "
                    "another mesh dimension has: Ragged sizes are of the whole dimension, so it must cut first "
                    "(see `order`)"
                )
        if isinstance(placement, Shard | Ragged):
            cut.add(placement.dim)


def _resolve_strided(placements: tuple[Placement, ...], mesh: Mesh) -> tuple[tuple[Placement, ...], tuple[int, ...]]:
    """PyTorch's strided shards as plain shards and an explicit order.

    A split factor is the number of pieces that mesh dimensions further right have made before. So from right to
    left, each mesh dimension goes in after just so many of those that are placed already.
    """
    order: list[int] = []
    for mesh_dim in reversed(range(mesh.ndim)):
        placement = placements[mesh_dim]
        place, pieces = 0, 1
        if isinstance(placement, Shard | StridedShard):
            factor = placement.split_factor if isinstance(placement, StridedShard) else 1
            while pieces != factor and place < len(order):
                before = placements[order[place]]
                if isinstance(before, Shard | StridedShard) and before.dim == placement.dim:
                    pieces *= mesh.shape[order[place]]
                place += 1
            if pieces != factor:
                raise PlacementError(
                    f"{placement} on mesh dimension {mesh.label(mesh_dim)} has split factor {factor}, which no mesh "
                    f"dimensions to its right make: {mesh!r} with {placements}"
                )
        order.insert(place, mesh_dim)
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
