"""shard_parameter and shard_module replace parameters by ShardedTensors according to a plan."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from shardwright import comm, sharded
from shardwright.errors import ArgumentTypeError, DisagreementError, RankFailedError, ShardError, UnsupportedError
from shardwright.testing import run_ranks

ROWS = sharded.ChunkShardingSpec(0, ["rank:0/cpu", "rank:2/cpu", "rank:0/cpu"])
COLUMNS = sharded.ChunkShardingSpec(1, ["rank:1/cpu", "rank:0/cpu"])
ALONE = sharded.ChunkShardingSpec(0, ["rank:0/cpu", "rank:0/cpu"])


class Tables(nn.Module):
    """Two tables, a layer whose weight is one of them, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Embedding(6, 4)
        self.second = nn.Embedding(6, 4)
        self.tied = nn.Linear(4, 6, bias=False)
        self.tied.weight = self.first.weight
        self.head = nn.Sequential(nn.Linear(4, 2))


class TwoRows(sharded.Sharder):
    """Shards by rows into another class of module."""

    def shard(self, module: nn.Module) -> nn.Module:
        made = nn.Module()
        made.rows = nn.Parameter(ALONE.shard(module.weight))  # type: ignore[arg-type]  # it is a parameter
        return made


class Nothing(sharded.Sharder):
    def shard(self, module: nn.Module) -> nn.Module:
        return 3  # type: ignore[return-value]  # that is the test


def _refusal(kind: type[Exception], call: Callable[[], Any]) -> str:
    with pytest.raises(kind) as raised:
        call()
    return str(raised.value)


def test_a_parameter_is_scattered_from_one_rank() -> None:
    def on_rank() -> None:
        torch.manual_seed(comm.rank())
        for source in (0, 1):
            layer = nn.Linear(4, 6)
            layer.bias.requires_grad_(False)
            whole = {name: comm.broadcast(value.detach(), src=source) for name, value in layer.named_parameters()}
            sharded.shard_parameter(layer, "weight", ROWS, src_rank=source)
            with comm.count() as traffic:
                sharded.shard_parameter(layer, "bias", ROWS, src_rank=source)
            assert isinstance(layer.weight, nn.Parameter)
            assert isinstance(layer.weight, sharded.ShardedTensor)
            assert layer.weight.sharding_spec() is ROWS
            assert layer.weight.requires_grad
            assert not layer.bias.requires_grad
            assert [name for name, _ in layer.named_parameters()] == ["weight", "bias"]
            for name, tensor in layer.named_parameters():
                assert isinstance(tensor, sharded.ShardedTensor)
                assert len(tensor.local_shards()) == (2, 0, 1)[comm.rank()]
                for shard in tensor.local_shards():
                    assert shard.tensor.is_leaf
                    assert torch.equal(shard.tensor, whole[name][shard.metadata.region.slices()])
            own = sum(shard.tensor.nbytes for shard in layer.bias.local_shards())
            assert traffic.bytes == (0 if comm.rank() == source else own)

    run_ranks(3, on_rank)


def test_buffers_and_attributes_become_parameters() -> None:
    module = nn.Module()
    module.register_buffer("counts", torch.arange(4))
    module.rows = torch.arange(6.0)
    module.child = nn.Linear(2, 2)
    for name in ("counts", "rows", "child.weight"):
        sharded.shard_parameter(module, name, ALONE)
    assert [name for name, _ in module.named_parameters()] == ["counts", "rows", "child.weight", "child.bias"]
    assert not dict(module.named_buffers())
    assert module.counts.gather().tolist() == [0, 1, 2, 3]
    assert not module.rows.requires_grad


def test_a_parameter_that_cannot_be_sharded_raises_with_the_reason() -> None:
    layer = nn.Linear(4, 6)
    layer.wide = nn.Parameter(torch.zeros(3, 4).T)
    layer.done = nn.Parameter(sharded.ones(ALONE, 4))
    layer.note = "text"
    for name, spec, reason in (
        ("wieght", ALONE, "'wieght' is not a parameter: did you mean 'weight'"),
        ("nowhere.bias", ALONE, "'nowhere.bias' is not a parameter$"),
        ("note", ALONE, "'note' must be a tensor, got str"),
        ("wide", ALONE, r"'wide' of size \[4, 3\] has strides \[1, 4\]: call contiguous"),
        ("done", ALONE, "'done' is already a ShardedTensor: use its reshard"),
        ("weight", "rows", "'weight': expected a ShardingSpec, got str"),
    ):
        with pytest.raises(ShardError, match=reason):
            sharded.shard_parameter(layer, name, spec)  # type: ignore[arg-type]  # one of them is a mistake


def test_disagreement_raises_the_same_error_on_all_ranks() -> None:
    def on_rank() -> list[str]:
        rank = comm.rank()
        layer = nn.Linear(4, 6) if rank else nn.Linear(4, 5)
        wrong = sharded.ChunkShardingSpec(1, ["rank:0/cpu", "rank:1/cpu"])
        right = sharded.ChunkShardingSpec(0, ["rank:0/cpu", "rank:1/cpu"])
        same = nn.Linear(4, 6)
        found = [
            _refusal(DisagreementError, lambda: sharded.shard_parameter(layer, "weight", right)),
            _refusal(DisagreementError, lambda: sharded.shard_parameter(same, "weight", wrong if rank else right)),
            _refusal(DisagreementError, lambda: sharded.shard_parameter(same, "weight" if rank else "bias", right)),
            _refusal(RankFailedError, lambda: sharded.shard_parameter(same, "weight" if rank else "width", right)),
        ]
        plan = {"weight": right, "bias": right}
        if rank:
            plan = dict(reversed(plan.items()))
        found.append(_refusal(DisagreementError, lambda: sharded.shard_module(same, sharded.ShardingPlan(plan))))
        assert type(same.weight) is nn.Parameter
        return found

    first, second = run_ranks(2, on_rank)
    assert first == second
    assert "rank 0 has [5, 4]" in first[0]
    assert "rank 0 has parameter 'bias'; rank 1 has parameter 'weight'" in first[2]
    assert "rank 0: ShardError: shard_parameter: 'width' is not a parameter" in first[3]
    assert "rank 0 has ['weight', 'bias']" in first[4]


def test_a_plan_shards_parameters_and_modules_and_keeps_tied_weights() -> None:
    def on_rank() -> None:
        torch.manual_seed(0)
        model = Tables()
        whole = model.first.weight.detach().clone()
        plan = sharded.ShardingPlan({"tied.weight": ROWS, "second": TwoRows(), "head.0.weight": COLUMNS})
        sharded.shard_module(model, plan, src_rank=1)
        assert model.tied.weight is model.first.weight
        assert isinstance(model.first.weight, sharded.ShardedTensor)
        gathered = model.first.weight.detach().gather(2)
        assert gathered is None or torch.equal(gathered, whole)
        names = [name for name, _ in model.named_parameters()]
        assert names == ["first.weight", "second.rows", "head.0.weight", "head.0.bias"]
        assert model.head[0].weight.sharding_spec() is COLUMNS
        assert type(model.head[0].bias) is nn.Parameter

    run_ranks(3, on_rank)


def test_an_invalid_plan_lists_all_problems_and_changes_nothing() -> None:
    model = Tables()
    before = dict(model.named_parameters(remove_duplicate=False))
    plan = sharded.ShardingPlan(
        {
            "frist.weight": ALONE,
            "first": ALONE,
            "first.weight": ALONE,
            "tied.weight": ALONE,
            "second": TwoRows(),
            "second.weight": ALONE,
            "haed": TwoRows(),
            "head.0.weight": "rows",  # type: ignore[dict-item]  # that is the test
            "": TwoRows(),
        },
        output_plan={"tide": ALONE, "head": 3},  # type: ignore[dict-item]  # that is the test
        return_local_tensor=["", "haed.0"],
    )
    with pytest.raises(ShardError) as raised:
        sharded.shard_module(model, plan)
    assert str(raised.value).removeprefix("shard_module: ").split("; ") == [
        "'frist.weight' is not a parameter: did you mean 'first.weight'?",
        "'first' must be a tensor, got Embedding",
        "'tied.weight' and 'first.weight' are the same tensor: list only one of them",
        "'second.weight' is inside 'second', which has a Sharder of its own",
        "'haed' is not a module: did you mean 'head'?",
        "'head.0.weight': expected a ShardingSpec or a Sharder, got str",
        "a Sharder for '' would replace the module itself: call its shard(module)",
        "'tide' is not a module: did you mean 'tied'?",
        "the output of 'head': expected a ShardingSpec, got int",
        "'haed.0' is not a module: did you mean 'head.0'?",
    ]
    assert dict(model.named_parameters(remove_duplicate=False)) == before
    with pytest.raises(ArgumentTypeError, match=r"plan must be a sharded\.ShardingPlan, got dict"):
        sharded.shard_module(model, {"first.weight": ALONE})  # type: ignore[arg-type]  # that is the test
    with pytest.raises(ArgumentTypeError, match=r"Nothing\.shard must return a module for 'second', got int"):
        sharded.shard_module(model, sharded.ShardingPlan({"second": Nothing()}))


def test_a_plan_accepts_none_for_unused_parts() -> None:
    plan = sharded.ShardingPlan({}, output_plan=None, return_local_tensor=None)  # type: ignore[arg-type]  # PyTorch's way
    assert (plan.output_plan, plan.return_local_tensor) == ({}, [])


class Doubled(nn.Module):
    """Gives its table, twice its values, as a ShardedTensor with a history."""

    def __init__(self, spec: sharded.ShardingSpec) -> None:
        super().__init__()
        self.table = nn.Parameter(spec.shard(torch.arange(12.0).reshape(6, 2)))

    def forward(self) -> sharded.ShardedTensor:
        shards = [shard.tensor * 2 for shard in self.table.local_shards()]
        return self.table._with(shards, requires_grad=True)


def test_outputs_are_resharded_and_collected_with_gradients() -> None:
    def on_rank() -> None:
        each = sharded.ChunkShardingSpec(0, ["rank:2/cpu", "rank:0/cpu", "rank:1/cpu"])
        module = Doubled(ROWS)
        model = nn.Sequential(module, nn.Identity())
        plan = sharded.ShardingPlan({}, output_plan={"0": each}, return_local_tensor=["0"])
        sharded.shard_module(model, plan)
        given = model[0]()
        start = {2: 0, 0: 2, 1: 4}[comm.rank()]
        assert torch.equal(given, 2 * torch.arange(12.0).reshape(6, 2)[start : start + 2])
        (given * (comm.rank() + 1)).sum().backward()
        factor = torch.tensor([3.0, 3, 1, 1, 2, 2])[:, None].expand(6, 2)  # by rows: one more than who was given them
        for shard in module.table.local_shards():
            assert torch.equal(shard.tensor.grad, 2 * factor[shard.metadata.region.slices()])
        assert module.table.sharding_spec() is ROWS

    run_ranks(3, on_rank)


def test_resharding_an_output_does_not_change_the_own_tensor_of_the_module() -> None:
    kept = nn.Parameter(sharded.ones(ALONE, 4, 2))
    sideways = sharded.ChunkShardingSpec(1, ["rank:0/cpu", "rank:0/cpu"])
    cut = sharded.reshard_output(nn.Identity(), sideways)(kept)
    assert cut.sharding_spec() is sideways
    assert kept.sharding_spec() is ALONE
    sum((number + 1) * shard.tensor.sum() for number, shard in enumerate(cut.local_shards())).backward()
    assert kept.grad.gather().tolist() == [[1.0, 2.0]] * 4


def test_outputs_of_other_types_raise() -> None:
    plain = torch.ones(2)
    assert sharded.collect_local_shard(nn.Identity())(plain) is plain
    with pytest.raises(ArgumentTypeError, match="Identity must return a tensor, got tuple"):
        sharded.collect_local_shard(nn.Identity())((plain, plain))
    with pytest.raises(ArgumentTypeError, match="Identity must return a ShardedTensor, got Tensor"):
        sharded.reshard_output(nn.Identity(), ALONE)(plain)
    with pytest.raises(ArgumentTypeError, match="expected a ShardingSpec, got str"):
        sharded.reshard_output(nn.Identity(), "rows")  # type: ignore[arg-type]  # that is the test
    with pytest.raises(UnsupportedError, match="rank 0 has 2 shards, expected exactly one"):
        sharded.collect_local_shard(nn.Identity())(sharded.ones(ALONE, 4))
