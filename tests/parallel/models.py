"""A small transformer-like model, its batches, and its training on one rank: the reference of the tests here."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

VOCABULARY = 11


class Block(nn.Module):
    """A residual block: the unit of the tests. Its sizes divide by no number of ranks."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width + 1)
        self.down = nn.Linear(2 * width + 1, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Model(nn.Module):
    """An embedding, blocks and a head; `checkpointing` recomputes blocks in backward."""

    def __init__(self, layers: int = 3, width: int = 6, tied: bool = False, checkpointing: str = "") -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.checkpointing = checkpointing
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = (
                checkpoint(block, x, use_reentrant=self.checkpointing == "reentrant")
                if self.checkpointing
                else block(x)
            )
        return self.head(self.norm(x))


def make(**options: Any) -> Model:
    """Return the model with the same values in every process."""
    torch.manual_seed(0)
    return Model(**options).double()


def batch(rank: int, step: int) -> Tensor:
    """Return the tokens of one rank in one step."""
    return torch.randint(0, VOCABULARY, (3, 4), generator=torch.Generator().manual_seed(100 * step + rank))


def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())


def train_on_one_rank(model: nn.Module, world: int, steps: int = 2) -> list[tuple[float, float, dict[str, Tensor]]]:
    """Return loss, gradient norm and gradients of every step, on the batches of all ranks."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    results = []
    for step in range(steps):
        loss = loss_of(model, torch.cat([batch(rank, step) for rank in range(world)]))
        loss.backward()
        gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        results.append((loss.item(), norm.item(), gradients))
    return results
