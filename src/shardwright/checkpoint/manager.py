"""The checkpoints of a training run: one directory per step, retention by policy, restoring the newest intact one."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from datetime import datetime
from functools import partial
from types import TracebackType
from typing import Any, TypeVar, final

import msgspec

from shardwright import comm
from shardwright.checkpoint.api import async_save, load, save
from shardwright.checkpoint.background import AsyncSave
from shardwright.checkpoint.format.values import Codec
from shardwright.checkpoint.manage.catalog import StepCatalog
from shardwright.checkpoint.manage.clean_up import Removal, clean_up
from shardwright.checkpoint.manage.describe import StepInfo, describe_steps
from shardwright.checkpoint.manage.fallback import Fallback
from shardwright.checkpoint.manage.preemption import Preemption
from shardwright.checkpoint.manage.record import FIELD, Record, metric_values
from shardwright.checkpoint.manage.restore import MAX_TRIES, CheckpointWarning, restore_newest
from shardwright.checkpoint.manage.retention import KeepBest, Policy, best_of
from shardwright.checkpoint.manage.steps import Steps
from shardwright.checkpoint.reading.request import Cast, OnMissing, Rename
from shardwright.checkpoint.runtime.progress import ProgressCallback
from shardwright.checkpoint.verify import check_files
from shardwright.errors import ArgumentTypeError, CheckpointError, NotACheckpointError, ShardwrightError
from shardwright.layout.integers import integer

__all__ = ["CheckpointManager"]

T = TypeVar("T")

_VERIFY_TIMEOUT = 24 * 3600.0  # seconds: a rank that dies is noticed at once, however long this is


@final
class CheckpointManager:
    """The checkpoints of a run, in directories `step-00001000` under `root`.

    `keep_last=n`, `keep_every=k` and `keep_best=KeepBest(n, metric, mode)` select the steps to keep: those that any of
    them selects, and always the newest; without any, every step is kept. `save_every` is for `should_save` and
    `step_end`. `background=True` writes in the background (see `async_save`); old steps are removed once that is done.
    `save_on_sigterm=True` handles SIGTERM, for `step_end`. `process_group`, `codecs` and `threads` are those of `save`
    and `load`.

    Every method except `path`, `should_save` and `reading` is collective: all ranks of the process group call it. Rank
    0 inspects the directory, decides and removes; all ranks get the same result or the same error.

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
        self._policy = Policy(_count(keep_last, "keep_last"), _count(keep_every, "keep_every"), _keep_best(keep_best))
        save_every = _count(save_every, "save_every")
        if save_every is not None and save_every < 1:
            raise CheckpointError(f"save_every must be at least 1 or None, got {save_every}")
        self._save_every = save_every
        self._steps = Steps(root)
        self._catalog = StepCatalog(self._steps, self._policy)
        self._group = comm.Group.of(process_group)
        self._options: dict[str, Any] = {"process_group": process_group, "codecs": codecs, "threads": threads}
        self._background = background
        self._running: tuple[int, AsyncSave] | None = None  # the step that is being written, and its handle
        self._restored: int | None = None
        self._last: int | None = None  # the last step that this manager saved since it restored one
        self._preemption = Preemption() if save_on_sigterm else None

    @property
    def root(self) -> str:
        """The directory of all steps."""
        return self._steps.root

    def path(self, step: int) -> str:
        """Return the directory of a step, for `load`, `open` and `verify`; it exists once the step is saved."""
        return self._steps.path(_step(step))

    # Saving

    def should_save(self, step: int) -> bool:
        """Return True if `save_every` selects this step. Arithmetic only, so the same on all ranks."""
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
        """Save a step, then remove the steps that the policy no longer keeps.

        Metrics are numbers (or one-element tensors); those of rank 0 are recorded, with the step and the time. Saving a
        step that exists is an error, unless `force` is given or the step comes after the one that this manager
        restored: then it belongs to the abandoned run, and is replaced. A step that cannot be removed causes a warning.

        The first save after `restore(state, step=k)` supersedes the steps after k. They stay until the policy removes
        them, but they are not `latest`, and are restored only when asked for by number. `check_replicas`, `memory` and
        `progress` are those of `checkpoint.save`.
        """
        step = _step(step)
        self.wait()
        with comm.unwrap_common_error(self._group):
            values = comm.agree(lambda: _metric_values(metrics), what=f"metrics of step {step}", group=self._group)

        def check() -> dict[str, Any]:
            existing = self._catalog.saved(step)
            replaces = force or (self._restored is not None and step > self._restored)
            if existing is not None and existing.valid and not replaces:
                raise CheckpointError(
                    f"step {step} is already saved in {self.path(step)}; pass force=True to replace it, or call "
                    "restore first to continue an earlier run"
                )
            record = Record.now(step, values, self._restored, self._catalog.lineage_of(step))
            return {FIELD: msgspec.to_builtins(record)}

        extra = self._on_first_rank(f"save of step {step}", check, dict[str, Any])
        options = {"check_replicas": check_replicas, "memory": memory, "progress": progress, **self._options}
        if self._background:
            self._running = step, async_save(state, self.path(step), extra=extra, **options)
            self._last = step
        else:
            save(state, self.path(step), extra=extra, **options)
            self._clean_up_after(step)

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
        """Save the step if `should_save` selects it or any rank received SIGTERM; return True if the job should exit.

        With `save_on_sigterm`, every call exchanges one small message among all ranks. If that is too much, call it
        every few steps, on all ranks at the same ones. When it returns True, the step is committed, even if saves run
        in the background; the caller then exits: `raise SystemExit(143)` is what a shell expects.
        """
        exits = self._preemption is not None and self._preemption.on_any_rank(self._group)
        if (exits or self.should_save(step)) and step != self._last:
            self.save(step, state, metrics, check_replicas=check_replicas, memory=memory, progress=progress)
        if exits:
            self.wait()
        return exits

    def wait(self) -> None:
        """Block until a background save is committed; raise the error if it failed."""
        if self._running is None:
            return
        (step, handle), self._running = self._running, None
        handle.wait()
        self._clean_up_after(step)

    # Finding

    def steps(self) -> list[int]:
        """Return the saved steps, in order, including corrupted ones whose manifest exists."""
        return self._on_first_rank("steps", lambda: list(self._steps.committed()), list[int])

    def superseded(self) -> list[int]:
        """Return the steps that a run left behind by going back to an earlier one and saving; see `save`."""
        return self._on_first_rank("superseded", self._catalog.superseded, list[int])

    def latest(self) -> int | None:
        """Return the newest step with a valid manifest and all its files, or None. No data is read.

        Superseded steps do not count, here and for `best`.
        """
        return self._on_first_rank("latest", lambda: max(self._catalog.valid(), default=None), int | None)

    def best(self, metric: str | None = None, mode: str | None = None) -> int | None:
        """Return the best step by a metric (that of `keep_best` by default), or None if no step has it."""
        rule = self._policy.best or KeepBest(1, "", "min")
        if not (metric or rule.metric):
            raise CheckpointError("best needs a metric: pass one, or create the manager with keep_best")
        is_same_metric = metric in (None, rule.metric)
        best = KeepBest(1, metric or rule.metric, mode or (rule.mode if is_same_metric else "min"))
        Policy(best=best)  # checks the mode

        def find() -> int | None:
            return next(iter(best_of(list(self._catalog.valid().values()), best)), None)

        return self._on_first_rank("best", find, int | None)

    def metrics(self, step: int) -> dict[str, float]:
        """Return the metrics that were recorded with a step."""
        record = self._record(step)
        return {} if record is None else record.values()

    def time(self, step: int) -> datetime | None:
        """Return when a step was saved, in UTC; None if it was saved without a manager."""
        record = self._record(step)
        return None if record is None else datetime.fromisoformat(record.time)

    def describe(self) -> list[StepInfo]:
        """Return a description of every step directory, in order: size, time, metrics, and whether it is valid.

        Also those of saves that did not complete. No data is read: `verify` checks the bytes of a step.
        """
        return self._on_first_rank("describe", lambda: describe_steps(self._steps, self._catalog), list[StepInfo])

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
        """Load the newest intact step into a state and return its number; None if nothing was ever saved.

        A step that is corrupted or incomplete is skipped, with a `CheckpointWarning` that says why; if no step is
        intact, that is an error. A state that does not match, a newer format version and a failing disk are raised at
        once: falling back to an older step would hide them. With `step`, that one is loaded, or its error is raised.

        Nothing of a skipped step remains in the state. To guarantee this when `on_missing` lets names keep their
        values, a step is verified before it is loaded if an older step lacks any of its names; it is then read twice.

        Superseded steps (see `save`) are loaded only when asked for by number. The other arguments are those of `load`.
        """
        self.wait()
        options: dict[str, Any] = {
            "strict": strict,
            "only": only,
            "rename": rename,
            "cast": cast,
            "on_missing": on_missing,
            "memory": memory,
            "progress": progress,
            **self._options,
        }
        if step is not None:
            self._load(state, _step(step), options)
            self._catalog.go_back_to(step)
            self._restored, self._last = step, None
            return step
        fallback = Fallback(self._steps.manifest)
        restored = restore_newest(
            self.root,
            lambda: self._on_first_rank("restore", self._catalog.current, dict[int, str]),
            lambda after: self._on_first_rank("restore", lambda: self._catalog.unfinished(after), dict[int, str]),
            lambda newest, left: self._load_with_fallback(state, newest, left, options, fallback),
        )
        self._catalog.continue_newest()
        self._restored, self._last = restored, None
        return restored

    @contextmanager
    def reading(self, step: int | None = None) -> Iterator[str]:
        """Yield the directory of a step (by default the newest), and keep it from being removed meanwhile.

        For a process beside the training, which evaluates or copies checkpoints. Not collective.
        """
        with ExitStack() as locks:
            for _ in range(MAX_TRIES):
                before = self._steps.committed()
                chosen = max(self._catalog.valid(), default=None) if step is None else _step(step)
                if chosen is None:
                    if self._steps.committed() != before:
                        continue  # steps were removed meanwhile, and there may be a newer one
                    raise NotACheckpointError(f"{self.root} holds no checkpoint yet")
                try:
                    path = locks.enter_context(self._steps.reading(chosen))
                except NotACheckpointError:
                    if step is not None:
                        raise
                    continue  # it was removed after a newer one was saved
                yield path
                return
        raise CheckpointError(f"{self.root}: a step was removed before it could be locked, {MAX_TRIES} times")

    # Ending

    def remove(self, step: int) -> None:
        """Remove a step now, whatever the policy. Raise `StorageBusyError` while it is being read or saved."""
        step = _step(step)
        self.wait()
        self._on_first_rank(f"removing step {step}", lambda: self._steps.remove(step), None)

    def clean_up(self, *, dry_run: bool = False) -> list[Removal]:
        """Remove the steps that the policy does not keep, and what failed saves left; return what was removed.

        Every save does this for the steps up to its own; this is for a run that has ended, or other rules. The newest
        valid step is kept, and so are steps in use. With `dry_run`, nothing is removed. A removal that failed has an
        `error`.
        """
        self.wait()
        work = partial(clean_up, self._steps, self._catalog, dry_run=dry_run)
        return self._on_first_rank("clean_up", work, list[Removal])

    def close(self) -> None:
        """Wait for a background save and restore the previous SIGTERM handler."""
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
        # Other ranks may not get here: wait for this rank's part only, without communication.
        running, self._running = self._running, None
        try:
            if running is not None:
                running[1].wait()
        except Exception as lost:  # noqa: BLE001  the error being raised is the one to show
            error.add_note(f"and a background save failed: {lost}")
        finally:
            self.close()

    # On rank 0, and collectively

    def _on_first_rank(self, what: str, step: Callable[[], T], kind: Any) -> T:
        return comm.on_first_rank(step, kind, what=what, group=self._group, error=CheckpointError)

    def _clean_up_after(self, step: int) -> None:
        """After a commit: remove what the policy does not keep, and leftovers of crashes."""
        self._last = step
        errors = self._on_first_rank(
            f"after the save of step {step}", lambda: self._catalog.clean_up_after(step), list[str]
        )
        if errors:
            listed = "\n  ".join(errors)
            warnings.warn(
                f"step {step} is saved, but not all could be removed\n  {listed}", CheckpointWarning, stacklevel=4
            )

    def _record(self, step: int) -> Record | None:
        step = _step(step)
        return self._on_first_rank(
            f"record of step {step}", lambda: Record.of(self._steps.manifest(step)), Record | None
        )

    def _load(self, state: Any, step: int, options: Mapping[str, Any]) -> None:
        """Load a step while every rank keeps it from being removed."""
        with self._locked(step):
            load(state, self.path(step), **options)

    @contextmanager
    def _locked(self, step: int) -> Iterator[None]:
        """Keep a step from being removed, on every rank."""
        with ExitStack() as locks:
            lock: AbstractContextManager[str] = self._steps.reading(step)
            with comm.unwrap_common_error(self._group):
                comm.agree(lambda: locks.enter_context(lock), what=f"restore of step {step}", group=self._group)
            yield

    def _load_with_fallback(
        self, state: Any, step: int, versions: Mapping[int, str], options: Mapping[str, Any], fallback: Fallback
    ) -> None:
        """Load a step; if it is corrupted, none of it may remain in the state when an older one is loaded next.

        If names that are not stored are an error (`on_missing`), any older step overwrites all of it.
        """
        if options["on_missing"] != "raise":
            older = [other for other in versions if other < step]
            if self._on_first_rank("restore: names", lambda: fallback.must_verify(step, older), bool):
                self._verify(step)
        try:
            self._load(state, step, options)
        except ShardwrightError:
            fallback.failed(step)
            raise

    def _verify(self, step: int) -> None:
        """Verify the files of a step, divided among the ranks; raise on all ranks if any is corrupted."""
        group = self._group
        threads = self._options["threads"]

        def check() -> None:
            check_files(self._steps.storage(step), group.rank, group.size, threads=threads)

        with self._locked(step), comm.unwrap_common_error(group):
            comm.agree(check, what=f"restore: verifying step {step}", group=group, timeout=_VERIFY_TIMEOUT)


def _step(value: int) -> int:
    step = integer(value, "step")
    if step < 0:
        raise CheckpointError(f"step must not be negative, got {step}")
    return step


def _count(value: Any, name: str) -> int | None:
    return None if value is None else integer(value, name)


def _keep_best(value: Any) -> KeepBest | None:
    """Validate the `keep_best` argument."""
    if value is None:
        return None
    if not isinstance(value, tuple | list) or len(value) not in (2, 3):
        raise ArgumentTypeError(
            f'keep_best must be KeepBest(n, metric, mode), such as KeepBest(3, "loss", "min"), got {value!r}'
        )
    best = KeepBest(*value)
    if not isinstance(best.metric, str) or not isinstance(best.mode, str):
        raise ArgumentTypeError(f"keep_best: metric and mode must be str, got {value!r}")
    return best._replace(n=integer(best.n, "keep_best"))


def _metric_values(metrics: Any) -> dict[str, float]:
    if metrics is not None and not isinstance(metrics, Mapping):
        raise ArgumentTypeError(f"metrics must be a mapping of names to numbers, got {type(metrics).__name__}")
    return metric_values(metrics)
