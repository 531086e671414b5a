"""How calls and results travel: functions by value where the ranks could not import them, or not the same."""

from __future__ import annotations

import importlib.util
import inspect
import sys
import threading
from collections.abc import Callable
from contextlib import ExitStack
from types import ModuleType
from typing import Any

from shardwright.errors import ShardwrightError

try:
    import cloudpickle
except ImportError as error:
    raise ShardwrightError("shardwright.testing needs cloudpickle: pip install 'shardwright[testing]'") from error

__all__ = ["dumps", "dumps_call", "loads"]


_registering = threading.Lock()  # cloudpickle's list of modules is one for all threads


def dumps(value: object) -> bytes:
    """The value, pickled.

    >>> loads(dumps(lambda: 3))()
    3
    """
    packed: bytes = cloudpickle.dumps(value)
    return packed


def loads(packed: bytes) -> Any:
    """The value that was pickled."""
    return cloudpickle.loads(packed)


def dumps_call(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bytes:
    """The call, pickled; functions of test modules, scripts and notebooks travel with their code."""
    with _registering, ExitStack() as registered:
        for module in _local_modules(function):
            cloudpickle.register_pickle_by_value(module)
            registered.callback(cloudpickle.unregister_pickle_by_value, module)
        return dumps((function, args, kwargs))


def _local_modules(function: Callable[..., Any]) -> list[ModuleType]:
    """The function's own module, if the ranks may not import it, and every test module: arguments hold functions, too.

    pytest imports test modules under names that no path need lead to; it leaves its mark in them, as their asserts
    were rewritten to explain themselves.
    """
    loaded = list(sys.modules.items())
    found = {name: module for name, module in loaded if "@pytest_ar" in getattr(module, "__dict__", ())}
    own = inspect.getmodule(function)
    if own is not None and not _is_importable(own):
        found[own.__name__] = own
    return list(found.values())


def _is_importable(module: ModuleType) -> bool:
    try:
        spec = importlib.util.find_spec(module.__name__)
    except (ImportError, ValueError):
        return False
    return spec is not None and spec.origin == getattr(module, "__file__", None)
