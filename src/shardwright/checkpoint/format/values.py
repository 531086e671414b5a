"""Encode plain values as JSON, and decode them: nothing is imported or executed.

A node is a list whose first item says what it is; see docs/format.md. Strings, numbers, bools and None are ["v", x].
"""

from __future__ import annotations

import base64
import datetime
import enum
import math
import reprlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, final

import numpy as np
import torch

from shardwright.errors import FormatError, StateError

__all__ = ["DTYPES", "NUMPY", "Codec", "EnumValue", "Opaque", "decode_value", "encode_value"]

# Names are looked up here, never with getattr: torch would import modules whose name matches.
DTYPES: Mapping[str, torch.dtype] = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in vars(torch).values()
    if isinstance(dtype, torch.dtype) and not str(dtype).startswith("torch.q")  # quantized dtypes are not supported
}
"""The dtypes of this version of PyTorch in which a tensor can be stored, by name."""

NUMPY = frozenset(
    "bool int8 int16 int32 int64 uint8 uint16 uint32 uint64 float16 float32 float64 float128 "
    "complex64 complex128 complex256".split()
)
"""The names of the dtypes in which numpy scalars and arrays can be stored."""


@final
@dataclass(frozen=True)
class Codec:
    """How to store values of a type of your own: converted to a state that can be stored, under a name.

    >>> Codec("version", tuple, lambda state: state).name
    'version'
    """

    name: str
    encode: Callable[[Any], Any]
    decode: Callable[[Any], Any]


def encode_value(value: Any, path: str) -> list[Any] | None:
    """Encode a plain value as a node; return None if it is not a plain value."""
    match value:
        case enum.Enum():
            inner = encode_value(value.value, path)
            if inner is None:
                raise StateError(
                    f"{path}: the value of {value!r} has type {type(value.value).__name__}, which cannot be stored"
                )
            return ["e", type(value).__name__, value.name, inner]
        case np.generic():
            return _numpy_scalar(value, path)
        case None | bool() | str():
            return ["v", _text(value, path) if isinstance(value, str) else value]
        case int():
            plain = int.__int__(value)
            return ["v", plain] if -(2**63) <= plain < 2**63 else ["i", _digits(plain, path)]
        case float():
            return ["v", float.__float__(value)] if math.isfinite(value) else ["f", repr(float.__float__(value))]
        case complex():
            return ["c", repr(value.real), repr(value.imag)]
        case bytes() | bytearray() | memoryview():
            return ["b", base64.b64encode(value).decode()]
        case datetime.datetime():
            return ["datetime", value.isoformat(), *[1] * value.fold]
        case datetime.date():
            return ["date", value.isoformat()]
        case datetime.time():
            return ["time", value.isoformat(), *[1] * value.fold]
        case datetime.timedelta():
            return ["timedelta", value.days, value.seconds, value.microseconds]
        case torch.device():
            return ["device", str(value)]
        case torch.dtype():
            return ["dtype", str(value).removeprefix("torch.")] if value in DTYPES.values() else None
    return None


def _text(value: str, path: str) -> str:
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise StateError(f"{path}: a string that is not valid Unicode cannot be stored: {error}") from None
    return str.__str__(value)  # also for subclasses that override __str__


def _digits(value: int, path: str) -> str:
    if value.bit_length() > 13000:  # Python parses at most 4300 digits
        raise StateError(f"{path}: an integer of {value.bit_length()} bits cannot be stored; the limit is 13000")
    return str(value)


def _numpy_scalar(value: np.generic, path: str) -> list[Any]:
    if value.dtype.name not in NUMPY:
        raise StateError(f"{path}: a numpy scalar of dtype {value.dtype} cannot be stored")
    return ["n", value.dtype.name, base64.b64encode(value.tobytes()).decode()]


@final
@dataclass(frozen=True)
class EnumValue:
    """A stored enum member, by name: nothing is imported, so only a target of the same type can restore it.

    `read` gives the value instead. A combination of flags without a name is identified by its value.
    """

    type_name: str
    name: str | None
    value: Any

    def of_type(self, kind: type[enum.Enum]) -> enum.Enum | None:
        """Return the member of this type; None if there is none."""
        if self.name is not None and self.name in kind.__members__:
            return kind.__members__[self.name]
        if not issubclass(kind, enum.Flag):
            return None
        try:
            member = kind(self.value)
        except (TypeError, ValueError):
            return None
        return member if isinstance(member, kind) else None


@final
@dataclass(frozen=True)
class Opaque:
    """A value of another format's checkpoint that was not read, by the name of its type, and the reason.

    >>> Opaque("numpy.ndarray", "it is not a plain value").reason
    'it is not a plain value'
    """

    type_name: str
    reason: str


def decode_value(node: list[Any]) -> Any:
    """Decode a node that `encode_value` returned."""
    try:
        return _DECODERS[node[0]](*node[1:])
    except FormatError:
        raise
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RecursionError) as error:
        raise FormatError(f"node {reprlib.repr(node)} of the tree cannot be read: {error}") from None


def _device(text: str) -> torch.device:
    try:
        return torch.device(text)
    except RuntimeError:
        raise ValueError(f"{text!r} is not a device") from None


def _numpy(name: str, data: str) -> Any:
    if name not in NUMPY:
        raise ValueError(f"{name!r} is not a numeric dtype")
    dtype, stored = np.dtype(name), base64.b64decode(data, validate=True)
    if len(stored) != dtype.itemsize or (name == "bool" and stored not in (b"\0", b"\1")):
        raise ValueError(f"{len(stored)} bytes do not encode a {name}")
    return np.frombuffer(stored, dtype)[0]


def _plain(value: Any) -> Any:
    if not isinstance(value, str | int | float | bool | None):
        raise ValueError("expected a plain value")
    return value


_DECODERS: Mapping[str, Callable[..., Any]] = {
    "v": _plain,
    "i": lambda text: int(text) if len(text) < 4000 else _too_long(text),
    "f": lambda text: {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}[text],
    "c": lambda real, imag: complex(float(real), float(imag)),
    "b": lambda text: base64.b64decode(text, validate=True),
    "datetime": lambda text, fold=0: datetime.datetime.fromisoformat(text).replace(fold=fold),
    "date": datetime.date.fromisoformat,
    "time": lambda text, fold=0: datetime.time.fromisoformat(text).replace(fold=fold),
    "timedelta": lambda days, seconds, micro: datetime.timedelta(days, seconds, micro),
    "device": _device,
    "dtype": DTYPES.__getitem__,
    "n": _numpy,
    "e": lambda kind, name, node: EnumValue(kind, name, decode_value(node)),
    "opaque": lambda type_name, reason: Opaque(str(type_name), str(reason)),
}


def _too_long(text: str) -> int:
    raise ValueError(f"an integer of {len(text)} digits")
