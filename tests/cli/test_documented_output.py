"""The pages on the command line show what the commands really print.

Each page is a story in one folder, which holds the run of `tests/cli/example.py`. After a change of the output, write
the pages anew: `SHARDWRIGHT_WRITE_PAGES=1 python -m pytest tests/cli/test_documented_output.py`.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
from pathlib import Path

import pytest

from tests.cli.conftest import Cli

FOLDER = Path(__file__).parents[2] / "docs" / "how-to" / "command-line"
PAGES = sorted(FOLDER.glob("*.md"))
BLOCK = re.compile(r"(?<=^```console\n).*?(?=^```$)|<!-- (?:flip|copy) .*? -->", re.MULTILINE | re.DOTALL)
EXIT_CODE = "; echo $?"


def run_block(block: str, cli: Cli) -> str:
    """Run the commands of a block, and return it with what they print; or do what a comment says."""
    if block.startswith("<!--"):
        _, what, first, second, _ = block.split()
        if what == "flip":
            flip(first, int(second))
        else:
            shutil.copytree(first, second)
        return block
    written = []
    for line in block.splitlines():
        if not line.startswith("$ "):
            continue
        command = line.removeprefix("$ ").removesuffix(EXIT_CODE)
        program, *words = shlex.split(command)
        assert program == "shardwright", f"a page runs {program}"
        done = cli(*words)
        shown = done.out + done.err + (f"{done.code}\n" if line.endswith(EXIT_CODE) else "")
        assert line.endswith(EXIT_CODE) or done.code == 0, shown
        written += [f"{line}\n", shown.replace(os.getcwd(), "/home/me")]
    return "".join(written)


def renewed(block: str, cli: Cli) -> str:
    """Return a block with what its commands print; if nothing of substance has changed, as it is."""
    found = run_block(block, cli)
    return block if comparable(found) == comparable(block) else found


def flip(pattern: str, at: int) -> None:
    """Flip a bit of the first file that matches a pattern."""
    file = min(Path().glob(pattern))
    data = bytearray(file.read_bytes())
    data[at] ^= 1
    file.write_bytes(data)


def comparable(text: str) -> list[str]:
    """Return the lines of a block without what differs between two runs: ids of saves, ages, widths of columns."""
    text = re.sub(r"\b[0-9a-f]{12}\b", "save-id", text)
    text = re.sub(r"\b\d+ (s|min|h|d)\b", "age", text)
    return [re.sub(r" +", " ", line) for line in text.splitlines()]


def test_there_are_pages_with_output() -> None:
    assert PAGES
    assert all(BLOCK.search(page.read_text("utf-8")) for page in PAGES)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_output_on_a_page_is_real(page: Path, cli: Cli, own_run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(own_run.parent)
    text = page.read_text("utf-8")
    if os.environ.get("SHARDWRIGHT_WRITE_PAGES"):
        page.write_text(BLOCK.sub(lambda block: renewed(block[0], cli), text), "utf-8")
        return
    for block in BLOCK.findall(text):
        assert comparable(run_block(block, cli)) == comparable(block)
