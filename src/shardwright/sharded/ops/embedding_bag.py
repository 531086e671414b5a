"""`torch.nn.functional.embedding_bag` with a sharded table: every rank reduces bags of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from shardwright.errors import ArgumentTypeError, ShardError
from shardwright.sharded.base.registry import implements
from shardwright.sharded.ops.embedding import padding_row, table_of
from shardwright.sharded.ops.rows import Distinct, Lookup, distinct, fetch_rows

__all__: list[str] = []


@implements(functional.embedding_bag)
def _embedding_bag(_: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Tensor:
    return _embed_bags(*args, **kwargs)


def _embed_bags(
    input: Any,  # torch's own names: they may be given by keyword
    weight: Any,
    offsets: Any = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    mode: str = "mean",
    sparse: bool = False,
    per_sample_weights: Tensor | None = None,
    include_last_offset: bool = False,
    padding_idx: int | None = None,
) -> Tensor:
    table = table_of(weight, "embedding_bag")

    def reduce(rows: Tensor, wanted: Distinct, **how: bool) -> Tensor:
        return functional.embedding_bag(
            wanted.inverse,
            rows,
            offsets,
            mode=mode,
            per_sample_weights=per_sample_weights,
            include_last_offset=include_last_offset,
            padding_idx=wanted.place_of(padding_row(padding_idx, table.shape[0])),
            **how,
        )

    def prepare() -> Distinct:
        wanted = distinct(table, input)
        _check_offsets(offsets, input)
        # What else may be wrong, torch says best, and before anything travels: of rows with a single column.
        column = torch.zeros(1, 1, dtype=table.dtype, device=input.device)
        rows = column.expand(len(wanted.indices), min(table.shape[1], 1))
        with torch.no_grad():
            reduce(rows, wanted, scale_grad_by_freq=scale_grad_by_freq, sparse=sparse)
        return wanted

    how = Lookup(max_norm, norm_type, scale_grad_by_freq, sparse)
    rows, wanted = fetch_rows(table, prepare, how, "embedding_bag with a ShardedTensor")
    return reduce(rows, wanted)


def _check_offsets(offsets: Any, given: Tensor) -> None:
    """Sees that offsets ascend from 0 within the input: of others, torch's result depends on the build."""
    if not isinstance(offsets, Tensor) or given.ndim != 1 or offsets.ndim != 1:
        return  # torch says which of these may go together
    if offsets.dtype not in (torch.int32, torch.int64):
        raise ArgumentTypeError(f"the offsets are {offsets.dtype}: they are torch.int32 or torch.int64")
    if not len(offsets):
        return
    if int(offsets[0]) != 0:
        raise ShardError(f"offsets[0] is {int(offsets[0])}: the first bag starts at 0")
    if len(down := (offsets[1:] < offsets[:-1]).nonzero()):
        place = int(down[0]) + 1
        raise ShardError(
            f"offsets[{place}] is {int(offsets[place])}, less than offsets[{place - 1}], {int(offsets[place - 1])}: "
            "bags follow one another"
        )
    if int(offsets[-1]) > len(given):
        raise ShardError(f"offsets[{len(offsets) - 1}] is {int(offsets[-1])}, and the input has {len(given)} indices")
