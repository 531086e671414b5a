"""Collectives for any dtype, strides, uneven and empty pieces, on any number of ranks.

Each has two forms: `all_gather` returns the result, `start_all_gather` a `Pending` of it. Results never share memory
with arguments. They are not differentiable. A single rank needs no set-up.

On a CPU the pieces are sent point to point, exactly the missing bytes: gloo has no uneven all-gather and lacks the
rarer dtypes, and was measured 3 to 4 times slower for large pieces. On a GPU the even cases use the backend's own
collectives, as do large broadcasts and reductions on a CPU, see native.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypedDict

import torch
import torch.distributed as dist
from torch import Tensor

from shardwright.comm.exchange import Operation, as_bytes, begin, dense, post
from shardwright.comm.group import Group, world
from shardwright.comm.native import is_small, native
from shardwright.comm.pending import Pending
from shardwright.comm.simulate import device_type
from shardwright.comm.traffic import report
from shardwright.errors import CollectiveArgumentError

__all__ = ["all_gather", "all_to_all", "broadcast", "start_all_gather", "start_all_to_all", "start_broadcast"]


def all_gather(tensor: Tensor, group: Group | None = None, sizes: Sequence[int] | None = None, dim: int = 0) -> Tensor:
    """Concatenate every rank's piece along `dim`, in rank order.

    `sizes` are the extents of all ranks along `dim`; `None` means they are equal. The other extents must agree.

    >>> all_gather(torch.tensor([1, 2, 3]), sizes=[3])
    tensor([1, 2, 3])
    """
    return start_all_gather(tensor, group, sizes, dim).wait()


def start_all_gather(
    tensor: Tensor, group: Group | None = None, sizes: Sequence[int] | None = None, dim: int = 0
) -> Pending[Tensor]:
    """Start an asynchronous `all_gather`.

    >>> start_all_gather(torch.tensor([1, 2])).wait()
    tensor([1, 2])
    """
    group = group or world()
    dim = wrap_dim(dim, tensor, "all_gather")
    sizes = [tensor.shape[dim]] * group.size if sizes is None else list(sizes)
    if len(sizes) != group.size or sizes[group.rank] != tensor.shape[dim]:
        raise bad_sizes("all_gather", sizes, tensor, dim, group)
    if group.size > 1:
        row = (tensor.shape[:dim] + tensor.shape[dim + 1 :]).numel() * tensor.itemsize
        report("all_gather", row * (sum(sizes) - sizes[group.rank]), group)
    rest = (*tensor.shape[:dim], *tensor.shape[dim + 1 :])
    return gather(tensor, group, sizes, dim, begin(group, "all_gather", tensor.dtype, tuple(sizes), rest))


def gather(tensor: Tensor, group: Group, sizes: Sequence[int], dim: int, operation: Operation) -> Pending[Tensor]:
    """Start concatenating all pieces, unreported: other collectives are built on it."""
    piece = dense(tensor)
    shapes = [(*tensor.shape[:dim], size, *tensor.shape[dim + 1 :]) for size in sizes]
    # If `dim` is the outermost dimension of extent > 1, pieces are contiguous and received in place.
    in_place = tensor.shape[:dim].numel() == 1
    if in_place:
        whole = torch.empty((*tensor.shape[:dim], sum(sizes), *tensor.shape[dim + 1 :]), **like(tensor))
        pieces = list(torch.split(whole, list(sizes), dim))
    else:
        pieces = [torch.empty(shape, **like(tensor)) for shape in shapes]
    natively = device_type(tensor) != "cpu" and group.moves(tensor.device)
    if in_place and natively and len(set(sizes)) == 1 and group.size > 1 and piece.numel():
        target = as_bytes(whole)
        flights = native(lambda: _all_gather_single(target, as_bytes(piece), group), group, operation, piece)
    else:
        others = others_in(group)
        flights = post([(peer, piece) for peer in others], [(peer, pieces[peer]) for peer in others], group, operation)
        as_bytes(pieces[group.rank]).copy_(as_bytes(piece))

    def finish() -> Tensor:
        _ = piece  # must stay alive until it is sent
        return whole if in_place else _cat(pieces, dim)

    return Pending(operation.kind, group, flights, finish, operation.number)


# A dtype of each width that torch can concatenate: it does not support all.
_WORD = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}


def _cat(pieces: list[Tensor], dim: int) -> Tensor:
    dtype = pieces[0].dtype
    return torch.cat([piece.view(_WORD[dtype.itemsize]) for piece in pieces], dim).view(dtype)


def _all_gather_single(target: Tensor, piece: Tensor, group: Group) -> dist.Work | None:
    # torch 2.13 renamed it and warns about the old name.
    call = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    work: dist.Work | None = call(target, piece, group=group.process_group, async_op=True)
    return work


def all_to_all(
    sends: Sequence[Tensor], recv_shapes: Sequence[Sequence[int]], group: Group | None = None
) -> list[Tensor]:
    """Return the pieces that all ranks send to this one, in rank order, with the shapes `recv_shapes`.

    `sends[i]` goes to rank i of the group. Pieces may differ in shape and be empty; dtype and device must agree.

    >>> all_to_all([torch.tensor([1, 2])], [(2,)])
    [tensor([1, 2])]
    """
    return start_all_to_all(sends, recv_shapes, group).wait()


def start_all_to_all(
    sends: Sequence[Tensor], recv_shapes: Sequence[Sequence[int]], group: Group | None = None
) -> Pending[list[Tensor]]:
    """Start an asynchronous `all_to_all`.

    >>> start_all_to_all([torch.ones(0)], [(0,)]).wait()
    [tensor([])]
    """
    group = group or world()
    me = group.rank
    if len(sends) != group.size or len(recv_shapes) != group.size:
        raise CollectiveArgumentError(
            f"all_to_all: {len(sends)} pieces to send and {len(recv_shapes)} shapes to receive, "
            f"but the group has {group.size} ranks"
        )
    if list(sends[me].shape) != list(recv_shapes[me]):
        raise CollectiveArgumentError(
            f"all_to_all: rank {group.ranks[me]} sends itself {list(sends[me].shape)}, "
            f"but expects {list(recv_shapes[me])}"
        )
    first = sends[0]
    for number, piece in enumerate(sends):
        if piece.dtype != first.dtype or piece.device != first.device:
            raise CollectiveArgumentError(
                f"all_to_all: piece {number} is {piece.dtype} on {piece.device}, "
                f"piece 0 is {first.dtype} on {first.device}: they must agree"
            )
    received = [torch.empty(tuple(shape), **like(first)) for shape in recv_shapes]
    if group.size > 1:
        report("all_to_all", sum(received[peer].nbytes for peer in others_in(group)), group)
    outgoing = [(peer, dense(sends[peer])) for peer in others_in(group)]
    operation = begin(group, "all_to_all", first.dtype, sent={peer: piece.nbytes for peer, piece in outgoing})
    flights = post(outgoing, [(peer, received[peer]) for peer in others_in(group)], group, operation)
    as_bytes(received[me]).copy_(as_bytes(dense(sends[me])))

    def finish() -> list[Tensor]:
        _ = outgoing  # must stay alive until it is sent
        return received

    return Pending("all_to_all", group, flights, finish, operation.number)


def broadcast(tensor: Tensor, group: Group | None = None, src: int = 0) -> Tensor:
    """Return the tensor of rank `src` of the group; every rank passes one of the same shape and dtype.

    >>> broadcast(torch.tensor([7]))
    tensor([7])
    """
    return start_broadcast(tensor, group, src).wait()


def start_broadcast(tensor: Tensor, group: Group | None = None, src: int = 0) -> Pending[Tensor]:
    """Start an asynchronous `broadcast`.

    >>> start_broadcast(torch.tensor([7])).wait()
    tensor([7])
    """
    group = group or world()
    if not 0 <= src < group.size:
        raise CollectiveArgumentError(f"broadcast: source {src} is not in a group of {group.size} ranks")
    result = dense(tensor).clone() if src == group.rank else torch.empty(tensor.shape, **like(tensor))
    if group.size == 1:
        return Pending("broadcast", group, (), lambda: result)
    report("broadcast", 0 if src == group.rank else result.nbytes, group)
    operation = begin(group, "broadcast", tensor.dtype, tuple(tensor.shape), src)
    if is_small(result, group):
        sends = [(peer, result) for peer in others_in(group)] if src == group.rank else []
        flights = post(sends, [] if src == group.rank else [(src, result)], group, operation)
    else:
        flights = native(
            lambda: dist.broadcast(as_bytes(result), group=group.process_group, group_src=src, async_op=True),
            group,
            operation,
            result,
        )
    return Pending("broadcast", group, flights, lambda: result, operation.number)


class Like(TypedDict):
    """Keyword arguments of a factory for a tensor's dtype and device."""

    dtype: torch.dtype
    device: torch.device


def like(tensor: Tensor) -> Like:
    """Return the dtype and device of a tensor as keyword arguments for a factory."""
    return {"dtype": tensor.dtype, "device": tensor.device}


def others_in(group: Group) -> list[int]:
    """Return the indices of the other ranks, starting after this one, so that not all send to rank 0 first."""
    return [(group.rank + step) % group.size for step in range(1, group.size)]


def wrap_dim(dim: int, tensor: Tensor, kind: str) -> int:
    """Return the dimension as a non-negative index."""
    if not -tensor.dim() <= dim < tensor.dim():
        raise CollectiveArgumentError(
            f"{kind}: dimension {dim} is out of range for a tensor of {tensor.dim()} dimensions"
        )
    return dim % tensor.dim()


def bad_sizes(kind: str, sizes: Sequence[int], tensor: Tensor, dim: int, group: Group) -> CollectiveArgumentError:
    """Return the error for sizes that do not match the group or the tensor."""
    if len(sizes) != group.size:
        return CollectiveArgumentError(f"{kind}: {len(sizes)} sizes {list(sizes)} for a group of {group.size} ranks")
    return CollectiveArgumentError(
        f"{kind}: sizes {list(sizes)} give rank {group.global_rank} extent {sizes[group.rank]} "
        f"in dimension {dim}, but its tensor is {list(tensor.shape)}"
    )
