"""How errors are reported: one line on stderr, with `--json` also an object on stdout, and an exit code."""

from __future__ import annotations

import os
import sys
from typing import Any

from shardwright.cli.exit_codes import INTERRUPTED, PIPE_CLOSED, exit_code_of
from shardwright.cli.report import dump_json
from shardwright.cli.text import printable

__all__ = ["close_pipe", "report_failure", "report_interrupt", "say"]


def report_failure(error: BaseException, *, as_json: bool) -> int:
    """Report an error of a command and return the exit code."""
    code = exit_code_of(error)
    say(one_line(error), type(error).__name__, code, as_json=as_json)
    return code


def say(message: str, kind: str, code: int, *, as_json: bool) -> None:
    """Write one line to stderr, and with `as_json` an object with the same to stdout."""
    sys.stderr.write(f"shardwright: {message}\n")
    if as_json:
        failure: dict[str, Any] = {"error": {"kind": kind, "message": message, "exit_code": code}}
        dump_json(failure, sys.stdout)


def one_line(error: BaseException) -> str:
    """Return the message of an error as one line of printable characters.

    >>> one_line(OSError(2, "No such file or directory", "a/b")), one_line(ValueError("two\\n  lines"))
    ('a/b: No such file or directory', 'two; lines')
    """
    if isinstance(error, OSError) and error.strerror and error.filename:
        return printable(f"{error.filename}: {error.strerror}")
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return printable("; ".join(lines)) or type(error).__name__


def report_interrupt() -> int:
    """Report Ctrl-C and return the exit code."""
    sys.stderr.write("shardwright: interrupted\n")
    return INTERRUPTED


def close_pipe() -> int:
    """Stop writing, after the reader of the output has closed it, and return the exit code."""
    # What is still buffered would fail again when the interpreter exits.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return PIPE_CLOSED
