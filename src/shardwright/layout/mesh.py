"""`Mesh`: ranks arranged in a grid, as a pure value."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from functools import cached_property
from math import prod
from typing import Any, final
from weakref import WeakValueDictionary

import numpy as np
import numpy.typing as npt

from shardwright.errors import ArgumentTypeError, MeshError
from shardwright.layout.integers import integer, integers

__all__ = ["Mesh"]

_interned: WeakValueDictionary[tuple[object, ...], Mesh] = WeakValueDictionary()
_lock = threading.Lock()


@final
class Mesh:
    """Ranks arranged in a grid: shape, optional dimension names, and the rank at each position. No process group.

    Meshes are interned: equal meshes are the same object, so comparing and hashing are cheap.

    >>> mesh = Mesh((2, 2), names=("dp", "tp"))
    >>> mesh
    Mesh(dp=2, tp=2)
    >>> mesh.coordinate(3), mesh.rank_at((1, 0))
    ((1, 1), 2)
    >>> Mesh((2, 2), ("dp", "tp")) is mesh
    True
    """

    shape: tuple[int, ...]
    names: tuple[str, ...] | None
    ranks: Sequence[int]  # row-major

    def __new__(
        cls, shape: Iterable[int], names: Iterable[str] | None = None, ranks: Iterable[int] | None = None
    ) -> Mesh:
        shape = integers(shape, "mesh shape")
        if any(size < 1 for size in shape):
            raise MeshError(f"every dimension of a mesh must have at least one rank, got shape {shape}")
        checked_names = _checked_names(names, shape)
        checked_ranks = _checked_ranks(ranks, shape)
        key = (shape, checked_names, checked_ranks)
        with _lock:
            mesh = _interned.get(key)
            if mesh is None:
                mesh = super().__new__(cls)
                mesh.__dict__.update(shape=shape, names=checked_names, ranks=checked_ranks)
                _interned[key] = mesh
        return mesh

    @classmethod
    def of(cls, value: object) -> Mesh:
        """Convert `value` to a mesh: a `Mesh`, a `torch.distributed` `DeviceMesh`, or a shape.

        >>> Mesh.of((2, 4))
        Mesh(2, 4)
        """
        if isinstance(value, Mesh):
            return value
        ranks = getattr(value, "mesh", None)
        if ranks is not None and hasattr(value, "mesh_dim_names"):  # a DeviceMesh, recognised by its attributes
            return cls(ranks.shape, value.mesh_dim_names, ranks.flatten().tolist())
        if isinstance(value, Sequence) and not isinstance(value, str):
            return cls(value)
        raise ArgumentTypeError(
            f"expected a Mesh, a DeviceMesh or a shape such as (2, 4), got {type(value).__name__}: {value!r}"
        )

    @property
    def ndim(self) -> int:
        """The number of dimensions."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """The number of ranks."""
        return len(self.ranks)

    @cached_property
    def array(self) -> npt.NDArray[np.int64]:
        """The ranks as a read-only array of the mesh's shape.

        >>> Mesh((2, 2)).array.tolist()
        [[0, 1], [2, 3]]
        """
        array = np.array(self.ranks, np.int64).reshape(self.shape)
        array.flags.writeable = False
        return array

    def __contains__(self, rank: object) -> bool:
        return rank in (self.ranks if isinstance(self.ranks, range) else self._positions)

    def position(self, rank: int) -> int:
        """Return the row-major position of this rank.

        >>> Mesh((2,), ranks=(5, 7)).position(7)
        1
        """
        try:
            return self.ranks.index(rank) if isinstance(self.ranks, range) else self._positions[rank]
        except (KeyError, ValueError):
            raise MeshError(f"rank {rank!r} is not in {self!r}: its ranks are {_abbreviated(self.ranks)}") from None

    def coordinate(self, rank: int) -> tuple[int, ...]:
        """Return the coordinate of this rank in the grid.

        >>> Mesh((2, 3)).coordinate(5)
        (1, 2)
        """
        position = self.position(rank)
        coordinate = []
        for size in reversed(self.shape):
            position, index = divmod(position, size)
            coordinate.append(index)
        return tuple(reversed(coordinate))

    def rank_at(self, coordinate: Sequence[int]) -> int:
        """Return the rank at this coordinate.

        >>> Mesh((2, 3)).rank_at((1, 2))
        5
        """
        if len(coordinate) != self.ndim or not all(0 <= c < n for c, n in zip(coordinate, self.shape, strict=True)):
            raise MeshError(f"coordinate {tuple(coordinate)} is not in {self!r} of shape {self.shape}")
        position = 0
        for index, size in zip(coordinate, self.shape, strict=True):
            position = position * size + index
        return self.ranks[position]

    def dim(self, which: int | str) -> int:
        """Return the index of a mesh dimension, given its index (negative counts from the end) or its name.

        >>> Mesh((2, 4), ("dp", "tp")).dim("tp")
        1
        """
        if isinstance(which, str):
            if which not in (self.names or ()):
                raise MeshError(f"mesh dimension {which!r} is not in {self!r}: its names are {self.names}")
            return self.names.index(which)  # type: ignore[union-attr]  # just found there
        number = integer(which, "mesh dimension")
        if not -self.ndim <= number < self.ndim:
            raise MeshError(f"mesh dimension {number} is out of range for {self!r} of {self.ndim} dimensions")
        return number % self.ndim

    def peers(self, rank: int, dim: int | str) -> tuple[int, ...]:
        """Return the ranks that differ from this one only along one mesh dimension, including itself, in order.

        >>> Mesh((2, 2), ("dp", "tp")).peers(2, "dp")
        (0, 2)
        """
        axis = self.dim(dim)
        coordinate = list(self.coordinate(rank))
        line = []
        for i in range(self.shape[axis]):
            coordinate[axis] = i
            line.append(self.rank_at(coordinate))
        return tuple(line)

    def label(self, dim: int) -> str:
        """Return the name of a mesh dimension, or its index as text."""
        return self.names[dim] if self.names is not None else str(dim)

    def to_json(self) -> dict[str, Any]:
        """Return plain values for JSON. The default ranks 0, 1, 2, … are left out.

        >>> Mesh((2, 2), ("dp", "tp")).to_json()
        {'shape': [2, 2], 'names': ['dp', 'tp']}
        """
        value: dict[str, Any] = {"shape": list(self.shape)}
        if self.names is not None:
            value["names"] = list(self.names)
        if not isinstance(self.ranks, range):
            value["ranks"] = list(self.ranks)
        return value

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Mesh:
        """Build the mesh from the output of `to_json`.

        >>> Mesh.from_json({"shape": [2, 2], "names": ["dp", "tp"]})
        Mesh(dp=2, tp=2)
        """
        return cls(value["shape"], value.get("names"), value.get("ranks"))

    @cached_property
    def _positions(self) -> dict[int, int]:
        return {rank: position for position, rank in enumerate(self.ranks)}

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"a Mesh is frozen: cannot set {name!r}")

    def __reduce__(self) -> tuple[type[Mesh], tuple[object, ...]]:
        return Mesh, (self.shape, self.names, None if isinstance(self.ranks, range) else self.ranks)

    def __repr__(self) -> str:
        if self.names is None:
            inside = ", ".join(map(str, self.shape))
        else:
            inside = ", ".join(f"{name}={size}" for name, size in zip(self.names, self.shape, strict=True))
        return (
            f"Mesh({inside})" if isinstance(self.ranks, range) else f"Mesh({inside}, ranks={_abbreviated(self.ranks)})"
        )


def _checked_names(names: Iterable[str] | None, shape: tuple[int, ...]) -> tuple[str, ...] | None:
    if names is None:
        return None
    checked = tuple(names)
    if any(not isinstance(name, str) for name in checked) or isinstance(names, str):
        raise ArgumentTypeError(f"mesh names must be a sequence of str, got {names!r}")
    if len(checked) != len(shape):
        raise MeshError(f"mesh of shape {shape} needs {len(shape)} names, got {len(checked)}: {checked}")
    if len(set(checked)) != len(checked):
        raise MeshError(f"mesh names must be unique, got {checked}")
    return checked


def _checked_ranks(ranks: Iterable[int] | None, shape: tuple[int, ...]) -> Sequence[int]:
    size = prod(shape)
    if ranks is None:
        return range(size)
    checked = integers(ranks, "mesh ranks")
    if len(checked) != size:
        raise MeshError(f"mesh of shape {shape} needs {size} ranks, got {len(checked)}: {_abbreviated(checked)}")
    if any(rank < 0 for rank in checked):
        raise MeshError(f"mesh ranks must not be negative, got {min(checked)} in {_abbreviated(checked)}")
    if len(set(checked)) != size:
        twice = next(rank for i, rank in enumerate(checked) if rank in checked[:i])
        raise MeshError(f"mesh ranks must be unique, got {twice} twice in {_abbreviated(checked)}")
    # A range compares like the tuple, and answers in constant time.
    return range(size) if checked == tuple(range(size)) else checked


def _abbreviated(ranks: Sequence[int]) -> str:
    if isinstance(ranks, range) and len(ranks) > 1:
        return f"0 to {len(ranks) - 1}"
    shown = ", ".join(map(str, ranks[:8]))
    return f"({shown}, … {len(ranks)} in all)" if len(ranks) > 8 else f"({shown})"
