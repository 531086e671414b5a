"""Dropout: the same mask in every layout, scaled to keep the mean, and linear where possible."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812  # torch's own short name
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import shardwright as sw
from shardwright import comm
from shardwright.testing import run_ranks

KINDS: dict[str, Callable[[Any], Any]] = {
    "dropout": lambda x: F.dropout(x, 0.4),
    "dropout in place": lambda x: F.dropout(x.clone(), 0.4, True, True),
    "torch.dropout_": lambda x: torch.dropout_(x.clone(), 0.4, True),
    "everything dropped": lambda x: F.dropout(x, 1.0),
    "dropout1d": lambda x: F.dropout1d(x, 0.4),
    "feature_dropout": lambda x: torch.feature_dropout(x, p=0.4, train=True),
    "alpha_dropout": lambda x: F.alpha_dropout(x, 0.4, training=True),
    "feature_alpha_dropout": lambda x: F.feature_alpha_dropout(x, 0.4, training=True),
    "rrelu": lambda x: F.rrelu(x, training=True),
    "gumbel_softmax": lambda x: F.gumbel_softmax(x, dim=1),
}


def test_dropout_has_the_same_mask_and_gradient_in_every_layout() -> None:
    def on_a_rank() -> None:
        mesh = sw.init_device_mesh("cpu", (3,))
        whole = torch.randn(4, 5, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        for name, call in KINDS.items():
            expected: list[Tensor] = []
            for placement in (sw.Replicate(), sw.Shard(0), sw.Shard(1), sw.Shard(2), sw.Partial()):
                if placement.is_partial() and name == "gumbel_softmax":
                    continue  # it fills a tensor like its input, which would be partial: raises
                sw.manual_seed(1)
                x = sw.distribute_tensor(whole, mesh).redistribute(placements=[placement]).detach().requires_grad_()
                y = call(x)
                y.sum().backward()
                assert x.grad is not None
                found = [y.full_tensor().detach(), x.grad.full_tensor()]
                expected = expected or found
                for mine, first in zip(found, expected, strict=True):
                    torch.testing.assert_close(mine, first, msg=lambda m, n=name, p=placement: f"{n} {p}: {m}")

    run_ranks(3, on_a_rank)


def test_dropout_keeps_replicas_identical_and_partial_sums_partial() -> None:
    def on_a_rank() -> Tensor:
        mesh = sw.init_device_mesh("cpu", (2,))
        x = sw.ones(50, mesh=mesh, placements=[sw.Partial()])
        sw.manual_seed(0)
        with comm.count() as traffic:
            assert F.dropout(x).placements == (sw.Partial(),)
            replicate = F.dropout(sw.ones(50, mesh=mesh))
        assert traffic.bytes == 0
        return replicate.to_local()

    first, second = run_ranks(2, on_a_rank)
    assert torch.equal(first, second)


def test_dropout_keeps_and_scales_the_expected_share() -> None:
    mesh = sw.init_device_mesh("cpu", (1,))
    sw.manual_seed(0)
    kept = F.dropout(sw.ones(10_000, mesh=mesh), 0.3).to_local()
    assert kept.unique().tolist() == [0.0, pytest.approx(1 / 0.7)]
    assert kept.mean().item() == pytest.approx(1.0, abs=0.02)
    channels = F.dropout2d(sw.ones(40, 50, 3, 2, mesh=mesh), 0.3).to_local()
    assert (channels.flatten(2).amax(2) == channels.flatten(2).amin(2)).all()
    normal = F.alpha_dropout(sw.randn(100_000, mesh=mesh), 0.2, training=True).to_local()
    assert normal.mean().item() == pytest.approx(0.0, abs=0.02)
    assert normal.std().item() == pytest.approx(1.0, abs=0.02)


def test_dropout_in_eval_mode_is_the_identity() -> None:
    mesh = sw.init_device_mesh("cpu", (1,))
    x = sw.ones(4, mesh=mesh)
    sw.manual_seed(0)
    for same in (
        F.dropout(x, training=False),
        F.dropout(x, 0.0),
        F.alpha_dropout(x),
        torch.dropout(x, 0.5, train=False),
    ):
        assert same.tolist() == [1.0] * 4
    first = sw.rand(4, mesh=mesh)
    sw.manual_seed(0)
    assert sw.rand(4, mesh=mesh).tolist() == first.tolist()


@pytest.mark.parametrize("reentrant", [True, False])
def test_activation_checkpointing_recomputes_the_same_mask(reentrant: bool) -> None:
    def on_a_rank() -> None:
        mesh = sw.init_device_mesh("cpu", (2,))
        for placement in (sw.Replicate(), sw.Shard(0), sw.Shard(1)):

            def gradient(use: bool, placement: Any = placement) -> list[Tensor]:
                sw.manual_seed(5)
                x = sw.rand(5, 6, mesh=mesh, placements=[placement], dtype=torch.float64, requires_grad=True)
                w = sw.rand(6, 6, mesh=mesh, dtype=torch.float64, requires_grad=True)

                def block(value: Tensor) -> Tensor:
                    return F.dropout(torch.tanh(F.dropout(value @ w, 0.3)), 0.5)

                y = x
                for _ in range(3):
                    y = checkpoint(block, y, use_reentrant=reentrant) if use else block(y)
                y.square().sum().backward()
                assert x.grad is not None
                assert w.grad is not None
                return [x.grad.full_tensor(), w.grad.full_tensor()]

            for mine, plain in zip(gradient(True), gradient(False), strict=True):
                torch.testing.assert_close(mine, plain)

    run_ranks(2, on_a_rank)
