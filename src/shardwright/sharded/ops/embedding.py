"""`torch.nn.functional.embedding` with a sharded table: every rank looks up indices of its own."""

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
    input: Any,  # torch's own names: they may be given by keyword
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

    how = Lookup(max_norm, norm_type, scale_grad_by_freq, sparse)
    rows, wanted = fetch_rows(table, prepare, how, "embedding with a ShardedTensor")
    if not len(rows):  # torch cannot differentiate looking nothing up twice
        return rows.view(*wanted.inverse.shape, table.shape[1])
    return functional.embedding(wanted.inverse, rows, wanted.place_of(padding))


def table_of(weight: Any, what: str) -> ShardedTensorBase:
    """The weight, which must be a sharded matrix: all ranks see alike whether it is."""
    if not isinstance(weight, ShardedTensorBase):
        raise UnsupportedError(
            f"{what}: the weight is a {type(weight).__name__}: the weight is the ShardedTensor, and what each rank "
            "gives beside it is plain"
        )
    refuse_nested(weight, what)
    if weight.ndim != 2:
        raise ShardError(
            f"{what}: the weight is a ShardedTensor of size {list(weight.shape)}: two dimensions are needed"
        )
    return weight


def padding_row(padding_idx: Any, rows: int) -> int | None:
    """The row that `padding_idx` names; negative ones count from the end.

    >>> padding_row(-1, 10)
    9
    """
    if padding_idx is None:
        return None
    if not isinstance(padding_idx, int):
        raise ArgumentTypeError(f"padding_idx {padding_idx!r} is a {type(padding_idx).__name__}: a row is needed")
    if not -rows <= padding_idx < rows:
        raise ShardError(f"padding_idx {padding_idx} is not a row of a table of {rows} rows")
    return padding_idx % rows
