"""The recorded use of a parameter follows it through copies, files, conversions and loading, and to derived values."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from torch import nn

import shardwright as sw
from shardwright import comm
from shardwright.errors import ArgumentTypeError, TensorError
from shardwright.tensor.api.parameter_value import ParameterValue
from shardwright.tensor.base.parameter_use import ParameterUse, parameter_use, set_parameter_use
from shardwright.testing import on_ranks
from tests.tensor.values import randn

GATHERED = ParameterUse(frozenset({0}))


def layer(rows: int = 4) -> nn.Linear:
    """Return a linear layer whose parameters are sharded by rows and gathered at use."""
    mesh = sw.init_device_mesh("cpu", (comm.world().size,), mesh_dim_names=("dp",))
    made = nn.Linear(6, rows)
    for name, parameter in list(made.named_parameters()):
        sharded = nn.Parameter(sw.distribute_tensor(parameter.detach(), mesh, [sw.Shard(0)]))
        set_parameter_use(sharded, GATHERED)
        made.register_parameter(name, sharded)
    return made


def of_all(module: nn.Module) -> set[ParameterUse | None]:
    return {parameter_use(parameter) for parameter in module.parameters()}


def through_a_file(value: Any) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def test_a_parameter_with_a_use_is_a_parameter_and_a_dtensor() -> None:
    weight = layer().weight
    assert isinstance(weight, nn.Parameter)
    assert isinstance(weight, sw.DTensor)
    assert type(weight) is ParameterValue


def test_wrong_arguments_raise() -> None:
    with pytest.raises(ArgumentTypeError, match="expected a DTensor, got Tensor"):
        set_parameter_use(torch.ones(2), GATHERED)
    with pytest.raises(TensorError, match=r"mesh dimensions must be 0 to 0 .* got 1"):
        set_parameter_use(layer().weight, ParameterUse(frozenset({1})))


def test_copies_keep_the_use() -> None:
    made = layer()
    weight = made.weight
    assert of_all(copy.deepcopy(made)) == {GATHERED}
    for copied in (copy.copy(weight), copy.deepcopy(weight), through_a_file(weight), nn.Parameter(weight), weight.data):
        assert parameter_use(copied) == GATHERED
        assert type(copied) is ParameterValue
    assert {parameter_use(value) for value in through_a_file(made.state_dict()).values()} == {GATHERED}


@pytest.mark.parametrize("swap", [False, True])
def test_conversions_of_a_module_keep_the_use(swap: bool) -> None:
    torch.__future__.set_swap_module_params_on_conversion(swap)
    try:
        made = layer()
        assert of_all(made.double()) == {GATHERED}
        assert of_all(made.to(torch.bfloat16)) == {GATHERED}
        assert {type(parameter) for parameter in made.parameters()} == {ParameterValue}
        assert made.weight.dtype is torch.bfloat16
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)


def test_a_module_made_on_meta_keeps_the_use_when_it_gets_memory() -> None:
    made = layer().to("meta")
    assert of_all(made.to_empty(device="cpu")) == {GATHERED}


@pytest.mark.parametrize("assign", [False, True])
def test_loading_tensors_without_a_use_keeps_that_of_the_parameters(assign: bool) -> None:
    made = layer()
    values = {
        name: sw.distribute_tensor(torch.full_like(parameter.full_tensor(), 2.0), parameter.device_mesh, [sw.Shard(0)])
        for name, parameter in made.named_parameters()
    }
    made.load_state_dict(values, assign=assign)
    assert of_all(made) == {GATHERED}
    assert made.weight.sum().item() == 48


def test_swapped_tensors_swap_their_uses() -> None:
    weight, other = layer().weight, nn.Parameter(layer().weight.redistribute(placements=[sw.Replicate()]))
    torch.utils.swap_tensors(weight, other)
    assert parameter_use(weight) is None
    assert parameter_use(other) == GATHERED


def test_values_computed_from_parameters_alone_have_their_use() -> None:
    weight, bias = layer().parameters()
    step = torch.tensor(2.0)
    derived = [weight.T, weight.half(), 1 + weight, weight[:2], bias.expand(3, 4), weight.T @ weight, weight * step]
    derived += [*weight.chunk(2), torch.zeros_like(weight), weight.detach(), weight.norm(), weight.sqrt() / step]
    assert {parameter_use(value) for value in derived} == {GATHERED}


def test_values_that_an_activation_takes_part_in_have_no_use() -> None:
    made = layer()
    x = sw.ones(8, 6, mesh=made.weight.device_mesh, placements=[sw.Shard(0)])
    assert parameter_use(made(x)) is None
    assert parameter_use(made.weight + x[:4]) is None
    assert parameter_use(made.weight.full_tensor()) is None
    made(x).sum().backward()
    assert parameter_use(made.weight.grad) is None


def test_equal_calls_with_and_without_a_use_have_different_plans() -> None:
    def step(weight: Any, x: Any) -> Any:
        return [(x @ weight).placements, weight.T.placements, (x @ weight.T).placements]

    @on_ranks(2)
    def work() -> None:
        mesh = sw.init_device_mesh("cpu", (2,))
        x = sw.distribute_tensor(randn(4, 4), mesh)
        plain = nn.Parameter(sw.distribute_tensor(randn(4, 4, seed=1), mesh, [sw.Shard(1)]), requires_grad=False)
        used = copy.deepcopy(plain)
        set_parameter_use(used, GATHERED)
        stays = [(sw.Shard(1),), (sw.Shard(0),), (sw.Partial(),)]
        comes = [(sw.Replicate(),), (sw.Shard(0),), (sw.Replicate(),)]
        for _ in range(3):
            assert step(plain, x)[:2] == stays[:2]
            assert step(used, x) == comes

    work()


@on_ranks(2)
def test_an_optimizer_step_computes_on_the_shards() -> None:
    made, plain = layer().double(), nn.Linear(6, 4).double()
    with torch.no_grad():
        for ours, theirs in zip(made.parameters(), plain.parameters(), strict=True):
            theirs.copy_(ours.full_tensor())
    x = randn(8, 6)
    spread = sw.distribute_tensor(x, made.weight.device_mesh, [sw.Shard(0)])
    for options in ({"foreach": True}, {"foreach": False}, {"foreach": False, "capturable": False, "amsgrad": True}):
        pairs = [(torch.optim.AdamW(model.parameters(), lr=0.1, **options), model) for model in (made, plain)]
        for optimizer, model in pairs:
            optimizer.zero_grad()
            model(spread if model is made else x).square().sum().backward()
            with comm.count() as traffic:
                optimizer.step()
            assert not traffic.calls
        for ours, theirs in zip(made.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(ours.full_tensor(), theirs.detach(), rtol=1e-10, atol=1e-10)
    with comm.count() as traffic:
        norm = nn.utils.clip_grad_norm_(made.parameters(), 0.1)
    assert traffic.calls.total() <= 2  # one all-reduce
    torch.testing.assert_close(norm.full_tensor(), nn.utils.clip_grad_norm_(plain.parameters(), 0.1))
