"""The page of all operators in the documentation: written from what the prover found, row by row."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

import torch

from shardwright.testing.proof.everything import EntryProof

__all__ = ["page", "row", "rows_in"]

_SHOWN = 4
_HEAD = """# Operators

Every operator of PyTorch's own operator database (torch {torch}), as the prover found it. This page is written by
`python -m shardwright.testing.proof --page docs/reference/operators.md`; a test sees that it is true.

For samples of each operator, placements of its inputs on one mesh dimension of 3 ranks in which something is cut were
looked at (all of them up to three tensors, every pair beyond; at most 60 for a sample, evenly chosen). Columns:

- **where it lies**: placements that are computed with no communication, some of them in full: `S(0), R` is a first
  input cut along dimension 0 beside a whole one, `P(sum)` an input that is a sum of addends;
- **moves**: placements for which some input is moved first, or something is exchanged; the result is the same;
- **whole**: placements for which everything is gathered and computed on every rank: there is no rule for it;
- **refused**: placements that raise an error with the reason, or could not be looked at without values;
- **possible**: placements that torch's own call on the pieces gets right, and that are moved all the same: no rule has
  them yet, or they are accidents of small samples;
- **proved**: strategies of rules that it comes to (its own, or those of the operators it is made of), each compared
  with the operator on whole tensors, values and gradients, uneven and empty shards included.

{summary}

| operator | where it lies | moves | whole | refused | possible | proved |
|---|---|---:|---:|---:|---:|---:|
"""


def page(proofs: Iterable[EntryProof]) -> str:
    """The whole page."""
    found = sorted(proofs, key=lambda proof: proof.name)
    head = _HEAD.format(torch=torch.__version__.split("+")[0], summary=_summary(found))
    return head + "\n".join(row(proof) for proof in found) + "\n"


def row(proof: EntryProof) -> str:
    """The row of one operator.

    >>> row(EntryProof("triu_indices", unproved="it takes no tensor"))
    '| `triu_indices` | it takes no tensor | | | | | |'
    """
    if proof.unproved:
        return f"| `{proof.name}` | {proof.unproved} | | | | | |"
    courses = proof.courses
    counts = " | ".join(str(courses[course] or "") for course in ("moves", "whole", "refused"))
    return f"| `{proof.name}` | {_free(proof)} | {counts} | {len(proof.missing) or ''} | {proof.proved or ''} |"


def _free(proof: EntryProof) -> str:
    by_length = sorted(proof.free, key=lambda text: (len(text), text))
    plain = [
        text for text in by_length if not re.search(r"\d\+", text)
    ] or by_length  # ragged ones where there are no others
    if not proof.courses["free"]:
        return "—"
    shown = "; ".join(f"`{text}`" for text in plain[:_SHOWN])
    return f"{proof.courses['free']}: {shown}{' …' if len(plain) > _SHOWN else ''}"


def _summary(found: list[EntryProof]) -> str:
    tried = [proof for proof in found if not proof.unproved]
    falling = sum(proof.falls_back for proof in tried)
    free = sum(bool(proof.courses["free"]) for proof in tried)
    strategies = sum(proof.proved for proof in tried)
    return (
        f"Of {len(found)} operators {free} can be computed where the pieces lie, for some placement in which something "
        f"is cut; {falling} ({100 * falling / max(1, len(found)):.0f}%) are computed on whole tensors however they are "
        f"cut; {len(found) - len(tried)} have nothing to cut. {strategies:,} strategies were proved, "
        f"{sum(len(proof.wrong) for proof in found)} are wrong."
    )


def rows_in(path: Path) -> dict[str, str]:
    """The rows of a page, by operator."""
    found = {}
    for line in path.read_text().splitlines():
        match = re.match(r"\| `([^`]+)` \|", line)
        if match:
            found[match[1]] = line
    return found
