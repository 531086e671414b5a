"""Checkpoints of a training run: one folder for each step, kept and removed by rules, the newest good one restored."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from datetime import datetime
from types import TracebackType
from typing import Any, NamedTuple, TypeVar, final

import msgspec

from shardwright import comm
from shardwright.checkpoint.api import async_save, load, save
from shardwright.checkpoint.background import AsyncSave
from shardwright.checkpoint.format.values import Codec
from shardwright.checkpoint.manage.fallback import Fallback
from shardwright.checkpoint.manage.preemption import Preemption
from shardwright.checkpoint.manage.record import FIELD, Line, Record, Seen, line_from, newest_line, numbers
from shardwright.checkpoint.manage.retention import KeepBest, Policy, Saved, best_of, to_remove
from shardwright.checkpoint.manage.steps import Steps
from shardwright.checkpoint.reading.request import Cast, OnMissing, Rename
from shardwright.checkpoint.runtime.alike import raised_as_itself
from shardwright.checkpoint.runtime.first_rank import first_rank_finds
from shardwright.checkpoint.runtime.progress import ProgressCallback
from shardwright.checkpoint.verify import check_files
from shardwright.errors import (
    ArgumentTypeError,
    CheckpointError,
    CorruptionError,
    FormatError,
    MissingKeyError,
    NotACheckpointError,
    RankFailedError,
    RankLostError,
    ShardwrightError,
    StorageBusyError,
    StorageError,
    UnknownVersionError,
)
from shardwright.layout.integers import integer

__all__ = ["CheckpointManager", "CheckpointWarning"]

T = TypeVar("T")

_DAMAGE = {kind.__name__ for kind in (CorruptionError, FormatError, MissingKeyError, NotACheckpointError)}
_MAX_TRIES = 1000
_VERIFYING = 24 * 3600.0  # seconds: a rank that dies is noticed at once, however long this is


class CheckpointWarning(UserWarning):
    """A checkpoint was passed over, or could not be removed: which, and what is wrong with it.

    >>> import warnings
    >>> warnings.simplefilter("error", CheckpointWarning)  # stop, rather than go on from an older step
    """


class _Looked(NamedTuple):
    """What was found of a step that had this mark: how retention sees it, and what it says of its line."""

    mark: str
    saved: Saved | None
    seen: Seen | None


@final
class CheckpointManager:
    """The checkpoints of a run, in folders `step-00001000` under `root`.

    `keep_last=n`, `keep_every=k` and `keep_best=KeepBest(n, metric, mode)` say which steps are kept: all that any
    of them names, and always the newest; without any, everything. `save_every` is for `should_save` and `step_end`.
    `background=True` writes in the background (see `async_save`), and what is to be removed goes once that is done.
    `save_on_sigterm=True` listens for SIGTERM, for `step_end`. `process_group`, `codecs` and `threads` are those of
    `save` and `load`.

    Every method but `path`, `should_save` and `reading` is collective: all ranks of the process group call it. Rank 0
    looks, decides and removes, and all get the same answer, or the same error.

    >>> import tempfile, torch
    >>> with tempfile.TemporaryDirectory() as root, CheckpointManager(root, keep_last=2) as manager:
    ...     state = {"w": torch.zeros(2)}
    ...     for step in (10, 20, 30):
    ...         state["w"] += 1
    ...         manager.save(step, state, {"loss": 1 / step})
    ...     fresh = {"w": torch.zeros(2)}
    ...     manager.steps(), manager.best("loss"), manager.restore(fresh), fresh
    ([20, 30], 30, 30, {'w': tensor([3., 3.])})
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        *,
        save_every: int | None = None,
        keep_last: int | None = None,
        keep_every: int | None = None,
        keep_best: KeepBest | tuple[int, str] | tuple[int, str, str] | None = None,
        background: bool = False,
        save_on_sigterm: bool = False,
        process_group: Any = None,
        codecs: Mapping[type, Codec] | None = None,
        threads: int = 2,
    ) -> None:
        self._policy = Policy(_count(keep_last, "keep_last"), _count(keep_every, "keep_every"), _best(keep_best))
        save_every = _count(save_every, "save_every")
        if save_every is not None and save_every < 1:
            raise CheckpointError(f"save_every={save_every}: one or more is needed; None saves every step")
        self._save_every = save_every
        self._steps = Steps(root)
        self._group = comm.Group.of(process_group)
        self._options: dict[str, Any] = {"process_group": process_group, "codecs": codecs, "threads": threads}
        self._background = background
        self._running: tuple[int, AsyncSave] | None = None  # the step that is being written, and its handle
        self._looked_at: dict[int, _Looked] = {}  # by step
        self._restored: int | None = None
        self._back: int | None = None  # the step that was asked for and restored, until the first save after it
        self._line: Line | None = None  # that this manager began, on rank 0
        self._last: int | None = None  # that this manager saved, and has not restored any since
        self._preemption = Preemption() if save_on_sigterm else None

    @property
    def root(self) -> str:
        """The folder of all steps."""
        return self._steps.root

    def path(self, step: int) -> str:
        """The folder of a step, for `load`, `open` and `verify`; it is there once the step has been saved."""
        return self._steps.path(_step(step))

    # Saving

    def should_save(self, step: int) -> bool:
        """Whether `save_every` asks for this step. Arithmetic: nobody is asked, and all ranks find the same."""
        return self._save_every is None or _step(step) % self._save_every == 0

    def save(
        self,
        step: int,
        state: Any,
        metrics: Mapping[str, Any] | None = None,
        *,
        force: bool = False,
        check_replicas: bool = False,
        memory: int | None = None,
        progress: ProgressCallback | None = None,
    ) -> None:
        """Saves a step, and then removes those that are not to be kept any longer.

        Metrics are numbers (or tensors of one element); those of rank 0 are recorded, beside the step and the time.
        A step that is there already is refused, unless `force` is given or it comes after the one restored by this
        manager: then it is of the run that was given up, and is replaced. A step that cannot be removed is a warning.

        The first save after `restore(state, step=k)` begins a line: the steps after k are superseded from then on.
        They stay, until the rules remove them, but they are not `latest`, nor restored unless they are asked for.
        `check_replicas`, `memory` and `progress` are those of `checkpoint.save`.
        """
        step = _step(step)
        self.wait()
        with raised_as_itself(self._group):
            values = comm.agree(lambda: _numbers(metrics), what=f"metrics of step {step}", group=self._group)

        def check() -> dict[str, Any]:
            known = self._look(step, self._steps.committed().get(step))
            replaced = force or (self._restored is not None and step > self._restored)
            if known is not None and known.valid and not replaced:
                raise CheckpointError(
                    f"step {step} is saved in {self.path(step)} already; force=True replaces it, and restore comes "
                    "first where an earlier run is to be continued"
                )
            return {FIELD: msgspec.to_builtins(Record.now(step, values, self._restored, self._line_of(step)))}

        extra = self._told(f"save of step {step}", check, dict[str, Any])
        options = {"check_replicas": check_replicas, "memory": memory, "progress": progress, **self._options}
        if self._background:
            self._running = step, async_save(state, self.path(step), extra=extra, **options)
            self._last = step
        else:
            save(state, self.path(step), extra=extra, **options)
            self._committed(step)

    def step_end(
        self,
        step: int,
        state: Any,
        metrics: Mapping[str, Any] | None = None,
        *,
        check_replicas: bool = False,
        memory: int | None = None,
        progress: ProgressCallback | None = None,
    ) -> bool:
        """Saves the step if `should_save` says so, or if any rank got SIGTERM; True where the job is to end.

        With `save_on_sigterm`, every call costs one small message around all ranks. Call it every few steps where that
        is too much: all ranks at the same ones. It returns when the step is safe, also where saves are in the
        background; then it is for the caller to end: `raise SystemExit(143)` is what a shell expects.
        """
        ends = self._preemption is not None and self._preemption.anywhere(self._group)
        if (ends or self.should_save(step)) and step != self._last:
            self.save(step, state, metrics, check_replicas=check_replicas, memory=memory, progress=progress)
        if ends:
            self.wait()
        return ends

    def wait(self) -> None:
        """Returns when a save in the background is done, or raises what went wrong with it."""
        if self._running is None:
            return
        (step, handle), self._running = self._running, None
        handle.wait()
        self._committed(step)

    # Finding

    def steps(self) -> list[int]:
        """The steps that have been saved, in order; a damaged one is still among them if its manifest is there."""
        return self._told("steps", lambda: list(self._steps.committed()), list[int])

    def superseded(self) -> list[int]:
        """Those of the steps that a run has left behind, by going back to an earlier one and saving; see `save`."""
        return self._told("superseded", lambda: list(newest_line(self._seen()).superseded), list[int])

    def latest(self) -> int | None:
        """The newest step whose manifest is sound and whose files are there, or None. It reads no data.

        Superseded steps do not count, here and for `best`.
        """
        return self._told("latest", lambda: max(self._sound(), default=None), int | None)

    def best(self, metric: str | None = None, mode: str | None = None) -> int | None:
        """The best step by a metric (that of `keep_best`, where none is given), or None where no step has it."""
        rule = self._policy.best or KeepBest(1, "", "min")
        if not (metric or rule.metric):
            raise CheckpointError("best: by which metric? Name one, or make the manager with keep_best")
        same = metric in (None, rule.metric)
        wanted = KeepBest(1, metric or rule.metric, mode or (rule.mode if same else "min"))
        Policy(best=wanted)  # checks the mode
        return self._told("best", lambda: next(iter(best_of(list(self._sound().values()), wanted)), None), int | None)

    def metrics(self, step: int) -> dict[str, float]:
        """The metrics that were recorded with a step."""
        found = self._record(step)
        return {} if found is None else found.values()

    def time(self, step: int) -> datetime | None:
        """When a step was saved, in UTC; None where `save` was used without a manager."""
        found = self._record(step)
        return None if found is None else datetime.fromisoformat(found.time)

    # Reading

    def restore(
        self,
        state: Any,
        step: int | None = None,
        *,
        strict: bool = True,
        only: str | Sequence[str] | None = None,
        rename: Rename | None = None,
        cast: Cast = False,
        on_missing: OnMissing = "raise",
        memory: int | None = None,
        progress: ProgressCallback | None = None,
    ) -> int | None:
        """Loads the newest good step into a state and returns its number; None where nothing was ever saved.

        A step that is damaged or incomplete is passed over, with a `CheckpointWarning` that says what is wrong; where
        none is good, that is an error. A state that does not fit, a newer format and a failing disk are raised at once:
        an older step would hide them. Given a `step`, that one is loaded, or what is wrong with it is raised.

        Nothing of a step that was passed over remains in the state. For that, where `on_missing` lets names keep their
        values, a step is verified before it is loaded if an older one lacks any of its names: it is read twice then.

        Steps that a run has left behind (see `save`) are loaded only when they are asked for. The other arguments are
        those of `load`.
        """
        self.wait()
        options: dict[str, Any] = {
            "strict": strict,
            "only": only,
            "rename": rename,
            "cast": cast,
            "on_missing": on_missing,
        }
        options |= {"memory": memory, "progress": progress, **self._options}
        if step is not None:
            self._load(state, _step(step), options)
            self._restored = self._back = step
            self._last = None
            return step
        tried: dict[tuple[int, str], ShardwrightError] = {}
        fallback = Fallback(self._steps.manifest)
        for _ in range(_MAX_TRIES):
            marks = self._told("restore", self._current, dict[int, str])
            left = {one: mark for one, mark in marks.items() if (one, mark) not in tried}
            newest = max(left, default=None)
            if newest is not None:
                try:
                    with _noting({one for one, _ in tried}):
                        self._load_or_fall_back(state, newest, left, options, fallback)
                except (RankFailedError, CorruptionError, FormatError, MissingKeyError, NotACheckpointError) as error:
                    if not _is_damage(error):
                        raise
                    # If it was removed or replaced under us, it has another mark when we look again, or none.
                    tried[newest, left[newest]] = error
                    continue
            self._tell_of({one: error for (one, mark), error in tried.items() if marks.get(one) == mark}, newest)
            self._restored, self._back, self._line, self._last = newest, None, None, None
            return newest
        raise CheckpointError(f"{self.root}: {_MAX_TRIES} times a step was replaced or removed while it was read")

    @contextmanager
    def reading(self, step: int | None = None) -> Iterator[str]:
        """Gives the folder of a step (else of the newest), and keeps it from being removed meanwhile.

        For a process beside the training, which evaluates or copies what is saved. Not collective.
        """
        with ExitStack() as held:
            for _ in range(_MAX_TRIES):
                before = self._steps.committed()
                wanted = max(self._sound(), default=None) if step is None else _step(step)
                if wanted is None:
                    if self._steps.committed() != before:
                        continue  # what was there was removed while we looked, and something newer may be
                    raise NotACheckpointError(f"{self.root} holds no checkpoint yet")
                try:
                    path = held.enter_context(self._steps.reading(wanted))
                except NotACheckpointError:
                    if step is not None:
                        raise
                    continue  # a newer one has come, and this one is gone
                yield path
                return
        raise CheckpointError(f"{self.root}: {_MAX_TRIES} times a step was removed before it could be held")

    # Ending

    def remove(self, step: int) -> None:
        """Removes a step now, whatever the rules say: a `StorageBusyError` where it is being read or saved."""
        step = _step(step)
        self.wait()
        self._told(f"removing step {step}", lambda: self._steps.remove(step), None)

    def close(self) -> None:
        """Waits for a save in the background, and gives SIGTERM back to who had it."""
        try:
            self.wait()
        finally:
            if self._preemption is not None:
                self._preemption.close()

    def __enter__(self) -> CheckpointManager:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
            return
        # Other ranks may not come here: wait for our own part, and ask nobody.
        running, self._running = self._running, None
        try:
            if running is not None:
                running[1].wait()
        except Exception as lost:  # noqa: BLE001  the error on its way is the one to be seen
            error.add_note(f"and a save in the background failed: {lost}")
        finally:
            self.close()

    # What rank 0 does

    def _told(self, what: str, look: Callable[[], T], kind: Any) -> T:
        return first_rank_finds(look, kind, what=what, group=self._group)

    def _committed(self, step: int) -> None:
        """After a commit: what is no longer to be kept goes, and what crashes have left."""
        self._last = step
        left = self._told(f"after the save of step {step}", lambda: self._remove_after(step), list[str])
        if left:
            told = "\n  ".join(left)
            warnings.warn(
                f"step {step} is saved, but not all could be removed\n  {told}", CheckpointWarning, stacklevel=4
            )

    def _remove_after(self, step: int) -> list[str]:
        """Removes what the rules do not keep; says what could not be, and why. Those in use wait for the next time."""
        self._steps.announce(step)
        left: list[str] = []
        try:
            unfinished = [one for one in self._steps.without_manifest() if one <= step]
            going = self._going(step)
        except StorageError as error:
            return [str(error)]
        for one in [*unfinished, *going]:
            try:
                if one in going:
                    self._steps.remove(one, if_mark=self._looked_at[one].mark)
                elif self._steps.is_abandoned(one):
                    self._steps.remove(one, if_mark="")
            except StorageBusyError:
                continue
            except StorageError as error:
                left.append(str(error))
            self._looked_at.pop(one, None)
        return left

    def _going(self, step: int) -> list[int]:
        """Return the saved steps that the rules do not keep, once this one is saved."""
        if self._policy.keeps_all:
            return []
        left_behind = newest_line(self._seen()).superseded
        known = [self._look(one, mark) for one, mark in self._steps.committed().items() if one <= step]
        # Those that were left behind go as the others do, and take no place.
        judged = [one._replace(valid=one.valid and one.step not in left_behind) for one in known if one]
        return to_remove(judged, self._policy, step)

    def _look(self, step: int, mark: str | None) -> Saved | None:
        """A step as retention sees it, remembered until it changes; None where it is not ours to judge or not there."""
        if mark is None:
            return None
        before = self._looked_at.get(step)
        if before is not None and before.mark == mark:
            return before.saved
        found: Saved | None = None
        seen: Seen | None = None
        try:
            manifest = self._steps.manifest(step)
            record = Record.of(manifest)
            found = Saved(step, {} if record is None else record.values())
            seen = Seen(manifest.save_id, Line()) if record is None else record.seen(manifest.save_id)
        except UnknownVersionError:
            pass  # of a newer library, for which it is good
        except (CorruptionError, FormatError, NotACheckpointError):
            found = Saved(step, valid=False)
        self._looked_at[step] = _Looked(mark, found, seen)
        return found

    def _seen(self) -> dict[int, Seen]:
        """Return what the steps say of their lines. A damaged one says nothing; one that cannot be read is raised.

        Without it, a step that was left behind could be taken for the newest.
        """
        found = {}
        for step, mark in self._steps.committed().items():
            self._look(step, mark)
            seen = self._looked_at[step].seen
            if seen is not None:
                found[step] = seen
        return found

    def _line_of(self, step: int) -> Line:
        """The line of a step that is saved now."""
        seen = self._seen()
        if self._back is not None:
            back, now = line_from(self._back, seen), newest_line(seen)
            self._line, self._back = (now if back.superseded == now.superseded else back), None
        line = newest_line(seen) if self._line is None else self._line
        left = {
            one: save_id
            for one, save_id in line.superseded.items()
            if one != step and one in seen and seen[one].save_id == save_id
        }
        return Line(line.number, left)

    def _current(self) -> dict[int, str]:
        """The steps that have a manifest and were not left behind, with their marks."""
        left_behind = newest_line(self._seen()).superseded
        return {step: mark for step, mark in self._steps.committed().items() if step not in left_behind}

    def _sound(self) -> dict[int, Saved]:
        """The steps whose manifest is sound and whose files are there, but for those that were left behind."""
        looked = {step: self._look(step, mark) for step, mark in self._current().items()}
        return {step: one for step, one in looked.items() if one is not None and one.valid}

    def _unfinished(self, after: int) -> dict[int, str]:
        """Return the steps after this one whose save did not end, or may not have, each with what is known of it."""
        found = {}
        for step in self._steps.without_manifest():
            if step > after:
                try:
                    if self._steps.has_data(step) and self._steps.is_abandoned(step):
                        found[step] = "it has no manifest: its save did not end"
                except StorageError as error:
                    found[step] = f"it has no manifest, and cannot be looked at: {error}"
        return found

    def _record(self, step: int) -> Record | None:
        step = _step(step)
        return self._told(f"record of step {step}", lambda: Record.of(self._steps.manifest(step)), Record | None)

    def _load(self, state: Any, step: int, options: Mapping[str, Any]) -> None:
        """Load a step, held on every rank while it is read."""
        with self._held(step):
            load(state, self.path(step), **options)

    @contextmanager
    def _held(self, step: int) -> Iterator[None]:
        """Keep a step from being removed, on every rank."""
        with ExitStack() as held:
            holding: AbstractContextManager[str] = self._steps.reading(step)
            with raised_as_itself(self._group):
                comm.agree(lambda: held.enter_context(holding), what=f"restore of step {step}", group=self._group)
            yield

    def _load_or_fall_back(
        self, state: Any, step: int, left: Mapping[int, str], options: Mapping[str, Any], fallback: Fallback
    ) -> None:
        """Load a step of which, should it be damaged, nothing may remain in the state when an older one is loaded.

        Where names that are not stored are an error (`on_missing`), any older step replaces all of it.
        """
        if options["on_missing"] != "raise":
            older = [one for one in left if one < step]
            if self._told("restore: names", lambda: fallback.must_verify(step, older), bool):
                self._verify(step)
        try:
            self._load(state, step, options)
        except ShardwrightError:
            fallback.failed(step)
            raise

    def _verify(self, step: int) -> None:
        """Verify the files of a step, each on one of the ranks; raise on all of them if any is damaged."""
        group = self._group
        threads = self._options["threads"]

        def check() -> None:
            check_files(self._steps.storage(step), group.rank, group.size, threads=threads)

        with self._held(step), raised_as_itself(group):
            comm.agree(check, what=f"restore: verifying step {step}", group=group, timeout=_VERIFYING)

    def _tell_of(self, bad: Mapping[int, ShardwrightError], restored: int | None) -> None:
        """Says which steps were passed over, or raises where there was no other."""
        after = -1 if restored is None else restored
        said = {one: _in_one_line(error) for one, error in bad.items()}
        said |= self._told("restore", lambda: self._unfinished(after), dict[int, str])
        told = "".join(f"\n  step {one}: {said[one]}" for one in sorted(said, reverse=True))
        if bad and restored is None:
            raise CheckpointError(
                f"no checkpoint in {self.root} can be restored; the state may have been changed{told}"
            ) from next(iter(bad.values()))
        if told:
            what = "nothing to restore" if restored is None else f"restored step {restored}"
            warnings.warn(f"{what} in {self.root}, and passed over{told}", CheckpointWarning, stacklevel=3)


def _step(value: int) -> int:
    step = integer(value, "step")
    if step < 0:
        raise CheckpointError(f"step {step} is negative: steps count from 0")
    return step


def _count(value: Any, name: str) -> int | None:
    return None if value is None else integer(value, name)


def _best(given: Any) -> KeepBest | None:
    """What `keep_best` says, with its parts of the right kinds."""
    if given is None:
        return None
    if not isinstance(given, tuple | list) or len(given) not in (2, 3):
        raise ArgumentTypeError(
            f'keep_best={given!r}: give KeepBest(n, metric, mode), such as KeepBest(3, "loss", "min")'
        )
    best = KeepBest(*given)
    if not isinstance(best.metric, str) or not isinstance(best.mode, str):
        raise ArgumentTypeError(f"keep_best={given!r}: the metric and the mode are text")
    return best._replace(n=integer(best.n, "keep_best"))


def _numbers(metrics: Any) -> dict[str, float]:
    if metrics is not None and not isinstance(metrics, Mapping):
        raise ArgumentTypeError(
            f"metrics={metrics!r} is a {type(metrics).__name__}: give a mapping of names to numbers"
        )
    return numbers(metrics)


def _is_damage(error: ShardwrightError) -> bool:
    """Whether an error says that what is stored is damaged or gone, on every rank that failed."""
    if isinstance(error, RankFailedError):
        kinds = {failure.kind for failure in error.failures}
        # Ranks that waited for what another was to read say that they lost it; that one says why.
        return bool(kinds & _DAMAGE) and kinds <= _DAMAGE | {RankLostError.__name__}
    return not isinstance(error, UnknownVersionError)


@contextmanager
def _noting(steps: Collection[int]) -> Iterator[None]:
    """Add to what is raised that the state may hold values of damaged steps that were tried before."""
    try:
        yield
    except Exception as error:
        if steps:
            told = ", ".join(map(str, sorted(steps)))
            error.add_note(
                f"the state is undefined: it may hold values of damaged steps, which were tried first: {told}"
            )
        raise


def _in_one_line(error: ShardwrightError) -> str:
    if isinstance(error, RankFailedError):
        told = [f"{one.kind}: {one.message}" for one in error.failures if one.kind in _DAMAGE]
        return "; ".join(list(dict.fromkeys(told))[:4])
    return f"{type(error).__name__}: {error}"
