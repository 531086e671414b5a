"""The page "Follow one call" lists the files that five calls enter, in order, and how often the folder changes."""

from __future__ import annotations

import re
import sys
import tempfile
import threading
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path, PurePosixPath
from types import FrameType

import pytest
import torch

import shardwright as sw
from shardwright import checkpoint, sharded
from shardwright.testing import run_ranks

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs/explanation/follow-one-call.md"
PACKAGE = Path(sw.__file__).parent
# Every step uses these as it uses torch; a file in them is no step of a path.
FOUNDATIONS = (
    *("errors", "layout", "comm", "storage"),
    *("tensor/base", "checkpoint/format", "checkpoint/runtime", "sharded/base", "sharded/metadata"),
)
# The headings of the page, and the most changes of folder that a path may have.
MOST = {
    "`x @ w`, forward and backward": 7,
    "Save": 5,
    "Load under another layout": 9,
    "Redistribute": 3,
    "Reshard a ShardedTensor": 2,
}


def entered(call: Callable[[], object]) -> list[str]:
    """Return the files of the package that a second call enters, in order of their first function call."""
    root, found, lock = str(PACKAGE) + "/", dict[str, None](), threading.Lock()

    def look(frame: FrameType, event: str, _: object) -> None:
        name = frame.f_code.co_filename
        if event == "call" and name.startswith(root):
            with lock:
                found.setdefault(name.removeprefix(root))

    call()
    threading.setprofile(look)
    sys.setprofile(look)
    try:
        call()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    return [name for name in found if not name.startswith("testing/")]


def trace(folder: str) -> dict[str, list[str]]:
    """Return the files that each path enters on this rank."""
    mesh = sw.init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    x = sw.distribute_tensor(torch.arange(64.0).reshape(8, 8), mesh, [sw.Shard(0)])
    w = torch.nn.Parameter(sw.distribute_tensor(torch.ones(8, 8), mesh))
    columns = sw.distribute_tensor(torch.zeros(8, 8), mesh, [sw.Shard(1)])
    specs = [sharded.ChunkShardingSpec(dim, ["rank:0/cpu", "rank:1/cpu"]) for dim in (0, 1)]
    table = sharded.ones(specs[0], 8, 8)

    def product() -> None:
        w.grad = None
        (x @ w).sum().backward()

    def reshard() -> None:
        specs.reverse()
        table.reshard(specs[0])

    calls: list[Callable[[], object]] = [
        product,
        lambda: checkpoint.save({"w": x}, folder),
        lambda: checkpoint.load({"w": columns}, folder),
        lambda: x.redistribute(placements=[sw.Shard(1)]),
        reshard,
    ]
    return dict(zip(MOST, map(entered, calls), strict=True))


@pytest.fixture(scope="module")
def traced() -> dict[str, list[str]]:
    with tempfile.TemporaryDirectory() as folder:
        return run_ranks(2, trace, folder, timeout=120)[0]


def steps(files: list[str]) -> list[str]:
    """Return the files that are not in a foundation."""
    return [name for name in files if "/" in name and not name.startswith(tuple(f"{each}/" for each in FOUNDATIONS))]


def changes_of_folder(files: list[str]) -> int:
    folders = [PurePosixPath(name).parent for name in files]
    return sum(before != after for before, after in pairwise(folders))


def listed(heading: str) -> list[str]:
    """Return the files in the table under a heading of the page."""
    section = PAGE.read_text("utf-8").split(f"\n## {heading}\n")[1].split("\n## ")[0]
    return re.findall(r"^\| `(\S+\.py)` \|", section, re.MULTILINE)


@pytest.mark.parametrize("heading", MOST)
def test_the_page_lists_the_files_that_a_call_enters(heading: str, traced: dict[str, list[str]]) -> None:
    assert listed(heading) == steps(traced[heading])


@pytest.mark.parametrize("heading", MOST)
def test_a_call_changes_folders_rarely_and_the_page_states_how_often(
    heading: str, traced: dict[str, list[str]]
) -> None:
    number = changes_of_folder(steps(traced[heading]))
    assert 0 < number <= MOST[heading]
    row = list(MOST).index(heading)
    rows = re.findall(r"^\| .* \| (\d+) \| (\d+) \|$", PAGE.read_text("utf-8"), re.MULTILINE)
    assert [int(each) for each in rows[row]] == [number, MOST[heading]]


def test_every_file_that_the_page_names_exists() -> None:
    named = re.findall(r"`(\w+(?:/\w+)+\.py)`", PAGE.read_text("utf-8"))
    assert len(named) > 50
    assert [name for name in named if not (PACKAGE / name).is_file() and not (ROOT / name).is_file()] == []


def test_a_change_of_folder_is_counted_whenever_it_happens() -> None:
    assert changes_of_folder(["a/x.py", "a/y.py", "b/z.py", "a/u.py"]) == 2
    assert steps(["layout/region.py", "tensor/base/tagging.py", "tensor/api/dtensor.py"]) == ["tensor/api/dtensor.py"]
