"""How every test here is run: budgets for hypothesis, tests that need a GPU, code blocks of the documentation."""

from __future__ import annotations

import importlib
import os
import pkgutil
from doctest import ELLIPSIS, NORMALIZE_WHITESPACE

import pytest
from hypothesis import settings
from sybil import Sybil
from sybil.parsers.markdown import PythonCodeBlockParser, SkipParser

import shardwright

# Where pytest collects a module's docstrings before anybody has imported its package, it imports the package, which
# imports the module, and then imports the module once more: two classes of each name. So packages come first.
for found in pkgutil.walk_packages(shardwright.__path__, "shardwright."):
    if found.ispkg:
        importlib.import_module(found.name)

# `make test` tries the same examples every time; `make test-full` tries new ones, many more.
settings.register_profile("default", max_examples=25, derandomize=True, deadline=None)
settings.register_profile("full", max_examples=1000, deadline=None, print_blob=True)
BUDGET = os.environ.get("SHARDWRIGHT_BUDGET", "default")
settings.load_profile(BUDGET)

pytest_collect_file = Sybil(
    parsers=[PythonCodeBlockParser(doctest_optionflags=ELLIPSIS | NORMALIZE_WHITESPACE), SkipParser()],
    patterns=["README.md", "docs/*.md", "docs/*/*.md"],
).pytest()


# Processes that run tests in parallel take whole files: one that is begun last keeps the others waiting.
LONGEST = (
    "tests/test_examples.py",
    "tests/tensor/test_training.py",
    "tests/testing/test_programs.py",
    "tests/testing/test_every_operator.py",
    "tests/checkpoint/test_hostile.py",
    "tests/parallel/test_transformers.py",
    "tests/tensor/test_caches.py",
    "tests/tensor/test_compile.py",
)


def pytest_runtest_setup() -> None:
    """Return to our budget: importing torch's database of operators loads torch's profile for hypothesis."""
    settings.load_profile(BUDGET)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run the files that take longest first, and skip what is marked `gpu` where there is no GPU."""
    items.sort(key=lambda item: next((n for n, name in enumerate(LONGEST) if item.path.match(name)), len(LONGEST)))
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    import torch  # only here: collecting tests that need no GPU should not wait for it

    if not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))
