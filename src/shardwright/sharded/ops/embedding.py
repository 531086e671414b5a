"""`torch.nn.functional.embedding` with a sharded table: every rank looks up its own indices."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from torch.nn import functional

from shardwright.errors import ArgumentTypeError, ShardError, UnsupportedError
from shardwright.sharded.base.checks import refuse_nested
from shardwright.sharded.base.registry import implements
from shardwright.sharded.base.tensor_base import ShardedTensorBase
from shardwright.sharded.ops.rows import Distinct, Lookup, distinct, fetch_rows

__all__ = ["padding_row", "table_of"]


@implements(functional.embedding)
def _embedding(_: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Tensor:
    return _embed(*args, **kwargs)


def _embed(
    input: Any,  # torch's parameter names
    weight: Any,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Tensor:
    table = table_of(weight, "embedding")
    padding: int | None = None

    def prepare() -> Distinct:
        nonlocal padding
        padding = padding_row(padding_idx, table.shape[0])
        return distinct(table, input)

    options = Lookup(max_norm, norm_type, scale_grad_by_freq, sparse)
    rows, lookups = fetch_rows(table, prepare, options, "embedding with a ShardedTensor")
    if not len(rows):  # torch has no second derivative for an empty lookup
        return rows.view(*lookups.inverse.shape, table.shape[1])
    return functional.embedding(lookups.inverse, rows, lookups.position(padding))


def table_of(weight: Any, what: str) -> ShardedTensorBase:
    """Return the weight; raise, identically on all ranks, unless it is a sharded matrix."""
    if not isinstance(weight, ShardedTensorBase):
        raise UnsupportedError(
            f"{what}: the weight must be a ShardedTensor and the input a plain tensor, got a weight of type "
            f"{type(weight).__name__}"
        )
    refuse_nested(weight, what)
    if weight.ndim != 2:
        raise ShardError(
            f"{what}: the weight must have two dimensions, got a ShardedTensor of size {list(weight.shape)}"
        )
    return weight


def padding_row(padding_idx: Any, rows: int) -> int | None:
    """Return the row of `padding_idx`; negative values count from the end.

    >>> padding_row(-1, 10)
    9
    """
    if padding_idx is None:
        return None
    if not isinstance(padding_idx, int):
        raise ArgumentTypeError(f"padding_idx must be an int, got {padding_idx!r}")
    if not -rows <= padding_idx < rows:
        raise ShardError(f"padding_idx {padding_idx} is out of range for a table of {rows} rows")
    return padding_idx % rows
