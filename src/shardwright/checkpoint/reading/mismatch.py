"""What does not fit on any rank, as one error on all of them.

A stored name is unexpected if no rank asks for it: a rank that has one stage of a model lacks the others' names. So
ranks tell each other what they did not use, as bits, once any of them has something to tell.
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
_MAX_COMPARED = 20000  # names among which a near one is looked for


class Mismatches(NamedTuple):
    """A rank's mismatches: sentences (of `total`, the first), patterns without use, and what it left over."""

    sentences: list[str]
    total: int
    idle: list[str]
    unused: str  # the bits of a number, in hexadecimal digits


def mismatches_of(found: Match, stored: Sequence[StoredEntry]) -> Mismatches | None:
    """What this rank has to tell; None where all fits."""
    if not (found.faults or found.missing or found.unexpected or found.idle):
        return None
    names = [entry.name for entry in stored]
    sentences = [
        *(
            f"missing: {one!r} is not in the checkpoint{_near(one, names, 'it has')}"
            for one in found.missing[:_MAX_LISTED]
        ),
        *found.faults[:_MAX_LISTED],
    ]
    bits = sum(1 << place for place in found.unexpected)
    return Mismatches(sentences, len(found.faults) + len(found.missing), found.idle, f"{bits:x}")


def raise_mismatches(
    told: Sequence[Mismatches | None], found: Match, flat: FlatState, stored: Sequence[StoredEntry], group: comm.Group
) -> None:
    """Raises one `LoadMismatchError`, the same on all ranks of the group, if anything does not fit on any of them.

    `told` is what each of them has told. They talk only where there is something to be said.
    """
    if not any(told):
        return
    ranks = dict(zip(group.ranks, (one or Mismatches([], 0, [], "0") for one in told), strict=True))
    unused = -1
    sentences: dict[str, list[int]] = {}
    for rank, one in ranks.items():
        unused &= int(one.unused, 16)
        for sentence in one.sentences:
            sentences.setdefault(sentence, []).append(rank)
    lines = [_where(sentence, holders, group) for sentence, holders in sentences.items()]
    idle = [pattern for pattern in found.idle if all(pattern in one.idle for one in ranks.values())]
    lines += [f"only: {pattern!r} fits no name of the state" for pattern in idle]
    # What is common to all ranks has the same place on all of them; near names are looked for among the first's.
    unexpected = [place for place in range(unused.bit_length()) if unused >> place & 1]
    near = _near_names(flat, [stored[place].name for place in unexpected[:_MAX_LISTED]], group) if unexpected else {}
    for place in unexpected[:_MAX_LISTED]:
        name = stored[place].name
        lines.append(f"unexpected: {name!r} is in the checkpoint and not in the state{near.get(name, '')}")
    untold = sum(one.total - len(one.sentences) for one in ranks.values())
    count = len(sentences) + len(idle) + len(unexpected) + untold
    if not count:
        return
    raise LoadMismatchError(
        f"the checkpoint does not fit the state, in {count} {'place' if count == 1 else 'places'}; nothing was changed"
        f"\n  {join_first(lines, _MAX_LISTED, _INDENT, total=count)}"
    )


def _near_names(flat: FlatState, unexpected: Sequence[str], group: comm.Group) -> dict[str, str]:
    """For unexpected names, the nearest that the first rank of the group asks for."""
    own = {name: _near(name, flat.names, "the state has") for name in unexpected} if group.rank == 0 else {}
    said = comm.gather_bytes(msgspec.json.encode(own), group, what="load: near names")
    near: dict[str, str] = msgspec.json.decode(said[0], type=dict[str, str])
    return near


def _near(name: str, names: Sequence[str], has: str) -> str:
    if len(names) > _MAX_COMPARED:
        return ""
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.8)
    if close and close[0] == name:
        return f" ({has} one of that name, under other keys)"
    return f" ({has} {close[0]!r})" if close else ""


def _where(sentence: str, holders: Sequence[int], group: comm.Group) -> str:
    if len(holders) == group.size:
        return sentence
    listed = ", ".join(map(str, holders[:8])) + (", ..." if len(holders) > 8 else "")
    return f"{sentence} (on rank{'s' * (len(holders) > 1)} {listed})"
