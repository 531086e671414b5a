"""Private names of torch: every one that is used is listed with a reason, and this torch has every one listed."""

from __future__ import annotations

import ast
from pathlib import PurePosixPath

import pytest

from shardwright.torch_private import PRIVATE_NAMES, resolve
from tests.test_architecture import ROOT, SOURCES, uses


def private_uses() -> dict[str, str]:
    """Return every dotted name below `torch` with a private part that the package uses, and a file that uses it."""
    found = {}
    for path in SOURCES:
        relative = PurePosixPath(path.relative_to(ROOT / "src").as_posix())
        for use in uses(ast.parse(path.read_text("utf-8")), relative):
            parts = use.name.split(".")
            if parts[0] == "torch" and any(part.startswith("_") and not part.startswith("__") for part in parts):
                found[use.name] = f"{relative}:{use.line}"
    return found


def is_listed(name: str) -> bool:
    return any(f"{name}.".startswith(f"{listed}.") or listed.startswith(f"{name}.") for listed in PRIVATE_NAMES)


@pytest.mark.parametrize("name", PRIVATE_NAMES)
def test_this_torch_has_the_private_name(name: str) -> None:
    assert resolve(name) is not None


def test_every_private_name_that_is_used_is_listed_with_its_reason() -> None:
    found = private_uses()
    assert len(found) > 50
    missing = [f"{name} ({where})" for name, where in found.items() if not is_listed(name)]
    assert not missing, "list them in src/shardwright/torch_private.py: " + ", ".join(missing)


def test_every_listed_name_is_used_and_has_a_reason() -> None:
    found = private_uses()
    unused = [
        listed
        for listed in PRIVATE_NAMES
        if not any(f"{name}.".startswith(f"{listed}.") or listed.startswith(f"{name}.") for name in found)
    ]
    assert not unused
    assert all(len(reason) > 10 for reason in PRIVATE_NAMES.values())


def test_a_name_that_torch_does_not_have_fails() -> None:
    with pytest.raises((AttributeError, ImportError)):
        resolve("torch._C._no_such_name")
