"""Which units are gathered at a time, which one is gathered ahead, and what ends with a backward pass.

The order in which units are needed is recorded in every step and predicts the next step: while the steps agree, the
next unit is gathered ahead. It depends on the program alone, so that all ranks start the same collectives. A step that
takes another way gathers units when they are needed.
"""

from __future__ import annotations

from functools import partial
from typing import Protocol, final

import torch

__all__ = ["InFlight", "Schedule", "Scheduled", "in_backward"]

_engine = torch.autograd.Variable._execution_engine


class InFlight(Protocol):
    """A reduction of gradients that was started."""

    def land(self) -> None:
        """Wait for the reduction and add its results to the gradients."""
        ...

    def discard(self) -> None:
        """Wait for the reduction and drop its results."""
        ...


class Scheduled(Protocol):
    """A unit, as the schedule sees it."""

    schedule: Schedule

    def start(self) -> None:
        """Start gathering, unless the values are there or in flight."""
        ...

    def release(self) -> None:
        """Drop the gathered values."""
        ...

    def flush(self) -> None:
        """Reduce the gradients that were accumulated without reduction, if reduction is on again."""
        ...

    @property
    def gathered_bytes(self) -> int:
        """The bytes of its gathered parameters."""
        ...

    def keeps(self, other: Scheduled, backward: bool) -> bool:
        """Return whether `other` stays gathered while this unit is in use."""
        ...

    def keeps_at_rest(self, evaluated: bool) -> bool:
        """Return whether this unit stays gathered between steps; `evaluated` if the last one had no backward."""
        ...

    def gathers_ahead(self) -> bool:
        """Return whether gathering this unit ahead saves time."""
        ...


def in_backward() -> bool:
    """Return whether this thread runs a backward pass.

    >>> in_backward()
    False
    """
    return torch._C._current_graph_task_id() != -1


@final
class Schedule:
    """The units of one model: which are gathered, and the order in which they are needed.

    >>> Schedule().gathered
    []
    """

    def __init__(self) -> None:
        self.units: list[Scheduled] = []
        self.gathered: list[Scheduled] = []
        self.peak_bytes = 0  # the most bytes of gathered parameters at a time
        self.reduction: InFlight | None = None  # one unit's gradients at a time
        self._ahead: Scheduled | None = None
        self._needed: list[tuple[Scheduled, bool]] = []  # in this step, in order, and whether in backward
        self._postponed: Scheduled | None = None  # gathered ahead when the backward pass begins
        self._training = False  # whether this step records gradients
        self._last: dict[bool, list[tuple[Scheduled, bool]]] = {}  # what the last step of each kind needed
        self._expected: list[tuple[Scheduled, bool]] | None = None  # in this step; None: not known
        self.running = 0  # how many forwards of modules with units run, one inside another
        self._tasks: list[int] = []  # backward passes at whose end we are called, the innermost last

    def adopt(self, unit: Scheduled) -> None:
        """Take over a unit, and all others of its schedule."""
        before = unit.schedule
        if before is not self:
            for each in before.units:
                each.schedule = self
            self.units += before.units
            self.gathered += before.gathered

    def __deepcopy__(self, memo: dict[int, object]) -> Schedule:
        memo[id(self)] = made = Schedule()  # its units register themselves
        return made

    def count_gathered_bytes(self) -> None:
        """Record the bytes that are gathered now, if there were never more."""
        self.peak_bytes = max(self.peak_bytes, sum(unit.gathered_bytes for unit in self.gathered))

    def release_others(self, unit: Scheduled) -> None:
        """Release all units that are not needed while this one is in use."""
        backward = in_backward()
        for other in list(self.gathered):
            if other is not unit and other is not self._ahead and not unit.keeps(other, backward):
                other.release()

    def advance(self, unit: Scheduled) -> None:
        """Record that this unit was needed and had to be gathered, and start gathering the next one.

        One that backward needs is not gathered in forward: the loss, where memory is short, comes between them.
        """
        if not self._needed:
            self._training = torch.is_grad_enabled()
            self._expected = self._last.get(self._training)
        index = len(self._needed)
        backward = in_backward()
        self._needed.append((unit, backward))
        expected = self._expected
        if expected is not None and (index >= len(expected) or expected[index] != (unit, backward)):
            expected = self._expected = None
        following, later = expected[index + 1] if expected is not None and index + 1 < len(expected) else (None, False)
        self._ahead = following
        self._postponed = following if later and not backward else None
        if following is not None and self._postponed is None and following.gathers_ahead():
            following.start()

    def call_at_end_of_backward(self) -> None:
        """Have `finish` called at the end of the backward pass that runs now."""
        task = torch._C._current_graph_task_id()
        if task != -1 and (not self._tasks or self._tasks[-1] != task):
            self._tasks.append(task)
            _engine.queue_callback(partial(self._end, task))
            postponed, self._postponed = self._postponed, None
            if postponed is not None and postponed.gathers_ahead():
                postponed.start()

    def _end(self, task: int) -> None:
        self.land()
        if task in self._tasks:
            del self._tasks[self._tasks.index(task) :]
        if not self._tasks:  # otherwise it was inside another backward pass, as in reentrant checkpointing
            self.finish()

    def begin_forward(self) -> None:
        """Forget a backward pass that failed: its end was never reported."""
        self._tasks.clear()
        if self.reduction is not None:
            reduction, self.reduction = self.reduction, None
            reduction.discard()

    def land(self) -> None:
        """Wait for the gradients in flight."""
        if self.reduction is not None:
            reduction, self.reduction = self.reduction, None
            reduction.land()

    def finish(self, evaluated: bool = False) -> None:
        """End a step: gradients land, units are released, and the order of the step is kept."""
        self.land()
        for unit in () if evaluated else self.units:
            unit.flush()
        if self._needed:
            self._last[self._training] = self._needed
        self.abandon(evaluated)

    def abandon(self, evaluated: bool = False) -> None:
        """Release all units and forget the step, because it ended or failed."""
        for unit in list(self.gathered):
            if not unit.keeps_at_rest(evaluated):
                unit.release()
        self._needed, self._expected, self._ahead, self._postponed = [], None, None, None
