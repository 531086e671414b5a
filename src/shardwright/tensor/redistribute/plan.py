"""`Plan`: the steps of a redistribution, and what they cost before anything runs. Pure.

Time is estimated as `LATENCY` for each round of each step that communicates, plus the most bytes any rank receives in
it at `BANDWIDTH`. It serves to compare plans, not to predict a machine.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from shardwright.layout import Layout
from shardwright.tensor.redistribute.steps import Scale, Slice, Step, ToPartial, volume

__all__ = ["BANDWIDTH", "LATENCY", "Plan"]

LATENCY = 20e-6  # seconds
BANDWIDTH = 10e9  # bytes per second
_LOOKED_AT = 64  # ranks, for figures about all of them


@final
@dataclass(frozen=True, slots=True)
class Plan:
    """The steps from one layout to another, and their figures for any rank. It holds values only; `print` it.

    >>> from shardwright.layout import Mesh, Replicate, Shard
    >>> from shardwright.tensor.redistribute import plan
    >>> rows = Layout(Mesh((4,), ("dp",)), [Shard(0)], (64, 128))
    >>> gather = plan(rows, rows.replace(placements=[Replicate()]), itemsize=4)
    >>> gather.received_bytes(0), gather.sent_bytes(0), gather.peak_bytes(0)
    (24576, 24576, 73728)
    >>> print(gather)
    [64, 128] (dp: S(0)) → [64, 128] (dp: R), 4 bytes per element
    step                    becomes    received     time
    1  all-gather over dp   (dp: R)    24.0 KiB    22 µs
    per rank at most: 24.0 KiB received, 72.0 KiB of extra memory; about 22 µs
    """

    source: Layout
    target: Layout
    itemsize: int
    buffer: int
    steps: tuple[Step, ...]

    def received_bytes(self, rank: int) -> int:
        """How many bytes this rank receives from others."""
        return self.itemsize * sum(step.received(rank) for step in self.steps)

    def sent_bytes(self, rank: int) -> int:
        """How many bytes this rank sends to others."""
        return self.itemsize * sum(step.sent(rank) for step in self.steps)

    def peak_bytes(self, rank: int) -> int:
        """How much memory this rank needs beside its source shard, at most: the target shard and what is in between.

        In between is what is packed for sending and landed by receiving, in rounds of about `buffer` bytes each way.
        A plan that neither reduces addends nor makes any moves everything in one step, so that is all: the target
        shard and two buffers. Where addends are reduced, then moved, or values moved, then made addends, the piece
        that lies between two steps comes on top. Not counted is what `comm` needs to accumulate low-precision
        numbers in float32, a few times a piece of the buffer.
        """
        peak = owned = 0
        for number, step in enumerate(self.steps):
            made = volume(step.after, rank)
            if isinstance(step, Slice) and number + 1 < len(self.steps):
                continue  # a view
            in_place = not step.communicates and owned == made and isinstance(step, Scale | ToPartial)
            count = self.rounds(step)
            extra = owned + (0 if in_place else made) + step.scratch(rank, count)
            if step.kind == "all-reduce" and owned and count > 1:
                extra -= owned  # written over its own input
            peak, owned = max(peak, extra), made
        return peak * self.itemsize

    def rounds(self, step: Step) -> int:
        """In how many rounds a step is made, so that what is in flight fits the buffer."""
        return max(1, -(-step.load() * self.itemsize // self.buffer))

    @property
    def ranks(self) -> tuple[int, ...]:
        """All ranks of the two meshes, ascending: those that take part."""
        return tuple(sorted({*self.source.mesh.ranks, *self.target.mesh.ranks}))

    @property
    def seconds(self) -> float:
        """About how long it takes."""
        return sum(self._seconds(step) for step in self.steps)

    def _seconds(self, step: Step) -> float:
        if not step.communicates:
            return 0.0
        return self.rounds(step) * LATENCY + self._most_received(step) / BANDWIDTH

    def _most_received(self, step: Step) -> int:
        return self.itemsize * max(step.received(rank) for rank in self._sample)

    @property
    def _sample(self) -> tuple[int, ...]:
        """All ranks, or of very many an even choice that holds the first, where the largest shards are."""
        ranks = self.ranks
        return ranks[:: -(-len(ranks) // _LOOKED_AT)]

    def __str__(self) -> str:
        head = f"{self.source} → {self.target}, {self.itemsize} byte{'s' * (self.itemsize > 1)} per element"
        if not self.steps:
            return f"{head}\nnothing to do"
        rows = [("step", "becomes", "received", "time")]
        for number, step in enumerate(self.steps, 1):
            becomes = str(step.after).partition("] ")[2]
            talk = (_bytes(self._most_received(step)), _time(self._seconds(step))) if step.communicates else ("-", "-")
            rows.append((f"{number}  {step}", becomes, *talk))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        table = [
            f"{a:{widths[0]}}   {b:{widths[1]}}   {c:>{widths[2]}}   {d:>{widths[3]}}".rstrip() for a, b, c, d in rows
        ]
        received = max(self.received_bytes(rank) for rank in self._sample)
        peak = max(self.peak_bytes(rank) for rank in self._sample)
        which = "" if len(self.ranks) <= _LOOKED_AT else f" (of {len(self._sample)} ranks looked at)"
        foot = f"per rank at most{which}: {_bytes(received)} received, {_bytes(peak)} of extra memory"
        return "\n".join([head, *table, f"{foot}; about {_time(self.seconds)}"])


def _bytes(count: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def _time(seconds: float) -> str:
    for factor, unit in ((1e6, "µs"), (1e3, "ms")):
        if seconds * factor < 1000:
            return f"{seconds * factor:.0f} {unit}"
    return f"{seconds:.1f} s"
