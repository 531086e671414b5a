"""Normalisation: a local call along replicated dimensions; along sharded ones, reductions of small statistics."""

from __future__ import annotations

from dataclasses import replace
from math import prod
from typing import Any

import torch

from shardwright.tensor.base.registry import composite, rule
from shardwright.tensor.base.strategy import Labels, Local, LocalContext, Operand, Strategies, index_strategies
from shardwright.tensor.base.tagging import DTensorBase, tag_replicated
from shardwright.tensor.redistribute.implicit import completed

__all__: list[str] = []


def _is_sharded(input: DTensorBase, dims: Any) -> bool:
    """True if any of these dimensions is sharded over several ranks."""
    layout = input._layout
    return any(layout.mesh.shape[mesh_dim] > 1 for dim in dims for mesh_dim in layout.cut_by(dim))


def _widen(input: Any) -> Any:
    """Convert to the dtype in which torch computes statistics."""
    return input.float() if input.dtype in (torch.float16, torch.bfloat16) else input


def _moments(input: Any, dims: Any) -> tuple[Any, Any, Any]:
    """Return the centred input, its global mean and its global variance."""
    mean = completed("mean", input.mean(dim=dims, keepdim=True))
    centred = input - mean
    return centred, mean, completed("mean", (centred * centred).mean(dim=dims, keepdim=True))


def _scaled(normal: Any, weight: Any, bias: Any, dtype: torch.dtype) -> Any:
    normal = normal if weight is None else normal * weight
    normal = normal if bias is None else normal + bias
    return normal.to(dtype)


def _standardised(input: Any, dims: Any, eps: float) -> Any:
    centred, _, var = _moments(input, dims)
    return centred * torch.rsqrt(var + eps)


def _leading_strategies(input: Operand, inner: int, *others: Operand | None, statistics: bool = False) -> Strategies:
    """Return strategies that shard the leading dimensions; the last `inner` ones and other operands are replicated.

    With `statistics`, mean and reciprocal standard deviation are further results, sharded like the leading dimensions.
    """
    labels: Labels = [*range(input.ndim - inner), *[None] * inner]
    rest = [other for other in others if other is not None]
    ins: list[Labels] = [labels, *([None] * other.ndim for other in rest)]
    return Strategies(index_strategies([input, *rest], ins, [labels] * (3 if statistics else 1)))


@rule("layer_norm")
def _layer_norm(
    input: Operand,
    normalized_shape: Any,
    weight: Operand | None = None,
    bias: Operand | None = None,
    eps: float = 1e-5,
    cudnn_enable: bool = True,
) -> Strategies:
    del eps, cudnn_enable
    return _leading_strategies(input, len(normalized_shape), weight, bias)


@composite("layer_norm")
def _layer_norm_sharded(
    input: Any, normalized_shape: Any, weight: Any = None, bias: Any = None, eps: float = 1e-5, *_: Any, **__: Any
) -> Any:
    dims = _normalized_dims(input, normalized_shape)
    if dims is None:
        return NotImplemented
    return _scaled(_standardised(_widen(input), dims, eps), weight, bias, input.dtype)


@rule("rms_norm")
def _rms_norm(
    input: Operand, normalized_shape: Any, weight: Operand | None = None, eps: float | None = None
) -> Strategies:
    del eps
    return _leading_strategies(input, len(normalized_shape), weight)


@rule("native_layer_norm")
def _native_layer_norm(
    input: Operand, normalized_shape: Any, weight: Operand | None, bias: Operand | None, eps: float
) -> Strategies:
    del eps
    return _leading_strategies(input, len(normalized_shape), weight, bias, statistics=True)


@composite("native_layer_norm")
def _native_layer_norm_sharded(input: Any, normalized_shape: Any, weight: Any, bias: Any, eps: float) -> Any:
    dims = _normalized_dims(input, normalized_shape)
    if dims is None:
        return NotImplemented
    centred, mean, var = _moments(_widen(input), dims)
    rstd = torch.rsqrt(var + eps)
    return _scaled(centred * rstd, weight, bias, input.dtype), mean.detach(), rstd.detach()


@composite("rms_norm")
def _rms_norm_sharded(input: Any, normalized_shape: Any, weight: Any = None, eps: float | None = None) -> Any:
    dims = _normalized_dims(input, normalized_shape)
    if dims is None:
        return NotImplemented
    wide = _widen(input)
    eps = torch.finfo(wide.dtype).eps if eps is None else eps
    return _scaled(wide * torch.rsqrt((wide * wide).mean(dim=dims, keepdim=True) + eps), weight, None, input.dtype)


def _normalized_dims(input: Any, normalized_shape: Any) -> list[int] | None:
    """Return the normalized dimensions if they are sharded and match the given shape; otherwise None."""
    size = tuple(normalized_shape)
    if not isinstance(input, DTensorBase) or tuple(input.shape[input.ndim - len(size) :]) != size:
        return None
    dims = list(range(input.ndim - len(size), input.ndim))
    return dims if _is_sharded(input, dims) else None


@rule("group_norm")
def _group_norm(
    input: Operand,
    num_groups: int,
    weight: Operand | None = None,
    bias: Operand | None = None,
    eps: float = 1e-5,
    cudnn_enabled: bool = True,
) -> Strategies:
    del num_groups, eps, cudnn_enabled
    return _leading_strategies(input, input.ndim - 1, weight, bias)


@composite("group_norm")
def _group_norm_sharded(
    input: Any, num_groups: int, weight: Any = None, bias: Any = None, eps: float = 1e-5, *_: Any, **__: Any
) -> Any:
    if input.ndim < 2 or not _is_sharded(input, range(1, input.ndim)) or input.shape[1] % num_groups:
        return NotImplemented
    return _by_groups(input, num_groups, weight, bias, eps)[0]


def _by_groups(input: Any, num_groups: int, weight: Any, bias: Any, eps: float) -> tuple[Any, Any, Any]:
    """Return the result, and the mean and reciprocal standard deviation of every group."""
    groups = _widen(input).unflatten(1, (num_groups, input.shape[1] // num_groups))
    dims = list(range(2, groups.ndim))
    centred, mean, var = _moments(groups, dims)
    rstd = torch.rsqrt(var + eps)
    normal = (centred * rstd).flatten(1, 2)
    result = _scaled(normal, _along_channels(weight, input), _along_channels(bias, input), input.dtype)
    return result, mean.squeeze(dims), rstd.squeeze(dims)


@rule("native_group_norm")
def _native_group_norm(input: Operand, weight: Operand | None, bias: Operand | None, *_: Any) -> Strategies:
    def images(context: LocalContext) -> Local:
        count = context.ins[0].local_shape(context.rank)[0]
        return lambda func, args, _: func(*args[:3], count, *args[4:])

    return replace(_leading_strategies(input, input.ndim - 1, weight, bias, statistics=True), run=images)


@composite("native_group_norm")
def _native_group_norm_sharded(
    input: Any, weight: Any, bias: Any, images: int, channels: int, area: int, group: int, eps: float
) -> Any:
    del images, area
    if input.ndim < 2 or not _is_sharded(input, range(1, input.ndim)) or channels % group:
        return NotImplemented
    return _by_groups(input, group, weight, bias, eps)


def _along_channels(value: Any, input: Any) -> Any:
    """Reshape one value per channel to broadcast with the input."""
    return None if value is None else value.reshape(-1, *[1] * (input.ndim - 2))


@composite("batch_norm")
def _batch_norm(*args: Any, **kwargs: Any) -> Any:
    if len(args) + len(kwargs) != 9:
        return NotImplemented  # nn.functional's: its body calls torch's, whose nine arguments have another order
    return _global_batch_norm(*args, **kwargs)[0]


@composite("native_batch_norm")
def _native_batch_norm(
    input: Any,
    weight: Any,
    bias: Any,
    running_mean: Any,
    running_var: Any,
    training: bool,
    momentum: float,
    eps: float,
) -> Any:
    given = (input, weight, bias, running_mean, running_var, training, momentum, eps, True)
    result, mean, rstd = _global_batch_norm(*given)
    if not training:
        return result, _empty(input, input.dtype), _empty(input, input.dtype)
    return result, mean.detach().reshape(-1), rstd.detach().reshape(-1)


@composite("_native_batch_norm_legit")
def _legit_batch_norm(input: Any, weight: Any, bias: Any, *rest: Any, **named: Any) -> Any:
    """An alias whose running statistics are optional."""
    without = not named and len(rest) == 3
    return _native_batch_norm(input, weight, bias, *((None, None) if without else ()), *rest, **named)


@composite("_batch_norm_with_update")
def _batch_norm_with_update(
    input: Any, weight: Any, bias: Any, running_mean: Any, running_var: Any, momentum: float, eps: float
) -> Any:
    """In training; the fourth result is reserved for the backward pass on some devices."""
    results = _native_batch_norm(input, weight, bias, running_mean, running_var, True, momentum, eps)
    return (*results, _empty(input, torch.uint8))


def _empty(input: Any, dtype: torch.dtype) -> Any:
    mesh = input._layout.mesh
    empty = torch.empty(0, dtype=dtype, device=input.device)
    return tag_replicated(empty, mesh)


def _global_batch_norm(
    input: Any,
    weight: Any,
    bias: Any,
    running_mean: Any,
    running_var: Any,
    training: bool,
    momentum: float,
    eps: float,
    cudnn_enabled: bool,
) -> tuple[Any, Any, Any]:
    """Return the result, and mean and reciprocal standard deviation of the global batch, however it is sharded.

    Always composed: the schema of batch_norm does not declare what it writes to.
    """
    del cudnn_enabled
    wide, dims = _widen(input), [0, *range(2, input.ndim)]
    if 0 in input.shape:  # empty inputs have no statistics: keep the running ones
        zero = wide.sum(dim=dims, keepdim=True)
        scale, shift = (None, None) if input.ndim < 2 else (_along_channels(x, input) for x in (weight, bias))
        return _scaled(input.clone(), scale, shift, input.dtype), zero, zero
    if training or running_mean is None:
        centred, mean, var = _moments(wide, dims)
        if training:
            _track(running_mean, mean, momentum, 1.0)
            count = prod(input.shape[d] for d in dims)
            _track(running_var, var, momentum, count / max(count - 1, 1))
    else:
        mean, var = _along_channels(running_mean, input), _along_channels(running_var, input)
        centred = wide - mean
    rstd = torch.rsqrt(var + eps)
    scale, shift = _along_channels(weight, input), _along_channels(bias, input)
    return _scaled(centred * rstd, scale, shift, input.dtype), mean, rstd


def _track(running: Any, current: Any, momentum: float, correction: float) -> None:
    """Update a running statistic in place, keeping its layout."""
    if running is None:
        return
    with torch.no_grad():
        running.mul_(1 - momentum).add_(
            current.detach().reshape(running.shape).to(running.dtype), alpha=momentum * correction
        )


@composite("instance_norm")
def _instance_norm(*args: Any, **kwargs: Any) -> Any:
    if len(args) + len(kwargs) != 9:
        return NotImplemented  # as in batch_norm
    return _global_instance_norm(*args, **kwargs)


def _global_instance_norm(
    input: Any,
    weight: Any,
    bias: Any,
    running_mean: Any,
    running_var: Any,
    use_input_stats: bool,
    momentum: float,
    eps: float,
    cudnn_enabled: bool,
) -> Any:
    """Statistics per image and channel; the running ones are means over the global batch."""
    if not use_input_stats:
        arguments = (input, weight, bias, running_mean, running_var, False, momentum, eps, cudnn_enabled)
        return _global_batch_norm(*arguments)[0]
    wide, dims = _widen(input), list(range(2, input.ndim))
    centred, mean, var = _moments(wide, dims)
    count = prod(input.shape[d] for d in dims)
    _track(running_mean, mean.mean(dim=0), momentum, 1.0)
    _track(running_var, var.mean(dim=0), momentum, count / max(count - 1, 1))
    normal = centred * torch.rsqrt(var + eps)
    return _scaled(normal, _along_channels(weight, input), _along_channels(bias, input), input.dtype)
