"""Random trees of modules, units and steps: `fully_shard` computes the gradients of plain torch on all of them."""

from __future__ import annotations

import copy
import os
import random
import warnings

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import shardwright as sw
from shardwright import comm
from shardwright.testing import run_ranks

FULL = os.environ.get("SHARDWRIGHT_BUDGET") == "full"
WIDTH = 5  # divides by no number of ranks


class Leaf(nn.Module):
    """A layer, with a parameter of its own beside it or without."""

    def __init__(self, draw: random.Random) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, bias=draw.random() < 0.5)
        self.scale = nn.Parameter(torch.randn(draw.choice([1, WIDTH]))) if draw.random() < 0.5 else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(self.linear(x))
        return y if self.scale is None else y * self.scale


class Tree(nn.Module):
    """Modules that are called in the order of `path`, each in a checkpoint or not."""

    def __init__(self, draw: random.Random, depth: int) -> None:
        super().__init__()
        self.parts = nn.ModuleList(
            Tree(draw, depth - 1) if depth and draw.random() < 0.6 else Leaf(draw) for _ in range(draw.randint(1, 3))
        )
        self.norm = nn.LayerNorm(WIDTH)
        self.checkpointing = draw.choice(["", "", "reentrant", "non-reentrant"])
        self.path: list[int] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for index in self.path:
            part = self.parts[index]
            if self.checkpointing:
                x = x + checkpoint(part, x, use_reentrant=self.checkpointing == "reentrant")
            else:
                x = x + part(x)
        return self.norm(x)


def make(draw: random.Random) -> Tree:
    """Return a random tree, some of whose parameters are tied, and some frozen."""
    model = Tree(draw, 2).double()
    layers = [module for module in model.modules() if isinstance(module, nn.Linear)]
    if len(layers) > 1 and draw.random() < 0.5:
        first, second = draw.sample(layers, 2)
        second.weight = first.weight
    for parameter in model.parameters():
        parameter.requires_grad_(draw.random() < 0.8)
    model.norm.weight.requires_grad_()
    return model


def shard(model: Tree, draw: random.Random) -> bool | None:
    """Make units of random modules of the tree, the inner ones first, and of the tree."""
    reshard = draw.choice([None, None, True, False])
    for module in reversed([each for each in model.modules() if isinstance(each, Tree | Leaf) and each is not model]):
        if draw.random() < 0.5:
            sw.fully_shard(module, reshard_after_forward=reshard)
    sw.fully_shard(model, reshard_after_forward=reshard)
    return reshard


def choose_paths(models: list[Tree], draw: random.Random) -> None:
    for same in zip(*(model.modules() for model in models), strict=True):
        if isinstance(same[0], Tree):
            count = len(same[0].parts)
            path = draw.choice([[*range(count)], [draw.randrange(count) for _ in range(draw.randint(1, 3))]])
            for module in same:
                module.path = path


def compare(seed: int) -> None:
    draw = random.Random(seed)
    torch.manual_seed(seed)
    plain = make(draw)
    model = copy.deepcopy(plain)
    reshard = shard(model, draw)
    micro_batches, defers, world = draw.choice([1, 1, 2]), draw.random() < 0.5, comm.world().size
    for step in range(3):
        for number in range(micro_batches):
            choose_paths([plain, model], draw)
            inputs = [torch.randn(2, WIDTH, dtype=torch.float64, requires_grad=True) for _ in range(world)]
            model.set_requires_gradient_sync(not defers or number == micro_batches - 1)
            model(inputs[comm.rank()]).square().sum().backward()
            for each in inputs:
                (plain(each).square().sum() / world).backward()
        for (name, mine), other in zip(model.named_parameters(), plain.parameters(), strict=True):
            assert (mine.grad is None) == (other.grad is None), (seed, step, name)
            if other.grad is not None:
                torch.testing.assert_close(mine.grad.full_tensor(), other.grad, rtol=1e-9, atol=1e-9)
                with torch.no_grad():
                    mine -= 0.01 * mine.grad
                    other -= 0.01 * other.grad
        model.zero_grad()
        plain.zero_grad()
        gathered = model.__dict__["_shardwright_fsdp"].unit.schedule.gathered
        assert reshard is False or not gathered, (seed, step)


@pytest.mark.parametrize("size", [1, 2, 4] if FULL else [2])
def test_random_trees_of_units_have_the_gradients_of_plain_torch(size):
    def body() -> None:
        warnings.simplefilter("ignore")  # of reentrant checkpoints whose inputs need no gradient
        for seed in range(60 if FULL else 3):
            compare(1000 * size + seed)

    run_ranks(size, body, timeout=600)
