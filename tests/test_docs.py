"""The documentation is tested, and tested against the package that users import."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
]


def run_pytest(*arguments: str) -> list[str]:
    command = [sys.executable, "-m", "pytest", "--quiet", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()


def test_every_python_block_of_the_documentation_is_a_test() -> None:
    written = {
        page: len(re.findall(r"^ *```(?:python|pycon)", page.read_text("utf-8"), re.MULTILINE)) for page in PAGES
    }
    found = run_pytest("--collect-only", "README.md", "docs")
    assert sum(written.values()) > 0
    for page, blocks in written.items():
        name = page.relative_to(ROOT).as_posix()
        assert sum(line.startswith(f"{name}::") for line in found) >= blocks, name


def test_docstrings_are_tests() -> None:
    found = run_pytest("--collect-only", "src/shardwright/layout/region.py")
    assert "src/shardwright/layout/region.py::shardwright.layout.region.Region" in found


def test_docstrings_are_tested_on_the_modules_that_users_import() -> None:
    """A module imported twice has two classes of each name, and `except` and `isinstance` would lie."""
    strays = [
        f"{name}.{attribute}"
        for name, module in list(sys.modules.items())
        if name.partition(".")[0] == "shardwright"
        for attribute, value in list(vars(module).items())
        if isinstance(value, type)
        and value.__module__.startswith("shardwright")
        and getattr(sys.modules[value.__module__], value.__name__, value) is not value
    ]
    assert strays == []


def test_a_docstring_sees_the_same_classes_when_its_module_is_collected_alone() -> None:
    # It catches, as a ShardwrightError, what another module raises.
    run_pytest("src/shardwright/errors.py", "-k", "ShardwrightError")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_a_page_links_only_to_files_that_exist(page: Path) -> None:
    links = re.findall(r"\]\((?!https?://|#)([^)#\s]+)", page.read_text("utf-8"))
    assert [link for link in links if not (page.parent / link).exists()] == []


def named_tests(text: str) -> set[str]:
    """Return the tests that a page names: `test_...` in backticks, without a path or a suffix."""
    return set(re.findall(r"`(test_\w+)`", text))


def test_pages_name_only_tests_that_exist() -> None:
    sources = [path.read_text("utf-8") for path in sorted((ROOT / "tests").rglob("test_*.py"))]
    written = {name for source in sources for name in re.findall(r"^ *def (test_\w+)", source, re.MULTILINE)}
    named = {name: page.name for page in PAGES for name in named_tests(page.read_text("utf-8"))}
    assert len(named) > 50
    assert {name: page for name, page in named.items() if name not in written} == {}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_a_page_names_only_files_of_the_repository_that_exist(page: Path) -> None:
    named = re.findall(r"\b(?:tests|examples|benchmarks|docs|src)/[\w/-]+\.(?:py|md|json)\b", page.read_text("utf-8"))
    assert [name for name in named if not (ROOT / name).exists()] == []
