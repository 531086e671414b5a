"""Check the rules of users: malformed answers raise, and so do local results whose sizes the rule did not predict."""

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

__all__ = ["checked", "describe"]

Shape: TypeAlias = tuple[int, ...]


def checked(name: str, rule: Rule, results: int | None) -> Rule:
    """Return the rule with its answers validated, and the sizes of local results checked against its layouts."""
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
            return replace(given, run=_with_size_checks(who, given.run))
        if not isinstance(given, Strategies):
            raise RuleError(
                f"{name}: the rule must return Strategies, MeshStrategy or None, got {type(given).__name__}"
            )
        shapes, outputs = given.shapes, results
        if shapes is not None:
            if outputs not in (None, len(shapes)):
                raise RuleError(f"{who} gives {len(shapes)} shapes, {shapes}, but the call has {outputs} outputs")
            outputs = len(shapes)
        at = given.at

        def checked_at(mesh_dim: int) -> list[Strategy]:
            strategies = [Strategy(*strategy) for strategy in at(mesh_dim)]
            if not strategies:
                raise RuleError(
                    f"{who} has no strategies on mesh dimension {mesh_dim}: list at least one, such as all replicated, "
                    "or return None if there is none"
                )
            for strategy in strategies:
                _check_arity(name, strategy.ins, strategy.outs, Placement, len(operands), outputs)
            return _fitting(who, strategies, [operand.shape for operand in operands], shapes)

        if operands:
            checked_at(0)  # raise before anything is computed
        return replace(given, at=checked_at, run=_with_size_checks(who, given.run))

    return answer


def _fitting(
    who: str, strategies: list[Strategy], ins: Sequence[Shape], outs: Sequence[Shape] | None
) -> list[Strategy]:
    """Return the strategies that fit the inputs; raise if one of them shards a dimension an output does not have."""
    fitting = [strategy for strategy in strategies if not any(map(_lacks, strategy.ins, ins))]
    if not fitting:
        raise RuleError(
            f"{who} has no strategy for inputs of shapes {', '.join(map(str, ins))}: each shards a dimension that they "
            f"do not have ({'; '.join(map(describe, strategies))}). Add the replicated strategy, or return None"
        )
    if outs is None:
        return fitting
    for strategy in fitting:
        for index, (placement, shape) in enumerate(zip(strategy.outs, outs, strict=True)):
            if _lacks(placement, shape):
                raise RuleError(
                    f"{who}: the strategy {describe(strategy)} has {placement} for output {index}, of shape {shape}, "
                    "which does not have that dimension"
                )
    return fitting


def _lacks(placement: Placement, shape: Shape) -> bool:
    """Return whether the placement shards a dimension this shape does not have."""
    return isinstance(placement, Shard | Ragged) and not -len(shape) <= placement.dim < len(shape)


def describe(strategy: Strategy) -> str:
    """Return a strategy as text, such as `S(0), R -> S(0)`."""
    return f"{', '.join(map(str, strategy.ins))} -> {', '.join(map(str, strategy.outs))}"


def _with_size_checks(who: str, run: Run | None) -> Run:
    """Return the local call with the sizes of its results checked against the rule's layouts.

    It gets plain tensors, because a custom operator may save its inputs for the backward.
    """

    def checked_run(context: LocalContext) -> Local:
        inner = run(context) if run is not None else None
        all_checked = inner is not None  # a local call of the rule's own may differ on other ranks
        expected = _local_shapes(context.outs, context.rank)

        def local(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
            nonlocal all_checked
            args, kwargs = map_tensors(args, kwargs, alias)
            if not all_checked:
                _check_all_ranks(who, context, func, args, kwargs)
                all_checked = True
            result = func(*args, **kwargs) if inner is None else inner(func, args, kwargs)
            if expected is not None:
                _check_sizes(who, context, context.rank, expected, _shapes_in(result))
            return result

        return local

    return checked_run


def _check_all_ranks(who: str, context: LocalContext, func: Any, args: Any, kwargs: dict[str, Any]) -> None:
    """Raise on all ranks if the sizes are wrong on any of them; skipped if the operator has no meta kernel."""
    flat, spec = pytree.tree_flatten((args, kwargs))
    indices = [index for index, value in enumerate(flat) if isinstance(value, Tensor)]
    if len(indices) != len(context.ins):
        return
    sizes: dict[tuple[Any, Any], int] = {}
    for rank in context.ins[0].mesh.ranks:
        sizes.setdefault((_local_shapes(context.ins, rank), _local_shapes(context.outs, rank)), rank)
    for (ins, outs), rank in sizes.items():
        if ins is None or outs is None:
            continue
        try:
            with torch.no_grad(), not_captured():
                for index, shape in zip(indices, ins, strict=True):
                    flat[index] = torch.empty(shape, dtype=flat[index].dtype, device="meta")
                meta_args, meta_kwargs = pytree.tree_unflatten(flat, spec)
                actual = _shapes_in(func(*meta_args, **meta_kwargs))
        except Exception:  # noqa: BLE001  # no meta kernel, or none for these arguments
            continue
        _check_sizes(who, context, rank, outs, actual)


def _check_sizes(who: str, context: LocalContext, rank: int, claimed: Sequence[Shape], actual: Sequence[Shape]) -> None:
    if claimed == actual:
        return
    ins = "; ".join(map(str, context.ins))
    remedy = "fix it, and prove it with shardwright.testing.prove"
    if len(claimed) != len(actual):
        raise RuleError(
            f"{who} claims {len(claimed)} outputs for inputs {ins}, but rank {rank} has {len(actual)}: {remedy}"
        )
    index = next(index for index, (claim, shape) in enumerate(zip(claimed, actual, strict=True)) if claim != shape)
    raise RuleError(
        f"{who} claims {context.outs[index]} for output {index} of inputs {ins}. On rank {rank} its local tensor "
        f"would have shape {claimed[index]}, but has {actual[index]}: {remedy}"
    )


def _local_shapes(layouts: Sequence[Layout], rank: int) -> tuple[Shape, ...] | None:
    """Return the local shapes of a rank; None if it is not on their mesh."""
    if not all(rank in layout.mesh for layout in layouts):
        return None
    return tuple(layout.local_shape(rank) for layout in layouts)


def _shapes_in(result: Any) -> tuple[Shape, ...]:
    """Return the shapes of the tensors in a result, in the order of their layouts."""
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
            raise RuleError(f"{name}: the rule's {what} must all be of type {kind.__name__}, got {tuple(given)}")
        if wanted is not None and len(given) != wanted:
            listed = ", ".join(map(str, given))
            raise RuleError(f"{name}: the rule has {len(given)} {what} ({listed}), but the call has {wanted}")
