"""With empty shards on some ranks, or on all: torch's result in torch's dtype, or torch's error on every rank."""

from __future__ import annotations

import os
import random
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

import shardwright as sw
from shardwright.tensor.base.registry import Op
from shardwright.tensor.base.strategy import Strategies, index_strategies
from shardwright.tensor.dispatch.execute import call_by_rule
from shardwright.testing import on_ranks
from shardwright.testing.operators import entries
from shardwright.testing.proof.everything import UNSAFE, Prover

S = sw.Shard
INF = float("inf")
FULL = os.environ.get("SHARDWRIGHT_BUDGET") == "full"

ALONG_A_DIM: dict[str, Callable[[Tensor, int], Any]] = {
    "amax": lambda x, d: x.amax(d),
    "amin": lambda x, d: x.amin(d, keepdim=True),
    "max": lambda x, d: tuple(x.max(d)),
    "min": lambda x, d: tuple(x.min(d, keepdim=True)),
    "argmax": lambda x, d: x.argmax(d),
    "argmin": lambda x, d: x.argmin(d, keepdim=True),
    "aminmax": lambda x, d: tuple(torch.aminmax(x, dim=d)),
    "median": lambda x, d: tuple(x.median(d)),
    "nanmedian": lambda x, d: tuple(x.nanmedian(d)),
    "mode": lambda x, d: tuple(x.mode(d)),
    "kthvalue": lambda x, d: tuple(x.kthvalue(1, d)),
    "topk": lambda x, d: tuple(x.topk(1, d)),
    "quantile": lambda x, d: x.quantile(0.5, d),
    "sort": lambda x, d: tuple(x.sort(d)),
    "cummax": lambda x, d: tuple(x.cummax(d)),
    "cumsum": lambda x, d: x.cumsum(d),
    "cumprod": lambda x, d: x.cumprod(d),
    "logcumsumexp": lambda x, d: x.logcumsumexp(d),
    "logsumexp": lambda x, d: x.logsumexp(d),
    "softmax": lambda x, d: x.softmax(d),
    "log_softmax": lambda x, d: x.log_softmax(d),
    "softmin": lambda x, d: functional.softmin(x, d),
    "norm(inf)": lambda x, d: torch.linalg.vector_norm(x, INF, d),
    "norm(-inf)": lambda x, d: torch.linalg.vector_norm(x, -INF, d),
    "norm(0)": lambda x, d: torch.linalg.vector_norm(x, 0, d),
    "norm(1)": lambda x, d: torch.linalg.vector_norm(x, 1, d),
    "norm(2)": lambda x, d: torch.linalg.vector_norm(x, 2, d),
    "norm(3)": lambda x, d: torch.linalg.vector_norm(x, 3, d),
    "norm(-1)": lambda x, d: torch.linalg.vector_norm(x, -1, d),
    "normalize": lambda x, d: functional.normalize(x, dim=d),
    "sum": lambda x, d: x.sum(d),
    "mean": lambda x, d: x.mean(d),
    "var": lambda x, d: x.var(d, unbiased=False),
    "std": lambda x, d: x.std(d),
    "prod": lambda x, d: x.prod(d),
    "any": lambda x, d: (x > 0).any(d),
    "all": lambda x, d: (x > 0).all(d),
    "count_nonzero": lambda x, d: x.count_nonzero(d),
    "unfold": lambda x, d: x.unfold(d, 1, 1),
    "diff": lambda x, d: x.diff(dim=d),
    "flip": lambda x, d: x.flip(d),
    "roll": lambda x, d: x.roll(1, d),
    "index_select": lambda x, d: x.index_select(d, torch.tensor([], dtype=torch.long)),
    "cat": lambda x, d: torch.cat([x, x], d),
    "trapezoid": lambda x, d: torch.trapezoid(x, dim=d),
}
OF_ALL: dict[str, Callable[[Tensor], Any]] = {
    "max": lambda x: x.max(),
    "min": lambda x: x.min(),
    "argmax": lambda x: x.argmax(),
    "median": lambda x: x.median(),
    "amax": lambda x: x.amax(),
    "aminmax": lambda x: tuple(x.aminmax()),
    "norm": lambda x: x.norm(),
    "norm(inf)": lambda x: x.norm(INF),
    **{
        f"matrix_norm({o})": lambda x, o=o: torch.linalg.norm(x, ord=o) for o in ("fro", "nuc", 1, -1, 2, -2, INF, -INF)
    },
    "mean": lambda x: x.mean(),
    "var": lambda x: x.var(),
    "std_mean": lambda x: tuple(torch.std_mean(x)),
    "sum": lambda x: x.sum(),
    "prod": lambda x: x.prod(),
    "quantile": lambda x: x.quantile(0.5),
    "unique": lambda x: torch.unique(x),
    "sort": lambda x: x.flatten().sort().values,
    "trace": lambda x: x.trace(),
    "mse_loss": lambda x: functional.mse_loss(x, x * 2),
    "cross_entropy": lambda x: functional.cross_entropy(x, x.detach().argmax(1)),
    "histc": lambda x: x.histc(3),
}


SHAPES = ((1, 1), (0, 3), (1, 3), (3, 0)) if FULL else ((1, 1), (0, 3))


@on_ranks(4, timeout=240)
def test_reductions_where_shards_are_empty_along_one_dimension_or_both() -> None:
    """No rank may raise alone: the others would wait for it."""
    mesh = sw.init_device_mesh("cpu", (2, 2))
    torch.manual_seed(0)
    cases = [(f"{name} along {d}", partial(f, d=d)) for name, f in ALONG_A_DIM.items() for d in (0, 1)]
    cases += [(f"{name} of all", f) for name, f in OF_ALL.items()]
    faults = []
    for shape in SHAPES:
        plain = torch.randn(shape)
        for placements in ((S(0), S(1)), (S(1), S(1)), (S(1), S(0)))[: 3 if FULL else 1]:
            x = sw.distribute_tensor(plain, mesh, placements)
            for name, call in cases:
                found, expected = attempt(call, x), attempt(call, plain)
                if not is_same(found, expected):
                    faults.append(f"{name} of {shape}, {placements}: {found} instead of {expected}")
    assert not faults, "\n".join(faults)


def attempt(call: Callable[[Tensor], Any], x: Tensor) -> list[Tensor] | str:
    """Return the full results of the call, or the name of the error."""
    try:
        with warnings.catch_warnings(), sw.implicit_replication():
            warnings.simplefilter("ignore")  # degrees of freedom <= 0
            found = call(x)
    except (RuntimeError, IndexError, ValueError) as error:
        return type(error).__name__
    flat = found if isinstance(found, tuple) else (found,)
    return [tensor.full_tensor() if isinstance(tensor, sw.DTensor) else tensor for tensor in flat]


def is_same(found: list[Tensor] | str, expected: list[Tensor] | str) -> bool:
    """True if both are errors, or both are equal in value and dtype."""
    if isinstance(found, str) or isinstance(expected, str):
        return isinstance(found, str) and isinstance(expected, str)
    return all(
        a.dtype == b.dtype and a.shape == b.shape and torch.allclose(a, b, equal_nan=True, atol=1e-6)
        for a, b in zip(found, expected, strict=True)
    )


# torch's kernels reject empty products of integers with a float factor.
KNOWN = {"addbmm", "baddbmm"}


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8], ids=str)
def test_results_have_the_global_dtype_if_most_shards_are_empty(dtype: torch.dtype) -> None:
    names = list(dict.fromkeys(entry.name for entry in entries() if dtype in entry.info.supported_dtypes("cpu")))
    prover = Prover(ranks=7, max_samples=3, max_placements=0, search=False, dtype=dtype)
    chosen = names if FULL else [*random.Random(1).sample(names, 8), *OFTEN_WRONG]
    wrong = [text for name in chosen if name not in KNOWN | UNSAFE for text in prover.prove(name).wrong]
    # Rules may give partial sums of bool tensors, which comm reduces by `or`.
    wrong = [text for text in wrong if "bool tensors have no sum" not in text]
    assert not wrong, "\n".join(wrong)


OFTEN_WRONG = ("nn.functional.pixel_shuffle", "nn.functional.unfold", "nn.functional.channel_shuffle", "_chunk_cat")


@on_ranks(2, timeout=60)
def test_unfold_of_empty_shards_keeps_the_dtype() -> None:
    mesh = sw.init_device_mesh("cpu", (2,))
    for dtype in (torch.bool, torch.uint8, torch.float16):
        plain = torch.ones(4, dtype=dtype)
        for _ in range(2):  # the second call uses the cached plan
            found = sw.distribute_tensor(plain, mesh, [S(0)]).unfold(0, 3, 3)
            assert found.to_local().dtype == dtype
            assert torch.equal(found.full_tensor(), plain.unfold(0, 3, 3))


@on_ranks(2, timeout=60)
def test_dispatch_corrects_the_dtype_of_empty_results() -> None:
    """Dispatch corrects it, whatever the local call of a rule returns."""
    mesh = sw.init_device_mesh("cpu", (2,))

    def empty_in_float64(context: Any) -> Any:
        shape = context.outs[0].local_shape(context.rank)
        return (lambda *_: torch.empty(shape, dtype=torch.float64)) if 0 in shape else None

    def rule(input: Any) -> Strategies:
        return Strategies(index_strategies([input], [[0]], [[0]]), run=empty_in_float64)

    x = sw.distribute_tensor(torch.ones(1, dtype=torch.float16), mesh, [S(0)])
    op = Op("erf", rule)
    for _ in range(2):
        assert call_by_rule(op, False, torch.erf, (x,), {}).to_local().dtype == torch.float16


@on_ranks(2, timeout=60)
def test_norms_of_empty_tensors_match_torch() -> None:
    mesh = sw.init_device_mesh("cpu", (2,))
    x = torch.ones(0, 4)
    for placement in (sw.Replicate(), S(0), S(1)):
        for ord in (INF, -INF, 1, -1, "fro", 2):
            call = partial(torch.linalg.norm, ord=ord)
            assert is_same(attempt(call, sw.distribute_tensor(x, mesh, [placement])), attempt(call, x)), (
                placement,
                ord,
            )
