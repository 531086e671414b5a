"""Rules that users write: pointwise, a list of strategies, or index notation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import torch

from shardwright.errors import RuleError
from shardwright.layout import Partial
from shardwright.tensor.base.gradient_types import REPLICATE
from shardwright.tensor.base.registry import Rule
from shardwright.tensor.base.strategy import Labels, Operand, Strategies, Strategy, index_strategies
from shardwright.tensor.extend.claims import describe
from shardwright.tensor.rules.elementwise.pointwise import broadcast_labels, operands_in

__all__ = ["either", "indexed", "pointwise"]

Terms: TypeAlias = Sequence[Sequence[int]]


def _check_linear(what: str, linear: Terms | None, inputs: int | None) -> None:
    """Raise unless `linear` is a sum of products of inputs; None for `inputs` if their number is not known yet."""
    if linear is None:
        return
    for term in linear:
        wrong = [index for index in term if index < 0 or (inputs is not None and index >= inputs)]
        if wrong:
            allowed = "0 and up" if inputs is None else f"0 to {inputs - 1}"
            raise RuleError(f"{what}: linear={linear} has {wrong[0]}, but indices of inputs are {allowed}")
    if not linear or not all(term and len(set(term)) == len(term) for term in linear):
        raise RuleError(
            f"{what}: linear must be a sum of products such as [[0], [1]] or [[0, 1]], each input at most once in a "
            f"term, or None if the operator is not linear, got {linear}"
        )


def pointwise(linear: Terms | None = None) -> Rule:
    """Return a rule for a pointwise operator on tensors that broadcast.

    `linear` describes the inputs in which it is linear, as a sum of products: `[[0], [1]]` for an addition, `[[0, 1]]`
    for a product. Partial sums then need not be reduced first.

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
    """Return a rule that offers these strategies, and the one with everything replicated.

    Strategies that shard a dimension an input does not have are left out for that call. The sizes of the outputs come
    from the operator's kernel for meta tensors: a custom operator needs one, see torch's `register_fake`.

    >>> import torch, shardwright as sw
    >>> from shardwright.testing import prove
    >>> rows = sw.rules.either(sw.rules.Strategy((sw.Shard(0),), (sw.Shard(0),)))
    >>> assert not prove(torch.fliplr, torch.randn(5, 2), rule=rows).wrong
    """
    if not strategies:
        raise RuleError("either needs at least one strategy, got none")
    replicated = Strategy((REPLICATE,) * len(strategies[0].ins), (REPLICATE,) * len(strategies[0].outs))

    def answer(*_: Any, **__: Any) -> Strategies:
        return Strategies(lambda mesh_dim: [replicated, *strategies])  # noqa: ARG005  # the same on all of them

    answer.__name__ = f"either({'; '.join(map(describe, strategies))})"
    return answer


def indexed(notation: str, *, linear: Terms | None = None, reduces: str | None = "sum", whole: str = "") -> Rule:
    """Return a rule in index notation, like `"mk,kn->mn"`: a letter per dimension, "..." for any number of them.

    Dimensions with the same letter are sharded together. If a letter of the inputs is missing in an output, sharding it
    makes that output partial: a sum, or the reduction `reduces` (None: such letters are not sharded). Letters in
    `whole` are never sharded. `linear` is as in `pointwise`: pass `[[0, 1]]` for a product of two inputs. Several
    outputs are separated by commas.

    >>> import torch, shardwright as sw
    >>> from shardwright.testing import prove
    >>> rule = sw.rules.indexed("...k,nk->...n", linear=[[0, 1]])
    >>> assert not prove(torch.nn.functional.linear, torch.randn(4, 2, 5), torch.randn(3, 5), rule=rule).wrong
    """
    left, arrow, right = notation.replace(" ", "").partition("->")
    terms, results = left.split(","), right.split(",")
    if not arrow or not set(right) <= {*left, ","} or any(_repeats(term) for term in (*terms, *results)):
        raise RuleError(
            f"{notation!r} is not an index notation: write inputs -> outputs, one letter per dimension, each letter of "
            'an output in an input, none twice in one tensor, as in "mk,kn->mn"'
        )
    _check_linear(repr(notation), linear, len(terms))
    if reduces is not None and reduces not in Partial.reductions:
        raise RuleError(
            f"{notation!r}: reduces must be None or one of {', '.join(Partial.reductions)}, got {reduces!r}"
        )
    unknown = sorted(set(whole) - {letter for letter in left if letter.isalpha()})
    if unknown:
        raise RuleError(f"{notation!r}: whole must be letters of the inputs, got {unknown[0]!r} in {whole!r}")

    def answer(*args: Any, **kwargs: Any) -> Strategies:
        operands = operands_in(*args, *kwargs.values())
        if len(operands) != len(terms):
            raise RuleError(f"{notation!r} has {len(terms)} inputs, but the call has {len(operands)} tensors")
        ins = [_labels(notation, term, operand) for term, operand in zip(terms, operands, strict=True)]
        sizes: dict[Any, int] = {}
        for labels, operand in zip(ins, operands, strict=True):
            for label, size in zip(labels, operand.shape, strict=True):
                sizes[label] = size if sizes.get(label, 1) == 1 else sizes[label]
        dots = sorted(label for label in sizes if isinstance(label, int))
        outs: list[list[Any]] = [_expand(result, dots) for result in results]
        sharded: list[Labels] = [  # broadcast dimensions are never sharded
            [label if size == sizes[label] else None for label, size in zip(labels, operand.shape, strict=True)]
            for labels, operand in zip(ins, operands, strict=True)
        ]
        shapes = tuple(tuple(sizes[label] for label in out) for out in outs)
        at = index_strategies(operands, sharded, outs, terms=linear, reduction=reduces, whole=set(whole))
        return Strategies(at, shapes=shapes)

    answer.__name__ = f"indexed({notation!r})"
    return answer


def _repeats(term: str) -> bool:
    letters = term.replace("...", "", 1)
    return len(set(letters)) < len(letters) or not all(letter.isalpha() for letter in letters)


def _labels(notation: str, term: str, operand: Operand) -> list[Any]:
    """Return the labels of a tensor; those of "..." count from the end, as in broadcasting."""
    letters = len(term.replace("...", ""))
    fits = operand.ndim >= letters if "..." in term else operand.ndim == letters
    if not fits:
        raise RuleError(f"{notation!r}: {term!r} does not fit a tensor of {operand.ndim} dimensions, {operand.shape}")
    return _expand(term, list(range(letters - operand.ndim, 0)))


def _expand(term: str, dots: list[int]) -> list[Any]:
    before, ellipsis, after = term.partition("...")
    return [*before, *(dots if ellipsis else []), *after]
