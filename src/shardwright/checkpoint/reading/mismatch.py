"""Combine the mismatches of all ranks into one error that all of them raise.

A stored name is unexpected if no rank uses it: a rank that has one stage of a model does not have the names of the
others. So ranks exchange the entries they did not use, as a bit set, if any rank has a mismatch.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from shardwright import comm
from shardwright.checkpoint.format.tree import StoredEntry
from shardwright.checkpoint.reading.match import Match
from shardwright.checkpoint.state.flatten import FlatState
from shardwright.errors import LoadMismatchError
from shardwright.listing import join_first

__all__ = ["Mismatches", "mismatches_of", "raise_mismatches"]

_MAX_LISTED = 50
_INDENT = "\n  "
_MAX_COMPARED = 20000  # names among which a similar one is searched


class Mismatches(NamedTuple):
    """A rank's mismatches: sentences (the first of `total`), patterns that match nothing, and unused entries."""

    sentences: list[str]
    total: int
    idle: list[str]
    unused: str  # a bit set, as hexadecimal digits


def mismatches_of(match: Match, stored: Sequence[StoredEntry]) -> Mismatches | None:
    """Return the mismatches of this rank; None if there are none."""
    if not (match.faults or match.missing or match.unexpected or match.idle):
        return None
    names = [entry.name for entry in stored]
    sentences = [
        *(
            f"missing: {name!r} is not in the checkpoint{_similar_name(name, names, 'it has')}"
            for name in match.missing[:_MAX_LISTED]
        ),
        *match.faults[:_MAX_LISTED],
    ]
    bits = sum(1 << index for index in match.unexpected)
    return Mismatches(sentences, len(match.faults) + len(match.missing), match.idle, f"{bits:x}")


def raise_mismatches(
    reports: Sequence[Mismatches | None],
    match: Match,
    flat: FlatState,
    stored: Sequence[StoredEntry],
    group: comm.Group,
) -> None:
    """Raise one `LoadMismatchError`, the same on all ranks of the group, if any rank has a mismatch.

    `reports` has what each rank reported. Ranks exchange further messages only if there is a mismatch.
    """
    if not any(reports):
        return
    ranks = dict(zip(group.ranks, (mismatches or Mismatches([], 0, [], "0") for mismatches in reports), strict=True))
    unused = -1
    sentences: dict[str, list[int]] = {}
    for rank, mismatches in ranks.items():
        unused &= int(mismatches.unused, 16)
        for sentence in mismatches.sentences:
            sentences.setdefault(sentence, []).append(rank)
    lines = [_with_ranks(sentence, reporting, group) for sentence, reporting in sentences.items()]
    idle = [pattern for pattern in match.idle if all(pattern in mismatches.idle for mismatches in ranks.values())]
    lines += [f"only: {pattern!r} fits no name of the state" for pattern in idle]
    # Entries common to all ranks have the same index on all; similar names are searched on the first rank.
    unexpected = [index for index in range(unused.bit_length()) if unused >> index & 1]
    similar = (
        _similar_names(flat, [stored[index].name for index in unexpected[:_MAX_LISTED]], group) if unexpected else {}
    )
    for index in unexpected[:_MAX_LISTED]:
        name = stored[index].name
        lines.append(f"unexpected: {name!r} is in the checkpoint and not in the state{similar.get(name, '')}")
    omitted = sum(mismatches.total - len(mismatches.sentences) for mismatches in ranks.values())
    count = len(sentences) + len(idle) + len(unexpected) + omitted
    if not count:
        return
    raise LoadMismatchError(
        f"the checkpoint does not match the state, in {count} {'place' if count == 1 else 'places'}; nothing was "
        "changed"
        f"\n  {join_first(lines, _MAX_LISTED, _INDENT, total=count)}"
    )


def _similar_names(flat: FlatState, unexpected: Sequence[str], group: comm.Group) -> dict[str, str]:
    """Return similar names that the first rank of the group uses, for unexpected ones."""
    own = {name: _similar_name(name, flat.names, "the state has") for name in unexpected} if group.rank == 0 else {}
    gathered = comm.gather_bytes(msgspec.json.encode(own), group, what="load: near names")
    similar: dict[str, str] = msgspec.json.decode(gathered[0], type=dict[str, str])
    return similar


def _similar_name(name: str, names: Sequence[str], has: str) -> str:
    if len(names) > _MAX_COMPARED:
        return ""
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.8)
    if close and close[0] == name:
        return f" ({has} one of that name, under other keys)"
    return f" ({has} {close[0]!r})" if close else ""


def _with_ranks(sentence: str, ranks: Sequence[int], group: comm.Group) -> str:
    if len(ranks) == group.size:
        return sentence
    listed = ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
    return f"{sentence} (on rank{'s' * (len(ranks) > 1)} {listed})"
