"""Run the `shardwright` command: parse arguments, run one command, return its exit code."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import cast

import typer

from shardwright.cli.app import app
from shardwright.cli.exit_codes import MISUSE, OK
from shardwright.cli.failures import close_pipe, report_failure, report_interrupt, say
from shardwright.errors import ShardwrightError

__all__ = ["main", "run"]

_COMPLETION = "_SHARDWRIGHT_COMPLETE"
# Click's error: typer does not export it, and its newer versions bring a click of their own.
_ClickUsageError = cast(type[Exception], typer.BadParameter.__mro__[1])


def run(arguments: Sequence[str]) -> int:
    """Run one command and return its exit code.

    >>> run(["show", "/nowhere"])
    3
    """
    as_json = "--json" in arguments
    command = typer.main.get_command(app)
    if _COMPLETION in os.environ:  # a shell asks for completions
        command.main(prog_name="shardwright", complete_var=_COMPLETION)
    try:
        with command.make_context("shardwright", list(arguments)) as context:
            command.invoke(context)
        sys.stdout.flush()
        return OK
    except typer.Exit as end:
        sys.stdout.flush()
        return end.exit_code
    except BrokenPipeError:
        return close_pipe()
    except (KeyboardInterrupt, typer.Abort):
        return report_interrupt()
    except _ClickUsageError as error:
        message = " ".join(getattr(error, "format_message", error.__str__)().split())
        say(f"{message} (see shardwright --help)", "UsageError", MISUSE, as_json=as_json)
        return MISUSE
    except (ShardwrightError, OSError, MemoryError) as error:
        return report_failure(error, as_json=as_json)


def main() -> None:
    """Run the command line of this process, and exit."""
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]  # names may have any character
    sys.exit(run(sys.argv[1:]))
