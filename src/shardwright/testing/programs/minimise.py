"""Minimise a failing program: fewer steps, simpler layouts, fewer ranks, smaller leaves, with the same verdict."""

from __future__ import annotations

import ast
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

from shardwright.testing.programs.judge import Judgement
from shardwright.testing.programs.program import Program, defined_names, used_names

__all__ = ["minimise"]

PLACEMENTS = ("Shard", "Replicate", "Partial", "Ragged")


def minimise(failure: Judgement, judge: Callable[[Program], Judgement], *, seconds: float = 60.0) -> Judgement:
    """Return the smallest failing program found within the time, of the same kind as `failure`.

    `judge` runs a program; it is called for every simplification that is tried.

    >>> from shardwright.testing.programs import Verdict
    >>> def judge(program):
    ...     wrong = "b = a" in program.steps
    ...     return Judgement(program, Verdict.WRONG if wrong else Verdict.RIGHT)
    >>> minimise(judge(Program(("a = 1", "b = a", "c = b"), mesh=(2,))), judge).program
    Program(steps=('a = 1', 'b = a'), mesh=(1,), seed=None)
    """
    deadline = time.monotonic() + seconds
    best = failure
    if failure.step is not None:
        best = _tried(replace(failure.program, steps=failure.program.steps[: failure.step + 1]), best, judge) or best
    improved = True
    while improved and time.monotonic() < deadline:
        improved = False
        for change in (_fewer_steps, _simpler_mesh, _simpler_layouts, _smaller_leaves, _simpler_values):
            smaller = _improved(best, change, judge, deadline)
            improved = improved or smaller is not best
            best = smaller
    return best


def _improved(
    best: Judgement,
    change: Callable[[Program], Iterator[Program]],
    judge: Callable[[Program], Judgement],
    deadline: float,
) -> Judgement:
    """Apply a kind of simplification until it does not help any more."""
    again = True
    while again:
        again = False
        for candidate in change(best.program):
            if time.monotonic() > deadline:
                return best
            smaller = _tried(candidate, best, judge)
            if smaller is not None:
                best, again = smaller, True
                break
    return best


def _tried(candidate: Program, best: Judgement, judge: Callable[[Program], Judgement]) -> Judgement | None:
    if candidate == best.program:
        return None
    judgement = judge(candidate)
    return judgement if judgement.kind == best.kind else None


def _fewer_steps(program: Program) -> Iterator[Program]:
    """Remove halves, quarters, …, single steps, the last first, with the steps that depend on them."""
    size = len(program.steps) // 2
    while size:
        for end in range(len(program.steps), 0, -size):
            remaining = program.steps[: max(0, end - size)] + program.steps[end:]
            yield replace(program, steps=_without_orphans(remaining, program))
        size //= 2


def _without_orphans(steps: tuple[str, ...], program: Program) -> tuple[str, ...]:
    """Remove steps that use a name which no step defines any more."""
    every = frozenset[str]().union(*map(defined_names, program.steps))
    defined: set[str] = set()
    remaining = []
    for step in steps:
        if (used_names(step) & every) <= defined:
            remaining.append(step)
            defined |= defined_names(step)
    return tuple(remaining)


def _simpler_mesh(program: Program) -> Iterator[Program]:
    for mesh in ((1,), (2,), (3,)):
        if (
            (len(mesh), program.ranks) != (len(program.mesh), mesh[0])
            and mesh[0] <= program.ranks
            and mesh != program.mesh
        ):
            for keep in range(len(program.mesh)):
                yield replace(program, mesh=mesh, steps=tuple(_on_mesh(step, keep) for step in program.steps))


def _on_mesh(step: str, keep: int) -> str:
    """Return the step with the placement of one mesh dimension only, as an even one, and without orders."""

    class Cut(ast.NodeTransformer):
        def visit_List(self, node: ast.List) -> ast.expr:  # ast's name
            if not _is_placements(node):
                return node
            return ast.List([_even(node.elts[min(keep, len(node.elts) - 1)])], ast.Load())

        def visit_Call(self, node: ast.Call) -> ast.expr:  # ast's name
            self.generic_visit(node)
            node.keywords = [keyword for keyword in node.keywords if keyword.arg != "order"]
            return node

    return ast.unparse(ast.fix_missing_locations(Cut().visit(ast.parse(step)))) if _has_placements(step) else step


def _even(placement: ast.expr) -> ast.expr:
    if isinstance(placement, ast.Call) and getattr(placement.func, "id", "") == "Ragged":
        return ast.Call(ast.Name("Shard", ast.Load()), placement.args[:1], [])
    return placement


def _simpler_layouts(program: Program) -> Iterator[Program]:
    """Replace one placement at a time by a replicate, or by an even shard of dimension 0."""
    for number, step in enumerate(program.steps):
        if not _has_placements(step):
            continue
        for simpler in ("Replicate()", "Shard(0)"):
            for index in range(_count_placements(step)):
                changed = _with_placement(step, index, simpler)
                if changed is not None:
                    yield replace(program, steps=(*program.steps[:number], changed, *program.steps[number + 1 :]))


def _with_placement(step: str, index: int, simpler: str) -> str | None:
    """Return the step with one placement replaced; None if it is already as simple."""
    tree = ast.parse(step)
    count = 0
    for node in ast.walk(tree):
        if isinstance(node, ast.List) and _is_placements(node):
            for at, placement in enumerate(node.elts):
                if count == index:
                    if ast.unparse(placement) in ("Replicate()", simpler):
                        return None
                    node.elts[at] = ast.parse(simpler, mode="eval").body
                    return ast.unparse(tree)
                count += 1
    return None


def _smaller_leaves(program: Program) -> Iterator[Program]:
    """Make one side of one leaf shorter by one."""
    for number, step in enumerate(program.steps):
        call = _leaf_call(step)
        if call is None:
            continue
        shape = ast.literal_eval(call.args[1])
        values = ast.literal_eval(call.args[0])
        for dim, side in enumerate(shape):
            if side > 1:
                yield _with_leaf(
                    program, number, _shortened(values, shape, dim), (*shape[:dim], side - 1, *shape[dim + 1 :])
                )


def _shortened(values: list[float], shape: tuple[int, ...], dim: int) -> list[float]:
    inner = 1
    for side in shape[dim + 1 :]:
        inner *= side
    return [value for at, value in enumerate(values) if (at // inner) % shape[dim] != shape[dim] - 1]


def _simpler_values(program: Program) -> Iterator[Program]:
    """Count from 0 instead of random values."""
    for number, step in enumerate(program.steps):
        call = _leaf_call(step)
        if call is None or ast.unparse(call.args[2]) not in ("torch.float32", "torch.float64"):
            continue
        values = ast.literal_eval(call.args[0])
        if values != list(range(len(values))):
            yield _with_leaf(program, number, list(range(len(values))), ast.literal_eval(call.args[1]))


def _leaf_call(step: str) -> ast.Call | None:
    statement = ast.parse(step).body[0]
    if isinstance(statement, ast.Assign) and isinstance(statement.value, ast.Call):
        call = statement.value
        if getattr(call.func, "id", "") == "leaf":
            return call
    return None


def _with_leaf(program: Program, number: int, values: list[float], shape: tuple[int, ...]) -> Program:
    tree = ast.parse(program.steps[number])
    call = tree.body[0].value  # type: ignore[attr-defined]  # an assignment of a call
    call.args[0], call.args[1] = ast.parse(repr(values), mode="eval").body, ast.parse(repr(shape), mode="eval").body
    return replace(program, steps=(*program.steps[:number], ast.unparse(tree), *program.steps[number + 1 :]))


def _is_placements(node: ast.List) -> bool:
    return bool(node.elts) and all(
        isinstance(element, ast.Call) and getattr(element.func, "id", "") in PLACEMENTS for element in node.elts
    )


def _has_placements(step: str) -> bool:
    return any(isinstance(node, ast.List) and _is_placements(node) for node in ast.walk(ast.parse(step)))


def _count_placements(step: str) -> int:
    return sum(
        len(node.elts) for node in ast.walk(ast.parse(step)) if isinstance(node, ast.List) and _is_placements(node)
    )
