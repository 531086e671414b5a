"""Where torch takes a number, a 0-dimensional DTensor is read as its global value, or raises if it requires grad."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812  # torch's own short name
from torch import Tensor

import shardwright as sw
from shardwright.errors import TensorError
from shardwright.testing import on_ranks

VALUES = torch.arange(12.0).reshape(4, 3) - 5

# x is a matrix; s is 0.75 and n is 2, each a partial sum.
CALLS: list[Callable[[Any, Any, Any], Any]] = [
    lambda x, s, n: F.leaky_relu(x, s),
    lambda x, s, n: F.leaky_relu(x, negative_slope=s),
    lambda x, s, n: F.leaky_relu(x, s, inplace=True),
    lambda x, s, n: F.threshold(x, s, s),
    lambda x, s, n: F.elu(x, alpha=s),
    lambda x, s, n: F.hardtanh(x, -s, s),
    lambda x, s, n: F.softplus(x, beta=s, threshold=s),
    lambda x, s, n: F.softshrink(x, s),
    lambda x, s, n: F.dropout(x, p=s * 0),
    lambda x, s, n: F.layer_norm(x, (3,), eps=s),
    lambda x, s, n: F.normalize(x, p=n, dim=1, eps=s),
    lambda x, s, n: F.cosine_similarity(x, x, dim=1, eps=s),
    lambda x, s, n: F.smooth_l1_loss(x, x * 2, beta=s),
    lambda x, s, n: F.huber_loss(x, x * 2, delta=s),
    lambda x, s, n: F.pad(x, (n, 0), value=s),
    lambda x, s, n: F.one_hot((x[:, 0] * 0).long(), n),
    lambda x, s, n: F.max_pool1d(x[None], n),
    lambda x, s, n: F.scaled_dot_product_attention(x[None], x[None], x[None], scale=s),
    lambda x, s, n: torch.clamp(x, -1, s),
    lambda x, s, n: torch.clamp(x, max=s),
    lambda x, s, n: torch.add(x, x, alpha=s),
    lambda x, s, n: x.sub_(x, alpha=s),
    lambda x, s, n: torch.addcmul(x, x, x, value=s),
    lambda x, s, n: torch.isclose(x, x + 0.1, atol=s),
    lambda x, s, n: torch.nan_to_num(x / 0, nan=s, posinf=s, neginf=s),
    lambda x, s, n: torch.bincount((x[:, 0] * 0).long(), minlength=n),
    lambda x, s, n: torch.histc(x, bins=n, min=-s, max=s),
    lambda x, s, n: torch.quantile(x, 0.5, dim=n - 1),
    lambda x, s, n: torch.full_like(x, s),
    lambda x, s, n: torch.arange(n),
    lambda x, s, n: x.renorm(2, 0, s),
    lambda x, s, n: x.norm(s + 1),
    lambda x, s, n: x.std(dim=0, correction=n),
    lambda x, s, n: x.round(decimals=n),
    lambda x, s, n: x.masked_fill(x > 0, s),
    lambda x, s, n: x.masked_fill(x > 0, value=s),
    lambda x, s, n: x.view(n, 6),
    lambda x, s, n: x.view([n, 6]),
    lambda x, s, n: x.reshape(n, -1),
    lambda x, s, n: x[:, :1].expand(4, n),
    lambda x, s, n: x.repeat(n, 1),
    lambda x, s, n: x.new_zeros(n, 2),
    lambda x, s, n: x.narrow(0, n, 1),
    lambda x, s, n: x[:n],
    lambda x, s, n: x[n],
    lambda x, s, n: x.roll(n, 0),
    lambda x, s, n: x.topk(n, 0),
    lambda x, s, n: x.kthvalue(n, 1),
    lambda x, s, n: x.unsqueeze(0).sum(n),
    lambda x, s, n: x.cumsum(n - 1),
    lambda x, s, n: x.chunk(n),
    lambda x, s, n: x.split(n),
    lambda x, s, n: x.unfold(0, n, 1),
    lambda x, s, n: x.tril(n - 1),
    lambda x, s, n: x.diagonal(n - 1),
    lambda x, s, n: torch.ones(4).view(n, 2),  # of plain tensors, where torch lets us know
    lambda x, s, n: torch.ones(4).new_zeros(n),
    lambda x, s, n: torch.ones(4).repeat(n),
]


def whole(value: Any) -> list[Tensor]:
    if isinstance(value, sw.DTensor):
        return [value.full_tensor()]
    return [value] if isinstance(value, Tensor) else [tensor for item in value for tensor in whole(item)]


@on_ranks(2)
def test_partial_scalar_is_reduced_where_torch_takes_a_number() -> None:
    mesh = sw.init_device_mesh("cpu", (2,))
    for place, call in enumerate(CALLS):
        x, halves, ones = (
            sw.distribute_tensor(value.clone(), mesh, [sw.Shard(0)], src_data_rank=None)
            for value in (VALUES, torch.tensor([0.5, 0.25]), torch.tensor([1, 1]))
        )
        found = whole(call(x, halves.sum(), ones.sum()))
        expected = whole(call(VALUES.clone(), torch.tensor(0.75), torch.tensor(2)))
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, msg=lambda text, place=place: f"call {place}: {text}")


@on_ranks(2)
def test_scalar_that_requires_grad_raises_where_torch_takes_a_number() -> None:
    mesh = sw.init_device_mesh("cpu", (2,))
    x = sw.distribute_tensor(VALUES, mesh, [sw.Shard(0)], src_data_rank=None)
    s = sw.ones(2, mesh=mesh, placements=[sw.Shard(0)]).requires_grad_().sum()
    for call in (
        lambda: F.leaky_relu(x, s),
        lambda: F.elu(x, alpha=s),
        lambda: F.layer_norm(x, (3,), eps=s),
    ):
        with pytest.raises(TensorError, match="takes a number"):
            call()


@on_ranks(2)
def test_scalar_that_torch_takes_as_a_tensor_keeps_its_gradient() -> None:
    mesh = sw.init_device_mesh("cpu", (2,))
    x = sw.distribute_tensor(VALUES, mesh, [sw.Shard(0)], src_data_rank=None)
    s = sw.ones(mesh=mesh).requires_grad_()
    for call in (
        lambda x, s: x.masked_fill(x > 0, value=s),
        lambda x, s: x.clamp(max=s),
        lambda x, s: torch.where(x > 0, x, s),
        lambda x, s: torch.lerp(x, x * 2, weight=s),
    ):
        plain = torch.tensor(1.0, requires_grad=True)
        call(VALUES, plain).sum().backward()
        call(x, s).sum().backward()
        torch.testing.assert_close(s.grad.full_tensor(), plain.grad)
        s.grad = None
