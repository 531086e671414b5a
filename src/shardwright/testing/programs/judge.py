"""Run a program on a pool of ranks and judge it."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from shardwright.testing.programs.execute import Course, Setup, run_program
from shardwright.testing.programs.program import Program
from shardwright.testing.programs.witness import StepResult
from shardwright.testing.ranks.outcome import Died, Hung, Outcome, Raised, Returned, report
from shardwright.testing.ranks.pool import RankPool, outcomes

__all__ = ["FAILURES", "Judgement", "Outcome", "Verdict", "judge"]

TIMEOUT = 30.0
GRACE = 10.0


class Verdict(StrEnum):
    """The verdict on a program, the mildest first.

    >>> Verdict("torn") is Verdict.TORN
    True
    """

    RIGHT = "right"  # every step gave torch's values, or torch refused it as well
    REFUSED = "refused"  # some step raised the same typed error on all ranks; the rest was right
    ACCEPTED = "accepted"  # torch refuses a step that succeeded here
    UNTYPED = "untyped"  # an error that is neither torch's nor one of shardwright's
    DIVERGED = "diverged"  # only some ranks raised, or they disagree about a layout
    TORN = "torn"  # a refused step has changed a tensor, or left it unreadable
    WRONG = "wrong"
    HUNG = "hung"
    CRASHED = "crashed"


FAILURES = (Verdict.UNTYPED, Verdict.DIVERGED, Verdict.TORN, Verdict.WRONG, Verdict.HUNG, Verdict.CRASHED)


@dataclass(frozen=True, slots=True)
class Judgement:
    """The judgement of a program: the verdict, the decisive step, and the details.

    >>> Judgement(Program(("a = 1",), (1,)), Verdict.RIGHT).failed
    False
    """

    program: Program
    verdict: Verdict
    step: int | None = None
    detail: str = ""
    results: tuple[StepResult, ...] = ()
    refusals: tuple[str, ...] = ()

    @property
    def failed(self) -> bool:
        """True if it shows a bug."""
        return self.verdict in FAILURES

    @property
    def kind(self) -> tuple[str, ...]:
        """The kind of bug: failures of one kind are likely to have one cause."""
        if self.verdict in (Verdict.WRONG, Verdict.TORN):
            words = self.detail.split()
            return self.verdict, *(words[1:3] if words[1:2] == ["has"] else words[1:2])
        if self.verdict is Verdict.UNTYPED:
            return self.verdict, self.detail.partition(":")[0]
        return (self.verdict,)

    def __str__(self) -> str:
        steps = self.program.steps
        at = ""
        if self.step is not None:
            at = f" at `{steps[self.step]}`" if self.step < len(steps) else " when all values were read at the end"
        return f"{self.verdict}{at}: {self.detail}\n\n{self.program.script}"


def judge(
    program: Program, *, pool: RankPool | None = None, timeout: float = TIMEOUT, setup: Setup | None = None
) -> Judgement:
    """Run a program on its ranks, on plain tensors and on DTensors, and return the judgement.

    >>> steps = ("a = leaf([1, 2, 3], (3,), torch.float32, [Shard(0)])", "a[1:] += 1", "b = a.sum()")
    >>> str(judge(Program(steps, mesh=(2,))).verdict)
    'right'
    """
    run = outcomes if pool is None else pool.outcomes
    with tempfile.TemporaryDirectory(prefix="shardwright-program-") as notes:
        rank_outcomes = run(program.ranks, run_program, program, notes, setup, timeout=timeout, grace=GRACE)
        return _judged(program, rank_outcomes, Path(notes))


def _judged(program: Program, outcomes: list[Outcome], notes: Path) -> Judgement:
    if any(isinstance(outcome, Died) for outcome in outcomes):
        return _lost(program, Verdict.CRASHED, outcomes, notes)
    if any(isinstance(outcome, Hung) for outcome in outcomes):
        return _lost(program, Verdict.HUNG, outcomes, notes)
    if any(isinstance(outcome, Raised) for outcome in outcomes):
        return _lost(program, Verdict.UNTYPED, outcomes, notes)
    courses: list[Course] = [outcome.value for outcome in outcomes if isinstance(outcome, Returned)]
    first = courses[0]
    results, refusals = tuple(first.results), tuple(first.refusals)
    last = len(first.results) - 1
    if any(course.results != first.results for course in courses):
        problems = "; ".join(
            f"rank {rank}: {course.results[-1]} {course.detail}" for rank, course in enumerate(courses)
        )
        return Judgement(program, Verdict.DIVERGED, last, problems, results, refusals)
    ending = first.results[-1] if first.results else StepResult.RIGHT
    if ending is StepResult.DIVERGED:
        problems = "; ".join(f"rank {rank}: {course.detail}" for rank, course in enumerate(courses))
        return Judgement(program, Verdict.DIVERGED, last, problems, results, refusals)
    if ending in (StepResult.ACCEPTED, StepResult.UNTYPED, StepResult.TORN, StepResult.WRONG):
        return Judgement(program, Verdict(ending.value), last, first.detail, results, refusals)
    verdict = Verdict.REFUSED if refusals else Verdict.RIGHT
    return Judgement(program, verdict, None, "", results, refusals)


def _lost(program: Program, verdict: Verdict, outcomes: list[Outcome], notes: Path) -> Judgement:
    """Return a judgement about ranks that did not return: where they were, from their notes."""
    progress = [f"rank {path.name}: {path.read_text()}" for path in sorted(notes.iterdir())]
    at = [line for line in progress if ": step " in line]
    step = int(at[0].partition(": step ")[2].partition(":")[0]) if at else None
    return Judgement(program, verdict, step, "\n".join([*progress, report(outcomes)]))
