"""The examples run as their first lines say, under torchrun and as one process, and give the same results."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FULL = os.environ.get("SHARDWRIGHT_BUDGET") == "full"
EXAMPLES = sorted(path.name for path in (ROOT / "examples").glob("[0-9][0-9]_*.py"))
ARGUMENTS = {} if FULL else {"06_transformers.py": ["llama", "gpt2"]}  # of its six models


def run(name: str, ranks: int | None) -> str:
    """What an example prints, as a plain process or on so many ranks."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks else []
    environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")}
    done = subprocess.run(
        [sys.executable, *launcher, str(ROOT / "examples" / name), *ARGUMENTS.get(name, ())],
        env=environment | {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"},
        capture_output=True,
        text=True,
        timeout=600 if FULL else 150,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def losses(output: str) -> list[float]:
    """Return the losses that an example prints: `losses 1.5 1.25`, or `loss ... = 1.5`."""
    lines = [line for line in output.splitlines() if line.startswith("loss")]
    assert len(lines) == 1, output
    words = lines[0].partition("=")[2] if "=" in lines[0] else lines[0].partition(" ")[2]
    assert words.split(), output
    return [float(word) for word in words.split()]


def test_there_are_examples() -> None:
    assert len(EXAMPLES) >= 3


@pytest.mark.timeout(1300 if FULL else 320)
@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_gives_the_same_losses_on_four_ranks_as_on_one(name: str) -> None:
    alone = losses(run(name, None))
    if FULL or "it starts its ranks itself" not in (ROOT / "examples" / name).read_text():  # it has run on four by now
        assert losses(run(name, 4)) == pytest.approx(alone, rel=1e-5)


@pytest.mark.parametrize("output", ["", "ranks 4", "losses", "loss =", "losses 1.0\nlosses 2.0"])
def test_an_output_without_losses_is_a_failure(output: str) -> None:
    with pytest.raises(AssertionError):
        losses(output)


@pytest.mark.timeout(170)
def test_the_last_line_of_the_demo_is_its_summary() -> None:
    last = run("demo.py", 4).strip().splitlines()[-1]
    assert last.startswith("Shown: ")
