"""What a proof found: one verdict for every strategy a rule has, and what was not tried."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from shardwright.layout import Placement
from shardwright.listing import join_first

__all__ = ["Proof", "Verdict"]

Placements = tuple[Placement, ...]
LINES = 40  # shown of each kind


@final
@dataclass(frozen=True, slots=True)
class Verdict:
    """One strategy to run an operator on one mesh dimension, and what is wrong with it, if anything.

    `ins` are the placements of the inputs as the local call sees them: `Entered` where a replicate's gradient
    differs from rank to rank.

    >>> from shardwright.layout import Partial, Shard
    >>> print(Verdict((Shard(0),), (Partial(),), gradient=True, fault=None))
    S(0) -> P(sum)  with gradients: proved
    """

    ins: Placements
    outs: Placements
    gradient: bool  # whether gradients were asked for and compared, too
    fault: str | None

    def __str__(self) -> str:
        strategy = f"{', '.join(map(str, self.ins))} -> {', '.join(map(str, self.outs))}"
        with_gradients = "  with gradients" if self.gradient else ""
        return f"{strategy}{with_gradients}: {'proved' if self.fault is None else f'WRONG, {self.fault}'}"


@final
@dataclass(frozen=True, slots=True)
class Proof:
    """What became of every strategy of a rule, for one call: `proved`, `wrong`, and the placements it `declined`.

    Declined are the placements of the inputs that the rule does not take as they are: the dispatcher moves some input
    first, or falls back. `left_out` counts the combinations of placements that were not tried. `print(proof)` is a
    table.

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
    differentiable: bool  # whether torch itself gives gradients here

    @property
    def proved(self) -> tuple[Verdict, ...]:
        """The strategies whose values, and gradients where asked for, are those of the operator on whole tensors."""
        return tuple(verdict for verdict in self.verdicts if verdict.fault is None)

    @property
    def wrong(self) -> tuple[Verdict, ...]:
        """The strategies that give something else."""
        return tuple(verdict for verdict in self.verdicts if verdict.fault is not None)

    def __str__(self) -> str:
        counts = (
            f"{len(self.proved)} strategies proved, {len(self.wrong)} wrong, {len(self.declined)} placements declined"
        )
        lines = [f"{self.name} on {self.ranks} ranks: {counts}, {self.left_out} left out"]
        for verdicts in (self.wrong, self.proved):
            lines += ["  " + join_first(verdicts, LINES, "\n  ")] if verdicts else []
        if not self.differentiable:
            lines.append("  (torch has no gradient for this call: values only)")
        return "\n".join(lines)
