"""The pages on the command line show what the commands really print.

Each page is a story in one folder, which holds the run of `tests/cli/example.py`. After a change of the output, write
the pages anew: `SHARDWRIGHT_WRITE_PAGES=1 python -m pytest tests/cli/test_documented_output.py`.
"""

from __future__ import annotations

import os
import re
import shlex
from pathlib import Path

import pytest

from tests.cli.conftest import Cli

FOLDER = Path(__file__).parents[2] / "docs" / "how-to" / "command-line"
PAGES = sorted(FOLDER.glob("*.md"))
BLOCK = re.compile(r"(?<=^```console\n).*?(?=^```$)", re.MULTILINE | re.DOTALL)
EXIT_CODE = "; echo $?"


def run_block(block: str, cli: Cli) -> str:
    """Run the commands of a block, and return it with what they print."""
    written = []
    for line in block.splitlines():
        if not line.startswith("$ "):
            continue
        words = shlex.split(line.removeprefix("$ ").removesuffix(EXIT_CODE))
        written.append(f"{line}\n")
        if words[0] == "shardwright":
            done = cli(*words[1:])
            shown = done.out + done.err + (f"{done.code}\n" if line.endswith(EXIT_CODE) else "")
            assert line.endswith(EXIT_CODE) or done.code == 0, shown
            written.append(shown.replace(os.getcwd(), "/home/me"))
        else:
            damage(*words)
    return "".join(written)


def damage(command: str, *arguments: str) -> None:
    """Do what the other commands of the pages do."""
    assert command == "damage", f"a page uses {command}"
    pattern, at = arguments
    (file,) = sorted(Path().glob(pattern))[:1]
    data = bytearray(file.read_bytes())
    data[int(at)] ^= 1
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
        page.write_text(BLOCK.sub(lambda block: run_block(block[0], cli), text), "utf-8")
        return
    for block in BLOCK.findall(text):
        assert comparable(run_block(block, cli)) == comparable(block)
