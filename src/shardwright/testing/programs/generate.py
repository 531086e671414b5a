"""Generate random programs."""

from __future__ import annotations

import random
import warnings

import torch

from shardwright.testing.programs.draft.draft import Draft, NoChoice
from shardwright.testing.programs.program import Program, defined_names
from shardwright.testing.programs.steps import KINDS, Step
from shardwright.testing.programs.steps.values import new_leaf

__all__ = ["generate"]

MESHES = {1: ((1,), (1,), (1, 1)), 2: ((2,), (2,), (1, 2), (2, 1)), 3: ((3,),), 4: ((4,), (2, 2), (2, 2))}


def generate(seed: int, ranks: tuple[int, ...] = (1, 2, 3, 4)) -> Program:
    """Return the program of a seed: 10 to 40 steps, on a mesh of one of these numbers of ranks.

    The same seed gives the same program on any machine with the same torch.

    >>> generate(0) == generate(0)
    True
    """
    chooser = random.Random(f"program {seed}")
    mesh = chooser.choice(MESHES[chooser.choice(ranks)])
    dtypes = chooser.choice(
        ((torch.float64,), (torch.float32,), (torch.float32, torch.float64), (torch.float32, torch.bfloat16))
    )
    length = chooser.randint(10, 40)
    draft = Draft(chooser.getrandbits(64), mesh, dtypes)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(chooser.randint(1, 3)):
            new_leaf(draft)
        kinds, weights = list(KINDS), list(KINDS.values())
        attempts = 0
        while len(draft.steps) < length and attempts < 20 * length:
            attempts += 1
            _add(draft, chooser.choices(kinds, weights)[0], chooser)
    return Program(tuple(draft.steps), mesh, seed)


def _add(draft: Draft, kind: Step, chooser: random.Random) -> None:
    before = len(draft.steps)
    try:
        kind(draft)
    except NoChoice:
        return
    added = draft.steps[before:]
    if added and chooser.random() < 0.2:
        _repeat(draft, added[-1])


def _repeat(draft: Draft, step: str) -> None:
    """Repeat a call, so that it is served from the caches; its results get new names."""
    names = defined_names(step)
    target, sign, expression = step.partition(" = ")
    if sign and names and set(target.split(", ")) == names and "leaf(" not in step:
        draft.assign(expression, exact=names <= draft.exact, count=len(names))
