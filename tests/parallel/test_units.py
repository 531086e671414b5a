"""Units under DTensors: operators gather parameters through their units, and autograd reduces them together."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import shardwright as sw
from shardwright import comm
from shardwright.errors import MeshMismatchError, PlacementError
from shardwright.parallel.units import Schedule, split_along, unit_of
from shardwright.tensor.base.parameter_use import ParameterUse, set_parameter_use
from shardwright.testing import run_ranks
from tests.parallel.models import batch, loss_of, make, train_on_one_rank

SHARDED = (sw.Shard(0),)


def with_units(model, mesh, placements=SHARDED, **options):
    """Make every parameter a DTensor, and a unit of each block and of the rest."""
    tied = {}
    for module in model.modules():
        for key, parameter in module._parameters.items():
            if parameter is not None:
                if parameter not in tied:
                    tied[parameter] = sw.distribute_tensor(parameter, mesh, placements)
                module._parameters[key] = tied[parameter]
    schedule = Schedule()
    of_blocks = {id(parameter) for parameter in model.blocks.parameters()}
    rest = [parameter for parameter in model.parameters() if id(parameter) not in of_blocks]
    sharded = len(placements) - 1
    root = unit_of(rest, sharded, schedule=schedule, **options)
    options |= {"schedule": schedule, "parent": root}
    units = [root, *(unit_of(list(block.parameters()), sharded, **options) for block in model.blocks)]
    for unit in units:
        for index, parameter in enumerate(unit.parameters):
            parameter.__dict__["_unit"] = unit, index
            set_parameter_use(parameter, ParameterUse(frozenset((sharded,))))
    return units


def step(model, mesh, placements, number):
    whole = torch.cat([batch(rank, number) for rank in range(comm.world().size)])
    tokens = sw.distribute_tensor(whole, mesh, placements)
    return loss_of(model, tokens)


@pytest.mark.parametrize("tied", [False, True])
def test_operators_gather_through_units_and_reduce_once_per_unit(tied):
    def body():
        mesh = sw.init_device_mesh("cpu", (comm.world().size,), mesh_dim_names=("dp",))
        model = make(tied=tied)
        units = with_units(model, mesh)
        reference = train_on_one_rank(make(tied=tied), comm.world().size, steps=3)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        counted, seen = [], []
        starts = comm.start_all_gather_many, comm.start_reduce_scatter_many
        comm.start_all_gather_many = lambda *args: seen.append("gather") or starts[0](*args)
        comm.start_reduce_scatter_many = lambda *args, **kw: seen.append("reduce") or starts[1](*args, **kw)
        for number in range(3):
            seen.clear()
            loss = step(model, mesh, [sw.Shard(0)], number)
            loss.backward()
            for name, parameter in model.named_parameters():
                torch.testing.assert_close(
                    parameter.grad.full_tensor(), reference[number][2][name], rtol=0, atol=1e-9, msg=name
                )
            assert abs(loss.item() - reference[number][0]) < 1e-9
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
            assert not any(unit.is_gathered for unit in units)
            counted.append((seen.count("gather"), seen.count("reduce")))
        comm.start_all_gather_many, comm.start_reduce_scatter_many = starts
        return counted

    for counted in run_ranks(2, body):
        # 4 in forward; in backward neither the root nor the last block, which is still gathered.
        assert counted == [(4 + 2, 4)] * 3


def test_gradients_are_summed_over_replicas():
    def body():
        mesh = sw.init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "dp"))
        model = make()
        with_units(model, mesh, (sw.Replicate(), sw.Shard(0)), replicated=0)
        step(model, mesh, [sw.Shard(0), sw.Shard(0)], 0).backward()
        reference = train_on_one_rank(make(), 4, steps=1)[0][2]
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(parameter.grad.full_tensor(), reference[name], rtol=0, atol=1e-9, msg=name)

    run_ranks(4, body)


def test_a_split_over_the_inner_of_two_mesh_dimensions_and_one_that_is_not_consecutive():
    def body():
        mesh = sw.Mesh((2, 2), ("tp", "dp"))
        layout = sw.Layout(mesh, [sw.Shard(0), sw.Shard(0)], (7, 3))
        split = split_along(layout, 1)
        with pytest.raises(PlacementError, match="are not consecutive in dimension 0"):
            split_along(layout, 0)
        with pytest.raises(PlacementError, match="are not consecutive in dimension 0"):
            split_along(sw.Layout(mesh, [sw.Shard(0), sw.Replicate()], (7, 3)), 1)
        return split.shape, split.sizes

    assert run_ranks(4, body) == [((4, 3), (2, 2))] * 2 + [((3, 3), (2, 1))] * 2


def test_parameters_of_a_unit_are_on_one_mesh():
    one, other = sw.Mesh((1,)), sw.Mesh((1, 1))
    weights = [
        sw.ones(2, mesh=one, placements=[sw.Shard(0)]),
        sw.ones(2, mesh=other, placements=[sw.Shard(0), sw.Replicate()]),
    ]
    with pytest.raises(MeshMismatchError, match="all on one mesh, got"):
        unit_of(weights, 0)
    assert copy.deepcopy(unit_of(weights[:1], 0)).demand(0).shape == (2,)
