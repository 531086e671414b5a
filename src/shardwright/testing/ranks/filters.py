"""Copy the caller's warning filters to the ranks: a warning that is an error here is an error there."""

from __future__ import annotations

import re
import warnings
from typing import Any

__all__ = ["Filter", "apply_filters", "current_filters"]

# Action, message pattern, category, module pattern, line: the entries of `warnings.filters` without compiled patterns.
Filter = tuple[Any, str, Any, str, int]


def current_filters() -> list[Filter]:
    """Return the active filters; the first match applies."""
    return [
        (action, _pattern(message), category, _pattern(module), line)
        for action, message, category, module, line in warnings.filters
    ]


def apply_filters(filters: list[Filter]) -> None:
    """Replace all active filters with these.

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
    # The interpreter's default filters have plain strings instead of patterns.
    return re.escape(value) + r"\Z" if isinstance(value, str) else value.pattern
