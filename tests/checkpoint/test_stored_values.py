"""Values come back as they were stored: keys and values of subclasses, enums, arrays, codecs."""

from __future__ import annotations

import enum
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from shardwright import checkpoint
from shardwright.checkpoint import Codec
from shardwright.errors import LoadMismatchError, StateError


class Level(enum.IntEnum):
    LOW = 1


class Word(str):
    __slots__ = ()

    def __str__(self) -> str:
        return "another"


class Number(int):
    pass


class Mode(enum.Flag):
    A = 1
    B = 2


def test_keys_and_values_of_subclasses_are_stored_as_plain_values(tmp_path: Path) -> None:
    state = {
        Level.LOW: 1,
        Number(3): Number(5),
        Word("a"): Word("b"),
        np.float64(1.5): 2.0,
        np.str_("n"): Number(2**70),
    }
    checkpoint.save(state, tmp_path)
    made = checkpoint.read(tmp_path)
    assert made == {1: 1, 3: 5, "a": "b", 1.5: 2.0, "n": 2**70}
    assert {type(key) for key in made} == {int, str, float}
    target = dict.fromkeys(state, 0)
    assert checkpoint.load(target, tmp_path) == made

    class Odd(str):
        __slots__ = ()

        def __hash__(self) -> int:
            return 1

    with pytest.raises(StateError, match=r"x: key 'q' has type Odd but is not found by its plain value 'q'"):
        checkpoint.save({"x": {Odd("q"): 1}}, tmp_path)


def test_enums_are_resolved_before_anything_changes(tmp_path: Path) -> None:
    class One(enum.Enum):
        A = 1
        B = 2

    class Two(enum.Enum):
        A = 1

    checkpoint.save({"w": torch.ones(2), "e": One.B, "f": Mode.A | Mode.B, "g": Mode(0)}, tmp_path)
    state: dict[str, Any] = {"w": torch.zeros(2), "e": Two.A, "f": Mode.A, "g": Mode.A}
    with pytest.raises(
        LoadMismatchError,
        match=r"enum: 'e' is One.B \(2\) in the checkpoint, which is not a member of Two",
    ):
        checkpoint.load(state, tmp_path)
    assert not state["w"].any()
    state["e"] = One.A
    checkpoint.load(state, tmp_path)
    assert (state["e"], state["f"], state["g"]) == (One.B, Mode.A | Mode.B, Mode(0))


def test_array_subclasses_are_refused(tmp_path: Path) -> None:
    for array in (np.ma.MaskedArray([1.0], mask=[True]), np.ones((1, 1)).view(np.recarray)):
        with pytest.raises(StateError, match=r"m: numpy.* has more than its numbers"):
            checkpoint.save({"m": array}, tmp_path)
    mapped = np.memmap(tmp_path / "map", dtype=np.float32, mode="w+", shape=(3,))
    mapped[:] = 2
    checkpoint.save({"m": mapped}, tmp_path / "saved")
    assert checkpoint.read(tmp_path / "saved")["m"].tolist() == [2.0] * 3


class Version:
    def __init__(self, *parts: int) -> None:
        self.parts = parts


def test_a_value_is_read_by_the_codec_that_stored_it(tmp_path: Path) -> None:
    def codec(name: str) -> dict[type, Codec]:
        return {Version: Codec(name, lambda v: {"parts": list(v.parts)}, lambda s: Version(*s["parts"]))}

    checkpoint.save({"v": Version(1)}, tmp_path, codecs=codec("one"))
    with pytest.raises(
        LoadMismatchError, match=r"'v.parts.0' is read by codec 'two' in the state, but was stored by 'one'"
    ):
        checkpoint.load({"v": Version(0)}, tmp_path, codecs=codec("two"))
    assert checkpoint.load({"v": Version(0)}, tmp_path, codecs=codec("one"))["v"].parts == (1,)
    assert checkpoint.load({"v": {"parts": [0]}}, tmp_path) == {"v": {"parts": [1]}}
