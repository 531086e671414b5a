"""Sharded tensors whose shards are sharded again, made flat: one list of boxes with offsets in the whole tensor.

Fully sharded training over tensor parallelism makes them: each rank of an outer group holds a box, and that box is a
ShardedTensor or a DTensor of an inner group. All that the ranks of the outer group know of their inner tensors adds up
to every box there is; those who hold one inner tensor say the same of it, and count once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from copy import copy
from typing import Any, NamedTuple, TypeAlias

import msgspec
from torch import Tensor

from shardwright import comm
from shardwright.errors import DisagreementError, LayoutError, ShardwrightError, TensorError, TilingError
from shardwright.sharded.build import Said, assemble
from shardwright.sharded.convert import from_dtensor
from shardwright.sharded.metadata.remote_device import RemoteDevice
from shardwright.sharded.metadata.shard import Shard
from shardwright.sharded.metadata.tensor_metadata import ShardMetadata
from shardwright.sharded.tensor import ShardedTensor
from shardwright.tensor import DTensor

__all__ = ["flatten_sharded_tensors"]

Flat: TypeAlias = dict[str, ShardedTensor | ShardwrightError]


class _Told(NamedTuple):
    """What one rank says of a tensor of its state."""

    said: Said
    nested: bool = False
    ranks: tuple[int, ...] = ()  # of the groups of the inner tensors


def flatten_sharded_tensors(state: Any) -> Any:
    """The state with its nested ShardedTensors made flat: explicit shards, with offsets in the whole; not copied.

    Dicts, lists and tuples are looked through. Where nothing in them is nested, they are returned as they are, as is
    everything else. All ranks that share a ShardedTensor of the state call it, whether or not they hold a part.

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
    for path, made in flat.items():
        if isinstance(made, ShardwrightError):
            raise type(made)(f"{path}: {made}") from made
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
    made = copy(value)
    for key, new in changed.items():
        made[key] = new
    return made


def _flatten(found: Mapping[str, ShardedTensor]) -> Flat:
    """The tensors that are nested on any rank, flat, or what is wrong with them; the others are left out.

    A mistake is a value until all groups have spoken: no rank may leave while another waits for its word.
    """
    inner = _inner_tensors(found)
    flat_inner = _flatten({key: one for key, one in inner.items() if isinstance(one, ShardedTensor)}) if inner else {}
    inner |= flat_inner
    groups: dict[comm.Group, list[str]] = {}
    for path, tensor in found.items():
        groups.setdefault(tensor._group, []).append(path)
    flat: Flat = {}
    for group in sorted(groups, key=lambda group: group.ranks):  # in the same order on all ranks
        own = {path: _tell(path, found[path], inner) for path in groups[group]}
        said = comm.gather_bytes(msgspec.json.encode(own), group, what="flatten_sharded_tensors")
        told = [msgspec.json.decode(one, type=dict[str, _Told]) for one in said]
        for path in groups[group]:
            try:
                missing = [rank for rank, one in zip(group.ranks, told, strict=True) if path not in one]
                if missing:
                    raise DisagreementError(f"ranks {missing} have no such ShardedTensor in their state")
                if any(one[path].nested for one in told):
                    flat[path] = _assemble(path, found[path], [one[path] for one in told], inner)
            except (LayoutError, TensorError) as error:
                flat[path] = error
    return flat


def _inner_tensors(found: Mapping[str, ShardedTensor]) -> Flat:
    """The tensors that are shards of these, by the path of the tensor and the box they are in it."""
    inner: Flat = {}
    for path, tensor in found.items():
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


def _tell(path: str, tensor: ShardedTensor, inner: Flat) -> _Told:
    """What this rank knows of the tensor's boxes: its own, and all those of its inner tensors."""
    rank = comm.rank()
    boxes: list[ShardMetadata] = []
    ranks: set[int] = set()
    nested, leaf, properties = False, tensor.is_leaf, None
    for shard in tensor.local_shards():
        within = inner.get(_key(path, shard))
        if isinstance(within, ShardwrightError):
            return _Told(Said(rank, fault=f"rank {rank}, shard {shard.metadata.region}: {within}"), nested=True)
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
    told = None if properties is None else properties.to_json()
    said = Said(rank, tuple(tensor.shape), tuple(box.to_json() for box in boxes), told, leaf=leaf)
    return _Told(said, nested, tuple(sorted(ranks)))


def _within(box: ShardMetadata, outer: ShardMetadata) -> ShardMetadata:
    """A box of an inner tensor as a box of the outer one."""
    offsets = [a + b for a, b in zip(outer.shard_offsets, box.shard_offsets, strict=True)]
    return ShardMetadata(offsets, box.shard_sizes, box.placement)


def _placed(box: ShardMetadata, owner: int) -> ShardMetadata:
    device = "cpu" if box.placement is None else box.placement.device()
    return ShardMetadata(box.shard_offsets, box.shard_sizes, RemoteDevice.of(f"rank:{owner}/{device}"))


def _assemble(path: str, tensor: ShardedTensor, told: list[_Told], inner: Flat) -> ShardedTensor:
    seen: set[ShardMetadata] = set()
    said = []
    for one in told:
        boxes = [ShardMetadata.from_json(value) for value in one.said.shards]
        said.append(one.said._replace(shards=tuple(box.to_json() for box in boxes if box not in seen)))
        seen.update(boxes)
    try:
        metadata = assemble(said)
    except TilingError as error:
        raise TilingError(f"its shards, with those of the tensors in them, do not tile it: {error}") from None
    # Groups that hold the tensor between them may list it in different orders: here is the one of all.
    metadata.shards_metadata.sort(key=lambda box: (box.shard_offsets, box.shard_sizes, str(box.placement)))
    members = sorted({*tensor._group.ranks, *(rank for one in told for rank in one.ranks)})
    group = tensor._group if members == sorted(tensor._group.ranks) else comm.subgroup(members)
    made = ShardedTensor._bind(metadata, None, (), group)
    made._leaf = all(one.said.leaf for one in told)
    pieces = dict(_pieces(path, tensor, inner))
    made._local_shards = [Shard(pieces[box], box) for box in made._own()]
    return made


def _pieces(path: str, tensor: ShardedTensor, inner: Flat) -> Iterator[tuple[ShardMetadata, Tensor]]:
    """The plain tensors that this rank holds, by what they are in the whole tensor."""
    for shard in tensor.local_shards():
        within = inner.get(_key(path, shard))
        if not isinstance(within, ShardedTensor):
            yield _placed(shard.metadata, comm.rank()), shard.tensor
            continue
        for piece in within.local_shards():
            yield _placed(_within(piece.metadata, shard.metadata), comm.rank()), piece.tensor
