"""Conversion between plain tensors and DTensors: `distribute_tensor`, `redistribute`, `distribute_module`, errors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import shardwright as sw
from shardwright import comm
from shardwright.errors import (
    ArgumentTypeError,
    InPlaceError,
    LocalTensorError,
    MeshMismatchError,
    MixedTensorsError,
    PlacementError,
    TensorError,
    UnsupportedError,
)
from shardwright.layout import Layout
from shardwright.testing import outcomes, run_ranks
from shardwright.testing.strategies import layouts, meshes, shapes


def values(shape: tuple[int, ...]) -> torch.Tensor:
    return torch.arange(float(torch.Size(shape).numel())).reshape(shape)


@given(st.lists(layouts(shapes(max_dims=3), meshes(size=4), partial=False), min_size=6, max_size=6))
def test_full_tensor_restores_the_distributed_tensor_for_any_layout(cases: list[Layout]) -> None:
    def work() -> None:
        for layout in cases:
            whole = values(layout.shape)
            x = sw.distribute_tensor(whole, layout.mesh, layout.placements, order=layout.order)
            assert x.sharding is layout
            assert torch.equal(x.to_local(), whole[layout.region(comm.rank()).slices()])
            assert torch.equal(x.full_tensor(), whole)

    run_ranks(4, work)


@given(st.lists(layouts(shapes(max_dims=3), meshes(size=4)), min_size=6, max_size=6))
def test_from_local_inverts_to_local(cases: list[Layout]) -> None:
    def work() -> None:
        for layout in cases:
            if layout.order != tuple(range(layout.mesh.ndim)):
                continue  # from_local takes placements in the usual order
            local = values(layout.local_shape(comm.rank()))
            x = sw.DTensor.from_local(local, layout.mesh, layout.placements, shape=layout.shape, run_check=True)
            assert x.sharding is layout
            assert torch.equal(x.to_local(), local)
            assert x.to_local().data_ptr() == local.data_ptr()

    run_ranks(4, work)


def test_distribute_tensor_sends_the_source_ranks_values_unless_src_data_rank_is_none() -> None:
    def work() -> tuple[float, float, int]:
        mesh = sw.init_device_mesh("cpu", (4,))
        mine = torch.full((4,), float(comm.rank()))
        sent = sw.distribute_tensor(mine, mesh, [sw.Replicate()], src_data_rank=2)
        with comm.count() as traffic:
            trusted = sw.distribute_tensor(mine, mesh, [sw.Replicate()], src_data_rank=None)
        return sent.to_local()[0].item(), trusted.to_local()[0].item(), traffic.bytes

    assert run_ranks(4, work) == [(2.0, float(rank), 0) for rank in range(4)]


def test_parameters_stay_parameters_and_meta_tensors_stay_meta() -> None:
    mesh = sw.init_device_mesh("cpu", (1,))
    parameter = sw.distribute_tensor(torch.nn.Parameter(torch.ones(4)), mesh, [sw.Shard(0)])
    assert isinstance(parameter, torch.nn.Parameter)
    assert parameter.requires_grad
    assert parameter.is_leaf
    meta = sw.distribute_tensor(torch.empty(4, 6, device="meta"), mesh, [sw.Shard(0)])
    assert meta.is_meta
    assert meta.shape == (4, 6)


def test_distribute_tensor_does_not_share_the_callers_memory() -> None:
    plain = torch.zeros(4)
    x = sw.distribute_tensor(plain, sw.init_device_mesh("cpu", (1,)), [sw.Shard(0)])
    x.add_(1)
    assert plain.sum() == 0


def test_redistribute_to_another_mesh_keeps_the_value() -> None:
    def work() -> tuple[bool, bool, tuple[int, ...]]:
        square = sw.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        line = sw.init_device_mesh("cpu", (4,), mesh_dim_names=("all",))
        whole = values((7, 5))
        x = sw.distribute_tensor(whole, square, [sw.Shard(0), sw.Shard(1)])
        y = x.redistribute(line, [sw.Shard(1)])
        pair = sw.Mesh((2,), ("some",), ranks=(1, 3))
        z = y.redistribute(pair, [sw.Shard(0)])
        back = z.redistribute(square, [sw.Replicate(), sw.Replicate()])
        return torch.equal(y.full_tensor(), whole), torch.equal(back.to_local(), whole), tuple(z.to_local().shape)

    assert run_ranks(4, work) == [(True, True, shape) for shape in ((0, 0), (4, 5), (0, 0), (3, 5))]


def test_asynchronous_redistribution_waits_when_it_is_used() -> None:
    def work() -> tuple[Any, ...]:
        mesh = sw.init_device_mesh("cpu", (4,))
        whole = values((10, 4))
        x = sw.distribute_tensor(whole, mesh, [sw.Shard(0)])
        first = x.redistribute(placements=[sw.Shard(1)], async_op=True)
        second = x.redistribute(placements=[sw.Replicate()], async_op=True)
        before = type(first).__name__, str(first.sharding)
        ok = torch.equal((second * 2).to_local(), whole * 2), torch.equal(first.full_tensor(), whole)
        return *before, *ok, type(first).__name__, type(second).__name__

    assert run_ranks(4, work) == [("AsyncDTensor", "[10, 4] (0: S(1))", True, True, "DTensor", "DTensor")] * 4


def test_distribute_module_calls_its_functions_and_replicates_the_rest() -> None:
    mesh = sw.init_device_mesh("cpu", (1,), mesh_dim_names=("dp",))
    seen: list[str] = []

    def partition(name: str, module: torch.nn.Module, mesh: Any) -> None:
        seen.append(name)
        if name == "0":
            module.register_parameter("weight", sw.distribute_tensor(module.weight, mesh, [sw.Shard(0)]))

    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    sw.distribute_module(
        model,
        mesh,
        partition,
        input_fn=lambda module, inputs, mesh: sw.distribute_tensor(inputs[0], mesh, [sw.Shard(0)]),
        output_fn=lambda module, outputs, mesh: outputs.full_tensor(),
    )
    assert seen == ["", "0", "1"]
    assert model[0].weight.placements == (sw.Shard(0),)
    assert model[1].running_mean.placements == (sw.Replicate(),)
    out = model(torch.randn(5, 3))
    assert type(out) is torch.Tensor
    assert out.shape == (5, 4)


def test_input_fn_and_output_fn_may_omit_the_module_as_in_pytorch() -> None:
    mesh = sw.init_device_mesh("cpu", (1,))
    layer = nn.Linear(3, 2)
    with pytest.warns(FutureWarning) as warned:
        sw.distribute_module(
            layer,
            mesh,
            input_fn=lambda inputs, mesh: sw.distribute_tensor(inputs[0], mesh),
            output_fn=lambda outputs, mesh: (outputs.to_local(), mesh),
        )
    assert [str(warning.message).split()[1] for warning in warned] == ["input_fn", "output_fn"]
    assert warned[0].filename == __file__
    out, seen = layer(torch.ones(4, 3))
    assert type(out) is torch.Tensor
    assert seen is mesh


def test_distributing_a_module_twice_or_with_invalid_functions_raises() -> None:
    seen: list[object] = []
    layer = nn.Linear(3, 2)
    with pytest.raises(ArgumentTypeError, match=r"output_fn must take three arguments, .*, got output_fn\(outputs\)"):
        sw.distribute_module(layer, MESH, output_fn=lambda outputs: outputs)
    assert type(layer.weight) is nn.Parameter  # untouched
    mesh = sw.init_device_mesh("cpu", (1,), mesh_dim_names=("tp",))
    with mesh:
        sw.distribute_module(layer, partition_fn=lambda *given: seen.append(given[2]))
    assert seen == [mesh]
    assert isinstance(layer.weight, sw.DTensor)
    with pytest.raises(TensorError, match="distribute_module was already called on this Linear"):
        sw.distribute_module(layer, mesh)
    whole = sw.distribute_module(nn.Sequential(layer, nn.Linear(2, 2)), mesh)  # a submodule was distributed before
    assert whole[0].weight is layer.weight


MESH = sw.Mesh((1,), ("dp",))
NONSENSE = {
    "already a DTensor": (TensorError, lambda: sw.distribute_tensor(sw.ones(2, mesh=MESH), MESH, [sw.Shard(0)])),
    "expected a tensor, got list": (ArgumentTypeError, lambda: sw.distribute_tensor([1.0], MESH)),
    "is not a leaf": (
        TensorError,
        lambda: sw.distribute_tensor(torch.ones(2, requires_grad=True) * 2, MESH),
    ),
    "is partial, but a global value is not a partial one": (
        TensorError,
        lambda: sw.distribute_tensor(torch.ones(2), MESH, [sw.Partial()]),
    ),
    "S\\(1\\) on mesh dimension dp is out of range": (
        PlacementError,
        lambda: sw.distribute_tensor(torch.ones(2), MESH, [sw.Shard(1)]),
    ),
    "has a local tensor of shape \\(3,\\), but its part of \\[4\\] \\(dp: S\\(0\\)\\) has shape \\(4,\\)": (
        LocalTensorError,
        lambda: sw.DTensor.from_local(torch.ones(3), MESH, [sw.Shard(0)], shape=(4,)),
    ),
    "stride needs shape": (
        TensorError,
        lambda: sw.DTensor.from_local(torch.ones(3), MESH, [sw.Shard(0)], stride=(1,)),
    ),
    "add: argument 1 is a plain tensor of shape \\(2,\\) beside a DTensor \\[2\\] \\(dp: R\\): make it a DTensor": (
        MixedTensorsError,
        lambda: sw.ones(2, mesh=MESH) + torch.ones(2),
    ),
    "argument 0\\[1\\] is a plain tensor": (
        MixedTensorsError,
        lambda: torch.cat([sw.ones(2, mesh=MESH), torch.ones(2)]),
    ),
    "argument 'weight' is a plain tensor": (
        MixedTensorsError,
        lambda: torch.nn.functional.linear(sw.ones(2, 2, mesh=MESH), weight=torch.ones(2, 2)),
    ),
    "on different meshes": (
        MeshMismatchError,
        lambda: sw.ones(2, mesh=MESH) + sw.ones(2, mesh=sw.Mesh((1, 1))),
    ),
    "relu_ would change the layout": (
        InPlaceError,
        lambda: sw.ones(2, mesh=MESH, placements=[sw.Partial()]).relu_(),
    ),
    "grad_placements": (
        TensorError,
        lambda: sw.ones(2, mesh=MESH, placements=[sw.Shard(0)]).to_local(grad_placements=[sw.Partial()]),
    ),
    "pass placements": (TensorError, lambda: sw.ones(2, mesh=MESH).redistribute(sw.Mesh((1, 1)))),
    "only for one element": (TensorError, lambda: sw.ones(2, mesh=MESH, requires_grad=True).backward()),
}  # fmt: skip


@pytest.mark.parametrize("text", NONSENSE)
def test_invalid_arguments_raise_with_the_remedy(text: str) -> None:
    error, call = NONSENSE[text]
    with pytest.raises(error, match=text):
        call()


def test_plain_tensors_are_replicated_only_under_implicit_replication() -> None:
    x = sw.ones(2, mesh=MESH)
    assert (x + torch.tensor(2.0)).tolist() == [3.0, 3.0]  # a 0-dimensional tensor without gradient is always accepted
    with sw.implicit_replication():
        assert (x + torch.ones(2)).tolist() == [2.0, 2.0]
    with pytest.raises(MixedTensorsError):
        x + torch.ones((), requires_grad=True)


def test_mixing_plain_tensors_raises_on_every_rank() -> None:
    def work() -> None:
        mesh = sw.init_device_mesh("cpu", (3,))
        sw.ones(6, mesh=mesh, placements=[sw.Shard(0)]) + torch.ones(6)

    assert {outcome.kind for outcome in outcomes(3, work)} == {"MixedTensorsError"}


def test_enclosing_mesh_is_the_default() -> None:
    def work() -> None:
        pairs = sw.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        placements = [sw.Shard(0), sw.Replicate()]
        with pairs:
            made = [
                sw.distribute_tensor(torch.ones(4, 2), placements=placements),
                sw.DTensor.from_local(torch.ones(2, 2), placements=placements),
                sw.zeros(4, 2, placements=placements, layout=torch.strided),
            ]
            with pairs["tp"] as inner:  # slicing creates a new object each time
                assert sw.ones(4).device_mesh is inner
        for x in made:
            assert x.device_mesh is pairs
            assert x.to_local().shape == (2, 2)
        assert sw.ones(4).sharding.mesh.shape == (4,)

    run_ranks(4, work)


def test_distribute_tensor_returns_a_dtensor_of_the_same_layout_unchanged() -> None:
    x = sw.ones(2, 3, mesh=MESH, placements=[sw.Shard(1)])
    assert sw.distribute_tensor(x, MESH, [sw.Shard(-1)]) is x
    with pytest.raises(TensorError, match="use redistribute"):
        sw.distribute_tensor(x, MESH, [sw.Shard(0)])


def test_pytorchs_argument_names_are_accepted() -> None:
    assert sw.Partial(reduce_op="avg") == sw.Partial("avg")
    with pytest.raises(PlacementError, match="unknown Partial op 'median'"):
        sw.Partial(reduce_op="median")
    with pytest.raises(UnsupportedError, match="a DTensor is strided"):
        sw.zeros(2, mesh=MESH, layout=torch.sparse_coo)
