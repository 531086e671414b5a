"""Misuse, damage and hostile input: one line on stderr, the right exit code, never a traceback."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from shardwright import checkpoint
from tests.cli.conftest import Cli

EVERY = {
    "show": ("show",),
    "cat": ("cat", "w"),
    "stats": ("stats",),
    "fingerprint": ("fingerprint",),
    "explain": ("explain", "--mesh", "dp=2"),
    "diff": ("diff", "."),
    "merge": ("merge", ".", "--out", "out"),
    "convert": ("convert", "out", "--to", "hf"),
}


def on(path: object, words: tuple[str, ...]) -> list[object]:
    command, *rest = words
    return [command, path, *rest]


def test_the_version_is_that_of_the_package(cli: Cli) -> None:
    import shardwright

    assert cli("--version").out == f"shardwright {shardwright.__version__}\n"


def test_no_command_shows_the_help_and_is_misuse(cli: Cli) -> None:
    done = cli()
    assert done.code == 2
    assert "Usage: shardwright" in done.out


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (("nonsense",), "No such command 'nonsense'."),
        (("show",), "Missing argument 'PATH'."),
        (("show", ".", "--colour"), "No such option: --colour"),
        (("stats", ".", "--bins", "x"), "--bins"),
    ],
)
def test_misuse_is_one_line_and_2(cli: Cli, words: tuple[str, ...], problem: str) -> None:
    done = cli(*words)
    assert (done.code, done.out) == (2, "")
    assert problem in done.err
    assert done.err.count("\n") == 1
    with_json = cli(*words, "--json")
    assert with_json.json["error"]["exit_code"] == 2


@pytest.mark.parametrize("words", EVERY.values(), ids=EVERY)
def test_a_path_that_holds_no_checkpoint_is_unreadable(cli: Cli, tmp_path: Path, words: tuple[str, ...]) -> None:
    (tmp_path / "file").write_text("hello")
    (tmp_path / "empty").mkdir()
    for path in (tmp_path / "none", tmp_path / "file", tmp_path / "empty", "s3://bucket/run", "\x1b[31m", "x" * 5000):
        done = cli(*on(path, words))
        assert (done.code, done.out) == (3, ""), path
        assert done.err.count("\n") == 1
        assert "\x1b" not in done.err


@pytest.mark.parametrize("words", EVERY.values(), ids=EVERY)
@pytest.mark.parametrize("damage", ["truncated manifest", "flipped manifest", "missing file", "empty manifest"])
def test_a_damaged_checkpoint_is_reported_without_a_traceback(
    cli: Cli, tmp_path: Path, words: tuple[str, ...], damage: str
) -> None:
    checkpoint.save({"w": torch.arange(10)}, tmp_path / "c")
    manifest = tmp_path / "c" / "manifest.json"
    data = bytearray(manifest.read_bytes())
    match damage:
        case "truncated manifest":
            manifest.write_bytes(data[:-10])
        case "flipped manifest":
            data[40] ^= 1
            manifest.write_bytes(data)
        case "empty manifest":
            manifest.write_bytes(b"")
        case "missing file":
            next((tmp_path / "c").glob("*.safetensors")).unlink()
    done = cli(*on(tmp_path / "c", words))
    assert done.code in (1, 3)
    assert done.out == ""
    assert done.err.count("\n") == 1


def test_a_damaged_block_is_found_by_what_reads_it(cli: Cli, tmp_path: Path) -> None:
    checkpoint.save({"w": torch.arange(10), "v": torch.arange(3)}, tmp_path / "c")
    file = next((tmp_path / "c").glob("*.safetensors"))
    data = bytearray(file.read_bytes())
    data[4096] ^= 1
    file.write_bytes(data)
    assert cli("show", tmp_path / "c").code == 0
    for words in EVERY.values():
        if words[0] in ("cat", "stats", "fingerprint"):
            done = cli(*on(tmp_path / "c", words))
            assert done.code == 1
            assert "'w'" in done.err
    assert cli("cat", tmp_path / "c", "v").code == 0


@pytest.mark.parametrize(
    "name",
    [
        "a" * 100_000,
        "\x1b]0;gone\x07",
        "[bold red]x[/]",
        ":smile:",
        "\u202eright\u202c",
        "日本語",
        "a\nb",
        " ",
        "",
        "-x",
    ],
    ids=["huge", "escape", "markup", "emoji", "bidi", "japanese", "newline", "space", "empty", "dash"],
)
def test_names_of_any_kind_are_shown_and_do_nothing_to_the_terminal(cli: Cli, tmp_path: Path, name: str) -> None:
    checkpoint.save({name: torch.arange(3), "other": 1, "values": {name: "x"}}, tmp_path / "c")
    for words in (("show",), ("show", "--flat"), ("show", "--patterns"), ("stats",)):
        done = cli(*on(tmp_path / "c", words))
        assert done.code == 0
        assert all(line.isprintable() for line in done.lines)
    flat = cli("show", tmp_path / "c", "--json").json
    assert any(row["name"] == (name or "state") or row["name"].startswith(name) for row in flat["rows"])
    if not name.startswith("-"):
        assert cli("cat", tmp_path / "c", flat["rows"][0]["name"]).lines == ["[0, 1, 2]", "int64 [3]"]
    assert cli("cat", tmp_path / "c", "--", flat["rows"][0]["name"]).code == 0


def test_an_empty_checkpoint_is_shown(cli: Cli, tmp_path: Path) -> None:
    checkpoint.save({}, tmp_path / "c")
    assert "0 tensors, 0 elements, 0 B" in cli("show", tmp_path / "c").out
    assert cli("stats", tmp_path / "c").code == 0
