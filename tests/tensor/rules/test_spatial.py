"""Convolution, pooling and resizing of spatially sharded images: ranks receive exactly the rows they lack."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812  # torch's own short name
from torch import Tensor

import shardwright as sw
from shardwright import comm
from shardwright.errors import CommunicationError
from shardwright.layout import Partial, Placement, Ragged, Replicate, Shard
from shardwright.testing import on_ranks


def real(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(shape, dtype=torch.float64, generator=generator).requires_grad_()


def same(x: Any, w: Any) -> Any:
    with warnings.catch_warnings(action="ignore"):  # torch warns that it pads more behind than in front
        return F.conv2d(x, w, padding="same", dilation=(2, 1))


CONVOLVED = [
    ("conv1d", lambda x, w, b: F.conv1d(x, w, b, padding=1), [real(2, 2, 7), real(4, 2, 3), real(4)]),
    ("conv2d", lambda x, w: F.conv2d(x, w, stride=2, padding=(1, 2)), [real(1, 2, 7, 4), real(2, 2, 3, 3)]),
    ("conv2d, same", same, [real(2, 6, 4), real(1, 2, 2, 4)]),
    ("conv2d by groups", lambda x, w: F.conv2d(x, w, groups=4), [real(1, 4, 5, 4), real(4, 1, 2, 3)]),
    ("conv2d of padding", lambda x, w: F.conv2d(x, w, padding=4), [real(1, 1, 4, 2), real(1, 1, 3, 3)]),
    ("conv3d", lambda x, w: F.conv3d(x, w, stride=(1, 2, 1)), [real(1, 1, 4, 5, 3), real(2, 1, 2, 2, 1)]),
    ("conv_transpose1d", lambda x, w, b: F.conv_transpose1d(x, w, b, 3), [real(2, 2, 4), real(2, 2, 2), real(2)]),
    (
        "conv_transpose2d",
        lambda x, w: F.conv_transpose2d(x, w, None, 2, 1, 1, 2),
        [real(1, 4, 3, 5), real(4, 1, 3, 3)],
    ),
    ("conv_transpose3d", lambda x, w: F.conv_transpose3d(x, w), [real(1, 1, 2, 4, 2), real(1, 1, 2, 2, 1)]),
]
POOLED = [
    ("avg_pool1d", lambda x: F.avg_pool1d(x, 3, 2, 1, ceil_mode=True, count_include_pad=False), [real(2, 2, 8)]),
    ("avg_pool2d", lambda x: F.avg_pool2d(x, (3, 2), (2, 1), (1, 0), True, True, 5), [real(1, 2, 7, 5)]),
    ("avg_pool3d", lambda x: F.avg_pool3d(x, (3, 1, 4), 2, (1, 0, 2), ceil_mode=True), [real(1, 1, 5, 3, 5)]),
    ("max_pool1d", lambda x: F.max_pool1d(x, 3, 2, 1, return_indices=True), [real(2, 9)]),
    ("max_pool2d", lambda x: F.max_pool2d(x, 4, 3, 2, ceil_mode=True, return_indices=True), [real(1, 2, 8, 7)]),
    ("max_pool2d, dilated", lambda x: F.max_pool2d(x, 2, 1, 0, 2), [real(2, 5, 6)]),
    ("max_pool3d", lambda x: F.max_pool3d(x, 2, 1, return_indices=True), [real(1, 1, 4, 3, 5)]),
    ("lp_pool2d", lambda x: F.lp_pool2d(x.abs() + 0.1, 2.0, 2), [real(1, 2, 6, 4)]),
    ("adaptive_avg_pool2d", lambda x: F.adaptive_avg_pool2d(x, (3, 1)), [real(2, 2, 6, 5)]),
    ("adaptive_avg_pool1d", lambda x: F.adaptive_avg_pool1d(x, 3), [real(2, 2, 7)]),
    ("adaptive_max_pool2d", lambda x: F.adaptive_max_pool2d(x, (3, 2), return_indices=True), [real(2, 6, 4)]),
    ("adaptive_max_pool3d", lambda x: F.adaptive_max_pool3d(x, 2), [real(1, 1, 4, 3, 5)]),
    ("unpooled", lambda x: F.max_unpool2d(*F.max_pool2d(x, 2, return_indices=True), 2), [real(1, 2, 4, 6)]),
]
RESIZED = [
    ("nearest", lambda x: F.interpolate(x, scale_factor=3), [real(1, 2, 5)]),
    ("nearest-exact", lambda x: F.interpolate(x, size=(10, 4), mode="nearest-exact"), [real(1, 1, 5, 4)]),
    ("bilinear", lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"), [real(1, 2, 5, 4)]),
    ("bilinear, uneven", lambda x: F.interpolate(x, size=(7, 8), mode="bilinear"), [real(1, 2, 5, 4)]),
    (
        "bilinear, aligned",
        lambda x: F.interpolate(x, size=(10, 8), mode="bilinear", align_corners=True),
        [real(1, 2, 5, 4)],
    ),
    ("bicubic", lambda x: F.interpolate(x, scale_factor=(2, 3), mode="bicubic"), [real(1, 1, 6, 3)]),
    ("trilinear", lambda x: F.interpolate(x, scale_factor=2, mode="trilinear"), [real(1, 1, 2, 4, 3)]),
    ("area", lambda x: F.interpolate(x, scale_factor=0.5, mode="area"), [real(1, 1, 6, 4)]),
    ("grid_sample", lambda x, g: F.grid_sample(x, g.tanh(), align_corners=False), [real(2, 1, 3, 3), real(2, 4, 2, 2)]),
    ("affine_grid", lambda t: F.affine_grid(t, (4, 1, 3, 2), align_corners=False), [real(4, 2, 3)]),
    ("pixel_shuffle", lambda x: F.pixel_shuffle(x, 2), [real(2, 8, 3, 2)]),
    ("pixel_unshuffle", lambda x: F.pixel_unshuffle(x, 2), [real(2, 6, 4)]),
    ("channel_shuffle", lambda x: F.channel_shuffle(x, 2), [real(2, 4, 3)]),
    ("local_response_norm", lambda x: F.local_response_norm(x, 3), [real(2, 4, 3, 2)]),
    ("unfold", lambda x: F.unfold(x, 2, padding=1), [real(2, 4, 4, 3)]),
    ("fold", lambda x: F.fold(x, (3, 3), 2), [real(2, 8, 4)]),
    ("pad by reflection", lambda x: F.pad(x, (1, 1, 0, 2), mode="reflect"), [real(1, 2, 7, 4)]),
    ("pad by repetition", lambda x: F.pad(x, (2, 1), mode="replicate"), [real(2, 4, 5)]),
]


@pytest.mark.parametrize("cases", [CONVOLVED, POOLED, RESIZED], ids=["convolved", "pooled", "resized"])
def test_spatially_sharded_operators_match_torch(against_torch: Callable[..., None], cases: Any) -> None:
    against_torch((3,), cases, max_combinations=24)
    against_torch((2, 2), cases, max_combinations=8)


def cpu_mesh(*shape: int) -> Any:
    return sw.init_device_mesh("cpu", shape)


def distribute(whole: Tensor, mesh: Any, *placements: Placement) -> Any:
    return sw.distribute_tensor(whole.detach(), mesh, placements).requires_grad_(whole.requires_grad)


@on_ranks(4, timeout=60)
def test_exactly_the_missing_rows_are_exchanged_forward_and_backward() -> None:
    mesh, rank = cpu_mesh(4), comm.rank()
    image, kernel = real(1, 2, 12, 5), real(3, 2, 3, 3).detach()
    x, w = distribute(image, mesh, Shard(2)), distribute(kernel, mesh, Replicate())
    rows = 1 if rank in (0, 3) else 2
    with comm.count() as forth:
        y = F.conv2d(x, w, padding=1)
    assert forth.calls == {"exchange": 1}
    assert forth.bytes == rows * 2 * 5 * 8
    assert y.placements == (Shard(2),)
    loss = y.to_local().sum()
    with comm.count() as back:
        loss.backward()
    assert back.calls == {"exchange": 1}
    assert back.bytes == rows * 2 * 5 * 8
    (expected,) = torch.autograd.grad(F.conv2d(image, kernel, padding=1).sum(), image)
    torch.testing.assert_close(x.grad.full_tensor(), expected)


@on_ranks(4, timeout=60)
def test_windows_within_shards_need_no_communication() -> None:
    mesh = cpu_mesh(4)
    x, w = distribute(real(1, 2, 16, 4), mesh, Shard(2)), distribute(real(1, 2, 2, 3), mesh, Replicate())
    calls: list[Callable[[Any], Any]] = [
        lambda x: F.max_pool2d(x, 2),
        lambda x: F.avg_pool2d(x, 2),
        lambda x: F.conv2d(x, w, stride=2),
        lambda x: F.interpolate(x, scale_factor=2),
        lambda x: F.adaptive_avg_pool2d(x, 1),
        lambda x: F.adaptive_avg_pool2d(x, (8, 2)),
        lambda x: F.pixel_unshuffle(x, 2),
        lambda x: F.pad(x, (0, 0, 1, 2), mode="replicate"),
    ]
    for number, call in enumerate(calls):
        with comm.count() as traffic:
            call(x)
        assert traffic.bytes == 0, number


@on_ranks(4, timeout=60)
def test_halos_span_several_ranks_if_shards_are_small() -> None:
    image, kernel = real(1, 1, 6, 3), real(1, 1, 5, 1)
    expected = F.conv2d(image, kernel, padding=(2, 0))
    seed = real(*expected.shape, seed=3).detach()
    theirs = torch.autograd.grad((expected * seed).sum(), [image, kernel])
    mesh = cpu_mesh(4)
    for placement in (Shard(2), Ragged(2, (1, 0, 1, 4)), Ragged(2, (0, 6, 0, 0)), Ragged(2, (1, 1, 1, 3))):
        x, w = distribute(image, mesh, placement), distribute(kernel, mesh, Replicate())
        y = F.conv2d(x, w, padding=(2, 0))
        assert y.placements == (placement,)
        torch.testing.assert_close(y.full_tensor(), expected)
        ours = torch.autograd.grad((y * distribute(seed, mesh, Replicate())).sum(), [x, w])
        for mine, other in zip(ours, theirs, strict=True):
            torch.testing.assert_close(mine.full_tensor(), other)  # type: ignore[attr-defined]  # a DTensor


@on_ranks(4, timeout=60)
def test_halos_with_nested_shards_and_with_two_sharded_dimensions() -> None:
    mesh = cpu_mesh(2, 2)
    image, kernel = real(2, 2, 9, 8), real(3, 2, 3, 2)
    for stride in (1, 2):
        expected = F.conv2d(image, kernel, stride=stride, padding=1)
        pooled, indices = F.max_pool2d(image, 3, stride, 1, return_indices=True)
        for placements in (
            [Shard(2), Shard(2)], [Shard(2), Shard(3)], [Shard(3), Ragged(2, (2, 7))], [Shard(0), Shard(3)],
            [Shard(2), Partial()],
        ):  # fmt: skip
            cut = [Replicate() if placement.is_partial() else placement for placement in placements]
            x, w = distribute(image, mesh, *cut), distribute(kernel, mesh, Replicate(), Replicate())
            if cut != placements:
                x = sw.DTensor.from_local(x.to_local() / 2, mesh, placements, shape=image.shape)
            torch.testing.assert_close(F.conv2d(x, w, stride=stride, padding=1).full_tensor(), expected)
            ours, found = F.max_pool2d(x, 3, stride, 1, return_indices=True)
            torch.testing.assert_close(ours.full_tensor(), pooled)
            assert torch.equal(found.full_tensor(), indices)


@on_ranks(3, timeout=60)
def test_second_derivatives_pass_through_halos() -> None:
    def twice(x: Any, w: Any, seed: Any) -> Any:
        y = F.conv1d(F.avg_pool1d(x, 3, 1, 1).sin(), w, padding=2)
        first = torch.autograd.grad((y * y * seed).sum(), [x, w], create_graph=True)
        return torch.autograd.grad(sum((each * each).sum() for each in first), [x, w])

    signal, kernel, seed = real(2, 2, 8), real(1, 2, 4), real(2, 1, 9).detach()
    mesh = cpu_mesh(3)
    ours = twice(
        distribute(signal, mesh, Shard(2)), distribute(kernel, mesh, Shard(1)), distribute(seed, mesh, Replicate())
    )
    for mine, other in zip(ours, twice(signal, kernel, seed), strict=True):
        torch.testing.assert_close(mine.full_tensor(), other)


@on_ranks(2, timeout=60)
def test_halo_exchanges_are_traced_and_obey_the_policy() -> None:
    mesh = cpu_mesh(2)
    x, w = distribute(real(1, 1, 8), mesh, Shard(2)), distribute(real(1, 1, 3).detach(), mesh, Replicate())
    with sw.trace() as seen:
        F.conv1d(x, w)
    assert [(each.operation, each.received) for each in seen.redistributions] == [("conv1d", 8)]
    with sw.communication("explicit"):
        F.max_pool1d(x, 2)
        with pytest.raises(CommunicationError, match=r"conv1d needs .*S\(2\).* as .*S\(2: 5\+5\)"):
            F.conv1d(x, w)


@on_ranks(2, timeout=60)
def test_fractional_pooling_draws_the_same_numbers_in_every_layout() -> None:
    mesh, found = cpu_mesh(2), []
    for placement in (Replicate(), Shard(0), Shard(1), Shard(2)):
        sw.manual_seed(3)
        x = distribute(real(3, 2, 8, 8), mesh, placement)
        found.append([out.full_tensor() for out in F.fractional_max_pool2d(x, 2, 5, return_indices=True)])
        sw.manual_seed(3)
        torch.testing.assert_close(F.fractional_max_pool2d(x, 2, 5).full_tensor(), found[-1][0])
    for pooled, indices in found[1:]:
        assert torch.equal(pooled, found[0][0])
        assert torch.equal(indices, found[0][1])


def test_a_single_rank_exchanges_no_halo() -> None:
    mesh = cpu_mesh(1)
    image, kernel = real(1, 1, 5, 5), real(1, 1, 3, 3)
    with comm.count() as traffic:
        y = F.conv2d(distribute(image, mesh, Shard(2)), distribute(kernel, mesh, Replicate()), padding=1)
    assert not traffic.calls
    torch.testing.assert_close(y.full_tensor(), F.conv2d(image, kernel, padding=1))
