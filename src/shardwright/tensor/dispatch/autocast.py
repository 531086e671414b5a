"""Autocast for operators that are composed of others: what torch does to the one, not to those that it is made of.

A local call is cast by torch itself. A composition is cast as its operator would be: to float32 before it, where torch
computes in that; not at all, where torch leaves the operator alone. Which operators are which, torch knows.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any, Literal

import torch
from torch import Tensor

from shardwright.tensor.base.tagging import DTensorBase
from shardwright.tensor.dispatch.arguments import map_tensors, tensors_in

__all__ = ["autocast_dtype", "call_with_autocast", "low_precision_cast"]

_LOW = frozenset((torch.float16, torch.bfloat16))
# Registered for autocast, and computed in the low precision.
_IN_LOW = frozenset(
    """_convolution conv1d conv2d conv3d conv_tbc conv_transpose1d conv_transpose2d conv_transpose3d convolution
    scaled_dot_product_attention _scaled_dot_product_flash_attention _native_multi_head_attention
    _transform_bias_rescale_qkv addbmm addmm addmv addr baddbmm bmm chain_matmul linalg_multi_dot linalg_vecdot linear
    matmul mm mv prelu _addmm_activation einsum mkldnn_rnn_layer cudnn_convolution cudnn_convolution_transpose
    gru_cell lstm_cell rnn_relu_cell rnn_tanh_cell _thnn_fused_gru_cell _thnn_fused_lstm_cell
    """.split()
)
# Registered for autocast, and computed in the widest of the arguments' dtypes.
_IN_WIDEST = frozenset(
    """addcdiv addcmul atan2 bilinear cat cross dot grid_sampler index_copy index_put scatter_add stack tensordot vdot
    """.split()
)


def call_with_autocast(name: str, call: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
    """The result of a call, with its arguments and within it cast as autocast has it for the operator of this name."""
    tensors = [tensor for tensor in tensors_in((*args, *kwargs.values())) if isinstance(tensor, DTensorBase)]
    kind = tensors[0].device.type
    treatment = _treatment(name, kind) if torch.is_autocast_enabled(kind) else "inner"
    if treatment == "inner":
        return call(args, kwargs)
    if treatment == "float32":
        args, kwargs = map_tensors(args, kwargs, _widened)
    with torch.autocast(kind, enabled=False):
        return call(args, kwargs)


def autocast_dtype(tensor: Tensor) -> torch.dtype:
    """The dtype of an operator that autocast computes in low precision, given a tensor of its arguments."""
    kind = tensor.device.type
    cast = torch.is_autocast_enabled(kind) and tensor.dtype != torch.float64
    return torch.get_autocast_dtype(kind) if cast else tensor.dtype


def low_precision_cast(name: str, tensor: Tensor) -> tuple[torch.dtype, ...]:
    """Return the dtype that autocast casts the arguments of this operator to, where that is a low one; else nothing."""
    if not torch._C._is_any_autocast_enabled() or name not in _IN_LOW:
        return ()
    with torch._C.DisableTorchFunctionSubclass():
        dtype = autocast_dtype(tensor)
    return (dtype,) if dtype in _LOW else ()


def _widened(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype in _LOW else tensor


@lru_cache(maxsize=4096)
def _treatment(name: str, kind: str) -> Literal["float32", "none", "inner"]:
    """Whether torch computes the operator in float32, leaves it alone, or casts what it is made of."""
    overloads = _overloads().get(name, ())
    if _any_has(overloads, f"Autocast{kind.upper()}"):
        return "inner" if name in _IN_LOW or name in _IN_WIDEST else "float32"
    # Of those that torch composes, too, the inner ones are cast; a name that is no operator's is such a one.
    composed = [_any_has((overload,), "CompositeImplicitAutograd") for overload in overloads if _is_main(overload)]
    return "inner" if all(composed) else "none"


def _is_main(overload: str) -> bool:
    """Whether it is what users call: those that take names of dimensions, or where to write, are made of others."""
    return not any(word in overload.partition(".")[2] for word in ("name", "out"))


def _any_has(overloads: tuple[str, ...], key: str) -> bool:
    return any(torch._C._dispatch_has_kernel_for_dispatch_key(overload, key) for overload in overloads)


@lru_cache(maxsize=1)
def _overloads() -> dict[str, tuple[str, ...]]:
    """The full names of torch's operators, by the names that they share."""
    found: dict[str, tuple[str, ...]] = {}
    for full in torch._C._dispatch_get_all_op_names():
        space, _, rest = full.partition("::")
        if space == "aten":
            name = rest.partition(".")[0]
            found[name] = (*found.get(name, ()), full)
    return found
