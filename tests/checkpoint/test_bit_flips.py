"""`verify` and `load` detect every single-bit error in a checkpoint."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from shardwright import checkpoint
from shardwright.errors import CheckpointError, CorruptionError, StorageError

COUNT = 200 if os.environ.get("SHARDWRIGHT_BUDGET") == "full" else 20


def flips(files: list[Path], bounds: Callable[[Path], tuple[int, int]]) -> Iterator[tuple[Path, int, int]]:
    """Files, bytes in them between the bounds, and bits; the first and the last bytes among them."""
    chance = random.Random(5)
    for number in range(COUNT):
        file = files[number % len(files)]
        low, high = bounds(file)
        at = [low, high - 1, chance.randrange(low, high)][min(2, number // len(files))]
        yield file, at, chance.randrange(8)


def flip(path: Path, at: int, bit: int) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ (1 << bit)]))


def header_size(path: Path) -> int:
    return 8 + int.from_bytes(path.read_bytes()[:8], "little")


def size_of(path: Path) -> int:
    return path.stat().st_size


def is_found(folder: Path) -> bool:
    """Whether verify says so, and load raises, and neither in a way that is not meant."""
    if checkpoint.verify(folder):
        return False
    with pytest.raises((CheckpointError, StorageError)):
        checkpoint.read(folder)
    return True


def test_verify_detects_every_bit_flip_in_data(saved: Path) -> None:
    found = 0
    for file, at, bit in flips(sorted(saved.glob("*.safetensors")), lambda file: (header_size(file), size_of(file))):
        flip(file, at, bit)
        found += not checkpoint.verify(saved)
        flip(file, at, bit)
    assert found == COUNT
    assert checkpoint.verify(saved)


def test_reading_detects_bit_flips_in_data(saved: Path) -> None:
    """A tenth as many, since each reads everything."""
    some = list(flips(sorted(saved.glob("*.safetensors")), lambda file: (header_size(file), size_of(file))))[::10]
    for file, at, bit in some:
        flip(file, at, bit)
        with pytest.raises(CorruptionError, match="does not match"):
            read_all(saved)
        flip(file, at, bit)
    read_all(saved)


def read_all(folder: Path) -> None:
    """Reads every tensor there is, what each rank has for itself included."""
    with checkpoint.open(folder) as ckpt:
        for name in ckpt:
            ckpt[name].tensor()


@pytest.mark.parametrize("what", ["manifest", "header"])
def test_verify_and_read_detect_every_bit_flip_in_manifests_and_headers(saved: Path, what: str) -> None:
    files = [saved / "manifest.json"] if what == "manifest" else sorted(saved.glob("*.safetensors"))
    length = {file: size_of(file) if what == "manifest" else header_size(file) for file in files}
    found = 0
    for file, at, bit in flips(files, lambda file: (0, length[file])):
        flip(file, at, bit)
        found += is_found(saved)
        flip(file, at, bit)
    assert found == COUNT
    assert checkpoint.verify(saved)
