"""Contractions in index notation: the matmul family and einsum."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from shardwright.layout import Shard
from shardwright.tensor.base.gradient_types import REPLICATE
from shardwright.tensor.base.registry import composite, rule
from shardwright.tensor.base.strategy import (
    Labels,
    Local,
    LocalContext,
    Operand,
    Strategies,
    Strategy,
    index_strategies,
)
from shardwright.tensor.dispatch.cache import mark_fast
from shardwright.tensor.rules.elementwise.pointwise import broadcast_labels, operands_in, pointwise

__all__: list[str] = []


def _contract(
    operands: list[Operand], ins: list[Labels], out: Labels, terms: list[list[int]] | None = None
) -> Strategies:
    return Strategies(index_strategies(operands, ins, [out], terms=terms or [list(range(len(operands)))]))


@rule("mm")
def _mm(input: Operand, mat2: Operand, **_: Any) -> Strategies:
    return _contract([input, mat2], ["mk", "kn"], "mn")


@rule("bmm")
def _bmm(input: Operand, mat2: Operand, **_: Any) -> Strategies:
    return _contract([input, mat2], ["bmk", "bkn"], "bmn")


@rule("mv")
def _mv(input: Operand, vec: Operand) -> Strategies:
    return _contract([input, vec], ["mk", "k"], "m")


@rule("dot", "vdot")
def _dot(input: Operand, tensor: Operand) -> Strategies:
    return _contract([input, tensor], ["k", "k"], "")


@rule("outer", "ger")
def _outer(input: Operand, vec2: Operand) -> Strategies:
    return _contract([input, vec2], ["m", "n"], "mn")


@rule("matmul", "linalg_matmul")
def _matmul(input: Operand, other: Operand) -> Strategies:
    left, right, out = _matmul_labels(input, other)
    return _contract([input, other], [left, right], out)


@rule("rmatmul")
def _rmatmul(input: Operand, other: Operand) -> Strategies:
    left, right, out = _matmul_labels(other, input)
    return _contract([input, other], [right, left], out)


def _matmul_labels(a: Operand, b: Operand) -> tuple[Labels, Labels, Labels]:
    """Return labels of a matmul: leading dimensions broadcast; a vector has no row or column dimension."""
    rows: list[Any] = ["m"] if a.ndim > 1 else []
    columns: list[Any] = ["n"] if b.ndim > 1 else []
    batch_a, batch_b = a.shape[:-2], b.shape[:-2]
    ndim = max(len(batch_a), len(batch_b))

    def batch(mine: tuple[int, ...], others: tuple[int, ...]) -> list[Any]:
        labels: list[Any] = []
        for index, size in enumerate(mine, start=ndim - len(mine)):
            other = index - (ndim - len(others))
            labels.append(index if size != 1 or other < 0 or others[other] == 1 else None)
        return labels

    out: list[Any] = [*range(ndim), *rows, *columns]
    return [*batch(batch_a, batch_b), *rows, "k"], [*batch(batch_b, batch_a), "k", *columns], out


@rule("linear")
def _linear(input: Operand, weight: Operand, bias: Operand | None = None) -> Strategies:
    batch = list(range(input.ndim - 1))
    out: Labels = [*batch, "n"] if weight.ndim == 2 else batch
    matrix: Labels = ["n", "k"] if weight.ndim == 2 else ["k"]
    if bias is None:
        return _contract([input, weight], [[*batch, "k"], matrix], out)
    return _contract([input, weight, bias], [[*batch, "k"], matrix, matrix[:-1]], out, [[0, 1], [2]])


def _add_product(left: str, right: str, out: str) -> Callable[..., Strategies | None]:
    def find_strategies(
        input: Operand, *factors: Operand, beta: Any = 1, alpha: Any = 1, **named: Any
    ) -> Strategies | None:
        del beta, alpha
        if list(named) != sorted(named):  # mat1 before mat2, batch1 before batch2, vec1 before vec2, mat before vec
            return None
        first, second = operands_in(*factors, *named.values())
        if (first.ndim, second.ndim) != (len(left), len(right)) or input.ndim > len(out):
            return None  # torch raises the error
        sizes = dict(zip(left + right, first.shape + second.shape, strict=True))
        last = out[len(out) - input.ndim :]
        added: Labels = [label if size == sizes[label] else None for label, size in zip(last, input.shape, strict=True)]
        strategies = _contract([input, first, second], [added, left, right], out, [[0], [1, 2]])
        return (
            strategies
            if input.shape == tuple(sizes[label] for label in out)
            else replace(strategies, run=_expand_first)
        )

    return find_strategies


rule("addmm", numbers_by_type=True)(_add_product("mk", "kn", "mn"))
rule("addmv", numbers_by_type=True)(_add_product("mk", "k", "m"))
rule("addbmm", numbers_by_type=True)(_add_product("bmk", "bkn", "mn"))
rule("baddbmm", numbers_by_type=True)(_add_product("bmk", "bkn", "bmn"))
rule("addr", numbers_by_type=True)(_add_product("m", "n", "mn"))


def _expand_first(context: LocalContext) -> Local:
    """Expand the added tensor explicitly: with an empty shard, torch gives the result the shape of that tensor."""
    local = context.outs[0].local_shape(context.rank)
    return lambda func, args, kwargs: func(args[0].expand(local), *args[1:], **kwargs)


@rule("einsum")
def _einsum(equation: Any, *tensors: Any) -> Strategies | None:
    operands = list(tensors[0]) if len(tensors) == 1 and isinstance(tensors[0], list | tuple) else list(tensors)
    if not isinstance(equation, str):
        return None
    left, arrow, right = equation.replace(" ", "").partition("->")
    terms = left.split(",")
    if len(terms) != len(operands):
        return None  # torch raises the error
    dotted = [(term, operand) for term, operand in zip(terms, operands, strict=True) if "..." in term]
    dots = max((operand.ndim - len(term.replace("...", "")) for term, operand in dotted), default=0)
    ins = [_einsum_labels(term, operand.ndim) for term, operand in zip(terms, operands, strict=True)]
    if not arrow:
        letters = [label for labels in ins for label in labels if isinstance(label, str)]
        right = "..." * bool(dots) + "".join(sorted({x for x in letters if letters.count(x) == 1}))
    out = _einsum_labels(right, len(right.replace("...", "")) + (dots if "..." in right else 0))
    # Dimensions that share a label within one tensor (a diagonal) are not sharded.
    diagonal = {label for labels in ins for label in labels if labels.count(label) > 1}
    sizes: dict[Any, int] = {}
    for labels, operand in zip(ins, operands, strict=True):
        for label, size in zip(labels, operand.shape, strict=True):
            sizes[label] = max(sizes.get(label, 1), size)
    sharded: list[Labels] = [
        [
            label if size == sizes[label] and label not in diagonal else None
            for label, size in zip(labels, operand.shape, strict=True)
        ]
        for labels, operand in zip(ins, operands, strict=True)
    ]
    return replace(_contract(operands, sharded, out), fresh=len(operands) > 1)  # with one operand it may be a view


@rule("inner")
def _inner(input: Operand, other: Operand) -> Strategies:
    if not input.ndim or not other.ndim:
        return pointwise(lambda *_: [[0, 1]])(input, other)
    left, right = [*range(input.ndim - 1)], [*range(input.ndim - 1, input.ndim + other.ndim - 2)]
    return _contract([input, other], [[*left, "k"], [*right, "k"]], [*left, *right])


@rule("tensordot")
def _tensordot(a: Operand, b: Operand, dims: Any = 2, dims_other: Any = None, **_: Any) -> Strategies | None:
    """`dims` is a number of dimensions, or the dimensions of both; torch's inner function takes them separately."""
    if dims_other is not None:
        dims = (dims, dims_other)
    if isinstance(dims, int):
        dims = (range(a.ndim - dims, a.ndim), range(dims))
    if not isinstance(dims, list | tuple) or len(dims) != 2:
        return None
    first, second = ([group] if isinstance(group, int) else list(group) for group in dims)
    left: list[Any] = [("a", d) for d in range(a.ndim)]
    right: list[Any] = [("b", d) for d in range(b.ndim)]
    for dim, other in zip(first, second, strict=True):
        first_dim, second_dim = a.dim(dim), b.dim(other)
        # A contracted dimension of size 1 broadcasts.
        left[first_dim] = dim if a.shape[first_dim] == b.shape[second_dim] or b.shape[second_dim] == 1 else None
        right[second_dim] = dim if a.shape[first_dim] == b.shape[second_dim] or a.shape[first_dim] == 1 else None
    contracted = {a.dim(d) for d in first}, {b.dim(d) for d in second}
    out = [label for d, label in enumerate(left) if d not in contracted[0]]
    out += [label for d, label in enumerate(right) if d not in contracted[1]]
    return _contract([a, b], [left, right], out)


@rule("linalg_multi_dot", "chain_matmul")
def _multi_dot(*given: Any, **_: Any) -> Strategies:
    """A chain: each matrix shares a label with the next; the ends may be vectors."""
    tensors = operands_in(*given)
    ins: list[Labels] = [[index, index + 1] for index in range(len(tensors))]
    ins[0] = ins[0][2 - tensors[0].ndim :]
    ins[-1] = ins[-1][: tensors[-1].ndim]
    out = [*ins[0][:-1], *ins[-1][1:]]
    return _contract(tensors, ins, out)


@rule("linalg_vecdot")
def _vecdot(x: Operand, y: Operand, *, dim: int = -1) -> Strategies:
    ins, out = broadcast_labels([x, y])
    along = dim % max(len(out), 1)
    return _contract([x, y], ins, [label for label in out if label != along])


@rule("bilinear")
def _bilinear(input1: Operand, input2: Operand, weight: Operand, bias: Operand | None = None) -> Strategies:
    batch = list(range(input1.ndim - 1))
    ins: list[Labels] = [[*batch, "i"], [*batch, "j"], list("oij"), ["o"]]
    terms = [[0, 1, 2]] if bias is None else [[0, 1, 2], [3]]
    strategies = _contract(operands_in(input1, input2, weight, bias), ins[: len(terms) + 2], [*batch, "o"], terms)
    return replace(strategies, run=_bilinear_by_einsum)


def _bilinear_by_einsum(context: LocalContext) -> Local | None:
    """torch requires at least one feature: on ranks without features, use einsum."""
    if all(context.ins[2].local_shape(context.rank)):
        return None

    def local(_: Any, args: Any, kwargs: Any) -> Any:
        given: list[Any] = [*args, *kwargs.values()]
        first, second, weight, *bias = given
        product = torch.einsum("...i,...j,oij->...o", first, second, weight)
        return product if not bias or bias[0] is None else product + bias[0]

    return local


@rule("block_diag")
def _block_diag(*tensors: Any) -> Strategies:
    """Linear in every block: each is a term of its own."""
    operands = operands_in(*tensors)
    ins: list[Labels] = [[None] * operand.ndim for operand in operands]
    return _contract(operands, ins, [], [[index] for index in range(len(operands))])


@rule("kron")
def _kron(input: Operand, other: Operand) -> Strategies:
    """Outer product of blocks: sharded like `input`, in multiples of the sizes of `other`."""
    ndim = max(input.ndim, other.ndim)
    sizes = [[1] * (ndim - operand.ndim) + list(operand.shape) for operand in (input, other)]
    mesh = input.layout.mesh
    linear = index_strategies([input, other], [[None] * input.ndim, [None] * other.ndim], [[]], terms=[[0, 1]])

    def at(mesh_dim: int) -> list[Strategy]:
        strategies = linear(mesh_dim)
        for dim, (size, times) in enumerate(zip(*sizes, strict=True)):
            # However often it is split, every shard of the result is a multiple of the size of `other`.
            if dim >= ndim - input.ndim and (size % mesh.size == 0 or times == 1):
                strategies.append(Strategy((Shard(dim - (ndim - input.ndim)), REPLICATE), (Shard(dim),)))
            if dim >= ndim - other.ndim and size == 1:
                strategies.append(Strategy((REPLICATE, Shard(dim - (ndim - other.ndim))), (Shard(dim),)))
        return strategies

    return Strategies(at)


def _einsum_labels(term: str, ndim: int) -> list[Any]:
    before, dots, after = term.partition("...")
    middle = ndim - len(before) - len(after) if dots else 0
    # Ellipses align at their end, as in broadcasting.
    return [*before, *range(-middle, 0), *after]


@composite("rmatmul")
def _reflected(self: Any, other: Any) -> Any:
    return other @ self


@rule("linalg_cross")
def _linalg_cross(input: Operand, other: Operand, *, dim: int = -1) -> Strategies:
    return _cross_along(input, other, dim)


@rule("cross")
def _cross(input: Operand, other: Operand, dim: int | None = None) -> Strategies:
    if dim is not None:
        return _cross_along(input, other, dim)
    # The first dimension of size 3, by the global shape.
    first = next((d for d, size in enumerate(input.shape) if size == 3), -1)
    strategies = _cross_along(input, other, first)
    return replace(strategies, run=lambda _: lambda func, args, kwargs: func(*args[:2], **{**kwargs, "dim": first}))


def _cross_along(input: Operand, other: Operand, dim: int) -> Strategies:
    ins, out = broadcast_labels([input, other])
    along = dim % len(out)
    return Strategies(index_strategies([input, other], ins, [out], terms=[[0, 1]], whole={along}))


mark_fast("mm", "bmm", "mv", "matmul", "dot", "outer", "linear")
