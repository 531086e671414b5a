"""Strategies in which prototypes had wrong values or gradients, from ../shared/traps.md: each by its number."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardwright as sw
from shardwright import comm
from shardwright.errors import InPlaceError, MixedTensorsError, PartialGradientError
from shardwright.layout import Partial, Replicate, Shard
from shardwright.testing import on_ranks

R, P = Replicate(), Partial()
ROWS = Shard(0)


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def line() -> Any:
    return sw.init_device_mesh("cpu", (comm.world().size,))


def addends(whole: Tensor, op: str = "sum") -> sw.DTensor:
    """A partial tensor of this value, whose addends are unlike each other."""
    rank, ranks = comm.world().rank, comm.world().size
    share = (rank + 1) * 2 / (ranks * (ranks + 1)) * (ranks if op == "avg" else 1)
    return sw.DTensor.from_local((whole * share).requires_grad_(), line(), [Partial(op)])


def close(ours: Any, theirs: Any) -> None:
    assert isinstance(ours, sw.DTensor)
    torch.testing.assert_close(ours.full_tensor(), theirs, rtol=1e-12, atol=1e-12)


@on_ranks(3)
def test_a_plain_number_is_taken_only_without_gradient() -> None:
    """Trap 16: the gradient of a plain 0-dimensional tensor would be that of one rank."""
    x = sw.distribute_tensor(randn(5), line(), [ROWS]).requires_grad_()
    close(x * torch.tensor(2.0, dtype=torch.float64), randn(5) * 2)
    with pytest.raises(MixedTensorsError, match="mul: argument 1 is a plain tensor"):
        x * torch.tensor(2.0, requires_grad=True)


@on_ranks(3)
def test_new_tensors_like_a_partial_one_are_what_they_say() -> None:
    """Trap 17: ones like every addend would add up to more than one."""
    partial = addends(randn(5)).detach()
    for made, expected in [
        (torch.ones_like(partial), torch.ones(5, dtype=torch.float64)),
        (torch.full_like(partial, 3.0), torch.full((5,), 3.0, dtype=torch.float64)),
        (torch.zeros_like(partial), torch.zeros(5, dtype=torch.float64)),
    ]:
        close(made, expected)
    assert torch.ones_like(partial).placements == (R,)


@on_ranks(3)
def test_a_partial_tensor_is_written_to_only_where_that_is_linear() -> None:
    """Trap 17: `P.add_(1)` would add one on every rank."""
    whole = randn(5)
    for write in (lambda x: x.add_(1), lambda x: x.pow_(2), lambda x: x.clamp_(min=0)):
        with pytest.raises(InPlaceError, match="in-place operator keeps its target's layout"):
            write(addends(whole).detach())
    doubled = addends(whole).detach().mul_(2)
    assert doubled.placements == (P,)
    close(doubled, whole * 2)
    close(addends(whole).detach().add_(addends(whole).detach()), whole * 2)
    close(addends(whole) + 1, whole + 1)
    filled = addends(whole).detach().fill_(3.0)  # what overwrites may: one addend is the number, the others nothing
    assert filled.placements == (P,)
    close(filled, torch.full((5,), 3.0, dtype=torch.float64))


@on_ranks(3)
def test_gradients_that_are_shared_or_expanded_are_reduced_right() -> None:
    """Trap 19: one gradient tensor for two inputs, or one number for all elements, and a collective in place."""
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
def test_the_local_part_of_a_replicate_used_by_rank_has_its_gradient_summed_when_asked() -> None:
    """Trap 22: `to_local()` of a replicate used differently by each rank."""
    rank, ranks = comm.world().rank, comm.world().size
    x = sw.distribute_tensor(randn(5), line()).requires_grad_()
    (x.to_local(grad_placements=[P]) * (rank + 1)).sum().backward()
    close(x.grad, torch.full((5,), ranks * (ranks + 1) / 2, dtype=torch.float64))


@on_ranks(3)
def test_an_average_has_its_share_of_the_gradient() -> None:
    """Trap 23: each of n addends of an average moves it by 1/n; a partial maximum has no gradient."""
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
        addends(whole.detach(), "max").sin()


@on_ranks(3)
def test_a_mean_is_exact_for_uneven_and_empty_shards() -> None:
    """Trap 23: the mean of means is not the mean."""
    for shape in ((7, 2), (4, 3), (1, 5), (2,)):
        whole = randn(*shape).requires_grad_()
        x = sw.distribute_tensor(whole.detach(), line(), [ROWS]).requires_grad_()
        ours, theirs = x.mean(0), whole.mean(0)
        close(ours, theirs.detach())
        ours.sin().sum().backward()
        theirs.sin().sum().backward()
        close(x.grad, whole.grad)


@on_ranks(3)
def test_what_is_replicated_throughout_enters_nowhere() -> None:
    """Trap 24: entering where nothing differs would multiply the gradient by the number of ranks."""
    x, w = (sw.distribute_tensor(randn(4, 4, seed=seed), line()).requires_grad_() for seed in (1, 2))
    plain = [randn(4, 4, seed=seed).requires_grad_() for seed in (1, 2)]
    with comm.count() as traffic:
        (x @ w).sin().sum().backward()
    (plain[0] @ plain[1]).sin().sum().backward()
    close(x.grad, plain[0].grad)
    close(w.grad, plain[1].grad)
    assert not traffic.calls


@on_ranks(3)
def test_integers_count_as_inputs_that_differ() -> None:
    """Trap 24: a table looked up by sharded indices has a gradient that differs from rank to rank."""
    indices = torch.tensor([3, 1, 1, 0, 3, 2, 3])
    table = sw.distribute_tensor(randn(5, 2), line()).requires_grad_()
    plain = randn(5, 2).requires_grad_()
    nn.functional.embedding(sw.distribute_tensor(indices, line(), [ROWS]), table).sin().sum().backward()
    nn.functional.embedding(indices, plain).sin().sum().backward()
    close(table.grad, plain.grad)


@on_ranks(3)
def test_a_replicate_added_to_a_partial_sum_becomes_one_and_moves_nothing() -> None:
    """Trap 24: `P + R` is not entering: R becomes P."""
    partial, whole = addends(randn(5)), sw.distribute_tensor(randn(5, seed=1), line()).requires_grad_()
    with comm.count() as traffic:
        total = partial + whole
    assert total.placements == (P,)
    assert not traffic.calls
    plain = randn(5, seed=1).requires_grad_()
    (randn(5) + plain).sin().sum().backward()
    total.sin().sum().backward()
    close(whole.grad, plain.grad)


@on_ranks(3)
def test_a_replicate_that_multiplies_a_partial_sum_enters() -> None:
    """Trap 24: `P * R` is entering: the gradient of R is a sum over the ranks."""
    whole = sw.distribute_tensor(randn(5, seed=1), line()).requires_grad_()
    plain = randn(5, seed=1).requires_grad_()
    scaled = addends(randn(5)) * whole
    assert scaled.placements == (P,)
    scaled.sin().sum().backward()
    (randn(5) * plain).sin().sum().backward()
    close(whole.grad, plain.grad)


@on_ranks(4)
def test_whether_something_differs_is_judged_by_mesh_dimension() -> None:
    """Trap 24: cut over one mesh dimension, whole over another: the gradient is summed over the first alone."""
    mesh = sw.init_device_mesh("cpu", (2, 2))
    x = sw.distribute_tensor(randn(6, 4), mesh, [R, ROWS])
    w = sw.distribute_tensor(randn(4, 4, seed=1), mesh).requires_grad_()
    (x @ w).sin().sum().backward()
    plain = randn(4, 4, seed=1).requires_grad_()
    (randn(6, 4) @ plain).sin().sum().backward()
    close(w.grad, plain.grad)


@on_ranks(3)
def test_an_operator_that_changes_a_shape_in_place_changes_the_layout_or_refuses() -> None:
    """A prototype's `t_` left the layout of a replicate saying what was no longer so."""
    for placement in (R, ROWS, P):
        for write in (
            lambda x: x.t_(),
            lambda x: x.unsqueeze_(0),
            lambda x: x.transpose_(0, 1),
            lambda x: x.squeeze_(),
        ):
            x = (
                addends(randn(4, 1)).detach()
                if placement == P
                else sw.distribute_tensor(randn(4, 1), line(), [placement])
            )
            try:
                write(x)
            except InPlaceError:
                close(x, randn(4, 1))
            else:
                close(x, write(randn(4, 1)))


@on_ranks(3)
def test_numpys_names_of_arguments_and_any_order_of_keywords_are_understood() -> None:
    """Trap 9: rules get keyword arguments."""
    x, w = sw.distribute_tensor(randn(4, 5), line(), [ROWS]), sw.distribute_tensor(randn(2, 5), line(), [Shard(1)])
    b = sw.distribute_tensor(randn(2, seed=1), line())
    close(torch.sum(x, axis=0), randn(4, 5).sum(0))
    close(x.mean(axis=1, keepdims=True), randn(4, 5).mean(1, keepdim=True))
    close(nn.functional.linear(x, bias=b, weight=w), nn.functional.linear(randn(4, 5), randn(2, 5), randn(2, seed=1)))
    close(torch.mm(mat2=w.t(), input=x), randn(4, 5) @ randn(2, 5).t())
    close(torch.sub(other=x, input=x[:1], alpha=2), randn(4, 5)[:1] - 2 * randn(4, 5))
