"""All-reduce and reduce-scatter, for every dtype that supports arithmetic.

The backend reduces if it does so correctly. Otherwise the pieces are exchanged and reduced here, in rank order:
reduce-scatter on a CPU (each rank receives exactly its piece of the others), small tensors on a CPU, dtypes gloo lacks,
and `max` and `min` of floats, for which gloo loses NaNs.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from shardwright.comm.collectives import bad_sizes, gather, like, others_in, wrap_dim
from shardwright.comm.exchange import begin, dense, post
from shardwright.comm.fold import ReduceOp, check, fold
from shardwright.comm.group import Group, world
from shardwright.comm.native import is_small, native
from shardwright.comm.pending import Pending
from shardwright.comm.simulate import device_type
from shardwright.comm.traffic import report
from shardwright.errors import CollectiveArgumentError

__all__ = [
    "NATIVE_OPERATIONS",
    "all_reduce",
    "all_reduce_",
    "backend_reduces",
    "is_little_padding",
    "reduce_scatter",
    "start_all_reduce",
    "start_reduce_scatter",
]

_FLOATS = frozenset((torch.float16, torch.bfloat16, torch.float32, torch.float64))
_INTEGERS = frozenset((torch.uint8, torch.int8, torch.int32, torch.int64))
_COMPLEX = frozenset((torch.complex64, torch.complex128))
NATIVE_OPERATIONS = {
    "sum": dist.ReduceOp.SUM,
    "avg": dist.ReduceOp.SUM,  # divided afterwards: not every backend has AVG
    "product": dist.ReduceOp.PRODUCT,
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
    "band": dist.ReduceOp.BAND,
    "bor": dist.ReduceOp.BOR,
    "bxor": dist.ReduceOp.BXOR,
}


def all_reduce(tensor: Tensor, group: Group | None = None, op: ReduceOp = "sum") -> Tensor:
    """Reduce the tensors of all ranks, which have the same shape and dtype, into a new tensor on every rank.

    >>> all_reduce(torch.tensor([1.0, 2.0]), op="max")
    tensor([1., 2.])
    """
    return start_all_reduce(tensor, group, op).wait()


def start_all_reduce(tensor: Tensor, group: Group | None = None, op: ReduceOp = "sum") -> Pending[Tensor]:
    """Start an asynchronous `all_reduce`.

    >>> start_all_reduce(torch.tensor([3])).wait()
    tensor([3])
    """
    group = group or world()
    check(tensor.dtype, op)
    if not _natively(tensor, group, op):
        return _gather_and_fold(tensor, group, op)
    return _reduce_natively(dense(tensor).clone(), group, op)


def all_reduce_(tensor: Tensor, group: Group | None = None, op: ReduceOp = "sum") -> Tensor:
    """Reduce in place and return `tensor`; without a copy if the backend can reduce a dense tensor.

    >>> total = torch.tensor([3])
    >>> all_reduce_(total) is total
    True
    """
    group = group or world()
    check(tensor.dtype, op)
    direct = tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()
    if direct and _natively(tensor, group, op):
        _reduce_natively(tensor.detach(), group, op).wait()
    elif group.size > 1:
        tensor.detach().copy_(start_all_reduce(tensor, group, op).wait())
    return tensor


def _natively(tensor: Tensor, group: Group, op: str) -> bool:
    return group.size > 1 and backend_reduces(tensor, op) and not is_small(tensor, group)


def backend_reduces(tensor: Tensor, op: str) -> bool:
    """Return True if the backend reduces tensors of this dtype by this operation, correctly."""
    if op in ("band", "bor", "bxor"):
        return tensor.dtype in _INTEGERS and device_type(tensor) == "cpu"  # NCCL has no bitwise reductions
    if op in ("max", "min"):
        return tensor.dtype in _INTEGERS or (tensor.dtype in _FLOATS and device_type(tensor) != "cpu")
    if op == "product":
        return tensor.dtype in _INTEGERS or tensor.dtype in _FLOATS
    return tensor.dtype in _INTEGERS or tensor.dtype in _FLOATS or tensor.dtype in _COMPLEX


def _reduce_natively(target: Tensor, group: Group, op: str) -> Pending[Tensor]:
    size = group.size
    report("all_reduce", 2 * (size - 1) * target.nbytes // size, group)
    operation = begin(group, "all_reduce", target.dtype, tuple(target.shape), op=op)
    flights = native(
        lambda: dist.all_reduce(target, NATIVE_OPERATIONS[op], group=group.process_group, async_op=True),
        group,
        operation,
        target,
    )
    number = operation.number
    return Pending("all_reduce", group, flights, lambda: target.div_(size) if op == "avg" else target, number)


def _gather_and_fold(tensor: Tensor, group: Group, op: str) -> Pending[Tensor]:
    size = group.size
    if size > 1:
        # Count what the backend would have transferred, also for small tensors.
        rounds = 2 / size if backend_reduces(tensor, op) else 1
        report("all_reduce", int(rounds * (size - 1) * tensor.nbytes), group)
    operation = begin(group, "all_reduce", tensor.dtype, tuple(tensor.shape), op=op)
    gathered = gather(dense(tensor).reshape(1, *tensor.shape), group, [1] * size, 0, operation)
    return Pending("all_reduce", group, (), lambda: fold(gathered.wait().unbind(0), op), operation.number)


def reduce_scatter(
    tensor: Tensor, group: Group | None = None, sizes: Sequence[int] | None = None, dim: int = 0, op: ReduceOp = "sum"
) -> Tensor:
    """Reduce the tensors of all ranks, of the same shape and dtype, and return this rank's piece along `dim`.

    `sizes` are the extents of all ranks along `dim`; `None` means they are equal.

    >>> reduce_scatter(torch.tensor([1, 2, 3]), sizes=[3])
    tensor([1, 2, 3])
    """
    return start_reduce_scatter(tensor, group, sizes, dim, op).wait()


def start_reduce_scatter(
    tensor: Tensor, group: Group | None = None, sizes: Sequence[int] | None = None, dim: int = 0, op: ReduceOp = "sum"
) -> Pending[Tensor]:
    """Start an asynchronous `reduce_scatter`.

    >>> start_reduce_scatter(torch.tensor([1, 2])).wait()
    tensor([1, 2])
    """
    group = group or world()
    check(tensor.dtype, op)
    dim = wrap_dim(dim, tensor, "reduce_scatter")
    parts = _parts(tensor, group, sizes, dim)
    own = torch.split(tensor, parts, dim)[group.rank]
    if group.size > 1:
        report("reduce_scatter", (group.size - 1) * own.nbytes, group)
    natively = device_type(tensor) != "cpu" and group.moves(tensor.device) and is_little_padding(parts)
    if natively and tensor.numel() and group.size > 1 and backend_reduces(tensor, op):
        return _reduce_scatter_natively(tensor, group, parts, dim, op)
    outgoing = {peer: dense(piece) for peer, piece in enumerate(torch.split(tensor, parts, dim)) if peer != group.rank}
    pieces = [torch.empty(own.shape, **like(tensor)) for _ in parts]
    pieces[group.rank] = dense(own)
    others = others_in(group)
    operation = begin(group, "reduce_scatter", tensor.dtype, tuple(tensor.shape), tuple(parts), dim, op=op)
    flights = post(
        [(peer, outgoing[peer]) for peer in others], [(peer, pieces[peer]) for peer in others], group, operation
    )

    def finish() -> Tensor:
        outgoing.clear()  # kept alive until it was sent
        return fold(pieces, op)

    return Pending("reduce_scatter", group, flights, finish, operation.number)


def _parts(tensor: Tensor, group: Group, sizes: Sequence[int] | None, dim: int) -> list[int]:
    extent = tensor.shape[dim]
    if sizes is None:
        if extent % group.size:
            raise CollectiveArgumentError(
                f"reduce_scatter: extent {extent} of dimension {dim} is not a multiple of {group.size}: pass sizes"
            )
        return [extent // group.size] * group.size
    if len(sizes) != group.size:
        raise bad_sizes("reduce_scatter", sizes, tensor, dim, group)
    if sum(sizes) != extent or min(sizes) < 0:
        raise CollectiveArgumentError(
            f"reduce_scatter: sizes {list(sizes)} add up to {sum(sizes)}, but dimension {dim} has extent {extent}"
        )
    return list(sizes)


def is_little_padding(parts: list[int]) -> bool:
    """Return True if pieces padded to the largest are at most twice the pieces themselves."""
    return max(parts) * len(parts) <= 2 * sum(parts)


def _stack_padded(tensor: Tensor, parts: list[int], dim: int) -> Tensor:
    """Stack the pieces of a tensor along `dim`, each padded with zeros to the largest: backends take equal pieces only.

    >>> _stack_padded(torch.tensor([1, 2, 3]), [2, 1], 0)
    tensor([[1, 2],
            [3, 0]])
    """
    pieces = torch.split(tensor.detach(), parts, dim)
    largest = max(parts)
    if min(parts) == largest:
        return torch.stack(pieces)
    shape = (*tensor.shape[:dim], largest, *tensor.shape[dim + 1 :])
    stacked = torch.zeros((len(parts), *shape), **like(tensor))
    for index, piece in enumerate(pieces):
        stacked[index].narrow(dim, 0, parts[index]).copy_(piece)
    return stacked


def _reduce_scatter_natively(tensor: Tensor, group: Group, parts: list[int], dim: int, op: str) -> Pending[Tensor]:
    stacked = _stack_padded(tensor, parts, dim)
    result = torch.empty(stacked.shape[1:], **like(tensor))
    # torch 2.13 renamed it and warns about the old name.
    call = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    operation = begin(group, "reduce_scatter", tensor.dtype, tuple(tensor.shape), tuple(parts), dim, op=op)
    flights = native(
        lambda: call(
            result.view(-1), stacked.view(-1), op=NATIVE_OPERATIONS[op], group=group.process_group, async_op=True
        ),
        group,
        operation,
        stacked,
    )

    def finish() -> Tensor:
        _ = stacked  # must stay alive until it is sent
        mine = parts[group.rank]
        piece = result if result.shape[dim] == mine else result.narrow(dim, 0, mine).contiguous()
        return piece.div_(group.size) if op == "avg" else piece

    return Pending("reduce_scatter", group, flights, finish, operation.number)
