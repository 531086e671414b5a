"""A small decoder-only transformer in plain PyTorch: nothing in it knows of shards. Examples and tests lay it out."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812  # its usual name
from torch import Tensor, nn


class Attention(nn.Module):
    """Causal self-attention, written out."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.output = nn.Linear(width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        batch, length, width = x.shape

        def split(y: Tensor) -> Tensor:
            return y.view(batch, length, self.heads, width // self.heads).transpose(1, 2)

        query, key, value = split(self.query(x)), split(self.key(x)), split(self.value(x))
        scores = query @ key.transpose(-2, -1) / (width // self.heads) ** 0.5
        weights = self.dropout(torch.softmax(scores + mask, -1))
        return self.output((weights @ value).transpose(1, 2).reshape(batch, length, width))


class Block(nn.Module):
    """Attention and a feed-forward network, each after a normalisation and around a residual."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, heads, dropout)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.norm1(x), mask))
        return x + self.dropout(self.down(F.gelu(self.up(self.norm2(x)))))


class Transformer(nn.Module):
    """Tokens in, the loss of predicting the next token out."""

    def __init__(
        self,
        vocabulary: int = 96,
        width: int = 64,
        heads: int = 4,
        layers: int = 4,
        length: int = 32,
        dropout: float = 0.1,
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.position = nn.Parameter(torch.empty(length, width))
        self.blocks = nn.ModuleList(Block(width, heads, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.register_buffer("mask", torch.empty(length, length))

    def reset(self) -> None:
        """Initialises every parameter and buffer, wherever it lives."""
        self.mask.copy_(torch.full_like(self.mask, float("-inf")).triu(1))
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.08)
                if getattr(module, "bias", None) is not None:
                    nn.init.zeros_(module.bias)
            elif isinstance(module, nn.LayerNorm):
                nn.init.ones_(module.weight)
                nn.init.zeros_(module.bias)
        nn.init.normal_(self.position, std=0.08)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens[:, :-1]) + self.position
        for block in self.blocks:
            x = block(x, self.mask)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
