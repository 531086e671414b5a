"""Elements written, or added up, where tensors of numbers say: `scatter`, `index_add`, `x[i, j] = v`.

Along a dimension of the target that is cut, every rank writes what belongs to its part: behind its own rows a rank
has one more, for all the rest. Where the values are cut and are added up, the results are partial sums.
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
from shardwright.tensor.rules.index.gather import advanced_labels, located
from shardwright.tensor.rules.shared.index_range import check_range
from shardwright.tensor.rules.shared.neighbourhood import connected_zero
from shardwright.tensor.rules.shared.pick import cutting

__all__ = ["written_strategies"]


def _with_one_more(target: Tensor, dim: int) -> Tensor:
    shape = (*target.shape[:dim], 1, *target.shape[dim + 1 :])
    return torch.cat([target, target.new_zeros(shape)], dim)


def _given_back(func: Any, target: Tensor, result: Tensor) -> Tensor:
    """The result, in the target itself where that is what was asked for."""
    name, inplace = canonical_name(func)
    return target.copy_(result) if inplace or name == "__setitem__" else result.contiguous()


def written_strategies(
    input: Operand, indices: Sequence[Operand | None], values: Operand | None, accumulate: bool = False
) -> Strategies | None:
    """`x[:, i, j] = values`, or one number where that is None, into `input` where it is."""
    numbers = [index for index in indices if index is not None]
    ins, out = advanced_labels(input, indices)
    operands, terms = [input, *numbers], None
    if values is not None:
        shape = _chosen_shape(input, numbers, out)
        first = len(shape) - values.ndim
        if first < 0:
            return None
        torch.empty(values.shape, device="meta").expand(shape)  # torch's own check, with global sizes, on every rank
        ins.append([out[first + d] if size == shape[first + d] else None for d, size in enumerate(values.shape)])
        operands.append(values)
        terms = [[0], [len(operands) - 1]]
    reduction = "sum" if accumulate and terms is not None else None
    # What is added at several places alike would be added in part only, were the places cut.
    whole: set[Label] = {label for label in out if isinstance(label, tuple) and label not in ins[-1]}
    at = index_strategies(operands, ins, [ins[0]], terms=terms, reduction=reduction, whole=whole)
    return Strategies(at, run=_write_own(input, indices, values is not None, accumulate), written_back=True)


def _chosen_shape(input: Operand, numbers: Sequence[Operand], out: Labels) -> tuple[int, ...]:
    """Return the shape of what is chosen, by its labels: torch would ask a 0-dimensional index for its value."""
    chosen: tuple[int, ...] = torch.broadcast_shapes(*(index.shape for index in numbers))  # type: ignore[no-untyped-call]  # torch leaves it out
    sizes: dict[Label, int] = {("chosen", d): size for d, size in enumerate(chosen)}
    sizes |= dict(enumerate(input.shape))
    return tuple(sizes[label] for label in out)


def _write_own(input: Operand, indices: Sequence[Operand | None], is_tensor: bool, accumulate: bool) -> Run:
    dims = [dim for dim, index in enumerate(indices) if index is not None]

    def run(context: LocalContext) -> Local | None:
        layout = context.ins[0]
        cut = [dim for dim in dims if layout.cut_by(dim)]
        if not cut:
            return None
        region = layout.region(context.rank)

        def local(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
            target, *given = tensors_in((*args, *kwargs.values()))
            values = given.pop() if is_tensor else torch.tensor(args[2], device=target.device)
            inside, places = located(canonical_name(func)[0], given, dims, region, input.shape)
            if any(not region.size[dim] for dim in cut[1:]):
                kept = target + connected_zero(values) if values.requires_grad else target.clone()
                return _given_back(func, target, kept)
            first = dims.index(cut[0])
            places[first] = torch.where(inside, places[first], region.size[cut[0]])
            each = iter(places)
            where = [None if index is None else next(each) for index in indices]
            longer = _with_one_more(target, cut[0])
            result = torch.ops.aten.index_put(longer, where, values.to(target.dtype), accumulate)
            return _given_back(func, target, result.narrow(cut[0], 0, region.size[cut[0]]))

        return local

    return run


@rule("index_put")
def _index_put(input: Operand, indices: Any, values: Operand, accumulate: bool = False) -> Strategies | None:
    numbers = [index for index in indices if index is not None]
    masks = any(index.dtype in (torch.bool, torch.uint8) for index in numbers)
    if masks or not numbers or len(indices) > input.ndim:
        return None
    return written_strategies(input, indices, values, accumulate)


@composite("index_put")
def _put_masked(input: Any, indices: Any, values: Any, accumulate: bool = False) -> Any:
    """By one mask: as `x[mask] = values` does it."""
    if accumulate or len(indices) != 1 or indices[0].dtype != torch.bool or input.dtype != values.dtype:
        return NotImplemented
    if layout_of(input).is_partial:
        return NotImplemented
    put = input.clone()
    put[indices[0]] = values
    return put


def _onto_own(name: str, input: Operand, place: int, wraps: bool = False) -> Run:
    """The local call of a write along one dimension of the target, where that is cut."""
    write = getattr(torch, name)

    def run(context: LocalContext) -> Local | None:
        layout = context.ins[0]
        if not layout.cut_by(place):
            return None
        region = layout.region(context.rank)

        def local(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
            target, index = list(tensors_in((*args, *kwargs.values())))[:2]
            if not wraps:
                check_range(name, index, input.shape[place])
            inside, (found,) = located(name, [index], [place], region, input.shape)
            changed = iter((_with_one_more(target, place), torch.where(inside, found, region.size[place])))

            def swap(value: Any) -> Any:
                return next(changed, value) if isinstance(value, Tensor) else value

            result = write(*map(swap, args), **{key: swap(value) for key, value in kwargs.items()})
            return _given_back(func, target, result.narrow(place, 0, region.size[place]))

        return local

    return run


def _linear(name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[bool, bool]:
    """Whether a write is linear in target and source, and whether writes from several ranks add up."""
    if name == "scatter":
        return not args and "reduce" not in kwargs, False
    if name == "scatter_add":
        return True, True
    how = args[0] if args else kwargs.get("reduce")
    includes = args[1] if len(args) > 1 else kwargs.get("include_self", True)
    return how in ("sum", "mean"), how == "sum" and includes


def _scattered(name: str) -> Callable[..., Strategies | None]:
    """A rule for writes of `src` where `index` says, along one dimension."""

    def answer(
        input: Operand, dim: int, index: Operand, src: Any = None, *args: Any, **kwargs: Any
    ) -> Strategies | None:
        source = src if src is not None else kwargs.pop("value", None)
        if input.ndim != index.ndim or not input.ndim:
            return None
        place = input.dim(dim)
        operands = [input, index, *([source] if isinstance(source, Operand) else [])]
        if any(operand.ndim not in (0, input.ndim) for operand in operands):
            return None
        full = [operand for operand in operands if operand.ndim]
        # Along the dimension written to, only index and source go together.
        sizes = [{operand.shape[d] for operand in full[d == place :]} for d in range(input.ndim)]
        alike = [len(found) == 1 for found in sizes]
        target: list[Label] = [d if alike[d] or d == place else None for d in range(input.ndim)]
        chosen = [("i" if alike[d] else None) if d == place else label for d, label in enumerate(target)]
        ins = [target, chosen, chosen if operands[-1].ndim else []][: len(operands)]
        linear, adds = _linear(name, args, kwargs) if len(full) == 3 else (False, False)
        whole: set[Label] = set() if adds else {"i"}
        at = index_strategies(
            operands,
            ins,
            [target],
            terms=[[0], [2]] if linear else None,
            reduction="sum" if adds else None,
            whole=whole,
        )
        return Strategies(at, run=_onto_own(name, input, place), written_back=True)

    return answer


def _fitted(name: str) -> Callable[..., Any]:
    """Where the numbers see the beginning only of a cut dimension beside theirs, that part is written to alone."""
    write: Callable[..., Any] = getattr(torch, name)

    def compose(input: Any, dim: int, index: Any, src: Any = None, *args: Any, **kwargs: Any) -> Any:
        if input.ndim != index.ndim or not input.ndim:
            return NotImplemented
        source = (src,) if src is not None else ()
        place, layout = dim % input.ndim, layout_of(input)
        for d in range(input.ndim):
            size = index.shape[d]
            if isinstance(src, DTensorBase) and src.ndim == input.ndim and size < src.shape[d]:
                return write(input, dim, index, src.narrow(d, 0, size), *args, **kwargs)
            if d != place and size < input.shape[d] and cutting(layout, d) and (source or "value" in kwargs):
                part = write(input.narrow(d, 0, size), dim, index, *source, *args, **kwargs)
                return input.slice_scatter(part, d, 0, size)
        return NotImplemented

    return compose


for _name in ("scatter", "scatter_add", "scatter_reduce"):
    rule(_name)(_scattered(_name))
    composite(_name)(_fitted(_name))


def _along_index(name: str, adds: bool, linear: bool) -> Callable[..., Strategies | None]:
    """A rule for writes of slices of `source` to the places of one dimension that `index` lists."""

    def answer(
        input: Operand, dim: int, index: Operand, source: Any = None, *_: Any, **named: Any
    ) -> Strategies | None:
        source = named.get("value") if source is None else source
        if not input.ndim:
            return None
        place = input.dim(dim)
        target: list[Label] = list(range(input.ndim))
        operands: list[Operand] = [input, index]
        ins: list[Labels] = [target, ["i"] * index.ndim]
        if isinstance(source, Operand):
            if source.ndim not in (0, input.ndim):
                return None
            operands.append(source)
            ins.append([("i" if index.ndim else None) if d == place else d for d in target][: source.ndim])
        terms = [[0], [2]] if linear and len(operands) == 3 and operands[2].ndim else None
        sums = adds and terms is not None
        whole: set[Label] = set() if sums else {"i"}
        at = index_strategies(operands, ins, [target], terms=terms, reduction="sum" if sums else None, whole=whole)
        return Strategies(at, run=_onto_own(name, input, place, wraps=name == "index_fill"), written_back=True)

    return answer


rule("index_add")(_along_index("index_add", adds=True, linear=True))
rule("index_copy")(_along_index("index_copy", adds=False, linear=True))
rule("index_fill")(_along_index("index_fill", adds=False, linear=False))
rule("index_reduce")(_along_index("index_reduce", adds=False, linear=False))
