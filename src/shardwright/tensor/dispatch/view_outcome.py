"""Ask torch, on meta tensors with global strides, what a view operator makes of them: a copy, or which strides."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor

from shardwright.tensor.base.strides import global_stride, is_contiguous, meta_of, record_strides
from shardwright.tensor.base.tagging import DTensorBase
from shardwright.tensor.dispatch.arguments import map_tensors, tensors_in
from shardwright.tensor.dispatch.shapes import call_on_meta

__all__ = ["UNCHANGED", "ViewOutcome", "record_result_strides", "view_outcome"]

# Operators that return an alias or a copy, as strides decide.
_BY_STRIDES = frozenset(("contiguous", "reshape", "flatten", "ravel", "reshape_as", "to"))


class ViewOutcome(NamedTuple):
    """What torch's operator does to a tensor of given strides."""

    copies: bool  # the result has memory of its own
    strides: tuple[tuple[int, ...] | None, ...] | None  # of the results that are not contiguous; None: all are


UNCHANGED = ViewOutcome(False, None)


def view_outcome(
    known: dict[Any, ViewOutcome], plan: Any, func: Any, args: Any, kwargs: dict[str, Any], first: DTensorBase
) -> ViewOutcome:
    """Return what a view operator does to tensors with these strides; `known` keeps the answers of a plan."""
    key = None if is_contiguous(first) else global_stride(first)
    shown = known.get(key)
    if shown is None:
        if len(known) >= 64:
            known.clear()
        shown = known[key] = _ask(plan.name, func, args, kwargs)
    return shown


def _ask(name: str, func: Any, args: Any, kwargs: dict[str, Any]) -> ViewOutcome:
    meta_args, meta_kwargs = map_tensors(args, kwargs, meta_of)  # type: ignore[arg-type]  # only DTensors are mapped
    try:
        found = call_on_meta(func, meta_args, meta_kwargs)
    except RuntimeError:
        if name == "view":
            raise  # no view of these strides, on any rank
        return UNCHANGED  # it has no meta kernel (`x.to("cpu")`, `bincount`), and strides do not decide about it
    given = next(tensors_in((*meta_args, *meta_kwargs.values())))
    by_strides = name in _BY_STRIDES and (name != "to" or "memory_format" in kwargs)
    copies = by_strides and all(value.untyped_storage()._cdata != given.untyped_storage()._cdata for value in found)
    strides = tuple(None if value.is_contiguous() else value.stride() for value in found)
    return ViewOutcome(copies, strides if any(value is not None for value in strides) else None)


def record_result_strides(
    results: Any, strides: Sequence[tuple[int, ...] | None], inputs: Sequence[Tensor], always: bool = False
) -> None:
    """Note the strides of results that are new tensors, where shards do not tell them."""
    found = [value for value in tensors_in((results,)) if isinstance(value, DTensorBase)]
    for value, stride in zip(found, strides, strict=False):
        if stride is not None and not any(value is other for other in inputs):
            record_strides(value, stride, always)
