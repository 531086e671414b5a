"""Restore the newest step that is intact: corrupted steps are skipped, any other error is raised."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager

from shardwright.errors import (
    CheckpointError,
    CorruptionError,
    FormatError,
    MissingKeyError,
    NotACheckpointError,
    RankFailedError,
    RankLostError,
    ShardwrightError,
    UnknownVersionError,
)
from shardwright.listing import join_first

__all__ = ["MAX_TRIES", "CheckpointWarning", "restore_newest"]

MAX_TRIES = 1000

_CORRUPTION = {kind.__name__ for kind in (CorruptionError, FormatError, MissingKeyError, NotACheckpointError)}


class CheckpointWarning(UserWarning):
    """A checkpoint was skipped or could not be removed; the message says which, and why.

    >>> import warnings
    >>> warnings.simplefilter("error", CheckpointWarning)  # stop, rather than continue from an older step
    """


def restore_newest(
    root: str,
    candidates: Callable[[], Mapping[int, str]],
    unfinished: Callable[[int], Mapping[int, str]],
    load: Callable[[int, Mapping[int, str]], None],
) -> int | None:
    """Load the newest intact step and return its number; None if there is no step.

    `candidates()` returns the steps that may be restored, each with the version of its manifest; `unfinished(step)` the
    later steps whose save did not complete; `load(step, candidates)` loads a step. All of them are collective.
    """
    tried: dict[tuple[int, str], ShardwrightError] = {}
    for _ in range(MAX_TRIES):
        versions = candidates()
        untried = {step: version for step, version in versions.items() if (step, version) not in tried}
        newest = max(untried, default=None)
        if newest is not None:
            try:
                with _note_tried_steps({step for step, _ in tried}):
                    load(newest, untried)
            except (RankFailedError, CorruptionError, FormatError, MissingKeyError, NotACheckpointError) as error:
                if not _is_corruption(error):
                    raise
                # If it was removed or replaced meanwhile, it has another version at the next look, or none.
                tried[newest, untried[newest]] = error
                continue
        skipped = {step: error for (step, version), error in tried.items() if versions.get(step) == version}
        _report_skipped(root, skipped, unfinished(-1 if newest is None else newest), newest)
        return newest
    raise CheckpointError(f"{root}: a step was replaced or removed while it was read, {MAX_TRIES} times")


def _report_skipped(
    root: str, skipped: Mapping[int, ShardwrightError], unfinished: Mapping[int, str], restored: int | None
) -> None:
    """Warn of the steps that were skipped; raise if no step is left."""
    reasons = {step: _in_one_line(error) for step, error in skipped.items()} | dict(unfinished)
    listed = "".join(f"\n  step {step}: {reasons[step]}" for step in sorted(reasons, reverse=True))
    if skipped and restored is None:
        raise CheckpointError(
            f"no checkpoint in {root} can be restored; the state may have been changed{listed}"
        ) from next(iter(skipped.values()))
    if listed:
        outcome = "nothing to restore" if restored is None else f"restored step {restored}"
        warnings.warn(f"{outcome} in {root}, and skipped{listed}", CheckpointWarning, stacklevel=4)


def _is_corruption(error: ShardwrightError) -> bool:
    """Return True if the error means that stored data is corrupted or missing, on every rank that failed."""
    if isinstance(error, RankFailedError):
        kinds = {failure.kind for failure in error.failures}
        # Ranks that waited for another rank's read report that they lost it; that rank reports the cause.
        return bool(kinds & _CORRUPTION) and kinds <= _CORRUPTION | {RankLostError.__name__}
    return not isinstance(error, UnknownVersionError)


@contextmanager
def _note_tried_steps(steps: Collection[int]) -> Iterator[None]:
    """Add a note to errors: the state may hold values of corrupted steps that were tried before."""
    try:
        yield
    except Exception as error:
        if steps:
            error.add_note(
                "the state is undefined: it may hold values of corrupted steps that were tried first: "
                + join_first(sorted(steps), len(steps))
            )
        raise


def _in_one_line(error: ShardwrightError) -> str:
    if isinstance(error, RankFailedError):
        reasons = [f"{failure.kind}: {failure.message}" for failure in error.failures if failure.kind in _CORRUPTION]
        return "; ".join(list(dict.fromkeys(reasons))[:4])
    return f"{type(error).__name__}: {error}"
