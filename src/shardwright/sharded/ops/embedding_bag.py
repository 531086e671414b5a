"""`torch.nn.functional.embedding_bag` with a sharded table: every rank reduces its own bags."""

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
    input: Any,  # torch's parameter names
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

    def reduce(rows: Tensor, lookups: Distinct, **options: bool) -> Tensor:
        return functional.embedding_bag(
            lookups.inverse,
            rows,
            offsets,
            mode=mode,
            per_sample_weights=per_sample_weights,
            include_last_offset=include_last_offset,
            padding_idx=lookups.position(padding_row(padding_idx, table.shape[0])),
            **options,
        )

    def prepare() -> Distinct:
        lookups = distinct(table, input)
        _check_offsets(offsets, input)
        # Let torch validate the other arguments before any communication, on rows with a single column.
        column = torch.zeros(1, 1, dtype=table.dtype, device=input.device)
        rows = column.expand(len(lookups.indices), min(table.shape[1], 1))
        with torch.no_grad():
            reduce(rows, lookups, scale_grad_by_freq=scale_grad_by_freq, sparse=sparse)
        return lookups

    lookup = Lookup(max_norm, norm_type, scale_grad_by_freq, sparse)
    rows, lookups = fetch_rows(table, prepare, lookup, "embedding_bag with a ShardedTensor")
    return reduce(rows, lookups)


def _check_offsets(offsets: Any, indices: Tensor) -> None:
    """Raise unless offsets ascend from 0 within the input: otherwise torch's result depends on the build."""
    if not isinstance(offsets, Tensor) or indices.ndim != 1 or offsets.ndim != 1:
        return  # torch validates these combinations
    if offsets.dtype not in (torch.int32, torch.int64):
        raise ArgumentTypeError(f"offsets must be torch.int32 or torch.int64, got {offsets.dtype}")
    if not len(offsets):
        return
    if int(offsets[0]) != 0:
        raise ShardError(f"offsets[0] must be 0, got {int(offsets[0])}")
    if len(down := (offsets[1:] < offsets[:-1]).nonzero()):
        index = int(down[0]) + 1
        raise ShardError(
            f"offsets must ascend, but offsets[{index}] is {int(offsets[index])} and offsets[{index - 1}] is "
            f"{int(offsets[index - 1])}"
        )
    if int(offsets[-1]) > len(indices):
        raise ShardError(
            f"offsets[{len(offsets) - 1}] is {int(offsets[-1])}, but the input has only {len(indices)} indices"
        )
