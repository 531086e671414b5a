"""Fall back from a corrupted step to an older one without mixing the two.

Corruption is found while a step is read, when part of the state may already hold its values. The older step that is
loaded next overwrites all of them if it has all names of the corrupted one. With `on_missing`, names that are not
stored keep their values, so it may not; then the newer step is verified before any of it is loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, final

from shardwright.checkpoint.format.manifest import Manifest
from shardwright.checkpoint.format.tree import tensor_names
from shardwright.errors import CheckpointError, CorruptionError, FormatError, NotACheckpointError
from shardwright.listing import join_first

__all__ = ["Fallback"]

_MAX_LISTED = 5


@final
class Fallback:
    """The steps that were loaded in part, and which steps may be loaded after them. `manifest` reads a step's."""

    def __init__(self, manifest: Callable[[int], Manifest]) -> None:
        self._manifest = manifest
        self._names: dict[int, frozenset[Any]] = {}
        self._partly_loaded: list[int] = []

    def must_verify(self, step: int, older: Iterable[int]) -> bool:
        """Return True if a step must be verified before it is loaded, as an older one could not overwrite all of it.

        Raise `CheckpointError` if loading it would leave values in the state from a step that was loaded in part.
        """
        names = self._read_names(step)
        if names is None:
            return False  # loading it finds the same corruption before it changes anything
        self._names[step] = names
        for before in self._partly_loaded:
            remaining = sorted(map(str, self._names[before] - names))
            if remaining:
                listed = join_first([repr(name) for name in remaining], _MAX_LISTED)
                raise CheckpointError(
                    f"step {before} is corrupted, and part of it was loaded before that was found; step {step} does "
                    f"not have {listed}, which the state may now hold from step {before}. The state is undefined: "
                    f"create it anew, and pass step={step} to restore"
                )
        return any(older_names is not None and not names <= older_names for older_names in map(self._read_names, older))

    def failed(self, step: int) -> None:
        """Record that loading a step failed, possibly after it had changed the state."""
        if step in self._names:
            self._partly_loaded.append(step)

    def _read_names(self, step: int) -> frozenset[Any] | None:
        """Return the names of the tensors of a step; None if its manifest is corrupted."""
        try:
            return frozenset(tensor_names(self._manifest(step).tree))
        except (CorruptionError, FormatError, NotACheckpointError):
            return None
