"""Autocast for composite operators: the policy that torch registers for the operator, not that of its parts.

torch casts local calls itself. A composition is cast as its operator would be: its arguments to float32, if torch
computes the operator in float32; not at all, if autocast does not touch the operator.
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
# Registered for autocast, computed in low precision.
_IN_LOW = frozenset(
    """_convolution conv1d conv2d conv3d conv_tbc conv_transpose1d conv_transpose2d conv_transpose3d convolution
    scaled_dot_product_attention _scaled_dot_product_flash_attention _native_multi_head_attention
    _transform_bias_rescale_qkv addbmm addmm addmv addr baddbmm bmm chain_matmul linalg_multi_dot linalg_vecdot linear
    matmul mm mv prelu _addmm_activation einsum mkldnn_rnn_layer cudnn_convolution cudnn_convolution_transpose
    gru_cell lstm_cell rnn_relu_cell rnn_tanh_cell _thnn_fused_gru_cell _thnn_fused_lstm_cell
    """.split()
)
# Registered for autocast, computed in the widest dtype of the arguments.
_IN_WIDEST = frozenset(
    """addcdiv addcmul atan2 bilinear cat cross dot grid_sampler index_copy index_put scatter_add stack tensordot vdot
    """.split()
)


def call_with_autocast(name: str, call: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
    """Call the operator under the autocast policy that torch registers for this name."""
    tensors = [tensor for tensor in tensors_in((*args, *kwargs.values())) if isinstance(tensor, DTensorBase)]
    device = tensors[0].device.type
    cast = _policy(name, device) if torch.is_autocast_enabled(device) else "inner"
    if cast == "inner":
        return call(args, kwargs)
    if cast == "float32":
        args, kwargs = map_tensors(args, kwargs, _widened)
    with torch.autocast(device, enabled=False):
        return call(args, kwargs)


def autocast_dtype(tensor: Tensor) -> torch.dtype:
    """Return the dtype in which autocast computes a low-precision operator, given one of its arguments."""
    kind = tensor.device.type
    cast = torch.is_autocast_enabled(kind) and tensor.dtype != torch.float64
    return torch.get_autocast_dtype(kind) if cast else tensor.dtype


def low_precision_cast(name: str, tensor: Tensor) -> tuple[torch.dtype, ...]:
    """Return the low-precision dtype to which autocast casts the arguments of this operator, or an empty tuple."""
    if not torch._C._is_any_autocast_enabled() or name not in _IN_LOW:
        return ()
    with torch._C.DisableTorchFunctionSubclass():
        dtype = autocast_dtype(tensor)
    return (dtype,) if dtype in _LOW else ()


def _widened(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype in _LOW else tensor


@lru_cache(maxsize=4096)
def _policy(name: str, device: str) -> Literal["float32", "none", "inner"]:
    """Return torch's autocast policy: compute in float32, do not cast, or cast the operators it is composed of."""
    overloads = _overloads().get(name, ())
    if _any_has(overloads, f"Autocast{device.upper()}"):
        return "inner" if name in _IN_LOW or name in _IN_WIDEST else "float32"
    # CompositeImplicit operators (and names without an aten operator) autocast their inner operators.
    composed = [_any_has((overload,), "CompositeImplicitAutograd") for overload in overloads if _is_main(overload)]
    return "inner" if all(composed) else "none"


def _is_main(overload: str) -> bool:
    """Return whether this is the main overload, not the Dimname or out= variant."""
    return not any(word in overload.partition(".")[2] for word in ("name", "out"))


def _any_has(overloads: tuple[str, ...], key: str) -> bool:
    return any(torch._C._dispatch_has_kernel_for_dispatch_key(overload, key) for overload in overloads)


@lru_cache(maxsize=1)
def _overloads() -> dict[str, tuple[str, ...]]:
    """Return the overloads of torch's operators by operator name."""
    overloads: dict[str, tuple[str, ...]] = {}
    for full in torch._C._dispatch_get_all_op_names():
        space, _, rest = full.partition("::")
        if space == "aten":
            name = rest.partition(".")[0]
            overloads[name] = (*overloads.get(name, ()), full)
    return overloads
