"""Pickle calls and results; functions are pickled by value if the ranks cannot import the same ones."""

from __future__ import annotations

import importlib.util
import inspect
import sys
import threading
from collections.abc import Callable
from contextlib import ExitStack
from types import ModuleType
from typing import Any

from shardwright.errors import MissingExtraError

try:
    import cloudpickle
except ImportError as error:
    raise MissingExtraError("shardwright.testing needs cloudpickle: pip install 'shardwright[testing]'") from error

__all__ = ["dumps", "dumps_call", "loads"]


_registering = threading.Lock()  # cloudpickle's list of modules is global


def dumps(value: object) -> bytes:
    """Pickle a value.

    >>> loads(dumps(lambda: 3))()
    3
    """
    packed: bytes = cloudpickle.dumps(value)
    return packed


def loads(packed: bytes) -> Any:
    """Unpickle a value."""
    return cloudpickle.loads(packed)


def dumps_call(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bytes:
    """Pickle a call; functions of test modules, scripts and notebooks are included by value."""
    with _registering, ExitStack() as registered:
        for module in _local_modules(function):
            cloudpickle.register_pickle_by_value(module)
            registered.callback(cloudpickle.unregister_pickle_by_value, module)
        return dumps((function, args, kwargs))


def _local_modules(function: Callable[..., Any]) -> list[ModuleType]:
    """Return the function's module, if the ranks cannot import it, and all test modules, for functions in arguments.

    pytest may import test modules under names that cannot be imported elsewhere; they are recognised by the name
    `@pytest_ar`, which assertion rewriting adds to them.
    """
    loaded = list(sys.modules.items())
    modules = {name: module for name, module in loaded if "@pytest_ar" in getattr(module, "__dict__", ())}
    defining = inspect.getmodule(function)
    if defining is not None and not _is_importable(defining):
        modules[defining.__name__] = defining
    return list(modules.values())


def _is_importable(module: ModuleType) -> bool:
    try:
        spec = importlib.util.find_spec(module.__name__)
    except (ImportError, ValueError):
        return False
    return spec is not None and spec.origin == getattr(module, "__file__", None)
