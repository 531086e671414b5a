"""Run the command as a user would, in this process; a run of four ranks to look at."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from shardwright.cli.main import run
from tests.cli.example import save_run


@dataclass(frozen=True)
class Done:
    """A command that has ended."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)

    @property
    def lines(self) -> list[str]:
        return self.out.splitlines()


Cli = Callable[..., Done]


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str]) -> Cli:
    """Return a function that runs a command and returns its exit code and output."""

    def command(*arguments: object) -> Done:
        capsys.readouterr()
        code = run([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return Done(code, captured.out, captured.err)

    return command


@pytest.fixture(scope="session")
def example_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of four ranks; not to be changed."""
    root = tmp_path_factory.mktemp("example") / "run"
    save_run(str(root))
    return root


@pytest.fixture
def own_run(example_run: Path, tmp_path: Path) -> Path:
    """A copy of the run that a test may change."""
    return Path(shutil.copytree(example_run, tmp_path / "run"))


@pytest.fixture
def step(example_run: Path) -> Path:
    """The newest checkpoint of the run; not to be changed."""
    return example_run / "step-00000200"
