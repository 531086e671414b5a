"""What a user's rule claims, held to it: answers that make no sense are refused, and so are results of other sizes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import wraps
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from shardwright.errors import RuleError
from shardwright.layout import Layout, Placement, Ragged, Shard
from shardwright.tensor.base.capture import not_captured
from shardwright.tensor.base.registry import Rule
from shardwright.tensor.base.strategy import Local, LocalContext, MeshStrategy, Run, Strategies, Strategy
from shardwright.tensor.base.tagging import alias
from shardwright.tensor.dispatch.arguments import map_tensors
from shardwright.tensor.rules.elementwise.pointwise import operands_in

__all__ = ["checked", "spelled"]

Shape: TypeAlias = tuple[int, ...]


def checked(name: str, rule: Rule, results: int | None) -> Rule:
    """The rule, with answers that make no sense refused before they are used, and results held to what it claims."""
    who = f"{name}: the rule {getattr(rule, '__name__', type(rule).__name__)}"

    @wraps(rule)
    def answer(*args: Any, **kwargs: Any) -> Strategies | MeshStrategy | None:
        try:
            given = rule(*args, **kwargs)
        except RuleError as error:
            raise RuleError(f"{name}: {error}") from error
        operands = operands_in(*args, *kwargs.values())
        if given is None:
            return None
        if isinstance(given, MeshStrategy):
            _check_arity(name, given.ins, given.outs, Layout, len(operands), results)
            return replace(given, run=_held_to_claim(who, given.run))
        if not isinstance(given, Strategies):
            raise RuleError(
                f"{name}: the rule returned a {type(given).__name__}: return Strategies, MeshStrategy, or None"
            )
        shapes, outputs = given.shapes, results
        if shapes is not None:
            if outputs not in (None, len(shapes)):
                raise RuleError(f"{who} gives {len(shapes)} shapes, {shapes}, and the call has {outputs} outputs")
            outputs = len(shapes)
        at = given.at

        def checked_at(mesh_dim: int) -> list[Strategy]:
            strategies = [Strategy(*strategy) for strategy in at(mesh_dim)]
            if not strategies:
                raise RuleError(
                    f"{who} has no strategies on mesh dimension {mesh_dim}: list at least one, such as all replicates, "
                    "or return None where it has no answer"
                )
            for strategy in strategies:
                _check_arity(name, strategy.ins, strategy.outs, Placement, len(operands), outputs)
            return _fitting(who, strategies, [operand.shape for operand in operands], shapes)

        if operands:
            checked_at(0)  # before anything is computed from them
        return replace(given, at=checked_at, run=_held_to_claim(who, given.run))

    return answer


def _fitting(
    who: str, strategies: list[Strategy], ins: Sequence[Shape], outs: Sequence[Shape] | None
) -> list[Strategy]:
    """The strategies that cut no dimension which an input lacks. One that cuts what an output lacks is wrong."""
    found = [strategy for strategy in strategies if not any(map(_lacks, strategy.ins, ins))]
    if not found:
        raise RuleError(
            f"{who} has no strategy for inputs of the shapes {', '.join(map(str, ins))}: each cuts a dimension "
            f"that they lack ({'; '.join(map(spelled, strategies))}). Add the strategy of replicates, or return None "
            "for such inputs"
        )
    if outs is None:
        return found
    for strategy in found:
        for place, (placement, shape) in enumerate(zip(strategy.outs, outs, strict=True)):
            if _lacks(placement, shape):
                raise RuleError(
                    f"{who}: the strategy {spelled(strategy)} has {placement} for output {place}, of shape {shape}: "
                    "cut a dimension that it has"
                )
    return found


def _lacks(placement: Placement, shape: Shape) -> bool:
    """Whether a placement cuts a dimension that a tensor of this shape has not."""
    return isinstance(placement, Shard | Ragged) and not -len(shape) <= placement.dim < len(shape)


def spelled(strategy: Strategy) -> str:
    """A strategy, in words."""
    return f"{', '.join(map(str, strategy.ins))} -> {', '.join(map(str, strategy.outs))}"


def _held_to_claim(who: str, run: Run | None) -> Run:
    """The local call, on plain tensors, with the sizes of its results held to the layouts that the rule claims.

    Plain tensors, for what an operator of a user saves for its backward is what it was given.
    """

    def held(context: LocalContext) -> Local:
        inner = run(context) if run is not None else None
        asked = inner is not None  # what a call of the rule's own does on other ranks is not known here
        here = _local_shapes(context.outs, context.rank)

        def local(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
            nonlocal asked
            args, kwargs = map_tensors(args, kwargs, alias)
            if not asked:
                _check_all_ranks(who, context, func, args, kwargs)
                asked = True
            result = func(*args, **kwargs) if inner is None else inner(func, args, kwargs)
            if here is not None:
                _check_sizes(who, context, context.rank, here, _shapes_in(result))
            return result

        return local

    return held


def _check_all_ranks(who: str, context: LocalContext, func: Any, args: Any, kwargs: dict[str, Any]) -> None:
    """Refuses a claim that is wrong on any rank, alike on all of them, where the operator can run on meta tensors."""
    flat, spec = pytree.tree_flatten((args, kwargs))
    places = [place for place, value in enumerate(flat) if isinstance(value, Tensor)]
    if len(places) != len(context.ins):
        return
    sizes: dict[tuple[Any, Any], int] = {}
    for rank in context.ins[0].mesh.ranks:
        sizes.setdefault((_local_shapes(context.ins, rank), _local_shapes(context.outs, rank)), rank)
    for (ins, outs), rank in sizes.items():
        if ins is None or outs is None:
            continue
        try:
            with torch.no_grad(), not_captured():
                for place, shape in zip(places, ins, strict=True):
                    flat[place] = torch.empty(shape, dtype=flat[place].dtype, device="meta")
                meta_args, meta_kwargs = pytree.tree_unflatten(flat, spec)
                found = _shapes_in(func(*meta_args, **meta_kwargs))
        except Exception:  # noqa: BLE001  # it has no kernel for meta tensors, or none for these: nothing is known
            continue
        _check_sizes(who, context, rank, outs, found)


def _check_sizes(who: str, context: LocalContext, rank: int, claimed: Sequence[Shape], found: Sequence[Shape]) -> None:
    if claimed == found:
        return
    ins = "; ".join(map(str, context.ins))
    remedy = "mend it, and prove it with shardwright.testing.prove"
    if len(claimed) != len(found):
        raise RuleError(
            f"{who} claims {len(claimed)} outputs for inputs {ins}, and there are {len(found)} on rank {rank}: {remedy}"
        )
    place = next(place for place, (claim, shape) in enumerate(zip(claimed, found, strict=True)) if claim != shape)
    raise RuleError(
        f"{who} claims {context.outs[place]} for output {place} of inputs {ins}. On rank {rank} its local tensor "
        f"would have shape {claimed[place]}, and it has {found[place]}: {remedy}"
    )


def _local_shapes(layouts: Sequence[Layout], rank: int) -> tuple[Shape, ...] | None:
    """What a rank holds of each; None where it is not on their mesh."""
    if not all(rank in layout.mesh for layout in layouts):
        return None
    return tuple(layout.local_shape(rank) for layout in layouts)


def _shapes_in(result: Any) -> tuple[Shape, ...]:
    """The shapes of the tensors in a result, in the order in which they are given their layouts."""
    if isinstance(result, Tensor):
        return (tuple(result.shape),)
    if isinstance(result, list | tuple):
        return tuple(shape for item in result for shape in _shapes_in(item))
    return ()


def _check_arity(
    name: str, ins: Sequence[Any], outs: Sequence[Any], kind: type, inputs: int, results: int | None
) -> None:
    for what, given, wanted in (("inputs", ins, inputs), ("outputs", outs, results)):
        if not all(isinstance(item, kind) for item in given):
            raise RuleError(f"{name}: {tuple(given)} for its {what}: each is a {kind.__name__}")
        if wanted is not None and len(given) != wanted:
            listed = ", ".join(map(str, given))
            raise RuleError(f"{name}: the rule has {len(given)} {what} ({listed}), the call {wanted}")
