"""Pictures say who holds what, whatever the shape."""

from __future__ import annotations

import pytest
from rich.console import Console

from shardwright import Layout, Mesh, Partial, Ragged, Replicate, Shard
from shardwright.tensor import picture


def drawn(layout: Layout, title: str | None = None) -> str:
    console = Console(width=100, force_terminal=False, record=True, file=None, quiet=False)
    with console.capture() as capture:
        console.print(picture(layout, title))
    return capture.get()


def test_a_matrix_is_a_grid_of_owners() -> None:
    text = drawn(Layout(Mesh((2, 2)), [Shard(0), Shard(1)], (4, 6)))
    assert [line.split() for line in text.splitlines() if "rank" in line] == [
        ["│", "0:2", "│", "rank", "0", "│", "rank", "1", "│"],
        ["│", "2:4", "│", "rank", "2", "│", "rank", "3", "│"],
    ]


@pytest.mark.parametrize(
    ("layout", "words"),
    [
        (Layout(Mesh((2,)), [Ragged(0, (0, 5))], (5,)), ["0:5", "rank 1"]),
        (Layout(Mesh((2,)), [Partial()], (5,)), ["partial values of rank 0 1"]),
        (Layout(Mesh((2,)), [Shard(1)], (2, 4, 3)), ["[0:2, 0:2, 0:3]", "rank 0"]),
        (Layout(Mesh((2,)), [Replicate()], ()), ["[]", "rank 0 1"]),
        (Layout(Mesh((2,)), [Shard(0)], (0, 3)), ["region", "held by"]),
        (Layout(Mesh((400,)), [Shard(0)], (400,)), ["and 144 more regions"]),
        (Layout(Mesh((40,)), [Replicate()], (4,)), ["40 in all"]),
    ],
)
def test_every_shape_has_a_picture(layout: Layout, words: list[str]) -> None:
    text = drawn(layout)
    assert str(layout) in text
    for word in words:
        assert word in text


def test_a_title_replaces_the_layout() -> None:
    assert drawn(Layout(Mesh((2,)), [Shard(0)], (4,)), "weights").startswith("weights\n")
