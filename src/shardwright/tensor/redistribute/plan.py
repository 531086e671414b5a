"""`Plan`: the steps of a redistribution and their cost, known before anything runs. Pure.

Time is estimated as `LATENCY` for each round of each communicating step, plus the largest number of bytes any rank
receives in it divided by `BANDWIDTH`. The estimate serves to compare plans, not to predict a machine.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from shardwright.layout import Layout
from shardwright.tensor.redistribute.steps import Scale, Slice, Step, ToPartial, volume

__all__ = ["BANDWIDTH", "LATENCY", "Plan"]

LATENCY = 20e-6  # seconds
BANDWIDTH = 10e9  # bytes per second
_MAX_SAMPLED_RANKS = 64  # for maxima over all ranks


@final
@dataclass(frozen=True, slots=True)
class Plan:
    """The steps from one layout to another, with bytes and memory for any rank. A plain value; `print` it.

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
        """Return the number of bytes this rank receives from others."""
        return self.itemsize * sum(step.received(rank) for step in self.steps)

    def sent_bytes(self, rank: int) -> int:
        """Return the number of bytes this rank sends to others."""
        return self.itemsize * sum(step.sent(rank) for step in self.steps)

    def peak_bytes(self, rank: int) -> int:
        """Return the peak memory this rank needs besides its source shard: the target shard and scratch memory.

        Scratch memory holds packed messages, in rounds of about `buffer` bytes in each direction. A plan without
        `Partial` placements communicates in one step, so it needs the target shard and two buffers. Where partial
        values are reduced and then redistributed, or values are redistributed and then made partial, the tensor between
        the two steps is added. Not counted: the few buffers in which `comm` accumulates small dtypes in float32.
        """
        peak = owned = 0
        for number, step in enumerate(self.steps):
            output = volume(step.after, rank)
            if isinstance(step, Slice) and number + 1 < len(self.steps):
                continue  # a view
            in_place = not step.communicates and owned == output and isinstance(step, Scale | ToPartial)
            count = self.rounds(step)
            extra = owned + (0 if in_place else output) + step.scratch(rank, count)
            if step.kind == "all-reduce" and owned and count > 1:
                extra -= owned  # the output overwrites the input
            peak, owned = max(peak, extra), output
        return peak * self.itemsize

    def rounds(self, step: Step) -> int:
        """Return the number of rounds in which a step runs, so that each round fits the buffer."""
        return max(1, -(-step.load() * self.itemsize // self.buffer))

    @property
    def ranks(self) -> tuple[int, ...]:
        """The participating ranks: those of both meshes, ascending."""
        return tuple(sorted({*self.source.mesh.ranks, *self.target.mesh.ranks}))

    @property
    def seconds(self) -> float:
        """The estimated time in seconds."""
        return sum(self._seconds(step) for step in self.steps)

    def _seconds(self, step: Step) -> float:
        if not step.communicates:
            return 0.0
        return self.rounds(step) * LATENCY + self._max_received(step) / BANDWIDTH

    def _max_received(self, step: Step) -> int:
        return self.itemsize * max(step.received(rank) for rank in self._sample)

    @property
    def _sample(self) -> tuple[int, ...]:
        """All ranks; for large meshes, evenly spaced ones starting at the first, which has the largest shards."""
        ranks = self.ranks
        return ranks[:: -(-len(ranks) // _MAX_SAMPLED_RANKS)]

    def __str__(self) -> str:
        head = f"{self.source} → {self.target}, {self.itemsize} byte{'s' * (self.itemsize > 1)} per element"
        if not self.steps:
            return f"{head}\nnothing to do"
        rows = [("step", "becomes", "received", "time")]
        for number, step in enumerate(self.steps, 1):
            becomes = str(step.after).partition("] ")[2]
            cost = (_bytes(self._max_received(step)), _time(self._seconds(step))) if step.communicates else ("-", "-")
            rows.append((f"{number}  {step}", becomes, *cost))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        table = [
            f"{a:{widths[0]}}   {b:{widths[1]}}   {c:>{widths[2]}}   {d:>{widths[3]}}".rstrip() for a, b, c, d in rows
        ]
        received = max(self.received_bytes(rank) for rank in self._sample)
        peak = max(self.peak_bytes(rank) for rank in self._sample)
        sampled = "" if len(self.ranks) <= _MAX_SAMPLED_RANKS else f" ({len(self._sample)} ranks sampled)"
        foot = f"per rank at most{sampled}: {_bytes(received)} received, {_bytes(peak)} of extra memory"
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
