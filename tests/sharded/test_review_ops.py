"""What a review of the operators, hooks and optimizers of ShardedTensors found, each as the promise it breaks."""

from __future__ import annotations

import copy
import os
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from shardwright import comm, sharded
from shardwright.errors import (
    ArgumentTypeError,
    CommError,
    DisagreementError,
    RankFailedError,
    RankLostError,
    ShardError,
    TilingError,
    UnsupportedError,
)
from shardwright.layout import Boxes, overlaps
from shardwright.layout.overlap import overlapping_pair
from shardwright.sharded import ChunkShardingSpec, EnumerableShardingSpec, ShardedTensor, ShardMetadata
from shardwright.sharded.ops import rows
from shardwright.testing import run_ranks


def chunks(dim: int, *ranks: int) -> ChunkShardingSpec:
    return ChunkShardingSpec(dim, [f"rank:{rank}/cpu" for rank in ranks])


def refusal(kind: type[Exception], call: Callable[[], object]) -> str:
    with pytest.raises(kind) as caught:
        call()
    return str(caught.value)


def test_a_reduction_of_no_elements_tiles_its_result_or_is_refused_on_all_ranks() -> None:
    def on_rank() -> list[str]:
        said = []
        for shape, spec, dim in (
            ((0, 3), chunks(0, 0, 1), 0),
            ((4, 0), chunks(1, 0, 1), 1),
            ((0, 2), chunks(0, 1, 1), 0),
        ):
            for keepdim in (False, True):
                x = sharded.zeros(spec, *shape)
                said.append(refusal(UnsupportedError, lambda x=x, d=dim, k=keepdim: x.sum(d, keepdim=k)).split(";")[0])
        for spec, dim in ((chunks(0, 0, 1), 1), (chunks(0, 2), 1), (chunks(1, 2), 1)):
            made = sharded.zeros(spec, 4, 0).sum(dim)
            made.metadata().validate()
            whole = made.gather(2)
            assert whole is None or torch.equal(whole, torch.zeros(4))
        x = sharded.zeros(chunks(0, 0, 1), 4, 0)
        said += [refusal(IndexError, lambda: x.max(1)), refusal(IndexError, lambda: x.argmin(1))]
        return said

    first, second, third = run_ranks(3, on_rank)
    assert first[-2:] == second[-2:] == third[-2:]
    assert [one.split(":")[0] for one in first[:-2]] == ["sum"] * 6


def test_dimensions_may_be_named_as_numpy_names_them() -> None:
    whole = torch.rand(2, 1, 3)
    x = chunks(0, 0, 0).shard(whole)
    for call in (
        lambda t: t.sum(axis=1),
        lambda t: t.mean(axis=(1, 2), keepdims=True),
        lambda t: torch.amax(t, axis=-1, keepdims=True),
        lambda t: torch.softmax(t, axis=2),
        lambda t: t.squeeze(axis=1),
        lambda t: t.max(axis=2).values,
    ):
        assert torch.equal(call(x).gather(), call(whole))
    with pytest.raises(UnsupportedError, match="runs over dimension 0"):
        x.sum(axis=0)


def test_linear_takes_the_dtypes_of_a_bias_that_torchs_takes() -> None:
    def on_rank() -> list[str]:
        batch, weight = torch.rand(2, 3), torch.rand(4, 3)
        cut = chunks(0, 0, 1).shard(weight)
        said = []
        for bias in (torch.rand(4, dtype=torch.float64), torch.rand(4).half(), torch.ones(4, dtype=torch.int64)):
            with pytest.raises(RuntimeError):
                functional.linear(batch, weight, bias)
            said.append(refusal(ShardError, lambda bias=bias: functional.linear(batch, cut, bias)))
            said.append(refusal(ShardError, lambda b=bias: functional.linear(batch, cut, chunks(0, 1).shard(b))))
        one = torch.rand(4) if comm.rank() else torch.rand(4).double()
        said.append(refusal(RankFailedError, lambda: functional.linear(batch, cut, one)))
        with torch.autocast("cpu", torch.bfloat16):
            bias = torch.rand(4)
            found, expected = functional.linear(batch, cut, bias), functional.linear(batch, weight, bias)
        assert found.dtype == expected.dtype
        return said

    first, second = run_ranks(2, on_rank)
    assert first == second
    assert "the bias torch.float64" in first[0]
    assert "convert them to one dtype" in first[0]


def test_a_rank_that_does_not_come_or_does_something_else_is_named_after_the_coordination_timeout() -> None:
    def on_rank() -> tuple[list[str], float]:
        said = []

        def case(
            kind: type[Exception], call: Callable[[ShardedTensor], Any], other: Callable[[ShardedTensor], Any]
        ) -> None:
            group = dist.new_group([0, 1])
            table = sharded.ones(chunks(0, 0, 1), 4, 2, requires_grad=True, process_group=group)
            comm.gather_bytes(b"")
            if comm.rank() == 0:
                said.append(refusal(kind, lambda: call(table)))
            else:
                other(table)
            comm.gather_bytes(b"")

        def look_up(table: ShardedTensor) -> Tensor:
            return functional.embedding(torch.tensor([0, 3]), table)

        def multiply(table: ShardedTensor) -> Tensor:
            return functional.linear(torch.ones(1, 2, requires_grad=True), table)

        started = time.monotonic()
        with mock.patch.dict(os.environ, SHARDWRIGHT_TIMEOUT="0.5"):
            for op in (look_up, multiply):
                case(RankLostError, op, lambda _: time.sleep(0))
                case(RankLostError, lambda table, op=op: op(table).sum().backward(), lambda table, op=op: op(table))
            case(RankLostError, lambda table: torch.equal(table, table), lambda _: time.sleep(0))

            def gathers(table: ShardedTensor) -> None:
                refusal(CommError, lambda: table.detach().gather())

            case(CommError, look_up, gathers)
            case(
                CommError, lambda table: look_up(table).sum().backward(), lambda table: (look_up(table), gathers(table))
            )
        return said, time.monotonic() - started

    said, seconds = run_ranks(2, on_rank, timeout=60)[0]
    assert seconds < 30
    for words, what in zip(
        said[:5],
        ["embedding", "backward of embedding", "linear", "backward of linear", "equal"],
        strict=True,
    ):
        assert words.startswith(what), words
        assert "rank 1 did not arrive within 0.5 s" in words
    assert said[5] == "ranks run different programs: rank 0 is in 'embedding with a ShardedTensor', rank 1 in 'gather'"
    assert "rank 0 is in 'backward of embedding with a ShardedTensor', rank 1 in 'gather'" in said[6]


def test_ranks_that_are_too_many_to_tell_all_counts_to_all_look_up_the_same() -> None:
    def on_rank() -> None:
        table = sharded.rand(chunks(0, 0, 2, 0), 7, 2, requires_grad=True)
        asked = torch.arange(comm.rank() * 2)
        found = functional.embedding(asked, table)
        with mock.patch.object(rows, "_MAX_GATHERED_RANKS", 1):
            again = functional.embedding(asked, table)
        assert torch.equal(found, again)
        again.sum().backward()

    run_ranks(3, on_rank)


def test_comparing_raises_on_all_ranks_where_one_cannot_compare() -> None:
    def on_rank() -> list[str]:
        here = comm.rank()
        x = sharded.ones(chunks(0, 0, 1), 4, 2)
        other = sharded.ones(chunks(here, 0, 1), 4, 2)
        plain = torch.ones(4, 2) if here else x
        double = x.double() if here else x
        said = [
            refusal(RankFailedError, lambda: torch.equal(x, other)),
            refusal(RankFailedError, lambda: torch.allclose(x, other)),
            refusal(RankFailedError, lambda: torch.equal(x, plain)),
            refusal(RankFailedError, lambda: torch.allclose(x, double)),
        ]
        assert not torch.equal(x, double)  # on the one rank they are equal
        assert not torch.equal(x, sharded.ones(chunks(0, 0, 1), 4, 2 + here))
        assert torch.equal(x, x)
        return said

    first, second = run_ranks(2, on_rank)
    assert first == second
    assert "rank 1: ShardError: equal: " in first[0]


def test_loading_raises_on_all_ranks_where_one_loads_something_else() -> None:
    def on_rank() -> list[str]:
        here, said = comm.rank(), []
        model = nn.Identity()
        model.table = sharded.zeros(chunks(0, 0, 1), 4)
        model._register_load_state_dict_pre_hook(sharded.pre_load_state_dict_hook, True)
        turned = sharded.ones(chunks(0, 1, 0), 4)
        for mine in ({"table": torch.ones(4)}, {}, {"table": sharded.ones(chunks(0, 0, 1), 4)}, {"table": None}):
            given = dict(mine) if here else {"table": turned}
            said.append(refusal(DisagreementError, lambda given=given: model.load_state_dict(given)))
        assert torch.equal(model.table.local_tensor(), torch.zeros(2))
        model.load_state_dict({"table": turned})
        assert torch.equal(model.table.local_tensor(), torch.ones(2))

        table = sharded.ones(chunks(0, 0), 6, 2, requires_grad=True)  # rank 1 has none of it
        optimizer = sharded.ShardedOptimizer({"table": table}, torch.optim.Adam, lr=0.1)
        functional.embedding(torch.tensor([0, 5]), table).sum().backward()
        optimizer.step()
        saved = optimizer.state_dict()
        other = {"state": {"table": {**saved["state"]["table"], "exp_avg": torch.ones(6, 2)}}}
        for mine in ({"state": None}, {"state": {"table": None}}, {"param_groups": None}, other):
            given = {**saved, **mine} if here else saved
            said.append(refusal(RankFailedError, lambda given=given: optimizer.load_state_dict(given)))
        cut = saved["state"]["table"]["exp_avg"].detach().reshard(chunks(1, 0, 1))
        resharded = {"state": {"table": {**saved["state"]["table"], "exp_avg": cut}}}
        given = {**saved, **resharded} if here else saved
        said.append(refusal(DisagreementError, lambda: optimizer.load_state_dict(given)))
        table.reshard(chunks(0, 0, 0))
        said.append(refusal(RankFailedError, optimizer.state_dict))
        said.append(refusal(RankFailedError, lambda: optimizer.load_state_dict(saved)))
        return said

    first, second = run_ranks(2, on_rank)
    assert first == second
    assert "'table' is not the same on all ranks: rank 0: a ShardedTensor of torch.float32 with" in first[0]
    assert "rank 1: expected a ShardedTensor, got Tensor" in first[0]
    assert "rank 1: missing" in first[1]
    assert "'state' must be a dict by parameter name, got NoneType" in first[4]
    assert "rank 0: ShardError: ShardedOptimizer: the shards of 'table' have been replaced" in first[-1]


def test_a_parameter_may_be_on_meta_on_ranks_that_are_not_the_source() -> None:
    def on_rank() -> list[str]:
        torch.manual_seed(3)
        expected = nn.Linear(3, 4)
        for spec in (chunks(0, 0, 1), chunks(0, 0), chunks(1, 1)):
            model = copy.deepcopy(expected) if comm.rank() == 1 else nn.Linear(3, 4, device="meta")
            sharded.shard_parameter(model, "weight", spec, src_rank=1)
            for shard in model.weight.local_shards():
                assert torch.equal(shard.tensor, expected.weight.detach()[shard.metadata.region.slices()])
        bare = nn.Linear(3, 4, device="meta")
        said = refusal(RankFailedError, lambda: sharded.shard_parameter(bare, "weight", chunks(0, 0, 1)))
        nowhere = ChunkShardingSpec(0, ["rank:0/meta", "rank:1/meta"])
        sharded.shard_parameter(bare, "weight", nowhere)
        assert bare.weight.local_tensor().is_meta
        return [said]

    first, second = run_ranks(2, on_rank)
    assert first == second
    assert "rank 0: ShardError: shard: the tensor of the source rank 0 is a meta tensor" in first[0]


def test_what_has_no_meaning_says_the_reason_that_it_has() -> None:
    x = sharded.ones(chunks(0, 0, 0), 4, requires_grad=True)
    loss = torch.ones(1, requires_grad=True).sum()
    for call, reason in (
        (lambda: float(x), "gather()"),
        (lambda: int(x), "gather()"),
        (lambda: complex(x), "gather()"),
        (lambda: [0, 1][x], "gather()"),
        (lambda: x.item(), "gather()"),
        (lambda: x.tolist(), "gather()"),
        (lambda: torch.from_dlpack(x), "each shard has its own memory"),
        (lambda: np.from_dlpack(x), "each shard has its own memory"),
        (lambda: x.data_ptr(), "each shard has its own memory"),
        (lambda: x.share_memory_(), "each shard has its own memory"),
        (lambda: x.numpy(), "each shard has its own memory"),
        (lambda: x.register_hook(print), "only the shards are in the autograd graph"),
        (lambda: torch.autograd.grad(loss, [x]), "only the shards are in the autograd graph"),
        (lambda: x.new_zeros(3), "sharded.zeros(spec, size)"),
        (lambda: torch.linalg.vector_norm(x), "sharded.clip_grad_norm_"),
        (lambda: torch._foreach_norm([x]), "sharded.clip_grad_norm_"),
    ):
        words = refusal(UnsupportedError, call)
        assert reason in words
        assert "does not support this operator, as it cannot be computed shard by shard. Convert" not in words
    with pytest.raises(RuntimeError, match="data pointer"):  # not a null pointer
        torch.utils.dlpack.to_dlpack(x.detach())


def test_sparse_gradients_say_that_they_are_sparse() -> None:
    def on_rank() -> str:
        table = sharded.rand(chunks(0, 0, 1, 0), 7, 2, requires_grad=True)
        functional.embedding(torch.tensor([0, 5, 5]), table, sparse=True).sum().backward()
        gradient: Any = table.grad
        assert gradient.layout == torch.sparse_coo
        assert gradient.is_sparse
        dense = gradient.to_dense()
        assert dense.layout == torch.strided
        whole = dense.gather()
        assert whole is None or whole.sum() == 12
        with pytest.raises(RuntimeError, match="SparseAdam"):
            torch.optim.Adam([table], foreach=False).step()
        assert "ShardedOptimizer" in refusal(UnsupportedError, torch.optim.SparseAdam([table]).step)
        before = table.detach().clone()
        sharded.ShardedOptimizer({"table": table}, torch.optim.SparseAdam, lr=0.1).step()
        assert not torch.equal(table, before)
        for shard in table.local_shards()[:1]:  # the others' are sparse, too, where they are missing
            shard.tensor.grad = None
        zeros = table.grad
        assert zeros is None or zeros.local_shards()[0].tensor.layout == torch.sparse_coo
        assert refusal(UnsupportedError, lambda: gradient.reshard(chunks(0, 1, 0))).startswith("reshard: ")
        assert refusal(UnsupportedError, lambda: sharded.to_dtensor(gradient)).startswith("to_dtensor: ")
        return refusal(UnsupportedError, gradient.gather)

    first, second = run_ranks(2, on_rank)
    assert first == second
    assert "torch.sparse_coo, and only strided shards can be transferred: call to_dense()" in first


def test_many_copies_of_a_shard_behind_a_gap_are_refused_at_once() -> None:
    shards = [ShardMetadata([0], [1])] + [ShardMetadata([2], [1])] * 50_000
    started = time.monotonic()
    with pytest.raises(TilingError, match=r"overlap: shard 1 \[2:3\] and shard 2 \[2:3\] both hold \[2:3\]"):
        EnumerableShardingSpec(shards)
    assert time.monotonic() - started < 5  # all pairs would be 2,500 million


def test_a_pair_that_overlaps_is_found_where_there_is_one() -> None:
    rng, without = np.random.default_rng(0), 0
    for number in range(60):
        count, ndim = int(rng.integers(1, 300)), int(rng.integers(1, 4))
        boxes = Boxes(rng.integers(0, 60, (count, ndim)), rng.integers(0, 2 + number % 5, (count, ndim)))
        found = overlaps(boxes, boxes)
        expected = set(zip(found.first.tolist(), found.second.tolist(), strict=True))
        pair = overlapping_pair(boxes)
        without += pair is None
        if pair is None:
            assert all(first == second for first, second in expected)
        else:
            assert pair in expected
            assert pair[0] < pair[1]
    assert 0 < without < 60


def test_clipping_finds_the_norm_that_torch_finds_of_the_whole() -> None:
    def on_rank() -> list[str]:
        torch.manual_seed(1)
        wholes = [torch.rand(7, 3), torch.rand(5), torch.rand(4, dtype=torch.complex64), torch.rand(6)]
        gradients = [torch.randn_like(whole) for whole in wholes]
        gradients[1][2:] = 0
        for order in (2.0, 1, 3.5, 0.0, float("inf"), float("-inf")):
            plain = [whole.clone().requires_grad_() for whole in wholes]
            cut: list[Tensor] = [
                spec.shard(whole).requires_grad_()
                for spec, whole in zip(
                    (chunks(0, 0, 2, 0), chunks(0, 1, 1, 1, 1, 1, 1), chunks(0, 2)), wholes, strict=False
                )
            ]
            cut.append(plain[3].detach().clone().requires_grad_())
            for number, gradient in enumerate(gradients):
                plain[number].grad = gradient.clone()
                for shard in cut[number].local_shards() if isinstance(cut[number], ShardedTensor) else ():
                    shard.tensor.grad = gradient[shard.metadata.region.slices()].clone()
            cut[3].grad = gradients[3].clone()
            flat = torch.cat([gradient.abs().flatten() for gradient in gradients])
            found = sharded.clip_grad_norm_(cut, 0.7, order)
            assert type(found) is Tensor
            torch.testing.assert_close(found, torch.linalg.vector_norm(flat, order))
            factor = min(1.0, 0.7 / (found.item() + 1e-6))
            for tensor, gradient in zip(cut, gradients, strict=True):
                for shard in tensor.local_shards() if isinstance(tensor, ShardedTensor) else ():
                    expected = gradient[shard.metadata.region.slices()] * factor
                    torch.testing.assert_close(shard.tensor.grad, expected)
            torch.testing.assert_close(cut[3].grad, gradients[3] * factor)
        untouched = sharded.rand(chunks(0, 0), 3, requires_grad=True)
        assert sharded.clip_grad_norm_(untouched, 1.0) == 0
        table = sharded.rand(chunks(0, 0, 1), 6, 2, requires_grad=True)  # rank 2 has nothing
        functional.embedding(torch.tensor([1, 4]), table, sparse=True).sum().backward()
        assert sharded.clip_grad_norm_([table], 1e9) == torch.tensor([3.0] * 4).norm()
        here = comm.rank()
        if table.grad is not None:
            table.grad.mul_(float("nan"))
        return [
            refusal(ShardError, lambda: sharded.clip_grad_norm_([table], 1.0, error_if_nonfinite=True)),
            refusal(DisagreementError, lambda: sharded.clip_grad_norm_([table], 1.0 + here)),
            refusal(RankFailedError, lambda: sharded.clip_grad_norm_([table], "1" if here else 1.0)),
            refusal(ArgumentTypeError, lambda: sharded.clip_grad_norm_([table], 1.0, None)),
        ]

    first, second, third = run_ranks(3, on_rank)
    assert first == second == third
