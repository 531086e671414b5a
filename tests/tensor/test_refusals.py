"""Operations that would silently see only the shard raise, with the reason and the remedy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.autograd import forward_ad

import shardwright as sw
from shardwright.errors import TensorError, UnsupportedError
from shardwright.tensor.api.convert import rebuild
from shardwright.tensor.api.torch_hooks import register_with_torch
from shardwright.tensor.dispatch import refusals
from shardwright.testing import on_ranks, run_ranks

R, S0 = sw.Replicate(), sw.Shard(0)


def _x(requires_grad: bool = False) -> Any:
    mesh = sw.init_device_mesh("cpu", (1,))
    return sw.distribute_tensor(torch.arange(4.0), mesh, [S0]).requires_grad_(requires_grad)


TRANSFORMS: dict[str, Callable[[Any], Any]] = {
    "grad": lambda x: torch.func.grad(torch.sum)(x),
    "value_and_grad": lambda x: torch.func.grad_and_value(torch.sum)(x),
    "vjp": lambda x: torch.func.vjp(torch.sum, x),
    "jacrev": lambda x: torch.func.jacrev(torch.sum)(x),
    "vmap": lambda x: torch.vmap(torch.sum)(x),
    "functionalize": lambda x: torch.func.functionalize(torch.sum)(x),
    "nested": lambda x: torch.func.grad(lambda y: torch.func.grad(torch.sum)(y).sum())(x),
    "in a tree": lambda x: torch.func.grad(lambda tree: tree["x"].sum())({"x": x}),
}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_torch_func_transforms_of_dtensors_raise(name: str) -> None:
    """They drop the class and would compute on the shard."""
    with pytest.raises(
        UnsupportedError, match=r"torch\.func .*would compute on this rank's shard alone: use torch\.aut"
    ):
        TRANSFORMS[name](_x())


def test_dtensors_inside_a_transform_of_plain_tensors_raise() -> None:
    x = _x()
    for transform in (
        lambda: torch.func.grad(lambda y: (x * y).sum())(torch.ones(4)),
        lambda: torch.func.grad(lambda y: (x * y).sum())(torch.tensor(1.0)),
        lambda: torch.vmap(lambda y: (x * y).sum())(torch.arange(3.0)),
    ):
        with pytest.raises(UnsupportedError, match=r"inside a torch.func transform is used with a DTensor"):
            transform()


def test_transform_that_returns_a_dtensor_raises() -> None:
    x = _x()
    for transform in (
        lambda: torch.vmap(lambda y: x.sum() * 1)(torch.ones(3)),
        lambda: torch.func.grad(lambda y: (y * 2, x.sum()), has_aux=True)(torch.tensor(1.0)),
    ):
        with pytest.raises(UnsupportedError, match=r"torch\.func of a DTensor .*this rank's shard alone"):
            transform()


def test_transforms_of_plain_tensors_are_unchanged() -> None:
    x = torch.arange(3.0)
    assert torch.equal(torch.func.grad(lambda y: (y**2).sum())(x), 2 * x)
    assert torch.equal(torch.vmap(lambda y: y * 2)(x), 2 * x)
    assert torch.equal(torch.func.functionalize(lambda y: y.add_(1))(x.clone()), x + 1)
    before = torch._functorch.eager_transforms._wrap_tensor_for_grad
    refusals.install()  # a second time changes nothing
    register_with_torch(sw.DTensor, rebuild)
    assert torch._functorch.eager_transforms._wrap_tensor_for_grad is before


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")  # torch, on first use
def test_forward_mode_derivatives_raise() -> None:
    """They would need redistributions of tangents."""
    with forward_ad.dual_level(), pytest.raises(UnsupportedError, match=r"forward-mode .* use reverse mode"):
        forward_ad.make_dual(_x(), _x())
    with pytest.raises(UnsupportedError, match="forward-mode"):
        torch.func.jvp(torch.sum, (_x(),), (_x(),))


def test_data_parallel_wrappers_raise() -> None:
    """The constructor of DistributedDataParallel would overwrite the shards of other ranks."""

    def on_rank() -> None:
        mesh = sw.init_device_mesh("cpu", (2,))
        layer = nn.Sequential(nn.Linear(4, 4))
        layer[0].weight = nn.Parameter(sw.distribute_tensor(layer[0].weight.detach(), mesh, [S0]))
        before = layer[0].weight.to_local().clone()
        for wrapper in (nn.parallel.DistributedDataParallel, nn.DataParallel):
            with pytest.raises(UnsupportedError, match=r"parameter '0\.weight' is a DTensor .* leave the wrapper out"):
                wrapper(layer)
        assert torch.equal(layer[0].weight.to_local(), before)
        nn.parallel.DistributedDataParallel(nn.Linear(2, 2))  # plain modules are none of our business

    run_ranks(2, on_rank)


@on_ranks(1)
def test_collectives_of_torch_distributed_raise() -> None:
    """`torch.distributed` would combine shards as if they were whole tensors."""
    from torch.distributed import _functional_collectives as functional

    x = _x()
    collectives = [lambda: dist.all_reduce(x)]
    if torch.__version__ >= "2.13":  # the others did not ask before
        collectives += [
            lambda: dist.broadcast(x, 0),
            lambda: functional.all_reduce(x, "sum", dist.group.WORLD),
            lambda: functional.broadcast(x, 0, dist.group.WORLD),
        ]
    for collective in collectives:
        with pytest.raises(UnsupportedError, match=r"would combine shards .*redistribute"):
            collective()


def test_as_subclass_raises() -> None:
    """Exports of memory are in test_foreign_memory.py."""
    with pytest.raises(UnsupportedError, match="would drop the layout"):
        _x().as_subclass(torch.Tensor)


def test_sparse_and_mkldnn_conversions_raise() -> None:
    x = sw.ones(2, 2, mesh=sw.init_device_mesh("cpu", (1,)))
    for change in (x.to_sparse, x.to_sparse_csr, x.to_mkldnn):
        with pytest.raises(UnsupportedError, match="local tensors of a DTensor are dense"):
            change()


def test_unsupported_error_is_a_tensor_error_and_a_runtime_error() -> None:
    assert issubclass(UnsupportedError, TensorError)
    assert issubclass(UnsupportedError, RuntimeError)


def test_documented_paths_without_a_hook_see_the_shard() -> None:
    """They see the shard with its local shape, as documented."""

    def on_rank() -> None:
        x = sw.distribute_tensor(torch.arange(4.0), sw.init_device_mesh("cpu", (2,)), [S0])
        replaced = torch.zeros(4)
        replaced.data = x
        for seen in (torch.Tensor(x), torch.FloatTensor(x), replaced, torch.zeros(0).set_(x)):
            assert type(seen) is torch.Tensor
            assert seen.shape == (2,)
        for name in ("torch.Tensor(d)", "torch.FloatTensor(d)", "plain.data = d", "plain.set_(d)"):
            assert name in str(refusals.__doc__)

    run_ranks(2, on_rank)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_torch_compile_of_code_with_dtensors_gives_eager_results(backend: str) -> None:
    """Operators of DTensors stay eager, plain code around them is compiled."""

    def on_rank() -> None:
        mesh = sw.init_device_mesh("cpu", (2,))
        value = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))
        x = sw.distribute_tensor(value, mesh, [S0])
        w = nn.Parameter(sw.distribute_tensor(torch.eye(6), mesh, [S0]))

        def step(x: Any, w: Any, plain: torch.Tensor) -> Any:
            shifted = plain.sin() + 1
            y = (x @ w).relu()
            whole = y.redistribute(placements=[R]).full_tensor() * 2
            back = sw.DTensor.from_local(y.to_local() * 1, mesh, [S0])
            return (back * x.shape[0]).sum(), whole.sum() + shifted.sum()

        expected, plain = step(x, w, value)
        expected.backward()
        gradient, w.grad = w.grad, None
        got, plain_got = torch.compile(step, backend=backend)(x, w, value)
        got.backward()
        assert torch.equal(got, expected)
        torch.testing.assert_close(plain_got, plain)
        assert torch.equal(w.grad, gradient)

        layers = sw.distribute_module(nn.Sequential(nn.Linear(6, 6), nn.ReLU()), mesh)
        torch.testing.assert_close(torch.compile(layers, backend=backend)(x).full_tensor(), layers(x).full_tensor())

    run_ranks(2, on_rank)
