"""Run all operators of the database on ranks and count those that are right, wrong, refused or hang."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Literal, final

from shardwright.testing.operators.cases import Case, cases_of
from shardwright.testing.operators.running import Ours, Outcome, System, run_case
from shardwright.testing.ranks.outcome import Returned
from shardwright.testing.ranks.pool import RankPool

__all__ = ["Surveyed", "survey", "survey_operator"]


@final
@dataclass(frozen=True, slots=True)
class Surveyed:
    """The outcomes of an operator's cases."""

    operator: str
    outcomes: list[tuple[Case, Outcome]] = field(default_factory=list)
    hung: bool = False

    def count(self, kind: Literal["right", "wrong", "refused"]) -> int:
        """Return the number of cases with this outcome."""
        return sum(outcome.kind == kind for _, outcome in self.outcomes)

    @property
    def verdict(self) -> str:
        """Summary: hung, wrong, refused, some (some right, others refused), right, or none (no cases)."""
        if self.hung:
            return "hung"
        if self.count("wrong"):
            return "wrong"
        if not self.outcomes:
            return "none"
        right, refused = self.count("right"), self.count("refused")
        return "right" if not refused else "some" if right else "refused"

    @property
    def always_falls_back(self) -> bool:
        """True if every case with a sharded tensor was computed on unsharded tensors."""
        sharded = [
            outcome
            for case, outcome in self.outcomes
            if any(placement.is_shard() for each in case.placements for placement in each)
        ]
        return bool(sharded) and all(outcome.fell_back for outcome in sharded)


def survey(
    operators: Iterable[str],
    mesh: tuple[int, ...],
    *,
    system: Callable[[], System] = Ours,
    least: int = 8,
    most: int = 24,
    seed: int = 0,
    timeout: float = 60.0,
    gradients: bool = True,
) -> Iterator[Surveyed]:
    """Yield the outcomes of each operator on the ranks of a mesh, in turn; one that hangs is abandoned."""
    size = 1
    for ranks in mesh:
        size *= ranks
    with RankPool() as pool:
        for name in operators:
            outcomes = pool.outcomes(
                size, survey_operator, name, mesh, system, least, most, seed, gradients, timeout=timeout
            )
            if all(isinstance(each_outcome, Returned) for each_outcome in outcomes):
                values = [each_outcome.value for each_outcome in outcomes if isinstance(each_outcome, Returned)]
                merged = [
                    (ranks[0][0], _worst([outcome for _, outcome in ranks])) for ranks in zip(*values, strict=True)
                ]
                yield Surveyed(name, merged)
            else:
                yield Surveyed(name, hung=True)


def survey_operator(
    name: str, mesh: tuple[int, ...], system: Callable[[], System], least: int, most: int, seed: int, gradients: bool
) -> list[tuple[Case, Outcome]]:
    """Run the cases of an operator on this rank."""
    instance = system()
    return [(case, run_case(instance, case, gradients)) for case in cases_of(name, mesh, least, most, seed)]


def _worst(outcomes: list[Outcome]) -> Outcome:
    order = ("wrong", "refused", "right")
    return min(outcomes, key=lambda outcome: order.index(outcome.kind))
