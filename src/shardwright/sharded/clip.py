"""`clip_grad_norm_`: clip gradients by their global norm."""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Sequence
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from shardwright import comm
from shardwright.errors import ArgumentTypeError, ShardError
from shardwright.sharded.ops.announce import announce
from shardwright.sharded.optimizer import local_tensors
from shardwright.sharded.optimizer_state import by_group
from shardwright.sharded.tensor import ShardedTensor
from shardwright.tensor import DTensor

__all__ = ["clip_grad_norm_"]

_NORM = struct.Struct("!d")


def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor], max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
) -> Tensor:
    """Scale gradients in place so that their total norm, as one vector, is at most `max_norm`.

    Return the norm before clipping as a plain tensor, the same on every rank. Collective: all ranks of the parameters'
    groups call it with the same parameters, including ranks without shards or gradients; each sends one number. Plain
    tensors among the parameters count once, as their gradients are the same on all ranks.
    `torch.nn.utils.clip_grad_norm_` skips parameters without a gradient, which differ between ranks, so it cannot
    compute the norm of ShardedTensors.

    >>> import torch
    >>> from shardwright import sharded
    >>> table = sharded.ones(sharded.ChunkShardingSpec(0, ["rank:0/cpu"] * 2), 2, requires_grad=True)
    >>> sum(shard.tensor.sum() * factor for shard, factor in zip(table.local_shards(), (3.0, 4.0))).backward()
    >>> sharded.clip_grad_norm_([table], max_norm=1.0)
    tensor(5.)
    >>> table.grad.gather()
    tensor([0.6000, 0.8000])
    """
    tensors = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    named = {str(number): tensor for number, tensor in enumerate(tensors) if isinstance(tensor, ShardedTensor)}
    norms = []
    for group, sharded in by_group(named):
        norms += _gathered_norms(list(sharded.values()), group, tensors, max_norm, norm_type)
    _check(tensors, max_norm, norm_type)  # if there is no group
    norms += _norm([tensor for tensor in tensors if not isinstance(tensor, ShardedTensor)], norm_type)
    total = _combined(norms, norm_type)
    if error_if_nonfinite and not math.isfinite(total):
        raise ShardError(
            f"clip_grad_norm_: the norm of order {norm_type} of the gradients is {total}, so they cannot be clipped: "
            "pass error_if_nonfinite=False to scale them anyway"
        )
    factor = max_norm / (total + 1e-6)
    if not factor >= 1:  # NaN propagates, as in torch
        for tensor in tensors:
            for gradient in _gradients(tensor):
                gradient.mul_(factor)
    dtype = reduce(torch.promote_types, [tensor.dtype for tensor in tensors]) if tensors else torch.get_default_dtype()
    return torch.tensor(total, dtype=dtype.to_real(), device=tensors[0].device if tensors else "cpu")


def _gathered_norms(
    sharded: Sequence[Tensor], group: comm.Group, tensors: Sequence[Tensor], max_norm: float, norm_type: float
) -> list[float]:
    """Gather the norms of all ranks' shards of these tensors."""

    def local_norm() -> tuple[None, bytes]:
        _check(tensors, max_norm, norm_type)
        return None, b"".join(map(_NORM.pack, _norm(sharded, norm_type)))

    arguments = f"{len(tensors)} parameters, max_norm {max_norm}, norm_type {norm_type}"
    _, messages = announce(local_norm, arguments, group, "clip_grad_norm_")
    return [norm for message in messages for (norm,) in _NORM.iter_unpack(message)]


def _check(tensors: Sequence[Any], max_norm: Any, norm_type: Any) -> None:
    for name, value in (("max_norm", max_norm), ("norm_type", norm_type)):
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ArgumentTypeError(f"clip_grad_norm_: {name} must be a number, got {value!r}")
    for tensor in tensors:
        if not isinstance(tensor, Tensor) or isinstance(tensor, DTensor):
            raise ArgumentTypeError(
                f"clip_grad_norm_: parameters must be ShardedTensors or plain tensors, got {type(tensor).__name__}"
            )


def _gradients(tensor: Tensor) -> list[Tensor]:
    """Return the gradients of a parameter on this rank."""
    gradients = [local.grad for local in local_tensors(tensor)]
    return [gradient for gradient in gradients if gradient is not None]


def _norm(tensors: Sequence[Tensor], norm_type: float) -> list[float]:
    """Return the norm of this rank's gradients as a one-element list; an empty list if it has no elements."""
    norms = []
    for gradient in (gradient.detach() for tensor in tensors for gradient in _gradients(tensor)):
        values = gradient if gradient.layout == torch.strided else gradient.coalesce().values()
        if values.numel():
            wide = torch.complex128 if values.is_complex() else torch.float64
            norms.append(torch.linalg.vector_norm(values, norm_type, dtype=wide))
    return [_combined([float(norm) for norm in norms], norm_type)] if norms else []


def _combined(norms: Sequence[float], norm_type: float) -> float:
    """Return the norm of a vector, given the norms of its pieces."""
    if not norms:
        return 0.0
    if norm_type == 0:
        return sum(norms)
    return float(torch.linalg.vector_norm(torch.tensor(norms, dtype=torch.float64), norm_type))
