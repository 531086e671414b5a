"""The outcome of a view operator, by a call on meta tensors with global strides: a copy or not, and the strides."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor

from shardwright.tensor.base.strides import global_stride, is_contiguous, meta_of, record_strides
from shardwright.tensor.base.tagging import DTensorBase
from shardwright.tensor.dispatch.arguments import map_tensors, tensors_in
from shardwright.tensor.dispatch.shapes import call_on_meta

__all__ = ["UNCHANGED", "ViewOutcome", "record_result_strides", "view_outcome"]

# Operators that return an alias or a copy, depending on strides.
_BY_STRIDES = frozenset(("contiguous", "reshape", "flatten", "ravel", "reshape_as", "to"))


class ViewOutcome(NamedTuple):
    """What an operator does to a tensor with given strides."""

    copies: bool  # the result does not share memory
    strides: tuple[tuple[int, ...] | None, ...] | None  # of the results that are not contiguous; None: all are


UNCHANGED = ViewOutcome(False, None)


def view_outcome(
    known: dict[Any, ViewOutcome], plan: Any, func: Any, args: Any, kwargs: dict[str, Any], first: DTensorBase
) -> ViewOutcome:
    """Return what a view operator does to tensors with these strides; `known` is the plan's cache."""
    key = None if is_contiguous(first) else global_stride(first)
    outcome = known.get(key)
    if outcome is None:
        if len(known) >= 64:
            known.clear()
        outcome = known[key] = _outcome(plan.name, func, args, kwargs)
    return outcome


def _outcome(name: str, func: Any, args: Any, kwargs: dict[str, Any]) -> ViewOutcome:
    meta_args, meta_kwargs = map_tensors(args, kwargs, meta_of)  # type: ignore[arg-type]  # only DTensors are mapped
    try:
        results = call_on_meta(func, meta_args, meta_kwargs)
    except RuntimeError:
        if name == "view":
            raise  # these strides have no such view, on any rank
        return UNCHANGED  # no meta kernel (`x.to("cpu")`, `bincount`), and the result does not depend on strides
    given = next(tensors_in((*meta_args, *meta_kwargs.values())))
    by_strides = name in _BY_STRIDES and (name != "to" or "memory_format" in kwargs)
    copies = by_strides and all(value.untyped_storage()._cdata != given.untyped_storage()._cdata for value in results)
    strides = tuple(None if value.is_contiguous() else value.stride() for value in results)
    return ViewOutcome(copies, strides if any(value is not None for value in strides) else None)


def record_result_strides(
    results: Any, strides: Sequence[tuple[int, ...] | None], inputs: Sequence[Tensor], always: bool = False
) -> None:
    """Record the strides of results that are new tensors, if the shards do not determine them."""
    tensors = [value for value in tensors_in((results,)) if isinstance(value, DTensorBase)]
    for value, stride in zip(tensors, strides, strict=False):
        if stride is not None and not any(value is other for other in inputs):
            record_strides(value, stride, always)
