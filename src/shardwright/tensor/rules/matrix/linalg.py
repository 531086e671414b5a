"""Linear algebra on batches of matrices: a sharded batch is computed where it is.

A table gives the matrix dimensions of every operator; the dimensions before them are the batch, and broadcast. An
upper-case letter is a dimension that must be replicated; a lower-case one may be sharded, such as the columns of
right-hand sides, which are solved independently. LAPACK gets one matrix at a time, so signs and order of its results
do not depend on the other matrices of the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import prod
from typing import Any

import torch

from shardwright.tensor.base.gradient_types import REPLICATE
from shardwright.tensor.base.registry import composite, rule
from shardwright.tensor.base.strategy import (
    Label,
    Labels,
    Local,
    LocalContext,
    Operand,
    Strategies,
    Strategy,
    index_strategies,
)
from shardwright.tensor.dispatch.arguments import tensors_in
from shardwright.tensor.rules.elementwise.pointwise import operands_in

__all__: list[str] = []

Terms = Sequence[Sequence[int]]

# Operators of one matrix, by the matrix dimensions of the input and of each output. In place of an output, "#" is one
# integer per matrix, which does not depend on sharded columns, and "-" an empty tensor.
ONE_MATRIX = {
    "MM->MM": """cholesky linalg_cholesky cholesky_inverse linalg_inv inverse linalg_matrix_power matrix_power
    linalg_matrix_exp matrix_exp""",
    "MM->MM,#": "linalg_cholesky_ex linalg_inv_ex",
    "MM->": "linalg_det det logdet",
    "MM->,": "linalg_slogdet slogdet",
    "MM->M,MM": "linalg_eig linalg_eigh",
    "MM->M": "linalg_eigvals linalg_eigvalsh",
    "MM->MM,M": "linalg_ldl_factor",
    "MM->MM,M,#": "linalg_ldl_factor_ex",
    "MN->MN,K": "linalg_lu_factor",
    "MN->MN,K,#": "linalg_lu_factor_ex _lu_with_info",
    "MN->MK,KN": "qr",
    "MN->MK,K,KN": "svd linalg_svd",
    "MN->K": "linalg_svdvals",
}
# Solvers, with the index of the right-hand side: its columns are independent, and the operator is linear in them.
SOLVES = {
    "cholesky_solve": ("Mk,MM->Mk", 0),
    "lu_solve": ("Mk,MM,M->Mk", 0),
    "linalg_ldl_solve": ("MM,M,Mk->Mk", 2),
}


def _matrix_labels(term: str) -> list[Label]:
    """Return the label of each matrix dimension; None, never sharded, for upper-case letters."""
    return [None if letter.isupper() else letter for letter in term if letter != "#"]


def batched(spec: str, operands: Sequence[Operand], terms: Terms | None = None) -> Strategies | None:
    """Return the strategies of an operator on batches of matrices; None if the operands are not matrices."""
    left, _, right = spec.partition("->")
    cores = [_matrix_labels(term) for term in left.split(",")]
    if len(cores) != len(operands) or any(o.ndim < len(core) for o, core in zip(operands, cores, strict=True)):
        return None
    batches = [operand.shape[: operand.ndim - len(core)] for operand, core in zip(operands, cores, strict=True)]
    shape = torch.broadcast_shapes(*batches)  # type: ignore[no-untyped-call]  # untyped in torch
    ins: list[Labels] = []
    for batch, core in zip(batches, cores, strict=True):
        first = len(shape) - len(batch)
        batch_labels = [first + d if size == shape[first + d] else None for d, size in enumerate(batch)]
        ins.append([*batch_labels, *core])
    outs = [[] if term == "-" else [*range(len(shape)), *_matrix_labels(term)] for term in right.split(",")]
    at = index_strategies(operands, ins, outs, terms=terms, reduction="sum" if terms or "-" in right else None)
    replicated = {index for index, term in enumerate(right.split(",")) if term in ("#", "-")}
    return Strategies(_replicate_outputs(at, replicated) if replicated else at)


def _replicate_outputs(at: Callable[[int], list[Strategy]], replicated: set[int]) -> Callable[[int], list[Strategy]]:
    """Replicate these outputs where a strategy makes them partial: they do not depend on what it shards or sums."""

    def with_replicated(mesh_dim: int) -> list[Strategy]:
        return [
            Strategy(
                strategy.ins,
                tuple(REPLICATE if i in replicated and p.is_partial() else p for i, p in enumerate(strategy.outs)),
            )
            for strategy in at(mesh_dim)
        ]

    return with_replicated


def with_meta_shapes(dtypes: Sequence[torch.dtype | None]) -> Callable[[LocalContext], Local]:
    """Return a local call for operators without a meta kernel: on meta tensors, it returns empty outputs."""

    def run(context: LocalContext) -> Local:
        shapes = [layout.local_shape(context.rank) for layout in context.outs]

        def local(func: Any, args: Any, kwargs: Any) -> Any:
            if not args[0].is_meta:
                return func(*args, **kwargs)
            outs = [args[0].new_empty(shape, dtype=dtype) for shape, dtype in zip(shapes, dtypes, strict=True)]
            return getattr(torch.return_types, func.__name__)(outs) if len(outs) > 1 else outs[0]

        return local

    return run


def _by_keyword(kwargs: dict[str, Any]) -> bool:
    """True if several tensors were passed by keyword: their order is the caller's, not that of the signature."""
    return len(operands_in(*kwargs.values())) > 1


def _rule_for(spec: str, terms: Terms | None = None) -> Callable[..., Strategies | None]:
    """Return the rule of an operator whose matrix dimensions are `spec`."""

    def find_strategies(*args: Any, **kwargs: Any) -> Strategies | None:
        return None if _by_keyword(kwargs) else batched(spec, operands_in(*args, *kwargs.values()), terms)

    return find_strategies


for _spec, _names in ONE_MATRIX.items():
    rule(*_names.split())(_rule_for(_spec))
for _name, (_spec, _linear) in SOLVES.items():
    rule(_name)(_rule_for(_spec, [[_linear]]))
rule("triangular_solve")(_rule_for("MN,MM->MN,MM"))


def _connect_empty(context: LocalContext) -> Local | None:
    """Return a local call that adds a zero gradient to empty results.

    Torch gives them none for these operators, and the other ranks would wait for this one in backward.
    """
    if all(context.outs[0].local_shape(context.rank)):
        return None

    def local(func: Any, args: Any, kwargs: Any) -> Any:
        result = func(*args, **kwargs)
        for tensor in tensors_in([*args, *kwargs.values()]):
            result = result + tensor.sum().to(result.dtype)
        return result

    return local


@rule("linalg_cond")
def _cond(A: Operand, p: Any = None) -> Strategies | None:  # noqa: N803  # torch's name
    del p
    return _with_gradient(batched("MM->", [A]))


@rule("linalg_householder_product", "orgqr")
def _householder(input: Operand, tau: Operand) -> Strategies | None:
    return _with_gradient(batched("MN,K->MN", [input, tau]))


def _with_gradient(strategies: Strategies | None) -> Strategies | None:
    """Return these strategies with a gradient for empty shards, see `_connect_empty`."""
    return None if strategies is None else replace(strategies, run=_connect_empty)


@rule("lu")
def _lu_old(A: Operand, pivot: bool = True, get_infos: bool = False) -> Strategies | None:  # noqa: N803  # torch's name
    del pivot
    return batched("MN->MN,K,#" if get_infos else "MN->MN,K", [A])


@rule("linalg_qr")
def _qr(A: Operand, mode: str = "reduced") -> Strategies | None:  # noqa: N803  # torch's name
    return batched("MN->-,KN" if mode == "r" else "MN->MK,KN", [A])


@rule("linalg_lu")
def _lu(A: Operand, *, pivot: bool = True) -> Strategies | None:  # noqa: N803  # torch's name
    return batched("MN->MM,MK,KN" if pivot else "MN->-,MK,KN", [A])


@rule("lu_unpack")
def _lu_unpack(
    LU_data: Operand,  # noqa: N803  # torch's name
    LU_pivots: Operand,  # noqa: N803  # torch's name
    unpack_data: bool = True,
    unpack_pivots: bool = True,
) -> Strategies | None:
    outs = ["MM" if unpack_pivots else "-", *(["MK", "KN"] if unpack_data else ["-", "-"])]
    return batched(f"MN,K->{','.join(outs)}", [LU_data, LU_pivots])


@rule("geqrf")
def _geqrf(input: Operand) -> Strategies | None:
    strategies = batched("MN->MN,K", [input])
    if strategies is None:
        return None
    return Strategies(
        strategies.at, with_meta_shapes((None, None)), shapes=(input.shape, (*input.shape[:-2], min(input.shape[-2:])))
    )


@rule("ormqr")
def _ormqr(
    input: Operand, tau: Operand, other: Operand, left: bool = True, transpose: bool = False
) -> Strategies | None:
    del transpose
    return _with_gradient(batched("MN,K,Mk->Mk" if left else "MN,K,kM->kM", [input, tau, other], [[2]]))


def _is_vector(matrix: Operand, other: Operand) -> bool:
    """True if a right-hand side is one vector per matrix, by torch's criterion."""
    return other.ndim == 1 or (matrix.ndim - 1 == other.ndim and other.shape == matrix.shape[:-1])


def _right_hand_side(matrix: Operand, other: Operand, left: bool) -> str:
    return "M" if _is_vector(matrix, other) else "Mk" if left else "kM"


def _keep_columns(strategies: Strategies | None, matrix: Operand, other: Operand) -> Strategies | None:
    """Keep torch from taking columns for vectors: a shard of columns may have the shape of one vector per matrix."""
    if strategies is None or matrix.ndim - 1 != other.ndim or _is_vector(matrix, other):
        return strategies

    def local(func: Any, args: Any, kwargs: Any) -> Any:
        if len(args) > 1:
            args = [args[0], args[1].unsqueeze(0), *args[2:]]
        else:
            kwargs = {**kwargs, "B": kwargs["B"].unsqueeze(0)}
        return func(*args, **kwargs)

    return replace(strategies, run=lambda _: local)


@rule("linalg_solve")
def _solve(A: Operand, B: Operand, *, left: bool = True) -> Strategies | None:  # noqa: N803  # torch's names
    other = _right_hand_side(A, B, left)
    return _keep_columns(batched(f"MM,{other}->{other}", [A, B], [[1]]), A, B)


@rule("linalg_solve_ex")
def _solve_ex(A: Operand, B: Operand, *, left: bool = True, check_errors: bool = False) -> Strategies | None:  # noqa: N803  # torch's names
    del check_errors
    other = _right_hand_side(A, B, left)
    return _keep_columns(batched(f"MM,{other}->{other},#", [A, B], [[1]]), A, B)


@rule("linalg_solve_triangular")
def _solve_triangular(
    A: Operand,  # noqa: N803  # torch's name
    B: Operand,  # noqa: N803  # torch's name
    *,
    upper: bool,
    left: bool = True,
    unitriangular: bool = False,
) -> Strategies | None:
    del upper, unitriangular
    return batched("MM,Mk->Mk" if left else "MM,kM->kM", [A, B], [[1]])


@rule("linalg_lu_solve")
def _lu_solve(
    LU: Operand,  # noqa: N803  # torch's name
    pivots: Operand,
    B: Operand,  # noqa: N803  # torch's name
    *,
    left: bool = True,
    adjoint: bool = False,
) -> Strategies | None:
    del adjoint
    return batched("MM,M,Mk->Mk" if left else "MM,M,kM->kM", [LU, pivots, B], [[2]])


@composite("linalg_lstsq")
def _lstsq_with_driver(A: Any, B: Any, rcond: Any = None, *, driver: str | None = None) -> Any:  # noqa: N803  # torch's names
    """Pass the driver that torch would choose for the device."""
    if driver is not None:
        return NotImplemented
    return torch.linalg.lstsq(A, B, rcond, driver="gelsy" if A.device.type == "cpu" else "gels")


@rule("linalg_lstsq")
def _lstsq(A: Operand, B: Operand, rcond: Any = None, *, driver: str | None = None) -> Strategies | None:  # noqa: N803  # torch's names
    """Return strategies for the outputs of this driver; None if they depend on the rank of all matrices."""
    del rcond
    if A.ndim < 2 or driver is None or (A.shape[-2] > A.shape[-1] and driver in ("gelsd", "gelss")):
        return None
    rows, columns = A.shape[-2:]
    vector = A.ndim - 1 == B.ndim  # unlike `solve`
    batch_b = B.shape[:-1] if vector else B.shape[:-2]
    batch = tuple(torch.broadcast_shapes(A.shape[:-2], batch_b))  # type: ignore[no-untyped-call]  # untyped in torch
    sides = () if vector else B.shape[-1:]
    column = "" if vector else "k" if driver == "gels" else "K"  # other drivers couple the columns
    residuals = rows > columns and driver == "gels"
    ranks, values = driver != "gels", driver in ("gelsd", "gelss")
    shapes = [
        (*batch, columns, *sides),
        (*batch, *sides) if residuals else (0,),
        batch if ranks else (0,),
        (*batch, min(rows, columns)) if values else (0,),
    ]
    outs = [f"M{column}", column if residuals else "-", "#" if ranks else "-", "#" if values else "-"]
    # Residuals are squares, so not linear.
    strategies = batched(f"MN,M{column}->{','.join(outs)}", [A, B], None if residuals else [[1]])
    dtypes = (None, None, torch.int64, None)
    return None if strategies is None else Strategies(strategies.at, with_meta_shapes(dtypes), shapes=tuple(shapes))


@rule("linalg_matrix_rank")
def _matrix_rank(*args: Any, **kwargs: Any) -> Strategies | None:
    return _with_tolerances("", *args, **kwargs)


@rule("linalg_pinv", "pinverse")
def _pinv(*args: Any, **kwargs: Any) -> Strategies | None:
    return _with_tolerances("NM", *args, **kwargs)


def _with_tolerances(out: str, *args: Any, **kwargs: Any) -> Strategies | None:
    """Return the strategies of an operator whose tolerances may be tensors, one value per matrix."""
    operands = operands_in(*args, *kwargs.values())
    return batched(f"MN{',' * (len(operands) - 1)}->{out}", operands)


@rule("linalg_vander", "vander")
def _vander(x: Operand, N: int | None = None, increasing: bool = False) -> Strategies:  # noqa: N803  # torch's name
    """Compute as many powers as the global vector has elements, unless `N` is given."""
    del increasing
    labels = list(range(x.ndim))
    powers = x.shape[-1] if N is None and x.ndim else N

    def local(func: Any, args: Any, kwargs: Any) -> Any:
        return func(args[0], **{**kwargs, **dict(zip(("N", "increasing"), args[1:], strict=False)), "N": powers})

    return Strategies(index_strategies([x], [labels], [[*labels, None]]), run=lambda _: local)


@composite("linalg_tensorinv")
def _tensorinv(A: Any, ind: int = 2) -> Any:  # noqa: N803  # torch's name
    first, last = tuple(A.shape[:ind]), tuple(A.shape[ind:])
    if ind <= 0 or prod(first) != prod(last):
        return NotImplemented  # torch raises the error
    return torch.linalg.inv(A.reshape(prod(last), prod(first))).reshape(*last, *first)


@composite("linalg_tensorsolve")
def _tensorsolve(A: Any, B: Any, dims: Any = None) -> Any:  # noqa: N803  # torch's names
    """Solve it as one linear system of a matrix and a vector."""
    matrix = A if dims is None else A.movedim(tuple(dims), tuple(range(A.ndim - len(dims), A.ndim)))
    shape = tuple(matrix.shape[B.ndim :])
    if prod(shape) != prod(B.shape):
        return NotImplemented  # torch raises the error
    return torch.linalg.solve(matrix.reshape(prod(shape), prod(shape)), B.reshape(-1)).reshape(shape)
