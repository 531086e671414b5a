"""Names: the keys that lead to a value, joined by dots, as in a PyTorch state dict."""

from __future__ import annotations

from typing import Any

__all__ = ["joined", "prefix"]


def joined(name: str, key: Any) -> str:
    """Return the name of the value under a key.

    >>> joined("layers", 0), joined("", "weight")
    ('layers.0', 'weight')
    """
    return f"{prefix(name)}{key}"


def prefix(name: str) -> str:
    """Return the prefix of all names under a name.

    >>> prefix("layers"), prefix("")
    ('layers.', '')
    """
    return f"{name}." if name else ""
