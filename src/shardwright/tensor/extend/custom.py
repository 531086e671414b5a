"""Rules for operators of users: in index notation, by ways, or by a function of the operator's own signature."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import wraps
from types import BuiltinFunctionType, FunctionType, MethodDescriptorType, WrapperDescriptorType
from typing import Any, final

import torch
from torch._ops import OpOverload, OpOverloadPacket

from shardwright.errors import RuleError
from shardwright.layout import Layout, Placement
from shardwright.layout.layout import forget_plans
from shardwright.tensor.dispatch.call import map_tensors
from shardwright.tensor.dispatch.registry import FAST, OPERATORS, UNIFORM, Op, Rule, canonical_name, forget_types
from shardwright.tensor.local import alias
from shardwright.tensor.rules.elementwise.pointwise import broadcast_labels, operands_in
from shardwright.tensor.rules.notation import Decided, Labels, Local, Operand, Run, Situation, Way, Ways, index_ways
from shardwright.tensor.types import REPLICATE

__all__ = ["Registration", "either", "indexed", "pointwise", "register_rule"]

Terms = Sequence[Sequence[int]]


@final
class Registration:
    """A registered rule. `remove()` takes it back, and so does leaving it as a context.

    >>> import torch, shardwright as sw
    >>> with sw.register_rule(torch.erf, sw.rules.pointwise(), replace=True) as registered:
    ...     registered.name
    'erf'
    """

    def __init__(self, name: str, rule: Rule, numbers_by_type: bool) -> None:
        self.name = name
        self._before = OPERATORS.get(name)
        self._fast = {function for function in FAST if canonical_name(function)[0] == name}
        self._uniform = {function: UNIFORM[function] for function in UNIFORM if canonical_name(function)[0] == name}
        FAST.difference_update(self._fast)
        for function in self._uniform:
            del UNIFORM[function]
        OPERATORS[name] = self._mine = Op(name, rule, None, numbers_by_type)
        _forget()

    def remove(self) -> None:
        """Puts back what was there before; nothing, if the rule has been replaced or removed meanwhile."""
        if OPERATORS.get(self.name) is not self._mine:
            return
        if self._before is None:
            del OPERATORS[self.name]
        else:
            OPERATORS[self.name] = self._before
        FAST.update(self._fast)
        UNIFORM.update(self._uniform)
        _forget()

    def __enter__(self) -> Registration:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()


def _forget() -> None:
    """Plans made by other rules are no longer true."""
    forget_types()
    forget_plans()


def register_rule(
    op: Any, rule: Rule | str | None = None, *, replace: bool = False, numbers_by_type: bool = False
) -> Any:
    """Says how an operator runs on DTensors: which placements of its inputs give which of its outputs.

    `op` is an operator of `torch.library` (what `custom_op` returns, `torch.ops.ns.name`, one of its overloads), or a
    torch function or method. `rule` is for one mesh dimension; a mesh of several is the product:

    - an index notation, `"mk,kn->mn"`: see `shardwright.rules.indexed`, which has more to say;
    - `shardwright.rules.pointwise(...)` or `either(...)`;
    - a function with the operator's own signature, called with `Operand`s in place of tensors, that returns `Ways`,
      `Decided`, or None where it has no answer: the operator then runs on whole tensors, as it does without a rule.

    Without `rule`, it is a decorator for such a function. What it returns otherwise can take the rule back.
    `numbers_by_type` says that plain numbers do not change the rule's answer. Prove what you register, once, with
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
        raise RuleError(f"{name} has a rule already: give replace=True to put yours in its place")
    if isinstance(rule, str):
        rule = indexed(rule)
    if not callable(rule):
        raise RuleError(
            f"{name}: {rule!r} is no rule: give an index notation, or a function of the operator's signature"
        )
    return Registration(name, _checked(name, rule, _number_of_results(op)), numbers_by_type)


def _name_of(op: Any) -> str:
    """The canonical name of what torch asks DTensors about; refused where it would ask nobody."""
    op = getattr(op, "_opoverload", op)
    if isinstance(op, OpOverload | OpOverloadPacket):
        name = canonical_name(op)[0]
        if any(overload._schema.is_mutable for overload in _overloads(op)) and "::" in name:
            raise RuleError(f"{name} writes to its arguments: let it return new tensors, or wrap it in sw.local_map")
        return name
    kinds = (BuiltinFunctionType, MethodDescriptorType, WrapperDescriptorType)
    if isinstance(op, kinds) or (isinstance(op, FunctionType) and (op.__module__ or "").startswith("torch")):
        return canonical_name(op)[0]
    raise RuleError(
        f"{op!r} is no operator of torch: make it one with torch.library.custom_op, or wrap it in sw.local_map"
    )


def _overloads(op: OpOverload[..., Any] | OpOverloadPacket[..., Any]) -> list[OpOverload[..., Any]]:
    if isinstance(op, OpOverload):
        return [op]
    return [getattr(op, name) for name in op.overloads()]  # type: ignore[no-untyped-call]  # torch's own is untyped


def _number_of_results(op: Any) -> int | None:
    """How many tensors an operator returns, where its schema says so."""
    op = getattr(op, "_opoverload", op)
    overloads = _overloads(op) if isinstance(op, OpOverload | OpOverloadPacket) else []
    if len(overloads) != 1:
        return None
    returns = [str(result.type) for result in overloads[0]._schema.returns]
    return len(returns) if all(kind == "Tensor" for kind in returns) else None


def _checked(name: str, rule: Rule, results: int | None) -> Rule:
    """The rule, with answers that make no sense refused before they are used."""

    @wraps(rule)
    def answer(*args: Any, **kwargs: Any) -> Ways | Decided | None:
        given = rule(*args, **kwargs)
        operands = operands_in(*args, *kwargs.values())
        if given is None:
            return None
        if isinstance(given, Decided):
            _check_arity(name, given.ins, given.outs, Layout, len(operands), results)
            return replace(given, run=_on_plain(given.run))
        if not isinstance(given, Ways):
            raise RuleError(f"{name}: the rule returned a {type(given).__name__}: return Ways, Decided, or None")
        at = given.at

        def checked_at(mesh_dim: int) -> list[Way]:
            ways = [Way(*way) for way in at(mesh_dim)]
            for way in ways:
                _check_arity(name, way.ins, way.outs, Placement, len(operands), results)
            return ways

        if operands:
            checked_at(0)  # before anything is computed from them
        return replace(given, at=checked_at, run=_on_plain(given.run))

    return answer


def _on_plain(run: Run | None) -> Run:
    """The local call, on plain tensors: what an operator of a user saves for its backward is what it was given."""

    def plain(situation: Situation) -> Local:
        inner = run(situation) if run is not None else None

        def local(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
            args, kwargs = map_tensors(args, kwargs, alias)
            return func(*args, **kwargs) if inner is None else inner(func, args, kwargs)

        return local

    return plain


def _check_arity(
    name: str, ins: Sequence[Any], outs: Sequence[Any], kind: type, inputs: int, results: int | None
) -> None:
    for what, given, wanted in (("inputs", ins, inputs), ("outputs", outs, results)):
        if not all(isinstance(item, kind) for item in given):
            raise RuleError(f"{name}: {tuple(given)} for its {what}: each is a {kind.__name__}")
        if wanted is not None and len(given) != wanted:
            listed = ", ".join(map(str, given))
            raise RuleError(f"{name}: the rule has {len(given)} {what} ({listed}), the call {wanted}")


def pointwise(linear: Terms | None = None) -> Rule:
    """A rule for an operator that works element by element, on tensors that broadcast.

    `linear` says in what it is linear, as a sum of products of inputs: `[[0], [1]]` for an addition, `[[0, 1]]` for a
    product. Partial sums then need not be completed before.

    >>> import torch, shardwright as sw
    >>> from shardwright.testing import prove
    >>> assert not prove(torch.mul, torch.randn(5), torch.randn(5), rule=sw.rules.pointwise([[0, 1]])).wrong
    """

    def answer(*args: Any, **kwargs: Any) -> Ways:
        operands = operands_in(*args, *kwargs.values())
        ins, out = broadcast_labels(operands)
        shape = torch.broadcast_shapes(*(operand.shape for operand in operands))  # type: ignore[no-untyped-call]  # torch's stubs lack it
        return Ways(index_ways(operands, ins, [out], terms=linear), shapes=(tuple(shape),))

    return answer


def either(*ways: Way) -> Rule:
    """A rule that is a list of ways, beside that of having everything replicated.

    >>> import torch, shardwright as sw
    >>> from shardwright.testing import prove
    >>> rows = sw.rules.either(sw.rules.Way((sw.Shard(0),), (sw.Shard(0),)))
    >>> assert not prove(torch.fliplr, torch.randn(5, 2), rule=rows).wrong
    """
    if not ways:
        raise RuleError("either: give at least one way")
    whole = Way((REPLICATE,) * len(ways[0].ins), (REPLICATE,) * len(ways[0].outs))

    def answer(*_: Any, **__: Any) -> Ways:
        return Ways(lambda mesh_dim: [whole, *ways])  # noqa: ARG005  # the same on all of them

    return answer


def indexed(notation: str, *, linear: Terms | None = None, reduces: str | None = "sum", whole: str = "") -> Rule:
    """A rule in index notation: a letter for each dimension of each tensor, `"mk,kn->mn"`, "..." for any number.

    What carries the same letter is cut together. Where a letter of the inputs is missing in an output, that output of
    cut inputs is partial: a sum, or what `reduces` says (None: such letters are not cut). Letters in `whole` are
    never cut. `linear` is as in `pointwise`; without it, and with one product of all inputs in mind, give `[[0, 1]]`.
    Several outputs are separated by commas.

    >>> import torch, shardwright as sw
    >>> from shardwright.testing import prove
    >>> rule = sw.rules.indexed("...k,nk->...n", linear=[[0, 1]])
    >>> assert not prove(torch.nn.functional.linear, torch.randn(4, 2, 5), torch.randn(3, 5), rule=rule).wrong
    """
    left, arrow, right = notation.replace(" ", "").partition("->")
    terms, results = left.split(","), right.split(",")
    if not arrow or not set(right) <= {*left, ","} or any(_repeats(term) for term in (*terms, *results)):
        raise RuleError(
            f"{notation!r} is no index notation: inputs -> outputs, a letter a dimension, each letter of an output in "
            'an input, none twice in one tensor, as "mk,kn->mn"'
        )
    if linear is not None and any(place not in range(len(terms)) for term in linear for place in term):
        raise RuleError(f"{notation!r}: linear={linear} names inputs by place, 0 to {len(terms) - 1}")

    def answer(*args: Any, **kwargs: Any) -> Ways:
        operands = operands_in(*args, *kwargs.values())
        if len(operands) != len(terms):
            raise RuleError(f"{notation!r} has {len(terms)} inputs, the call {len(operands)} tensors")
        ins = [_labels(notation, term, operand) for term, operand in zip(terms, operands, strict=True)]
        sizes: dict[Any, int] = {}
        for labels, operand in zip(ins, operands, strict=True):
            for label, size in zip(labels, operand.shape, strict=True):
                sizes[label] = size if sizes.get(label, 1) == 1 else sizes[label]
        dots = sorted(label for label in sizes if isinstance(label, int))
        outs: list[list[Any]] = [_spread(result, dots) for result in results]
        cut: list[Labels] = [  # what broadcasts is never cut
            [label if size == sizes[label] else None for label, size in zip(labels, operand.shape, strict=True)]
            for labels, operand in zip(ins, operands, strict=True)
        ]
        shapes = tuple(tuple(sizes[label] for label in out) for out in outs)
        at = index_ways(operands, cut, outs, terms=linear, reduction=reduces, whole=set(whole))
        return Ways(at, shapes=shapes)

    return answer


def _repeats(term: str) -> bool:
    letters = term.replace("...", "", 1)
    return len(set(letters)) < len(letters) or not all(letter.isalpha() for letter in letters)


def _labels(notation: str, term: str, operand: Operand) -> list[Any]:
    """The labels of a tensor; dots count from their end, as broadcasting does."""
    letters = len(term.replace("...", ""))
    fits = operand.ndim >= letters if "..." in term else operand.ndim == letters
    if not fits:
        raise RuleError(f"{notation!r}: {term!r} stands for a tensor of {operand.ndim} dimensions, {operand.shape}")
    return _spread(term, list(range(letters - operand.ndim, 0)))


def _spread(term: str, dots: list[int]) -> list[Any]:
    before, found, after = term.partition("...")
    return [*before, *(dots if found else []), *after]
