"""Samples of convolutions, pooling, interpolation and patches: channels and images that 3 ranks do not divide."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812  # torch's own short name
from torch import Tensor

Sample = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]
SAMPLES: dict[str, list[Sample]] = {}


def add(name: str, func: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    SAMPLES.setdefault(name, []).append((func, args, kwargs))


def r(*shape: int, seed: int = 0) -> Tensor:
    """Distinct values, so that the position of a maximum is unique."""
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(shape, dtype=torch.float64, generator=generator)


def requiring_grad(value: Tensor) -> Tensor:
    """A tensor that requires grad, for operators with inputs that cannot."""
    return value.requires_grad_()


aten = torch.ops.aten
SPACE = {1: (5,), 2: (5, 4), 3: (2, 3, 4)}

for n, space in SPACE.items():
    conv, transposed = getattr(F, f"conv{n}d"), getattr(F, f"conv_transpose{n}d")
    twos, ones = (2,) * n, (1,) * n
    bias = [r(2)] if n < 3 else []  # every placement of all inputs is tried: without a bias, there are fewer
    add(f"conv{n}d", conv, r(4, 5, *space), r(2, 5, *twos), *bias)
    add(f"conv{n}d", conv, r(1, 4, *space), r(4, 1, *twos), bias=r(4) if n == 1 else None, groups=4, padding=1)
    add(f"conv{n}d", conv, r(6, *space), r(3, 2, *twos), None, stride=2, groups=3)
    add(f"conv{n}d", conv, r(2, 1, *space), r(4, 1, *ones))
    add(f"conv_transpose{n}d", transposed, r(4, 5, *space), r(5, 2, *twos), *(bias if n == 1 else []))
    add(f"conv_transpose{n}d", transposed, r(2, 4, *space), r(4, 1, *twos), groups=4, stride=2)
    add(f"conv_transpose{n}d", transposed, r(6, *space), r(6, 2, *twos), groups=3, padding=1)
    add(f"avg_pool{n}d", getattr(F, f"avg_pool{n}d"), r(4, 2, *space), 2, 1, 1, count_include_pad=False)
    add(f"avg_pool{n}d", getattr(F, f"avg_pool{n}d"), r(4, *space), 1, 1)
    for suffix in ("", "_with_indices"):
        add(f"max_pool{n}d{suffix}", getattr(F, f"max_pool{n}d{suffix}"), r(4, 2, *space), 2, 1)
        add(f"max_pool{n}d{suffix}", getattr(F, f"max_pool{n}d{suffix}"), r(4, *space), 1, 1)
    add(f"adaptive_avg_pool{n}d", getattr(F, f"adaptive_avg_pool{n}d"), r(4, 2, *space), (2,) * n)
    add(f"adaptive_avg_pool{n}d", getattr(F, f"adaptive_avg_pool{n}d"), r(4, *space), space)
    adaptive = getattr(F, f"adaptive_max_pool{n}d")
    add(f"adaptive_max_pool{n}d", adaptive, r(4, 2, *space), (2,) * n, return_indices=False)
    add(f"adaptive_max_pool{n}d", adaptive, r(4, *space), space, return_indices=False)
    name = f"adaptive_max_pool{n}d_with_indices"
    add(name, getattr(F, name), r(4, 2, *space), (2,) * n)
    indices = torch.arange(8 * 2**n).view(4, 2, *twos) % 2**n
    add(f"max_unpool{n}d", getattr(F, f"max_unpool{n}d"), requiring_grad(r(4, 2, *twos)), indices, 2)

for mode in ("nearest", "nearest_exact"):
    for n, space in SPACE.items():
        name = f"{'_' * (mode == 'nearest_exact')}upsample_{mode}{n}d"
        add(name, getattr(torch._C._nn, name), r(4, 2, *space), [7] * n, None)
        add(name, getattr(torch._C._nn, name), r(2, 1, *space), None, [2.0] * n)
for name, n in (("linear", 1), ("bilinear", 2), ("trilinear", 3), ("bicubic", 2)):
    name = f"upsample_{name}{n}d"
    add(name, getattr(torch._C._nn, name), r(4, 2, *SPACE[n]), [7] * n, False, None)
    add(name, getattr(torch._C._nn, name), r(2, 1, *SPACE[n]), None, True, [2.0] * n)
for name in ("bilinear", "bicubic", "lanczos"):
    name = f"_upsample_{name}2d_aa"
    if hasattr(torch._C._nn, name):  # lanczos requires torch 2.13
        add(name, getattr(torch._C._nn, name), r(4, 2, 5, 4), [3, 2], False, None)

picture, backward = r(4, 2, 4, 4), aten.max_pool2d_with_indices_backward.default
add(
    "max_pool2d_with_indices_backward",
    backward,
    requiring_grad(r(4, 2, 2, 2)),
    picture,
    [2, 2],
    [2, 2],
    [0, 0],
    [1, 1],
    False,
    F.max_pool2d(picture, 2, return_indices=True)[1],
)
cube, backward = r(2, 1, 4, 4, 4), aten.max_pool3d_with_indices_backward.default
add(
    "max_pool3d_with_indices_backward",
    backward,
    requiring_grad(r(2, 1, 2, 2, 2)),
    cube,
    [2] * 3,
    [2] * 3,
    [0] * 3,
    [1] * 3,
    False,
    F.max_pool3d(cube, 2, return_indices=True)[1],
)
for n, space in ((2, (5, 4)), (3, (4, 4, 4))):
    name = f"fractional_max_pool{n}d"
    add(name, getattr(torch._C._nn, name), requiring_grad(r(4, 2, *space)), [2] * n, [2] * n, r(4, 2, n).sigmoid())
    add(name, getattr(torch._C._nn, name), requiring_grad(r(4, *space)), [2] * n, [2] * n, r(1, 4, n).sigmoid())

for name in ("grid_sampler", "grid_sampler_2d"):
    add(name, getattr(torch, name), r(4, 2, 3, 3), r(4, 5, 2, 2).tanh(), 0, 0, False)
add("grid_sampler", torch.grid_sampler, r(1, 4, 3, 3), r(1, 1, 2, 2).tanh(), 1, 1, True)
add("grid_sampler_3d", torch.grid_sampler_3d, r(2, 1, 2, 2, 2), r(2, 4, 1, 2, 3).tanh(), 0, 1, False)
add("affine_grid_generator", torch.affine_grid_generator, r(4, 2, 3), [4, 1, 3, 2], False)
add("affine_grid_generator", torch.affine_grid_generator, r(1, 3, 4), [1, 2, 3, 2, 2], True)
add("pixel_shuffle", F.pixel_shuffle, r(4, 8, 2, 3), 2)
add("pixel_shuffle", F.pixel_shuffle, r(8, 2, 3), 2)
add("pixel_unshuffle", F.pixel_unshuffle, r(2, 2, 1, 4, 6), 2)
add("channel_shuffle", F.channel_shuffle, r(4, 4, 2), 2)
add("native_channel_shuffle", torch.native_channel_shuffle, r(2, 6, 4, 1), 3)
add("im2col", F.unfold, r(4, 2, 5, 4), 2)
add("im2col", F.unfold, r(7, 3, 3), (2, 1), padding=1)
add("col2im", F.fold, r(4, 8, 12), (5, 4), 2)
add("col2im", F.fold, r(28, 4), (3, 3), 2)
add("pad", F.pad, r(4, 5, 7), (1, 2), mode="reflect")
add("pad", F.pad, r(2, 4, 7, 5), (0, 1, 2, 0), mode="replicate")
add("pad", F.pad, r(4, 5, 4), (1, 2), mode="circular")
