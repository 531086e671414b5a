"""Validate the arguments of `save`, `load` and `read` before any work is done."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any

import msgspec

from shardwright.checkpoint.format.data_file import BLOCK
from shardwright.checkpoint.format.manifest import FIELDS
from shardwright.checkpoint.format.values import Codec
from shardwright.errors import ArgumentTypeError, CheckpointError, StateError
from shardwright.interop.mapping import Mapping as Rules

__all__ = ["check_codecs", "check_limits", "check_mapping", "check_selection", "extra_fields"]


def check_limits(memory: int | None, threads: int) -> None:
    """Validate the `memory` and `threads` arguments."""
    for name, value in (("memory", memory), ("threads", threads)):
        if value is not None and (not isinstance(value, int) or isinstance(value, bool)):
            raise ArgumentTypeError(f"{name} must be an int, got {type(value).__name__}: {value!r}")
    if memory is not None and memory < BLOCK:
        raise CheckpointError(f"memory must be at least {BLOCK} bytes (one block), got {memory}")
    if threads < 1:
        raise CheckpointError(f"threads must be at least 1, got {threads}")


def check_codecs(codecs: Any) -> None:
    """Validate the `codecs` argument: a mapping of types to `Codec`s."""
    if codecs is None:
        return
    if not isinstance(codecs, Mapping):
        raise ArgumentTypeError(f"codecs must be a mapping of types to Codecs, got {type(codecs).__name__}")
    for kind, codec in codecs.items():
        if not isinstance(kind, type):
            raise ArgumentTypeError(f"codecs: keys must be types, got {type(kind).__name__}: {kind!r}")
        if not isinstance(codec, Codec):
            raise ArgumentTypeError(f"codecs: expected a Codec for {kind.__name__}, got {type(codec).__name__}")


def check_selection(only: Any, cast: Any) -> None:
    """Validate the `only` and `cast` patterns."""
    if only is not None and not isinstance(only, str):
        if not isinstance(only, Collection) or isinstance(only, bytes):
            raise ArgumentTypeError(f"only must be a pattern or a list of patterns, got {type(only).__name__}")
        for pattern in only:
            if not isinstance(pattern, str):
                raise ArgumentTypeError(f"only: patterns must be str, got {type(pattern).__name__}: {pattern!r}")
    if isinstance(cast, Mapping):
        for pattern, value in cast.items():
            if not isinstance(pattern, str) or not isinstance(value, bool):
                raise ArgumentTypeError(f"cast: expected patterns with bools, got {pattern!r}: {value!r}")
    elif not isinstance(cast, bool):
        raise ArgumentTypeError(f"cast must be a bool or a mapping of patterns to bools, got {type(cast).__name__}")


def check_mapping(mapping: Any, rename: Any) -> None:
    """Validate the `mapping` argument, which stands alone."""
    if mapping is None:
        return
    if not isinstance(mapping, Rules):
        raise ArgumentTypeError(f"mapping must be a shardwright.Mapping, got {type(mapping).__name__}")
    if rename is not None:
        raise ArgumentTypeError("rename and mapping cannot both be given; write the new names in the mapping")


def extra_fields(extra: Any) -> dict[str, msgspec.Raw]:
    """Validate the `extra` argument of `save` and encode its values as JSON."""
    if extra is None:
        return {}
    if not isinstance(extra, Mapping):
        raise ArgumentTypeError(f"extra must be a mapping of names to JSON values, got {type(extra).__name__}")
    for name in extra:
        if not isinstance(name, str):
            raise ArgumentTypeError(f"extra: names must be str, got {type(name).__name__}: {name!r}")
    reserved = sorted(extra.keys() & FIELDS)
    if reserved:
        raise StateError(f"extra: {', '.join(map(repr, reserved))} are fields of the manifest itself; use another name")
    try:
        for name, value in extra.items():
            _check_finite(msgspec.to_builtins(value), name)
        return {name: msgspec.Raw(msgspec.json.encode(value)) for name, value in extra.items()}
    except StateError:
        raise
    except (TypeError, ValueError, RecursionError) as error:
        raise StateError(f"extra: only JSON values can be stored: {error}") from None


def _check_finite(value: Any, name: str) -> None:
    """Reject floats that JSON cannot represent (they would become null)."""
    if isinstance(value, float) and not math.isfinite(value):
        raise StateError(
            f"extra: {name!r} contains {value!r}, which JSON cannot represent; store a str, such as {str(value)!r}"
        )
    children = value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else ()
    for child in children:
        _check_finite(child, name)
