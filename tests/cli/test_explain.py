"""`shardwright explain`: the bytes that ranks would hold and read, against a count by hand."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from shardwright import checkpoint
from tests.cli.conftest import Cli


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """Two tensors of several blocks, and a small one."""
    state = {
        "wq": torch.zeros(1024, 2048),
        "wo": torch.zeros(2048, 1024),
        "norm": torch.zeros(10),
        "n": torch.zeros(()),
    }
    checkpoint.save(state, tmp_path / "c")
    return tmp_path / "c"


def test_ranks_hold_their_shards_and_read_whole_blocks(cli: Cli, saved: Path) -> None:
    found = cli("explain", saved, "--mesh", "dp=4,tp=2", "--plan", "wq=tp:1", "--json").json
    held = [rank["held_bytes"] for rank in found["ranks"]]
    # wq: 256 rows of 1024 columns; wo: 512 rows; norm: 3, 3, 3 and 1 elements; n: one
    assert held == [256 * 1024 * 4 + 512 * 1024 * 4 + 4 * part + 4 for part in (3, 3, 3, 3, 3, 3, 1, 1)]
    # wq: 256 rows of 8 KiB are two blocks, both read in full; wo: 512 rows of 4 KiB are two blocks; norm and n: all
    assert {rank["read_bytes"] for rank in found["ranks"]} == {(2 << 20) + (2 << 20) + 40 + 4}
    assert [host["read_bytes"] for host in found["hosts"]] == [(16 << 20) + 44]
    hosts = cli("explain", saved, "--mesh", "dp=4,tp=2", "--ranks-per-host", "2", "--json").json["hosts"]
    assert [host["read_bytes"] for host in hosts] == [(4 << 20) + 44] * 4


def test_a_plan_may_be_a_file_and_the_first_rule_decides(cli: Cli, saved: Path, tmp_path: Path) -> None:
    plan = tmp_path / "plan"
    plan.write_text("# a comment\nwq = dp:R, tp:0\nw*=dp:1,tp:R\n")
    found = cli("explain", saved, "--mesh", "dp=2,tp=2", "--plan", plan, "--json").json
    layouts = {row["example"]: row["layout"] for row in found["layouts"]}
    assert layouts == {
        "wq": "(dp: R, tp: S(0))",
        "wo": "(dp: S(1), tp: R)",
        "norm": "(dp: S(0), tp: R)",
        "n": "(dp: R, tp: R)",
    }


def test_more_ranks_than_rows_leave_some_empty(cli: Cli, saved: Path) -> None:
    done = cli("explain", saved, "--mesh", "dp=64", "--only", "norm")
    assert done.code == 0
    assert "a rank holds 0 B to 4 B" in done.out
    assert "and 48 more ranks" in done.out


@pytest.mark.parametrize(
    "arguments",
    [
        ["--mesh", "dp"],
        ["--mesh", "dp=0"],
        ["--mesh", "dp=2,dp=2"],
        ["--mesh", "dp=x"],
        [],
        ["--mesh", "dp=2", "--plan", "wq=tp:0"],
        ["--mesh", "dp=2", "--plan", "wq"],
        ["--mesh", "dp=2", "--plan", "wq=dp:5"],
        ["--mesh", "dp=2", "--plan", "nothing=dp:0"],
        ["--mesh", "dp=2", "--ranks-per-host", "0"],
    ],
)
def test_a_mesh_or_a_plan_that_does_not_fit_is_misuse(cli: Cli, saved: Path, arguments: list[str]) -> None:
    done = cli("explain", saved, *arguments)
    assert (done.code, done.out) == (2, "")
