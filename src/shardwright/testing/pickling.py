"""How calls and results travel: functions by value where the ranks could not import them, or not the same."""

from __future__ import annotations

import importlib.util
import inspect
from collections.abc import Callable
from types import ModuleType
from typing import Any

from shardwright.errors import ShardwrightError

try:
    import cloudpickle
except ImportError as error:
    raise ShardwrightError("shardwright.testing needs cloudpickle: pip install 'shardwright[testing]'") from error

__all__ = ["dumps", "dumps_call", "loads"]


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
    module = inspect.getmodule(function)
    if module is None or not _is_local(module):
        return dumps((function, args, kwargs))
    cloudpickle.register_pickle_by_value(module)
    try:
        return dumps((function, args, kwargs))
    finally:
        cloudpickle.unregister_pickle_by_value(module)


def _is_local(module: ModuleType) -> bool:
    if "@pytest_ar" in vars(module):  # a test module: its asserts were rewritten to explain themselves
        return True
    try:
        spec = importlib.util.find_spec(module.__name__)
    except (ImportError, ValueError):
        return True
    return spec is None or spec.origin != getattr(module, "__file__", None)
