"""Functions that torch writes in Python, taken apart: their body runs with interception on, so inner calls dispatch.

Such a function begins by asking `has_torch_function(...)` and hands itself over if so. Run with globals in which that
answer is no, its own code goes on to the functions it is made of, and reads global sizes on the way.

On the way it may make tensors of its own, of sizes and constants: the same on every rank, so they are replicates. A
plain tensor of the user's is not: it is refused before a body is entered, and wherever the user's code was called.
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

__all__ = ["made_by_torch", "python_body", "writes_to_intermediates"]

_MARK = "__shardwright_body__"  # among the globals of a function that is run without its first question
# Functions of their arguments alone, which hand themselves over to nobody.
_OPEN = frozenset(("torch.masked._ops", "torch.nn.utils.rnn"))


def _no(*_: Any) -> bool:
    return False


@lru_cache(maxsize=1024)
def python_body(func: Any) -> FunctionType | None:
    """The function without its first question, or None where it is not written in Python."""
    if not isinstance(func, FunctionType):
        return None
    if "if_true" in func.__code__.co_freevars:
        return None  # one of two functions (unique with or without counts), both of which would ask for this one again
    wrapped = func.__dict__.get("__wrapped__")
    if wrapped is not None and not isinstance(wrapped, FunctionType):
        return None  # a C function that `constructors` has replaced
    if isinstance(wrapped, FunctionType) and "has_torch_function" in func.__code__.co_names:
        func = wrapped  # Tensor.__rsub__ and its like: a decorator asks the question
    names = {name for name in func.__code__.co_names if name.startswith("has_torch_function")}
    overrides: dict[str, Any] = {_MARK: True, **dict.fromkeys(names, _no)}
    if "overrides" in func.__code__.co_names:
        overrides["torch"] = _Torch()  # nn.init asks torch.overrides
    body = FunctionType(
        func.__code__, {**func.__globals__, **overrides}, func.__name__, func.__defaults__, func.__closure__
    )
    body.__kwdefaults__ = func.__kwdefaults__
    return body


@lru_cache(maxsize=1024)
def writes_to_intermediates(func: Any) -> bool:
    """Return whether a function of torch's writes in place to tensors that it made of its arguments.

    Where an argument is a partial sum, so may they be, and a partial sum cannot be clamped in place: such arguments
    are summed up first. Functions with an argument `inplace` write to what they were given, and are not meant.
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
    """torch, in which nobody overrides anything."""

    overrides = _Overrides()

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def made_by_torch() -> bool:
    """Whether a plain tensor in the call being made can only be one that torch's own code has made, on every rank.

    The call comes from a body that was entered, or from a module or function of torch's to which, or in which, the
    user has given no plain tensor; none of the user's code is between.
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
    """Whether there is a plain tensor among these, numbers apart."""
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
