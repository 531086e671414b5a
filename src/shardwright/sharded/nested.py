"""Flatten ShardedTensors whose shards are themselves sharded into one list of boxes with global offsets.

FSDP over tensor parallelism creates them: each rank of an outer group holds a box, which is a ShardedTensor or DTensor
of an inner group. Together, the ranks of the outer group know all boxes of all inner tensors; ranks that share an inner
tensor describe the same boxes, which count once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from copy import copy
from typing import Any, NamedTuple, TypeAlias

import msgspec
from torch import Tensor

from shardwright import comm
from shardwright.errors import DisagreementError, LayoutError, ShardwrightError, TensorError, TilingError
from shardwright.sharded.build import LocalDescription, assemble
from shardwright.sharded.convert import from_dtensor
from shardwright.sharded.metadata.remote_device import RemoteDevice
from shardwright.sharded.metadata.shard import Shard
from shardwright.sharded.metadata.tensor_metadata import ShardMetadata
from shardwright.sharded.tensor import ShardedTensor
from shardwright.tensor import DTensor

__all__ = ["flatten_sharded_tensors"]

Flat: TypeAlias = dict[str, ShardedTensor | ShardwrightError]


class _Description(NamedTuple):
    """One rank's description of a tensor in its state."""

    local: LocalDescription
    nested: bool = False
    ranks: tuple[int, ...] = ()  # in the groups of the inner tensors


def flatten_sharded_tensors(state: Any) -> Any:
    """Return the state with nested ShardedTensors flattened: explicit shards with global offsets, not copied.

    Dicts, lists and tuples are traversed; those without nested tensors, and all other values, are returned unchanged.
    Collective over all ranks that share a ShardedTensor of the state, whether or not they hold a shard.

    >>> import torch
    >>> from shardwright import sharded
    >>> halves = [sharded.Shard.from_tensor_and_offsets(torch.ones(2), [row]) for row in (0, 2)]
    >>> inner = sharded.init_from_local_shards(halves, 4)
    >>> first = sharded.Shard.from_tensor_and_offsets(torch.zeros(3), [0])
    >>> outer = sharded.init_from_local_shards([first, sharded.Shard.from_tensor_and_offsets(inner, [3])], 7)
    >>> [str(shard.region) for shard in sharded.flatten_sharded_tensors({"w": outer})["w"].shards_metadata()]
    ['[0:3]', '[3:5]', '[5:7]']
    """
    flat = _flatten(dict(_sharded_tensors(state, "state")))
    for path, result in flat.items():
        if isinstance(result, ShardwrightError):
            raise type(result)(f"{path}: {result}") from result
    return _replaced(state, "state", flat)


def _sharded_tensors(value: Any, path: str) -> Iterator[tuple[str, ShardedTensor]]:
    if isinstance(value, ShardedTensor):
        yield path, value
    for key, item in _items(value):
        yield from _sharded_tensors(item, f"{path}[{key!r}]")


def _items(value: Any) -> list[tuple[Any, Any]]:
    if isinstance(value, dict):
        return list(value.items())
    return list(enumerate(value)) if isinstance(value, list | tuple) else []


def _replaced(value: Any, path: str, flat: Flat) -> Any:
    if isinstance(value, ShardedTensor):
        return flat.get(path, value)
    changed = {}
    for key, item in _items(value):
        new = _replaced(item, f"{path}[{key!r}]", flat)
        if new is not item:
            changed[key] = new
    if not changed:
        return value
    if isinstance(value, tuple):
        items = [changed.get(number, item) for number, item in enumerate(value)]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    result = copy(value)
    for key, new in changed.items():
        result[key] = new
    return result


def _flatten(tensors: Mapping[str, ShardedTensor]) -> Flat:
    """Return the tensors that are nested on any rank, flattened, or the error; the others are left out.

    Errors are kept as values until all groups have communicated: no rank may leave while another waits for it.
    """
    inner = _inner_tensors(tensors)
    flat_inner = (
        _flatten({key: value for key, value in inner.items() if isinstance(value, ShardedTensor)}) if inner else {}
    )
    inner |= flat_inner
    groups: dict[comm.Group, list[str]] = {}
    for path, tensor in tensors.items():
        groups.setdefault(tensor._group, []).append(path)
    flat: Flat = {}
    for group in sorted(groups, key=lambda group: group.ranks):  # in the same order on all ranks
        descriptions_here = {path: _describe(path, tensors[path], inner) for path in groups[group]}
        gathered = comm.gather_bytes(msgspec.json.encode(descriptions_here), group, what="flatten_sharded_tensors")
        states = [msgspec.json.decode(message, type=dict[str, _Description]) for message in gathered]
        for path in groups[group]:
            try:
                missing = [rank for rank, state in zip(group.ranks, states, strict=True) if path not in state]
                if missing:
                    raise DisagreementError(f"ranks {missing} have no such ShardedTensor in their state")
                if any(state[path].nested for state in states):
                    flat[path] = _assemble(path, tensors[path], [state[path] for state in states], inner)
            except (LayoutError, TensorError) as error:
                flat[path] = error
    return flat


def _inner_tensors(tensors: Mapping[str, ShardedTensor]) -> Flat:
    """Return the sharded shards of these tensors, by the path of the tensor and their box."""
    inner: Flat = {}
    for path, tensor in tensors.items():
        for shard in tensor.local_shards():
            try:
                if isinstance(shard.tensor, ShardedTensor):
                    inner[_key(path, shard)] = shard.tensor
                elif isinstance(shard.tensor, DTensor):
                    inner[_key(path, shard)] = from_dtensor(shard.tensor)
            except ShardwrightError as error:
                inner[_key(path, shard)] = error
    return inner


def _key(path: str, shard: Shard) -> str:
    return f"{path} {shard.metadata.region}"


def _describe(path: str, tensor: ShardedTensor, inner: Flat) -> _Description:
    """Describe the boxes that this rank knows: its own, and all boxes of its inner tensors."""
    rank = comm.rank()
    boxes: list[ShardMetadata] = []
    ranks: set[int] = set()
    nested, leaf, properties = False, tensor.is_leaf, None
    for shard in tensor.local_shards():
        within = inner.get(_key(path, shard))
        if isinstance(within, ShardwrightError):
            fault = f"rank {rank}, shard {shard.metadata.region}: {within}"
            return _Description(LocalDescription(rank, fault=fault), nested=True)
        if within is None:
            boxes.append(_placed(shard.metadata, rank))
            properties = tensor.metadata().tensor_properties
            continue
        nested, leaf = True, leaf and within.is_leaf
        ranks.update(within._group.ranks)
        properties = within.metadata().tensor_properties
        owners = within._table.ranks.tolist()
        for box, owner in zip(within.shards_metadata(), owners, strict=True):
            boxes.append(_placed(_within(box, shard.metadata), owner))
    encoded = None if properties is None else properties.to_json()
    local = LocalDescription(rank, tuple(tensor.shape), tuple(box.to_json() for box in boxes), encoded, leaf=leaf)
    return _Description(local, nested, tuple(sorted(ranks)))


def _within(box: ShardMetadata, outer: ShardMetadata) -> ShardMetadata:
    """Return a box of an inner tensor as a box of the outer tensor."""
    offsets = [a + b for a, b in zip(outer.shard_offsets, box.shard_offsets, strict=True)]
    return ShardMetadata(offsets, box.shard_sizes, box.placement)


def _placed(box: ShardMetadata, owner: int) -> ShardMetadata:
    device = "cpu" if box.placement is None else box.placement.device()
    return ShardMetadata(box.shard_offsets, box.shard_sizes, RemoteDevice.of(f"rank:{owner}/{device}"))


def _assemble(path: str, tensor: ShardedTensor, descriptions: list[_Description], inner: Flat) -> ShardedTensor:
    seen: set[ShardMetadata] = set()
    distinct = []
    for local in (description.local for description in descriptions):
        boxes = [ShardMetadata.from_json(value) for value in local.shards]
        distinct.append(local._replace(shards=tuple(box.to_json() for box in boxes if box not in seen)))
        seen.update(boxes)
    try:
        metadata = assemble(distinct)
    except TilingError as error:
        raise TilingError(f"its shards, including those of nested tensors, do not tile it: {error}") from None
    # Groups may list the boxes in different orders: sort them.
    metadata.shards_metadata.sort(key=lambda box: (box.shard_offsets, box.shard_sizes, str(box.placement)))
    members = sorted({*tensor._group.ranks, *(rank for description in descriptions for rank in description.ranks)})
    group = tensor._group if members == sorted(tensor._group.ranks) else comm.subgroup(members)
    result = ShardedTensor._bind(metadata, None, (), group)
    result._leaf = all(description.local.leaf for description in descriptions)
    pieces = dict(_pieces(path, tensor, inner))
    result._local_shards = [Shard(pieces[box], box) for box in result._local_metadata()]
    return result


def _pieces(path: str, tensor: ShardedTensor, inner: Flat) -> Iterator[tuple[ShardMetadata, Tensor]]:
    """Yield the plain tensors that this rank holds, with their global boxes."""
    for shard in tensor.local_shards():
        within = inner.get(_key(path, shard))
        if not isinstance(within, ShardedTensor):
            yield _placed(shard.metadata, comm.rank()), shard.tensor
            continue
        for piece in within.local_shards():
            yield _placed(_within(piece.metadata, shard.metadata), comm.rank()), piece.tensor
