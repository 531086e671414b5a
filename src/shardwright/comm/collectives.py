"""Collectives that take any dtype, any strides, uneven and empty pieces, on any number of ranks.

Each comes twice: `all_gather` gives the result, `start_all_gather` a `Pending` of it. Results never share
memory with arguments. They are below autograd: no gradient flows. One rank alone needs no set-up.

On a CPU the pieces travel point to point, exactly the bytes that are missing: gloo has no uneven all-gather
and none of the rarer dtypes, and measured 3 to 4 times slower for large pieces. On a GPU the even cases are
the backend's own, as are large broadcasts and reductions on a CPU, see native.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypedDict

import torch
import torch.distributed as dist
from torch import Tensor

from shardwright.comm.exchange import Operation, as_bytes, begin, dense, post
from shardwright.comm.group import Group, world
from shardwright.comm.native import few, native
from shardwright.comm.pending import Pending
from shardwright.comm.traffic import report
from shardwright.errors import CollectiveArgumentError

__all__ = ["all_gather", "all_to_all", "broadcast", "start_all_gather", "start_all_to_all", "start_broadcast"]


def all_gather(tensor: Tensor, group: Group | None = None, sizes: Sequence[int] | None = None, dim: int = 0) -> Tensor:
    """Every rank's piece, concatenated along `dim` in rank order.

    `sizes` holds every rank's extent along `dim`; `None` says they are all equal. The other extents agree.

    >>> all_gather(torch.tensor([1, 2, 3]), sizes=[3])
    tensor([1, 2, 3])
    """
    return start_all_gather(tensor, group, sizes, dim).wait()


def start_all_gather(
    tensor: Tensor, group: Group | None = None, sizes: Sequence[int] | None = None, dim: int = 0
) -> Pending[Tensor]:
    """`all_gather`, under way.

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
    # Where nothing lies outside `dim`, pieces are consecutive in memory and land in place.
    in_place = tensor.shape[:dim].numel() == 1
    if in_place:
        whole = torch.empty((*tensor.shape[:dim], sum(sizes), *tensor.shape[dim + 1 :]), **like(tensor))
        pieces = list(torch.split(whole, list(sizes), dim))
    else:
        pieces = [torch.empty(shape, **like(tensor)) for shape in shapes]
    natively = tensor.device.type != "cpu" and group.moves(tensor.device)
    if in_place and natively and len(set(sizes)) == 1 and group.size > 1 and piece.numel():
        target = as_bytes(whole)
        flights = native(lambda: _all_gather_single(target, as_bytes(piece), group), group, operation, piece)
    else:
        others = others_in(group)
        flights = post([(peer, piece) for peer in others], [(peer, pieces[peer]) for peer in others], group, operation)
        as_bytes(pieces[group.rank]).copy_(as_bytes(piece))

    def finish() -> Tensor:
        _ = piece  # what is being sent must outlive the sending
        return whole if in_place else _cat(pieces, dim)

    return Pending(operation.kind, group, flights, finish, operation.number)


# A dtype of each width that torch can concatenate: it cannot do all of them.
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
    """The pieces all ranks have for this one, in rank order, of the shapes `recv_shapes`.

    `sends[i]` goes to rank i of the group. Pieces may differ in shape and be empty; dtype and device agree.

    >>> all_to_all([torch.tensor([1, 2])], [(2,)])
    [tensor([1, 2])]
    """
    return start_all_to_all(sends, recv_shapes, group).wait()


def start_all_to_all(
    sends: Sequence[Tensor], recv_shapes: Sequence[Sequence[int]], group: Group | None = None
) -> Pending[list[Tensor]]:
    """`all_to_all`, under way.

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
        _ = outgoing  # what is being sent must outlive the sending
        return received

    return Pending("all_to_all", group, flights, finish, operation.number)


def broadcast(tensor: Tensor, group: Group | None = None, src: int = 0) -> Tensor:
    """The tensor of rank `src` of the group, on all of them; every rank gives one of that shape and dtype.

    >>> broadcast(torch.tensor([7]))
    tensor([7])
    """
    return start_broadcast(tensor, group, src).wait()


def start_broadcast(tensor: Tensor, group: Group | None = None, src: int = 0) -> Pending[Tensor]:
    """`broadcast`, under way.

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
    if few(result, group):
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
    """The keywords that make a factory give a tensor of a given kind."""

    dtype: torch.dtype
    device: torch.device


def like(tensor: Tensor) -> Like:
    """The dtype and device of a tensor, as keywords for a factory."""
    return {"dtype": tensor.dtype, "device": tensor.device}


def others_in(group: Group) -> list[int]:
    """The other ranks by index, each rank starting after itself, so that not all send to rank 0 first."""
    return [(group.rank + step) % group.size for step in range(1, group.size)]


def wrap_dim(dim: int, tensor: Tensor, kind: str) -> int:
    """The dimension counted from the front."""
    if not -tensor.dim() <= dim < tensor.dim():
        raise CollectiveArgumentError(f"{kind}: dimension {dim} of a tensor of {tensor.dim()} dimensions")
    return dim % tensor.dim()


def bad_sizes(kind: str, sizes: Sequence[int], tensor: Tensor, dim: int, group: Group) -> CollectiveArgumentError:
    """The error for sizes that do not fit the group or the tensor."""
    if len(sizes) != group.size:
        return CollectiveArgumentError(f"{kind}: {len(sizes)} sizes {list(sizes)} for a group of {group.size} ranks")
    return CollectiveArgumentError(
        f"{kind}: sizes {list(sizes)} give rank {group.global_rank} extent {sizes[group.rank]} "
        f"in dimension {dim}, but its tensor is {list(tensor.shape)}"
    )
