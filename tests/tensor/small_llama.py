"""A small decoder with grouped queries, rotary positions and gated feed-forward blocks, to count its communication."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

VOCABULARY, WIDTH, HEADS, GROUPS, INNER, LAYERS, LENGTH = 24, 16, 4, 2, 32, 2, 8


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        head = WIDTH // HEADS
        self.before_attention, self.before_feeding = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.q = nn.Linear(WIDTH, HEADS * head, bias=False)
        self.k = nn.Linear(WIDTH, GROUPS * head, bias=False)
        self.v = nn.Linear(WIDTH, GROUPS * head, bias=False)
        self.o = nn.Linear(HEADS * head, WIDTH, bias=False)
        self.gate = nn.Linear(WIDTH, INNER, bias=False)
        self.up = nn.Linear(WIDTH, INNER, bias=False)
        self.down = nn.Linear(INNER, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.before_attention(x)
        q, k, v = (linear(h).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for linear in (self.q, self.k, self.v))
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.o(attended.transpose(1, 2).flatten(2))
        h = self.before_feeding(x)
        return x + self.down(functional.silu(self.gate(h)) * self.up(h))


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = nn.RMSNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def loss_of(model: nn.Module, ids: Tensor) -> Tensor:
    """Return the mean loss of predicting each token from those before it."""
    return functional.cross_entropy(model(ids).flatten(0, 1), ids.roll(-1, 1).flatten())


def tokens(samples: int, seed: int = 0) -> Tensor:
    return torch.randint(0, VOCABULARY, (samples, LENGTH), generator=torch.Generator().manual_seed(seed))
