"""The functions that build values where a pickle calls a known name. Pure: each returns a plain value or a record."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch

from shardwright.checkpoint.format.values import NUMPY
from shardwright.errors import PickleError
from shardwright.interop.formats.pickled.machine import Instance, Kind

__all__ = [
    "DTensorRef",
    "StorageRef",
    "TensorRef",
    "as_numpy_dtype",
    "complex_number",
    "counted",
    "device",
    "encoded",
    "mapping",
    "numpy_array",
    "numpy_scalar",
    "path",
    "sequence",
    "size",
    "storage_of",
    "tensor",
    "tensor_of_dtype",
    "tensor_of_type",
    "unordered",
    "wrapped_tensor",
]

_MAX_DIMENSIONS = 64
_MAX_SIZE = 1 << 62
_PLAIN = (str, int, float, bool, bytes, type(None))


class StorageRef(NamedTuple):
    """A storage of a `torch.save` file: the dtype of its elements, the name of its record and their number."""

    dtype: torch.dtype
    key: str
    numel: int


class TensorRef(NamedTuple):
    """A tensor as a view of a storage; nothing of it has been read."""

    storage: StorageRef
    dtype: torch.dtype
    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]


class DTensorRef(NamedTuple):
    """PyTorch's DTensor: its type, and the state that holds its local tensor and its spec."""

    dtype: torch.dtype
    size: tuple[int, ...]
    state: Any


def storage_of(identifier: Any) -> StorageRef:
    """Return the storage that a persistent id of a `torch.save` file names: ("storage", type, key, device, numel)."""
    match identifier:
        case ("storage", Kind(value=torch.dtype() as dtype), str(key), str(), int(numel)):
            if not 0 <= numel <= _MAX_SIZE or not key.isalnum():
                raise PickleError(f"a storage of {numel} elements under the key {key[:40]!r}")
            return StorageRef(dtype, key, numel)
    raise PickleError("a persistent id that does not describe a storage")


def size(values: Any = ()) -> tuple[int, ...]:
    """Return the sizes of a tensor, checked."""
    if not isinstance(values, tuple | list) or len(values) > _MAX_DIMENSIONS:
        raise PickleError("sizes that are not a tuple of at most 64 integers")
    if not all(type(value) is int and 0 <= value <= _MAX_SIZE for value in values):
        raise PickleError("sizes that are not integers between 0 and 2^62")
    return tuple(values)


def tensor(storage: Any, offset: Any, sizes: Any, stride: Any, *_options: Any) -> TensorRef:
    """Return a tensor that has the dtype of its storage: torch._utils._rebuild_tensor and _rebuild_tensor_v2."""
    if type(storage) is not StorageRef:
        raise PickleError("a tensor without a storage")
    return _tensor(storage, storage.dtype, offset, sizes, stride)


def tensor_of_dtype(
    storage: Any, offset: Any, sizes: Any, stride: Any, _needs: Any, _hooks: Any, dtype: Any, *_options: Any
) -> TensorRef:
    """Return a tensor of a dtype of its own: torch._utils._rebuild_tensor_v3."""
    if type(storage) is not StorageRef or type(dtype) is not Kind or not isinstance(dtype.value, torch.dtype):
        raise PickleError("a tensor without a storage or a dtype")
    return _tensor(storage, dtype.value, offset, sizes, stride)


def _tensor(storage: StorageRef, dtype: torch.dtype, offset: Any, sizes: Any, stride: Any) -> TensorRef:
    (first,) = size((offset,))
    shape, strides = size(sizes), size(stride)
    if len(shape) != len(strides):
        raise PickleError(f"a tensor of {len(shape)} dimensions with {len(strides)} strides")
    last = first + sum((n - 1) * step for n, step in zip(shape, strides, strict=True)) if 0 not in shape else first - 1
    nbytes = storage.numel * storage.dtype.itemsize
    if (last + 1) * dtype.itemsize > nbytes:
        raise PickleError(
            f"a tensor of sizes {list(shape)[:8]}, strides {list(strides)[:8]} and offset {first} leaves its storage "
            f"of {nbytes} bytes"
        )
    return TensorRef(storage, dtype, first, shape, strides)


def tensor_of_type(function: Any, kind: Any, arguments: Any, _state: Any = None) -> Any:
    """Return the tensor of a known subclass: torch._tensor._rebuild_from_type_v2."""
    if type(function) is not Kind or function.make is None or type(kind) is not Kind or not kind.is_type:
        raise PickleError("a tensor of an unknown type")
    if type(arguments) is not tuple:
        raise PickleError("a tensor without arguments")
    built = function.make(*arguments)
    if isinstance(built, DTensorRef):
        return built._replace(state=_state)
    if not isinstance(built, TensorRef):
        raise PickleError(f"{function.name} does not build a tensor")
    return built


def wrapped_tensor(kind: Any, dtype: Any, sizes: Any, *_options: Any) -> DTensorRef:
    """Return PyTorch's DTensor without its state: torch._utils._rebuild_wrapper_subclass."""
    if type(kind) is not Kind or not kind.name.endswith(".DTensor") or type(dtype) is not Kind:
        raise PickleError("a tensor of an unknown type")
    return DTensorRef(dtype.value, size(sizes), None)


def mapping(values: Any = (), *_more: Any) -> dict[Any, Any]:
    """Return a dict: collections.OrderedDict is created empty, its items are set later."""
    if values not in ((), []):
        raise PickleError("an OrderedDict that is created with items")
    return {}


def counted(values: Any = None) -> dict[Any, Any]:
    """Return the dict of a collections.Counter, or an empty one for a defaultdict, given its factory."""
    if type(values) is dict:
        return values
    if values is None or type(values) is Kind:
        return {}
    raise PickleError("a Counter or defaultdict of other values than a dict")


def sequence(values: Any = (), *_more: Any) -> list[Any]:
    """Return a list: of a collections.deque."""
    if not isinstance(values, tuple | list):
        raise PickleError("a deque of other values than a list")
    return list(values)


def unordered(values: Any = ()) -> set[Any]:
    """Return a set of plain values."""
    if not isinstance(values, tuple | list) or not all(type(value) in _PLAIN for value in values):
        raise PickleError("a set of other values than plain ones")
    return set(values)


def complex_number(real: Any, imaginary: Any = 0.0) -> complex:
    """Return a complex number."""
    if type(real) not in (int, float) or type(imaginary) not in (int, float):
        raise PickleError("a complex number of other values than two numbers")
    return complex(real, imaginary)


def device(kind: Any, index: Any = None) -> Any:
    """Return a torch.device."""
    if type(kind) is not str or not (index is None or type(index) is int):
        raise PickleError("a device without a type")
    try:
        return torch.device(kind if index is None else f"{kind}:{index}")
    except RuntimeError:
        raise PickleError(f"{kind[:40]!r} is not a type of device") from None


def encoded(text: Any, encoding: Any) -> bytes:
    """Return the bytes that protocol 2 stores as text: _codecs.encode(text, "latin1")."""
    if type(text) is not str or encoding not in ("latin1", "latin-1"):
        raise PickleError("_codecs.encode of other values than text in latin1")
    return text.encode("latin1")


def path(*parts: Any) -> str:
    """Return a pathlib path as text."""
    if not all(type(part) is str for part in parts):
        raise PickleError("a path of other values than text")
    return "/".join(parts).replace("//", "/", 1)


def as_numpy_dtype(value: Any) -> np.dtype[Any]:
    """Return the dtype of numpy that an instance describes: numbers in this machine's byte order only."""
    match value:
        case Instance(kind=Kind(name="numpy.dtype"), arguments=(str(code), *_), state=state) if len(code) <= 3:
            order = state[1] if isinstance(state, tuple) and len(state) > 1 else "="
            if order in ("<", "|", "=") and code[:1] in "biufc" and code[1:].isdigit():
                dtype = np.dtype(code)
                if dtype.name in NUMPY:
                    return dtype
    raise PickleError("a dtype of numpy that is not one of numbers")


def numpy_scalar(dtype: Any, data: Any) -> Any:
    """Return a scalar of numpy."""
    kind = as_numpy_dtype(dtype)
    if type(data) is not bytes or len(data) != kind.itemsize or (kind.name == "bool" and data not in (b"\0", b"\1")):
        raise PickleError(f"a scalar of numpy whose bytes do not encode a {kind.name}")
    return np.frombuffer(data, kind)[0]


def numpy_array(kind: Kind) -> Callable[..., Any]:
    """Return the function that creates an array without contents; its state is set later."""
    return lambda *_arguments: Instance(kind)
