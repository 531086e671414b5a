"""Decompose torch functions that are written in Python: run their body, so that the inner calls are dispatched.

Such a function starts with a `has_torch_function(...)` check and passes itself to `__torch_function__` if it is true.
With globals in which the check returns False, its body runs, calls the inner functions and reads global sizes.

The body may create tensors from sizes and constants: they are the same on every rank, so they count as replicated. A
plain tensor of the user does not: it raises before a body is entered, and in user code that torch calls.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from functools import lru_cache
from types import FrameType, FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from shardwright.tensor.base.tagging import DTensorBase

__all__ = ["made_by_torch", "original_function", "python_body", "writes_to_intermediates"]

_MARK = "__shardwright_body__"  # in the globals of a body whose check is disabled
# Modules of functions that depend on their arguments alone and do not call `__torch_function__` themselves.
_OPEN = frozenset(("torch.masked._ops", "torch.nn.utils.rnn"))


# Functions of torch.nn.init: they look up their own name, which libraries such as transformers replace for a while.
_INIT = {name: func for name, func in vars(nn.init).items() if name.endswith("_") and isinstance(func, FunctionType)}


def _no(*_: Any) -> bool:
    return False


def original_function(func: Any) -> Any:
    """Return the function of torch.nn.init that was called, if `func` has replaced it in its module; else `func`."""
    if type(func) is FunctionType and func.__name__ in _INIT and func.__module__ != "torch.nn.init":
        return _INIT[func.__name__]
    return func


@lru_cache(maxsize=1024)
def python_body(func: Any) -> FunctionType | None:
    """Return the function body with its `has_torch_function` check disabled; None for C functions."""
    if not isinstance(func, FunctionType):
        return None
    if "if_true" in func.__code__.co_freevars:
        return None  # boolean_dispatch (unique with or without counts): both functions would dispatch to this one again
    wrapped = func.__dict__.get("__wrapped__")
    if wrapped is not None and not isinstance(wrapped, FunctionType):
        return None  # a C function that `constructors` has replaced
    if isinstance(wrapped, FunctionType) and "has_torch_function" in func.__code__.co_names:
        func = wrapped  # Tensor.__rsub__ and similar: a decorator makes the check
    names = {name for name in func.__code__.co_names if name.startswith("has_torch_function")}
    overrides: dict[str, Any] = {_MARK: True, **dict.fromkeys(names, _no)}
    if "overrides" in func.__code__.co_names:
        overrides["torch"] = _Torch()  # nn.init calls torch.overrides
    body = FunctionType(
        func.__code__, {**func.__globals__, **overrides}, func.__name__, func.__defaults__, func.__closure__
    )
    body.__kwdefaults__ = func.__kwdefaults__
    return body


@lru_cache(maxsize=1024)
def writes_to_intermediates(func: Any) -> bool:
    """Return whether a torch function writes in place to tensors computed from its arguments.

    If an argument is a partial sum, the intermediate may be one too, and cannot be clamped in place: such arguments
    are reduced first. Functions with an argument `inplace` write to their input, and are not included.
    """
    if not isinstance(func, FunctionType) or func.__module__ not in ("torch.nn.functional", "torch.functional"):
        return False
    code = func.__code__
    if "inplace" in code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]:
        return False
    return any(name.endswith("_") and not name.startswith("_") and hasattr(Tensor, name) for name in code.co_names)


class _Overrides:
    has_torch_function = staticmethod(_no)
    has_torch_function_unary = staticmethod(_no)
    has_torch_function_variadic = staticmethod(_no)


class _Torch:
    """The torch module with `torch.overrides` disabled."""

    overrides = _Overrides()

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def made_by_torch() -> bool:
    """Return whether a plain tensor in the current call must have been created by torch's own code, on every rank.

    This holds if the call comes from a decomposed body, or from a torch module or function that got no plain tensor
    from the user, with no user code in between.
    """
    frame: FrameType | None = sys._getframe(1)
    outermost = frame
    while frame is not None:
        if _MARK in frame.f_globals:
            return True
        name = frame.f_globals.get("__name__", "")
        if not name.startswith(("torch.", "shardwright.tensor.")):
            break
        if frame.f_code is _CALL_MODULE:
            module, *given = _arguments(frame)
            if _has_plain((*module.parameters(), *module.buffers())):
                return False
            if not _has_plain(given):
                return True
        outermost, frame = frame, frame.f_back
    assert outermost is not None
    return outermost.f_globals.get("__name__") in _OPEN and not _has_plain(_arguments(outermost))


_CALL_MODULE = nn.Module._call_impl.__code__


def _arguments(frame: FrameType) -> list[Any]:
    code = frame.f_code
    extra = bool(code.co_flags & 0x04) + bool(code.co_flags & 0x08)  # *args, **kwargs
    names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount + extra]
    return [frame.f_locals.get(name) for name in names]


def _has_plain(values: Iterable[Any]) -> bool:
    """Return whether these values contain a plain tensor, other than a 0-dimensional one without gradient."""
    for value in values:
        if isinstance(value, Tensor):
            if not isinstance(value, DTensorBase) and (value.ndim or value.requires_grad):
                return True
        elif isinstance(value, dict):
            if _has_plain(value.values()):
                return True
        elif isinstance(value, list | tuple) and _has_plain(value):
            return True
    return False
