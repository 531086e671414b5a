"""The prover detects mutants: every rule, mutated in each of six ways, is reported wrong."""

from __future__ import annotations

import importlib.util
import os
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from shardwright.layout import Partial, Replicate, Shard
from shardwright.tensor.base.registry import OPERATORS, canonical_name
from shardwright.tensor.base.strategy import MeshStrategy, Strategies, Strategy
from shardwright.testing import prove

FULL = os.environ.get("SHARDWRIGHT_BUDGET") == "full"


def proofs() -> Any:
    """Import the module with the samples of all rules."""
    path = Path(__file__).resolve().parents[1] / "tensor" / "rules" / "test_proofs.py"
    spec = importlib.util.spec_from_file_location("proofs_of_rules", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


PROOFS = proofs()
Change = Callable[[Strategy], Iterator[Strategy]]


def claim_sharded_outputs_are_replicated(strategy: Strategy) -> Iterator[Strategy]:
    if any(type(p) is Shard for p in strategy.outs):
        yield Strategy(strategy.ins, tuple(Replicate() if type(p) is Shard else p for p in strategy.outs))


def claim_partial_outputs_are_replicated(strategy: Strategy) -> Iterator[Strategy]:
    if any(p.is_partial("sum") for p in strategy.outs):
        yield Strategy(strategy.ins, tuple(Replicate() if p.is_partial("sum") else p for p in strategy.outs))


def claim_replicated_outputs_are_partial(strategy: Strategy) -> Iterator[Strategy]:
    if all(p == Replicate() for p in (*strategy.ins, *strategy.outs)):
        yield Strategy(strategy.ins, tuple(Partial("sum") for _ in strategy.outs))


def claim_partial_sums_are_maxima(strategy: Strategy) -> Iterator[Strategy]:
    if any(p.is_partial("sum") for p in strategy.outs):
        yield Strategy(strategy.ins, tuple(Partial("max") if p.is_partial("sum") else p for p in strategy.outs))


def claim_sharded_inputs_are_replicated(strategy: Strategy) -> Iterator[Strategy]:
    """Compute from replicated inputs, but keep the claimed output placements."""
    if any(type(p) is Shard for p in strategy.ins) and all(type(p) is Shard for p in strategy.outs):
        yield Strategy(tuple(Replicate() if type(p) is Shard else p for p in strategy.ins), strategy.outs)


def claim_outputs_are_sharded_along_another_dimension(strategy: Strategy) -> Iterator[Strategy]:
    if any(type(p) is Shard for p in strategy.outs):
        yield Strategy(strategy.ins, tuple(Shard(p.dim + 1) if type(p) is Shard else p for p in strategy.outs))


CHANGES: list[Change] = [
    claim_sharded_outputs_are_replicated,
    claim_partial_outputs_are_replicated,
    claim_replicated_outputs_are_partial,
    claim_partial_sums_are_maxima,
    claim_sharded_inputs_are_replicated,
    claim_outputs_are_sharded_along_another_dimension,
]


def mutant(rule: Any, change: Change) -> tuple[Any, list[Strategy]]:
    """Return the rule with only the changed strategies, and the list that these are added to when it is called."""
    made: list[Strategy] = []

    def changed(*args: Any, **kwargs: Any) -> Strategies | None:
        answer = rule(*args, **kwargs)
        if answer is None or isinstance(answer, MeshStrategy):
            return None

        def at(mesh_dim: int) -> list[Strategy]:
            strategies = [other for strategy in answer.at(mesh_dim) for other in change(strategy)]
            made.extend(strategies)
            return strategies

        return replace(answer, at=at)

    return changed, made


# Rules that return a MeshStrategy, or all of whose samples write in place: no change applies.
WITHOUT_MUTANTS = set(
    """
    _unsafe_view binary_cross_entropy binary_cross_entropy_with_logits chunk copy flatten full_like hinge_embedding_loss
    kl_div margin_ranking_loss narrow new_full new_ones new_zeros ones_like poisson_nll_loss ravel reshape
    reshape_as select slice soft_margin_loss split split_with_sizes tensor_split type_as unflatten unsafe_chunk
    unsafe_split unsafe_split_with_sizes view_as zero zeros_like
    """.split()
)
RULES = sorted(set(PROOFS.RULES) - set(PROOFS.ELSEWHERE) - set(PROOFS.SHAPES_ALONE))
SOME = RULES if FULL else sorted(random.Random(0).sample(RULES, len(RULES) // 10))


def survivors(name: str, change: Change) -> tuple[int, list[str]]:
    """Return how many samples the change applies to, and their proofs if none of them finds the mutant wrong."""
    survived = []
    for func, args, kwargs in PROOFS.samples_of(name):
        if canonical_name(func)[1] or name == "copy":
            continue  # in place, only claims that keep the layout are made
        changed, made = mutant(OPERATORS[name].rule, change)
        proof = prove(func, *args, rule=changed, **kwargs)
        if made and proof.wrong:
            return len(survived) + 1, []
        if made:
            survived.append(str(proof))
    return len(survived), survived


@pytest.mark.filterwarnings("ignore:index_reduce", "ignore:ComplexHalf")
@pytest.mark.parametrize("name", SOME)
def test_every_mutant_of_a_rule_is_found_wrong(name: str) -> None:
    applied = 0
    for change in CHANGES:
        tried, survived = survivors(name, change)
        assert not survived, f"{name}: {change.__name__} is not detected by any sample:\n" + "\n".join(survived)
        applied += tried
    assert applied or name in WITHOUT_MUTANTS, f"{name}: no change applies to any sample, so nothing was tried"
    assert not (applied and name in WITHOUT_MUTANTS), f"{name} has mutants: remove it from the list"


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_every_change_applies_to_matmul_and_is_detected(change: Change) -> None:
    """The rule of the matrix product has outputs that are sharded, replicated and partial."""
    tried, survived = survivors("mm", change)
    assert tried
    assert not survived
