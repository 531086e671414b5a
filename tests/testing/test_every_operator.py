"""Every operator of torch's database: proved by enumeration in one process, correct on 4 ranks, and documented."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

from shardwright.testing.operators import entries
from shardwright.testing.operators.survey import survey
from shardwright.testing.proof.everything import prove_all
from shardwright.testing.proof.page import row, rows_in

PAGE = Path(__file__).resolve().parents[2] / "docs" / "reference" / "operators.md"
FULL = os.environ.get("SHARDWRIGHT_BUDGET") == "full"
# Refused operators with the reason: every other one must run for every placement that is tried.
REFUSED = {"to_sparse": "the local tensors of a DTensor are dense: use x.full_tensor().to_sparse()"}


def some(count: int, seed: int) -> list[str]:
    """Return all operators of the database in the full budget, else `count` of them, the same every time."""
    names = list(dict.fromkeys(entry.name for entry in entries()))
    return names if FULL else sorted(random.Random(seed).sample(names, count))


@pytest.mark.timeout(1800)
def test_no_rule_is_wrong_and_the_operators_page_is_up_to_date() -> None:
    rows = rows_in(PAGE)
    names = some(40, seed=6)
    proofs = list(prove_all(names))
    wrong = [text for proof in proofs for text in proof.wrong]
    assert not wrong, "\n".join(wrong)
    assert {proof.name for proof in proofs} == set(names)
    stale = [proof.name for proof in proofs if rows.get(proof.name) != row(proof)]
    assert not stale, f"regenerate {PAGE.name} with python -m shardwright.testing.proof --page: {stale}"


def test_the_operators_page_lists_every_operator() -> None:
    assert set(rows_in(PAGE)) == {entry.name for entry in entries()}


@pytest.mark.timeout(3000)
@pytest.mark.parametrize("mesh", [(4,), (2, 2)], ids=["4", "2x2"])
def test_operators_are_correct_on_ranks_for_random_input_layouts(mesh: tuple[int, ...]) -> None:
    faults = []
    fallbacks = 0
    names = some(32, seed=len(mesh))
    for found in survey(names, mesh, least=8, most=8, seed=0, timeout=60):
        fallbacks += found.always_falls_back
        if found.hung:
            faults.append(f"{found.operator}: hung")
        faults += [
            f"{case}: {outcome.kind}: {outcome.text}"
            for case, outcome in found.outcomes
            if outcome.kind == "wrong" or (outcome.kind == "refused" and found.operator not in REFUSED)
        ]
    assert not faults, "\n".join(faults)
    assert fallbacks < 0.15 * len(names) or not FULL
