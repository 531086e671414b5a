"""Call a rule as dispatch does, and collect what it claims for given placements of the inputs."""

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

__all__ = ["Answer", "Claim", "claims_of"]


class Claim(NamedTuple):
    """The claim that `run` on every rank maps inputs with the layouts `ins` to outputs with the layouts `outs`."""

    ins: tuple[Layout, ...]
    outs: tuple[Layout, ...]
    run: Run | None
    fresh: bool  # True if the outputs are new tensors, never views of an input


class Answer(NamedTuple):
    """The claims of a rule for some input placements; `direct` takes the inputs without redistribution, if any does."""

    claims: tuple[Claim, ...]
    direct: Claim | None


def claims_of(
    rule: Rule,
    sample: Sample,
    reference: Reference,
    placements: Sequence[Placement],
    ranks: int,
    claimed: set[Strategy],
) -> Answer:
    """Return the rule's claims for these input placements; raise `Mismatch` if its answer is invalid.

    Strategies in `claimed` are left out, unless one takes the inputs without redistribution; new ones are added to it.
    """
    mesh = Mesh((ranks,))
    operands = [
        Operand(Layout(mesh, [placement], tensor.shape), tensor.dtype, requires)
        for placement, tensor, requires in zip(placements, sample.tensors, reference.needs_gradient, strict=True)
    ]
    args, kwargs = sample.with_each(operands)
    try:
        answer = rule(*args, **kwargs)
    except TensorError:
        return Answer((), None)  # the rule refuses the call
    except Exception as error:  # any other exception, for a call that torch accepts, is a fault of the rule
        raise Mismatch(f"the rule raised {type(error).__name__}: {error}") from error
    if answer is None:
        return Answer((), None)
    dtypes = [out.dtype for out in reference.outs]
    if isinstance(answer, Strategies):
        answer = without_rounding(answer, operands, dtypes)
    try:
        # For operands the operator would round, dispatch makes partial values only from replicated ones, as one value
        # and zeros.
        rounded = rounded_operands(operands, dtypes)
        claims = tuple(
            claim
            for claim in _claims(answer, operands, sample, reference, claimed)
            if not any(claim.ins[index].is_partial for index in rounded)
        )
        layouts = tuple(operand.layout for operand in operands)
        return Answer(claims, _direct_claim(answer, operands, sample, reference, layouts))
    except ShardwrightError as error:
        raise Mismatch(f"the rule's layouts are invalid: {error}") from error
    except (TypeError, ValueError, LookupError, ArithmeticError, AttributeError) as error:
        raise Mismatch(f"the rule's strategies raised {type(error).__name__}: {error}") from error


def _claims(
    answer: Strategies | MeshStrategy,
    operands: list[Operand],
    sample: Sample,
    reference: Reference,
    claimed: set[Strategy],
) -> Iterator[Claim]:
    if isinstance(answer, MeshStrategy):
        claims = [_claim(answer, answer.ins, answer.outs, operands)]
    else:
        new = [strategy for strategy in dict.fromkeys(answer.at(0)) if strategy not in claimed]
        claimed.update(new)
        claims = [_claim(answer, *_choose(answer, [strategy], operands, reference), operands) for strategy in new]
    # In place, the target must keep its layout: the dispatcher refuses anything else.
    yield from (claim for claim in claims if not sample.inplace or without_entered(claim.ins[0]) is claim.outs[0])


def _choose(
    answer: Strategies,
    strategies: list[Strategy],
    operands: list[Operand],
    reference: Reference,
    unmoved: int | None = None,
) -> tuple[Sequence[Layout], Sequence[Layout]]:
    shapes = tuple(tuple(out.shape) for out in reference.outs)
    if answer.shapes is not None and answer.shapes != shapes:
        raise Mismatch(f"the rule gives the output shapes {answer.shapes}, but they are {shapes}")
    for strategy in strategies:
        if len(strategy.ins) != len(operands) or len(strategy.outs) != len(shapes):
            raise Mismatch(
                f"the strategy {strategy.ins} -> {strategy.outs} has {len(strategy.ins)} inputs and "
                f"{len(strategy.outs)} outputs, but the call has {len(operands)} and {len(shapes)}"
            )
    ins, outs, _ = choose(operands, replace(answer, at=lambda _: strategies, unmoved=unmoved), shapes)
    return ins, outs


def _claim(
    answer: Strategies | MeshStrategy, ins: Sequence[Layout], outs: Sequence[Layout], operands: Sequence[Operand]
) -> Claim:
    # As in dispatch: without a gradient, Entered is Replicate.
    needed = [
        layout if operand.grad else without_entered(layout) for operand, layout in zip(operands, ins, strict=True)
    ]
    return Claim(tuple(needed), tuple(outs), answer.run, answer.fresh)


def _direct_claim(
    answer: Strategies | MeshStrategy,
    operands: list[Operand],
    sample: Sample,
    reference: Reference,
    layouts: tuple[Layout, ...],
) -> Claim | None:
    """Return the claim that dispatch would choose for these layouts, if it redistributes no input."""
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
    keeps = not sample.inplace or claim.outs[0] is layouts[0]
    return claim if keeps and tuple(without_entered(layout) for layout in claim.ins) == layouts else None
