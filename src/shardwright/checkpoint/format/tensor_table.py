"""The tensors of a checkpoint as columns: ten thousand of them cost a few arrays, however many ranks hold them."""

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
    """A tensor held as explicit regions, each by one rank: what a ShardedTensor is. They tile it.

    >>> pieces = Pieces((4,), (Region((0,), (3,)), Region((3,), (1,))), (0, 2))
    >>> pieces.of_rank(2)
    [1]
    """

    shape: tuple[int, ...]
    regions: tuple[Region, ...]
    ranks: tuple[int, ...]

    def of_rank(self, rank: int) -> list[int]:
        """The numbers of the regions that a rank holds."""
        return self._by_rank.get(rank, [])

    @cached_property
    def _by_rank(self) -> dict[int, list[int]]:
        found: dict[int, list[int]] = {}
        for number, rank in enumerate(self.ranks):
            found.setdefault(rank, []).append(number)
        return found


Sharding: TypeAlias = Layout | Pieces


@final
@dataclass(frozen=True, eq=False)
class TensorTable:
    """Every tensor's name, dtype and placing; `kinds` says which of `shardings` a tensor has, and of `dtypes`.

    A placing is a `Layout` or `Pieces`, its shape included. Tensors come in the order of the state.

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
        """The table of these tensors; equal layouts are kept once."""
        known: dict[int, int] = {}
        unique: list[Sharding] = []
        kinds = []
        for sharding in shardings:  # Layouts are interned: equal ones are one object
            number = known.get(id(sharding))
            if number is None:
                number = known[id(sharding)] = len(unique)
                unique.append(sharding)
            kinds.append(number)
        return cls(tuple(names), tuple(dtypes), np.array(itemsizes, np.int64), np.array(kinds, np.int64), tuple(unique))

    def __len__(self) -> int:
        return len(self.names)

    def sharding(self, tensor: int) -> Sharding:
        """Who holds which region of a tensor."""
        return self.shardings[int(self.kinds[tensor])]

    def shape(self, tensor: int) -> tuple[int, ...]:
        """The shape of a tensor."""
        return self.sharding(tensor).shape

    @cached_property
    def index(self) -> dict[str, int]:
        """The number of each name."""
        return {name: number for number, name in enumerate(self.names)}
