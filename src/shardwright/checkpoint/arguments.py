"""What `save` and `load` refuse of their arguments, before anything is done."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from shardwright.checkpoint.format.data_file import BLOCK
from shardwright.checkpoint.format.values import Codec
from shardwright.errors import ArgumentTypeError, CheckpointError

__all__ = ["check_choice", "check_codecs", "check_limits", "refuse_without_state"]


def check_limits(memory: int | None, threads: int) -> None:
    """Refuses bounds that are no whole numbers, or too small to work with."""
    for name, value in (("memory", memory), ("threads", threads)):
        if value is not None and (not isinstance(value, int) or isinstance(value, bool)):
            raise ArgumentTypeError(f"{name}={value!r}: a whole number is expected")
    if memory is not None and memory < BLOCK:
        raise CheckpointError(f"memory={memory}: a block of {BLOCK} bytes is the least that is copied at a time")
    if threads < 1:
        raise CheckpointError(f"threads={threads}: one at least")


def check_codecs(codecs: Any) -> None:
    """Refuses what is no mapping of types to codecs."""
    if codecs is None:
        return
    if not isinstance(codecs, Mapping):
        raise ArgumentTypeError(f"codecs={codecs!r} is a {type(codecs).__name__}: give a mapping of types to Codecs")
    for kind, codec in codecs.items():
        if not isinstance(kind, type):
            raise ArgumentTypeError(f"codecs: the key {kind!r} is a {type(kind).__name__}: a type is needed")
        if not isinstance(codec, Codec):
            raise ArgumentTypeError(f"codecs: for {kind.__name__} there is a {type(codec).__name__}: a Codec is needed")


def check_choice(only: Any, cast: Any) -> None:
    """Refuses patterns that are none."""
    if only is not None and not isinstance(only, str):
        if not isinstance(only, Collection) or isinstance(only, bytes):
            raise ArgumentTypeError(f"only={only!r} is a {type(only).__name__}: give a pattern, or several in a list")
        for pattern in only:
            if not isinstance(pattern, str):
                raise ArgumentTypeError(
                    f"only: the pattern {pattern!r} is a {type(pattern).__name__}: patterns are text"
                )
    if isinstance(cast, Mapping):
        for pattern, said in cast.items():
            if not isinstance(pattern, str) or not isinstance(said, bool):
                raise ArgumentTypeError(f"cast: {pattern!r}: {said!r} is no pattern with True or False")
    elif not isinstance(cast, bool):
        raise ArgumentTypeError(
            f"cast={cast!r} is a {type(cast).__name__}: give True, False, or a mapping of patterns to these"
        )


def refuse_without_state(**given: bool) -> None:
    """Refuses arguments of `load` that mean nothing where no state is given to fill."""
    names = [f"{name}=" for name, is_given in given.items() if is_given]
    if names:
        raise ArgumentTypeError(
            f"load(path) makes a state of all that is stored, and {', '.join(names)} would mean nothing: give a state "
            "to fill, load(state, path, ...), or take what you need from open(path)"
        )
