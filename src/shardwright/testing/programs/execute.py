"""Run a program on one rank: every step on DTensors and on plain tensors, compared after each, agreed with the others.

Ranks agree through `witness`, in a process group of its own.
"""

from __future__ import annotations

import builtins
import traceback
import warnings
import zlib
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shardwright.errors import ShardwrightError
from shardwright.layout import Layout
from shardwright.tensor.base.tagging import DTensorBase
from shardwright.testing.programs.draft.compare import (
    difference,
    is_readable,
    live_values,
    local_part,
    loosest,
    metadata_difference,
    reduced,
    region_of,
)
from shardwright.testing.programs.draft.namespace import plain_namespace, sharded_namespace
from shardwright.testing.programs.program import Program, used_names
from shardwright.testing.programs.witness import GOES_ON, StepResult, witness

__all__ = ["Course", "Setup", "run_program"]

Setup = Callable[[], AbstractContextManager[Any]]


@dataclass
class Course:
    """The results of a program on one rank: of each step until the first failure, and the details.

    >>> Course([StepResult.RIGHT]).detail
    ''
    """

    results: list[StepResult] = field(default_factory=list)
    detail: str = ""
    refusals: list[str] = field(default_factory=list)


def run_program(program: Program, notes: str | None = None, setup: Setup | None = None) -> Course:
    """Run a program on this rank, which is one of the program's ranks, and return the results.

    `notes` is a directory where each rank writes its current step and the errors it has raised, in case it never
    returns. `setup` makes a context to run the program in.

    >>> steps = ("a = leaf([1, 2], (2,), torch.float32, [Shard(0)])", "a += 1")
    >>> {str(result) for result in run_program(Program(steps, mesh=(1,))).results}
    {'right'}
    """
    with warnings.catch_warnings(), nullcontext() if setup is None else setup():
        warnings.simplefilter("ignore")
        return _Run(program, notes).run()


@dataclass(frozen=True, slots=True)
class _Attempt:
    """How a step ended on this rank."""

    result: StepResult
    error: str = ""
    text: str = ""


class _Run:
    def __init__(self, program: Program, notes: str | None) -> None:
        self.program = program
        self.ours = sharded_namespace(program.mesh)
        self.plain = plain_namespace()
        self.given = frozenset(self.ours)
        self.names: list[str] = []
        self.live: tuple[dict[str, Any], dict[str, Any]] = {}, {}
        self.tolerance = loosest(program.steps)
        self.witness = witness()
        self.notes = None if notes is None else Path(notes) / f"{self.witness.rank}"

    def run(self) -> Course:
        course = Course()
        for number, step in enumerate(self.program.steps):
            self._note(f"step {number}: {step}")
            result = self._step(step, course)
            course.results.append(result)
            if result not in GOES_ON or (result is not StepResult.RIGHT and _cannot_be_left_out(step, result)):
                return course
        self._note("reading all values")
        course.results.append(self._read_all(course))
        return course

    def _step(self, step: str, course: Course) -> StepResult:
        if not used_names(step) <= self.given | set(self.names) | _BUILTINS:
            return StepResult.SKIPPED
        attempt = self._attempt(step)
        if attempt.result in (StepResult.REFUSED, StepResult.UNTYPED, StepResult.BOTH_REFUSED):
            self._note(f"raised {attempt.text}")
        self.names = [
            name
            for name in self.ours
            if name not in self.given
            and name in self.plain
            and (not isinstance(self.plain[name], Tensor) or is_readable(self.plain[name]))
        ]
        self.live = live_values(self.ours, self.names), live_values(self.plain, self.names)
        differences = self._differences()
        verdicts = self.witness.agree(attempt.result, attempt.error, self._digest(), differences)
        if verdicts is None:
            course.detail = f"{attempt.result} {attempt.text}"
            return StepResult.DIVERGED
        result = attempt.result
        if result is StepResult.REFUSED:
            course.refusals.append(attempt.text.partition("\n")[0])
        if result not in GOES_ON:
            course.detail = attempt.text
            return result
        if result is not StepResult.RIGHT and _cannot_be_left_out(step, result):
            return result  # gradients and what hooks have seen may differ from torch's
        suspects, partial = verdicts
        suspects = sorted(set(suspects) | set(self._partial_differences(partial)))
        problem = self._confirmed_problem(suspects, differences)
        if problem:
            course.detail = problem
            return StepResult.WRONG if result is StepResult.RIGHT else StepResult.TORN
        return result

    # --- one step ---------------------------------------------------------------------------------------------------

    def _attempt(self, step: str) -> _Attempt:
        error = _execute(step, self.ours)
        if isinstance(error, ShardwrightError) or _FREED in str(error):
            return _Attempt(StepResult.REFUSED, type(error).__name__, _text(error))
        if isinstance(error, RecursionError):
            return _Attempt(StepResult.UNTYPED, type(error).__name__, _text(error))
        torch_error = _execute(step, self.plain)
        if error is None and torch_error is None:
            return _Attempt(StepResult.RIGHT)
        if error is None:
            return _Attempt(StepResult.ACCEPTED, text=f"torch raises {_text(torch_error)}")
        if torch_error is not None:
            return _Attempt(StepResult.BOTH_REFUSED, text=_text(error))
        stack = "".join(traceback.format_exception(error)[-4:])
        return _Attempt(StepResult.UNTYPED, type(error).__name__, f"{_text(error)}\n{stack}")

    def _digest(self) -> int:
        described = []
        for name, value in self.live[0].items():
            described.append(name)
            if isinstance(value, DTensorBase):
                described.append(_described(value._layout))
        return zlib.crc32("\n".join(described).encode())

    # --- comparing --------------------------------------------------------------------------------------------------

    def _differences(self) -> dict[str, str | None]:
        """Return how each live value differs from torch's; None for values that one rank cannot compare."""
        sharded, plain = self.live
        differences: dict[str, str | None] = {}
        for name in sorted(sharded.keys() | plain.keys()):
            if name not in sharded or name not in plain:
                differences[name] = "is missing" if name not in sharded else "exists, but torch has none"
                continue
            text = metadata_difference(sharded[name], plain[name]) or self._difference(sharded[name], plain[name])
            if text != "":
                differences[name] = text
        return differences

    def _difference(self, sharded: Any, plain: Any) -> str | None:
        """Return how one value differs; "" if it does not, None if it is partial, which one rank cannot compare."""
        if sharded is None or plain is None:
            return ""
        if isinstance(sharded, DTensorBase):
            if sharded._layout.is_partial:
                return None
            return self._compare(local_part(sharded), region_of(plain, sharded._layout)) or ""
        return self._compare(sharded.detach() if isinstance(sharded, Tensor) else sharded, plain) or ""

    def _compare(self, actual: Any, expected: Any) -> str | None:
        if isinstance(expected, Tensor) and isinstance(actual, Tensor):
            expected = expected.detach()
            if actual.shape == expected.shape and actual.dtype == expected.dtype and torch.equal(actual, expected):
                return None
        return difference(actual, expected, self.tolerance, self._scale())

    def _scale(self) -> float:
        """Return the largest finite value around, at least 1."""
        largest = 1.0
        for value in self.live[1].values():
            if isinstance(value, Tensor) and value.is_floating_point() and value.numel():
                largest = max(largest, value.detach().double().nan_to_num(0.0, 0.0, 0.0).abs().max().item())
        return largest

    def _partial_differences(self, names: list[str]) -> list[str]:
        if not names:
            return []
        sharded, plain = self.live
        gathered = self.witness.gather([local_part(sharded[name]).clone() for name in names])
        differing = []
        for number, name in enumerate(names):
            layout = sharded[name]._layout
            value = reduced(layout, [parts[number] for parts in gathered])
            if self._compare(value, region_of(plain[name], layout)) is not None:
                differing.append(name)
        return sorted({name for listed in self.witness.gather(differing) for name in listed})

    def _confirmed_problem(self, suspects: list[str], differences: dict[str, str | None]) -> str:
        """Return what is wrong with values that differ when they are read as a user reads them; "" if nothing is.

        A copy that looks like a view is renewed or refused when it is read after a write to the original: that is
        as documented.
        """
        for name in suspects:
            text = self._read(name)
            problems = self.witness.gather(text)
            if any(text and not text.startswith(_REFUSED) for text in problems):
                return f"{name} {next((text for text in problems if text and not text.startswith(_REFUSED)), '')}"
            if len({bool(text) for text in problems}) > 1:
                return f"{name} cannot be read on some ranks: {problems}"
            if problems[0]:
                continue
            differing = differences.get(name) if metadata_difference(*self._pair(name)) else None
            found = [text for text in self.witness.gather(differing) if text]
            if found:
                return f"{name} {found[0]}"
        return ""

    def _pair(self, name: str) -> tuple[Any, Any]:
        sharded, plain = self.live
        return sharded.get(name), plain.get(name)

    def _read(self, name: str) -> str:
        """Return how a value differs when it is read as a user reads it; "" if it does not."""
        sharded, plain = self._pair(name)
        if plain is None:
            return metadata_difference(sharded, plain) or ""
        if not isinstance(sharded, DTensorBase) or not isinstance(plain, Tensor):
            return metadata_difference(sharded, plain) or self._compare(sharded, plain) or ""
        try:
            with torch.no_grad():
                full = sharded.full_tensor()  # type: ignore[attr-defined]  # every DTensor has it
        except ShardwrightError as error:
            return f"{_REFUSED}{_text(error)}"
        except Exception as error:  # noqa: BLE001  the value cannot be read
            return f"cannot be read: {_text(error)}"
        return self._compare(full, plain) or ""

    def _read_all(self, course: Course) -> StepResult:
        """Read every live value as a user does."""
        problem = self._confirmed_problem(sorted(self.live[0]), {})
        course.detail = problem
        return StepResult.WRONG if problem else StepResult.RIGHT

    def _note(self, text: str) -> None:
        if self.notes is not None:
            self.notes.write_text(text)


_REFUSED = "refused: "
_FREED = "Trying to backward through the graph a second time"  # torch allows it if no operator saved tensors
_BUILTINS = frozenset(dir(builtins))


def _execute(step: str, namespace: dict[str, Any]) -> Exception | None:
    try:
        exec(step, namespace)
    except Exception as error:  # noqa: BLE001  any exception is a result
        return error
    finally:
        namespace.pop("__builtins__", None)
    return None


@lru_cache(maxsize=4096)
def _described(layout: Layout) -> str:
    return str(layout)


def _text(error: BaseException | None) -> str:
    return f"{type(error).__name__}: {error}"


def _cannot_be_left_out(step: str, result: StepResult) -> bool:
    """True if the state after a refused step is undefined: a backward may have filled some gradients."""
    return result is not StepResult.SKIPPED and (".backward(" in step or "autograd.grad" in step)
