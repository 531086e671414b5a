"""Writes by index tensors: `scatter`, `index_add`, `x[i, j] = v`.

Along a sharded dimension of the target, every rank writes the part of its shard; writes to other shards go to an
extra row behind its own. Sharded values that are accumulated give partial sums.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from shardwright.tensor.base.registry import canonical_name, composite, rule
from shardwright.tensor.base.strategy import (
    Label,
    Labels,
    Local,
    LocalContext,
    Operand,
    Run,
    Strategies,
    index_strategies,
)
from shardwright.tensor.base.tagging import DTensorBase, layout_of
from shardwright.tensor.dispatch.arguments import tensors_in
from shardwright.tensor.rules.index.gather import advanced_labels, locate
from shardwright.tensor.rules.shared.basic_index import sharded_over
from shardwright.tensor.rules.shared.index_range import check_range
from shardwright.tensor.rules.shared.neighbourhood import connected_zero

__all__ = ["index_put_strategies"]


def _with_extra_row(target: Tensor, dim: int) -> Tensor:
    shape = (*target.shape[:dim], 1, *target.shape[dim + 1 :])
    return torch.cat([target, target.new_zeros(shape)], dim)


def _write_back(func: Any, target: Tensor, result: Tensor) -> Tensor:
    """Return the result, written to the target if the call is in place."""
    name, inplace = canonical_name(func)
    return target.copy_(result) if inplace or name == "__setitem__" else result.contiguous()


def index_put_strategies(
    input: Operand, indices: Sequence[Operand | None], values: Operand | None, accumulate: bool = False
) -> Strategies | None:
    """Return the strategies of `x[:, i, j] = values` (a scalar if None), written in place."""
    index_tensors = [index for index in indices if index is not None]
    ins, out = advanced_labels(input, indices)
    operands, terms = [input, *index_tensors], None
    if values is not None:
        shape = _chosen_shape(input, index_tensors, out)
        first = len(shape) - values.ndim
        if first < 0:
            return None
        torch.empty(values.shape, device="meta").expand(shape)  # torch's own check, with global sizes, on every rank
        ins.append([out[first + d] if size == shape[first + d] else None for d, size in enumerate(values.shape)])
        operands.append(values)
        terms = [[0], [len(operands) - 1]]
    reduction = "sum" if accumulate and terms is not None else None
    # Values broadcast over index dimensions would be accumulated only in part if those were sharded.
    broadcast: set[Label] = {label for label in out if isinstance(label, tuple) and label not in ins[-1]}
    at = index_strategies(operands, ins, [ins[0]], terms=terms, reduction=reduction, whole=broadcast)
    return Strategies(at, run=_local_index_put(input, indices, values is not None, accumulate), written_back=True)


def _chosen_shape(input: Operand, index_tensors: Sequence[Operand], out: Labels) -> tuple[int, ...]:
    """Return the shape of the selection by its labels: torch would read the value of a 0-dimensional index."""
    chosen: tuple[int, ...] = torch.broadcast_shapes(*(index.shape for index in index_tensors))  # type: ignore[no-untyped-call]  # untyped in torch
    sizes: dict[Label, int] = {("chosen", d): size for d, size in enumerate(chosen)}
    sizes |= dict(enumerate(input.shape))
    return tuple(sizes[label] for label in out)


def _local_index_put(input: Operand, indices: Sequence[Operand | None], is_tensor: bool, accumulate: bool) -> Run:
    dims = [dim for dim, index in enumerate(indices) if index is not None]

    def run(context: LocalContext) -> Local | None:
        layout = context.ins[0]
        sharded = [dim for dim in dims if layout.cut_by(dim)]
        if not sharded:
            return None
        region = layout.region(context.rank)

        def local(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
            target, *given = tensors_in((*args, *kwargs.values()))
            values = given.pop() if is_tensor else torch.tensor(args[2], device=target.device)
            inside, local_indices = locate(canonical_name(func)[0], given, dims, region, input.shape)
            if any(not region.size[dim] for dim in sharded[1:]):
                kept = target + connected_zero(values) if values.requires_grad else target.clone()
                return _write_back(func, target, kept)
            first = dims.index(sharded[0])
            local_indices[first] = torch.where(inside, local_indices[first], region.size[sharded[0]])
            remaining = iter(local_indices)
            where = [None if index is None else next(remaining) for index in indices]
            longer = _with_extra_row(target, sharded[0])
            result = torch.ops.aten.index_put(longer, where, values.to(target.dtype), accumulate)
            return _write_back(func, target, result.narrow(sharded[0], 0, region.size[sharded[0]]))

        return local

    return run


@rule("index_put")
def _index_put(input: Operand, indices: Any, values: Operand, accumulate: bool = False) -> Strategies | None:
    index_tensors = [index for index in indices if index is not None]
    masks = any(index.dtype in (torch.bool, torch.uint8) for index in index_tensors)
    if masks or not index_tensors or len(indices) > input.ndim:
        return None
    return index_put_strategies(input, indices, values, accumulate)


@composite("index_put")
def _index_put_masked(input: Any, indices: Any, values: Any, accumulate: bool = False) -> Any:
    """By one mask: the same as `x[mask] = values`."""
    if accumulate or len(indices) != 1 or indices[0].dtype != torch.bool or input.dtype != values.dtype:
        return NotImplemented
    if layout_of(input).is_partial:
        return NotImplemented
    put = input.clone()
    put[indices[0]] = values
    return put


def _local_write(name: str, input: Operand, axis: int, wraps: bool = False) -> Run:
    """Return the local call of a write along one dimension of the target if it is sharded."""
    write = getattr(torch, name)

    def run(context: LocalContext) -> Local | None:
        layout = context.ins[0]
        if not layout.cut_by(axis):
            return None
        region = layout.region(context.rank)

        def local(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
            target, index = list(tensors_in((*args, *kwargs.values())))[:2]
            if not wraps:
                check_range(name, index, input.shape[axis])
            inside, (local_index,) = locate(name, [index], [axis], region, input.shape)
            changed = iter((_with_extra_row(target, axis), torch.where(inside, local_index, region.size[axis])))

            def swap(value: Any) -> Any:
                return next(changed, value) if isinstance(value, Tensor) else value

            result = write(*map(swap, args), **{key: swap(value) for key, value in kwargs.items()})
            return _write_back(func, target, result.narrow(axis, 0, region.size[axis]))

        return local

    return run


def _linearity(name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[bool, bool]:
    """Return whether a write is linear in target and source, and whether writes of several ranks sum up."""
    if name == "scatter":
        return not args and "reduce" not in kwargs, False
    if name == "scatter_add":
        return True, True
    reduce = args[0] if args else kwargs.get("reduce")
    includes = args[1] if len(args) > 1 else kwargs.get("include_self", True)
    return reduce in ("sum", "mean"), reduce == "sum" and includes


def _scatter_rule(name: str) -> Callable[..., Strategies | None]:
    """Return a rule for writes of `src` at `index` along one dimension."""

    def find_strategies(
        input: Operand, dim: int, index: Operand, src: Any = None, *args: Any, **kwargs: Any
    ) -> Strategies | None:
        source = src if src is not None else kwargs.pop("value", None)
        if input.ndim != index.ndim or not input.ndim:
            return None
        axis = input.dim(dim)
        operands = [input, index, *([source] if isinstance(source, Operand) else [])]
        if any(operand.ndim not in (0, input.ndim) for operand in operands):
            return None
        full = [operand for operand in operands if operand.ndim]
        # Along `axis`, only index and source have the same size.
        sizes = [{operand.shape[d] for operand in full[d == axis :]} for d in range(input.ndim)]
        same_size = [len(sizes_along) == 1 for sizes_along in sizes]
        target: list[Label] = [d if same_size[d] or d == axis else None for d in range(input.ndim)]
        chosen = [("i" if same_size[d] else None) if d == axis else label for d, label in enumerate(target)]
        ins = [target, chosen, chosen if operands[-1].ndim else []][: len(operands)]
        linear, adds = _linearity(name, args, kwargs) if len(full) == 3 else (False, False)
        whole: set[Label] = set() if adds else {"i"}
        at = index_strategies(
            operands,
            ins,
            [target],
            terms=[[0], [2]] if linear else None,
            reduction="sum" if adds else None,
            whole=whole,
        )
        return Strategies(at, run=_local_write(name, input, axis), written_back=True)

    return find_strategies


def _scatter_to_start(name: str) -> Callable[..., Any]:
    """If the index covers only the start of another, sharded dimension, write to that part only."""
    write: Callable[..., Any] = getattr(torch, name)

    def compose(input: Any, dim: int, index: Any, src: Any = None, *args: Any, **kwargs: Any) -> Any:
        if input.ndim != index.ndim or not input.ndim:
            return NotImplemented
        source = (src,) if src is not None else ()
        axis, layout = dim % input.ndim, layout_of(input)
        for d in range(input.ndim):
            size = index.shape[d]
            if isinstance(src, DTensorBase) and src.ndim == input.ndim and size < src.shape[d]:
                return write(input, dim, index, src.narrow(d, 0, size), *args, **kwargs)
            if d != axis and size < input.shape[d] and sharded_over(layout, d) and (source or "value" in kwargs):
                part = write(input.narrow(d, 0, size), dim, index, *source, *args, **kwargs)
                return input.slice_scatter(part, d, 0, size)
        return NotImplemented

    return compose


for _name in ("scatter", "scatter_add", "scatter_reduce"):
    rule(_name)(_scatter_rule(_name))
    composite(_name)(_scatter_to_start(_name))


def _index_write_rule(name: str, adds: bool, linear: bool) -> Callable[..., Strategies | None]:
    """Return a rule for writes of slices of `source` at the indices of one dimension."""

    def find_strategies(
        input: Operand, dim: int, index: Operand, source: Any = None, *_: Any, **named: Any
    ) -> Strategies | None:
        source = named.get("value") if source is None else source
        if not input.ndim:
            return None
        axis = input.dim(dim)
        target: list[Label] = list(range(input.ndim))
        operands: list[Operand] = [input, index]
        ins: list[Labels] = [target, ["i"] * index.ndim]
        if isinstance(source, Operand):
            if source.ndim not in (0, input.ndim):
                return None
            operands.append(source)
            ins.append([("i" if index.ndim else None) if d == axis else d for d in target][: source.ndim])
        terms = [[0], [2]] if linear and len(operands) == 3 and operands[2].ndim else None
        sums = adds and terms is not None
        whole: set[Label] = set() if sums else {"i"}
        at = index_strategies(operands, ins, [target], terms=terms, reduction="sum" if sums else None, whole=whole)
        return Strategies(at, run=_local_write(name, input, axis, wraps=name == "index_fill"), written_back=True)

    return find_strategies


rule("index_add")(_index_write_rule("index_add", adds=True, linear=True))
rule("index_copy")(_index_write_rule("index_copy", adds=False, linear=True))
rule("index_fill")(_index_write_rule("index_fill", adds=False, linear=False))
rule("index_reduce")(_index_write_rule("index_reduce", adds=False, linear=False))
