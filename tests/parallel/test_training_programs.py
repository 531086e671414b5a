"""Programs around a parallel model that people write by hand: each gives the gradients of one rank, or is refused."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import shardwright as sw
from shardwright.errors import TensorError
from shardwright.testing import run_ranks
from tests.parallel.models import batch, make

EXACT = 1e-9


def compare(loss_of: Callable[[nn.Module, Callable[[Tensor], Any]], Tensor], steps: int = 1) -> None:
    """Compare loss and gradients of a parallel model with those of plain torch on the global batch.

    `loss_of(model, shard)` computes a loss and its gradients; `shard` prepares a batch for the model.
    """
    mesh = sw.init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    model, plain = sw.parallelize(make(), mesh), make()
    for _ in range(steps):
        loss = loss_of(model, lambda tokens: sw.shard_batch(tokens, mesh))
        expected = loss_of(plain, lambda tokens: tokens)
        torch.testing.assert_close(loss.full_tensor(), expected, rtol=0, atol=EXACT)
        for (name, mine), other in zip(model.named_parameters(), plain.parameters(), strict=True):
            assert (mine.grad is None) == (other.grad is None), name
            if other.grad is not None:
                grad: Any = mine.grad.full_tensor() if isinstance(mine.grad, sw.DTensor) else mine.grad
                torch.testing.assert_close(grad, other.grad, rtol=0, atol=EXACT, msg=name)
        model.zero_grad()
        plain.zero_grad()


def test_a_model_may_be_called_in_backward() -> None:
    run_ranks(2, _call_in_backward)


def _call_in_backward() -> None:
    def recompute(model: nn.Module, shard: Callable[[Tensor], Any]) -> Tensor:
        outputs = [checkpoint(model, shard(batch(0, step)), use_reentrant=False) for step in range(2)]
        loss: Tensor = outputs[0].square().mean() + outputs[1].exp().mean()
        loss.backward()
        return loss

    def evaluate_in_a_hook(model: Any, shard: Callable[[Tensor], Any]) -> Tensor:
        def evaluate(_: Tensor) -> None:
            with torch.no_grad():
                model(shard(batch(0, 1)))

        def hook(_: nn.Module, __: Any, output: Tensor) -> None:
            if output.requires_grad:
                output.register_hook(evaluate)

        handle = model.blocks[1].register_forward_hook(hook)
        loss: Tensor = model(shard(batch(0, 0))).square().mean()
        loss.backward()
        handle.remove()
        return loss

    compare(recompute, steps=2)
    compare(evaluate_in_a_hook, steps=2)


def test_parameters_frozen_between_forward_and_backward_get_no_gradient() -> None:
    run_ranks(2, _freeze_late)


def _freeze_late() -> None:
    def freeze(model: Any, shard: Callable[[Tensor], Any]) -> Tensor:
        loss: Tensor = model(shard(batch(0, 0))).square().mean()
        model.blocks[1].requires_grad_(False)
        loss.backward()
        return loss

    compare(freeze)


class Adapter(nn.Module):
    """A layer with a trainable addition, as low-rank adapters wrap it."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.extra = nn.Parameter(torch.full((base.out_features,), 0.1, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) * self.extra


def test_layers_wrapped_or_replaced_after_parallelize_train_as_on_one_rank() -> None:
    run_ranks(2, _wrap_layers)


def _wrap_layers() -> None:
    steps: dict[nn.Module, int] = {}

    def wrap(model: Any, shard: Callable[[Tensor], Any]) -> Tensor:
        steps[model] = steps.get(model, -1) + 1
        if steps[model] == 1:
            for block in model.blocks:
                block.up = Adapter(block.up)
        if steps[model] == 2:
            torch.manual_seed(1)
            model.head = nn.Linear(6, 3, dtype=torch.float64)
        loss: Tensor = model(shard(batch(0, 0))).square().mean()
        loss.backward()
        with torch.no_grad():
            model(shard(batch(0, 0)))
        if steps[model] == 1 and isinstance(model.blocks[0].up.base.weight, sw.DTensor):
            unit, other = (getattr(model.blocks[0], name).weight.__dict__["_unit"][0] for name in ("norm", "down"))
            assert model.blocks[0].up.base.weight.__dict__["_unit"][0] is unit is other
            assert not unit.is_gathered
        return loss

    compare(wrap, steps=3)


def test_trainable_parameters_registered_after_fully_shard_are_refused() -> None:
    run_ranks(2, _register_late)


def _register_late() -> None:
    model = make()
    sw.fully_shard(model, ignored_params=[model.norm.weight])
    model(batch(0, 0)).sum().backward()
    model.blocks[0].up = Adapter(model.blocks[0].up)
    with pytest.raises(TensorError, match=r"blocks\.0\.up\.extra\. .*before fully_shard"):
        model(batch(0, 0))
    with torch.no_grad():
        model(batch(0, 0))
    model.blocks[0].up.extra.requires_grad_(False)
    model(batch(0, 0)).sum().backward()


def test_gradients_that_are_returned_leave_accumulated_ones_alone() -> None:
    run_ranks(2, _return_gradients)


def _return_gradients() -> None:
    model, plain = sw.fully_shard(make()), make()
    model.set_requires_gradient_sync(False)
    for each in (model, plain):
        each(batch(0, 0)).square().mean().backward()
    for reduces in (False, True):
        model.set_requires_gradient_sync(reduces)
        mine, expected = (
            torch.autograd.grad(each(batch(0, 1)).square().mean(), each.head.weight) for each in (model, plain)
        )
        torch.testing.assert_close(mine[0].full_tensor(), expected[0], rtol=0, atol=EXACT)
    for each in (model, plain):
        each(batch(0, 2)).square().mean().backward()
    for mine, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad.full_tensor(), other.grad, rtol=0, atol=EXACT)


_WITHOUT_GROUP = """
import torch, shardwright as sw
layer = sw.fully_shard(torch.nn.Linear(2, 4))
assert layer.weight.to_local().shape == (2, 2), layer.weight.to_local().shape
layer(torch.ones(1, 2)).sum().backward()
torch.distributed.destroy_process_group()
"""


def test_fully_shard_starts_the_process_group_of_the_launcher() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    variables = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", _WITHOUT_GROUP],
            env={**os.environ, **variables, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    for rank in ranks:
        _, errors = rank.communicate(timeout=120)
        assert rank.returncode == 0, errors
