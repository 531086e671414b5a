"""Execute an operator by its rule: look up or make a plan, redistribute inputs, make the local call, tag the results.

    function, layouts, static arguments ──cache──> CallPlan: redistributions, local call, layouts of the outputs

The cache and its fast paths are in `cache`.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import replace
from functools import lru_cache
from inspect import signature
from typing import Any

import torch
from torch import Tensor

from shardwright import comm
from shardwright.errors import InPlaceError
from shardwright.layout import Layout
from shardwright.tensor.base import policy, trace
from shardwright.tensor.base.capture import below_modes
from shardwright.tensor.base.copied import mark_copied, record_base_index, refuse_copied
from shardwright.tensor.base.gradient_types import without_entered
from shardwright.tensor.base.parameter_use import set_parameter_use
from shardwright.tensor.base.registry import Op
from shardwright.tensor.base.rounding import without_rounding
from shardwright.tensor.base.strategy import Local, LocalContext, MeshStrategy, Operand, Strategies
from shardwright.tensor.base.strides import has_thin_shards
from shardwright.tensor.base.tagging import (
    DTensorBase,
    disabled,
    no_torch_function,
    tag_results,
    with_dtypes,
)
from shardwright.tensor.base.writes import WATCH, MemoryVersion, count_write
from shardwright.tensor.dispatch.arguments import Call, flatten_call, map_tensors, tensors_in
from shardwright.tensor.dispatch.autocast import low_precision_cast
from shardwright.tensor.dispatch.cache import CallPlan, known_plan, remember_fast, remember_plan
from shardwright.tensor.dispatch.choose import Impossible, choose
from shardwright.tensor.dispatch.foreach import LIST_FUNCTIONS
from shardwright.tensor.dispatch.kept import computed_in, use_of_result
from shardwright.tensor.dispatch.outside import is_outside, run_outside
from shardwright.tensor.dispatch.overlap import refuse_overlap
from shardwright.tensor.dispatch.shapes import Outputs, outputs_of
from shardwright.tensor.dispatch.view_outcome import UNCHANGED, record_result_strides, view_outcome
from shardwright.tensor.dispatch.write_through import is_lookup_result, refuse_shared_elements
from shardwright.tensor.gradients.aliased import aliased_inputs, refuse_later_writes
from shardwright.tensor.gradients.enter import prepare_cast_operand, prepare_operand
from shardwright.tensor.gradients.gather_together import saving_by_unit
from shardwright.tensor.redistribute.autograd import needs_redistribution

__all__ = ["call_by_rule", "call_known"]


def call_known(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Return the result of a call whose plan is cached; NotImplemented if it is not."""
    if func in LIST_FUNCTIONS:
        return NotImplemented  # they need no plan, and flattening their long lists is slow
    call = flatten_call(func, args, kwargs)
    if call.key is None or not call.tensors:
        return NotImplemented
    plan = known_plan(call.tensors[0]._layout, call.key)
    if plan is None or (plan.inplace and is_lookup_result(call.tensors[0])):
        return NotImplemented
    return _execute(plan, func, args, kwargs, call)


def call_by_rule(op: Op, inplace: bool, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Return the result of a call by the operator's rule; NotImplemented if the rule declines."""
    kwargs = _in_order(op.rule, kwargs) if len(kwargs) > 1 else kwargs
    call = flatten_call(func, args, kwargs)
    first = call.tensors[0]._layout
    plan = known_plan(first, call.key) if call.key is not None else None
    if plan is None:
        with below_modes():
            plan = _make_plan(op, inplace, func, args, kwargs, call)
        if plan is None:
            return NotImplemented
        if call.key is not None:
            remember_plan(first, call.key, plan)
            if not any("_use" in tensor.__dict__ for tensor in call.tensors):  # it is not part of the key there
                remember_fast(op, plan, func, args, kwargs)
    if plan.moving and trace.current() is not None:
        trace.record_decision(first.mesh, plan.rules)
    return _execute(plan, func, args, kwargs, call)


def _execute(plan: CallPlan, func: Any, args: Any, kwargs: dict[str, Any], call: Call) -> Any:
    if plan.inplace:
        refuse_copied(plan.name + "_", call.tensors[0])
        if plan.run is not None or "_strides" in call.tensors[0].__dict__:
            refuse_shared_elements(plan.name, call.tensors[0])
        if len(call.tensors) > 1:
            refuse_overlap(plan.name, call.tensors, args)
    outcome = view_outcome(plan.outcomes, plan, func, args, kwargs, call.tensors[0]) if plan.view else UNCHANGED
    saving: AbstractContextManager[None] | None = None
    aliased: list[tuple[DTensorBase, MemoryVersion]] = []
    if plan.moving:
        if torch.is_grad_enabled():
            aliased = aliased_inputs(call.tensors, plan.moves)
        args, kwargs, saving = _moved(plan, args, kwargs, call)
    if outcome.copies and plan.moves[0] is None:
        args, kwargs = _copied_first(args, kwargs)
    try:
        if plan.replays:
            with torch.autograd.grad_mode._force_original_view_tracking(True):
                result = _call_locally(plan, func, args, kwargs, saving)
        else:
            result = _call_locally(plan, func, args, kwargs, saving)
    except RuntimeError:
        if plan.inplace and WATCH.inference:
            count_write(call.tensors[0])  # torch writes to an inference tensor before it raises
        raise
    if aliased:
        refuse_later_writes(tensors_in((call.tensors[0] if plan.inplace else result,)), aliased)
    if plan.inplace:
        if WATCH.inference:
            count_write(call.tensors[0])
        return call.tensors[0]
    if plan.dtypes is not None:
        result = with_dtypes(result, plan.dtypes)
    if plan.copied and outcome.strides is None and isinstance(result, torch.Tensor):
        with no_torch_function():
            result = result.contiguous()  # as torch's view is
    tagged = tag_results(result, plan.outs, call.tensors)
    if outcome.strides is not None:
        record_result_strides(tagged, outcome.strides, call.tensors, plan.copied)
    if plan.use is not None:
        for tensor in tensors_in((tagged,)):
            set_parameter_use(tensor, plan.use)
    if outcome.copies:
        return tagged
    if plan.copied:
        mark_copied(tagged, plan.name, call.tensors[0])
        record_base_index(tagged, plan.name, call.tensors[0], args, kwargs)
    elif plan.view and "_copied_by" in call.tensors[0].__dict__:  # a view of a copy
        mark_copied(tagged, call.tensors[0]._copied_by, call.tensors[0], sharing=call.tensors[0])
    return tagged


def _call_locally(
    plan: CallPlan, func: Any, args: Any, kwargs: dict[str, Any], saving: AbstractContextManager[None] | None
) -> Any:
    """Call the operator on local tensors, in the context `saving` if there is one."""
    if saving is not None:
        with saving, no_torch_function():
            return func(*args, **kwargs) if plan.run is None else plan.run(func, args, kwargs)
    if plan.run is None:
        return disabled(func, (), args, kwargs)
    with no_torch_function():
        return plan.run(func, args, kwargs)


def _copied_first(args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Return the arguments with a contiguous copy in place of the first tensor."""
    first = True

    def change(tensor: Any) -> Any:
        nonlocal first
        was, first = first, False
        return tensor.clone(memory_format=torch.contiguous_format) if was else tensor

    with no_torch_function():
        return map_tensors(args, kwargs, change)


def _moved(
    plan: CallPlan, args: Any, kwargs: dict[str, Any], call: Call
) -> tuple[Any, dict[str, Any], AbstractContextManager[None] | None]:
    """Return the arguments with inputs redistributed, and the context in which to call the operator on them, if any."""
    policy.check(plan.name, plan.moves)
    saving: AbstractContextManager[None] | None = None
    moved: list[Tensor] = []
    with no_torch_function():
        for index, (tensor, layouts) in enumerate(zip(call.tensors, plan.moves, strict=True)):
            cast = None if plan.casts is None else plan.casts[index]
            if cast is not None:
                moved.append(prepare_cast_operand(tensor, *(layouts or (tensor._layout, tensor._layout)), cast))
            elif layouts is not None:
                moved.append(prepare_operand(tensor, *layouts, plan.shares))
            else:
                moved.append(tensor)
                continue
            saving = saving or saving_by_unit(tensor)
    remaining = iter(moved)
    return *map_tensors(args, kwargs, lambda _: next(remaining)), saving


def _make_plan(op: Op, inplace: bool, func: Any, args: Any, kwargs: dict[str, Any], call: Call) -> CallPlan | None:
    dtypes: tuple[torch.dtype, ...] = ()
    rules: list[str] = []
    operands = [_operand(tensor) for tensor in call.tensors]
    answer = _ask(op, args, kwargs, operands)
    casts = None if inplace or answer is None else _casts(answer, operands)
    if casts is not None:
        operands = [replace(each, dtype=dtype or each.dtype) for each, dtype in zip(operands, casts, strict=True)]
        answer = _ask(op, args, kwargs, operands)
    if answer is None:
        return None
    if isinstance(answer, MeshStrategy):
        if inplace and answer.ins[0] is not operands[0].layout:
            raise _cannot_keep(op, operands[0], None)
        ins, outs = list(answer.ins), list(answer.outs)
    else:
        inplace = inplace or answer.unmoved is not None
        shapes, dtypes = _outputs(answer, operands, inplace, func, args, kwargs, casts)
        answer = without_rounding(answer, operands, low_precision_cast(op.name, call.tensors[0]) or dtypes)
        try:
            ins, outs, rules = choose(operands, replace(answer, unmoved=0 if inplace else None), shapes)
        except Impossible as where:
            if answer.written_back:
                return None
            raise _cannot_keep(op, operands[0], where.mesh_dim) from None
    if inplace and outs[0] is not operands[0].layout:  # `t_` and similar
        raise _cannot_keep(op, operands[0], None)
    enters = any(without_entered(layout) is not layout for layout in ins)
    # Entered differs from Replicate only in the gradient.
    ins = [layout if operand.grad else without_entered(layout) for operand, layout in zip(operands, ins, strict=True)]
    moves = tuple(
        (operand.layout, layout) if needs_redistribution(operand.layout, layout) else None
        for operand, layout in zip(operands, ins, strict=True)
    )
    copied = answer.copied or (not answer.fresh and moves[0] is not None)
    if is_outside(call.tensors[0]):
        view = not answer.fresh and not copied
        run: Local | None = run_outside(outs, inplace=inplace, view=view, draws=answer.draws, casts=casts)
        moves, casts = (None,) * len(moves), None
    else:
        run = answer.run(LocalContext(tuple(ins), tuple(outs), comm.rank())) if answer.run is not None else None
    known = dtypes if run is not None and not torch._C._is_any_autocast_enabled() and _is_empty(*ins, *outs) else None
    return CallPlan(
        op.name,
        moves,
        any(moves) or casts is not None,
        run,
        tuple(outs),
        inplace,
        enters,
        not answer.fresh or answer.copied,
        copied,
        known,
        {},
        tuple(rules),
        answer.fresh and not copied,
        casts,
        None if inplace else operands[0].use if isinstance(answer, MeshStrategy) else use_of_result(operands),
        not answer.fresh and any(map(has_thin_shards, outs)),
    )


def _ask(op: Op, args: Any, kwargs: dict[str, Any], operands: list[Operand]) -> Strategies | MeshStrategy | None:
    """Return the answer of the operator's rule to a call with these operands."""
    assert op.rule is not None
    remaining = iter(operands)
    given, named = map_tensors(args, kwargs, lambda _: next(remaining))
    return op.rule(*given, **named)


def _casts(answer: Strategies | MeshStrategy, operands: list[Operand]) -> tuple[torch.dtype | None, ...] | None:
    """Return the dtypes that parameters are cast to for a call; None if none is."""
    if isinstance(answer, MeshStrategy) or answer.unmoved is not None or torch._C._is_any_autocast_enabled():
        return None  # it has one operand, is in place, or torch casts
    return computed_in(operands)


def _is_empty(*layouts: Layout) -> bool:
    """Return whether this rank has no elements of one of these, so that its local call may differ from torch's."""
    rank = comm.rank()
    return any(rank in layout.mesh and 0 in layout.local_shape(rank) for layout in layouts)


def _outputs(
    answer: Strategies,
    operands: list[Operand],
    inplace: bool,
    func: Any,
    args: Any,
    kwargs: dict[str, Any],
    casts: tuple[torch.dtype | None, ...] | None,
) -> Outputs:
    """Return the shapes and dtypes of the results. An in-place operator keeps its target's dtype."""
    if answer.shapes is None:
        return outputs_of(func, args, kwargs, casts)
    return Outputs(answer.shapes, (operands[0].dtype,) if inplace else ())


def _in_order(rule: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return keyword arguments in the order of the rule's parameters, in which it numbers its tensors."""
    indices = _parameter_indices(rule)
    return dict(sorted(kwargs.items(), key=lambda item: indices.get(item[0], len(indices))))


@lru_cache(maxsize=1024)
def _parameter_indices(rule: Any) -> dict[str, int]:
    return {name: index for index, name in enumerate(signature(rule).parameters)}


def _cannot_keep(op: Op, target: Operand, mesh_dim: int | None) -> InPlaceError:
    where = "" if mesh_dim is None else f" on mesh dimension {target.layout.mesh.label(mesh_dim)}"
    return InPlaceError(
        f"{op.name}_ would change the layout of the tensor it writes to, {target.layout}{where}: an in-place operator "
        f"keeps its target's layout. Use the out-of-place {op.name}, or redistribute the target first"
    )


def _operand(tensor: DTensorBase) -> Operand:
    with no_torch_function():
        grad = tensor.requires_grad and torch.is_grad_enabled()
        attributes = tensor.__dict__
        return Operand(tensor._layout, tensor.dtype, grad, "_is_param" in attributes, attributes.get("_use"))
