"""The caller's warning filters, carried to the ranks: a warning that is an error here is one there."""

from __future__ import annotations

import re
import warnings
from typing import Any

__all__ = ["Filter", "apply_filters", "current_filters"]

# Action, message pattern, category, module pattern, line. What `warnings` holds, less the compiled patterns.
Filter = tuple[Any, str, Any, str, int]


def current_filters() -> list[Filter]:
    """The filters in force, first match first."""
    return [
        (action, _pattern(message), category, _pattern(module), line)
        for action, message, category, module, line in warnings.filters
    ]


def apply_filters(filters: list[Filter]) -> None:
    """Puts these filters in force, in place of all others.

    >>> with warnings.catch_warnings():
    ...     apply_filters([("ignore", "old", DeprecationWarning, "", 0)])
    ...     current_filters()
    [('ignore', 'old', <class 'DeprecationWarning'>, '', 0)]
    """
    warnings.resetwarnings()
    for action, message, category, module, line in reversed(filters):
        warnings.filterwarnings(action, message, category, module, line)


def _pattern(value: re.Pattern[str] | str | None) -> str:
    if value is None:
        return ""
    # The interpreter's own first filters hold plain names where later ones hold patterns.
    return re.escape(value) + r"\Z" if isinstance(value, str) else value.pattern
