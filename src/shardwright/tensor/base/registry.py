"""The registry of operators: rules and compositions by canonical name.

`torch.add`, `Tensor.add`, `Tensor.__radd__`, `Tensor.add_` and `torch.ops.aten.add.Tensor` are one operator, "add".
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

if TYPE_CHECKING:  # rules import this module
    from shardwright.tensor.base.strategy import MeshStrategy, Strategies

__all__ = [
    "Op",
    "canonical_name",
    "composite",
    "forget_types",
    "operator",
    "overloads_of",
    "rule",
    "takes_numbers_by_type",
]

Rule: TypeAlias = "Callable[..., Strategies | MeshStrategy | None]"


@dataclass(frozen=True, slots=True)
class Op:
    """A registered operator: a rule for its placements, or a composition of other operators."""

    name: str
    rule: Rule | None = None
    composite: Callable[..., Any] | None = None
    numbers_by_type: bool = False  # plain numbers are operands: their values do not change the plan


OPERATORS: dict[str, Op] = {}
_by_function: dict[Any, tuple[str, bool]] = {}
_by_type: dict[Any, bool] = {}

# Python's operator protocol; reflected operands make no difference to placements, except in a quotient.
_DUNDER = {"truediv": "div", "rtruediv": "rdiv", "floordiv": "floor_divide", "rfloordiv": "floor_divide"}
_DUNDER |= {"rdiv": "rdiv", "mod": "remainder", "rmod": "remainder", "invert": "bitwise_not", "pos": "positive"}
_DUNDER |= {"and": "bitwise_and", "rand": "bitwise_and", "or": "bitwise_or", "ror": "bitwise_or"}
_DUNDER |= {"xor": "bitwise_xor", "rxor": "bitwise_xor", "lshift": "bitwise_left_shift"}
_DUNDER |= {"rshift": "bitwise_right_shift", "rlshift": "bitwise_left_shift", "rrshift": "bitwise_right_shift"}
_DUNDER |= {"radd": "add", "rsub": "sub", "rmul": "mul", "rpow": "pow", "rmatmul": "rmatmul"}
_DUNDER |= {"iadd": "add_", "isub": "sub_", "imul": "mul_", "itruediv": "div_", "idiv": "div_"}
_DUNDER |= {"ifloordiv": "floor_divide_", "imod": "remainder_", "ipow": "pow_", "iand": "bitwise_and_"}
_DUNDER |= {"ior": "bitwise_or_", "ixor": "bitwise_xor_"}

_ALIASES = {"subtract": "sub", "multiply": "mul", "divide": "div", "true_divide": "div", "absolute": "abs"}
_ALIASES |= {"negative": "neg", "greater": "gt", "less": "lt", "greater_equal": "ge", "less_equal": "le"}
_ALIASES |= {"not_equal": "ne", "clip": "clamp", "fix": "trunc", "arccos": "acos", "arcsin": "asin"}
_ALIASES |= {"arctan": "atan", "arccosh": "acosh", "arcsinh": "asinh", "arctanh": "atanh", "arctan2": "atan2"}
_ALIASES |= {"concat": "cat", "concatenate": "cat", "swapaxes": "transpose", "swapdims": "transpose"}
_ALIASES |= {"moveaxis": "movedim", "_softmax": "softmax", "_log_softmax": "log_softmax", "special_expit": "sigmoid"}
_ALIASES |= {"special_exp2": "exp2", "special_erf": "erf", "special_erfc": "erfc", "special_softmax": "softmax"}
_ALIASES |= {"special_log_softmax": "log_softmax", "special_log1p": "log1p", "special_expm1": "expm1"}
_ALIASES |= {"special_logit": "logit", "special_round": "round", "special_sinc": "sinc", "special_digamma": "digamma"}


# Functions that share their name with another operator: `F.unfold` extracts patches, `Tensor.unfold` windows.
_OWN_NAMES = {torch.nn.functional.unfold: "im2col", torch.nn.functional.fold: "col2im"}


def canonical_name(func: Any) -> tuple[str, bool]:
    """Return the name of the operator that a function calls, and whether it is the in-place variant."""
    known = _by_function.get(func)
    if known is None:
        known = _by_function[func] = _canonical_name(func)
    return known


def _canonical_name(func: Any) -> tuple[str, bool]:
    if func in _OWN_NAMES:
        return _OWN_NAMES[func], False
    func = getattr(func, "_opoverload", func)  # made by torch.library.custom_op
    packet = getattr(func, "_overloadpacket", func)  # torch.ops.aten.add.Tensor
    qualified: str = getattr(packet, "_qualified_op_name", "aten::")
    if not qualified.startswith("aten::"):
        return qualified, False  # a custom operator
    name: str = packet.__name__
    if name.startswith("__") and name.endswith("__"):
        name = name[2:-2]
        name = _DUNDER.get(name, name)
        if name in {"get", "set", "getitem", "setitem", "len", "repr", "contains", "reversed"}:
            return f"__{name}__", False
    inplace = name.endswith("_") and not name.endswith("__")
    name = name[:-1] if inplace else name
    return _ALIASES.get(name, name), inplace


def overloads_of(func: Any) -> list[Any]:
    """Return torch's overloads of the operator that a function calls; none if it is not an operator's function.

    >>> [str(overload) for overload in overloads_of(torch.Tensor.relu_)]
    ['aten.relu_.default']
    """
    func = getattr(func, "_opoverload", func)  # made by torch.library.custom_op
    packet = getattr(func, "_overloadpacket", func)
    if not isinstance(packet, torch._ops.OpOverloadPacket):
        packet = getattr(torch.ops.aten, getattr(func, "__name__", ""), None)
    if not isinstance(packet, torch._ops.OpOverloadPacket):
        return []
    names: list[str] = packet.overloads()  # type: ignore[no-untyped-call]  # torch's own
    return [getattr(packet, name) for name in names]


def operator(name: str) -> Op | None:
    """Return the operator of this canonical name, or None if it is not registered."""
    return OPERATORS.get(name)


def takes_numbers_by_type(func: Any) -> bool:
    """Return whether plain numbers are operands of this function, so that their values do not change the plan."""
    known = _by_type.get(func)
    if known is None:
        op = operator(canonical_name(func)[0])
        known = _by_type[func] = op is not None and op.numbers_by_type
    return known


def forget_types() -> None:
    """Clear the cache of `takes_numbers_by_type`, because operators were registered."""
    _by_type.clear()


def rule(*names: str, numbers_by_type: bool = False) -> Callable[[Rule], Rule]:
    """Register a rule: a function with the operator's own signature, called with an `Operand` for each tensor.

    It returns `Strategies` or a `MeshStrategy`, or None to decline: the operator then runs on replicated tensors.
    """

    def register(function: Rule) -> Rule:
        for name in names:
            known = OPERATORS.get(name, Op(name))  # the composition comes first, whichever was registered first
            OPERATORS[name] = Op(name, function, known.composite, numbers_by_type)
        forget_types()
        return function

    return register


def composite(*names: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register an operator written in terms of others, on DTensors; it returns NotImplemented to decline.

    If it declines, the rule of the same name is used.
    """

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        for name in names:
            known = OPERATORS.get(name, Op(name))
            OPERATORS[name] = Op(name, known.rule, function, known.numbers_by_type)
        return function

    return register
