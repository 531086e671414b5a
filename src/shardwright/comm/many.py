"""All-gather and reduce-scatter of many tensors in one collective: the parameters of a unit, or their gradients.

Each tensor is split along its first dimension into pieces that may be uneven or empty, and has its own shape and dtype.
On a CPU, large pieces are sent from where they are and received in place; small ones are packed into one message for
each pair of ranks. On a GPU the backend runs its collective of each tensor in one launch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from shardwright.comm.collectives import like, others_in
from shardwright.comm.exchange import Operation, as_bytes, begin, dense, post
from shardwright.comm.flight import Flight
from shardwright.comm.fold import ReduceOp, check, fold
from shardwright.comm.group import Group, world
from shardwright.comm.ledger import code
from shardwright.comm.native import native
from shardwright.comm.pending import Pending
from shardwright.comm.reduce import NATIVE_OPERATIONS, backend_reduces, is_little_padding
from shardwright.comm.simulate import device_type
from shardwright.comm.traffic import report
from shardwright.errors import CollectiveArgumentError

__all__ = ["all_gather_many", "reduce_scatter_many", "start_all_gather_many", "start_reduce_scatter_many"]

# Bytes of the largest piece of a tensor whose pieces are packed with others: below it a message costs more than a copy.
_MAX_PACKED = 1 << 20

Sizes = tuple[tuple[int, ...], ...]  # of each tensor: the extent of every rank's piece along the first dimension


class _Plan(NamedTuple):
    """How the pieces of some tensors are sent, the same on all ranks."""

    details: tuple[object, ...]  # for the ledger: one entry describes the collective on all ranks
    rows: tuple[int, ...]  # of each tensor: the bytes of one index of the first dimension
    packed: tuple[int, ...]  # the tensors whose pieces share a message
    alone: tuple[int, ...]  # the tensors whose pieces are sent in messages of their own
    codes: tuple[int, ...]  # of each tensor: what its messages add to the code of the operation

    def nbytes(self, sizes: Sizes, rank: int) -> int:
        """Return the bytes of all pieces of a rank."""
        return sum(row * size[rank] for row, size in zip(self.rows, sizes, strict=True))


@lru_cache(maxsize=4096)
def _plan(shapes: tuple[tuple[int, ...], ...], dtypes: tuple[torch.dtype, ...], sizes: Sizes) -> _Plan:
    rows = tuple(math.prod(shape[1:]) * dtype.itemsize for shape, dtype in zip(shapes, dtypes, strict=True))
    small = [row * max(size) <= _MAX_PACKED for row, size in zip(rows, sizes, strict=True)]
    return _Plan(
        tuple((dtype, size, shape[1:]) for dtype, size, shape in zip(dtypes, sizes, shapes, strict=True)),
        rows,
        tuple(index for index, is_small in enumerate(small) if is_small),
        tuple(index for index, is_small in enumerate(small) if not is_small),
        tuple(code(("tensor", index)) for index in range(len(shapes))),
    )


def all_gather_many(
    pieces: Sequence[Tensor], group: Group | None = None, sizes: Sequence[Sequence[int]] | None = None
) -> list[Tensor]:
    """Concatenate every rank's pieces of several tensors along the first dimension, in one collective.

    `pieces[i]` is this rank's piece of tensor i, and `sizes[i]` are the extents of all ranks' pieces of it; `None`
    means that they are equal. Dtypes may differ, and pieces may be empty.

    >>> all_gather_many([torch.tensor([1, 2]), torch.ones(0, 3)], sizes=[[2], [0]])
    [tensor([1, 2]), tensor([], size=(0, 3))]
    """
    return start_all_gather_many(pieces, group, sizes).wait()


def start_all_gather_many(
    pieces: Sequence[Tensor], group: Group | None = None, sizes: Sequence[Sequence[int]] | None = None
) -> Pending[list[Tensor]]:
    """Start an asynchronous `all_gather_many`.

    >>> start_all_gather_many([torch.tensor([1.5])]).wait()
    [tensor([1.5000])]
    """
    group = group or world()
    table = _check_pieces(pieces, group, sizes)
    plan = _plan(tuple(map(_shape, pieces)), tuple(piece.dtype for piece in pieces), table)
    sent = [dense(piece) for piece in pieces]
    wholes = [
        torch.empty((sum(size), *piece.shape[1:]), **like(piece)) for piece, size in zip(sent, table, strict=True)
    ]
    if group.size == 1 or not pieces:
        _copy_all(wholes, sent)
        return Pending("all_gather_many", group, (), lambda: wholes)
    report("all_gather", sum(whole.nbytes for whole in wholes) - plan.nbytes(table, group.rank), group)
    operation = begin(group, "all_gather_many", torch.uint8, *plan.details)
    if device_type(sent[0]) != "cpu" and group.moves(sent[0].device):
        return _gather_natively(sent, wholes, table, group, operation)
    return _gather_point_to_point(sent, wholes, table, plan, group, operation)


def _gather_point_to_point(
    sent: list[Tensor], wholes: list[Tensor], sizes: Sizes, plan: _Plan, group: Group, operation: Operation
) -> Pending[list[Tensor]]:
    others = others_in(group)
    slots = [torch.split(whole, list(size)) for whole, size in zip(wholes, sizes, strict=True)]
    flights: list[Flight] = []
    for index in plan.alone:
        step = operation._replace(code=operation.code ^ plan.codes[index])
        sends = [(peer, sent[index]) for peer in others]
        flights += post(sends, [(peer, slots[index][peer]) for peer in others], group, step)
    packed = _pack([sent[index] for index in plan.packed])
    landings = {peer: _landing(sizes, plan, peer, sent[0].device) for peer in others}
    flights += post([(peer, packed) for peer in others], list(landings.items()), group, operation)
    _copy_all([slot[group.rank] for slot in slots], sent)

    def finish() -> list[Tensor]:
        _ = sent, packed  # must stay alive until they are sent
        for peer, landing in landings.items():
            _unpack(landing, [slots[index][peer] for index in plan.packed])
        return wholes

    return Pending("all_gather_many", group, flights, finish, operation.number)


def _gather_natively(
    sent: list[Tensor], wholes: list[Tensor], sizes: Sizes, group: Group, operation: Operation
) -> Pending[list[Tensor]]:
    """Gather by the backend's all-gather of equal pieces: uneven pieces are padded, and copied out afterwards."""
    inputs, outputs, padded = [], [], []
    for piece, whole, size in zip(sent, wholes, sizes, strict=True):
        if not whole.numel():
            continue
        if min(size) == max(size):
            outputs.append(as_bytes(whole))
            inputs.append(as_bytes(piece))
            continue
        row = whole.nbytes // whole.shape[0]
        buffer = torch.empty((group.size, max(size) * row), dtype=torch.uint8, device=piece.device)
        mine = torch.zeros(max(size) * row, dtype=torch.uint8, device=piece.device)
        mine[: piece.nbytes].copy_(as_bytes(piece))
        outputs.append(buffer.view(-1))
        inputs.append(mine)
        padded.append((whole, buffer, [extent * row for extent in size]))
    flights = _launch(lambda backend: _coalesced_gather(backend, outputs, inputs), inputs, group, operation)

    def finish() -> list[Tensor]:
        _ = inputs  # must stay alive until they are sent
        for whole, buffer, extents in padded:
            used = [row[:extent] for row, extent in zip(buffer, extents, strict=True)]
            torch.cat(used, out=as_bytes(whole))
        return wholes

    return Pending("all_gather_many", group, flights, finish, operation.number)


def reduce_scatter_many(
    tensors: Sequence[Tensor],
    group: Group | None = None,
    sizes: Sequence[Sequence[int]] | None = None,
    op: ReduceOp = "sum",
    present: Sequence[bool] | None = None,
) -> list[Tensor | None]:
    """Reduce several tensors over the ranks in one collective, and return this rank's piece of each.

    Every rank passes tensors of the same shapes and dtypes. `sizes[i]` are the extents of all ranks' pieces of tensor i
    along the first dimension; `None` means that they are equal. `present[i]` is False if this rank has no value for
    tensor i, and passes zeros in its place: a tensor that is present on no rank gives None, on all ranks.

    >>> reduce_scatter_many([torch.tensor([1, 2]), torch.zeros(3)], present=[True, False])
    [tensor([1, 2]), None]
    """
    return start_reduce_scatter_many(tensors, group, sizes, op, present).wait()


def start_reduce_scatter_many(
    tensors: Sequence[Tensor],
    group: Group | None = None,
    sizes: Sequence[Sequence[int]] | None = None,
    op: ReduceOp = "sum",
    present: Sequence[bool] | None = None,
) -> Pending[list[Tensor | None]]:
    """Start an asynchronous `reduce_scatter_many`.

    >>> start_reduce_scatter_many([torch.tensor([1, 2])]).wait()
    [tensor([1, 2])]
    """
    group = group or world()
    table = _check_tensors(tensors, group, sizes, op, present)
    plan = _plan(tuple(map(_shape, tensors)), tuple(tensor.dtype for tensor in tensors), table)
    given = [dense(tensor) for tensor in tensors]
    if group.size == 1 or not tensors:
        results = [fold([tensor], op) for tensor in given]
        return Pending("reduce_scatter_many", group, (), lambda: _without_absent(results, present, None))
    report("reduce_scatter", (group.size - 1) * plan.nbytes(table, group.rank), group)
    operation = begin(group, "reduce_scatter_many", torch.uint8, present is not None, *plan.details, op=op)
    natively = device_type(given[0]) != "cpu" and group.moves(given[0].device)
    if natively and all(
        backend_reduces(tensor, op) and is_little_padding(list(size)) for tensor, size in zip(given, table, strict=True)
    ):
        return _scatter_natively(given, table, present, group, operation, op)
    return _scatter_point_to_point(given, table, plan, present, group, operation, op)


def _scatter_point_to_point(
    given: list[Tensor],
    sizes: Sizes,
    plan: _Plan,
    present: Sequence[bool] | None,
    group: Group,
    operation: Operation,
    op: str,
) -> Pending[list[Tensor | None]]:
    flags = _flags(present, given[0].device)
    others, me = others_in(group), group.rank
    parts = [torch.split(tensor, list(size)) for tensor, size in zip(given, sizes, strict=True)]
    received = [
        [part[me] if peer == me else torch.empty_like(part[me]) for peer in range(group.size)] for part in parts
    ]
    flights: list[Flight] = []
    for index in plan.alone:
        step = operation._replace(code=operation.code ^ plan.codes[index])
        sends = [(peer, parts[index][peer]) for peer in others]
        flights += post(sends, [(peer, received[index][peer]) for peer in others], group, step)
    header = [] if flags is None else [flags]
    packed = {peer: _pack([*header, *(parts[index][peer] for index in plan.packed)]) for peer in others}
    nbytes = sum(each.nbytes for each in header)
    landings = {peer: _landing(sizes, plan, me, given[0].device, nbytes) for peer in others}
    flights += post(list(packed.items()), list(landings.items()), group, operation)

    def finish() -> list[Tensor | None]:
        _ = given, packed  # must stay alive until they are sent
        counts = flags
        for peer, landing in landings.items():
            their = [torch.empty_like(each) for each in header]
            _unpack(landing, [*their, *(received[index][peer] for index in plan.packed)])
            counts = counts + their[0] if counts is not None else None
        results = [fold(pieces, op) for pieces in received]
        return _without_absent(results, present, None if group.simulated else counts)

    return Pending("reduce_scatter_many", group, flights, finish, operation.number)


def _scatter_natively(
    given: list[Tensor], sizes: Sizes, present: Sequence[bool] | None, group: Group, operation: Operation, op: str
) -> Pending[list[Tensor | None]]:
    """Reduce by the backend's reduce-scatter of equal pieces, to which uneven ones are padded."""
    flags = _flags(present, given[0].device)
    inputs, outputs, results = [], [], []
    for tensor, size in zip(given, sizes, strict=True):
        stacked = tensor.view(-1) if min(size) == max(size) else _padded(tensor, size)
        output = torch.empty(stacked.numel() // group.size, **like(tensor))
        shape = (size[group.rank], *tensor.shape[1:])
        results.append(output[: math.prod(shape)].view(shape))
        if tensor.numel():
            inputs.append(stacked)
            outputs.append(output)
    counts = None
    if flags is not None:  # every rank's piece is the whole list
        counts = torch.empty_like(flags)
        inputs.append(flags.repeat(group.size))
        outputs.append(counts)
    flights = _launch(lambda backend: _coalesced_scatter(backend, outputs, inputs, op), inputs, group, operation)

    def finish() -> list[Tensor | None]:
        _ = inputs  # must stay alive until they are sent
        reduced = [result.div_(group.size) for result in results] if op == "avg" else results
        return _without_absent(reduced, present, None if group.simulated else counts)

    return Pending("reduce_scatter_many", group, flights, finish, operation.number)


def _flags(present: Sequence[bool] | None, device: torch.device) -> Tensor | None:
    """Return which tensors are present, as integers on the device, without waiting for it if all are."""
    if present is None or not all(present):
        return None if present is None else torch.tensor(list(present), dtype=torch.int32, device=device)
    return torch.ones(len(present), dtype=torch.int32, device=device)


def _without_absent(
    results: list[Tensor], present: Sequence[bool] | None, counts: Tensor | None
) -> list[Tensor | None]:
    """Return the results, with None for tensors that no rank had; the counts are read only if one is absent here."""
    if present is None or all(present):
        return list(results)
    anywhere = present if counts is None else counts.tolist()
    return [result if is_present else None for result, is_present in zip(results, anywhere, strict=True)]


def _launch(call: Any, inputs: list[Tensor], group: Group, operation: Operation) -> list[Flight]:
    if not inputs:
        return []
    return native(lambda: call(group.process_group), group, operation, inputs[0])


def _coalesced_gather(backend: Any, outputs: list[Tensor], inputs: list[Tensor]) -> dist.Work:
    # torch 2.13 renamed it and warns about the old name.
    call = getattr(backend, "all_gather_single_coalesced", None) or backend.allgather_into_tensor_coalesced
    work: dist.Work = call(outputs, inputs)
    return work


def _coalesced_scatter(backend: Any, outputs: list[Tensor], inputs: list[Tensor], op: str) -> dist.Work:
    call = getattr(backend, "reduce_scatter_single_coalesced", None) or backend.reduce_scatter_tensor_coalesced
    options = dist.ReduceScatterOptions()
    options.reduceOp = NATIVE_OPERATIONS[op]  # type: ignore[assignment]  # torch's stub has the wrapper's type
    work: dist.Work = call(outputs, inputs, options)
    return work


def _padded(tensor: Tensor, size: tuple[int, ...]) -> Tensor:
    """Return the pieces of a tensor one after another, each padded with zeros to the largest.

    >>> _padded(torch.tensor([1, 2, 3]), (2, 1))
    tensor([1, 2, 3, 0])
    """
    stacked = torch.zeros((len(size), max(size), *tensor.shape[1:]), **like(tensor))
    for row, piece in zip(stacked, torch.split(tensor, list(size)), strict=True):
        row[: piece.shape[0]].copy_(piece)
    return stacked.view(-1)


def _landing(sizes: Sizes, plan: _Plan, rank: int, device: torch.device, header: int = 0) -> Tensor:
    """Return a buffer for one rank's packed pieces."""
    nbytes = sum(plan.rows[index] * sizes[index][rank] for index in plan.packed)
    return torch.empty(header + nbytes, dtype=torch.uint8, device=device)


def _pack(pieces: Sequence[Tensor]) -> Tensor:
    """Copy dense tensors, one after another, into one buffer of bytes."""
    if not pieces:
        return torch.empty(0, dtype=torch.uint8)
    return torch.cat([as_bytes(piece) for piece in pieces])


def _unpack(packed: Tensor, targets: Sequence[Tensor]) -> None:
    """Copy a buffer made by `_pack` into dense tensors."""
    for target, part in zip(targets, torch.split(packed, [target.nbytes for target in targets]), strict=True):
        as_bytes(target).copy_(part)


def _copy_all(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    for target, source in zip(targets, sources, strict=True):
        as_bytes(target).copy_(as_bytes(source))


def _shape(tensor: Tensor) -> tuple[int, ...]:
    return tuple(tensor.shape)


def _check_pieces(pieces: Sequence[Tensor], group: Group, sizes: Sequence[Sequence[int]] | None) -> Sizes:
    """Return the table of sizes; raise if it does not match the group or this rank's pieces."""
    _check_first_dimension("all_gather_many", pieces)
    if sizes is None:
        return tuple((piece.shape[0],) * group.size for piece in pieces)
    _check_table("all_gather_many", sizes, pieces, group)
    for index, (piece, size) in enumerate(zip(pieces, sizes, strict=True)):
        if size[group.rank] != piece.shape[0]:
            raise CollectiveArgumentError(
                f"all_gather_many: sizes {list(size)} of tensor {index} give rank {group.global_rank} extent "
                f"{size[group.rank]}, but its piece is {list(piece.shape)}"
            )
    return tuple(map(tuple, sizes))


def _check_tensors(
    tensors: Sequence[Tensor],
    group: Group,
    sizes: Sequence[Sequence[int]] | None,
    op: str,
    present: Sequence[bool] | None,
) -> Sizes:
    """Return the table of sizes; raise if the arguments do not match each other."""
    _check_first_dimension("reduce_scatter_many", tensors)
    for tensor in tensors:
        check(tensor.dtype, op)
    if present is not None and len(present) != len(tensors):
        raise CollectiveArgumentError(
            f"reduce_scatter_many: {len(present)} values in `present` for {len(tensors)} tensors"
        )
    if sizes is None:
        for index, tensor in enumerate(tensors):
            if tensor.shape[0] % group.size:
                raise CollectiveArgumentError(
                    f"reduce_scatter_many: the first dimension of tensor {index}, {list(tensor.shape)}, is not a "
                    f"multiple of {group.size}: pass sizes"
                )
        return tuple((tensor.shape[0] // group.size,) * group.size for tensor in tensors)
    _check_table("reduce_scatter_many", sizes, tensors, group)
    for index, (tensor, size) in enumerate(zip(tensors, sizes, strict=True)):
        if sum(size) != tensor.shape[0] or min(size) < 0:
            raise CollectiveArgumentError(
                f"reduce_scatter_many: sizes {list(size)} of tensor {index} add up to {sum(size)}, but its shape is "
                f"{list(tensor.shape)}"
            )
    return tuple(map(tuple, sizes))


def _check_first_dimension(kind: str, tensors: Sequence[Tensor]) -> None:
    for index, tensor in enumerate(tensors):
        if not tensor.dim():
            raise CollectiveArgumentError(f"{kind}: tensor {index} has no dimensions: pass it as one of shape [1]")
        if tensor.device != tensors[0].device:
            raise CollectiveArgumentError(
                f"{kind}: tensor {index} is on {tensor.device}, tensor 0 on {tensors[0].device}: they must agree"
            )


def _check_table(kind: str, sizes: Sequence[Sequence[int]], tensors: Sequence[Tensor], group: Group) -> None:
    if len(sizes) != len(tensors):
        raise CollectiveArgumentError(f"{kind}: sizes of {len(sizes)} tensors, got {len(tensors)} tensors")
    for size in sizes:
        if len(size) != group.size:
            raise CollectiveArgumentError(f"{kind}: {len(size)} sizes {list(size)} for a group of {group.size} ranks")
