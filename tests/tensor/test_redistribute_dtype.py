"""`redistribute(forward_dtype=, backward_dtype=)`: what is sent in which dtype, in forward and in backward."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import shardwright as sw
from shardwright.errors import ArgumentTypeError, TensorError
from shardwright.testing import run_ranks

BF16, F32, F64 = torch.bfloat16, torch.float32, torch.float64
PLACEMENTS = (sw.Shard(0), sw.Shard(1), sw.Replicate())


def expected(x: Tensor, weights: Tensor, forward: torch.dtype, backward: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the value and the gradient of `(x.to(forward) * weights).sum()`, the gradient rounded as it is sent."""
    return x.to(forward), weights.to(forward).to(backward).to(x.dtype)


def test_values_and_gradients_are_rounded_to_the_dtypes_of_transfer() -> None:
    def work() -> None:
        mesh = sw.init_device_mesh("cpu", (2,))
        torch.manual_seed(0)
        whole, weights = torch.randn(5, 3), torch.randn(5, 3)
        for source in PLACEMENTS:
            for target in PLACEMENTS:
                for forward in (None, BF16, F64):
                    for backward in (None, BF16, F64):
                        x = sw.distribute_tensor(whole, mesh, [source]).requires_grad_()
                        y = x.redistribute(placements=[target], forward_dtype=forward, backward_dtype=backward)
                        assert y.placements == (target,)
                        value, gradient = expected(whole, weights, forward or F32, backward or F32)
                        if source == target and y.dtype is F32:  # nothing is sent
                            gradient = weights
                        w = sw.distribute_tensor(weights.to(y.dtype), mesh, [target])
                        (y * w).sum().backward()
                        assert torch.equal(y.full_tensor(), value)
                        assert x.grad is not None
                        assert x.grad.dtype is F32
                        assert x.grad.placements == (source,)
                        assert torch.equal(x.grad.full_tensor(), gradient)

    run_ranks(2, work)


def test_narrower_dtype_halves_the_bytes() -> None:
    def work() -> None:
        mesh = sw.init_device_mesh("cpu", (2,))
        x = sw.ones(4, 4, mesh=mesh, placements=[sw.Shard(0)], requires_grad=True)
        with sw.trace() as wide:
            x.redistribute(placements=[sw.Replicate()])
        with sw.trace() as narrow:
            x.redistribute(placements=[sw.Replicate()], forward_dtype=BF16)
        half, full = (sum(each.received for each in seen.redistributions) for seen in (narrow, wide))
        assert half * 2 == full > 0

    run_ranks(2, work)


@pytest.mark.parametrize("target", [sw.Replicate(), sw.Shard(0), sw.Partial()])
def test_rounding_casts_complete_sums_first(target: sw.Placement) -> None:
    def work() -> None:
        mesh = sw.init_device_mesh("cpu", (2,))
        local = torch.full((2, 2), 1.0 if mesh.get_rank() else 1e30, dtype=F64)
        if mesh.get_rank():
            local[0] = -1e30  # the sum is 0 in the first row; in float16, inf - inf
        local.requires_grad_()
        x = sw.DTensor.from_local(local, mesh, [sw.Partial()])
        y = x.redistribute(placements=[target], forward_dtype=torch.float16)
        assert y.dtype is torch.float16
        assert y.full_tensor()[0].tolist() == [0.0, 0.0]
        y[0].sum().backward()
        assert local.grad is not None
        assert local.grad.dtype is F64
        assert local.grad.tolist() == [[1.0, 1.0], [0.0, 0.0]]

    run_ranks(2, work)


def test_casts_on_two_mesh_dimensions_keep_values_and_gradients() -> None:
    sources = ([sw.Partial(), sw.Shard(0)], [sw.Shard(0), sw.Partial()], [sw.Shard(0), sw.Shard(0)])
    targets = ([sw.Shard(0), sw.Replicate()], [sw.Replicate(), sw.Shard(1)], [sw.Shard(1), sw.Partial()])

    def work() -> None:
        mesh = sw.init_device_mesh("cpu", (2, 2))
        whole = torch.arange(24.0).reshape(6, 4)
        for source in sources:
            for target in targets:
                x = sw.distribute_tensor(whole, mesh).redistribute(placements=source).detach().requires_grad_()
                y = x.redistribute(placements=target, forward_dtype=torch.float16, backward_dtype=BF16)
                assert y.placements == tuple(target)
                assert torch.equal(y.full_tensor(), whole.half())
                (y * 3).sum().backward()
                assert x.grad is not None
                assert x.grad.dtype is F32
                assert torch.equal(x.grad.full_tensor(), torch.full((6, 4), 3.0))

    run_ranks(4, work)


def test_sums_of_gradients_are_completed_before_they_are_rounded() -> None:
    def work() -> None:
        mesh = sw.init_device_mesh("cpu", (2,))
        x = sw.ones(2, mesh=mesh, placements=[sw.Shard(0)], dtype=F64, requires_grad=True)
        whole = x.redistribute(placements=[sw.Replicate()], backward_dtype=torch.float16)
        local = whole.to_local(grad_placements=[sw.Partial()])
        (local * (-1e30 if mesh.get_rank() else 1e30)).sum().backward()
        assert x.grad is not None
        assert x.grad.full_tensor().tolist() == [0.0, 0.0]

    run_ranks(2, work)


def test_second_order_gradients_pass_through_the_casts() -> None:
    def work() -> None:
        mesh = sw.init_device_mesh("cpu", (2,))
        whole = torch.randn(4, dtype=F64, generator=torch.Generator().manual_seed(1))
        x = sw.distribute_tensor(whole, mesh, [sw.Shard(0)]).requires_grad_()
        y = x.redistribute(placements=[sw.Replicate()], forward_dtype=F32, backward_dtype=BF16)
        (first,) = torch.autograd.grad((y**3).sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(first.sum(), x)
        assert torch.allclose(first.full_tensor(), 3 * whole**2, rtol=1e-2)
        assert torch.allclose(second.full_tensor(), 6 * whole, rtol=1e-2)

    run_ranks(2, work)


def test_casts_work_asynchronously_on_other_meshes_and_outside_of_them() -> None:
    def work() -> None:
        first, every = sw.Mesh((2,), ranks=(0, 1)), sw.Mesh((3,))
        x = sw.distribute_tensor(torch.arange(6.0), first, [sw.Shard(0)]).requires_grad_()
        y = x.redistribute(every, [sw.Shard(0)], forward_dtype=F64, backward_dtype=BF16)
        assert y.full_tensor().tolist() == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
        y.sum().backward()
        assert x.grad is not None
        assert x.grad.dtype is F32
        if x.to_local().numel():
            assert x.grad.to_local().tolist() == [1.0] * 3
        waiting = x.detach().redistribute(placements=[sw.Replicate()], async_op=True, forward_dtype=BF16)
        assert waiting.dtype is BF16

    run_ranks(3, work)


def test_integers_have_no_gradient_and_backward_dtype_must_be_floating() -> None:
    x = sw.ones(2, mesh=sw.Mesh((1,)), requires_grad=True)
    y = x.redistribute(placements=[sw.Shard(0)], forward_dtype=torch.int64)
    assert (y.dtype, y.requires_grad) == (torch.int64, False)
    with pytest.raises(TensorError, match=r"backward_dtype torch\.int64 cannot hold a gradient"):
        x.redistribute(placements=[sw.Shard(0)], backward_dtype=torch.int64)
    with pytest.raises(ArgumentTypeError, match=r"forward_dtype must be a torch\.dtype, got str 'bfloat16'"):
        x.redistribute(placements=[sw.Shard(0)], forward_dtype="bfloat16")  # type: ignore[arg-type]  # the point
