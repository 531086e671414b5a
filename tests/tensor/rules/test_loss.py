"""Losses match torch in values and gradients: means over the global count, logits sharded by class never gathered."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812  # torch's own short name
from torch import Tensor

import shardwright as sw
from shardwright import comm
from shardwright.testing import run_ranks


def r(*shape: int, seed: int = 0, grad: bool = True) -> Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(shape, dtype=torch.float64, generator=generator).requires_grad_(grad)


def p(*shape: int, seed: int = 0, grad: bool = True) -> Tensor:
    return r(*shape, seed=seed).detach().sigmoid().requires_grad_(grad)


def classes(*shape: int, high: int, ignored: int = -100) -> Tensor:
    found = torch.randint(0, high, shape, generator=torch.Generator().manual_seed(sum(shape)))
    return torch.where(found == 1, ignored, found)


def with_targets() -> list[Any]:
    cases: list[Any] = []
    for reduction in ("mean", "sum", "none"):
        for smoothing in (0.0, 0.3):
            options = {"reduction": reduction, "label_smoothing": smoothing}
            for shape, target in (((5, 7), (5,)), ((2, 3, 4), (2, 4)), ((6,), ())):
                several = classes(*target, high=shape[0 if len(shape) == 1 else 1])
                cases += [
                    (f"{options} {shape}", lambda x, t, o=options: F.cross_entropy(x, t, **o), [r(*shape), several]),
                    (
                        f"{options} {shape} weighted",
                        lambda x, t, w, o=options: F.cross_entropy(x, t, w, **o),
                        [r(*shape), several, p(shape[0 if len(shape) == 1 else 1], grad=False)],
                    ),
                ]
            cases += [
                (f"{options} probabilities", lambda x, t, o=options: F.cross_entropy(x, t, **o), [r(5, 7), p(5, 7)]),
                (
                    f"{options} ignored among the classes",
                    lambda x, t, o=options: F.cross_entropy(x, t, ignore_index=2, **o),
                    [r(5, 7), classes(5, high=7, ignored=2)],
                ),
            ]
        cases += [
            (f"nll_loss {reduction}", lambda x, t, w, o=reduction: F.nll_loss(x, t, w, reduction=o),
             [r(5, 3), classes(5, high=3), p(3, grad=False)]),
            (f"nll_loss {reduction}, 2-d", lambda x, t, o=reduction: F.nll_loss(x, t, reduction=o),
             [r(2, 3, 5, 2), classes(2, 5, 2, high=3)]),
        ]  # fmt: skip
    return cases


def elementwise() -> list[Any]:
    cases: list[Any] = []
    for reduction in ("mean", "sum", "none"):
        o: dict[str, Any] = {"reduction": reduction}
        signs = r(5, 2, seed=4).detach().sign().long()
        cases += [
            ("mse_loss", lambda x, y, o=o: F.mse_loss(x, y, **o), [r(5, 2), r(5, 2, seed=1)]),
            (
                "mse_loss, weighted",
                lambda x, y, w, o=o: F.mse_loss(x, y, weight=w, **o),
                [r(5, 2), r(5, 2, seed=1), p(5, 2)],
            ),
            ("l1_loss", lambda x, y, o=o: F.l1_loss(x, y, **o), [r(5, 2), r(5, 2, seed=1)]),
            ("smooth_l1", lambda x, y, o=o: F.smooth_l1_loss(x, y, beta=0.5, **o), [r(5, 2), r(5, 2, seed=1)]),
            ("huber", lambda x, y, o=o: F.huber_loss(x, y, delta=0.5, **o), [r(5, 2), r(5, 2, seed=1)]),
            ("kl_div", lambda x, y, o=o: F.kl_div(x.log(), y, **o), [p(5, 2), p(5, 2, seed=1)]),
            (
                "bce",
                lambda x, y, w, o=o: F.binary_cross_entropy(x, y, w, **o),
                [p(5, 2), p(5, 2, seed=1), p(2, grad=False)],
            ),
            (
                "bce_with_logits",
                lambda x, y, w, o=o: F.binary_cross_entropy_with_logits(x, y, pos_weight=w, **o),
                [r(5, 2), p(5, 2, seed=1), p(2, grad=False)],
            ),
            ("soft_margin", lambda x, y, o=o: F.soft_margin_loss(x, y, **o), [r(5, 2), signs]),
            ("poisson", lambda x, y, o=o: F.poisson_nll_loss(x, y, full=True, **o), [r(5, 2), p(5, 2)]),
            (
                "gaussian",
                lambda x, y, v, o=o: F.gaussian_nll_loss(x, y, v.square(), **o),
                [r(5, 2), r(5, 2, seed=1), p(5, 2)],
            ),
            ("hinge", lambda x, y, o=o: F.hinge_embedding_loss(x, y, **o), [r(5, 2), signs]),
            ("ranking", lambda x, y, t, o=o: F.margin_ranking_loss(x, y, t, **o), [r(5, 2), r(5, 2, seed=1), signs]),
        ]
    return [
        *cases,
        ("kl_div batchmean", lambda x, y: F.kl_div(x.log(), y, reduction="batchmean"), [p(5, 2), p(5, 2, seed=1)]),
        ("cosine_similarity", lambda x, y: F.cosine_similarity(x, y), [r(5, 4), r(5, 4, seed=1)]),
        ("cosine_similarity, first", lambda x, y: F.cosine_similarity(x, y, dim=0), [r(5, 4), r(1, 4, seed=1)]),
        ("pairwise_distance", lambda x, y: F.pairwise_distance(x, y), [r(5, 4), r(5, 4, seed=1)]),
        (
            "cosine_embedding",
            lambda x, y, t: F.cosine_embedding_loss(x, y, t),
            [r(5, 4), r(5, 4, seed=1), torch.tensor([1, -1, 1, 1, -1])],
        ),
        ("triplet", lambda a, b, c: F.triplet_margin_loss(a, b, c), [r(5, 4), r(5, 4, seed=1), r(5, 4, seed=2)]),
    ]


@pytest.mark.filterwarnings("ignore:reduction. 'mean' divides")
def test_values_and_gradients_match_torch_for_every_placement(against_torch: Any) -> None:
    against_torch((3,), with_targets(), max_combinations=6)
    against_torch((3,), elementwise(), max_combinations=5)
    against_torch((2, 2), list(itertools.islice(with_targets(), 0, None, 7)), max_combinations=4)


def test_logits_sharded_by_class_are_never_gathered() -> None:
    def on_a_rank() -> None:
        mesh = sw.init_device_mesh("cpu", (2,))
        logits = sw.distribute_tensor(torch.randn(4, 10_000), mesh, [sw.Shard(1)]).requires_grad_()
        targets = sw.distribute_tensor(torch.tensor([1, 9_999, -100, 5_000]), mesh, [sw.Replicate()])
        with comm.count() as traffic:
            F.cross_entropy(logits, targets).backward()
        assert traffic.bytes <= 10 * 4 * 8, traffic
        assert logits.grad is not None
        assert logits.grad.placements == (sw.Shard(1),)

    run_ranks(2, on_a_rank)


def test_invalid_target_error_names_the_class() -> None:
    def on_a_rank() -> None:
        mesh = sw.init_device_mesh("cpu", (2,))
        logits = sw.distribute_tensor(torch.randn(2, 6), mesh, [sw.Shard(1)])
        targets = sw.distribute_tensor(torch.tensor([1, 6]), mesh, [sw.Replicate()])
        with pytest.raises(IndexError, match="target: index 6 is out of range for 6"):
            F.cross_entropy(logits, targets)

    run_ranks(2, on_a_rank)


def test_the_mean_over_only_ignored_targets_is_nan() -> None:
    def on_a_rank() -> None:
        mesh = sw.init_device_mesh("cpu", (2,))
        logits = sw.distribute_tensor(torch.randn(3, 4), mesh, [sw.Shard(0)])
        targets = sw.distribute_tensor(torch.full((3,), -100), mesh, [sw.Shard(0)])
        assert F.cross_entropy(logits, targets).isnan().item()

    run_ranks(2, on_a_rank)
