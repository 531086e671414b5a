"""Attention matches torch in values and gradients: batch, heads and queries sharded, with causal masks."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812  # torch's own short name
from torch import Tensor, nn

import shardwright as sw
from shardwright import comm
from shardwright.testing import run_ranks

attention = F.scaled_dot_product_attention


FULL = os.environ.get("SHARDWRIGHT_BUDGET") == "full"


def r(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(shape, dtype=torch.float64, generator=generator).requires_grad_()


def b(*shape: int) -> Tensor:
    return r(*shape).detach() > -0.5


Q, K, V = r(2, 4, 5, 3), r(2, 4, 7, 3, seed=1), r(2, 4, 7, 2, seed=2)
CASES: list[Any] = [
    ("plain", lambda q, k, v: attention(q, k, v), [Q, K, V]),
    ("named in another order", lambda q, k, v: attention(value=v, is_causal=True, query=q, key=k), [Q, K, V]),
    ("two dimensions", lambda q, k, v: attention(q, k, v, scale=0.3), [r(5, 3), r(7, 3), r(7, 2)]),
    ("three dimensions", lambda q, k, v: attention(q, k, v), [r(4, 5, 3), r(4, 7, 3), r(4, 7, 2)]),
    ("causal", lambda q, k, v: attention(q, k, v, is_causal=True), [Q, K, V]),
    (
        "causal, square",
        lambda q, k, v: attention(q, k, v, is_causal=True),
        [r(1, 2, 7, 3), r(1, 2, 7, 3), r(1, 2, 7, 3)],
    ),
    ("yes-no mask", lambda q, k, v, m: attention(q, k, v, m), [Q, K, V, b(5, 7)]),
    ("yes-no mask of each head", lambda q, k, v, m: attention(q, k, v, attn_mask=m), [Q, K, V, b(1, 4, 5, 7)]),
    ("mask to learn", lambda q, k, v, m: attention(q, k, v, m), [Q, K, V, r(5, 7)]),
    ("mask to learn of each head", lambda q, k, v, m: attention(q, k, v, m), [Q, K, V, r(2, 4, 1, 7)]),
    (
        "grouped queries",
        lambda q, k, v: attention(q, k, v, enable_gqa=True),
        [r(2, 6, 5, 3), r(2, 3, 4, 3), r(2, 3, 4, 3)],
    ),
    (
        "grouped queries, causal",
        lambda q, k, v: attention(q, k, v, is_causal=True, enable_gqa=True),
        [r(2, 4, 5, 3), r(2, 2, 5, 3), r(2, 2, 5, 3)],
    ),
]


def test_values_and_gradients_match_torch_for_every_placement(against_torch: Any) -> None:
    against_torch((3,), CASES, max_combinations=14 if FULL else 8)
    against_torch((2, 2), CASES, max_combinations=4)


def test_attention_sharded_by_heads_needs_no_communication() -> None:
    def on_a_rank() -> None:
        mesh = sw.init_device_mesh("cpu", (2,))
        for kv_heads, options in ((4, {}), (2, {"enable_gqa": True}), (4, {"is_causal": True})):
            q = sw.randn(2, 4, 5, 8, mesh=mesh, placements=[sw.Shard(1)], requires_grad=True)
            k, v = (sw.randn(2, kv_heads, 5, 8, mesh=mesh, placements=[sw.Shard(1)], requires_grad=True) for _ in "kv")
            with comm.count() as traffic:
                out = attention(q, k, v, **options)
                assert out.placements == (sw.Shard(1),)
                out.backward(torch.ones_like(out))
            assert traffic.bytes == 0

    run_ranks(2, on_a_rank)


def test_attention_dropout_is_the_same_in_every_layout() -> None:
    def on_a_rank() -> None:
        mesh = sw.init_device_mesh("cpu", (4,))
        mask = torch.randn(5, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(5)) > -1
        mask[2] = False  # a fully masked query
        for options in ({}, {"is_causal": True}, {"enable_gqa": True}, {"attn_mask": mask}):
            heads = 2 if "enable_gqa" in options else 4
            expected: list[Tensor] | None = None
            for placement in (sw.Replicate(), sw.Shard(0), sw.Shard(1), sw.Shard(2), sw.Shard(3)):
                sw.manual_seed(3)
                given = {k: sw.distribute_tensor(v, mesh) if isinstance(v, Tensor) else v for k, v in options.items()}
                qkv = [
                    sw.distribute_tensor(
                        x.detach()[:, :heads] if x is not Q else x.detach(), mesh, [placement]
                    ).requires_grad_()
                    for x in (Q, K, V)
                ]
                out = attention(*qkv, dropout_p=0.4, **given)
                out.backward(torch.ones_like(out))
                found = [out.full_tensor().detach(), *(x.grad.full_tensor() for x in qkv)]  # type: ignore[union-attr]  # it has one
                expected = expected or found
                for mine, first in zip(found, expected, strict=True):
                    assert not mine.isnan().any()
                    torch.testing.assert_close(mine, first, msg=lambda m, p=placement, o=options: f"{p} {list(o)}: {m}")

    run_ranks(4, on_a_rank)


@pytest.mark.filterwarnings("ignore:.*nested_tensor")
def test_torch_attention_modules_run_on_shards() -> None:
    def on_a_rank() -> None:
        mesh = sw.init_device_mesh("cpu", (2,))
        x = torch.randn(3, 5, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        for train in (True, False):
            for parameters in (sw.Replicate(), sw.Shard(0)):
                for placement in (sw.Replicate(), sw.Shard(0), sw.Shard(1)):
                    torch.manual_seed(0)
                    plain = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True, dtype=torch.float64)
                    ours = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True, dtype=torch.float64)
                    ours.load_state_dict(plain.state_dict())
                    plain.train(train), ours.train(train)

                    def spread(name: str, module: nn.Module, mesh: Any, placement: Any = parameters) -> None:
                        for key, value in module.named_parameters(recurse=False):
                            module.register_parameter(
                                key, nn.Parameter(sw.distribute_tensor(value.data, mesh, [placement]))
                            )

                    sw.distribute_module(ours, mesh, spread)
                    with torch.set_grad_enabled(train):
                        expected = plain(x)
                        found = ours(sw.distribute_tensor(x, mesh, [placement]))
                    torch.testing.assert_close(found.full_tensor(), expected)
                    if train:
                        expected.square().sum().backward()
                        found.square().sum().backward()
                        for (name, p), q in zip(plain.named_parameters(), ours.parameters(), strict=True):
                            torch.testing.assert_close(q.grad.full_tensor(), p.grad, msg=lambda m, n=name: f"{n}: {m}")

    run_ranks(2, on_a_rank)


def test_multihead_attention_returns_its_weights() -> None:
    def on_a_rank() -> None:
        mesh = sw.init_device_mesh("cpu", (2,))
        torch.manual_seed(0)
        plain = nn.MultiheadAttention(8, 2, batch_first=True, dtype=torch.float64)
        ours = nn.MultiheadAttention(8, 2, batch_first=True, dtype=torch.float64)
        ours.load_state_dict(plain.state_dict())
        sw.distribute_module(ours, mesh)
        x, y = torch.randn(3, 5, 8, dtype=torch.float64), torch.randn(3, 4, 8, dtype=torch.float64)
        for train in (True, False):
            plain.train(train), ours.train(train)
            for placement in (sw.Replicate(), sw.Shard(0), sw.Shard(2)):
                dx, dy = (sw.distribute_tensor(t, mesh, [placement]) for t in (x, y))
                for mine, theirs in zip(ours(dx, dy, dy), plain(x, y, y), strict=True):
                    torch.testing.assert_close(mine.full_tensor(), theirs)

    run_ranks(2, on_a_rank)
