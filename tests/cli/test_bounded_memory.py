"""Commands read a few megabytes at a time, however large a tensor is."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from shardwright import checkpoint
from tests.cli.conftest import Cli
from tests.peak_memory import peak_memory


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with one tensor of 192 MiB."""
    path = tmp_path_factory.mktemp("large") / "c"
    checkpoint.save({"w": torch.arange(48 << 20, dtype=torch.int32).view(1 << 10, -1)}, path)
    return path


@pytest.mark.parametrize(
    "words",
    [("show",), ("cat", "w"), ("stats",), ("fingerprint",), ("verify",), ("explain", "--mesh", "dp=8"), ("diff",)],
    ids=lambda words: words[0],
)
def test_a_command_takes_little_memory(cli: Cli, large: Path, tmp_path: Path, words: tuple[str, ...]) -> None:
    command, *rest = words
    checkpoint.save({"w": torch.arange(64).view(8, -1)}, tmp_path)

    def run(path: Path) -> None:
        assert cli(command, path, *([path] if command == "diff" else []), *rest).code == 0

    run(tmp_path)  # what it imports is loaded now
    with peak_memory() as peak:
        run(large)
    assert peak() < 96 << 20
