"""embedding_bag and segment_reduce."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812  # torch's own short name

from shardwright.tensor.base.registry import composite, rule
from shardwright.tensor.base.strategy import Label, Labels, Local, LocalContext, Operand, Strategies, index_strategies
from shardwright.tensor.dispatch.fallback import call_replicated
from shardwright.tensor.rules.nn.embedding import refuse_sparse
from shardwright.tensor.rules.shared.index_range import check_range

__all__: list[str] = []

BAGS, ROWS, COLUMNS = "bags", "rows", "columns"


@composite("embedding_bag")
def _embedding_bag_with_max_norm(*args: Any, **kwargs: Any) -> Any:
    """max_norm renormalises the looked-up rows in place: call torch on replicated tensors."""
    refuse_sparse("embedding_bag", kwargs.get("sparse", False))
    if kwargs.get("max_norm") is None:
        return NotImplemented
    return call_replicated("embedding_bag", F.embedding_bag, args, kwargs)


@rule("embedding_bag")
def _embedding_bag(
    input: Operand,
    weight: Operand,
    offsets: Any = None,
    *rest: Any,
    mode: Any = None,
    scale_grad_by_freq: bool = False,
    per_sample_weights: Operand | None = None,
    include_last_offset: bool = False,
    padding_idx: int | None = None,
    **_: Any,
) -> Strategies | None:
    """nn.functional's, with the mode as a string; torch's own has four results and other arguments."""
    if rest or not isinstance(mode, str) or input.dtype.is_floating_point:
        return None
    bags: Labels = [BAGS, None] if input.ndim == 2 else [None]
    labelled: list[tuple[Operand | None, Labels]] = [(input, bags), (weight, [ROWS, COLUMNS]), (offsets, [None])]
    labelled += [(per_sample_weights, bags)]
    given = [(operand, labels) for operand, labels in labelled if operand is not None]
    operands, ins = [operand for operand, _ in given], [labels for _, labels in given]
    linear = None if mode == "max" else [[1] if per_sample_weights is None else [1, len(given) - 1]]
    # A maximum over sharded rows has no gradient; and frequencies of a shard are not those of the batch.
    whole: set[Label] = {ROWS, BAGS} if scale_grad_by_freq else {ROWS} if mode == "max" else set()
    at = index_strategies(operands, ins, [[BAGS, COLUMNS]], terms=linear, whole=whole)
    count = input.shape[0] if input.ndim == 2 else offsets.shape[0] - include_last_offset
    run = partial(_local_bags, rows=weight.shape[0], padding=padding_idx)
    return Strategies(at, run=run, shapes=((count, weight.shape[1]),))


def _local_bags(context: LocalContext, rows: int, padding: int | None) -> Local | None:
    """Sum this rank's rows of every bag."""
    table = context.ins[1]
    if not table.cut_by(0):
        return None
    region = table.region(context.rank)
    first, count = region.offset[0], region.size[0]
    result = context.outs[0].local_shape(context.rank)
    ignored = None if padding is None else padding % rows

    def local(_: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        input, weight = args
        check_range("embedding_bag", input, rows)
        weights = kwargs.get("per_sample_weights")
        if not count:  # still depends on all inputs with a gradient: every rank has the same graph
            zero = 0.0 if weights is None else weights.flatten()[:0].sum()
            return (weight.sum(0) + zero).expand(result).clone()
        inside = (input >= first) & (input < first + count)
        counted = torch.ones_like(inside) if ignored is None else input != ignored
        factors = (inside & counted).to(weight.dtype)
        factors = factors if weights is None else factors * weights
        rest = {"mode": "sum", "include_last_offset": kwargs.get("include_last_offset", False)}
        offsets = kwargs.get("offsets")
        total = F.embedding_bag(
            torch.where(inside, input - first, 0), weight, offsets, per_sample_weights=factors, **rest
        )
        if kwargs["mode"] == "sum":
            return total
        ones, counts = weight.new_ones(1, 1), counted.to(weight.dtype)
        return total / F.embedding_bag(
            torch.zeros_like(input), ones, offsets, per_sample_weights=counts, **rest
        ).clamp_min(1)

    return local


@rule("segment_reduce")
def _segment_reduce(
    data: Operand,
    reduce: str,
    *,
    lengths: Operand | None = None,
    indices: Any = None,
    offsets: Operand | None = None,
    axis: int = 0,
    unsafe: bool = False,
    initial: Any = None,
) -> Strategies | None:
    """Lengths vary along the dimensions before the axis, and are shared by those after it."""
    del unsafe
    given = [operand for operand in (lengths, offsets) if operand is not None]
    if indices is not None or len(given) != 1 or axis < 0:
        return None
    labels: Labels = [None if dim == axis else dim for dim in range(data.ndim)]
    linear = [[0]] if reduce in ("sum", "mean") and not initial else None
    segments = given[0].shape[-1] - (offsets is not None)
    shape = (*data.shape[:axis], segments, *data.shape[axis + 1 :])
    at = index_strategies([data, *given], [labels, labels[: axis + 1]], [labels], terms=linear)
    return Strategies(at, run=partial(_segments, axis=axis), shapes=(shape,))


def _segments(context: LocalContext, axis: int) -> Local | None:
    """torch rejects inputs without segments: return an empty result that depends on the data."""
    result = context.outs[0].local_shape(context.rank)
    if 0 not in result:
        return None
    return lambda _, args, __: args[0].sum(axis, keepdim=True).expand(result).clone()
