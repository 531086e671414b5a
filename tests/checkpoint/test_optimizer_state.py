"""Optimizers resume with the same parameters or others of the same names, stepped or not, in any layout."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shardwright as sw
from shardwright import checkpoint, comm, sharded
from shardwright.checkpoint import optimizer_state
from shardwright.errors import ArgumentTypeError, LoadMismatchError, StateError
from shardwright.testing import run_ranks

Make = Callable[[Any], torch.optim.Optimizer]

OPTIMIZERS: dict[str, Make] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "Adam": lambda p: torch.optim.Adam(p, lr=0.1, amsgrad=True),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.1), foreach=False),
    "capturable": lambda p: torch.optim.NAdam(p, lr=0.1),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.1, momentum=0.5, centered=True),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
    "Rprop": lambda p: torch.optim.Rprop(p, lr=0.1),
    "ASGD": lambda p: torch.optim.ASGD(p, lr=0.1),
    "Adafactor": lambda p: torch.optim.Adafactor(p, lr=0.1),
    "LBFGS": lambda p: torch.optim.LBFGS(p, lr=0.1, max_iter=3),
}


def build(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> list[float]:
    generator = torch.Generator().manual_seed(1)
    losses = []

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss: torch.Tensor = model(x).square().mean()
        loss.backward()
        losses.append(loss.item())
        return loss

    for _ in range(steps):
        x = torch.randn(5, 3, generator=generator)
        optimizer.step(closure)
    return losses


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS.keys())
def test_load_creates_the_state_of_an_optimizer_that_has_not_stepped(make: Make, tmp_path: Path) -> None:
    model, other = build(), build(1)
    optimizer, fresh = make(model.parameters()), make(other.parameters())
    train(model, optimizer, 3)
    checkpoint.save({"model": model, "optimizer": optimizer}, tmp_path)
    for parameter in other.parameters():
        parameter.grad = torch.full_like(parameter, 5.0)
    grads = [parameter.grad for parameter in other.parameters()]
    generator = torch.get_rng_state()
    calls: list[Any] = []
    fresh.register_step_pre_hook(lambda *args: calls.append(args))
    checkpoint.load({"model": other, "optimizer": fresh}, tmp_path)
    assert not calls
    assert torch.equal(torch.get_rng_state(), generator)
    assert all(parameter.grad is grad for parameter, grad in zip(other.parameters(), grads, strict=True))
    assert all((grad == 5.0).all() for grad in grads)
    one, two = optimizer.state_dict()["state"], fresh.state_dict()["state"]
    assert {key: sorted(value) for key, value in one.items()} == {key: sorted(value) for key, value in two.items()}
    assert train(other, fresh, 3) == train(model, optimizer, 3)


def test_a_failed_load_leaves_the_optimizer_unchanged(tmp_path: Path) -> None:
    model = build()
    optimizer = OPTIMIZERS["Adam"](model.parameters())
    train(model, optimizer, 1)
    checkpoint.save({"optimizer": optimizer}, tmp_path)
    fresh = OPTIMIZERS["Adam"](build().parameters())
    with pytest.raises(LoadMismatchError, match="missing: 'more'"):
        checkpoint.load({"optimizer": fresh, "more": 1}, tmp_path)
    assert not fresh.state
    assert fresh.state_dict()["state"] == {}


def test_frozen_parameters_get_no_state(tmp_path: Path) -> None:
    def make() -> tuple[nn.Sequential, torch.optim.Optimizer]:
        model = build()
        model[0].requires_grad_(False)
        return model, torch.optim.Adam(model.parameters(), lr=0.1)

    model, optimizer = make()
    train(model, optimizer, 2)
    checkpoint.save(optimizer, tmp_path)
    other, fresh = make()
    checkpoint.load(fresh, tmp_path)
    assert sorted(fresh.state_dict()["state"]) == [2, 3]
    assert set(fresh.state) == set(other[2].parameters())
    # One that has stepped more than the checkpoint knows is told so.
    stepped = torch.optim.Adam(build().parameters(), lr=0.1)
    for parameter in stepped.param_groups[0]["params"]:
        parameter.grad = torch.zeros_like(parameter)
    stepped.step()
    with pytest.raises(LoadMismatchError, match=r"missing: 'state\.0\.exp_avg'"):
        checkpoint.load(stepped, tmp_path)


def test_optimizer_state_of_another_dtype_raises_without_cast(tmp_path: Path) -> None:
    model = build()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    train(model, optimizer, 1)
    checkpoint.save(optimizer, tmp_path)
    half = build().to(torch.bfloat16)
    fresh = torch.optim.Adam(half.parameters(), lr=0.1)
    with pytest.raises(LoadMismatchError, match=r"'state\.0\.exp_avg' is bfloat16 in the state, but float32"):
        checkpoint.load(fresh, tmp_path)
    checkpoint.load(fresh, tmp_path, cast=True)
    state = fresh.state[half[0].weight]
    assert state["exp_avg"].dtype == torch.bfloat16
    assert (state["step"].dtype, state["step"].item()) == (torch.float32, 1.0)


# --- by name ----------------------------------------------------------------------------------------------------------


def groups(model: nn.Sequential, order: list[int], size: int) -> list[dict[str, Any]]:
    """The parameters of a model in this order, in groups of this size."""
    named = list(model.named_parameters())
    chosen = [named[place][1] for place in order]
    return [{"params": chosen[at : at + size]} for at in range(0, len(chosen), size)]


@pytest.mark.parametrize("name", ["momentum", "Adam", "AdamW", "Adafactor"])
@pytest.mark.parametrize("stepped", [False, True])
def test_named_state_loads_into_another_order_and_other_groups(name: str, stepped: bool, tmp_path: Path) -> None:
    make = OPTIMIZERS[name]
    model, other = build(), build(1)
    optimizer = make(groups(model, [0, 1, 2, 3], 4))
    train(model, optimizer, 3)
    checkpoint.save({"model": model, "optimizer": optimizer_state(model, optimizer)}, tmp_path)
    fresh = make(groups(other, [3, 0, 2, 1], 1))
    for group in fresh.param_groups:
        group["lr"] = torch.tensor(9.0) if isinstance(group["lr"], torch.Tensor) else 9.0
    if stepped:
        train(other, fresh, 1)
    checkpoint.load({"model": other, "optimizer": optimizer_state(other, fresh)}, tmp_path)
    assert [float(group["lr"]) for group in fresh.param_groups] == pytest.approx([0.1] * 4)
    assert train(other, fresh, 3) == train(model, optimizer, 3)
    assert set(checkpoint.read(tmp_path)["optimizer"]["state"]) == set(dict(model.named_parameters()))


def test_strict_false_resumes_a_subset_of_the_parameters(tmp_path: Path) -> None:
    model = build()
    optimizer = OPTIMIZERS["Adam"](model.parameters())
    train(model, optimizer, 2)
    checkpoint.save(optimizer_state(model, optimizer), tmp_path)
    part = {"0.weight": model[0].weight}
    fresh = OPTIMIZERS["Adam"](part.values())
    with pytest.raises(LoadMismatchError, match=r"unexpected: 'options\.0\.bias\.lr'"):
        checkpoint.load(optimizer_state(part, fresh), tmp_path)
    checkpoint.load(optimizer_state(part, fresh), tmp_path, strict=False)
    assert torch.equal(fresh.state[model[0].weight]["exp_avg"], optimizer.state[model[0].weight]["exp_avg"])


def test_param_groups_keep_their_options(tmp_path: Path) -> None:
    model, other = build(), build()
    optimizer = torch.optim.SGD([{"params": [model[0].weight], "lr": 1.0}, {"params": [model[2].weight], "lr": 2.0}])
    checkpoint.save(optimizer_state(model, optimizer), tmp_path)
    fresh = torch.optim.SGD([{"params": [other[2].weight]}, {"params": [other[0].weight]}], lr=5.0)
    checkpoint.load(optimizer_state(other, fresh), tmp_path)
    assert [group["lr"] for group in fresh.param_groups] == [2.0, 1.0]
    mixed = torch.optim.SGD([other[0].weight, other[2].weight], lr=5.0)
    with pytest.raises(LoadMismatchError, match=r"'0.weight' and '2.weight' are in one group.*lr=1.0 and lr=2.0"):
        checkpoint.load(optimizer_state(other, mixed), tmp_path)
    assert mixed.param_groups[0]["lr"] == 5.0


def test_optimizer_state_of_another_model_raises() -> None:
    with pytest.raises(StateError, match=r"4 of 4 parameters of the SGD have no name"):
        optimizer_state(build(), torch.optim.SGD(build().parameters()))
    with pytest.raises(ArgumentTypeError, match="expected an optimizer, got int"):
        optimizer_state(build(), 3)  # type: ignore[arg-type]  # wrong on purpose
    with pytest.raises(ArgumentTypeError, match="expected a module or a mapping of names to parameters, got list"):
        optimizer_state([], torch.optim.SGD(build().parameters()))  # type: ignore[arg-type]  # wrong on purpose


# --- on ranks ---------------------------------------------------------------------------------------------------------


def spread(model: nn.Sequential, mesh: Any, placements: list[sw.Placement]) -> nn.Sequential:
    for layer in (model[0], model[2]):
        layer.weight = nn.Parameter(sw.distribute_tensor(layer.weight.detach(), mesh, placements))
        layer.bias = nn.Parameter(sw.distribute_tensor(layer.bias.detach(), mesh, [sw.Replicate()] * mesh.ndim))
    return model


def step(model: nn.Module, optimizer: torch.optim.Optimizer, times: range) -> None:
    """Steps with gradients that depend on the place of an element and the time: the same under every layout."""
    for time in times:
        for parameter in model.parameters():
            whole = torch.arange(float(parameter.numel())).reshape(parameter.shape).sin() + time
            parameter.grad = (
                sw.distribute_tensor(whole, parameter.device_mesh, parameter.placements)
                if isinstance(parameter, sw.DTensor)
                else whole
            )
        optimizer.step()


def values(model: nn.Module) -> list[torch.Tensor]:
    return [
        one.detach().full_tensor() if isinstance(one, sw.DTensor) else one.detach().clone()
        for one in model.parameters()
    ]


def test_dtensor_optimizers_resume_with_another_world_size_and_layout(tmp_path: Path) -> None:
    names = ["momentum", "Adam", "Adafactor"]

    def save() -> None:
        mesh = sw.init_device_mesh("cpu", (2,))
        for name in names:
            model = spread(build(), mesh, [sw.Shard(0)])
            optimizer = OPTIMIZERS[name](model.parameters())
            step(model, optimizer, range(2))
            checkpoint.save({"model": model, "optimizer": optimizer}, tmp_path / name / "counted")
            named = {"model": model, "optimizer": optimizer_state(model, optimizer)}
            checkpoint.save(named, tmp_path / name / "named")

    def load(expected: dict[str, list[torch.Tensor]]) -> None:
        mesh = sw.init_device_mesh("cpu", (3,))
        for name in names:
            for kind in ("counted", "named"):
                model = spread(build(1), mesh, [sw.Shard(1)])
                order = list(model.parameters())
                optimizer = OPTIMIZERS[name](order if kind == "counted" else order[::-1])
                state = optimizer if kind == "counted" else optimizer_state(model, optimizer)
                checkpoint.load({"model": model, "optimizer": state}, tmp_path / name / kind)
                for parameter in order:
                    for value in optimizer.state[parameter].values():
                        if isinstance(value, torch.Tensor) and value.shape == parameter.shape:
                            assert value.sharding is parameter.sharding
                step(model, optimizer, range(2, 4))
                for one, two in zip(values(model), expected[name], strict=True):
                    torch.testing.assert_close(one, two)

    expected = {}
    for name in names:
        model = build()
        optimizer = OPTIMIZERS[name](model.parameters())
        step(model, optimizer, range(4))
        expected[name] = values(model)
    run_ranks(2, save)
    run_ranks(3, load, expected)


def test_a_sharded_optimizer_resumes_with_another_sharding(tmp_path: Path) -> None:
    def make(n: int, dim: int) -> tuple[sharded.ShardedTensor, nn.Parameter, sharded.ShardedOptimizer]:
        spec = sharded.ChunkShardingSpec(dim, [f"rank:{rank}/cpu" for rank in range(n)])
        table = sharded.ones(spec, 5, 3, requires_grad=True)
        bias = nn.Parameter(torch.ones(2))
        return table, bias, sharded.ShardedOptimizer({"table": table, "bias": bias}, torch.optim.Adam, lr=0.1)

    def step(table: sharded.ShardedTensor, bias: nn.Parameter, optimizer: sharded.ShardedOptimizer) -> None:
        whole = torch.arange(15.0).reshape(5, 3).sin()
        for shard in table.local_shards():
            shard.tensor.grad = whole[shard.metadata.region.slices()].clone()
        bias.grad = torch.ones(2)
        optimizer.step()

    def save() -> None:
        table, bias, optimizer = make(2, 0)
        step(table, bias, optimizer)
        checkpoint.save({"table": table, "bias": bias, "optimizer": optimizer}, tmp_path)
        step(table, bias, optimizer)
        checkpoint.save({"table": table, "bias": bias}, tmp_path / "later")

    def load() -> None:
        table, bias, optimizer = make(3, 1)
        checkpoint.load({"table": table, "bias": bias, "optimizer": optimizer}, tmp_path)
        step(table, bias, optimizer)
        whole = table.gather()
        if comm.rank() == 0:
            later = checkpoint.read(tmp_path / "later")
            assert torch.equal(whole, later["table"])
            assert torch.equal(bias, later["bias"])

    run_ranks(2, save)
    run_ranks(3, load)
