"""How users write rules: element by element, by strategies, or in index notation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import torch

from shardwright.errors import RuleError
from shardwright.layout import Partial
from shardwright.tensor.base.gradient_types import REPLICATE
from shardwright.tensor.base.registry import Rule
from shardwright.tensor.base.strategy import Labels, Operand, Strategies, Strategy, index_strategies
from shardwright.tensor.extend.claims import spelled
from shardwright.tensor.rules.elementwise.pointwise import broadcast_labels, operands_in

__all__ = ["either", "indexed", "pointwise"]

Terms: TypeAlias = Sequence[Sequence[int]]


def _check_linear(what: str, linear: Terms | None, inputs: int | None) -> None:
    """Refuses terms that are no sum of products of inputs; how many there are may not be known yet."""
    if linear is None:
        return
    for term in linear:
        wrong = [place for place in term if place < 0 or (inputs is not None and place >= inputs)]
        if wrong:
            last = " and on" if inputs is None else f" to {inputs - 1}"
            raise RuleError(f"{what}: linear={linear} has {wrong[0]}: it names inputs by place, 0{last}")
    if not linear or not all(term and len(set(term)) == len(term) for term in linear):
        raise RuleError(
            f"{what}: linear={linear} is no sum of products: list terms of inputs, each once in a term, as [[0], [1]] "
            "or [[0, 1]], or None where it is not linear"
        )


def pointwise(linear: Terms | None = None) -> Rule:
    """A rule for an operator that works element by element, on tensors that broadcast.

    `linear` says in what it is linear, as a sum of products of inputs: `[[0], [1]]` for an addition, `[[0, 1]]` for a
    product. Partial sums then need not be completed before.

    >>> import torch, shardwright as sw
    >>> from shardwright.testing import prove
    >>> assert not prove(torch.mul, torch.randn(5), torch.randn(5), rule=sw.rules.pointwise([[0, 1]])).wrong
    """

    what = "pointwise()" if linear is None else f"pointwise({linear})"
    _check_linear(what, linear, None)

    def answer(*args: Any, **kwargs: Any) -> Strategies:
        operands = operands_in(*args, *kwargs.values())
        _check_linear(what, linear, len(operands))
        ins, out = broadcast_labels(operands)
        shape = torch.broadcast_shapes(*(operand.shape for operand in operands))  # type: ignore[no-untyped-call]  # torch's stubs lack it
        return Strategies(index_strategies(operands, ins, [out], terms=linear), shapes=(tuple(shape),))

    answer.__name__ = what
    return answer


def either(*strategies: Strategy) -> Rule:
    """A rule that is a list of strategies, beside that of having everything replicated.

    Strategies that cut a dimension an input lacks are left out for that call. The sizes of the outputs are asked of the
    operator's kernel for meta tensors: an operator of your own needs one, see torch's `register_fake`.

    >>> import torch, shardwright as sw
    >>> from shardwright.testing import prove
    >>> rows = sw.rules.either(sw.rules.Strategy((sw.Shard(0),), (sw.Shard(0),)))
    >>> assert not prove(torch.fliplr, torch.randn(5, 2), rule=rows).wrong
    """
    if not strategies:
        raise RuleError("either: give at least one strategy")
    whole = Strategy((REPLICATE,) * len(strategies[0].ins), (REPLICATE,) * len(strategies[0].outs))

    def answer(*_: Any, **__: Any) -> Strategies:
        return Strategies(lambda mesh_dim: [whole, *strategies])  # noqa: ARG005  # the same on all of them

    answer.__name__ = f"either({'; '.join(map(spelled, strategies))})"
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
    _check_linear(repr(notation), linear, len(terms))
    if reduces is not None and reduces not in Partial.reductions:
        raise RuleError(f"{notation!r}: reduces={reduces!r} is none of {', '.join(Partial.reductions)}, or None")
    unknown = sorted(set(whole) - {letter for letter in left if letter.isalpha()})
    if unknown:
        raise RuleError(f"{notation!r}: whole={whole!r} has {unknown[0]!r}: give letters of its inputs")

    def answer(*args: Any, **kwargs: Any) -> Strategies:
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
        at = index_strategies(operands, cut, outs, terms=linear, reduction=reduces, whole=set(whole))
        return Strategies(at, shapes=shapes)

    answer.__name__ = f"indexed({notation!r})"
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
