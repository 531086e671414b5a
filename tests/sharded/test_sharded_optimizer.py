"""Training with ShardedOptimizer equals training unsharded tensors with torch's optimizer in one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardwright import comm, sharded
from shardwright.errors import ArgumentTypeError, ShardError, UnsupportedError
from shardwright.sharded import ShardMetadata
from shardwright.testing import run_ranks

OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "SGD": (torch.optim.SGD, {"lr": 0.1}),
    "SGD with momentum": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}),
    "Adam": (torch.optim.Adam, {"lr": 0.1, "amsgrad": True}),
    "AdamW, foreach": (torch.optim.AdamW, {"lr": 0.1, "foreach": True}),
    "Adagrad": (torch.optim.Adagrad, {"lr": 0.1, "lr_decay": 0.1, "initial_accumulator_value": 0.5}),
    "NAdam": (torch.optim.NAdam, {"lr": 0.1}),
    "Rprop": (torch.optim.Rprop, {"lr": 0.1}),
}
# Two shards on rank 0, one on rank 2, none on rank 1; others, none on rank 0; a row each, and an empty last one.
SEVERAL = sharded.EnumerableShardingSpec(
    [
        ShardMetadata([0, 0], [2, 3], "rank:0/cpu"),
        ShardMetadata([2, 0], [3, 1], "rank:2/cpu"),
        ShardMetadata([2, 1], [3, 2], "rank:0/cpu"),
    ]
)
OTHERWISE = sharded.ChunkShardingSpec(0, ["rank:1/cpu", "rank:1/cpu", "rank:2/cpu", "rank:1/cpu", "rank:1/cpu"])
EMPTY = sharded.ChunkShardingSpec(
    0, [f"rank:{rank}/cpu" for rank in (1, 0, 1, 2, 1, 2)]
)  # one row each, none for the last


def _table() -> Tensor:
    return torch.linspace(-1, 1, 15).reshape(5, 3)


def _scale() -> Tensor:
    return torch.tensor([0.5, -2.0])


def _loss(table: Tensor, rows: Tensor, scale: Tensor) -> Tensor:
    """Elementwise, with gradients of both signs."""
    return ((table * rows) ** 2 - table * rows.sin()).sum() + (scale**3).sum()


def _weights() -> Tensor:
    return torch.arange(15.0).reshape(5, 3) / 7


def _train(table: sharded.ShardedTensor, scale: Tensor, optimizer: Any, steps: int) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        (scale**3).sum().backward()
        for shard in table.local_shards():
            rows = _weights()[shard.metadata.region.slices()]
            _loss(shard.tensor, rows, torch.zeros(1)).backward()
        optimizer.step()


def _train_whole(kind: type[torch.optim.Optimizer], how: dict[str, Any], steps: int) -> tuple[Tensor, Tensor, Any]:
    table, scale = _table().requires_grad_(), _scale().requires_grad_()
    optimizer = kind([table, scale], **how)
    for _ in range(steps):
        optimizer.zero_grad()
        _loss(table, _weights(), scale).backward()
        optimizer.step()
    return table.detach(), scale.detach(), optimizer.state_dict()["state"]


def _gathered(tensor: sharded.ShardedTensor) -> Tensor:
    """The full tensor, on every rank."""
    whole = tensor.detach().gather()
    return comm.broadcast(torch.empty(tensor.shape, dtype=tensor.dtype) if whole is None else whole)


def _refusal(kind: type[Exception], call: Callable[[], Any]) -> str:
    with pytest.raises(kind) as raised:
        call()
    return str(raised.value)


def _made(spec: sharded.ShardingSpec, name: str) -> tuple[sharded.ShardedTensor, Tensor, sharded.ShardedOptimizer]:
    kind, how = OPTIMIZERS[name]
    table, scale = spec.shard(_table()).requires_grad_(), _scale().requires_grad_()
    return table, scale, sharded.ShardedOptimizer({"table": table, "scale": scale}, kind, **how)


def test_training_shards_equals_training_unsharded_tensors() -> None:
    def on_rank() -> None:
        for spec in (SEVERAL, EMPTY):
            for name, (kind, how) in OPTIMIZERS.items():
                table, scale, optimizer = _made(spec, name)
                with comm.count() as traffic:
                    _train(table, scale, optimizer, 4)
                assert not traffic.bytes, "a step is local"
                whole, plain, _ = _train_whole(kind, how, 4)
                torch.testing.assert_close(_gathered(table), whole, msg=name)
                assert torch.equal(scale, plain), name

    run_ranks(3, on_rank)


def test_the_state_dict_is_keyed_by_name_and_complete_on_every_rank() -> None:
    def on_rank() -> None:
        for spec in (SEVERAL, EMPTY):
            for name, (kind, how) in OPTIMIZERS.items():
                table, scale, optimizer = _made(spec, name)
                _train(table, scale, optimizer, 3)
                saved = optimizer.state_dict()
                reference = _train_whole(kind, how, 3)[2]
                expected = {("table", "scale")[number]: state for number, state in reference.items() if state}
                assert saved["state"].keys() == expected.keys(), name
                for parameter, state in expected.items():
                    assert saved["state"][parameter].keys() == state.keys(), name
                    for key, value in state.items():
                        mine = saved["state"][parameter][key]
                        if parameter == "table" and isinstance(value, Tensor) and value.ndim:
                            assert mine.shards_metadata() == table.shards_metadata()
                            mine = _gathered(mine)
                        torch.testing.assert_close(mine, value, msg=f"{name}, {key}")
                assert [group["params"] for group in saved["param_groups"]] == [["table", "scale"]]
                assert saved["param_groups"][0]["lr"] == how["lr"]

    run_ranks(3, on_rank)


def test_a_state_dict_continues_identically_with_another_sharding() -> None:
    def on_rank() -> None:
        for name in OPTIMIZERS:
            table, scale, optimizer = _made(SEVERAL, name)
            _train(table, scale, optimizer, 2)
            saved = optimizer.state_dict()
            before = dict(saved["state"].get("table", {}))
            for spec in (SEVERAL, OTHERWISE, EMPTY):
                again, factor = table.detach().clone().reshard(spec).requires_grad_(), scale.detach().clone()
                named = {"scale": factor.requires_grad_(), "table": again}  # the order is another, too
                other = sharded.ShardedOptimizer(named, OPTIMIZERS[name][0], lr=7.0)
                other.load_state_dict(saved)
                _train(again, factor, other, 2)
                reference = _train_whole(*OPTIMIZERS[name], steps=4)
                torch.testing.assert_close(_gathered(again), reference[0], msg=name)
                assert torch.equal(factor, reference[1]), name
                for key, value in before.items():  # the one it was loaded from is not stepped
                    assert saved["state"]["table"][key] is value
                    if isinstance(value, sharded.ShardedTensor):
                        assert value.shards_metadata() == table.shards_metadata()
                    elif key == "step":
                        assert value == 2

    run_ranks(3, on_rank)


def test_a_module_with_a_sharded_table_trains_as_in_one_process() -> None:
    def on_rank() -> None:
        torch.manual_seed(0)
        batches = torch.randint(5, (4, 3, 7))  # by step and rank
        whole = nn.Embedding(5, 3)
        reference = torch.optim.Adagrad(whole.parameters(), lr=0.1)
        model = nn.ModuleDict({"table": nn.Embedding(5, 3)})
        model["table"].load_state_dict(whole.state_dict())
        sharded.shard_module(model, sharded.ShardingPlan({"table.weight": SEVERAL}))
        named = dict(sharded.named_params_with_sharded_tensor(model))
        optimizer = sharded.ShardedOptimizer(named, torch.optim.Adagrad, lr=0.1)
        for batch in batches:
            for step, forward, rows in ((reference, whole, batch), (optimizer, model["table"], batch[comm.rank()])):
                step.zero_grad()
                (forward(rows).sin() ** 2).sum().backward()
                step.step()
        torch.testing.assert_close(_gathered(model["table"].weight), whole.weight.detach())

    run_ranks(3, on_rank)


def test_param_groups_schedulers_closures_and_hooks_work_as_in_torch() -> None:
    def on_rank() -> None:
        table, scale = SEVERAL.shard(_table()).requires_grad_(), _scale().requires_grad_()
        optimizer = sharded.ShardedOptimizer({"table": table}, torch.optim.SGD, lr=1.0, momentum=0.5)
        optimizer.add_param_group({"params": {"scale": scale}, "lr": 4.0})
        assert [group["lr"] for group in optimizer.param_groups] == [1.0, 4.0]
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        called = []
        optimizer.register_step_post_hook(lambda *_: called.append(1))

        def closure() -> float:
            for shard in table.local_shards():
                shard.tensor.grad = torch.ones_like(shard.tensor)
            scale.grad = torch.ones_like(scale)
            return 3.5

        assert optimizer.step(closure) == 3.5
        scheduler.step()
        assert called == [1]
        assert [group["lr"] for group in optimizer.param_groups] == [0.5, 2.0]
        assert torch.equal(_gathered(table), _table() - 1)
        assert torch.equal(scale.detach(), _scale() - 4)
        saved = optimizer.state_dict()
        assert [group["params"] for group in saved["param_groups"]] == [["table"], ["scale"]]
        twin = sharded.ShardedOptimizer({"table": table}, torch.optim.SGD, lr=9.0)
        twin.add_param_group({"params": {"scale": scale}})
        twin.load_state_dict(saved)
        assert [group["lr"] for group in twin.param_groups] == [0.5, 2.0]
        optimizer.zero_grad()
        assert scale.grad is None
        assert all(shard.tensor.grad is None for shard in table.local_shards())
        assert len(optimizer.param_groups[0]["params"]) == len(table.local_shards()) == (2, 0, 1)[comm.rank()]

    run_ranks(3, on_rank)


def test_a_rank_without_shards_steps_and_saves() -> None:
    def on_rank() -> list[str]:
        table = sharded.ChunkShardingSpec(0, ["rank:0/cpu"]).shard(_table()).requires_grad_()
        optimizer = sharded.ShardedOptimizer({"table": table}, torch.optim.Adam)
        assert optimizer.state_dict()["state"] == {}  # nothing was stepped yet
        for shard in table.local_shards():
            shard.tensor.grad = torch.ones_like(shard.tensor)
        optimizer.step()
        state = optimizer.state_dict()["state"]["table"]
        assert state["step"] == 1
        assert torch.allclose(_gathered(state["exp_avg"]), torch.full((5, 3), 0.1))
        return list(state)

    first, second = run_ranks(2, on_rank)
    assert first == second == ["step", "exp_avg", "exp_avg_sq"]


def test_mismatched_state_dicts_raise_with_the_name() -> None:
    def on_rank() -> dict[str, str]:
        table, scale, optimizer = _made(SEVERAL, "Adam")
        _train(table, scale, optimizer, 1)
        saved = optimizer.state_dict()
        state, groups = saved["state"], saved["param_groups"]
        smaller = sharded.zeros(OTHERWISE, 5, 2)
        found = {}
        for case, bad in {
            "keys": {"states": state},
            "groups": {"state": state, "param_groups": groups * 2},
            "names": {"state": {}, "param_groups": [{**groups[0], "params": ["table", "skale"]}]},
            "stranger": {"state": {"skale": {}}, "param_groups": groups},
            "size": {"state": {"table": {"exp_avg": smaller}}, "param_groups": groups},
            "plain": {"state": {"table": {"exp_avg": torch.zeros(5, 3)}}, "param_groups": groups},
        }.items():
            found[case] = _refusal(ShardError, lambda bad=bad: optimizer.load_state_dict(bad))
        if comm.rank() == 0:
            table.local_shards()[1].tensor.grad = None
        optimizer.step()
        found["unstepped"] = _refusal(ShardError, optimizer.state_dict)
        table.reshard(OTHERWISE)
        found["resharded"] = _refusal(ShardError, optimizer.step)
        return found

    found, second, third = run_ranks(3, on_rank)
    load = "load_state_dict of a ShardedOptimizer: "
    assert found["keys"] == f"{load}expected the keys 'state' and 'param_groups', got ['states']"
    assert found["groups"] == f"{load}it has 2 parameter groups, but the optimizer has 1"
    assert "group 0 lacks the parameters ['scale'] and has ['skale']" in found["names"]
    assert found["stranger"] == f"{load}'skale' is not a parameter of the optimizer"
    assert "'exp_avg' of 'table' is of size [5, 2], but the parameter has size [5, 3]" in found["size"]
    assert "'exp_avg' of 'table' is a Tensor, but the parameter has type ShardedTensor" in found["plain"]
    assert "parameter 'table': rank 0: two of its shards differ in" in found["unstepped"]
    assert found["unstepped"] == second["unstepped"] == third["unstepped"]
    assert "the shards of 'table' have been replaced since the optimizer was created" in found["resharded"]


def test_ranks_with_different_states_raise_the_same_error() -> None:
    def on_rank() -> tuple[str, str]:
        table = sharded.ChunkShardingSpec(0, ["rank:0/cpu", "rank:1/cpu"]).shard(_table()).requires_grad_()
        optimizer = sharded.ShardedOptimizer({"table": table}, torch.optim.Adam)
        fresh = optimizer.state_dict()
        table.local_tensor().grad = torch.ones_like(table.local_tensor())
        optimizer.step()
        saved = optimizer.state_dict()
        loading = _refusal(ShardError, lambda: optimizer.load_state_dict(saved if comm.rank() else fresh))
        if comm.rank():
            optimizer.step()
        return loading, _refusal(ShardError, optimizer.state_dict)

    (loading, first), (_, second) = run_ranks(2, on_rank)
    assert "ranks disagree: rank 0 has state of 0 parameters" in loading
    assert "parameter 'table': ranks 0 and 1 differ in 'step'" in first
    assert first == second


def test_optimizers_that_are_not_elementwise_raise() -> None:
    table = sharded.ones(sharded.ChunkShardingSpec(0, ["rank:0/cpu"]), 4, 4, requires_grad=True)
    for kind in (torch.optim.LBFGS, torch.optim.Adafactor):
        with pytest.raises(UnsupportedError, match=f"{kind.__name__} is not elementwise"):
            sharded.ShardedOptimizer({"table": table}, kind)

    class Rows(torch.optim.SGD):
        """One that remembers a number for each row."""

        def step(self, closure: Any = None) -> None:  # type: ignore[override]  # overloaded there
            for parameter in self.param_groups[0]["params"]:
                self.state[parameter]["rows"] = torch.zeros(4)

    optimizer = sharded.ShardedOptimizer({"table": table}, Rows)
    optimizer.step()
    with pytest.raises(ShardError, match=r"'rows' must be .*, got Tensor of size \[4\]: .* not elementwise"):
        optimizer.state_dict()


def test_invalid_arguments_raise() -> None:
    table = sharded.ones(sharded.ChunkShardingSpec(0, ["rank:0/cpu"]), 4, requires_grad=True)
    with pytest.raises(ShardError, match="'b' and 'a' are the same tensor"):
        sharded.ShardedOptimizer({"a": table, "b": table}, torch.optim.SGD)
    with pytest.raises(ArgumentTypeError, match="'a' must be a tensor, got list"):
        sharded.ShardedOptimizer({"a": [1.0]}, torch.optim.SGD)  # type: ignore[dict-item]  # that is the test
    with pytest.raises(ArgumentTypeError, match=r"expected a subclass of torch\.optim\.Optimizer, got 'Adam'"):
        sharded.ShardedOptimizer({"a": table}, "Adam")  # type: ignore[arg-type]  # that is the test
    optimizer = sharded.ShardedOptimizer({"a": table}, torch.optim.SGD)
    with pytest.raises(ArgumentTypeError, match=r"params must be a dict .*, got list"):
        optimizer.add_param_group({"params": [table]})
    with pytest.raises(ShardError, match="'a' is already in another group"):
        optimizer.add_param_group({"params": {"a": torch.ones(1)}})
    with pytest.raises(ShardError, match="'b' and 'a' are the same tensor"):
        optimizer.add_param_group({"params": {"b": table}})
    with pytest.raises(UnsupportedError, match="save its state_dict"):
        torch.save(optimizer, "/dev/null")


def test_named_params_yields_parameters_and_attributes_once() -> None:
    spec = sharded.ChunkShardingSpec(0, ["rank:0/cpu"])
    model = nn.Sequential(nn.Linear(2, 3, bias=False), nn.Linear(2, 3))
    model[1].weight = model[0].weight
    model.table = model[1].alias = sharded.ones(spec, 4)
    model[1].rows = nn.Parameter(sharded.ones(spec, 4))
    names = [name for name, _ in sharded.named_params_with_sharded_tensor(model)]
    assert names == ["table", "0.weight", "1.bias", "1.rows"]
    names = [name for name, _ in sharded.named_params_with_sharded_tensor(model, "model")]
    assert names == ["model.table", "model.0.weight", "model.1.bias", "model.1.rows"]
    names = [name for name, _ in sharded.named_params_with_sharded_tensor(model, "model", recurse=False)]
    assert names == ["model.table"]
