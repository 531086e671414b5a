"""`register_rule`: register a rule for an operator, as a notation or a function of the operator's signature."""

from __future__ import annotations

from types import BuiltinFunctionType, FunctionType, MethodDescriptorType, WrapperDescriptorType
from typing import Any, final

from torch._ops import OpOverload, OpOverloadPacket

from shardwright.errors import RuleError
from shardwright.tensor.base.layout_cache import forget_caches
from shardwright.tensor.base.registry import OPERATORS, Op, Rule, canonical_name, forget_types
from shardwright.tensor.dispatch.cache import restore_shortcuts, take_shortcuts
from shardwright.tensor.extend.claims import checked
from shardwright.tensor.extend.user_rules import indexed

__all__ = ["Registration", "register_rule"]


@final
class Registration:
    """A registered rule. `remove()` unregisters it, and so does leaving it as a context manager.

    >>> import torch, shardwright as sw
    >>> with sw.register_rule(torch.erf, sw.rules.pointwise(), replace=True) as registered:
    ...     registered.name
    'erf'
    """

    def __init__(self, name: str, rule: Rule, numbers_by_type: bool) -> None:
        self.name = name
        self._before = OPERATORS.get(name)
        self._shortcuts = take_shortcuts(name)
        OPERATORS[name] = self._mine = Op(name, rule, None, numbers_by_type)
        _forget()

    def remove(self) -> None:
        """Restore the previous rule, if any. Does nothing if this one has been replaced or removed meanwhile."""
        if OPERATORS.get(self.name) is not self._mine:
            return
        if self._before is None:
            del OPERATORS[self.name]
        else:
            OPERATORS[self.name] = self._before
        restore_shortcuts(self._shortcuts)
        _forget()

    def __enter__(self) -> Registration:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()


def _forget() -> None:
    """Plans made by other rules are no longer true."""
    forget_types()
    forget_caches()


def register_rule(
    op: Any, rule: Rule | str | None = None, *, replace: bool = False, numbers_by_type: bool = False
) -> Any:
    """Register how an operator runs on DTensors: which placements of its inputs give which placements of its outputs.

    `op` is an operator of `torch.library` (what `custom_op` returns, `torch.ops.ns.name`, one of its overloads), or a
    torch function or method. `rule` applies to each mesh dimension:

    - an index notation, `"mk,kn->mn"`: see `shardwright.rules.indexed`, which has more options;
    - `shardwright.rules.pointwise(...)` or `either(...)`;
    - a function with the operator's own signature, called with `Operand`s in place of tensors, that returns
      `Strategies`, `MeshStrategy`, or None: the operator then runs on replicated tensors, as it does without a rule.

    Without `rule`, it is a decorator for such a function; otherwise it returns a `Registration`, which can remove the
    rule. `numbers_by_type` means that plain numbers do not change the rule's answer, only their types. Local results of
    other sizes than the rule claims raise `RuleError`; wrong values are not detected. Prove a rule once with
    `shardwright.testing.prove(op, *args)`.

    >>> import torch, shardwright as sw
    >>> from shardwright.testing import prove
    >>> @torch.library.custom_op("docs::shift", mutates_args=())
    ... def shift(x: torch.Tensor, by: float) -> torch.Tensor:
    ...     return x + by
    >>> registered = sw.register_rule(shift, sw.rules.pointwise())
    >>> assert not prove(shift, torch.randn(5, 2), 0.5).wrong
    >>> x = sw.ones(4, mesh=sw.init_device_mesh("cpu", (1,), mesh_dim_names=("dp",)), placements=[sw.Shard(0)])
    >>> print(shift(x, 1.0).sharding)
    [4] (dp: S(0))
    >>> registered.remove()
    """
    if rule is None:

        def decorate(function: Rule) -> Rule:
            register_rule(op, function, replace=replace, numbers_by_type=numbers_by_type)
            return function

        return decorate
    name = _name_of(op)
    if name in OPERATORS and not replace:
        raise RuleError(f"{name} already has a rule: pass replace=True to replace it")
    if isinstance(rule, str):
        rule = indexed(rule)
    if not callable(rule):
        raise RuleError(
            f"{name}: rule must be an index notation or a function of the operator's signature, got {rule!r}"
        )
    return Registration(name, checked(name, rule, _number_of_results(op)), numbers_by_type)


def _name_of(op: Any) -> str:
    """Return the canonical name of the operator; raise if torch would not dispatch it to DTensors."""
    op = getattr(op, "_opoverload", op)
    if isinstance(op, OpOverload | OpOverloadPacket):
        name = canonical_name(op)[0]
        if any(overload._schema.is_mutable for overload in _overloads(op)) and "::" in name:
            raise RuleError(f"{name} writes to its arguments: return new tensors instead, or wrap it in sw.local_map")
        return name
    kinds = (BuiltinFunctionType, MethodDescriptorType, WrapperDescriptorType)
    if isinstance(op, kinds) or (isinstance(op, FunctionType) and (op.__module__ or "").startswith("torch")):
        return canonical_name(op)[0]
    raise RuleError(
        f"{op!r} is not an operator of torch: make it one with torch.library.custom_op, or wrap it in sw.local_map"
    )


def _overloads(op: OpOverload[..., Any] | OpOverloadPacket[..., Any]) -> list[OpOverload[..., Any]]:
    if isinstance(op, OpOverload):
        return [op]
    return [getattr(op, name) for name in op.overloads()]  # type: ignore[no-untyped-call]  # torch's own is untyped


def _number_of_results(op: Any) -> int | None:
    """Return the number of tensors an operator returns, or None if its schema does not say."""
    op = getattr(op, "_opoverload", op)
    overloads = _overloads(op) if isinstance(op, OpOverload | OpOverloadPacket) else []
    if len(overloads) != 1:
        return None
    returns = [str(result.type) for result in overloads[0]._schema.returns]
    return len(returns) if all(kind == "Tensor" for kind in returns) else None
