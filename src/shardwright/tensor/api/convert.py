"""The implementations of `DTensor.to_local`, `DTensor.redistribute` and unpickling."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from shardwright import comm
from shardwright.errors import TensorError
from shardwright.layout import Layout
from shardwright.tensor.api.from_local import for_gradient, verify_local
from shardwright.tensor.base import trace
from shardwright.tensor.base.parameter_use import ParameterUse, set_parameter_use
from shardwright.tensor.base.tagging import DTensorBase, alias, no_torch_function, tag
from shardwright.tensor.base.writes import count_writes_of
from shardwright.tensor.gradients.below_autograd import expect_plain_roots
from shardwright.tensor.redistribute import plan, start
from shardwright.tensor.redistribute.autograd import redistribute_local
from shardwright.tensor.redistribute.cast import cast_and_redistribute, cast_before_sending, check_dtypes

__all__ = ["rebuild", "redistribute", "to_local"]


def to_local(tensor: DTensorBase, grad_placements: Sequence[object] | None) -> Tensor:
    """See `DTensor.to_local`."""
    layout = tensor._layout
    expect_plain_roots()
    with no_torch_function():
        if grad_placements is None:
            return tensor.view_as(tensor)
        target = for_gradient(layout, grad_placements)
        moved = redistribute_local(tensor, layout, target)
        return tensor.view_as(tensor) if moved is tensor else moved


def redistribute(
    tensor: DTensorBase,
    device_mesh: Any,
    placements: Sequence[object] | None,
    order: Sequence[int | str] | None,
    async_op: bool,
    forward_dtype: torch.dtype | None = None,
    backward_dtype: torch.dtype | None = None,
) -> Any:
    """See `DTensor.redistribute`."""
    source = tensor._layout
    check_dtypes(forward_dtype, backward_dtype)
    mesh = source.mesh if device_mesh is None else comm.bind(device_mesh)
    if placements is None:
        if mesh.ndim != source.mesh.ndim:
            raise TensorError(f"redistribute to {mesh!r}: pass placements, one for each of its {mesh.ndim} dimensions")
        placements, order = source.placements, order or source.order
    target = Layout(mesh, placements, source.shape, order)
    before = tensor.dtype
    forward, backward = forward_dtype or before, backward_dtype or before
    if target is source and forward == before:
        return tensor
    differentiable = tensor.requires_grad and torch.is_grad_enabled()
    if async_op and target is not source and not differentiable and cast_before_sending(source, before, forward):
        cast: Any = tensor.to(forward)
        return _start_redistribution(cast, source, target)
    with no_torch_function(), trace.requested(), comm.moving_tensor(tensor.__dict__.get("_number", 0)):
        if forward == backward == before:
            moved = redistribute_local(tensor, source, target)
        else:
            moved = cast_and_redistribute(tensor, source, target, forward, backward)
        return tag(tensor.view_as(tensor) if moved is tensor else moved, target)


def _start_redistribution(tensor: DTensorBase, source: Layout, target: Layout) -> Any:
    """Return an AsyncDTensor under `target` whose values are still being received."""
    with no_torch_function(), torch.no_grad():
        steps = plan(source, target, tensor.element_size())
        if trace.current() is not None:
            with trace.requested():
                trace.record_redistribution(source, target, 0, backward=False)
        pending = start(steps, tensor.clone())  # a copy: the tensor may be written to before it is sent
        result = tag(torch.empty(0, dtype=tensor.dtype, device=tensor.device), target)
    result.__class__ = DTensorBase.pending
    result._pending = pending
    return result


def rebuild(
    local: Tensor,
    layout: dict[str, Any],
    saved_by: int,
    requires_grad: bool,
    is_parameter: bool,
    gathered: Sequence[int] | None = None,
    dtype: torch.dtype | None = None,
) -> Any:
    """Rebuild a DTensor from its pickled local tensor and layout, the rank that saved it, and its use if it has one."""
    known = Layout.from_json(layout)
    rank = comm.rank()
    if rank not in known.mesh or known.mesh.size > comm.world().size:
        raise TensorError(
            f"a DTensor {known} was saved on {known.mesh!r}; this is rank {rank} of {comm.world().size}: load it on "
            "the same number of ranks, or save it with shardwright.checkpoint, which reshards"
        )
    if saved_by not in known.replicas(rank):
        raise TensorError(
            f"this shard of a DTensor {known} was saved by rank {saved_by} and does not belong to rank {rank}: use one "
            "file per rank, or shardwright.checkpoint"
        )
    verify_local(local, known)
    result = tag(alias(local.detach()).detach(), known)
    result.requires_grad_(requires_grad)
    count_writes_of(result)  # tensors unpickled with one storage have version counters of their own
    if is_parameter:
        result._is_param = True  # what makes isinstance(x, nn.Parameter) true
    if gathered is not None:
        set_parameter_use(result, ParameterUse(frozenset(gathered), dtype))
    return result
