"""The tensors of a checkpoint as columns: ten thousand of them are a few arrays, whatever the number of ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias, final

import numpy as np
import numpy.typing as npt

from shardwright.layout import Layout, Region

__all__ = ["Pieces", "Sharding", "TensorTable"]

Integers: TypeAlias = npt.NDArray[np.int64]


@final
@dataclass(frozen=True, eq=False)
class Pieces:
    """A tensor stored as explicit regions, each held by one rank, that tile it, like a ShardedTensor.

    >>> pieces = Pieces((4,), (Region((0,), (3,)), Region((3,), (1,))), (0, 2))
    >>> pieces.of_rank(2)
    [1]
    """

    shape: tuple[int, ...]
    regions: tuple[Region, ...]
    ranks: tuple[int, ...]

    def of_rank(self, rank: int) -> list[int]:
        """Return the indices of the regions that a rank holds."""
        return self._by_rank.get(rank, [])

    @cached_property
    def _by_rank(self) -> dict[int, list[int]]:
        numbers_by_rank: dict[int, list[int]] = {}
        for number, rank in enumerate(self.ranks):
            numbers_by_rank.setdefault(rank, []).append(number)
        return numbers_by_rank


Sharding: TypeAlias = Layout | Pieces


@final
@dataclass(frozen=True, eq=False)
class TensorTable:
    """The name, dtype and sharding of every tensor; `kinds` has the index of each tensor's sharding in `shardings`.

    A sharding is a `Layout` or `Pieces`, and includes the shape. Tensors are in the order of the state.

    >>> from shardwright.layout import Mesh, Shard
    >>> rows = Layout(Mesh((2,)), [Shard(0)], (4, 2))
    >>> table = TensorTable.of(["a", "b"], ["float32", "int8"], [4, 1], [rows, rows])
    >>> table.shape(1), len(table.shardings), table.itemsizes.tolist()
    ((4, 2), 1, [4, 1])
    """

    names: tuple[str, ...]
    dtypes: tuple[str, ...]
    itemsizes: Integers
    kinds: Integers
    shardings: tuple[Sharding, ...]

    @classmethod
    def of(
        cls, names: Sequence[str], dtypes: Sequence[str], itemsizes: Sequence[int], shardings: Sequence[Sharding]
    ) -> TensorTable:
        """Return the table of these tensors, with equal shardings stored once."""
        kind_of: dict[int, int] = {}
        unique: list[Sharding] = []
        kinds = []
        for sharding in shardings:  # Layouts are interned: equal ones are the same object
            number = kind_of.get(id(sharding))
            if number is None:
                number = kind_of[id(sharding)] = len(unique)
                unique.append(sharding)
            kinds.append(number)
        return cls(tuple(names), tuple(dtypes), np.array(itemsizes, np.int64), np.array(kinds, np.int64), tuple(unique))

    def __len__(self) -> int:
        return len(self.names)

    def sharding(self, tensor: int) -> Sharding:
        """Return the sharding of a tensor: which rank holds which region."""
        return self.shardings[int(self.kinds[tensor])]

    def shape(self, tensor: int) -> tuple[int, ...]:
        """Return the shape of a tensor."""
        return self.sharding(tensor).shape

    @cached_property
    def index(self) -> dict[str, int]:
        """The index of each name."""
        return {name: number for number, name in enumerate(self.names)}
