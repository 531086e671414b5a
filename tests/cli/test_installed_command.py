"""The installed command, in processes of its own: exit codes, pipes, terminals, interrupts."""

from __future__ import annotations

import json
import os
import pty
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import torch

from shardwright import checkpoint

COMMAND = [sys.executable, "-m", "shardwright"]


def command(*arguments: object, **options: object) -> subprocess.CompletedProcess[str]:
    options = {"capture_output": True, "text": True, "timeout": 120, "check": False} | options
    return subprocess.run([*COMMAND, *map(str, arguments)], **options)  # type: ignore[call-overload, no-any-return]  # options are those of subprocess.run


def test_the_entry_point_is_declared_and_the_module_is_the_same_command(step: Path) -> None:
    import tomllib

    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text("utf-8"))["project"]
    assert project["scripts"] == {"shardwright": "shardwright.cli.main:main"}
    done = command("show", step, "--json")
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)["tensors"] == 9


def test_help_names_every_command_and_exit_codes_and_completion() -> None:
    done = command("--help")
    assert done.returncode == 0
    commands = "show ls cat stats verify diff fingerprint repair merge convert rm gc explain".split()
    for word in (*commands, "--install-completion", "--version", "Exit codes: 0 well"):
        assert word in done.stdout


def test_a_closed_pipe_ends_the_command_quietly(tmp_path: Path) -> None:
    checkpoint.save({"w": torch.zeros(2_000_000, dtype=torch.int8)}, tmp_path / "c")
    script = f'{" ".join(COMMAND)} cat {tmp_path / "c"} w --all | head -c 20; echo " ${{PIPESTATUS[0]}}"'
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout == "0 0 0 0 0 0 0 0 0 0  141\n"
    assert done.stderr == ""


def test_an_interrupt_ends_the_command_with_130_and_one_line(tmp_path: Path) -> None:
    checkpoint.save({"w": torch.zeros(30_000_000, dtype=torch.int8)}, tmp_path / "c")
    with subprocess.Popen(
        [*COMMAND, "cat", str(tmp_path / "c"), "w", "--all"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # it is ignored in jobs of the background
    ) as running:
        assert running.stdout is not None
        assert running.stderr is not None
        running.stdout.read(10)  # it has begun, and blocks as nobody reads on
        running.send_signal(signal.SIGINT)
        time.sleep(0.1)
        running.stdout.read()
        assert running.stderr.read() == b"shardwright: interrupted\n"
        assert running.wait(60) == 130


def test_a_terminal_gets_colours_and_its_width_and_a_pipe_gets_neither(step: Path) -> None:
    piped = command("show", step, "--flat")
    assert "\x1b" not in piped.stdout
    assert not any(line.endswith(" ") for line in piped.stdout.splitlines())
    main, other = pty.openpty()
    environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "60"}
    environment.pop("NO_COLOR", None)
    with subprocess.Popen([*COMMAND, "show", str(step), "--flat"], stdout=other, env=environment) as running:
        os.close(other)
        shown = b""
        while select.select([main], [], [], 60)[0]:
            try:
                part = os.read(main, 4096)
            except OSError:  # the other end is closed
                break
            if not part:
                break
            shown += part
        assert running.wait(60) == 0
    os.close(main)
    assert b"\x1b[1m" in shown


def test_names_that_the_encoding_does_not_have_are_escaped(tmp_path: Path) -> None:
    checkpoint.save({"größe": torch.zeros(1)}, tmp_path / "c")
    done = command("show", tmp_path / "c", env={**os.environ, "PYTHONIOENCODING": "ascii"})
    assert done.returncode == 0
    assert "gr\\xf6\\xdfe" in done.stdout


def test_completion_offers_commands() -> None:
    environment = {
        **os.environ,
        "_SHARDWRIGHT_COMPLETE": "complete_bash",
        "COMP_WORDS": "shardwright s",
        "COMP_CWORD": "1",
    }
    done = command(env=environment)
    assert done.stdout.split() == ["show", "stats"]
