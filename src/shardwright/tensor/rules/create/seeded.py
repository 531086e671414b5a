"""Operators whose random numbers torch draws itself: computed on replicated tensors, from one seed on all ranks."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from shardwright.layout import Layout, Mesh
from shardwright.tensor.base.gradient_types import REPLICATE
from shardwright.tensor.base.registry import composite
from shardwright.tensor.base.tagging import DTensorBase, tag
from shardwright.tensor.dispatch.arguments import tensors_in
from shardwright.tensor.dispatch.decompose import python_body
from shardwright.tensor.dispatch.fallback import call_replicated
from shardwright.tensor.random import fill_uniform
from shardwright.tensor.random.local import fill_local, refuse_generator, scratch_seed

__all__ = ["call_seeded"]

SEEDED = (
    "_efficient_attention_forward",
    "_flash_attention_forward",
    "_fused_dropout",
    "_sample_dirichlet",
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_fused_attention_overrideable",
    "_standard_gamma",
    "binomial",
    "multinomial",
    "native_dropout",
    "poisson",
    "rrelu_with_noise",
)


def _mesh_of(args: Any, kwargs: dict[str, Any]) -> Mesh:
    tensors = tensors_in([*args, *kwargs.values()])
    return next(tensor._layout.mesh for tensor in tensors if isinstance(tensor, DTensorBase))


def call_seeded(name: str, args: Any, kwargs: dict[str, Any]) -> Any:
    """Call an operator of torch on replicated tensors, with the same random numbers on every rank."""
    refuse_generator(name, kwargs.get("generator"))
    return call_replicated(name, getattr(torch, name, None) or getattr(torch.ops.aten, name), args, kwargs)


def _seeded(name: str, *args: Any, **kwargs: Any) -> Any:
    return call_seeded(name, args, kwargs)


for _name in SEEDED:
    composite(_name)(partial(_seeded, _name))


def _seeded_body(name: str) -> None:
    """Register a Python function that draws random numbers internally: every rank draws the same."""
    body = python_body(getattr(torch, name))
    assert body is not None

    def compose(*args: Any, **kwargs: Any) -> Any:
        with scratch_seed(_mesh_of(args, kwargs)):
            return body(*args, **kwargs)

    composite(name)(compose)


for _name in ("svd_lowrank", "pca_lowrank", "lobpcg"):
    _seeded_body(_name)


def _fractional(name: str, dims: int) -> None:
    """Register fractional pooling, which draws random window positions per image and channel."""
    body = python_body(getattr(torch.nn.functional, name))
    assert body is not None

    def compose(input: Any, *args: Any, _random_samples: Any = None, **kwargs: Any) -> Any:
        if _random_samples is None:
            mesh, images = input._layout.mesh, 1 if input.ndim == dims + 1 else input.shape[0]
            layout = Layout(mesh, [REPLICATE] * mesh.ndim, (images, input.shape[-dims - 1], dims))
            samples = torch.empty(layout.shape, dtype=input.dtype, device=input.device)
            _random_samples = tag(fill_local(samples, layout, fill_uniform), layout)
        return body(input, *args, _random_samples=_random_samples, **kwargs)

    composite(name)(compose)


_fractional("fractional_max_pool2d_with_indices", 2)
_fractional("fractional_max_pool3d_with_indices", 3)
