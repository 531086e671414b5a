"""What objects lack, made on the ranks that it is for: what another rank has in its state is that rank's.

A rank that has one stage of a model has objects with the state of that stage; the checkpoint has all stages'. So once
any rank has made something, ranks tell each other what they have, and what some rank has is not made on the others.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from shardwright import comm
from shardwright.checkpoint.format.stored import StoredEntry
from shardwright.checkpoint.read.match import asked_for
from shardwright.checkpoint.state.flatten import Flat
from shardwright.checkpoint.state.optimizer import completing

__all__ = ["grow_together"]


def grow_together(
    flat: Flat,
    complete: completing,
    stored: Sequence[StoredEntry],
    group: comm.Group,
    again: Callable[[completing], Flat],
) -> tuple[Flat, completing]:
    """The state as `complete` made it, or made `again` without what other ranks have.

    All ranks of the group call it, once any of them has made something.
    """
    new = complete.grown
    common = [place for place, entry in enumerate(stored) if not entry.of_rank]
    mine = asked_for(flat, stored) - new
    said = comm.gather_bytes(_bits(mine.intersection(common)), group, what="load: what ranks have")
    taken = 0
    for one in said:
        taken |= int(one, 16)
    others = {place for place in new if taken >> place & 1}
    fewer = complete.without([stored[place] for place in others])
    made = comm.agree(lambda: again(fewer) if others else flat, what="load: states that grow", group=group)
    return made, fewer if others else complete


def _bits(places: Collection[int]) -> bytes:
    return f"{sum(1 << place for place in places):x}".encode()
