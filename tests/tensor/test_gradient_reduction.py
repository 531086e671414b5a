"""Gradients are summed over exactly those mesh dimensions along which the other inputs differ, and only once."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import shardwright as sw
from shardwright import comm
from shardwright.errors import InPlaceError, MixedTensorsError
from shardwright.layout import Partial, Replicate, Shard
from shardwright.tensor.gradients import enter
from shardwright.testing import on_ranks
from tests.tensor.values import close, line, partial_sums, randn, spread

R, P = Replicate(), Partial()
ROWS = Shard(0)


@on_ranks(3)
def test_gradients_of_replicated_inputs_are_not_summed() -> None:
    """A sum would multiply the gradient by the number of ranks."""
    x, w = (sw.distribute_tensor(randn(4, 4, seed=seed), line()).requires_grad_() for seed in (1, 2))
    plain = [randn(4, 4, seed=seed).requires_grad_() for seed in (1, 2)]
    with comm.count() as traffic:
        (x @ w).sin().sum().backward()
    (plain[0] @ plain[1]).sin().sum().backward()
    close(x.grad, plain[0].grad)
    close(w.grad, plain[1].grad)
    assert not traffic.calls


@on_ranks(4)
def test_gradient_is_summed_only_over_mesh_dimensions_that_shard_the_other_input() -> None:
    """Sharded over one mesh dimension, replicated over another: the gradient is summed over the first alone."""
    mesh = sw.init_device_mesh("cpu", (2, 2))
    x = sw.distribute_tensor(randn(6, 4), mesh, [R, ROWS])
    w = sw.distribute_tensor(randn(4, 4, seed=1), mesh).requires_grad_()
    (x @ w).sin().sum().backward()
    plain = randn(4, 4, seed=1).requires_grad_()
    (randn(6, 4) @ plain).sin().sum().backward()
    close(w.grad, plain.grad)


@on_ranks(3)
def test_sharded_integer_indices_make_the_gradient_of_a_table_partial() -> None:
    """A table looked up with sharded indices has a gradient that differs from rank to rank."""
    indices = torch.tensor([3, 1, 1, 0, 3, 2, 3])
    table = sw.distribute_tensor(randn(5, 2), line()).requires_grad_()
    plain = randn(5, 2).requires_grad_()
    nn.functional.embedding(sw.distribute_tensor(indices, line(), [ROWS]), table).sin().sum().backward()
    nn.functional.embedding(indices, plain).sin().sum().backward()
    close(table.grad, plain.grad)


@on_ranks(3)
def test_gradient_of_a_factor_of_a_partial_sum_is_summed() -> None:
    """`P * R`: the gradient of R is a sum over the ranks."""
    whole = sw.distribute_tensor(randn(5, seed=1), line()).requires_grad_()
    plain = randn(5, seed=1).requires_grad_()
    scaled = partial_sums(randn(5)) * whole
    assert scaled.placements == (P,)
    scaled.sin().sum().backward()
    (randn(5) * plain).sin().sum().backward()
    close(whole.grad, plain.grad)


@on_ranks(3)
def test_shared_and_expanded_gradients_are_reduced_correctly() -> None:
    """One gradient tensor for two inputs, or one number for all elements, and a collective in place."""
    x = sw.distribute_tensor(randn(7, 2), line(), [ROWS])
    a, b = (nn.Parameter(sw.distribute_tensor(randn(2, seed=seed), line())) for seed in (1, 2))
    ((a + b) + x).sum().backward()  # both get the same tensor, expanded
    close(a.grad, torch.full((2,), 7.0, dtype=torch.float64))
    close(b.grad, torch.full((2,), 7.0, dtype=torch.float64))
    w = nn.Parameter(sw.distribute_tensor(randn(2, 4, seed=3), line()))
    (x @ w.T.T).t().sum(0).sum().backward()  # neither contiguous nor dense
    weight = randn(2, 4, seed=3).requires_grad_()
    (randn(7, 2) @ weight).sum().backward()
    close(w.grad, weight.grad)


@on_ranks(3)
def test_to_local_with_partial_grad_placements_sums_the_gradient() -> None:
    """`to_local()` of a replicated tensor, used differently by each rank."""
    rank, ranks = comm.world().rank, comm.world().size
    x = sw.distribute_tensor(randn(5), line()).requires_grad_()
    (x.to_local(grad_placements=[P]) * (rank + 1)).sum().backward()
    close(x.grad, torch.full((5,), ranks * (ranks + 1) / 2, dtype=torch.float64))


@on_ranks(3)
def test_plain_0d_tensor_that_requires_grad_is_refused() -> None:
    """The gradient of a plain 0-dimensional tensor would be that of one rank."""
    x = sw.distribute_tensor(randn(5), line(), [ROWS]).requires_grad_()
    close(x * torch.tensor(2.0, dtype=torch.float64), randn(5) * 2)
    with pytest.raises(MixedTensorsError, match="mul: argument 1 is a plain tensor"):
        x * torch.tensor(2.0, requires_grad=True)


@on_ranks(2, timeout=30)
def test_ranks_with_empty_shards_agree_that_a_gathered_parameter_is_stale() -> None:
    p, x = nn.Parameter(spread(torch.ones(1, 4), Shard(0))), spread(torch.ones(4, 1), Shard(0))
    (x @ p).full_tensor()  # a forward pass without a backward one
    p.data = p.data * 10
    assert (x @ p).full_tensor().sum().item() == 160


@on_ranks(2, timeout=30)
def test_parameter_written_through_data_is_gathered_again() -> None:
    p, x = nn.Parameter(spread(torch.ones(4, 4), Shard(0))), spread(torch.ones(4, 4), Shard(0))
    assert (x @ p).sum().item() == 64
    p.data.mul_(10)
    assert (x @ p).sum().item() == 640
    held = p.data
    assert (x @ p).sum().item() == 640
    held.mul_(10)
    assert (x @ p).sum().item() == 6400


@on_ranks(2, timeout=30)
def test_parameter_written_through_data_before_backward_is_refused_in_backward() -> None:
    """torch computes with the new values, of which a gathered copy knows nothing."""
    for placement, refused in ((ROWS, True), (R, False)):
        x, w = spread(randn(6, 6), ROWS), nn.Parameter(spread(randn(6, 6, seed=1), placement))
        plain_x, plain = randn(6, 6), nn.Parameter(randn(6, 6, seed=1))
        loss, expected = ((x.sin() @ w) @ w).sum(), ((plain_x.sin() @ plain) @ plain).sum()
        w.data.mul_(2), plain.data.mul_(2)
        if refused:
            with pytest.raises(InPlaceError, match=r"through \.data.* before backward"):
                loss.backward()
            w.grad = plain.grad = None
            loss, expected = ((x @ w) @ w).sum(), ((plain_x @ plain) @ plain).sum()  # the next step is right
        loss.backward(), expected.backward()
        close(w.grad, plain.grad)


@pytest.mark.parametrize("placement", [Shard(0), R])
def test_reading_data_on_one_rank_alone_changes_no_decision(placement: sw.Placement) -> None:
    @on_ranks(2, timeout=30)
    def work() -> None:
        p, x = nn.Parameter(spread(torch.ones(4, 4), placement)), spread(torch.ones(4, 4), Shard(0))
        for _ in range(2):
            first = x @ p
            if comm.rank() == 0:
                p.data.shape, p.data.to_local().sum()  # a log of rank 0
            with comm.count() as traffic:
                second = x @ p
            assert not traffic.calls
            (first + second).sum().backward()
        assert p.grad.sum().item() == 256

    work()


@on_ranks(2, timeout=30)
def test_a_swapped_parameter_is_gathered_again() -> None:
    p, q = (nn.Parameter(spread(torch.full((4, 4), value), Shard(0))) for value in (1.0, 2.0))
    x = spread(torch.ones(4, 4), Shard(0))
    assert (x @ p).sum().item() == 64  # a forward pass without a backward one
    torch.utils.swap_tensors(p, q)
    assert (x @ p).sum().item() == 128
    assert (x @ q).sum().item() == 64


@on_ranks(2, timeout=30)
def test_input_written_through_an_alias_before_backward_is_refused_in_backward() -> None:
    """It needs no gradient itself, but a copy of it is saved for the gradient of the other input."""
    base, w = spread(randn(3, 4), R).requires_grad_(), nn.Parameter(spread(randn(4, 4, seed=1), ROWS))
    x = base.data[:, 0:4]
    result = (x @ w).sum()
    other = (x * 2).sum() + (w * 3).sum()  # nothing was copied
    with torch.no_grad():
        base.add_(1)
    with pytest.raises(InPlaceError, match="another alias that autograd does not know"):
        result.backward()
    other.backward()
    close(w.grad, torch.full((4, 4), 3.0, dtype=torch.float64))


@on_ranks(2, timeout=30)
def test_autograd_grad_keeps_no_gathered_parameter() -> None:
    p = nn.Parameter(spread(torch.ones(4, 4), Shard(0)))
    x = spread(torch.ones(4, 4), Shard(0)).requires_grad_()
    torch.autograd.grad((x @ p).sum(), x)
    assert not enter._shared


@on_ranks(2, timeout=30)
def test_activation_checkpointing_keeps_no_gathered_parameter() -> None:
    layers = [nn.Parameter(spread(torch.ones(4, 4), Shard(0))) for _ in range(3)]
    x = spread(torch.ones(4, 4), Shard(0)).requires_grad_()
    for p in layers:
        x = checkpoint(torch.matmul, x, p, use_reentrant=False)
    assert not enter._shared
    x.sum().backward()
    assert all(p.grad is not None for p in layers)


@on_ranks(2, timeout=30)
def test_deferred_reduction_does_not_affect_autograd_grad_and_hooks() -> None:
    p, x = nn.Parameter(spread(torch.ones(4, 4), R)), spread(torch.ones(4, 4), Shard(0))
    with sw.defer_gradient_reduction():
        (gradient,) = torch.autograd.grad((x @ p).sum(), p)
    assert gradient.sum().item() == 64
    assert p.grad is None
    p.register_hook(lambda g: g * 0.5)
    with sw.defer_gradient_reduction():
        (x @ p).sum().backward()
    assert p.grad.sum().item() == 32
