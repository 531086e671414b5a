"""Going back from a damaged step to an older one without mixing the two.

Damage is found while a step is read, when part of the state may hold its values. The older step that is loaded next
replaces all of them, if it has all names of the damaged one. Where names of the state that are not stored keep their
values (`on_missing`), it may not: then the newer step is verified before anything of it is loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, final

from shardwright.checkpoint.format.manifest import Manifest
from shardwright.checkpoint.format.tree import tensor_names
from shardwright.errors import CheckpointError, CorruptionError, FormatError, NotACheckpointError

__all__ = ["Fallback"]

_MAX_LISTED = 5


@final
class Fallback:
    """The steps that were loaded in part, and which may be loaded after them. `manifest` reads that of a step."""

    def __init__(self, manifest: Callable[[int], Manifest]) -> None:
        self._manifest = manifest
        self._names: dict[int, frozenset[Any]] = {}
        self._touched: list[int] = []

    def must_verify(self, step: int, older: Iterable[int]) -> bool:
        """Return whether a step is to be verified before it is loaded: an older one could not replace all of it.

        Raise `CheckpointError` if it would leave values of a step in the state that was loaded in part before.
        """
        names = self._read(step)
        if names is None:
            return False  # it is not loaded: that finds the same damage before it changes anything
        self._names[step] = names
        for before in self._touched:
            left = sorted(map(str, self._names[before] - names))
            if left:
                told = ", ".join(map(repr, left[:_MAX_LISTED])) + (" and more" if len(left) > _MAX_LISTED else "")
                raise CheckpointError(
                    f"step {before} is damaged, and was loaded in part before that was found; step {step} does not "
                    f"have {told}, which the state may now hold from step {before}. The state is undefined: make it "
                    f"anew, and give restore the step, step={step}"
                )
        return any(other is not None and not names <= other for other in map(self._read, older))

    def failed(self, step: int) -> None:
        """Note that the load of a step failed, perhaps after it had changed the state."""
        if step in self._names:
            self._touched.append(step)

    def _read(self, step: int) -> frozenset[Any] | None:
        """Return the names of the tensors of a step, None if its manifest is damaged."""
        try:
            return frozenset(tensor_names(self._manifest(step).tree))
        except (CorruptionError, FormatError, NotACheckpointError):
            return None
