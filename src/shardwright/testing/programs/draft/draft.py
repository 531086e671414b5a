"""A program while it is generated: the steps so far, the plain values they have made, and choices among them."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from math import prod
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from shardwright.testing.programs.draft.compare import is_readable
from shardwright.testing.programs.draft.namespace import plain_namespace

__all__ = ["FLOATS", "NUMBERS", "Draft", "NoChoice", "broadcasts"]

T = TypeVar("T")

FLOATS = (torch.float32, torch.float64, torch.bfloat16)
NUMBERS = (*FLOATS, torch.int64)
LARGEST = 2000.0  # values stay small, so that sums are exact in any order


class NoChoice(Exception):  # noqa: N818  not an error: another kind of step is chosen
    """Nothing that the program holds fits the step."""


class Draft:
    """The steps of a program so far, run on plain tensors, and random choices for the next one.

    Values are small whole numbers as long as operators allow it: `exact` holds the names of values that are the same
    bit for bit whatever the order of summation, so that comparisons, sorting and casts to integers may use them.
    """

    def __init__(self, seed: int, mesh: tuple[int, ...], dtypes: Sequence[torch.dtype] = FLOATS) -> None:
        self.random = random.Random(seed)
        self.mesh = mesh
        self.dtypes = dtypes
        self.steps: list[str] = []
        self.namespace = plain_namespace()
        self._given = frozenset(self.namespace)
        self.exact: set[str] = set()
        self._count = 0

    # --- adding steps -----------------------------------------------------------------------------------------------

    def fresh(self) -> str:
        """Return a name that the program does not use yet."""
        self._count += 1
        return f"v{self._count}"

    def try_step(self, step: str, *, keep_refused: bool = False) -> bool:
        """Run a step on plain tensors and add it; a step that torch refuses is added only if `keep_refused`."""
        try:
            exec(step, self.namespace)
        except Exception:  # noqa: BLE001  a step that torch refuses, whatever it raises
            if keep_refused:
                self.steps.append(step)
            return keep_refused
        self.steps.append(step)
        return True

    def assign(self, expression: str, *, exact: bool, count: int = 1, keep_refused: bool = False) -> list[str]:
        """Add `v1 = expression` (or `v1, v2 = …`) and return the names; none if torch refuses or values grow large."""
        names = [self.fresh() for _ in range(count)]
        step = f"{', '.join(names)} = {expression}"
        before = len(self.steps)
        if not self.try_step(step, keep_refused=keep_refused):
            return []
        values = [self.namespace.get(name) for name in names]
        if any(isinstance(value, Tensor) and not self.is_small(value) for value in values):
            del self.steps[before:]
            for name in names:
                self.namespace.pop(name, None)
            return []
        if exact:
            self.exact.update(
                name
                for name, value in zip(names, values, strict=True)
                if getattr(value, "dtype", None) != torch.bfloat16
            )
        return names

    def leaf(
        self,
        shape: Sequence[int],
        dtype: torch.dtype,
        *,
        values: Sequence[float] | None = None,
        requires_grad: bool | None = None,
        partial: bool = True,
    ) -> str:
        """Add a leaf of this shape under a random layout and return its name."""
        if values is None:
            low, high = (0, 1) if dtype is torch.bool else (-4, 5)
            values = [self.random.randint(low, high) for _ in range(prod(shape))]
        placements, order = self.placements(shape, partial=partial and dtype is not torch.bool)
        if requires_grad is None:
            requires_grad = dtype.is_floating_point and self.chance(0.6)
        text = f"leaf({list(values)}, {tuple(shape)}, {dtype}, {placements}"
        text += f", order={order}" if order is not None else ""
        text += ", requires_grad=True" if requires_grad else ""
        (name,) = self.assign(text + ")", exact=True)
        return name

    # --- choosing ---------------------------------------------------------------------------------------------------

    def chance(self, probability: float) -> bool:
        return self.random.random() < probability

    def choice(self, options: Sequence[T]) -> T:
        if not options:
            raise NoChoice
        return self.random.choice(options)

    def number(self, low: int, high: int) -> int:
        """Return a number from low to high, both included."""
        if high < low:
            raise NoChoice
        return self.random.randint(low, high)

    def factor(self) -> float:
        """Return a factor that keeps whole numbers exact."""
        return self.choice((-1, 2, 0.5, 3, -2))

    def tensors(self) -> list[str]:
        """Return the names of all tensors that torch lets us look at, oldest first."""
        return [name for name in self.of(Tensor) if is_readable(self.namespace[name])]

    def of(self, kind: type) -> list[str]:
        """Return the names of all values of a type."""
        return [n for n, v in self.namespace.items() if n not in self._given and isinstance(v, kind)]

    def value(self, name: str) -> Tensor:
        tensor: Tensor = self.namespace[name]
        return tensor

    def pick(
        self,
        fits: Callable[[Tensor], bool] = lambda _: True,
        *,
        dtypes: Sequence[torch.dtype] | None = None,
        dims: tuple[int, int] = (0, 5),
        exact: bool = False,
        full: bool = False,
    ) -> str:
        """Return the name of a tensor that fits; recent ones are likelier. Raise `NoChoice` if none does."""
        names = []
        for name in self.tensors():
            value = self.value(name)
            if dtypes is not None and value.dtype not in dtypes:
                continue
            if not dims[0] <= value.ndim <= dims[1] or (exact and name not in self.exact):
                continue
            if (full and not value.numel()) or not fits(value):
                continue
            names.append(name)
        return self.choice(names[-4:] if self.chance(0.5) else names)

    def floating(self, **conditions: Any) -> str:
        return self.pick(dtypes=FLOATS, **conditions)

    def is_exact(self, *names: str) -> bool:
        return all(name in self.exact for name in names)

    def is_small(self, value: Tensor) -> bool:
        """Return whether all values are finite and small enough to be computed with exactly."""
        if not value.numel():
            return value.numel() == 0
        if value.numel() > 4096:
            return False
        largest = value.detach().double().abs().max().item()
        return largest <= LARGEST

    def share_memory(self, first: str, second: str) -> bool:
        """Return whether two tensors are views of the same memory."""
        return self.value(first).untyped_storage().data_ptr() == self.value(second).untyped_storage().data_ptr()

    def dim(self, value: Tensor) -> int:
        """Return one of a tensor's dimensions, counted from either end."""
        if not value.ndim:
            raise NoChoice
        dim = self.number(0, value.ndim - 1)
        return dim - value.ndim if self.chance(0.3) else dim

    def shape(self, low: int = 0, high: int = 3) -> tuple[int, ...]:
        """Return a shape; sides are often not divisible by the number of ranks, sometimes 1 or 0."""
        sides = (1, 2, 3, 4, 4, 5, 6, 7, 8)
        return tuple(0 if self.chance(0.02) else self.choice(sides) for _ in range(self.number(low, high)))

    def dtype(self) -> torch.dtype:
        return self.choice(self.dtypes)

    # --- layouts ----------------------------------------------------------------------------------------------------

    def placements(self, shape: Sequence[int], *, partial: bool = True) -> tuple[str, list[int] | None]:
        """Return the text of random placements of a tensor of this shape, and an order of mesh dimensions or None."""
        chosen: list[str] = []
        sharded: list[int] = []
        ragged = False
        for count in self.mesh:
            kind = self.random.random()
            if shape and kind < 0.6:
                dim = self.number(0, len(shape) - 1)
                if dim not in sharded and self.chance(0.15):
                    chosen.append(f"Ragged({dim}, {self._sizes(shape[dim], count)})")
                    ragged = True
                else:
                    chosen.append(f"Shard({dim})")
                sharded.append(dim)
            elif partial and kind < 0.75:
                chosen.append(f"Partial('{self.random.choices(('sum', 'avg', 'max', 'min'), (7, 1, 1, 1))[0]}')")
            else:
                chosen.append("Replicate()")
        nested = len(sharded) > len(set(sharded)) and not ragged
        order = self.random.sample(range(len(self.mesh)), len(self.mesh)) if nested and self.chance(0.6) else None
        return f"[{', '.join(chosen)}]", order

    def _sizes(self, extent: int, count: int) -> tuple[int, ...]:
        marks = sorted(self.random.randint(0, extent) for _ in range(count - 1))
        return tuple(b - a for a, b in zip([0, *marks], [*marks, extent], strict=True))

    def modules(self) -> list[str]:
        return self.of(nn.Module)


def broadcasts(first: torch.Size, second: torch.Size, *, to: torch.Size | None = None) -> bool:
    """Return whether two shapes can be broadcast to one, and to `to` if it is given."""
    width = max(len(first), len(second))
    sides = zip((1,) * (width - len(first)) + tuple(first), (1,) * (width - len(second)) + tuple(second), strict=True)
    result = []
    for a, b in sides:
        if a != b and a != 1 and b != 1:
            return False
        result.append(b if a == 1 else a)
    return to is None or tuple(result) == tuple(to)
