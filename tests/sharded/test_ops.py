"""Operators computed shard by shard equal torch's on unsharded tensors, on every rank, with gradients."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tilings import random_tiling
from torch import Tensor, nn

import shardwright as sw
from shardwright import comm, sharded
from shardwright.errors import ArgumentTypeError, MixedTensorsError, RandomArgumentError, ShardError, UnsupportedError
from shardwright.sharded import ChunkShardingSpec, EnumerableShardingSpec, ShardedTensor, ShardingSpec, ShardMetadata
from shardwright.tensor.base.registry import canonical_name
from shardwright.tensor.rules.elementwise.pointwise import CASTS, COPIES, LINEAR_UNARY, NONLINEAR
from shardwright.testing import run_ranks

SIZE = (5, 6)
RANKS = (1, 3, 4)

ranks = pytest.mark.parametrize("count", RANKS)


def specs() -> dict[str, ShardingSpec]:
    """Uneven shards, several on a rank, none on some, boxes of both dimensions; one shard of everything."""
    last = comm.world().size - 1
    boxes = [((0, 0), (2, 6), last), ((2, 0), (3, 2), 0), ((2, 2), (3, 4), last), ((5, 0), (0, 6), 0)]
    return {
        "rows": ChunkShardingSpec(0, [f"rank:{rank}/cpu" for rank in range(last + 1)]),
        "columns of one": ChunkShardingSpec(1, ["rank:0/cpu"] * 4),
        "boxes": EnumerableShardingSpec([ShardMetadata(at, size, f"rank:{rank}/cpu") for at, size, rank in boxes]),
        "whole on the last": ChunkShardingSpec(0, [f"rank:{last}/cpu"]),
    }


def cut(whole: Tensor, spec: ShardingSpec) -> ShardedTensor:
    """The tensor, which every rank has, as shards: a leaf where it is one."""
    made = ShardedTensor(spec, whole.shape, dtype=whole.dtype)
    for shard in made.local_shards():
        shard.tensor.copy_(part(whole.detach(), shard))
    return made.requires_grad_(whole.requires_grad)


def part(whole: Tensor, shard: sharded.Shard) -> Tensor:
    return whole[shard.metadata.region.slices(shard.metadata.region.whole(whole.shape))]


def check(found: Any, expected: Any, what: str) -> None:
    """Compare this rank's shards and the global attributes with the plain tensor."""
    if isinstance(expected, tuple):
        assert type(found) is type(expected), what
        for one, other in zip(found, expected, strict=True):
            check(one, other, what)
        return
    assert isinstance(found, ShardedTensor), f"{what}: {found!r}"
    told = (found.shape, found.dtype, found.requires_grad, found.is_leaf)
    assert told == (expected.shape, expected.dtype, expected.requires_grad, expected.is_leaf), what
    found.metadata().validate()
    assert [shard.metadata for shard in found.local_shards()] == found._local_metadata(), what
    for shard in found.local_shards():
        assert shard.tensor.requires_grad == expected.requires_grad, what
        torch.testing.assert_close(shard.tensor, part(expected, shard), equal_nan=True, msg=lambda m: f"{what}: {m}")


def check_gradients(found: Any, expected: Any, leaves: list[tuple[ShardedTensor, Tensor]], what: str) -> None:
    """The gradients of the sum of all that is differentiable."""
    pairs = list(zip(found, expected, strict=True)) if isinstance(expected, tuple) else [(found, expected)]
    pairs = [(one, other) for one, other in pairs if other.requires_grad]
    if not pairs:
        return
    weigh = lambda value: (value.abs() * 1.5).sum()  # noqa: E731  # of complex numbers, too
    try:
        sum(weigh(other) for _, other in pairs).backward()
    except (RuntimeError, NotImplementedError):  # torch has no derivative of it
        return
    mine = [weigh(shard.tensor) for one, _ in pairs for shard in one.local_shards()]
    if mine:
        sum(mine).backward()
    for leaf, whole in leaves:
        if whole.grad is not None and leaf.local_shards():
            assert leaf.grad is not None, what
            for shard in leaf.grad.local_shards():
                torch.testing.assert_close(
                    shard.tensor, part(whole.grad, shard), equal_nan=True, msg=lambda m: f"{what}: {m}"
                )


def operands() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(5)
    draw = lambda: torch.rand(SIZE, generator=generator, dtype=torch.float64) * 0.8 + 0.1  # noqa: E731  # of a table
    return {
        **{name: draw().requires_grad_() for name in "xyz"},
        "f": draw().float(),
        "w": torch.complex(draw(), draw()).requires_grad_(),
        "i": torch.randint(1, 9, SIZE, generator=generator),
        "j": torch.randint(1, 4, SIZE, generator=generator),
        "b": draw() > 0.5,
        "c": draw() > 0.5,
    }


OPERANDS = operands()


def fresh(leaf: Tensor) -> Tensor:
    return leaf.detach().clone().requires_grad_(leaf.requires_grad)


# Letters are operands; a name is called with every list of them that torch takes.
ARGUMENTS: list[tuple[Any, ...]] = [
    *(("x",), ("w",), ("i",), ("b",), ("x", "y"), ("f", "x"), ("i", "j"), ("b", "c"), ("w", "x")),
    *(("x", 0.5), ("i", 2), ("i", 0.5), ("x", True), ("x", torch.tensor(0.5)), ("x", torch.tensor(2)), (2, "x")),
    *(("x", "y", "z"), ("x", "y", 0.25), ("b", "x", "y"), ("x", "b", 0.5), ("b", "x", 0.5), ("x", 0.2, 0.4)),
    *(("x", torch.tensor(0.2), "y"), ("b", "f", "y"), ("x", torch.float32)),
]
NAMES = sorted(
    {
        *(*NONLINEAR, *LINEAR_UNARY, *COPIES, *CASTS),
        *("add", "sub", "rsub", "mul", "div", "lerp", "addcmul", "addcdiv", "where", "copy", "fill", "zero"),
        *("zeros_like", "ones_like", "full_like", "radd", "rmul", "rtruediv", "rpow", "mod", "floordiv", "and"),
    }
    # No spelling in Python of their own; a dimension more; a GPU is needed.
    - {"alias", "view_as_real", "cuda"}
)


def spellings(name: str) -> Iterator[tuple[str, Any]]:
    """Functions and operators, and methods where there is no function: each is another door to the same handler."""
    found: dict[int, str] = {}
    if name.startswith("special_"):
        yield f"torch.special.{name}", getattr(torch.special, name.removeprefix("special_"))
    if name == "log_sigmoid":
        yield "F.logsigmoid", nn.functional.logsigmoid
    for place, where in ((torch, "torch"), (Tensor, "Tensor"), (nn.functional, "F")):
        for spelled in (name, f"{name}_", f"__{name}__", f"__i{name}__"):
            func = getattr(place, spelled, None)
            if place is Tensor and callable(getattr(torch, spelled, None)):
                continue
            if callable(func) and (place is not torch or not spelled.startswith("__")):
                found.setdefault(id(func), f"{where}.{spelled}")
                if found[id(func)] == f"{where}.{spelled}":
                    yield f"{where}.{spelled}", func


def check_pointwise(name: str, spec: ShardingSpec) -> int:
    checked = 0
    for spelled, func in spellings(name):
        for pattern in ARGUMENTS:
            wholes = {a: fresh(OPERANDS[a]) for a in pattern if isinstance(a, str)}
            in_place = canonical_name(func)[1]
            if not isinstance(pattern[0], str) and (in_place or spelled.startswith("Tensor.")):
                continue
            plain = [wholes[a] if isinstance(a, str) else a for a in pattern]
            if in_place:
                plain[0] = plain[0].clone()  # with a history, where it has one
            what = f"{spelled}{pattern}"
            try:
                expected = func(*plain)
            except (TypeError, RuntimeError, NotImplementedError, ValueError, UserWarning):  # deprecated ones, too
                continue
            if not isinstance(expected, Tensor) or expected.shape != SIZE:
                continue
            cuts = {a: cut(OPERANDS[a], spec) for a in wholes}
            ours = [cuts[a] if isinstance(a, str) else a for a in pattern]
            if in_place:
                ours[0] = ours[0].clone()
            found = func(*ours)
            check(found, expected, what)
            if in_place:
                assert found is ours[0], what
            check_gradients(found, expected, [(cuts[a], wholes[a]) for a in cuts], what)
            checked += 1
    return checked


# There are many: all of them where a rank has no shard and others have several; some where shards are empty.
@pytest.mark.parametrize(("count", "spec", "every"), [(1, "columns of one", 4), (3, "boxes", 1), (4, "rows", 4)])
def test_every_pointwise_operator_equals_torch_with_gradients(count: int, spec: str, every: int) -> None:
    def on_a_rank() -> list[str]:
        with comm.count() as traffic:
            missed = [name for name in NAMES[::every] if not check_pointwise(name, specs()[spec])]
        assert not traffic.calls
        return missed

    for missed in run_ranks(count, on_a_rank, timeout=120):
        assert not missed


def reductions() -> dict[str, Callable[[Any], Any]]:
    """Functions of a tensor whose second dimension is not sharded."""
    along: dict[str, Callable[[Any], Any]] = {
        "sum": lambda x: x.sum(1),
        "sum, kept": lambda x: torch.sum(input=x, dim=(-1,), keepdim=True),
        "sum, float": lambda x: x.sum(dim=1, dtype=torch.float32),
        "nansum": lambda x: x.nansum(1),
        "mean": lambda x: torch.mean(x, 1),
        "amax": lambda x: x.amax(1),
        "amin": lambda x: torch.amin(x, dim=1, keepdim=True),
        "prod": lambda x: x.prod(1),
        "all": lambda x: (x > 0.2).all(1),
        "any": lambda x: torch.any(x > 0.8, dim=1, keepdim=True),
        "norm": lambda x: x.norm(dim=1),
        "norm, 1": lambda x: torch.norm(x, 1, 1, keepdim=True),
        "vector_norm": lambda x: torch.linalg.vector_norm(x, 3, dim=1),
        "logsumexp": lambda x: x.logsumexp(1),
        "var": lambda x: x.var(1),
        "std": lambda x: torch.std(x, dim=1, correction=0, keepdim=True),
        "var_mean": lambda x: torch.var_mean(x, dim=1),
        "argmax": lambda x: x.argmax(1),
        "argmin": lambda x: torch.argmin(x, dim=1, keepdim=True),
        "max": lambda x: x.max(1),
        "min": lambda x: torch.min(x, dim=1, keepdim=True),
        "median": lambda x: x.median(1),
        "mode": lambda x: torch.mode(x),
        "sort": lambda x: x.sort(descending=True),
        "argsort": lambda x: torch.argsort(x, dim=1),
        "topk": lambda x: x.topk(2),
        "kthvalue": lambda x: torch.kthvalue(x, 3, dim=1, keepdim=True),
        "count_nonzero": lambda x: torch.count_nonzero(x > 0.5, dim=1),
        "softmax": lambda x: x.softmax(1),
        "F.softmax": lambda x: nn.functional.softmax(x, dim=-1, dtype=torch.float32),
        "log_softmax": lambda x: torch.log_softmax(x, 1),
        "cumsum": lambda x: x.cumsum(1),
        "cumprod": lambda x: torch.cumprod(x, dim=1),
        "cummax": lambda x: x.cummax(1),
        "logcumsumexp": lambda x: x.logcumsumexp(1),
        "then pointwise": lambda x: (x.sum(1) * 2).exp(),
    }
    return along


VIEWS: dict[str, Callable[[Any], Any]] = {
    "transpose": lambda x: x.transpose(0, 1),
    "t": lambda x: x.t(),
    "T": lambda x: x.T,
    "mT": lambda x: x.mT,
    "permute": lambda x: x.permute(1, 0),
    "movedim": lambda x: torch.movedim(x, 0, -1),
    "unsqueeze": lambda x: x.unsqueeze(1),
    "unsqueeze, last": lambda x: torch.unsqueeze(x, dim=-1),
    "squeeze": lambda x: x.unsqueeze(1).squeeze(),
    "squeeze, named": lambda x: x.unsqueeze(1).squeeze(1),
    "squeeze, nothing": lambda x: x.squeeze(0),
    "turned and back": lambda x: (x.T * 2).T,
    "turned and summed": lambda x: x.t().sum(0),
}


@ranks
def test_local_reductions_and_views_equal_torch(count: int) -> None:
    def on_a_rank() -> None:
        chosen = specs()
        rows = {name: chosen[name] for name in ("rows", "whole on the last")}
        cases = [(f, s) for f in reductions().items() for s in rows.items()]
        cases += [(f, s) for f in VIEWS.items() for s in (chosen if "summed" not in f[0] else rows).items()]
        for (name, function), (spec_name, spec) in cases:
            whole = fresh(OPERANDS["x"])
            tensor, what = cut(whole, spec), f"{name}, {spec_name}"
            with comm.count() as traffic:
                found, expected = function(tensor), function(whole)
                check(found, expected, what)
            assert not traffic.calls
            check_gradients(found, expected, [(tensor, whole)], what)

    run_ranks(count, on_a_rank, timeout=60)


def test_all_and_any_return_a_plain_tensor_on_every_rank() -> None:
    def on_a_rank() -> list[bool]:
        found = []
        for spec in specs().values():
            tensor = cut(OPERANDS["x"].detach(), spec)
            truths = [(tensor > 0).all(), (tensor > 0.85).all(), torch.any(tensor < 0), (tensor > 0.6).any()]
            assert all(type(truth) is Tensor and truth.dtype == torch.bool for truth in truths)
            found += [bool(truth) for truth in truths]
        return found

    x = OPERANDS["x"]
    expected = [bool(t) for t in ((x > 0).all(), (x > 0.85).all(), (x < 0).any(), (x > 0.6).any())] * 4
    assert expected[:4] == [True, False, False, True]
    for count in RANKS:
        assert run_ranks(count, on_a_rank) == [expected] * count


def test_a_full_reduction_is_local_if_one_rank_holds_everything() -> None:
    def on_a_rank() -> None:
        tensor = cut(OPERANDS["x"], specs()["whole on the last"])
        for function in (torch.sum, torch.mean, torch.amax, torch.argmax, torch.prod, torch.linalg.vector_norm):
            check(function(tensor), function(OPERANDS["x"]), function.__name__)

    run_ranks(3, on_a_rank)


def test_a_reduction_over_a_sharded_dimension_raises_with_a_remedy() -> None:
    def on_a_rank() -> None:
        boxes, rows = cut(OPERANDS["x"], specs()["boxes"]), cut(OPERANDS["x"], specs()["rows"])
        for function, words in (
            (lambda: boxes.sum(), r"sum: it runs over dimensions \[0, 1\] of .*to_dtensor"),
            (lambda: rows.sum(), r"sum: it runs over dimension 0 of"),
            (lambda: rows.softmax(0), "softmax: it runs over dimension 0"),
            (lambda: torch.linalg.vector_norm(rows), "vector_norm: it runs over dimension 0"),
            (lambda: boxes.max(dim=-1), "max: it runs over dimension 1"),
            (lambda: boxes.topk(1), "topk: it runs over dimension 1"),
            (lambda: rows.cumsum_(1), "cumsum_: in-place and out= variants are not supported"),
            (lambda: nn.functional.softmax(rows), "`dim` is required"),
            (lambda: rows.t_(), "cannot be permuted in place"),
        ):
            with pytest.raises(UnsupportedError, match=words):
                function()
        with pytest.raises(IndexError, match="Dimension out of range"):
            rows.sum(2)

    run_ranks(3, on_a_rank)


def test_incompatible_operands_raise() -> None:
    def on_a_rank() -> None:
        x = OPERANDS["x"].detach()
        rows, boxes = cut(x, specs()["rows"]), cut(x, specs()["boxes"])
        for function, kind, words in (
            (lambda: rows + boxes, ShardError, r"add: .*3 shards.* and .*4 shards.* are sharded differently.*reshard"),
            (lambda: rows.mul_(boxes), ShardError, "mul_: .* are sharded differently"),
            (lambda: torch.where(rows > 0.5, rows, boxes), ShardError, "where: .* are sharded differently"),
            (
                lambda: rows + x,
                MixedTensorsError,
                r"add: cannot mix a plain tensor of size \[5, 6\] with .*shard\(tensor\)",
            ),
            (lambda: x + rows, MixedTensorsError, r"add: cannot mix a plain tensor of size \[5, 6\]"),
            (lambda: x.add_(rows), MixedTensorsError, "add_: cannot write a ShardedTensor into a plain Tensor: gather"),
            (
                lambda: torch.add(rows, 1, out=x),
                MixedTensorsError,
                "add: cannot write a ShardedTensor into a plain Tensor",
            ),
            (lambda: rows * torch.tensor(2.0).requires_grad_(), MixedTensorsError, r"size \[\], which requires grad,"),
            (lambda: rows.copy_(x), MixedTensorsError, "copy_: cannot mix a plain tensor"),
            (lambda: torch.where(rows > 0.5), UnsupportedError, r"where: the size of where\(condition\)"),
            (
                lambda: rows @ rows.T,
                UnsupportedError,
                r"matmul: ShardedTensor does not support this operator.*to_dtensor",
            ),
            (lambda: rows.__setitem__(0, 1), UnsupportedError, r"__setitem__: only `x\[mask\] = number`"),
            (lambda: torch._foreach_add([rows], 1), UnsupportedError, "_foreach_add: .* foreach=False"),
            (lambda: rows[0], UnsupportedError, "__getitem__: ShardedTensor does not support"),
            (lambda: rows.view(30), UnsupportedError, "view: ShardedTensor does not support"),
            (
                lambda: rows.backward(),
                UnsupportedError,
                "backward: .* is not in the autograd graph, but its shards are",
            ),
            (lambda: rows.bernoulli(), UnsupportedError, "bernoulli: only the in-place version is supported"),
        ):
            with pytest.raises(kind, match=words):
                function()
        assert torch.equal(rows, cut(x, specs()["rows"]))  # unchanged

    run_ranks(3, on_a_rank)


@ranks
def test_in_place_operations_equal_torch(count: int) -> None:
    def on_a_rank() -> None:
        for name, spec in specs().items():
            whole = fresh(OPERANDS["x"])
            tensor = cut(whole, spec)
            for write in (lambda t: t.add_(1), lambda t: t.uniform_(), lambda t: t.zero_(), lambda t: t.copy_(t)):
                with pytest.raises(RuntimeError, match="leaf"):
                    write(tensor)
            with torch.no_grad():
                assert tensor.mul_(2) is tensor
                whole.mul_(2)
            check(tensor, whole, name)
            made, plain = torch.zeros_like(tensor), torch.zeros_like(whole)
            check(made.add_(tensor), plain.add_(whole), name)  # it has autograd history now
            check(made.detach_(), plain.detach_(), name)
            made[made > 0.5] = 0.25
            plain[plain > 0.5] = 0.25
            check(made, plain, name)
            out = torch.empty_like(made)
            with torch.no_grad():
                assert torch.mul(tensor, 3, out=out) is out
            check(out, whole.detach() * 3, name)
            with pytest.raises(RuntimeError, match="can't be cast"):
                cut(OPERANDS["i"], spec).add_(0.5)
            check(torch.ones_like(made, requires_grad=True), torch.ones_like(plain, requires_grad=True), name)

    run_ranks(count, on_a_rank)


@ranks
def test_copy_from_another_sharding_reshards_with_gradients(count: int) -> None:
    def on_a_rank() -> None:
        for first, into in specs().items():
            for second, out_of in specs().items():
                what = f"{second} into {first}"
                target, source = cut(torch.zeros(SIZE), into), cut(OPERANDS["y"].detach(), out_of)
                boxes = [shard.metadata.region for shard in source.local_shards()]
                with comm.count() as traffic:
                    assert target.copy_(source) is target
                check(target, OPERANDS["y"].detach().float(), what)
                assert [shard.metadata.region for shard in source.local_shards()] == boxes
                mine = {shard.metadata.region for shard in target.local_shards()}
                held = sum(region.intersect(box).volume for region in mine for box in boxes if region.intersect(box))
                assert traffic.bytes == (sum(region.volume for region in mine) - held) * source.element_size(), what
        rows = specs()["rows"]
        assert isinstance(rows, ChunkShardingSpec)
        backwards = ChunkShardingSpec(0, list(reversed(rows.placements)))
        source = cut(OPERANDS["y"], rows)
        target = cut(torch.zeros(SIZE, dtype=torch.float64), backwards)
        target.copy_(source)
        weights = torch.arange(30.0, dtype=torch.float64).reshape(SIZE)
        sum((shard.tensor * part(weights, shard)).sum() for shard in target.local_shards()).backward()
        for shard in source.local_shards():
            assert shard.tensor.grad is not None
            torch.testing.assert_close(shard.tensor.grad, part(weights, shard))

    run_ranks(count, on_a_rank)


@ranks
def test_comparisons_have_the_same_result_on_every_rank(count: int) -> None:
    def on_a_rank() -> list[bool]:
        found = []
        for spec in specs().values():
            x = OPERANDS["x"].detach().clone()
            x[4, 5] = float("nan")
            near, other = x + 1e-9, x.clone()
            other[4, 0] += 1  # one element, which one rank holds
            a, b, c, d = (cut(t, spec) for t in (x.nan_to_num(), near.nan_to_num(), other.nan_to_num(), x))
            found += [torch.equal(a, a.clone()), a.equal(b), torch.equal(a, c), torch.equal(a, a.float())]
            found += [torch.allclose(a, b), a.allclose(c), torch.allclose(a, c, atol=1.5), torch.allclose(d, d.clone())]
            found += [
                torch.allclose(d, d.clone(), equal_nan=True),
                torch.equal(a, a.unsqueeze(0)),
            ]
            with pytest.raises(RuntimeError, match="did not match"):
                torch.allclose(a, a.float())
        return found

    answers = [True, False, False, False, True, False, True, False, True, False]
    assert run_ranks(count, on_a_rank) == [answers * 4] * count


def test_tensors_with_different_shardings_cannot_be_compared() -> None:
    def on_a_rank() -> None:
        rows, boxes = (cut(OPERANDS["x"].detach(), specs()[name]) for name in ("rows", "boxes"))
        for compare in (torch.equal, torch.allclose):
            with pytest.raises(ShardError, match=r"are sharded differently.*reshard"):
                compare(rows, boxes)
            with pytest.raises(MixedTensorsError, match="with a ShardedTensor: gather"):
                compare(rows, OPERANDS["x"])
        assert torch.equal(rows, boxes.reshard(rows.sharding_spec()))

    run_ranks(3, on_a_rank)


# Each fills a tensor of zeros in place, or makes another of it: of a DTensor as of a ShardedTensor.
DRAWS: dict[str, Callable[[Any], Any]] = {
    "uniform_": lambda t: t.uniform_(-1, to=2),
    "normal_": lambda t: t.normal_(1, std=2),
    "log_normal_": lambda t: t.log_normal_(),
    "exponential_": lambda t: t.exponential_(2.0),
    "cauchy_": lambda t: t.cauchy_(),
    "geometric_": lambda t: t.geometric_(0.4),
    "bernoulli_": lambda t: t.bernoulli_(0.3),
    "random_": lambda t: t.random_(-3, 9),
    "rand_like": torch.rand_like,
    "randn_like": lambda t: torch.randn_like(t, dtype=torch.float64),
    "randint_like": lambda t: torch.randint_like(t, 2, 9),
    "dropout": lambda t: nn.functional.dropout(t + 1, 0.25),
    "dropout, in place": lambda t: nn.functional.dropout(t.add_(1), 0.25, inplace=True),
    "dropout, not training": lambda t: nn.functional.dropout(t, training=False),
    "init.uniform_": lambda t: nn.init.uniform_(t, -1, 1),
    "init.normal_": lambda t: nn.init.normal_(t, 1.0, 2.0),
    "init.constant_": lambda t: nn.init.constant_(t, 3.0),
    "init.ones_": nn.init.ones_,
    "init.zeros_": nn.init.zeros_,
    "init.kaiming_uniform_": lambda t: nn.init.kaiming_uniform_(t, a=5**0.5),
    "init.kaiming_normal_": lambda t: nn.init.kaiming_normal_(t, mode="fan_out"),
    "init.xavier_uniform_": nn.init.xavier_uniform_,
    "init.xavier_normal_": lambda t: nn.init.xavier_normal_(t, gain=2.0),
    "init.trunc_normal_": lambda t: nn.init.trunc_normal_(t, std=0.5, a=-0.6, b=0.6),
    "init.trunc_normal_, a tail": lambda t: nn.init.trunc_normal_(t, std=0.5, a=0.6, b=0.9),
}


@ranks
def test_random_numbers_equal_the_dtensors_for_every_spec(count: int) -> None:
    def on_a_rank() -> None:
        mesh = sw.init_device_mesh("cpu", (comm.world().size,))
        for name, draw in DRAWS.items():
            sw.manual_seed(17)
            expected = draw(sw.zeros(*SIZE, mesh=mesh, placements=[sw.Shard(1)])).full_tensor()
            for spec_name, spec in specs().items():
                sw.manual_seed(17)
                found = draw(cut(torch.zeros(SIZE), spec))
                check(found, expected, f"{name}, {spec_name}")
                assert all(torch.equal(shard.tensor, part(expected, shard)) for shard in found.local_shards()), name
        # A parameter, too, and what comes next is other numbers.
        sw.manual_seed(17)
        weight = nn.Parameter(cut(torch.zeros(SIZE), specs()["boxes"]))
        first = nn.init.kaiming_uniform_(weight).detach().clone()
        assert weight.is_leaf
        assert weight.requires_grad
        assert not torch.equal(first, nn.init.kaiming_uniform_(weight).detach())

    run_ranks(count, on_a_rank)


def test_init_uses_the_fans_of_the_global_tensor() -> None:
    def on_a_rank() -> None:
        for spec in specs().values():
            weight = nn.init.kaiming_uniform_(cut(torch.zeros(SIZE), spec), a=0, nonlinearity="relu")
            bound = (2 / SIZE[1]) ** 0.5 * 3**0.5
            for shard in weight.local_shards():
                assert shard.tensor.abs().le(bound).all()
            assert ((weight.abs() > bound * 0.8).any()).item()  # 30 numbers, of which some are large

    run_ranks(3, on_a_rank)


def test_generators_and_tensor_parameters_raise() -> None:
    tensor = sharded.zeros(ChunkShardingSpec(0, ["rank:0/cpu"]), 4)
    with pytest.raises(UnsupportedError, match="'generator' is not supported, because its state is local to each rank"):
        tensor.normal_(generator=torch.Generator())
    with pytest.raises(UnsupportedError, match="bernoulli_: its parameters must be numbers"):
        tensor.bernoulli_(torch.rand(4))
    with pytest.raises(ValueError, match=r"dropout: p must be between 0 and 1, got 2"):
        nn.functional.dropout(tensor, 2)


def test_invalid_distribution_parameters_raise_on_every_rank() -> None:
    def on_a_rank() -> None:
        for spec in specs().values():
            tensor = cut(torch.zeros(SIZE), spec)
            for draw in (lambda t: t.bernoulli_(1.5), lambda t: t.exponential_(-1)):
                with pytest.raises(RandomArgumentError):
                    draw(tensor)
            with pytest.raises(ArgumentTypeError, match="the dtype must be floating"):
                tensor.long().normal_()

    run_ranks(3, on_a_rank)


# What is asked of a tensor that needs no computing, against a plain tensor of the same size and dtype.
QUESTIONS: dict[str, Callable[[Any], Any]] = {
    name: lambda t, name=name: getattr(t, name)
    for name in """
    is_cpu is_cuda is_meta is_mkldnn is_mps is_nested is_quantized is_sparse is_sparse_csr is_xla is_xpu itemsize nbytes
    ndim shape dtype device layout requires_grad is_leaf grad_fn grad _grad _grad_fn _base _backward_hooks output_nr
    name retains_grad
    """.split()
} | {
    f"{name}()": lambda t, name=name: getattr(t, name)()
    for name in """
    is_floating_point is_complex is_signed is_conj is_neg is_inference is_contiguous is_pinned element_size get_device
    __len__ nelement ndimension numel dim size stride storage_offset dim_order type is_shared
    """.split()
}
QUESTIONS |= {
    "torch.is_complex": torch.is_complex,
    "torch.is_floating_point": torch.is_floating_point,
    "torch.numel": torch.numel,
    "torch.is_tensor": torch.is_tensor,
    "size(1)": lambda t: t.size(1),
    "stride(0)": lambda t: t.stride(0),
    "result_type": lambda t: torch.result_type(t, 1.5),
    "past the class": lambda t: (Tensor.shape.__get__(t), Tensor.dtype.__get__(t), Tensor.size(t), Tensor.dim(t)),
    "is_same_size": lambda t: t.is_same_size(t),
    "plain.to(t)": lambda t: torch.zeros(2).to(t).dtype,
    "type_as": lambda t: t.type_as(torch.zeros(2, dtype=torch.float16)).dtype,
    "new_tensor": lambda t: t.new_tensor([1, 2]),
}


def test_attributes_describe_the_global_tensor_on_every_rank() -> None:
    def on_a_rank() -> None:
        for letter in "xifb":
            for spec in specs().values():
                whole = fresh(OPERANDS[letter])
                tensor = cut(whole, spec)
                for name, ask in QUESTIONS.items():
                    found, expected = ask(tensor), ask(whole)
                    same = torch.equal(found, expected) if isinstance(expected, Tensor) else found == expected
                    assert same, f"{letter}.{name}: {found}, not {expected}"

    run_ranks(3, on_a_rank)


class Table(nn.Module):
    """A parameter and a buffer that are sharded."""

    def __init__(self, weight: Tensor, spec: ShardingSpec) -> None:
        super().__init__()
        self.weight = nn.Parameter(cut(weight, spec))
        self.register_buffer("seen", cut(torch.zeros(SIZE, dtype=torch.int64), spec))


@ranks
def test_modules_accept_sharded_parameters(count: int) -> None:
    def on_a_rank() -> None:
        x = OPERANDS["f"]
        for name, spec in specs().items():
            module = Table(x, spec)
            weight = module.weight
            assert isinstance(weight, nn.Parameter)
            assert isinstance(weight, ShardedTensor)
            assert dict(module.named_parameters()) == {"weight": weight}
            for shard in weight.local_shards():
                (shard.tensor * 3).sum().backward()
            copied = copy.deepcopy(module)
            assert isinstance(copied.weight, nn.Parameter)
            assert copied.weight is not weight
            check(copied.weight, nn.Parameter(x), name)
            module.to(torch.float64)  # the parameter that an optimizer knows stays, gradients come along
            assert module.weight is weight
            check(weight, nn.Parameter(x.double()), name)
            assert module.seen.dtype == torch.int64
            if weight.local_shards():
                check(weight.grad, torch.full(SIZE, 3.0, dtype=torch.float64), name)
            module.zero_grad(set_to_none=False)
            assert all(shard.tensor.grad.eq(0).all() for shard in weight.local_shards())
            module.zero_grad()
            assert weight.grad is None
            module.half().float().requires_grad_(False)
            assert not weight.requires_grad
            others = {"weight": cut(x * 2, specs()["boxes"]), "seen": cut(torch.ones(SIZE, dtype=torch.int64), spec)}
            module.load_state_dict(others)  # another sharding: resharded
            check(module.state_dict()["weight"], x * 2, name)
            check(module.seen, torch.ones(SIZE, dtype=torch.int64), name)
            module.load_state_dict(copied.state_dict(), assign=True)
            check(module.weight, x, name)

    run_ranks(count, on_a_rank)


def test_a_requested_memory_format_is_in_the_metadata() -> None:
    images = sharded.rand(ChunkShardingSpec(0, ["rank:0/cpu"] * 2), 4, 3, 2, 2)
    for made in (images.contiguous(memory_format=torch.channels_last), images.float(memory_format=torch.channels_last)):
        assert made is not images
        assert made.metadata().tensor_properties.memory_format == torch.channels_last
        assert made.stride() == made.local_shards()[0].tensor.stride()
        assert made.is_contiguous(memory_format=torch.channels_last)


@given(st.data())
def test_permutations_compose_for_any_boxes(data: st.DataObject) -> None:
    size = data.draw(st.lists(st.integers(0, 4), min_size=1, max_size=4))
    shards = random_tiling(data.draw(st.randoms(use_true_random=False)), size, 1)
    order = data.draw(st.permutations(range(len(size))))
    whole = torch.arange(torch.Size(size).numel()).reshape(size)
    tensor = cut(whole, EnumerableShardingSpec(shards))
    turned = tensor.permute(order)
    check(turned, whole.permute(order), "permute")
    back = turned.permute([order.index(dim) for dim in range(len(size))])
    assert back.metadata() == tensor.metadata()
    check(back, whole, "and back")
    at = data.draw(st.integers(0, len(size)))
    check(tensor.unsqueeze(at), whole.unsqueeze(at), "unsqueeze")
    assert tensor.unsqueeze(at).squeeze(at).metadata() == tensor.metadata()
    cut_by = {dim for dim in range(len(size)) for shard in shards if shard.shard_sizes[dim] != size[dim]}
    for dim in range(len(size)):
        if dim in cut_by:
            with pytest.raises(UnsupportedError, match=f"sum: it runs over dimension {dim} of"):
                tensor.sum(dim)
        elif not whole.numel() and len(shards) > 1 and whole.sum(dim).numel():
            try:  # empty shards may coincide, and then those of the result overlap
                check(tensor.sum(dim), whole.sum(dim), f"sum over {dim}")
            except UnsupportedError as error:
                assert "is empty, and its shards would not tile the result" in str(error)  # noqa: PT017  either may hold
        else:
            check(tensor.sum(dim), whole.sum(dim), f"sum over {dim}")
            check(tensor.cumsum(dim), whole.cumsum(dim), f"cumsum along {dim}")
            assert torch.equal(tensor.sum(dim), (tensor + tensor).sum(dim) - tensor.sum(dim))


def test_a_custom_operator_is_called_with_the_tensors_and_their_group() -> None:
    def work() -> None:
        @sharded.custom_sharded_op_impl(torch.linalg.cond)
        def largest_over_smallest(types: Any, args: Any, kwargs: Any, process_group: Any) -> float:
            assert types == (ShardedTensor,)
            assert kwargs == {"p": "own"}
            most = torch.stack([shard.tensor.max() for shard in args[0].local_shards()]).max()
            least = torch.stack([shard.tensor.min() for shard in args[0].local_shards()]).min()
            torch.distributed.all_reduce(most, torch.distributed.ReduceOp.MAX, group=process_group)
            torch.distributed.all_reduce(least, torch.distributed.ReduceOp.MIN, group=process_group)
            return (most / least).item()

        tensor = specs()["rows"].shard(torch.arange(1.0, 31.0).reshape(SIZE))
        assert torch.linalg.cond(tensor, p="own") == 30.0

    run_ranks(2, work)
