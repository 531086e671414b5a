"""Programs around a parallel model that people write by hand: each gives the gradients of one rank, or is refused."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import shardwright as sw
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
                torch.testing.assert_close(mine.grad.full_tensor(), other.grad, rtol=0, atol=EXACT, msg=name)
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
