"""`clip_grad_norm_`: gradients scaled down to a norm that all ranks find together."""

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
    """Scales gradients in place so that their norm, all of them taken as one vector, is `max_norm` at most.

    It returns the norm that they had: a plain tensor, the same on every rank. All ranks of the parameters' groups call
    it with the same parameters, those without shards or without gradients, too; a number of each rank travels. Plain
    tensors among the parameters count once: their gradients are the same on all ranks. `torch.nn.utils.clip_grad_norm_`
    leaves out parameters without a gradient, which are others on other ranks, so it cannot find the norm of a
    ShardedTensor's.

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
    for group, ours in by_group(named):
        norms += _told(list(ours.values()), group, tensors, max_norm, norm_type)
    _check(tensors, max_norm, norm_type)  # where there is no group
    norms += _norm([tensor for tensor in tensors if not isinstance(tensor, ShardedTensor)], norm_type)
    total = _combined(norms, norm_type)
    if error_if_nonfinite and not math.isfinite(total):
        raise ShardError(
            f"clip_grad_norm_: the norm of order {norm_type} of the gradients is {total}, by which they cannot be "
            "scaled: give error_if_nonfinite=False to do it all the same"
        )
    factor = max_norm / (total + 1e-6)
    if not factor >= 1:  # not a number is neither, and is passed on, as torch does
        for tensor in tensors:
            for gradient in _gradients(tensor):
                gradient.mul_(factor)
    dtype = reduce(torch.promote_types, [tensor.dtype for tensor in tensors]) if tensors else torch.get_default_dtype()
    return torch.tensor(total, dtype=dtype.to_real(), device=tensors[0].device if tensors else "cpu")


def _told(
    ours: Sequence[Tensor], group: comm.Group, tensors: Sequence[Tensor], max_norm: float, norm_type: float
) -> list[float]:
    """The norms that the ranks of a group find for their shards of these tensors."""

    def mine() -> tuple[None, bytes]:
        _check(tensors, max_norm, norm_type)
        return None, b"".join(map(_NORM.pack, _norm(ours, norm_type)))

    alike = f"{len(tensors)} parameters, max_norm {max_norm}, norm_type {norm_type}"
    _, told = announce(mine, alike, group, "clip_grad_norm_")
    return [norm for said in told for (norm,) in _NORM.iter_unpack(said)]


def _check(tensors: Sequence[Any], max_norm: Any, norm_type: Any) -> None:
    for name, value in (("max_norm", max_norm), ("norm_type", norm_type)):
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ArgumentTypeError(f"clip_grad_norm_: {name} {value!r} is a {type(value).__name__}: give a number")
    for tensor in tensors:
        if not isinstance(tensor, Tensor) or isinstance(tensor, DTensor):
            raise ArgumentTypeError(
                f"clip_grad_norm_: {type(tensor).__name__} among the parameters: ShardedTensors and plain tensors are "
                "known here"
            )


def _gradients(tensor: Tensor) -> list[Tensor]:
    """The gradients that this rank has of a parameter."""
    found = [each.grad for each in local_tensors(tensor)]
    return [gradient for gradient in found if gradient is not None]


def _norm(tensors: Sequence[Tensor], norm_type: float) -> list[float]:
    """The norm of this rank's gradients, as a list of it; an empty one where it has no element of any."""
    found = []
    for gradient in (gradient.detach() for tensor in tensors for gradient in _gradients(tensor)):
        values = gradient if gradient.layout == torch.strided else gradient.coalesce().values()
        if values.numel():
            wide = torch.complex128 if values.is_complex() else torch.float64
            found.append(torch.linalg.vector_norm(values, norm_type, dtype=wide))
    return [_combined([float(norm) for norm in found], norm_type)] if found else []


def _combined(norms: Sequence[float], norm_type: float) -> float:
    """The norm of a vector from those of its pieces."""
    if not norms:
        return 0.0
    if norm_type == 0:
        return sum(norms)
    return float(torch.linalg.vector_norm(torch.tensor(norms, dtype=torch.float64), norm_type))
