"""Proving the rule of one operator call, by trying every placement of its inputs."""

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
from shardwright.testing.proof.claims import Claim, ask
from shardwright.testing.proof.judge import DIFFERENTIABLE, judge
from shardwright.testing.proof.placing import combinations_of, placements_of
from shardwright.testing.proof.result import Proof, Verdict
from shardwright.testing.proof.splitting import Mismatch

__all__ = ["prove"]

Key = tuple[tuple[Layout, ...], tuple[Layout, ...], bool]


def prove(func: Any, *args: Any, ranks: int = 3, rule: Rule | None = None, values: bool = True, **kwargs: Any) -> Proof:
    """What is true of an operator's rule, for the call `func(*args, **kwargs)` on plain tensors.

    Every placement of every tensor argument on one mesh dimension of `ranks` simulated ranks is tried (beyond three
    tensors: every pair), in this process and without communication. For each way the rule has, whether the chooser
    takes it or not, the parts are computed rank by rank, put together, and compared with the call on whole tensors:
    values, and gradients as the gradient contract says. Choose sizes that the ranks do not divide, and some smaller
    than them: shards are then uneven, and empty.

    `rule` is the one registered for the function, unless given. Gradients are asked for the tensors that require
    grad, or for all that can where none does. `values=False` compares shapes and dtypes alone, for operators
    whose values are arbitrary.

    >>> import torch
    >>> from shardwright.layout import Partial, Replicate, Shard
    >>> from shardwright.tensor.base.strategy import Strategy, Strategies
    >>> proof = prove(torch.mm, torch.randn(4, 2), torch.randn(2, 5))
    >>> assert not proof.wrong, proof

    A rule of your own that is wrong, and what is said of it:

    >>> def careless(input):
    ...     return Strategies(lambda mesh_dim: [Strategy((Partial(),), (Partial(),))])
    >>> print(prove(torch.relu, torch.tensor([1.0, -2.0]), rule=careless).wrong[0])
    P(sum) -> P(sum): WRONG, output 0: ... elements differ
    """
    name, inplace = canonical_name(func)
    op = operator(name)
    asked = rule if rule is not None or op is None else op.rule
    if asked is None:
        raise TensorError(f"{name} has no rule to prove: register one with shardwright.register_rule")
    sample = Sample(func, args, kwargs, inplace)
    tensors = sample.tensors
    if not tensors:
        raise TensorError(f"{name}: there is no tensor among the arguments to be placed")
    combinations, left_out = combinations_of([placements_of(tensor, ranks) for tensor in tensors])
    generator = torch.Generator().manual_seed(1)

    def randn(like: Tensor) -> Tensor:
        return torch.randn(like.shape, dtype=like.dtype, generator=generator)

    modes = [_refer(name, sample, (False,) * len(tensors), randn)]
    if any(sample.asks()):
        modes.append(_refer(name, sample, sample.asks(), randn))
    trial = _Trial(asked, sample, ranks, values)
    for reference in modes:
        if reference is not None:
            known: set[Strategy] = set()
            for placements in combinations:
                trial.ask(reference, placements, known)
    return Proof(name, ranks, tuple(trial.verdicts()), tuple(trial.declined), left_out, modes[-1] is not None)


def _refer(name: str, sample: Sample, asks: tuple[bool, ...], randn: Any) -> Reference | None:
    try:
        return refer(sample, asks, randn)
    except (RuntimeError, ValueError, IndexError, TypeError) as error:
        raise TensorError(f"{name}: torch refuses this call on whole tensors: {error}") from error


class _Trial:
    """The verdicts so far: a claim is judged as the first to list it has it, and as its own inputs have it."""

    def __init__(self, rule: Rule, sample: Sample, ranks: int, values: bool) -> None:
        self.rule, self.sample, self.ranks, self.values = rule, sample, ranks, values
        self.declined: dict[tuple[Placement, ...], None] = {}
        self._faults: dict[Key, str | None] = {}
        self._judged: set[tuple[Key, bool]] = set()
        self._senseless: list[Verdict] = []

    def ask(self, reference: Reference, placements: tuple[Placement, ...], known: set[Strategy]) -> None:
        try:
            answer = ask(self.rule, self.sample, reference, placements, self.ranks, known)
        except Mismatch as fault:
            self._senseless.append(Verdict(placements, (), any(reference.asks), str(fault)))
            return
        if answer.taken is None:
            self.declined[placements] = None
        for claim in answer.claims:
            self._judge(reference, claim, taken=False)
        if answer.taken is not None:
            self._judge(reference, answer.taken, taken=True)

    def _judge(self, reference: Reference, claim: Claim, taken: bool) -> None:
        key = (claim.ins, claim.outs, any(reference.asks))
        # Without a local call of its own there is nothing that could depend on who asked.
        again = taken and claim.run is not None
        if (key, again) in self._judged or self._faults.get(key) is not None or _has_no_gradient(reference, claim):
            return
        self._judged.add((key, again))
        try:
            judge(self.sample, reference, claim, self.values)
            self._faults[key] = None
        except Mismatch as fault:
            self._faults[key] = str(fault)

    def verdicts(self) -> Iterator[Verdict]:
        """Every claim with what is wrong with it, if anything."""
        yield from self._senseless
        for (ins, outs, gradient), fault in self._faults.items():
            yield Verdict(tuple(i.placements[0] for i in ins), tuple(o.placements[0] for o in outs), gradient, fault)


def _has_no_gradient(reference: Reference, claim: Claim) -> bool:
    """Whether a gradient is asked for an input that cannot have one: partial extremes are reduced before."""
    partial = [p for layout in claim.ins for p in layout.placements if p.is_partial()]
    return any(reference.asks) and any(not any(p.is_partial(op) for op in DIFFERENTIABLE) for p in partial)
