"""`parallelize_module` does what PyTorch's function of the same name does, with the same arguments."""

from __future__ import annotations

import copy
import inspect
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardwright as sw
from shardwright import comm
from shardwright.errors import MeshError, PlanError
from shardwright.testing import run_ranks


class Feed(nn.Module):
    """An MLP with a norm, whose hidden activation the program reads as a plain local tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(12, 8)
        self.norm = nn.LayerNorm(8)
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, ids: Tensor) -> Tensor:
        hidden = torch.relu(self.up(self.norm(self.tokens(ids))))
        assert type(hidden) is Tensor
        assert hidden.shape[-1] == 16 // comm.world().size
        return self.down(hidden)


IDS = torch.arange(12).view(2, 6)


def test_plans_written_for_torch_give_the_same_outputs_and_gradients() -> None:
    def work() -> None:
        from torch.distributed.tensor import Replicate, Shard
        from torch.distributed.tensor import parallel as theirs

        mesh = sw.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        plans = {
            "plain": lambda lib: {
                "tokens": lib.RowwiseParallel(input_layouts=Replicate()),
                "up": lib.ColwiseParallel(),
                "down": lib.RowwiseParallel(),
            },
            "sequence": lambda lib: {
                "tokens": lib.RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
                "norm": lib.SequenceParallel(),
                "up": lib.ColwiseParallel(input_layouts=Shard(1)),
                "down": lib.RowwiseParallel(output_layouts=Shard(1)),
            },
        }
        torch.manual_seed(0)
        plain = Feed()
        for name, plan in plans.items():
            ours = sw.parallelize_module(copy.deepcopy(plain), mesh, plan(sw))
            torchs = theirs.parallelize_module(copy.deepcopy(plain), mesh, plan(theirs))
            found, expected = ours(IDS), torchs(IDS)
            assert type(found) is Tensor
            torch.testing.assert_close(found, expected, msg=name)
            (found * found).sum().backward()
            (expected * expected).sum().backward()
            for (key, mine), other in zip(ours.named_parameters(), torchs.parameters(), strict=True):
                sizes = [getattr(grad, "full_tensor", lambda grad=grad: grad)() for grad in (mine.grad, other.grad)]
                torch.testing.assert_close(*sizes, msg=f"{name}: {key}")

    run_ranks(2, work)


def test_inputs_and_outputs_of_a_module_are_redistributed() -> None:
    def work() -> None:
        mesh = sw.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))

        class Show(nn.Module):
            def forward(self, x: Any, *, scale: Any) -> tuple[Any, Any]:
                assert str(x.sharding) == "[4, 6] (tp: R)"
                assert str(scale.sharding) == "[2, 3] (tp: S(1))"
                return x, torch.ones(2)

        style = sw.PrepareModuleInputOutput(
            input_layouts=sw.Shard(0),
            desired_input_layouts=sw.Replicate(),
            input_kwarg_layouts={"scale": sw.Replicate()},
            desired_input_kwarg_layouts={"scale": sw.Shard(1)},
            output_layouts=(sw.Replicate(), None),
            desired_output_layouts=(sw.Shard(1), None),
        )
        module = sw.parallelize_module(nn.Sequential(Show())[0], mesh, style)
        local = torch.arange(12.0).view(2, 6) + 12 * comm.rank()
        first, second = module(local, scale=torch.ones(2, 3))
        whole = torch.arange(24.0).view(4, 6)
        assert torch.equal(first, whole[:, 3 * comm.rank() : 3 * comm.rank() + 3])
        assert type(second) is Tensor

    run_ranks(2, work)


def test_parameters_that_no_pattern_matches_stay_plain_and_ties_are_kept() -> None:
    mesh = sw.init_device_mesh("cpu", (1,), mesh_dim_names=("tp",))
    model: Any = nn.ModuleDict({"tokens": nn.Embedding(6, 4), "norm": nn.LayerNorm(4), "head": nn.Linear(4, 6)})
    model.head.weight = model.tokens.weight
    sw.parallelize_module(model, mesh, {"head": sw.ColwiseParallel()})
    assert model.head.weight is model.tokens.weight
    assert isinstance(model.head.bias, sw.DTensor)
    assert not isinstance(model.norm.weight, sw.DTensor)
    sw.parallelize_module(model, mesh, {"norm": sw.SequenceParallel()})  # another part, later
    assert isinstance(model.norm.weight, sw.DTensor)


def test_bad_arguments_are_refused() -> None:
    mesh = sw.init_device_mesh("cpu", (1,), mesh_dim_names=("tp",))
    with pytest.raises(PlanError, match="'heads' matches no module"):
        sw.parallelize_module(nn.Linear(2, 2), mesh, {"heads": sw.ColwiseParallel()})
    with pytest.raises(PlanError, match="does not fit"):
        sw.parallelize_module(nn.LayerNorm(2), mesh, sw.RowwiseParallel())
    with pytest.raises(PlanError, match="the plan is empty"):
        sw.parallelize_module(nn.Linear(2, 2), mesh)
    both = sw.init_device_mesh("cpu", (1, 1), mesh_dim_names=("dp", "tp"))
    with pytest.raises(MeshError, match="must have one dimension"):
        sw.parallelize_module(nn.Linear(2, 2), both, sw.ColwiseParallel())


@pytest.mark.parametrize(
    "name",
    [
        "ColwiseParallel",
        "PrepareModuleInput",
        "PrepareModuleInputOutput",
        "PrepareModuleOutput",
        "RowwiseParallel",
        "SequenceParallel",
        "parallelize_module",
    ],
)
def test_arguments_are_those_of_torch(name: str) -> None:
    from torch.distributed.tensor import parallel as theirs

    ours = inspect.signature(getattr(sw, name)).parameters
    for key, parameter in inspect.signature(getattr(theirs, name)).parameters.items():
        assert key in ours, key
        if parameter.default is not inspect.Parameter.empty:
            assert ours[key].default == parameter.default, key
