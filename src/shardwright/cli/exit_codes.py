"""The exit codes of every command, and the one that fits an error."""

from __future__ import annotations

from shardwright.errors import (
    ArgumentTypeError,
    CorruptionError,
    FormatError,
    LayoutError,
    LoadMismatchError,
    MappingError,
    MissingNameError,
    PlanError,
    UsageError,
)

__all__ = ["FOUND", "INTERRUPTED", "MISUSE", "OK", "PIPE_CLOSED", "UNREADABLE", "exit_code_of"]

OK = 0
FOUND = 1
"""Something was found: damage, a difference, a step that is not valid."""
MISUSE = 2
"""The command was called wrongly: an unknown option or name, arguments that do not fit together."""
UNREADABLE = 3
"""There is no checkpoint, or it cannot be read or written."""
INTERRUPTED = 130
"""Ended by Ctrl-C: 128 + SIGINT, as shells have it."""
PIPE_CLOSED = 141
"""The reader of the output has closed it (`| head`): 128 + SIGPIPE."""


def exit_code_of(error: BaseException) -> int:
    """Return the exit code for an error.

    >>> exit_code_of(MissingNameError("no tensor is stored under 'w'")), exit_code_of(OSError("disk failed"))
    (2, 3)
    """
    if isinstance(error, CorruptionError):
        return FOUND
    if isinstance(error, FormatError):  # also a ValueError, but of the checkpoint, not of an argument
        return UNREADABLE
    misuse = (UsageError, MissingNameError, LoadMismatchError, MappingError, ArgumentTypeError, LayoutError, PlanError)
    return MISUSE if isinstance(error, misuse) else UNREADABLE
