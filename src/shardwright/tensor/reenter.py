"""Functions that torch writes in Python, taken apart: their body runs with interception on, so inner calls dispatch.

Such a function begins by asking `has_torch_function(...)` and hands itself over if so. Run with globals in which that
answer is no, its own code goes on to the functions it is made of, and reads global sizes on the way.
"""

from __future__ import annotations

from functools import lru_cache
from types import FunctionType
from typing import Any

import torch

__all__ = ["body_of"]


def _no(*_: Any) -> bool:
    return False


@lru_cache(maxsize=1024)
def body_of(func: Any) -> FunctionType | None:
    """The function without its first question, or None where it is not written in Python."""
    if not isinstance(func, FunctionType):
        return None
    if "if_true" in func.__code__.co_freevars:
        return None  # one of two functions (unique with or without counts), both of which would ask for this one again
    wrapped = func.__dict__.get("__wrapped__")
    if isinstance(wrapped, FunctionType) and "has_torch_function" in func.__code__.co_names:
        func = wrapped  # Tensor.__rsub__ and its like: a decorator asks the question
    names = {name for name in func.__code__.co_names if name.startswith("has_torch_function")}
    overrides: dict[str, Any] = dict.fromkeys(names, _no)
    if "overrides" in func.__code__.co_names:
        overrides["torch"] = _Torch()  # nn.init asks torch.overrides
    if not overrides:
        return func  # type: ignore[no-any-return]  # a function, as was just found
    body = FunctionType(
        func.__code__, {**func.__globals__, **overrides}, func.__name__, func.__defaults__, func.__closure__
    )
    body.__kwdefaults__ = func.__kwdefaults__
    return body


class _Overrides:
    has_torch_function = staticmethod(_no)
    has_torch_function_unary = staticmethod(_no)
    has_torch_function_variadic = staticmethod(_no)


class _Torch:
    """torch, in which nobody overrides anything."""

    overrides = _Overrides()

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)
