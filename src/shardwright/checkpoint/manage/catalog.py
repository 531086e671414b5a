"""What the first rank knows of the steps under a root: which are valid, superseded, unfinished, or to be removed."""

from __future__ import annotations

from typing import NamedTuple, final

from shardwright.checkpoint.manage.record import Lineage, Record, StepLineage, current_lineage, lineage_from
from shardwright.checkpoint.manage.retention import Policy, Saved, to_remove
from shardwright.checkpoint.manage.steps import Steps
from shardwright.errors import (
    CorruptionError,
    FormatError,
    NotACheckpointError,
    StorageBusyError,
    StorageError,
    UnknownVersionError,
)

__all__ = ["StepCatalog"]


class _Inspected(NamedTuple):
    """What was read of a step while its manifest had this version: how retention sees it, and its lineage."""

    version: str
    saved: Saved | None
    lineage: StepLineage | None


@final
class StepCatalog:
    """The steps under a root, with what their manifests say; a manifest is read again only after it has changed."""

    def __init__(self, steps: Steps, policy: Policy) -> None:
        self._steps, self._policy = steps, policy
        self._inspected: dict[int, _Inspected] = {}
        self._lineage: Lineage | None = None  # the one that this manager started
        self._returned_to: int | None = None  # the step to which the run went back, until the next save

    def go_back_to(self, step: int) -> None:
        """Note that the run continues from an earlier step: the next save starts a new lineage."""
        self._returned_to = step

    def continue_newest(self) -> None:
        """Note that the run continues from the newest step."""
        self._returned_to = self._lineage = None

    def saved(self, step: int) -> Saved | None:
        """Return a step as retention sees it; None if it does not exist or is of a newer format."""
        return self._inspect(step, self._steps.committed().get(step))

    def superseded(self) -> list[int]:
        """Return the steps that a run has left behind."""
        return list(current_lineage(self._lineages()).superseded)

    def current(self) -> dict[int, str]:
        """Return the steps that have a manifest and are not superseded, each with the version of its manifest."""
        superseded = current_lineage(self._lineages()).superseded
        return {step: version for step, version in self._steps.committed().items() if step not in superseded}

    def valid(self) -> dict[int, Saved]:
        """Return the current steps with a valid manifest and all their files."""
        inspected = {step: self._inspect(step, version) for step, version in self.current().items()}
        return {step: saved for step, saved in inspected.items() if saved is not None and saved.valid}

    def lineage_of(self, step: int) -> Lineage:
        """Return the lineage to record with a step that is saved now."""
        lineages = self._lineages()
        if self._returned_to is not None:
            new, current = lineage_from(self._returned_to, lineages), current_lineage(lineages)
            self._lineage = current if new.superseded == current.superseded else new
            self._returned_to = None
        lineage = current_lineage(lineages) if self._lineage is None else self._lineage
        superseded = {
            other: save_id
            for other, save_id in lineage.superseded.items()
            if other != step and other in lineages and lineages[other].save_id == save_id
        }
        return Lineage(lineage.number, superseded)

    def unfinished(self, after: int) -> dict[int, str]:
        """Return the steps after this one whose save did not complete, or may not have, each with what is known."""
        reasons = {}
        for step in self._steps.without_manifest():
            if step > after:
                try:
                    if self._steps.has_data(step) and self._steps.is_abandoned(step):
                        reasons[step] = "it has no manifest: its save did not complete"
                except StorageError as error:
                    reasons[step] = f"it has no manifest, and its state cannot be determined: {error}"
        return reasons

    def clean_up_after(self, step: int) -> list[str]:
        """Remove what the policy does not keep, and leftovers of crashes; return the errors. Steps in use stay."""
        self._steps.announce(step)
        errors: list[str] = []
        try:
            unfinished = [candidate for candidate in self._steps.without_manifest() if candidate <= step]
            expired = self._expired(step)
        except StorageError as error:
            return [str(error)]
        for candidate in [*unfinished, *expired]:
            try:
                if candidate in expired:
                    self._steps.remove(candidate, if_version=self._inspected[candidate].version)
                elif self._steps.is_abandoned(candidate):
                    self._steps.remove(candidate, if_version="")
            except StorageBusyError:
                continue
            except StorageError as error:
                errors.append(str(error))
            self._inspected.pop(candidate, None)
        return errors

    def expired(self) -> dict[int, str]:
        """Return the steps that the policy does not keep, each with the version of its manifest.

        They are judged as after a save of the newest valid step.
        """
        newest = max(self.valid(), default=None)
        steps = [] if newest is None else self._expired(newest)
        return {step: self._inspected[step].version for step in steps}

    def _expired(self, step: int) -> list[int]:
        """Return the saved steps that the policy does not keep, once this step is saved."""
        if self._policy.keeps_all:
            return []
        superseded = current_lineage(self._lineages()).superseded
        inspected = [
            self._inspect(number, version) for number, version in self._steps.committed().items() if number <= step
        ]
        # Superseded steps are removed like the others, but do not count as kept ones.
        judged = [saved._replace(valid=saved.valid and saved.step not in superseded) for saved in inspected if saved]
        return to_remove(judged, self._policy, step)

    def _inspect(self, step: int, version: str | None) -> Saved | None:
        """Read the manifest of a step, unless this version of it was read before."""
        if version is None:
            return None
        before = self._inspected.get(step)
        if before is not None and before.version == version:
            return before.saved
        saved: Saved | None = None
        lineage: StepLineage | None = None
        try:
            manifest = self._steps.manifest(step)
            record = Record.of(manifest)
            saved = Saved(step, {} if record is None else record.values())
            lineage = StepLineage(manifest.save_id, Lineage() if record is None else record.lineage())
        except UnknownVersionError:
            pass  # written by a newer version: valid, but not ours to judge
        except (CorruptionError, FormatError, NotACheckpointError):
            saved = Saved(step, valid=False)
        self._inspected[step] = _Inspected(version, saved, lineage)
        return saved

    def _lineages(self) -> dict[int, StepLineage]:
        """Return the lineages of all steps. A corrupted manifest has none; one that cannot be read raises.

        Without it, a superseded step could be taken for the newest.
        """
        lineages = {}
        for step, version in self._steps.committed().items():
            self._inspect(step, version)
            lineage = self._inspected[step].lineage
            if lineage is not None:
                lineages[step] = lineage
        return lineages
