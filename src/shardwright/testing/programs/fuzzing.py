"""Generate and judge many programs, and minimise those that fail."""

from __future__ import annotations

import functools
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from shardwright.testing.programs.execute import Setup
from shardwright.testing.programs.generate import generate
from shardwright.testing.programs.judge import TIMEOUT, Judgement, Verdict, judge
from shardwright.testing.programs.minimise import minimise
from shardwright.testing.programs.program import Program
from shardwright.testing.programs.witness import StepResult
from shardwright.testing.ranks.pool import RankPool

__all__ = ["Fuzzing", "fuzz"]

CHUNK = 40  # programs with the same number of ranks that run in a row: joining another world takes time


@dataclass
class Fuzzing:
    """The results of many programs: counts by verdict, counts of steps, and the minimised failures.

    >>> str(Fuzzing(Counter({Verdict.RIGHT: 3})))
    '3 programs: 3 right'
    """

    verdicts: Counter[Verdict] = field(default_factory=Counter)
    steps: Counter[StepResult] = field(default_factory=Counter)
    refusals: Counter[str] = field(default_factory=Counter)
    failures: list[Judgement] = field(default_factory=list)
    accepted: list[Judgement] = field(default_factory=list)

    def __str__(self) -> str:
        counts = ", ".join(f"{self.verdicts[verdict]} {verdict}" for verdict in Verdict if self.verdicts[verdict])
        return f"{self.verdicts.total()} programs: {counts}"

    def count(self, judgement: Judgement) -> None:
        """Count one judgement."""
        self.verdicts[judgement.verdict] += 1
        self.steps.update(judgement.results)
        self.refusals.update(judgement.refusals)
        if judgement.verdict is Verdict.ACCEPTED:
            self.accepted.append(judgement)


def fuzz(
    count: int,
    *,
    ranks: Sequence[int] = (1, 2, 3, 4),
    seed: int = 0,
    seconds: float | None = None,
    workers: int = 1,
    minimising: float = 60.0,
    most: int = 20,
    timeout: float = TIMEOUT,
    setup: Setup | None = None,
    on_judgement: Callable[[Judgement], None] = lambda _: None,
) -> Fuzzing:
    """Judge the programs of the seeds from `seed` on and return the results.

    It ends after `count` programs or after `seconds`. Each worker has its own pool of ranks. The first `most`
    failures are minimised, for at most `minimising` seconds each. `on_judgement` is called with every judgement.

    >>> print(fuzz(2, ranks=(1,)))
    2 programs: ...
    """
    result = Fuzzing()
    deadline = None if seconds is None else time.monotonic() + seconds
    todo = _chunks(range(seed, seed + count), tuple(ranks))
    lock = threading.Lock()
    errors: list[BaseException] = []

    def work() -> None:
        try:
            with RankPool() as pool:
                while not errors:
                    with lock:
                        chunk = next(todo, None)
                    if chunk is None:
                        return
                    for program in chunk:
                        if deadline is not None and time.monotonic() > deadline:
                            return
                        _judge_one(program, pool)
        except BaseException as error:  # noqa: BLE001  raised again by the caller's thread
            errors.append(error)

    def _judge_one(program: Program, pool: RankPool) -> None:
        run = functools.partial(judge, pool=pool, setup=setup)
        judgement = run(program, timeout=timeout)
        if judgement.verdict is Verdict.HUNG:  # once more, with more time: the machine may be busy
            judgement = run(program, timeout=2 * timeout)
        with lock:
            result.count(judgement)
            minimised = judgement.failed and len(result.failures) < most
            if judgement.failed:
                result.failures.append(judgement)
                index = len(result.failures) - 1
        if minimised:
            small = minimise(judgement, functools.partial(run, timeout=min(timeout, 10.0)), seconds=minimising)
            result.failures[index] = judgement = small
        on_judgement(judgement)

    threads = [threading.Thread(target=work) for _ in range(workers - 1)]
    for thread in threads:
        thread.start()
    work()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return result


def _chunks(seeds: Sequence[int], ranks: tuple[int, ...]) -> Iterator[list[Program]]:
    """Yield the programs of the seeds in chunks of one number of ranks."""
    waiting: dict[int, list[Program]] = {}
    for seed in seeds:
        program = generate(seed, ranks)
        chunk = waiting.setdefault(program.ranks, [])
        chunk.append(program)
        if len(chunk) == CHUNK:
            yield waiting.pop(program.ranks)
    yield from waiting.values()
