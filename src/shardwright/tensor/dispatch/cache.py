"""The dispatcher's caches, with all code that reads and writes them. There are three, the fastest first:

| path | for | key | value |
|---|---|---|---|
| fast | a local call and nothing else, one new tensor | first operand's layout, function, `FastKey` | `FastPlan` |
| uniform | an element-wise operator, all operands of one layout | function, in `UNIFORM` | whether it is in place |
| plans | every call by a rule | first operand's layout, `CallKey` | `CallPlan` |

Nothing here holds a tensor. Caches are attached to layouts, which are interned: equal calls find the same plan, and
plans are freed with their layouts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import FunctionType
from typing import Any, NamedTuple, TypeAlias

import torch

from shardwright import comm
from shardwright.layout import Layout
from shardwright.tensor.base.layout_cache import LayoutCache, cache_of, forget_caches
from shardwright.tensor.base.registry import Op, canonical_name
from shardwright.tensor.base.strategy import Local, ParameterUse
from shardwright.tensor.base.strides import has_thin_shards
from shardwright.tensor.base.tagging import DTensorBase, disabled, no_torch_function
from shardwright.tensor.base.writes import WATCH, count_write
from shardwright.tensor.dispatch.view_outcome import ViewOutcome

__all__ = [
    "FAST",
    "UNIFORM",
    "CallKey",
    "CallPlan",
    "FastKey",
    "FastPlan",
    "Shortcuts",
    "known_plan",
    "mark_fast",
    "mark_uniform",
    "remember_fast",
    "remember_plan",
    "restore_shortcuts",
    "take_shortcuts",
    "torch_function",
]

MAX_PLANS = 512  # per layout; a full cache is cleared

# The second operand's layout; the type of the number it is; both further layouts; or all static arguments.
FastKey: TypeAlias = "Layout | type[int] | type[float] | tuple[Any, ...]"
FastPlan: TypeAlias = "Layout | tuple[Local, Layout]"  # the result's layout, and the local call if not the function
CallKey: TypeAlias = tuple[Any, ...]  # made by `flatten_call`

UNIFORM: dict[Any, bool] = {}  # elementwise: inputs of one layout give that layout; True: in place
FAST: set[Any] = set()  # functions that always return one new tensor: their plan may be just a layout


def mark_fast(*names: str) -> None:
    """Declare that these operators always return one new tensor, so that the fast path applies."""
    for name in names:
        for home in (torch, torch.Tensor, torch.nn.functional, torch.special):
            function = getattr(home, name, None)
            if function is not None and not isinstance(function, FunctionType):
                FAST.add(function)


def mark_uniform(*names: str) -> None:
    """Declare that these operators are elementwise: on inputs of one layout they need no plan."""
    for name in names:
        for home in (torch, torch.Tensor):
            for spelling, inplace in ((name, False), (f"{name}_", True)):
                function = getattr(home, spelling, None)
                if function is not None and not isinstance(function, FunctionType):
                    UNIFORM[function] = inplace


class Shortcuts(NamedTuple):
    """The fast-path entries of one operator."""

    fast: set[Any]
    uniform: dict[Any, bool]


def take_shortcuts(name: str) -> Shortcuts:
    """Remove and return the fast-path entries of an operator, for which a new rule may not hold."""
    fast = {function for function in FAST if canonical_name(function)[0] == name}
    uniform = {function: UNIFORM[function] for function in UNIFORM if canonical_name(function)[0] == name}
    FAST.difference_update(fast)
    for function in uniform:
        del UNIFORM[function]
    return Shortcuts(fast, uniform)


def restore_shortcuts(taken: Shortcuts) -> None:
    """Restore the entries that `take_shortcuts` removed."""
    FAST.update(taken.fast)
    UNIFORM.update(taken.uniform)


@dataclass(frozen=True, slots=True)
class CallPlan:
    """How to run a call: the redistribution of each input, the local call, the layouts of the results. No tensors."""

    name: str
    moves: tuple[tuple[Layout, Layout] | None, ...]
    moving: bool  # True if any input must be redistributed
    run: Local | None
    outs: tuple[Layout, ...]
    inplace: bool
    enters: bool  # True if an input is Entered when it requires grad
    view: bool  # the result may be a view of the first input
    copied: bool  # the result looks like a view but is a copy, because the input had to be redistributed
    dtypes: tuple[torch.dtype, ...] | None  # of the results, if this rank has no elements and its call may give others
    outcomes: dict[Any, ViewOutcome]  # by the strides of the first input
    rules: tuple[str, ...]  # what decided the layouts, by mesh dimension; empty if the operator has one strategy
    shares: bool  # the results have memory of their own, so that a redistributed input can serve other operators, too
    casts: tuple[torch.dtype | None, ...] | None  # the dtypes that parameters are cast to for the call
    use: ParameterUse | None  # of the results, if they are computed from parameters alone
    replays: (
        bool  # autograd replays the view after a write to its base; as_strided would lose the graph of empty shards
    )


def torch_function(passed: frozenset[Any], call_known: Callable[..., Any], intercept: Callable[..., Any]) -> Any:
    """Return `DTensor.__torch_function__`.

    A call that no fast path handles goes to the local tensor if it is in `passed`, then to `call_known`, then to
    `intercept`.
    """

    def call(cls: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not kwargs and args and type(args[0]) is cls:
            known = args[0]._layout.attached.get(func)
            if known is not None:
                short = None
                if len(args) == 2:
                    second = args[1]
                    short = known.get(second._layout if type(second) is cls else type(second))
                elif len(args) == 3 and type(args[1]) is cls:
                    _, second, third = args
                    short = known.get((second._layout, third._layout if type(third) is cls else third))
                if short is None:
                    try:
                        short = known.get(args[1:])
                    except TypeError:
                        short = None  # a list among the arguments is not hashable
                if type(short) is Layout:
                    result = disabled(func, types, args, {})
                    result.__class__ = cls
                    result._layout = short
                    return result
                if short is not None:
                    run, layout = short
                    with no_torch_function():
                        result = run(func, args, {})
                    result.__class__ = cls
                    result._layout = layout
                    return result
        inplace = UNIFORM.get(func)
        if inplace is not None and args:
            result = _call_uniform(cls, inplace, func, types, args, kwargs)
            if result is not NotImplemented:
                return result
        kwargs = kwargs or {}
        if func in passed:
            return disabled(func, types, args, kwargs)
        result = call_known(func, args, kwargs)
        return intercept(func, types, args, kwargs) if result is NotImplemented else result

    return call


def _call_uniform(cls: Any, inplace: bool, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
    """Return the result of an elementwise call if all tensors have one layout; NotImplemented if not."""
    first = args[0]
    if type(first) is not cls or (kwargs and "out" in kwargs):
        return NotImplemented  # the dispatcher handles it, or raises
    layout = first._layout
    if layout.is_partial:
        return NotImplemented
    for value in args if not kwargs else (*args, *kwargs.values()):
        kind = type(value)
        if kind is cls:
            if value._layout is not layout:
                return NotImplemented
        elif kind is not float and kind is not int and isinstance(value, _NOT_UNIFORM):
            return NotImplemented
    if inplace:
        try:
            disabled(func, types, args, kwargs or {})
        finally:
            if WATCH.inference:
                count_write(first)  # even if torch raises: it writes to an inference tensor first
        return first
    result = disabled(func, types, args, kwargs or {})
    result.__class__ = cls
    result._layout = layout
    return result


_NOT_UNIFORM = (torch.Tensor, list, tuple)


def remember_fast(op: Op, plan: CallPlan, func: Any, args: Any, kwargs: dict[str, Any]) -> None:
    """Cache a plan for the fast path if it is just a local call on up to three tensors.

    The key is the second tensor's layout, the type of a number that is the second operand, or all static arguments.
    """
    if kwargs or plan.enters or plan.moving or plan.inplace or plan.dtypes or len(plan.outs) != 1 or func not in FAST:
        return
    if plan.view and has_thin_shards(plan.outs[0]):
        return  # its strides may have to be recorded
    if not isinstance(args[0], DTensorBase) or args[0]._layout.is_partial:
        return
    other: Any = tuple(args[1:])
    if len(args) == 2 and isinstance(args[1], DTensorBase):
        other = args[1]._layout
        if other.is_partial:
            return
    elif len(args) == 2 and op.numbers_by_type and type(args[1]) in (int, float):
        other = type(args[1])
    elif len(args) == 3 and isinstance(args[1], DTensorBase):
        other = tuple(value._layout if isinstance(value, DTensorBase) else value for value in args[1:])
        if any(getattr(value, "is_partial", False) for value in other) or not isinstance(other[1], Layout | None):
            return
    elif not all(type(value) in (int, torch.Size) or value is None for value in other):
        return
    known: dict[FastKey, FastPlan] = cache_of(args[0]._layout).setdefault(func, {})
    if len(known) >= MAX_PLANS:
        known.clear()
    known[other] = plan.outs[0] if plan.run is None else (plan.run, plan.outs[0])


def known_plan(layout: Layout, key: CallKey) -> CallPlan | None:
    """Return the cached plan of a call whose first operand has this layout, or None."""
    cache = layout.attached
    return cache.plans.get(key) if type(cache) is LayoutCache else None


def remember_plan(layout: Layout, key: CallKey, plan: CallPlan) -> None:
    """Cache the plan of a call with the layout of its first operand."""
    plans = cache_of(layout).plans
    if len(plans) >= MAX_PLANS:
        plans.clear()
    plans[key] = plan


comm.on_forget(forget_caches)  # plans depend on this process's rank
comm.on_change(forget_caches)
