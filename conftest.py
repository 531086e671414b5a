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
settings.load_profile(os.environ.get("SHARDWRIGHT_BUDGET", "default"))

pytest_collect_file = Sybil(
    parsers=[PythonCodeBlockParser(doctest_optionflags=ELLIPSIS | NORMALIZE_WHITESPACE), SkipParser()],
    patterns=["README.md", "docs/*.md", "docs/*/*.md"],
).pytest()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what is marked `gpu` where there is no GPU."""
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    import torch  # only here: collecting tests that need no GPU should not wait for it

    if not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))
