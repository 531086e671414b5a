"""Partial values are created, written to, reduced and differentiated as the values they stand for."""

from __future__ import annotations

import pytest
import torch

import shardwright as sw
from shardwright import comm
from shardwright.errors import InPlaceError, PartialGradientError
from shardwright.layout import Partial, Replicate, Shard
from shardwright.testing import on_ranks
from tests.tensor.values import close, line, partial_sums, randn, spread

R, P = Replicate(), Partial()
ROWS = Shard(0)


@on_ranks(3)
def test_ones_like_a_partial_tensor_are_ones() -> None:
    """Ones on every rank would add up to the number of ranks."""
    partial = partial_sums(randn(5)).detach()
    for made, expected in [
        (torch.ones_like(partial), torch.ones(5, dtype=torch.float64)),
        (torch.full_like(partial, 3.0), torch.full((5,), 3.0, dtype=torch.float64)),
        (torch.zeros_like(partial), torch.zeros(5, dtype=torch.float64)),
    ]:
        close(made, expected)
    assert torch.ones_like(partial).placements == (R,)


@on_ranks(3)
def test_in_place_writes_to_a_partial_tensor_are_linear_or_refused() -> None:
    """`P.add_(1)` would add one on every rank."""
    whole = randn(5)
    for write in (lambda x: x.add_(1), lambda x: x.pow_(2), lambda x: x.clamp_(min=0)):
        with pytest.raises(InPlaceError, match="in-place operator keeps its target's layout"):
            write(partial_sums(whole).detach())
    doubled = partial_sums(whole).detach().mul_(2)
    assert doubled.placements == (P,)
    close(doubled, whole * 2)
    close(partial_sums(whole).detach().add_(partial_sums(whole).detach()), whole * 2)
    close(partial_sums(whole) + 1, whole + 1)
    filled = partial_sums(whole).detach().fill_(3.0)  # an overwrite may: one rank gets the number, the others zero
    assert filled.placements == (P,)
    close(filled, torch.full((5,), 3.0, dtype=torch.float64))


@on_ranks(3)
def test_partial_average_gets_its_share_of_the_gradient_and_a_maximum_none() -> None:
    """Each of n partial values of an average contributes 1/n; a partial maximum has no gradient."""
    ranks = comm.world().size
    whole = randn(5).requires_grad_()
    whole.sin().sum().backward()
    assert whole.grad is not None
    local = (whole.detach() * ranks * (comm.world().rank + 1) / 6).requires_grad_()
    average = sw.DTensor.from_local(local, line(), [Partial("avg")])
    close(average.detach(), whole.detach())
    average.sin().sum().backward()
    torch.testing.assert_close(local.grad, whole.grad / ranks, rtol=1e-12, atol=1e-12)
    with pytest.raises(PartialGradientError, match="has no gradient"):
        partial_sums(whole.detach(), "max").sin()


@on_ranks(2, timeout=30)
def test_gradient_through_a_partial_average_and_back_is_one() -> None:
    for start in (R, Shard(0)):
        x = spread(torch.ones(3), start).requires_grad_()
        y = x.redistribute(placements=[Partial("avg")]).redistribute(placements=[R])
        y.sum().backward()
        assert y.tolist() == [1, 1, 1]
        assert x.grad.tolist() == [1, 1, 1]


@on_ranks(3)
def test_mean_is_exact_for_uneven_and_empty_shards() -> None:
    """The mean of the ranks' means is not the mean."""
    for shape in ((7, 2), (4, 3), (1, 5), (2,)):
        whole = randn(*shape).requires_grad_()
        x = sw.distribute_tensor(whole.detach(), line(), [ROWS]).requires_grad_()
        ours, theirs = x.mean(0), whole.mean(0)
        close(ours, theirs.detach())
        ours.sin().sum().backward()
        theirs.sin().sum().backward()
        close(x.grad, whole.grad)


@on_ranks(3)
def test_adding_a_replicated_tensor_to_a_partial_sum_communicates_nothing() -> None:
    """`P + R` turns R into P: R does not enter."""
    partial, whole = partial_sums(randn(5)), sw.distribute_tensor(randn(5, seed=1), line()).requires_grad_()
    with comm.count() as traffic:
        total = partial + whole
    assert total.placements == (P,)
    assert not traffic.calls
    plain = randn(5, seed=1).requires_grad_()
    (randn(5) + plain).sin().sum().backward()
    total.sin().sum().backward()
    close(whole.grad, plain.grad)
