"""What surrounds a training step works on a parallel model: checkpoints, averaged weights, optimizers in backward."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardwright as sw
from shardwright import checkpoint
from shardwright.testing import run_ranks, same_as_one_rank


class Network(nn.Module):
    """Blocks of an MLP, with a tied embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(10, 8)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)) for _ in range(3)
        )
        self.head = nn.Linear(8, 10, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids)
        for block in self.blocks:
            x = x + block(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), ids.roll(1, 1).flatten())


IDS = torch.randint(0, 10, (6, 5), generator=torch.Generator().manual_seed(0))


def mesh_of(sizes: dict[str, int]) -> Any:
    return sw.init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any, steps: int) -> list[float]:
    losses = []
    for _ in range(steps):
        loss = model(batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def test_training_resumes_from_a_checkpoint_on_another_mesh(tmp_path: Path) -> None:
    def work(sizes: dict[str, int], resume: bool) -> list[float]:
        mesh = mesh_of(sizes)
        torch.manual_seed(0)
        model = sw.parallelize(Network().double(), mesh)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        batch = sw.shard_batch(IDS, mesh)
        if resume:
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.zero_()
            checkpoint.load({"model": model, "optimizer": optimizer}, tmp_path)
            return train(model, optimizer, batch, 2)
        losses = train(model, optimizer, batch, 2)
        checkpoint.save({"model": model, "optimizer": optimizer}, tmp_path)
        return losses + train(model, optimizer, batch, 2)

    expected = run_ranks(4, work, {"dp": 2, "tp": 2}, False)[0][2:]
    for sizes in ({"dp": 4}, {"tp": 2}, {"replicate": 2, "dp": 2}):
        ranks = torch.Size(sizes.values()).numel()
        assert run_ranks(ranks, work, sizes, True)[0] == pytest.approx(expected, rel=1e-10), sizes


def test_an_average_of_the_weights_follows_a_parallel_model() -> None:
    def work() -> None:
        mesh = mesh_of({"dp": 2})
        torch.manual_seed(0)
        plain = Network().double()
        models = [copy.deepcopy(plain), sw.parallelize(plain, mesh)]
        batches = [IDS, sw.shard_batch(IDS, mesh)]
        found = []
        for model, batch in zip(models, batches, strict=True):
            average = torch.optim.swa_utils.AveragedModel(
                model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)
            )
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            for _ in range(3):
                train(model, optimizer, batch, 1)
                average.update_parameters(model)
            with torch.no_grad():
                found.append(average(batch).item())
        assert found[1] == pytest.approx(found[0], rel=1e-10)

    run_ranks(2, work)


def test_an_optimizer_that_steps_in_backward_trains_as_on_one_rank() -> None:
    def step(model: nn.Module, batch: Any) -> Tensor:
        if not hasattr(model, "in_backward"):
            model.in_backward = True

            def update(parameter: Tensor) -> None:
                with torch.no_grad():
                    parameter.add_(parameter.grad, alpha=-0.1)
                parameter.grad = None

            for parameter in model.parameters():
                parameter.register_post_accumulate_grad_hook(update)
        loss = model(batch)
        loss.backward()
        return loss.detach()

    same_as_one_rank(Network, IDS, mesh=[{"dp": 2}, {"dp": 2, "tp": 2}], step=step, steps=3)


def test_a_step_after_a_refused_backward_is_right() -> None:
    def step(model: nn.Module, batch: Any) -> Tensor:
        loss = model(batch)
        handle = model.blocks[1][1].weight.register_hook(lambda gradient: 1 // 0)
        with pytest.raises(ZeroDivisionError):
            loss.backward()
        handle.remove()
        model.zero_grad()
        return model(batch)

    same_as_one_rank(Network, IDS, mesh=[{"dp": 2}, {"dp": 2, "tp": 2}], step=step)


def test_gradients_of_gradients_are_those_of_one_rank() -> None:
    def step(model: nn.Module, batch: Any) -> Tensor:
        loss = model(batch)
        gradients = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
        return loss + sum(gradient.square().sum() for gradient in gradients)

    same_as_one_rank(Network, IDS, mesh=[{"dp": 2}, {"dp": 2, "tp": 2}], step=step)
