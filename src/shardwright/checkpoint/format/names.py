"""Names: the keys on the way to a value, joined by dots, as model files have them."""

from __future__ import annotations

from typing import Any

__all__ = ["joined", "prefix"]


def joined(name: str, key: Any) -> str:
    """The name of what lies under a key.

    >>> joined("layers", 0), joined("", "weight")
    ('layers.0', 'weight')
    """
    return f"{prefix(name)}{key}"


def prefix(name: str) -> str:
    """What the names of all that lies under a name begin with.

    >>> prefix("layers"), prefix("")
    ('layers.', '')
    """
    return f"{name}." if name else ""
