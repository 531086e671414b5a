"""The steps of a redistribution: values with the layouts before and after, and the number of elements transferred.

Every count is in elements and for one rank. Only the ranks of its two meshes take part in a step.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from typing import ClassVar, final

from shardwright.layout import Layout, Mesh
from shardwright.tensor.redistribute.schedule import held, missing, schedule

__all__ = [
    "AllGather",
    "AllReduce",
    "AllToAll",
    "Exchange",
    "ReduceScatter",
    "Scale",
    "Slice",
    "Step",
    "ToPartial",
    "largest_shard",
    "line",
    "piece",
    "volume",
]


@dataclass(frozen=True, slots=True)
class Step(ABC):
    """One step from the layout `before` to the layout `after`.

    >>> from shardwright.layout import Replicate, Shard
    >>> rows, whole = (Layout(Mesh((2,)), [p], (4, 6)) for p in (Shard(0), Replicate()))
    >>> Slice(whole, rows).received(0), AllGather(rows, whole, (0,)).received(0)
    (0, 12)
    """

    before: Layout
    after: Layout
    kind: ClassVar[str]

    @property
    def communicates(self) -> bool:
        """Whether the step sends anything between ranks."""
        return False

    def received(self, rank: int) -> int:  # noqa: ARG002  a local step receives nothing
        """Return the number of elements this rank receives from others."""
        return 0

    def sent(self, rank: int) -> int:  # noqa: ARG002  likewise
        """Return the number of elements this rank sends to others."""
        return 0

    def load(self) -> int:
        """Return an upper bound, the same on all ranks, of what any rank receives: it decides the number of rounds."""
        return 0

    def scratch(self, rank: int, rounds: int) -> int:  # noqa: ARG002  likewise
        """Return the elements of scratch memory needed besides input and output, given the number of rounds."""
        return 0

    @abstractmethod
    def __str__(self) -> str:
        """Describe the step for people."""


@final
@dataclass(frozen=True, slots=True)
class Slice(Step):
    """Every rank keeps a part of its local tensor.

    >>> from shardwright.layout import Replicate, Shard
    >>> print(Slice(Layout(Mesh((2,)), [Replicate()], (4,)), Layout(Mesh((2,)), [Shard(0)], (4,))))
    slice
    """

    kind: ClassVar[str] = "slice"

    def __str__(self) -> str:
        return self.kind


@dataclass(frozen=True, slots=True)
class _Transfer(Step):
    """A step that sends regions between ranks without reducing them."""

    @property
    def communicates(self) -> bool:
        return True

    def load(self) -> int:
        return max(largest_shard(self.before), largest_shard(self.after))

    def received(self, rank: int) -> int:
        return missing(self.before, self.after, rank)

    def sent(self, rank: int) -> int:
        return sum(message.volume for message in schedule(self.before, self.after, rank).sends)

    def scratch(self, rank: int, rounds: int) -> int:
        # A box sent to several peers is packed once.
        packed = {message.boxes: message.volume for message in schedule(self.before, self.after, rank).sends}
        return -(-(sum(packed.values()) + self.received(rank)) // rounds)


@final
@dataclass(frozen=True, slots=True)
class AllGather(_Transfer):
    """Gather shards along these mesh dimensions in one step: no rank ever holds more than its target.

    >>> from shardwright.layout import Replicate, Shard
    >>> rows, whole = (Layout(Mesh((4,), ("dp",)), [p], (8,)) for p in (Shard(0), Replicate()))
    >>> step = AllGather(rows, whole, (0,))
    >>> print(step, step.received(0), step.sent(0))
    all-gather over dp 6 6
    """

    mesh_dims: tuple[int, ...]
    kind: ClassVar[str] = "all-gather"

    def sent(self, rank: int) -> int:
        peers = line(self.before.mesh, self.mesh_dims, rank)
        return volume(self.before, rank) * (len(peers) - 1)

    def scratch(self, rank: int, rounds: int) -> int:
        return -(-(volume(self.before, rank) + volume(self.after, rank)) // rounds)

    def __str__(self) -> str:
        return f"{self.kind} over {_labels(self.before.mesh, self.mesh_dims)}"


@final
@dataclass(frozen=True, slots=True)
class AllToAll(_Transfer):
    """Turn shards of one tensor dimension into shards of another, over one mesh dimension.

    >>> from shardwright.layout import Shard
    >>> rows, columns = (Layout(Mesh((4,)), [Shard(dim)], (8, 8)) for dim in (0, 1))
    >>> step = AllToAll(rows, columns, 0)
    >>> print(step, step.received(0), step.sent(0))
    all-to-all over 0 12 12
    """

    mesh_dim: int
    kind: ClassVar[str] = "all-to-all"

    def __str__(self) -> str:
        return f"{self.kind} over {self.before.mesh.label(self.mesh_dim)}"


@final
@dataclass(frozen=True, slots=True)
class Exchange(_Transfer):
    """Send exactly the missing regions, point to point, between any two layouts on any two meshes.

    >>> from shardwright.layout import Ragged, Shard
    >>> even, ragged = (Layout(Mesh((2,)), [p], (8,)) for p in (Shard(0), Ragged(0, (1, 7))))
    >>> Exchange(even, ragged).received(1)
    3
    """

    kind: ClassVar[str] = "exchange"

    def __str__(self) -> str:
        return self.kind


@final
@dataclass(frozen=True, slots=True)
class ReduceScatter(Step):
    """Reduce partial values over one mesh dimension: each rank receives the others' values for its own shard.

    >>> from shardwright.layout import Partial, Shard
    >>> partial, rows = (Layout(Mesh((4,)), [p], (8,)) for p in (Partial(), Shard(0)))
    >>> step = ReduceScatter(partial, rows, 0, "sum")
    >>> print(step, step.received(0), step.sent(0))
    reduce-scatter(sum) over 0 6 6
    """

    mesh_dim: int
    op: str
    kind: ClassVar[str] = "reduce-scatter"

    @property
    def communicates(self) -> bool:
        return True

    def load(self) -> int:
        others = self.before.mesh.shape[self.mesh_dim] - 1
        return max(largest_shard(self.before), others * largest_shard(self.after))

    def received(self, rank: int) -> int:
        if rank not in self.before.mesh:
            return 0
        return volume(self.after, rank) * (self.before.mesh.shape[self.mesh_dim] - 1)

    def sent(self, rank: int) -> int:
        return volume(self.before, rank) - volume(self.after, rank)

    def scratch(self, rank: int, rounds: int) -> int:
        return -(-(volume(self.before, rank) + self.received(rank)) // rounds)

    def __str__(self) -> str:
        return f"{self.kind}({self.op}) over {self.before.mesh.label(self.mesh_dim)}"


@final
@dataclass(frozen=True, slots=True)
class AllReduce(Step):
    """Reduce partial values on every rank: a reduce-scatter and an all-gather of the flattened tensor.

    >>> from shardwright.layout import Partial, Replicate
    >>> partial, whole = (Layout(Mesh((4,)), [p], (8,)) for p in (Partial(), Replicate()))
    >>> step = AllReduce(partial, whole, (0,), "sum")
    >>> print(step, step.received(0), step.sent(0))
    all-reduce(sum) over 0 12 12
    """

    mesh_dims: tuple[int, ...]
    op: str
    kind: ClassVar[str] = "all-reduce"

    @property
    def communicates(self) -> bool:
        return True

    def load(self) -> int:
        return largest_shard(self.before)

    def received(self, rank: int) -> int:
        if rank not in self.before.mesh:
            return 0
        peers = line(self.before.mesh, self.mesh_dims, rank)
        whole = volume(self.before, rank)
        mine = piece(whole, len(peers), peers.index(rank))
        return (len(peers) - 1) * mine + whole - mine

    def sent(self, rank: int) -> int:
        return self.received(rank)

    def scratch(self, rank: int, rounds: int) -> int:
        # The reduce-scatter packs and receives the tensor once; the all-gather receives it once.
        return -(-2 * volume(self.before, rank) // rounds)

    def __str__(self) -> str:
        return f"{self.kind}({self.op}) over {_labels(self.before.mesh, self.mesh_dims)}"


@final
@dataclass(frozen=True, slots=True)
class Scale(Step):
    """Turn partial values of an average into those of a sum, or the reverse: multiply each by `factor`.

    >>> from shardwright.layout import Partial
    >>> average, total = (Layout(Mesh((4,)), [Partial(op)], (8,)) for op in ("avg", "sum"))
    >>> print(Scale(average, total, Fraction(1, 4)))
    scale by 1/4
    """

    factor: Fraction
    kind: ClassVar[str] = "scale"

    def __str__(self) -> str:
        return f"{self.kind} by {self.factor}"


@final
@dataclass(frozen=True, slots=True)
class ToPartial(Step):
    """Turn values into partial values along one mesh dimension.

    A shard is padded with the identity element. Of replicas, one keeps its values and the others become the identity
    element; all keep them if the reduction is idempotent (`avg`, `max`, `min`, `band`, `bor`).

    >>> from shardwright.layout import Partial, Replicate
    >>> whole, partial = (Layout(Mesh((4,)), [p], (8,)) for p in (Replicate(), Partial()))
    >>> print(ToPartial(whole, partial, 0, "sum"))
    to partial(sum) over 0
    """

    mesh_dim: int
    op: str
    kind: ClassVar[str] = "to partial"

    def __str__(self) -> str:
        return f"{self.kind}({self.op}) over {self.before.mesh.label(self.mesh_dim)}"


@lru_cache(maxsize=4096)
def largest_shard(layout: Layout) -> int:
    """Return an upper bound on the elements of any rank's shard, exact unless a dimension is sharded twice.

    >>> from shardwright.layout import Shard
    >>> largest_shard(Layout(Mesh((4,)), [Shard(0)], (5, 3)))
    6
    """
    volume = 1
    sizes = layout.table().sizes
    for dim in range(layout.ndim):
        volume *= int(sizes[:, dim].max())
    return volume


def volume(layout: Layout, rank: int) -> int:
    """Return the number of elements a rank holds; 0 if it is not in the mesh.

    >>> from shardwright.layout import Replicate
    >>> volume(Layout(Mesh((2,)), [Replicate()], (4, 6)), 1)
    24
    """
    region = held(layout, rank)
    return 0 if region is None else region.volume


@lru_cache(maxsize=4096)
def line(mesh: Mesh, mesh_dims: tuple[int, ...], rank: int) -> tuple[int, ...]:
    """Return the ranks that differ from this one in these mesh dimensions only, itself included, ascending.

    >>> line(Mesh((2, 2, 2)), (0, 2), 2)
    (2, 3, 6, 7)
    """
    coordinate = enumerate(mesh.coordinate(rank))
    index = tuple(slice(None) if mesh_dim in mesh_dims else position for mesh_dim, position in coordinate)
    return tuple(sorted(mesh.array[index].reshape(-1).tolist()))


def piece(extent: int, count: int, index: int) -> int:
    """Return the length of chunk `index` when `extent` elements are split in `count`, as `torch.chunk` does.

    >>> [piece(5, 4, index) for index in range(4)]
    [2, 2, 1, 0]
    """
    chunk = -(-extent // count)
    return max(0, min(chunk, extent - index * chunk))


def _labels(mesh: Mesh, mesh_dims: tuple[int, ...]) -> str:
    return ", ".join(mesh.label(mesh_dim) for mesh_dim in mesh_dims)
