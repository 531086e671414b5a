"""Words that `docs/glossary.md` retires are in no source file and on no page of the documentation."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
GLOSSARY = ROOT / "docs" / "glossary.md"
HEADING = "## Words we do not use"


def retired_words() -> list[str]:
    """Return the words in the first column of the glossary's table."""
    rows = GLOSSARY.read_text("utf-8").partition(HEADING)[2].splitlines()
    cells = [row.split("|")[1] for row in rows if row.startswith("|")][2:]
    return [word.strip() for cell in cells for word in cell.split(", ")]


def uses(word: str, text: str) -> list[int]:
    """Return the numbers of the lines that contain the word, as a word of a sentence or as a part of a name."""
    boundary = r"(?<![A-Za-z])", r"(?![A-Za-z])"
    if word[0].isupper():  # a class: `Way`, but not the "way" in a sentence
        boundary = r"(?<![A-Za-z])", r"(?![a-z])"
    allowed = "(?<![Tt]here )" if word == "is no" else ""
    found = re.compile(boundary[0] + allowed + re.escape(word) + ("" if word.endswith("(") else boundary[1]))
    return [number for number, line in enumerate(text.splitlines(), 1) if found.search(line)]


def texts() -> dict[str, str]:
    """Return the text of every source file and page, by its path; the glossary without its table of retired words."""
    paths = [
        *(ROOT / "src").rglob("*.py"),
        *(ROOT / "docs").rglob("*.md"),
        ROOT / "README.md",
        ROOT / "CONTRIBUTING.md",
    ]
    found = {path.relative_to(ROOT).as_posix(): path.read_text("utf-8") for path in sorted(paths)}
    return {name: text.partition(HEADING)[0] if name == "docs/glossary.md" else text for name, text in found.items()}


@pytest.mark.parametrize("word", retired_words())
def test_no_source_or_page_contains_a_retired_word(word: str) -> None:
    found = [f"{name}:{line}" for name, text in texts().items() for line in uses(word, text)]
    assert not found, f"{word!r} is retired (see docs/glossary.md): " + " ".join(found[:20])


@pytest.mark.parametrize(
    ("word", "line", "expected"),
    [
        ("told", "what the ranks were told", True),
        ("told", "all_told = gather()", True),
        ("told", "untold", False),
        ("Way", "class Way:", True),
        ("Way", "a way to run it", False),
        ("Way", "Wayfinding", False),
        ("is no", "threads=0 is no number of threads", True),
        ("is no", "it is not one", False),
        ("is no", "there is no file", False),
        ("is a {type(", 'f"{x!r} is a {type(x).__name__}"', True),
    ],
)
def test_a_planted_retired_word_is_detected(word: str, line: str, expected: bool) -> None:
    assert bool(uses(word, line)) is expected
