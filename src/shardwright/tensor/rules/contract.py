"""Contractions: the matmul family and einsum, in their own notation."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from shardwright.tensor.registry import composite, mark_fast, rule
from shardwright.tensor.rules.notation import Labels, Local, Operand, Situation, Ways, index_ways
from shardwright.tensor.rules.pointwise import broadcast_labels

__all__: list[str] = []


def _contract(operands: list[Operand], ins: list[Labels], out: Labels, terms: list[list[int]] | None = None) -> Ways:
    return Ways(index_ways(operands, ins, [out], terms=terms or [list(range(len(operands)))]))


@rule("mm")
def _mm(input: Operand, mat2: Operand, **_: Any) -> Ways:
    return _contract([input, mat2], ["mk", "kn"], "mn")


@rule("bmm")
def _bmm(input: Operand, mat2: Operand, **_: Any) -> Ways:
    return _contract([input, mat2], ["bmk", "bkn"], "bmn")


@rule("mv")
def _mv(input: Operand, vec: Operand) -> Ways:
    return _contract([input, vec], ["mk", "k"], "m")


@rule("dot", "vdot")
def _dot(input: Operand, tensor: Operand) -> Ways:
    return _contract([input, tensor], ["k", "k"], "")


@rule("outer", "ger")
def _outer(input: Operand, vec2: Operand) -> Ways:
    return _contract([input, vec2], ["m", "n"], "mn")


@rule("matmul", "linalg_matmul")
def _matmul(input: Operand, other: Operand) -> Ways:
    left, right, out = _matmul_labels(input, other)
    return _contract([input, other], [left, right], out)


@rule("rmatmul")
def _rmatmul(input: Operand, other: Operand) -> Ways:
    left, right, out = _matmul_labels(other, input)
    return _contract([input, other], [right, left], out)


def _matmul_labels(a: Operand, b: Operand) -> tuple[Labels, Labels, Labels]:
    """Vectors lose their one dimension again; leading dimensions broadcast."""
    rows: list[Any] = ["m"] if a.ndim > 1 else []
    columns: list[Any] = ["n"] if b.ndim > 1 else []
    batch_a, batch_b = a.shape[:-2], b.shape[:-2]
    ndim = max(len(batch_a), len(batch_b))

    def batch(mine: tuple[int, ...], others: tuple[int, ...]) -> list[Any]:
        labels: list[Any] = []
        for place, size in enumerate(mine, start=ndim - len(mine)):
            other = place - (ndim - len(others))
            labels.append(place if size != 1 or other < 0 or others[other] == 1 else None)
        return labels

    out: list[Any] = [*range(ndim), *rows, *columns]
    return [*batch(batch_a, batch_b), *rows, "k"], [*batch(batch_b, batch_a), "k", *columns], out


@rule("linear")
def _linear(input: Operand, weight: Operand, bias: Operand | None = None) -> Ways:
    batch = list(range(input.ndim - 1))
    out: Labels = [*batch, "n"] if weight.ndim == 2 else batch
    matrix: Labels = ["n", "k"] if weight.ndim == 2 else ["k"]
    if bias is None:
        return _contract([input, weight], [[*batch, "k"], matrix], out)
    return _contract([input, weight, bias], [[*batch, "k"], matrix, matrix[:-1]], out, [[0, 1], [2]])


@rule("addmm", "addmv", "addbmm", "baddbmm", "addr", numbers_by_type=True)
def _add_product(input: Operand, *factors: Operand, beta: Any = 1, alpha: Any = 1, **named: Any) -> Ways | None:
    del beta, alpha
    if named:
        return None
    first, second = factors
    left, right = {(2, 2): ("mk", "kn"), (2, 1): ("mk", "k"), (1, 1): ("m", "n"), (3, 3): ("bmk", "bkn")}[
        first.ndim, second.ndim
    ]
    if (first.ndim, second.ndim) == (3, 3):
        out = "bmn" if input.ndim == 3 else "mn"
    else:
        out = {("mk", "kn"): "mn", ("mk", "k"): "m", ("m", "n"): "mn"}[left, right]
    sizes = dict(zip(left + right, first.shape + second.shape, strict=True))
    last = out[len(out) - input.ndim :]
    added: Labels = [label if size == sizes[label] else None for label, size in zip(last, input.shape, strict=True)]
    ways = _contract([input, first, second], [added, left, right], out, [[0], [1, 2]])
    return ways if input.shape == tuple(sizes[label] for label in out) else replace(ways, run=_expanding_first)


def _expanding_first(situation: Situation) -> Local:
    """Broadcast by hand: beside an empty shard, torch takes the shape of what is added for that of the result."""
    local = situation.outs[0].local_shape(situation.rank)
    return lambda func, args, kwargs: func(args[0].expand(local), *args[1:], **kwargs)


@rule("einsum")
def _einsum(equation: Any, *tensors: Any) -> Ways | None:
    operands = list(tensors[0]) if len(tensors) == 1 and isinstance(tensors[0], list | tuple) else list(tensors)
    if not isinstance(equation, str):
        return None
    left, arrow, right = equation.replace(" ", "").partition("->")
    terms = left.split(",")
    if len(terms) != len(operands):
        return None  # torch says what is wrong with it
    dotted = [(term, operand) for term, operand in zip(terms, operands, strict=True) if "..." in term]
    dots = max((operand.ndim - len(term.replace("...", "")) for term, operand in dotted), default=0)
    ins = [_einsum_labels(term, operand.ndim) for term, operand in zip(terms, operands, strict=True)]
    if not arrow:
        letters = [label for labels in ins for label in labels if isinstance(label, str)]
        right = "..." * bool(dots) + "".join(sorted({x for x in letters if letters.count(x) == 1}))
    out = _einsum_labels(right, len(right.replace("...", "")) + (dots if "..." in right else 0))
    if any(len(set(labels)) != len(labels) for labels in ins):
        return None  # a diagonal: two dimensions of one tensor share a label
    sizes: dict[Any, int] = {}
    for labels, operand in zip(ins, operands, strict=True):
        for label, size in zip(labels, operand.shape, strict=True):
            sizes[label] = max(sizes.get(label, 1), size)
    cut: list[Labels] = [
        [label if size == sizes[label] else None for label, size in zip(labels, operand.shape, strict=True)]
        for labels, operand in zip(ins, operands, strict=True)
    ]
    return replace(_contract(operands, cut, out), fresh=len(operands) > 1)  # of one tensor, it may be a view


def _einsum_labels(term: str, ndim: int) -> list[Any]:
    before, dots, after = term.partition("...")
    middle = ndim - len(before) - len(after) if dots else 0
    # Dots align at their end, as broadcasting does.
    return [*before, *range(-middle, 0), *after]


@composite("rmatmul")
def _reflected(self: Any, other: Any) -> Any:
    return other @ self


@rule("linalg_cross")
def _linalg_cross(input: Operand, other: Operand, *, dim: int = -1) -> Ways:
    return _product_along(input, other, dim)


@rule("cross")
def _cross(input: Operand, other: Operand, dim: int | None = None) -> Ways:
    if dim is None:
        dim = next((d for d, size in enumerate(input.shape) if size == 3), -1)
    return _product_along(input, other, dim)


def _product_along(input: Operand, other: Operand, dim: int) -> Ways:
    ins, out = broadcast_labels([input, other])
    spread = dim % len(out)
    return Ways(index_ways([input, other], ins, [out], terms=[[0, 1]], whole={spread}))


mark_fast("mm", "bmm", "mv", "matmul", "dot", "outer", "linear")
