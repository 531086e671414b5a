"""A parameter whose use has a dtype is gathered in it where it meets activations; its gradient has its own dtype."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import shardwright as sw
from shardwright import comm
from shardwright.layout import Replicate, Shard
from shardwright.tensor.base.parameter_use import ParameterUse, parameter_use, set_parameter_use
from shardwright.testing import on_ranks, run_ranks
from tests.tensor.test_parameter_use import through_a_file
from tests.tensor.values import line, randn

R = Replicate()
LOW = torch.bfloat16


def both(*shape: int, seed: int, placements: Any, mesh: Any = None, gathered: Any = frozenset({0})) -> tuple[Any, Any]:
    """Return a float32 parameter with a use in low precision, and the same in plain torch."""
    plain = nn.Parameter(randn(*shape, seed=seed).float())
    ours = nn.Parameter(sw.distribute_tensor(plain.detach(), mesh or line(), placements))
    set_parameter_use(ours, ParameterUse(frozenset(gathered), LOW))
    return ours, plain


def low_precision_network(x: Any, w: Any, b: Any, norm: Any) -> Any:
    return functional.layer_norm(functional.linear(x, w, b), (6,), norm, b).float()


@pytest.mark.parametrize("placement", [Shard(0), R])
def test_parameters_are_gathered_in_the_dtype_of_their_use_and_gradients_have_their_own(placement: Any) -> None:
    @on_ranks(2)
    def work() -> None:
        pairs = [both(*shape, seed=i, placements=[placement]) for i, shape in enumerate(((6, 8), (6,), (6,)))]
        x = randn(4, 8).to(LOW)
        with sw.trace() as seen:
            result = low_precision_network(sw.distribute_tensor(x, line(), [Shard(0)]), *(ours for ours, _ in pairs))
        expected = low_precision_network(x, *(plain.to(LOW) for _, plain in pairs))
        torch.testing.assert_close(result.full_tensor(), expected)
        if placement is not R:
            assert sum(move.received for move in seen.redistributions) == 2 * (3 * 8 + 3 * 2)  # half of float32's
        result.square().sum().backward()
        expected.square().sum().backward()
        for ours, plain in pairs:
            assert ours.grad.dtype == torch.float32
            torch.testing.assert_close(ours.grad.full_tensor(), plain.grad, rtol=0.02, atol=0.02)

    work()


@on_ranks(2)
def test_gradients_of_several_ranks_are_summed_in_the_dtype_of_the_parameter() -> None:
    w, _ = both(2, 2, seed=0, placements=[Shard(0)])
    values = torch.tensor([[256.0, 0.0], [1.0, 0.0]])  # 257 has no bfloat16
    x = sw.distribute_tensor(values.to(LOW), line(), [Shard(0)])
    functional.linear(x, w).sum().backward()
    assert w.grad.full_tensor()[0, 0].item() == 257


@on_ranks(2)
def test_the_dtype_of_activations_decides_in_which_dtype_is_computed() -> None:
    w, plain = both(6, 8, seed=0, placements=[Shard(0)])
    x = sw.distribute_tensor(randn(4, 8).float(), line(), [Shard(0)])
    result = functional.linear(x, w)
    assert result.dtype == torch.float32
    torch.testing.assert_close(result.full_tensor(), functional.linear(randn(4, 8).float(), plain.to(LOW).float()))
    ids = sw.distribute_tensor(torch.tensor([0, 3]), line(), [Shard(0)])
    assert functional.embedding(ids, w).dtype == LOW
    torch.testing.assert_close(functional.embedding(ids, w).full_tensor(), plain[torch.tensor([0, 3])].to(LOW))


@on_ranks(2)
def test_parameters_alone_and_writes_are_computed_in_their_own_dtype() -> None:
    w, plain = both(6, 8, seed=0, placements=[Shard(0)])
    assert w.T.dtype == (w * 2).dtype == w.norm().dtype == torch.float32
    x = sw.distribute_tensor(randn(6, 8).to(LOW), line(), [Shard(0)])
    with torch.no_grad():
        w.add_(x)
        torch.testing.assert_close(w.full_tensor(), plain + randn(6, 8).to(LOW))
    assert w.type_as(x).dtype == LOW
    assert parameter_use(w.type_as(x)) == parameter_use(w)


@on_ranks(2)
def test_uses_in_a_step_share_one_gathering() -> None:
    w, plain = both(6, 8, seed=0, placements=[Shard(0)])
    x = sw.distribute_tensor(randn(4, 8).to(LOW), line(), [Shard(0)])
    with comm.count() as traffic:
        loss = (functional.linear(x, w) * functional.linear(x, w)).float()
        loss.sum().backward()
    assert traffic.calls["all_gather"] == traffic.calls["reduce_scatter"] == 1
    expected = functional.linear(randn(4, 8).to(LOW), plain.to(LOW)).float()
    (expected * expected).sum().backward()
    torch.testing.assert_close(w.grad.full_tensor(), plain.grad, rtol=0.05, atol=0.2)


def test_the_dtype_survives_files_and_copies() -> None:
    w, _ = both(6, 8, seed=0, placements=[Shard(0)])
    assert parameter_use(through_a_file(w)) == parameter_use(w) == ParameterUse(frozenset({0}), LOW)


def test_ranks_outside_the_mesh_agree_about_dtypes() -> None:
    def work() -> torch.dtype:
        mesh = sw.init_device_mesh("cpu", (3,))
        inner = sw.DeviceMesh("cpu", [0, 1])
        del mesh
        w, _ = both(6, 8, seed=0, placements=[Shard(0)], mesh=inner)
        x = sw.distribute_tensor(randn(4, 8).to(LOW), inner, [Shard(0)])
        result = functional.linear(x, w)
        result.float().sum().backward()
        return result.dtype

    assert run_ranks(3, work) == [LOW] * 3


@on_ranks(2)
def test_a_compiled_program_casts_at_every_call() -> None:
    w, plain = both(6, 8, seed=0, placements=[Shard(0)])
    compiled = sw.compile(lambda x, w: functional.linear(x, w).float())
    for seed in range(2):
        x = randn(4, 8, seed=seed).to(LOW)
        result = compiled(sw.distribute_tensor(x, line(), [Shard(0)]), w)
        torch.testing.assert_close(result.full_tensor(), functional.linear(x, plain.to(LOW)).float())
        with torch.no_grad():
            w.mul_(2)
            plain.mul_(2)
