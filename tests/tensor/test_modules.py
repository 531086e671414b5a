"""Modules with DTensor parameters support what `nn.Module` does with parameters."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parameters_to_vector, parametrizations, vector_to_parameters

import shardwright as sw
from shardwright.errors import MixedTensorsError, TensorError, UnsupportedError
from shardwright.testing import run_ranks

R, S0, S1 = sw.Replicate(), sw.Shard(0), sw.Shard(1)


def _mesh() -> Any:
    return sw.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 5)
        self.second = nn.Linear(5, 3, bias=False)
        self.register_buffer("scale", torch.full((3,), 2.0))
        self.register_buffer("hidden", torch.ones(()), persistent=False)

    def forward(self, x: Any) -> Any:
        return self.second(self.first(x).relu()) * self.scale * self.hidden


def _distribute(module: nn.Module, mesh: Any, placements: list[Any]) -> nn.Module:
    def partition(name: str, part: nn.Module, mesh: Any) -> None:
        del name
        for key, parameter in part._parameters.items():
            if parameter is not None:
                fit = [p if p == R or p.dim < parameter.ndim else R for p in placements]
                part.register_parameter(key, nn.Parameter(sw.distribute_tensor(parameter.detach(), mesh, fit)))

    return sw.distribute_module(module, mesh, partition)


def _net(mesh: Any = None, placements: list[Any] | None = None) -> nn.Module:
    torch.manual_seed(0)
    net = Net()
    return net if mesh is None else _distribute(net, mesh, placements or [S0, R])


def _values(module: nn.Module) -> dict[str, torch.Tensor]:
    state = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    return {k: (v.full_tensor() if isinstance(v, sw.DTensor) else v).detach() for k, v in state.items()}


def _same(ours: nn.Module, reference: nn.Module) -> None:
    torch.testing.assert_close(_values(ours), _values(reference))


def test_dtensor_parameters_are_registered_under_their_names() -> None:
    def on_rank() -> None:
        net, plain = _net(_mesh()), _net()
        assert [name for name, _ in net.named_parameters()] == [name for name, _ in plain.named_parameters()]
        assert [name for name, _ in net.named_buffers()] == ["scale", "hidden"]
        for name, parameter in net.named_parameters():
            assert isinstance(parameter, nn.Parameter)
            assert isinstance(parameter, sw.DTensor)
            assert parameter.requires_grad
            assert parameter.is_leaf
            assert parameter.shape == plain.get_parameter(name).shape
        assert sum(p.numel() for p in net.parameters()) == sum(p.numel() for p in plain.parameters())
        assert repr(net) == repr(plain)
        frozen = nn.Parameter(net.first.weight.detach(), requires_grad=False)
        assert not frozen.requires_grad
        assert frozen.sharding is net.first.weight.sharding

    run_ranks(4, on_rank)


def test_modules_change_dtype_device_and_mode() -> None:
    def on_rank() -> None:
        mesh = _mesh()
        for change in (
            lambda m: m.double(),
            lambda m: m.half(),
            lambda m: m.bfloat16(),
            lambda m: m.to(torch.float64),
            lambda m: m.to("cpu", torch.float64),
            lambda m: m.to(torch.empty(0, dtype=torch.float64)),
            lambda m: m.cpu().train().eval(),
            lambda m: m.requires_grad_(False),
            lambda m: m.type(torch.float64),
            lambda m: m.to("meta"),
        ):
            net, plain = _net(mesh), _net()
            layouts = {name: p.sharding for name, p in net.named_parameters()}
            kept = dict(net.named_parameters())
            change(net)
            change(plain)
            for name, parameter in net.named_parameters():
                assert parameter.sharding is layouts[name]
                assert parameter.dtype == plain.get_parameter(name).dtype
                assert parameter.device == plain.get_parameter(name).device
                assert parameter.requires_grad == plain.get_parameter(name).requires_grad
                if not parameter.is_meta:
                    assert parameter is kept[name]
            if not net.first.weight.is_meta:
                _same(net, plain)
        empty = _net(mesh).to("meta").to_empty(device="cpu")
        assert empty.first.weight.to_local().shape == _net(mesh).first.weight.to_local().shape

    run_ranks(4, on_rank)


def test_state_dicts_load_across_layouts_and_from_plain_tensors_by_assignment_or_copy() -> None:
    def on_rank() -> None:
        mesh = _mesh()
        source, plain = _net(mesh, [S0, S1]), _net()
        with torch.no_grad():
            for side in (source, plain):
                for parameter in side.parameters():
                    parameter.mul_(3)
        target = _net(mesh, [R, S0])
        layouts = {name: p.sharding for name, p in target.named_parameters()}
        before = dict(target.named_parameters())
        answer = target.load_state_dict(source.state_dict())
        assert not answer.missing_keys
        assert not answer.unexpected_keys
        _same(target, plain)
        for name, parameter in target.named_parameters():
            assert parameter is before[name]
            assert parameter.sharding is layouts[name]
        assigned = _net(mesh, [R, S0])
        assigned.load_state_dict(source.state_dict(), assign=True)
        _same(assigned, plain)
        for name, parameter in assigned.named_parameters():
            assert parameter.sharding is source.get_parameter(name).sharding
            assert isinstance(parameter, nn.Parameter)
        into_meta = _net(mesh).to("meta")
        into_meta.load_state_dict(source.state_dict(), assign=True)
        torch.testing.assert_close(into_meta.first.weight.full_tensor(), plain.first.weight)
        assert list(source.state_dict()) == list(plain.state_dict())
        assert not any(value.requires_grad for value in source.state_dict().values())
        whole = _net(mesh, [S0, S0])
        with sw.implicit_replication():
            whole.load_state_dict(plain.state_dict())
        _same(whole, plain)
        with pytest.raises(RuntimeError, match=r"plain tensor .* beside a DTensor"):
            _net(mesh).load_state_dict(plain.state_dict())
        wrong = source.state_dict()
        wrong["second.weight"] = sw.zeros(4, 5, mesh=mesh)
        with pytest.raises(RuntimeError, match="size mismatch"):
            target.load_state_dict(wrong)

    run_ranks(4, on_rank)


def test_modules_can_be_copied_and_averaged() -> None:
    def on_rank() -> None:
        mesh = _mesh()
        net, plain = _net(mesh), _net()
        twin = copy.deepcopy(net)
        _same(twin, plain)
        with torch.no_grad():
            twin.first.weight.zero_()
        _same(net, plain)
        assert isinstance(twin.first.weight, nn.Parameter)
        tied = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
        tied[1].weight = tied[0].weight
        tied = _distribute(tied, mesh, [S0, R])
        tied[1].weight = tied[0].weight
        copied = copy.deepcopy(tied)
        assert copied[0].weight is copied[1].weight
        for options in ({}, {"multi_avg_fn": torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)}):
            averages = [torch.optim.swa_utils.AveragedModel(side, **options) for side in (net, plain)]
            for _ in range(3):
                for side, average in zip((net, plain), averages, strict=True):
                    with torch.no_grad():
                        side.first.weight.add_(1)
                    average.update_parameters(side)
            torch.testing.assert_close(_values(averages[0].module), _values(averages[1].module))
            assert averages[0].module.first.weight.sharding is net.first.weight.sharding

    run_ranks(4, on_rank)


def test_parametrizations_and_parameters_to_vector_work() -> None:
    def on_rank() -> None:
        mesh = _mesh()
        x = torch.randn(4, 6, generator=torch.Generator().manual_seed(1))
        ours = sw.distribute_tensor(x, mesh, [S0, R])
        net, plain = _net(mesh), _net()
        for side, data in ((net, ours), (plain, x)):
            parametrizations.weight_norm(side.first)
            parametrizations.weight_norm(side.second, dim=1)
            side(data).square().sum().backward()
        for name, parameter in plain.named_parameters():
            torch.testing.assert_close(net.get_parameter(name).grad.full_tensor(), parameter.grad, rtol=1e-4, atol=1e-5)
        flat, reference = parameters_to_vector(_net(mesh).parameters()), parameters_to_vector(_net().parameters())
        torch.testing.assert_close(flat.full_tensor(), reference)
        fresh = _net(mesh)
        with torch.no_grad():
            vector_to_parameters(flat.detach() * 2, fresh.parameters())
        torch.testing.assert_close(fresh.first.weight.full_tensor(), _net().first.weight * 2)
        named = {name: parameter.detach() * 2 for name, parameter in net.named_parameters()}
        outcome = torch.func.functional_call(net, named, (ours,))
        expected = torch.func.functional_call(plain, {n: p.detach() * 2 for n, p in plain.named_parameters()}, (x,))
        torch.testing.assert_close(outcome.full_tensor(), expected)

    run_ranks(4, on_rank)


def test_memory_can_be_replaced_only_by_a_tensor_that_fits_the_layout() -> None:
    """`.data =`, `set_`, `resize_`, `swap_tensors` and `.grad =` keep local sizes that fit the layout."""

    def on_rank() -> None:
        mesh = _mesh()

        def fits(x: Any) -> None:
            local = tuple(x.to_local().shape)
            assert local == x.sharding.local_shape(torch.distributed.get_rank())

        x = sw.zeros(5, 4, mesh=mesh, placements=[S0, S1])
        y = sw.ones(6, 3, mesh=mesh, placements=[R, S0])
        x.data = y
        fits(x)
        assert x.sharding is y.sharding
        assert x.to_local().data_ptr() == y.to_local().data_ptr()
        with pytest.raises(MixedTensorsError, match=r"\.data of a DTensor"):
            x.data = torch.ones(3)
        z = sw.zeros(5, 4, mesh=mesh, placements=[S0, S1])
        z.set_(y)
        fits(z)
        assert torch.equal(z.full_tensor(), torch.ones(6, 3))
        with pytest.raises(UnsupportedError, match="takes a DTensor and no other arguments"):
            z.set_(torch.ones(3))
        assert z.resize_(6, 3) is z
        assert z.resize_as_(y) is z
        assert z.resize_(7) is z
        fits(z)
        assert torch.equal(z.full_tensor(), torch.ones(7))
        a, b = sw.zeros(5, mesh=mesh, placements=[S0, R]), torch.ones(3)
        torch.utils.swap_tensors(a, b)
        assert type(a) is torch.Tensor
        assert torch.equal(a, torch.ones(3))
        fits(b)
        c, d = nn.Parameter(sw.zeros(5, mesh=mesh, placements=[S0, R])), nn.Parameter(sw.ones(7, mesh=mesh))
        torch.utils.swap_tensors(c, d)
        fits(c)
        fits(d)
        assert c.sharding.shape == (7,)
        p = nn.Parameter(sw.zeros(5, 4, mesh=mesh, placements=[S0, R]))
        with pytest.raises(MixedTensorsError, match=r"\.grad of a DTensor"):
            p.grad = torch.zeros(5, 4)
        with pytest.raises(TensorError, match="does not fit"):
            p.grad = sw.zeros(5, 4, mesh=mesh)
        p.grad = sw.ones(5, 4, mesh=mesh, placements=[S0, R])
        assert p.grad.sum().item() == 20
        del p.grad
        assert p.grad is None

    run_ranks(4, on_rank)


def test_conversion_by_swap_tensors_keeps_layouts() -> None:
    def on_rank() -> None:
        torch.__future__.set_swap_module_params_on_conversion(True)
        try:
            net = _net(_mesh())
            before = net.first.weight
            net.double()
            assert net.first.weight is before
            assert before.dtype == torch.float64
            _same(net, _net().double())
        finally:
            torch.__future__.set_swap_module_params_on_conversion(False)

    run_ranks(4, on_rank)


class _Rotary(nn.Module):
    def forward(self, x: Any) -> Any:
        angles = torch.arange(4.0)
        return x * angles


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(4, 4), _Rotary())])

    def forward(self, x: Any, plain: Any = None) -> Any:
        return self.layers[0](x if plain is None else plain)


def test_error_about_a_plain_tensor_names_the_module_and_the_line() -> None:
    """Models create plain tensors (positions, masks); the error shows which one without a debugger."""
    mesh = sw.init_device_mesh("cpu", (1,))
    model = sw.distribute_module(_Model(), mesh)
    with pytest.raises(MixedTensorsError) as made:
        model(sw.ones(2, 4, mesh=mesh))
    line = _Rotary.forward.__code__.co_firstlineno + 2
    assert f"(at test_modules.py:{line}, `return x * angles`, in _Rotary 'layers.0.1' of _Model)" in str(made.value)
    with pytest.raises(MixedTensorsError, match=r"test_modules\.py:\d+, .*, in Linear 'layers\.0\.0' of _Model\)"):
        model(None, torch.ones(2, 4))
    with pytest.raises(MixedTensorsError, match=r"\(at test_modules\.py:\d+, `[^`]*torch\.ones\(4\)[^`]*`\)$"):
        torch.add(sw.ones(2, 4, mesh=mesh), torch.ones(4))
