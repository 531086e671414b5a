"""The result of a proof: one verdict for every strategy of a rule, and the number of combinations left out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from shardwright.layout import Placement
from shardwright.listing import join_first

__all__ = ["Proof", "Verdict"]

Placements = tuple[Placement, ...]
MAX_LINES = 40  # of each kind


@final
@dataclass(frozen=True, slots=True)
class Verdict:
    """One strategy of an operator on one mesh dimension, and its fault, or None.

    `ins` are the placements of the inputs as the local call sees them: `Entered` for a replicated input whose gradient
    differs between ranks.

    >>> from shardwright.layout import Partial, Shard
    >>> print(Verdict((Shard(0),), (Partial(),), gradient=True, fault=None))
    S(0) -> P(sum)  with gradients: proved
    """

    ins: Placements
    outs: Placements
    gradient: bool  # True if gradients were compared, too
    fault: str | None

    def __str__(self) -> str:
        strategy = f"{', '.join(map(str, self.ins))} -> {', '.join(map(str, self.outs))}"
        with_gradients = "  with gradients" if self.gradient else ""
        return f"{strategy}{with_gradients}: {'proved' if self.fault is None else f'WRONG, {self.fault}'}"


@final
@dataclass(frozen=True, slots=True)
class Proof:
    """The verdicts on all strategies of a rule, for one call: `proved`, `wrong`, and the placements `declined`.

    Declined are the placements of the inputs that the rule does not take as they are: the dispatcher redistributes some
    input first, or falls back. `left_out` counts the combinations of placements that were not tried. `print(proof)`
    prints a table.

    >>> import torch
    >>> from shardwright.testing import prove
    >>> proof = prove(torch.relu, torch.tensor([-1.0, 2.0, 3.0, -4.0]))
    >>> len(proof.wrong), len(proof.proved), [str(*placements) for placements in proof.declined]
    (0, 6, ['P(sum)', 'P(avg)', 'P(max)'])
    """

    name: str
    ranks: int
    verdicts: tuple[Verdict, ...]
    declined: tuple[Placements, ...]
    left_out: int
    differentiable: bool  # True if torch has gradients for this call

    @property
    def proved(self) -> tuple[Verdict, ...]:
        """The strategies whose values, and gradients if required, equal those of the operator on full tensors."""
        return tuple(verdict for verdict in self.verdicts if verdict.fault is None)

    @property
    def wrong(self) -> tuple[Verdict, ...]:
        """The strategies that are not correct."""
        return tuple(verdict for verdict in self.verdicts if verdict.fault is not None)

    def __str__(self) -> str:
        counts = (
            f"{len(self.proved)} strategies proved, {len(self.wrong)} wrong, {len(self.declined)} placements declined"
        )
        lines = [f"{self.name} on {self.ranks} ranks: {counts}, {self.left_out} left out"]
        for verdicts in (self.wrong, self.proved):
            lines += ["  " + join_first(verdicts, MAX_LINES, "\n  ")] if verdicts else []
        if not self.differentiable:
            lines.append("  (torch has no gradient for this call: values only)")
        return "\n".join(lines)
