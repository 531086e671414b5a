"""Where a review found wrong answers: each is a promise now."""

from __future__ import annotations

import io
import threading

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import shardwright as sw
from shardwright import comm
from shardwright.errors import InPlaceError, TensorError
from shardwright.tensor.gradients import enter
from shardwright.testing import on_ranks

S, R, P = sw.Shard, sw.Replicate, sw.Partial


def spread(value: torch.Tensor, *placements: sw.Placement) -> sw.DTensor:
    return sw.distribute_tensor(value, sw.init_device_mesh("cpu", (comm.world().size,)), list(placements))


@on_ranks(2, timeout=30)
def test_ranks_agree_whether_a_gathered_parameter_is_still_good_where_a_shard_is_empty() -> None:
    p, x = nn.Parameter(spread(torch.ones(1, 4), S(0))), spread(torch.ones(4, 1), S(0))
    (x @ p).full_tensor()  # a forward pass without a backward one
    p.data = p.data * 10
    assert (x @ p).full_tensor().sum().item() == 160


@on_ranks(2, timeout=30)
def test_a_parameter_written_to_through_data_is_gathered_anew() -> None:
    p, x = nn.Parameter(spread(torch.ones(4, 4), S(0))), spread(torch.ones(4, 4), S(0))
    assert (x @ p).sum().item() == 64
    p.data.mul_(10)
    assert (x @ p).sum().item() == 640
    held = p.data
    assert (x @ p).sum().item() == 640
    held.mul_(10)
    assert (x @ p).sum().item() == 6400


@on_ranks(2, timeout=30)
def test_nothing_gathered_outlives_a_gradient_that_was_asked_for() -> None:
    p = nn.Parameter(spread(torch.ones(4, 4), S(0)))
    x = spread(torch.ones(4, 4), S(0)).requires_grad_()
    torch.autograd.grad((x @ p).sum(), x)
    assert not enter._shared


@on_ranks(2, timeout=30)
def test_checkpointing_keeps_no_gathered_parameter() -> None:
    layers = [nn.Parameter(spread(torch.ones(4, 4), S(0))) for _ in range(3)]
    x = spread(torch.ones(4, 4), S(0)).requires_grad_()
    for p in layers:
        x = checkpoint(torch.matmul, x, p, use_reentrant=False)
    assert not enter._shared
    x.sum().backward()
    assert all(p.grad is not None for p in layers)


@on_ranks(2, timeout=30)
def test_the_gradient_of_an_average_made_and_resolved_is_one() -> None:
    for start in (R(), S(0)):
        x = spread(torch.ones(3), start).requires_grad_()
        y = x.redistribute(placements=[P("avg")]).redistribute(placements=[R()])
        y.sum().backward()
        assert y.tolist() == [1, 1, 1]
        assert x.grad.tolist() == [1, 1, 1]


@on_ranks(2, timeout=30)
def test_a_copy_that_looks_like_a_view_is_never_written_to_however_often_it_is_tried() -> None:
    for _ in range(3):
        x = spread(torch.zeros(6, 4), S(1))
        y = x.view(24)  # moved: a copy
        for write in (
            lambda y=y: y.add_(1),
            lambda y=y: y.detach().add_(1),
            lambda y=y: y.view(6, 4).add_(1),
            lambda y=y: torch.add(y, y, out=y),
        ):
            with pytest.raises(InPlaceError, match="copy"):
                write()


@on_ranks(2, timeout=30)
def test_deferral_leaves_autograd_grad_and_hooks_alone() -> None:
    p, x = nn.Parameter(spread(torch.ones(4, 4), R())), spread(torch.ones(4, 4), S(0))
    with sw.defer_gradient_reduction():
        (gradient,) = torch.autograd.grad((x @ p).sum(), p)
    assert gradient.sum().item() == 64
    assert p.grad is None
    p.register_hook(lambda g: g * 0.5)
    with sw.defer_gradient_reduction():
        (x @ p).sum().backward()
    assert p.grad.sum().item() == 32


@on_ranks(2, timeout=30)
def test_a_part_saved_by_one_rank_is_not_taken_for_anothers() -> None:
    buffer = io.BytesIO()
    torch.save(spread(torch.arange(8.0), S(0)), buffer)
    data = comm.gather_bytes(buffer.getvalue())[0]
    if comm.rank() == 0:
        assert torch.load(io.BytesIO(data)).to_local().tolist() == [0, 1, 2, 3]
    else:
        with pytest.raises(TensorError, match="saved by rank 0 and does not belong to rank 1"):
            torch.load(io.BytesIO(data))


@on_ranks(2, timeout=30)
def test_inference_mode_runs_operators_without_rules_and_their_writes() -> None:
    with torch.inference_mode():
        x = spread(torch.eye(4) * 2, S(0))
        assert torch.equal(torch.linalg.inv(x).full_tensor(), torch.eye(4) / 2)
        x.renorm_(2, 0, 1.0)  # no rule, in place
        assert torch.allclose(x.full_tensor(), torch.eye(4), atol=1e-4)


@on_ranks(2, timeout=30)
def test_an_empty_list_of_dimensions_means_what_torch_means_by_it() -> None:
    whole = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))
    x = spread(whole, S(0))
    torch.testing.assert_close(x.var(dim=[]).full_tensor(), whole.var(dim=[]))
    torch.testing.assert_close(x.std(dim=()).full_tensor(), whole.std(dim=()))
    assert torch.equal((x > 0).any(dim=()).full_tensor(), (whole > 0).any(dim=()))
    assert torch.equal((x > 0).all(dim=()).full_tensor(), (whole > 0).all(dim=()))


def test_traces_of_two_threads_may_overlap() -> None:
    opened, closed = threading.Event(), threading.Event()
    mesh = sw.init_device_mesh("cpu", (1,))

    def other() -> None:
        with sw.trace():
            opened.set()
            closed.wait(10)

    thread = threading.Thread(target=other)
    with sw.trace():
        thread.start()
        opened.wait(10)
    closed.set()
    thread.join(10)
    with sw.trace() as seen:
        pass
    sw.ones(2, mesh=mesh) * 2
    assert seen.events == []
    assert "__torch_function__" in vars(sw.DTensor)
    assert vars(sw.DTensor)["__torch_function__"].__func__.__name__ == "__torch_function__"


@on_ranks(2, timeout=30)
def test_writing_to_a_tensor_that_is_being_moved_changes_nothing_of_what_arrives() -> None:
    x = spread(torch.zeros(4), S(0))
    y = x.redistribute(placements=[R()], async_op=True)
    x.add_(1)
    assert y.tolist() == [0, 0, 0, 0]


@on_ranks(2, timeout=30)
def test_out_of_a_type_that_cannot_hold_the_result_is_refused() -> None:
    x, z = spread(torch.full((4,), 1.5), S(0)), spread(torch.zeros(4, dtype=torch.int64), R())
    with pytest.raises(InPlaceError, match=r"torch.int64 cannot hold the result of torch.float32"):
        torch.mul(x, x, out=z)


@on_ranks(4, timeout=30)
def test_a_target_keeps_its_order_of_cuts_beside_an_operand_of_another() -> None:
    mesh = sw.init_device_mesh("cpu", (2, 2))
    whole = torch.arange(16.0).reshape(2, 8)
    x = sw.distribute_tensor(whole, mesh, [S(1), S(1)])
    x.add_(sw.distribute_tensor(whole, mesh, [S(1), S(1)], order=(1, 0)))
    assert torch.equal(x.full_tensor(), whole * 2)


@on_ranks(3, timeout=30)
def test_softmax_along_a_cut_dimension_takes_what_torch_takes() -> None:
    with pytest.raises((RuntimeError, NotImplementedError)):
        spread(torch.ones(4, 3, dtype=torch.int64), S(0)).softmax(0)
    assert spread(torch.ones(3, 0), S(1)).softmax(1).shape == (3, 0)
