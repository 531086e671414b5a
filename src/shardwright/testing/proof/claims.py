"""Asking a rule, through the choosing that dispatch uses: what it claims for given placements of the inputs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from shardwright.errors import ShardwrightError, TensorError
from shardwright.layout import Layout, Mesh, Placement
from shardwright.tensor.base.gradient_types import without_entered
from shardwright.tensor.base.registry import Rule
from shardwright.tensor.base.rounding import rounded_operands, without_rounding
from shardwright.tensor.base.strategy import MeshStrategy, Operand, Run, Strategies, Strategy
from shardwright.tensor.dispatch.choose import Impossible, choose
from shardwright.testing.operators.sample import Reference, Sample
from shardwright.testing.proof.splitting import Mismatch

__all__ = ["Answer", "Claim", "ask"]


class Claim(NamedTuple):
    """Inputs laid out so, run so on every rank, give outputs laid out so."""

    ins: tuple[Layout, ...]
    outs: tuple[Layout, ...]
    run: Run | None
    fresh: bool  # and these are new tensors, never views of an input


class Answer(NamedTuple):
    """All that a rule claims when asked with some placements, and which claim takes the inputs as they are, if any."""

    claims: tuple[Claim, ...]
    taken: Claim | None


def ask(
    rule: Rule, sample: Sample, reference: Reference, placements: Sequence[Placement], ranks: int, known: set[Strategy]
) -> Answer:
    """What the rule claims for inputs placed so; `Mismatch` where the answer makes no sense.

    Strategies in `known`, which it adds to, are not claimed again, unless one takes the inputs as they are.
    """
    mesh = Mesh((ranks,))
    operands = [
        Operand(Layout(mesh, [placement], tensor.shape), tensor.dtype, asked)
        for placement, tensor, asked in zip(placements, sample.tensors, reference.asks, strict=True)
    ]
    args, kwargs = sample.with_each(operands)
    try:
        answer = rule(*args, **kwargs)
    except TensorError:
        return Answer((), None)  # refused, with a reason
    except Exception as error:  # whatever a rule raises for a call that torch takes is its fault
        raise Mismatch(f"the rule raised {type(error).__name__}: {error}") from error
    if answer is None:
        return Answer((), None)
    dtypes = [out.dtype for out in reference.outs]
    if isinstance(answer, Strategies):
        answer = without_rounding(answer, operands, dtypes)
    try:
        # Partial values that the operator would round are made by dispatch of whole ones only: one, and zeros.
        apart = rounded_operands(operands, dtypes)
        claims = tuple(
            claim
            for claim in _claims(answer, operands, sample, reference, known)
            if not any(claim.ins[place].is_partial for place in apart)
        )
        given = tuple(operand.layout for operand in operands)
        return Answer(claims, _taken(answer, operands, sample, reference, given))
    except ShardwrightError as error:
        raise Mismatch(f"the rule's layouts cannot be: {error}") from error
    except (TypeError, ValueError, LookupError, ArithmeticError, AttributeError) as error:
        raise Mismatch(f"the rule's strategies raised {type(error).__name__}: {error}") from error


def _claims(
    answer: Strategies | MeshStrategy,
    operands: list[Operand],
    sample: Sample,
    reference: Reference,
    known: set[Strategy],
) -> Iterator[Claim]:
    if isinstance(answer, MeshStrategy):
        found = [_claim(answer, answer.ins, answer.outs, operands)]
    else:
        strategies = [strategy for strategy in dict.fromkeys(answer.at(0)) if strategy not in known]
        known.update(strategies)
        found = [_claim(answer, *_choose(answer, [strategy], operands, reference), operands) for strategy in strategies]
    # In place, the target keeps its layout, or the dispatcher refuses.
    yield from (claim for claim in found if not sample.inplace or without_entered(claim.ins[0]) is claim.outs[0])


def _choose(
    answer: Strategies,
    strategies: list[Strategy],
    operands: list[Operand],
    reference: Reference,
    unmoved: int | None = None,
) -> tuple[Sequence[Layout], Sequence[Layout]]:
    shapes = tuple(tuple(out.shape) for out in reference.outs)
    if answer.shapes is not None and answer.shapes != shapes:
        raise Mismatch(f"the rule gives its outputs the shapes {answer.shapes}: they have {shapes}")
    for strategy in strategies:
        if len(strategy.ins) != len(operands) or len(strategy.outs) != len(shapes):
            raise Mismatch(
                f"the strategy {strategy.ins} -> {strategy.outs} is for {len(strategy.ins)} inputs and "
                f"{len(strategy.outs)} outputs: "
                f"there are {len(operands)} and {len(shapes)}"
            )
    return choose(operands, replace(answer, at=lambda _: strategies, unmoved=unmoved), shapes)


def _claim(
    answer: Strategies | MeshStrategy, ins: Sequence[Layout], outs: Sequence[Layout], operands: Sequence[Operand]
) -> Claim:
    # As dispatch does: without a gradient, entering is nothing.
    needed = [
        layout if operand.grad else without_entered(layout) for operand, layout in zip(operands, ins, strict=True)
    ]
    return Claim(tuple(needed), tuple(outs), answer.run, answer.fresh)


def _taken(
    answer: Strategies | MeshStrategy,
    operands: list[Operand],
    sample: Sample,
    reference: Reference,
    given: tuple[Layout, ...],
) -> Claim | None:
    if isinstance(answer, MeshStrategy):
        claim = _claim(answer, answer.ins, answer.outs, operands)
    else:
        current = tuple(operand.layout.placements[0] for operand in operands)
        if all(strategy.ins != current for strategy in answer.at(0)):
            return None
        try:
            chosen = _choose(answer, answer.at(0), operands, reference, 0 if sample.inplace else None)
        except Impossible:
            return None
        claim = _claim(answer, *chosen, operands)
    keeps = not sample.inplace or claim.outs[0] is given[0]
    return claim if keeps and tuple(without_entered(layout) for layout in claim.ins) == given else None
