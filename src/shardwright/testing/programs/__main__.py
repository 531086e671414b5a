"""`python -m shardwright.testing.programs`: run random programs on DTensors and compare them with plain torch.

    python -m shardwright.testing.programs                                      500 programs on 1 to 4 ranks
    python -m shardwright.testing.programs --count 5000 --minutes 10            at most ten minutes
    python -m shardwright.testing.programs --seed 1234 --count 1                one program again

Failures are minimised and printed as files to run with torchrun. The exit status is 1 if there are any.
"""

from __future__ import annotations

import argparse
import sys
import time

from rich.console import Console

from shardwright.testing.programs.fuzzing import fuzz
from shardwright.testing.programs.judge import Judgement, Verdict
from shardwright.testing.programs.witness import StepResult

__all__: list[str] = []


def main(arguments: list[str]) -> int:
    """Run the command and return the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m shardwright.testing.programs", description=__doc__.partition("\n")[0]
    )
    parser.add_argument("--count", type=int, default=500, help="programs to run (500)")
    parser.add_argument("--ranks", default="1-4", help="numbers of ranks, such as 2 or 1-4 (1-4)")
    parser.add_argument("--seed", type=int, default=0, help="the seed of the first program (0)")
    parser.add_argument("--minutes", type=float, help="stop after this many minutes")
    parser.add_argument("--workers", type=int, default=2, help="programs that run at once (2)")
    parser.add_argument("--minimising", type=float, default=60.0, help="seconds to minimise a failure for (60)")
    parser.add_argument("--most", type=int, default=20, help="failures to minimise (20)")
    parser.add_argument("--refusals", action="store_true", help="list refusals, the most frequent first")
    parser.add_argument("--accepted", action="store_true", help="show steps that succeeded although torch refuses them")
    options = parser.parse_args(arguments)
    low, _, high = options.ranks.partition("-")
    console = Console(soft_wrap=True, highlight=False, markup=False, emoji=False)
    began = time.monotonic()

    def on_judgement(judgement: Judgement) -> None:
        if judgement.failed or (options.accepted and judgement.verdict is Verdict.ACCEPTED):
            console.print(f"{'=' * 100}\n{judgement}\n")

    fuzzing = fuzz(
        options.count,
        ranks=range(int(low), int(high or low) + 1),
        seed=options.seed,
        seconds=None if options.minutes is None else 60 * options.minutes,
        workers=options.workers,
        minimising=options.minimising,
        most=options.most,
        on_judgement=on_judgement,
    )
    if options.refusals:
        for text, times in fuzzing.refusals.most_common(60):
            console.print(f"{times:6} {text[:300]}")
    steps = ", ".join(f"{fuzzing.steps[result]:,} {result}" for result in StepResult if fuzzing.steps[result])
    console.print(f"{fuzzing}; steps: {steps}; {time.monotonic() - began:.0f} s")
    return 1 if fuzzing.failures else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
