"""`Placement`: how a tensor is distributed along one mesh dimension."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar, TypeGuard, final

from shardwright.errors import ArgumentTypeError, PlacementError
from shardwright.layout.integers import integer, integers

__all__ = ["Partial", "Placement", "Ragged", "Replicate", "Shard", "StridedShard", "as_placement"]

REDUCTIONS = ("sum", "avg", "max", "min", "product", "band", "bor", "bxor")


class Placement(ABC):
    """How a tensor is distributed along one mesh dimension: `Shard`, `Replicate`, `Partial` or `Ragged`.

    PyTorch's own placement objects are accepted wherever these are.

    >>> Shard(0).is_shard(), Shard(0).is_shard(1), Replicate().is_replicate(), Partial().is_partial()
    (True, False, True, True)
    """

    __slots__ = ()

    def is_shard(self, dim: int | None = None) -> bool:
        """True for `Shard` and `Ragged` (along `dim`, if given)."""
        return isinstance(self, Shard | Ragged) and (dim is None or self.dim == dim)

    def is_replicate(self) -> bool:
        """True for `Replicate`."""
        return isinstance(self, Replicate)

    def is_partial(self, op: str | None = None) -> bool:
        """True for `Partial` (with this reduction, if given)."""
        return isinstance(self, Partial) and (op is None or self.op == op)

    @abstractmethod
    def __str__(self) -> str:
        """Return the short form used by layouts: `S(0)`, `R`, `P(sum)`."""

    def to_json(self) -> dict[str, Any]:
        """Return plain values for JSON.

        >>> Shard(1).to_json()
        {'kind': 'shard', 'dim': 1}
        """
        fields = {name: getattr(self, name) for name in self.__match_args__}  # type: ignore[attr-defined]  # all are dataclasses
        return {"kind": type(self).__name__.lower()} | {k: list(v) if k == "sizes" else v for k, v in fields.items()}

    @staticmethod
    def from_json(value: dict[str, Any]) -> Placement:
        """Build the placement from the output of `to_json`.

        >>> Placement.from_json({"kind": "partial", "op": "max"})
        Partial('max')
        """
        fields = dict(value)
        kind = fields.pop("kind", None)
        kinds: dict[str, type[Placement]] = {
            "shard": Shard,
            "replicate": Replicate,
            "partial": Partial,
            "ragged": Ragged,
        }
        if kind not in kinds:
            raise PlacementError(f"unknown placement kind {kind!r}: expected one of {', '.join(kinds)}")
        if kind == "partial" and "op" in fields:
            fields["reduce_op"] = fields.pop("op")  # the name of the argument
        return kinds[kind](**fields)


@final
@dataclass(frozen=True, slots=True, repr=False)
class Shard(Placement):
    """Sharded along `dim` into one chunk per rank of the mesh dimension, sized as by `torch.chunk`.

    A negative `dim` counts from the end.

    >>> Shard(0), str(Shard(-1))
    (Shard(0), 'S(-1)')
    """

    dim: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "dim", integer(self.dim, "Shard dimension"))

    @staticmethod
    def local_shard_size_and_offset(curr_local_size: int, num_chunks: int, rank: int) -> tuple[int, int]:
        """Return the size of chunk number `rank` of a dimension, and the offset at which it begins.

        `curr_local_size` is the size of the dimension, or of the piece of it that is sharded further. The offset counts
        from the beginning of that piece; that of an empty chunk is its end.

        >>> [Shard.local_shard_size_and_offset(5, 4, rank) for rank in range(4)]
        [(2, 0), (2, 2), (1, 4), (0, 5)]
        """
        if num_chunks < 1 or not 0 <= rank < num_chunks or curr_local_size < 0:
            raise PlacementError(
                f"invalid chunk {rank} of {num_chunks} of a dimension of size {curr_local_size}: chunks are numbered "
                "from 0, and sizes must not be negative"
            )
        chunk = -(-curr_local_size // num_chunks)
        start = min(chunk * rank, curr_local_size)
        return min(chunk, curr_local_size - start), start

    def __repr__(self) -> str:
        return f"Shard({self.dim})"

    def __str__(self) -> str:
        return f"S({self.dim})"


@final
@dataclass(frozen=True, slots=True, repr=False)
class Replicate(Placement):
    """The same values on every rank of the mesh dimension.

    >>> Replicate(), str(Replicate())
    (Replicate(), 'R')
    """

    def __repr__(self) -> str:
        return "Replicate()"

    def __str__(self) -> str:
        return "R"


@final
@dataclass(frozen=True, slots=True, repr=False)
class Partial(Placement):
    """Every rank holds a partial value; the value of the tensor is their reduction by `op`.

    `reduce_op` is PyTorch's name for it, as an argument and as an attribute.

    >>> Partial(), str(Partial("max")), Partial(reduce_op="avg")
    (Partial('sum'), 'P(max)', Partial('avg'))
    """

    op: str = "sum"
    reductions: ClassVar[tuple[str, ...]] = REDUCTIONS

    def __init__(self, reduce_op: str = "sum") -> None:
        if reduce_op not in REDUCTIONS:
            raise PlacementError(f"unknown Partial op {reduce_op!r}: expected one of {', '.join(REDUCTIONS)}")
        object.__setattr__(self, "op", reduce_op)

    @property
    def reduce_op(self) -> str:
        """The reduction, under PyTorch's name."""
        return self.op

    def __repr__(self) -> str:
        return f"Partial({self.op!r})"

    def __str__(self) -> str:
        return f"P({self.op})"


@final
@dataclass(frozen=True, slots=True, repr=False)
class Ragged(Placement):
    """Sharded along `dim` into pieces of these sizes, one per rank of the mesh dimension; zeros are allowed.

    >>> Ragged(0, (3, 0, 5)), str(Ragged(0, (3, 0, 5)))
    (Ragged(0, (3, 0, 5)), 'S(0: 3+0+5)')
    """

    dim: int
    sizes: tuple[int, ...]

    def __init__(self, dim: int, sizes: Iterable[int]) -> None:
        checked = integers(sizes, "Ragged sizes")
        if any(size < 0 for size in checked):
            raise PlacementError(f"Ragged sizes must not be negative, got {checked}")
        object.__setattr__(self, "dim", integer(dim, "Ragged dimension"))
        object.__setattr__(self, "sizes", checked)

    def __repr__(self) -> str:
        return f"Ragged({self.dim}, {self.sizes})"

    def __str__(self) -> str:
        return f"S({self.dim}: {'+'.join(map(str, self.sizes))})"


@final
@dataclass(frozen=True, slots=True)
class StridedShard(Placement):
    """PyTorch's `_StridedShard`, as input only: a `Layout` converts it to an explicit order of mesh dimensions.

    `split_factor` is the number of pieces into which mesh dimensions further right have already split `dim`.
    """

    dim: int
    split_factor: int

    def __str__(self) -> str:
        return f"S({self.dim}, after {self.split_factor} pieces)"


def as_placement(value: object) -> Placement:
    """Convert `value` to a `Placement`. PyTorch's are recognised by the name of their type, without importing it.

    >>> as_placement(Shard(0))
    Shard(0)
    """
    if isinstance(value, Placement):
        return value
    if _is_torch_placement(value):
        match type(value).__name__:
            case "Shard":
                return Shard(value.dim)
            case "_StridedShard":
                return StridedShard(value.dim, value.split_factor)
            case "Replicate":
                return Replicate()
            case "Partial":
                return Partial(value.reduce_op)
            case name:
                raise PlacementError(f"{name} of torch.distributed.tensor is not supported: {value!r}")
    raise ArgumentTypeError(
        f"expected Shard(dim), Replicate(), Partial(op) or Ragged, got {type(value).__name__}: {value!r}"
    )


def _is_torch_placement(value: object) -> TypeGuard[Any]:
    return any(
        base.__name__ == "Placement" and base.__module__.startswith("torch.distributed") for base in type(value).__mro__
    )
