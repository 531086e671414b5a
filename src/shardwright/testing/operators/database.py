"""torch's operator database: its entries by name, and one sample of each pattern of arguments.

An entry has up to a thousand samples, most of which differ only in sizes and values. Two samples have the same pattern
if their arguments have the same structure, dtypes, numbers of dimensions and options; the first non-empty sample of
each pattern is kept.
"""

from __future__ import annotations

import random
import warnings
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from types import FunctionType
from typing import Any, final

import numpy as np
import torch
from torch import Tensor

from shardwright.testing.operators.sample import tensors_in

__all__ = ["Entry", "OpSample", "entries", "entry", "samples_of"]

_DTYPES = (torch.float64, torch.int64, torch.complex128, torch.bool, torch.float32, torch.float8_e4m3fn)
_MAX_ELEMENTS = 60_000


@final
@dataclass(frozen=True, slots=True)
class OpSample:
    """A call of an operator: the function, its arguments, and which part of its result is differentiated."""

    func: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    differentiable: Callable[[Any], Any]

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors among the arguments, in order."""
        return list(tensors_in((*self.args, *self.kwargs.values())))


@final
@dataclass(frozen=True, slots=True)
class Entry:
    """An operator of the database, with a name that is unique per variant.

    >>> entry("nn.functional.conv2d").name
    'nn.functional.conv2d'
    """

    name: str
    info: Any

    @property
    def dtype(self) -> torch.dtype | None:
        """The dtype used for testing: float64 if supported; None if torch has no CPU kernel for it."""
        supported = self.info.supported_dtypes("cpu")
        return next((dtype for dtype in _DTYPES if dtype in supported), None)

    @property
    def has_gradient(self) -> bool:
        """True if torch can differentiate it."""
        dtype = self.dtype
        return bool(self.info.supports_autograd and dtype is not None and (dtype.is_floating_point or dtype.is_complex))


@lru_cache(maxsize=1)
def entries() -> tuple[Entry, ...]:
    """Return all entries of the database, in order.

    >>> len(entries()) > 600
    True
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch.testing._internal.common_methods_invocations import op_db
    return tuple(
        Entry(f"{info.name}.{info.variant_test_name}" if info.variant_test_name else info.name, info) for info in op_db
    )


@lru_cache(maxsize=1)
def _by_name() -> dict[str, Entry]:
    by_name: dict[str, Entry] = {}
    for op in entries():
        by_name.setdefault(op.name, op)
    return by_name


def entry(name: str) -> Entry:
    """Return the entry with this name.

    >>> entry("add").dtype
    torch.float64
    """
    return _by_name()[name]


@lru_cache(maxsize=8)
def samples_of(name: str, dtype: torch.dtype | None = None) -> tuple[OpSample, ...]:
    """Return one sample of each pattern of an entry, the same in every process; by default with its own dtype.

    >>> [tuple(tensor.shape) for tensor in samples_of("mm")[0].tensors]
    [(5, 10), (10, 5)]
    """
    op = entry(name)
    dtype = op.dtype if dtype is None else dtype
    if dtype is None or dtype not in op.info.supported_dtypes("cpu"):
        return ()
    return tuple(_samples(op, dtype))


def _samples(op: Entry, dtype: torch.dtype) -> Iterator[OpSample]:
    seed = zlib.crc32(op.name.encode())
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    patterns: set[Any] = set()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for sample_input in op.info.sample_inputs("cpu", dtype, requires_grad=op.has_gradient and dtype == op.dtype):
            args, kwargs = (sample_input.input, *sample_input.args), dict(sample_input.kwargs)
            sample = OpSample(_unseeded(op.info.op), args, kwargs, sample_input.output_process_fn_grad)
            pattern = (_pattern(args), tuple((key, _pattern(value)) for key, value in sorted(kwargs.items())))
            if pattern in patterns or sum(tensor.numel() for tensor in sample.tensors) > _MAX_ELEMENTS:
                continue
            patterns.add(pattern)
            yield sample


def _unseeded(op: Callable[..., Any]) -> Callable[..., Any]:
    """Return a random operator without the seeding that the database does before each call: we seed differently."""
    names = getattr(op, "__code__", None)
    if names is None or "wrapper_set_seed" not in names.co_names:
        return op
    namespace = {**op.__globals__, "wrapper_set_seed": lambda func, *args, **kwargs: func(*args, **kwargs)}
    return FunctionType(op.__code__, namespace, op.__name__, op.__defaults__, op.__closure__)


def _pattern(value: Any) -> Any:
    """Return the pattern of a sample."""
    if isinstance(value, Tensor):
        sizes = tuple(min(size, 2) for size in value.shape) if value.layout == torch.strided else None
        return ("tensor", value.dtype, sizes, value.requires_grad, str(value.layout))
    if isinstance(value, list | tuple):
        return (type(value).__name__, tuple(_pattern(item) for item in value))
    if isinstance(value, dict):
        return tuple((key, _pattern(item)) for key, item in value.items())
    if isinstance(value, bool | str | torch.dtype | torch.device) or value is None:
        return str(value)
    if isinstance(value, int):
        return ("int", max(-3, min(value, 3)))
    if isinstance(value, float):
        return ("float", value if value in (0.0, 1.0, 2.0) or value in (float("inf"), float("-inf")) else 0.5)
    return type(value).__name__
