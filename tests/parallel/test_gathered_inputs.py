"""A module whose input is gathered by its plan reduce-scatters the gradient, and gives hooks the right one."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardwright as sw
from shardwright import comm
from shardwright.errors import UnsupportedError
from shardwright.testing import run_ranks

PLAN = {
    "norm": sw.SequenceParallel(),
    "mlp": sw.PrepareModuleInput(input_layouts=sw.Shard(1), desired_input_layouts=sw.Replicate()),
    "mlp.gate": sw.ColwiseParallel(),
    "mlp.up": sw.ColwiseParallel(),
    "mlp.down": sw.RowwiseParallel(output_layouts=sw.Shard(1)),
}


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(6, 8), nn.Linear(6, 8), nn.Linear(8, 6)
        self.variant = ""
        self.seen: list[Any] = []

    def forward(self, x: Tensor) -> Tensor:
        if self.variant == "hook first":
            x.register_hook(self.seen.append)
        if self.variant == "retained":
            x.retain_grad()
            self.seen.append(x)
        if self.variant == "also used whole":
            x = x * 2 + x.sum()
        hidden = torch.relu(self.gate(x)) * self.up(x)
        if self.variant == "hook late":
            x.register_hook(self.seen.append)
        if self.variant == "written late":
            x.mul_(2)
        return self.down(hidden) + (x if self.variant == "returned" else 0)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(6), Mlp()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(self.norm(x))


def make(variant: str) -> Model:
    torch.manual_seed(0)
    model = Model().double()
    model.mlp.variant = variant
    return model


def batch() -> Tensor:
    return torch.randn(4, 5, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def train(variant: str) -> Any:
    """Return gradients, what the hooks have seen, and the traffic of a second step."""
    mesh = sw.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = make(variant)
    sw.parallelize(model, mesh, PLAN)
    x = sw.shard_batch(batch(), mesh)
    for _ in range(2):
        model.mlp.seen.clear()
        model.zero_grad()
        transfers: list[comm.Transfer] = []
        loss = model(x).square().sum()
        with comm.listen(transfers.append):
            loss.backward()
    traffic = [(transfer.kind, transfer.received) for transfer in transfers]
    seen = [each.grad if variant == "retained" else each for each in model.mlp.seen]
    gradients = {name: parameter.grad.full_tensor() for name, parameter in model.named_parameters()}
    return gradients, [each.full_tensor() for each in seen], traffic


@pytest.mark.parametrize("variant", ["", "hook first", "retained", "also used whole", "returned"])
def test_gradients_are_those_of_one_rank(variant: str) -> None:
    reference = make(variant)
    reference(batch()).square().sum().backward()
    expected = [each.grad if variant == "retained" else each for each in reference.mlp.seen]
    for gradients, seen, _ in run_ranks(4, train, variant):
        for name, parameter in reference.named_parameters():
            torch.testing.assert_close(gradients[name], parameter.grad, msg=f"{variant}: {name}")
        torch.testing.assert_close(seen, expected)


def test_the_gradient_of_a_gathered_input_is_reduce_scattered() -> None:
    (_, _, traffic), *_ = run_ranks(4, train, "")
    own = 2 * 3 * 6 * 8  # bytes of a shard of an activation on the first rank; the other rank of tp has 2 of 5 rows
    other = 2 * 2 * 6 * 8
    large = [entry for entry in traffic if entry[1] in (own, other) and entry[0] != "reduce_scatter"]
    assert large == [("all_gather", other)]  # that of the output's gradient; none for the input's
    assert traffic.count(("reduce_scatter", own)) == 1


@pytest.mark.parametrize("variant", ["hook late", "written late"])
def test_what_would_miss_a_gradient_is_refused(variant: str) -> None:
    run_ranks(4, refuses, variant)


def refuses(variant: str) -> None:
    mesh = sw.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = make(variant)
    sw.parallelize(model, mesh, PLAN)
    x = sw.shard_batch(batch(), mesh)
    with pytest.raises(UnsupportedError if variant == "hook late" else RuntimeError):
        model(x).square().sum().backward()
    again = copy.deepcopy(model)
    again.mlp.variant = ""
    again(x).square().sum().backward()
    assert all(parameter.grad is not None for parameter in again.parameters())
