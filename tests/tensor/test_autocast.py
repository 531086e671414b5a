"""Under autocast, operators give torch's dtypes and values, composite or not, also with empty shards."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812  # everybody's name for it

import shardwright as sw
from shardwright.testing import on_ranks


def value(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def wide(*shape: int) -> Tensor:
    return value(*shape, dtype=torch.float32)


X, CLASSES, SQUARES = value(8, 6), torch.arange(8) % 6, wide(4, 6, 6) + 4 * torch.eye(6)
Case = tuple[str, Callable[..., Any], list[Tensor]]
CASES: list[Case] = [
    ("cross_entropy", F.cross_entropy, [X, CLASSES]),
    ("smoothed", lambda x, y: F.cross_entropy(x, y, reduction="none", label_smoothing=0.1), [X, CLASSES]),
    ("nll_loss", F.nll_loss, [X, CLASSES]),
    ("mse_loss", F.mse_loss, [X, 2 * X]),
    ("trace", torch.trace, [value(6, 6)]),
    ("cumprod", lambda x: torch.cumprod(x, 0), [X]),
    ("cumsum", lambda x: torch.cumsum(x, 0), [X]),
    ("prod", lambda x: torch.prod(x, 0), [X]),
    ("softmax", lambda x: torch.softmax(x, 0), [X]),
    ("logsumexp", lambda x: torch.logsumexp(x, 0), [X]),
    ("layer_norm", lambda x: F.layer_norm(x, (8, 6)), [X]),
    ("group_norm", lambda x: F.group_norm(x, 2), [value(4, 4, 6)]),
    ("batch_norm", lambda x: F.batch_norm(x, None, None, training=True), [X]),
    ("norm", torch.norm, [X]),
    ("std", lambda x: x.std(0), [X]),
    ("topk", lambda x: x.topk(2, 0)[0], [X]),
    ("quantile", lambda x: torch.quantile(x, 0.3), [wide(8, 6)]),
    ("linear and prelu", lambda x, w, slopes: F.prelu(F.linear(x, w), slopes), [wide(8, 6), wide(6, 6), wide(6)]),
    ("baddbmm", torch.baddbmm, [SQUARES.bfloat16(), SQUARES, SQUARES]),
    ("attention", F.scaled_dot_product_attention, [SQUARES.bfloat16(), SQUARES, SQUARES]),
    ("einsum", lambda a, b, c: torch.einsum("ij,jk,kl->il", a, b, c), [X, wide(6, 6), wide(6, 6)]),
    ("inv", torch.linalg.inv, [SQUARES.bfloat16()]),
    ("conv1d", F.conv1d, [wide(2, 3, 8), wide(4, 3, 3)]),
    ("cosine_similarity", F.cosine_similarity, [X, X + 1]),
    ("ctc_loss", lambda x, y: F.ctc_loss(x, y, (8,), (2,)), [value(8, 1, 6), torch.ones(1, 2, dtype=torch.long)]),
]


@pytest.mark.parametrize("dim", [None, 0, 1, -1])
@on_ranks(4)
def test_autocast_gives_the_dtypes_and_values_of_torch(dim: int | None) -> None:
    mesh = sw.init_device_mesh("cpu", (4,))
    wrong = []
    for name, call, tensors in CASES:
        with torch.autocast("cpu", torch.bfloat16):
            expected = call(*tensors)
            cuts = [None if dim is None or tensor.ndim <= max(dim, 0) else dim % tensor.ndim for tensor in tensors]
            spread = [
                sw.distribute_tensor(tensor, mesh, [sw.Replicate() if cut is None else sw.Shard(cut)])
                for tensor, cut in zip(tensors, cuts, strict=True)
            ]
            for _ in range(2):  # by the plan that is made, and by the one that is known
                result = call(*spread)
                assert result.to_local().dtype == expected.dtype, name  # also where the shard is empty
                if not torch.allclose(result.full_tensor().float(), expected.float(), rtol=3e-2, atol=3e-2):
                    wrong.append(name)
    assert not wrong


@on_ranks(2)
def test_plans_made_without_autocast_are_not_reused_under_autocast() -> None:
    mesh = sw.init_device_mesh("cpu", (2,))
    x, y = sw.distribute_tensor(X, mesh, [sw.Shard(0)]), sw.distribute_tensor(CLASSES, mesh, [sw.Shard(0)])
    assert F.cross_entropy(x, y).dtype == torch.bfloat16
    with torch.autocast("cpu", torch.bfloat16):
        assert F.cross_entropy(x, y).dtype == torch.float32
    assert F.cross_entropy(x, y).dtype == torch.bfloat16
