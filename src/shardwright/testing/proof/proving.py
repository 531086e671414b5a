"""Prove the rule of one operator call by trying every placement of its inputs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from shardwright.errors import TensorError
from shardwright.layout import Layout, Placement
from shardwright.tensor.base.registry import Rule, canonical_name, operator
from shardwright.tensor.base.strategy import Strategy
from shardwright.testing.operators.sample import Reference, Sample, refer
from shardwright.testing.proof.claims import Claim, claims_of
from shardwright.testing.proof.judge import DIFFERENTIABLE, judge
from shardwright.testing.proof.placements import combinations_of, placements_of
from shardwright.testing.proof.result import Proof, Verdict
from shardwright.testing.proof.splitting import Mismatch

__all__ = ["prove"]

Key = tuple[tuple[Layout, ...], tuple[Layout, ...], bool]


def prove(func: Any, *args: Any, ranks: int = 3, rule: Rule | None = None, values: bool = True, **kwargs: Any) -> Proof:
    """Prove an operator's rule for the call `func(*args, **kwargs)` on plain tensors.

    Every placement of every tensor argument on one mesh dimension of `ranks` simulated ranks is tried (beyond three
    tensors: every pair), in this process and without communication. For each strategy of the rule, whether dispatch
    would choose it or not, the local results are computed rank by rank, assembled, and compared with the call on full
    tensors: values, and gradients by the gradient contract. Choose sizes that `ranks` does not divide, and some smaller
    than `ranks`, so that shards are uneven, and empty.

    `rule` defaults to the one registered for the function. Gradients are computed for the tensors that require grad,
    or for all that can if none does. `values=False` compares only shapes and dtypes, for operators whose values are
    arbitrary.

    >>> import torch
    >>> from shardwright.layout import Partial, Replicate, Shard
    >>> from shardwright.tensor.base.strategy import Strategy, Strategies
    >>> proof = prove(torch.mm, torch.randn(4, 2), torch.randn(2, 5))
    >>> assert not proof.wrong, proof

    A wrong rule, and its verdict:

    >>> def careless(input):
    ...     return Strategies(lambda mesh_dim: [Strategy((Partial(),), (Partial(),))])
    >>> print(prove(torch.relu, torch.tensor([1.0, -2.0]), rule=careless).wrong[0])
    P(sum) -> P(sum): WRONG, output 0: ... elements differ
    """
    name, inplace = canonical_name(func)
    op = operator(name)
    tried = rule if rule is not None or op is None else op.rule
    if tried is None:
        raise TensorError(f"{name} has no rule to prove: register one with shardwright.register_rule")
    sample = Sample(func, args, kwargs, inplace)
    tensors = sample.tensors
    if not tensors:
        raise TensorError(f"{name}: the arguments contain no tensor to distribute")
    combinations, left_out = combinations_of([placements_of(tensor, ranks) for tensor in tensors])
    generator = torch.Generator().manual_seed(1)

    def randn(like: Tensor) -> Tensor:
        return torch.randn(like.shape, dtype=like.dtype, generator=generator)

    references = [_refer(name, sample, (False,) * len(tensors), randn)]
    if any(sample.needs_gradient()):
        references.append(_refer(name, sample, sample.needs_gradient(), randn))
    trial = _Trial(tried, sample, ranks, values)
    for reference in references:
        if reference is not None:
            claimed: set[Strategy] = set()
            for placements in combinations:
                trial.try_placements(reference, placements, claimed)
    return Proof(name, ranks, tuple(trial.verdicts()), tuple(trial.declined), left_out, references[-1] is not None)


def _refer(name: str, sample: Sample, needs_gradient: tuple[bool, ...], randn: Any) -> Reference | None:
    try:
        return refer(sample, needs_gradient, randn)
    except (RuntimeError, ValueError, IndexError, TypeError) as error:
        raise TensorError(f"{name}: torch refuses this call on full tensors: {error}") from error


class _Trial:
    """The verdicts so far. A claim is judged when first listed, and again for the inputs it takes as they are."""

    def __init__(self, rule: Rule, sample: Sample, ranks: int, values: bool) -> None:
        self.rule, self.sample, self.ranks, self.values = rule, sample, ranks, values
        self.declined: dict[tuple[Placement, ...], None] = {}
        self._faults: dict[Key, str | None] = {}
        self._judged: set[tuple[Key, bool]] = set()
        self._invalid: list[Verdict] = []

    def try_placements(self, reference: Reference, placements: tuple[Placement, ...], claimed: set[Strategy]) -> None:
        try:
            answer = claims_of(self.rule, self.sample, reference, placements, self.ranks, claimed)
        except Mismatch as fault:
            self._invalid.append(Verdict(placements, (), any(reference.needs_gradient), str(fault)))
            return
        if answer.direct is None:
            self.declined[placements] = None
        for claim in answer.claims:
            self._judge(reference, claim, direct=False)
        if answer.direct is not None:
            self._judge(reference, answer.direct, direct=True)

    def _judge(self, reference: Reference, claim: Claim, direct: bool) -> None:
        key = (claim.ins, claim.outs, any(reference.needs_gradient))
        # Only a custom local call can depend on the placements with which the rule was called.
        again = direct and claim.run is not None
        if (key, again) in self._judged or self._faults.get(key) is not None or _has_no_gradient(reference, claim):
            return
        self._judged.add((key, again))
        try:
            judge(self.sample, reference, claim, self.values)
            self._faults[key] = None
        except Mismatch as fault:
            self._faults[key] = str(fault)

    def verdicts(self) -> Iterator[Verdict]:
        """Yield the verdict of every claim."""
        yield from self._invalid
        for (ins, outs, gradient), fault in self._faults.items():
            yield Verdict(tuple(i.placements[0] for i in ins), tuple(o.placements[0] for o in outs), gradient, fault)


def _has_no_gradient(reference: Reference, claim: Claim) -> bool:
    """Return True if a gradient is required of an input that cannot have one: partial maxima are reduced before."""
    partial = [p for layout in claim.ins for p in layout.placements if p.is_partial()]
    return any(reference.needs_gradient) and any(not any(p.is_partial(op) for op in DIFFERENTIABLE) for p in partial)
