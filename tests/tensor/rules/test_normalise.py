"""Normalisation over the global batch matches torch in values and gradients for every placement."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812  # torch's own short name
from torch import Tensor, nn

import shardwright as sw
from shardwright import comm
from shardwright.testing import run_ranks


def r(*shape: int, grad: bool = True) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, dtype=torch.float64, generator=generator).requires_grad_(grad)


CASES: list[Any] = [
    ("layer_norm", lambda x: F.layer_norm(x, (5,)), [r(4, 5)]),
    (
        "layer_norm, weights by name",
        lambda x, w, b: F.layer_norm(x, (5,), weight=w, bias=b, eps=1e-3),
        [r(7, 5), r(5), r(5)],
    ),
    ("layer_norm, two dimensions", lambda x, w, b: torch.layer_norm(x, [5, 2], w, b), [r(3, 5, 2), r(5, 2), r(5, 2)]),
    ("rms_norm", lambda x, w: F.rms_norm(x, (5,), w), [r(2, 5), r(5)]),
    ("rms_norm, eps", lambda x: F.rms_norm(x, (5,), eps=0.1), [r(2, 5)]),
    ("group_norm", lambda x, w, b: F.group_norm(x, 3, w, b), [r(2, 6, 5), r(6), r(6)]),
    ("group_norm, one image", lambda x: F.group_norm(x, 2, eps=0.1), [r(1, 4, 3, 2)]),
    ("batch_norm", lambda x, w, b: F.batch_norm(x, None, None, w, b, training=True), [r(7, 2), r(2), r(2)]),
    ("batch_norm, images", lambda x, w, b: F.batch_norm(x, None, None, w, b, True), [r(5, 4, 3), r(4), r(4)]),
    (
        "batch_norm, evaluated",
        lambda x, m, v: F.batch_norm(x, m, v.square() + 1, training=False),
        [r(7, 2), r(2, grad=False), r(2, grad=False)],
    ),
    ("instance_norm", lambda x, w, b: F.instance_norm(x, weight=w, bias=b), [r(2, 4, 5), r(4), r(4)]),
    ("normalize", lambda x: F.normalize(x, dim=1), [r(4, 5)]),
    ("normalize, first norm", lambda x: F.normalize(x, p=1.0, dim=0), [r(4, 5)]),
    ("local_response_norm", lambda x: F.local_response_norm(x, 2), [r(2, 5, 4)]),
]


def test_values_and_gradients_match_torch_for_every_placement(against_torch: Any) -> None:
    against_torch((3,), CASES, max_combinations=15)
    against_torch((2, 2), CASES, max_combinations=4)


def test_running_statistics_are_those_of_the_global_batch() -> None:
    def on_a_rank() -> None:
        mesh = sw.init_device_mesh("cpu", (3,))
        for make in (lambda: nn.BatchNorm1d(4), lambda: nn.BatchNorm1d(4, momentum=None)):
            for image in ((7, 4), (5, 4, 2)):
                for placement in (sw.Replicate(), sw.Shard(0), sw.Shard(1)):
                    for buffers in (sw.Replicate(), sw.Shard(0)):
                        torch.manual_seed(0)
                        plain, ours = make().double(), make().double()
                        sw.distribute_module(
                            ours,
                            mesh,
                            lambda name, module, mesh, placement=buffers: module._buffers.update(
                                {
                                    key: sw.distribute_tensor(
                                        value, mesh, [placement if value.ndim else sw.Replicate()]
                                    )
                                    for key, value in module._buffers.items()
                                }
                            ),
                        )
                        for step in range(3):
                            x = torch.randn(image, dtype=torch.float64) + step
                            y = ours(sw.distribute_tensor(x, mesh, [placement]))
                            torch.testing.assert_close(y.full_tensor(), plain(x))
                        for name, buffer in plain.named_buffers():
                            mine = dict(ours.named_buffers())[name]
                            torch.testing.assert_close(mine.full_tensor(), buffer, msg=f"{name} {placement} {buffers}")
                        assert ours.running_mean.placements == (buffers,)
                        plain.eval(), ours.eval()
                        x = torch.randn(image, dtype=torch.float64)
                        y = ours(sw.distribute_tensor(x, mesh, [placement]))
                        torch.testing.assert_close(y.full_tensor(), plain(x))

    run_ranks(3, on_a_rank)


def test_instance_norm_tracks_running_statistics() -> None:
    def on_a_rank() -> None:
        mesh = sw.init_device_mesh("cpu", (3,))
        for placement in (sw.Replicate(), sw.Shard(0), sw.Shard(1), sw.Shard(2)):
            plain = nn.InstanceNorm1d(4, track_running_stats=True).double()
            ours = sw.distribute_module(nn.InstanceNorm1d(4, track_running_stats=True).double(), mesh)
            x = torch.randn(5, 4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
            torch.testing.assert_close(ours(sw.distribute_tensor(x, mesh, [placement])).full_tensor(), plain(x))
            for name, buffer in plain.named_buffers():
                torch.testing.assert_close(dict(ours.named_buffers())[name].full_tensor(), buffer)
            plain.eval(), ours.eval()
            torch.testing.assert_close(ours(sw.distribute_tensor(x, mesh, [placement])).full_tensor(), plain(x))

    run_ranks(3, on_a_rank)


def test_normalising_a_sharded_dimension_never_gathers_the_activation() -> None:
    def on_a_rank() -> int:
        mesh = sw.init_device_mesh("cpu", (2,))
        x = sw.distribute_tensor(torch.randn(4, 1000), mesh, [sw.Shard(1)])
        with comm.count() as traffic:
            y = F.layer_norm(x, (1000,))
        assert y.placements == (sw.Shard(1),)
        return traffic.bytes

    assert max(run_ranks(2, on_a_rank)) <= 2 * 4 * 4  # mean and variance of four rows
