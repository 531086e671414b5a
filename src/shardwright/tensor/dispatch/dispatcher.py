"""The dispatcher: every torch function called with a DTensor arrives here, unless its plan is cached.

In order: methods of DTensor itself; operators with a composition or a rule; functions written in Python, by their
body; everything else on replicated tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from shardwright.errors import InPlaceError
from shardwright.tensor.base import trace
from shardwright.tensor.base.registry import Op, canonical_name, operator
from shardwright.tensor.base.tagging import DTensorBase, disabled, tag_replicated
from shardwright.tensor.dispatch.arguments import admit_plain_tensors, map_tensors, tensors_in
from shardwright.tensor.dispatch.autocast import call_with_autocast
from shardwright.tensor.dispatch.decompose import original_function, python_body, writes_to_intermediates
from shardwright.tensor.dispatch.execute import call_by_rule
from shardwright.tensor.dispatch.fallback import call_replicated
from shardwright.tensor.dispatch.foreach import LISTS, call_on_lists
from shardwright.tensor.dispatch.numbers import read_numbers
from shardwright.tensor.dispatch.refusals import refuse
from shardwright.tensor.dispatch.reshape_in_place import RESHAPES, reshape_in_place
from shardwright.tensor.dispatch.write_through import (
    is_lookup_result,
    overwrite,
    refuse_unwritable,
    tensors_written_with,
)
from shardwright.tensor.gradients import engine
from shardwright.tensor.random.local import refuse_plain_draws
from shardwright.tensor.redistribute.implicit import completed

__all__ = ["PASS_FUNCTIONS", "intercept", "listen"]

# Computed from the local tensor alone, with the same result on every rank.
PASS = frozenset(
    (
        "is_floating_point",
        "is_complex",
        "is_signed",
        "is_contiguous",
        "element_size",
        "get_device",
        "is_pinned",
        "is_shared",
        "is_inference",
        "is_conj",
        "is_neg",
        "requires_grad_",
        "dim_order",
        "_is_view",
        "_is_zerotensor",
        "is_distributed",
        "is_coalesced",
        "register_post_accumulate_grad_hook",
        "share_memory_",
        "record_stream",
        "is_tensor",
        "has_names",
        "_use_count",
        "result_type",
        "can_cast",
        "__hash__",
        "type_hint",
        "_nested_tensor_size",
        "_backward_hooks",
        "storage_offset",
        "storage_type",
        "_dimI",
        "_dimV",
        "_has_symbolic_sizes_strides",
    )
)
PASS_FUNCTIONS = frozenset(
    function for name in PASS for home in (torch, Tensor) if (function := getattr(home, name, None)) is not None
)


def intercept(func: Any, types: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Call a torch function some of whose arguments are DTensors, and return its result."""
    func = original_function(func)
    name, inplace = canonical_name(func)
    if name == "__get__" or name == "__set__":
        return _attribute(func, args)
    full = name + "_" * inplace
    if full in PASS:
        return disabled(func, types, args, kwargs)
    own = _own_method(full) or _own_method(getattr(func, "__name__", full))  # __dlpack__ is "dlpack"
    if own is not None and args and isinstance(args[0], DTensorBase):
        return own(*args, **kwargs)
    if name == "backward" or name == "grad":
        return getattr(engine, name)(*args, **kwargs)
    if name in LISTS:
        with trace.operation(name):
            return call_on_lists(name, inplace, func, args, kwargs)
    if not args and "input" in kwargs and "condition" not in kwargs:
        kwargs = dict(kwargs)
        args = (kwargs.pop("input"),)  # torch's name for the first argument
    refuse(name, func)
    if ("axis" in kwargs or "keepdims" in kwargs) and name != "segment_reduce":  # numpy's names, which torch takes too
        kwargs = {{"axis": "dim", "keepdims": "keepdim"}.get(key, key): value for key, value in kwargs.items()}
    read, named = read_numbers(name, func, args, kwargs)
    if read is not args and not any(isinstance(tensor, DTensorBase) for tensor in tensors_in((*read, *named.values()))):
        return func(*read, **named)  # plain.view(n, 3): only the numbers were DTensors
    args, kwargs = admit_plain_tensors(full, read, named)
    if "out" in kwargs:
        if kwargs["out"] is not None:
            return _into(func, args, kwargs)
        kwargs = {key: value for key, value in kwargs.items() if key != "out"}
    return _call(name, inplace, func, args, kwargs)


_listeners: list[Callable[[str, Any, Any, dict[str, Any]], None]] = []


@contextmanager
def listen(callback: Callable[[str, Any, Any, dict[str, Any]], None]) -> Iterator[None]:
    """Call back for every operator inside the context, with its name, function and arguments. Needs an open trace."""
    _listeners.append(callback)
    try:
        yield
    finally:
        _listeners.remove(callback)


def _call(name: str, inplace: bool, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    op = operator(name)
    if torch._C._is_any_autocast_enabled() and not inplace and op is not None and op.composite is not None:
        return call_with_autocast(
            name, lambda args, kwargs: _call_cast(op, name, False, func, args, kwargs), args, kwargs
        )
    return _call_cast(op, name, inplace, func, args, kwargs)


def _call_cast(op: Op | None, name: str, inplace: bool, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    for callback in _listeners:
        callback(name, func, args, kwargs)
    with trace.operation(name) as record:
        if inplace and name in RESHAPES:
            return reshape_in_place(name, func, args[0], args[1:], kwargs)
        if inplace and args and is_lookup_result(args[0]) and name != "detach":
            return overwrite(func, *args, **kwargs)
        if op is not None and not _is_another_operator(func, kwargs):
            if op.composite is not None and not inplace:
                result = op.composite(*args, **kwargs)
                if result is not NotImplemented:
                    return result
            if op.rule is not None:
                result = call_by_rule(op, inplace, func, args, kwargs)
                if result is not NotImplemented:
                    return result
        body = python_body(func)
        if body is not None:
            if writes_to_intermediates(func):
                args, kwargs = map_tensors(args, kwargs, lambda tensor: completed(name, tensor))  # type: ignore[arg-type]  # only DTensors are mapped
            return body(*args, **kwargs)
        record.fell_back = True
        return call_replicated(name, func, args, kwargs)


def _is_another_operator(func: Any, kwargs: dict[str, Any]) -> bool:
    """Return whether a Python function calls another operator than its name suggests; its body is run instead.

    `F.relu(x, inplace=True)` calls `relu_`; `nn.init.normal_` calls `Tensor.normal_` without gradients.
    """
    return bool(kwargs.get("inplace")) or getattr(func, "__module__", None) == "torch.nn.init"


def _attribute(func: Any, args: Any) -> Any:
    """Call a getter or setter: that of DTensor if it has one, else that of the local tensor."""
    attribute: Any = func.__self__
    name: str = (attribute.fget if isinstance(attribute, property) else attribute).__name__  # type: ignore[union-attr]  # torch's properties have getters
    refuse(name, None)
    own = DTensorBase.concrete.__dict__.get(name)
    if isinstance(own, property):
        if func.__name__ == "__get__":
            return own.fget(args[0])  # type: ignore[misc]  # DTensor's properties all have getters
        if own.fset is not None:
            return own.fset(*args)
    return disabled(func, (), args, {})


def _own_method(name: str) -> Callable[..., Any] | None:
    own = DTensorBase.concrete.__dict__.get(name)
    return own if callable(own) else None


def _into(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Call with `out=`: compute the result, then write it to the given tensors, which keep their layouts."""
    out = kwargs.pop("out")
    targets = out if isinstance(out, list | tuple) else (out,)
    for target in targets:
        if not isinstance(target, DTensorBase):
            raise InPlaceError(f"{canonical_name(func)[0]}: `out` must be a DTensor, got a plain tensor")
    refuse_plain_draws(canonical_name(func)[0])
    result = func(*args, **kwargs)
    results = result if isinstance(result, list | tuple) else (result,)
    for target, value in zip(targets, results, strict=True):
        _refuse_out(canonical_name(func)[0], target, value)
    for target, value in zip(targets, results, strict=True):  # all checks passed
        if not isinstance(value, DTensorBase):  # torch.eye(3, out=x): the same on every rank
            value = tag_replicated(value, target._layout.mesh)
        with torch.no_grad():
            target.copy_(value)
    return type(result)(targets) if hasattr(type(result), "n_fields") else out


def _refuse_out(name: str, target: DTensorBase, value: Tensor) -> None:
    """Raise InPlaceError if a result cannot be written to a tensor given as `out`."""
    if tuple(target.shape) != tuple(value.shape):
        raise InPlaceError(
            f"{name}: `out` has layout {target._layout}, but the result has shape {tuple(value.shape)}; a DTensor "
            "cannot be resized"
        )
    if not torch.can_cast(value.dtype, target.dtype):
        raise InPlaceError(f"{name}: `out` of {target.dtype} cannot hold the result of {value.dtype}")
    for tensor in tensors_written_with(name, target):
        refuse_unwritable(name, tensor, records=False)  # `out=` is never recorded
