"""`ShardedTensor`: a tensor as explicit boxes on the ranks of a group, any number on each."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import replace
from functools import cached_property
from typing import Any, Self

import torch
from torch import Tensor

from shardwright import comm, layout
from shardwright.errors import ShardError, UnsupportedError
from shardwright.layout import RegionTable
from shardwright.layout.integers import integers
from shardwright.sharded import process_group as current
from shardwright.sharded.agreement import digest, together
from shardwright.sharded.base import ShardedTensorBase
from shardwright.sharded.checks import check_shards
from shardwright.sharded.gather import gather
from shardwright.sharded.metadata import ShardedTensorMetadata, ShardMetadata
from shardwright.sharded.owners import owner_in
from shardwright.sharded.properties import MEM_FORMAT_ENCODING, TensorProperties
from shardwright.sharded.remote import RemoteShards, offer
from shardwright.sharded.remote_device import RemoteDevice
from shardwright.sharded.reshard import reshard
from shardwright.sharded.shard import Shard
from shardwright.sharded.spec import (
    ChunkShardingSpec,
    EnumerableShardingSpec,
    LayoutShardingSpec,
    ShardingSpec,
    metadata_for,
)

__all__ = ["ShardedTensor"]


class ShardedTensor(ShardedTensorBase):
    """A tensor cut into boxes that ranks of a group hold: several, one or none each.

    Made with a spec it is not initialised; the factories `zeros`, `ones`, `full`, `rand`, `randn` fill it, and
    `init_from_local_shards` takes the shards you have. `gather`, `reshard`, comparing and the sharded `linear`,
    `embedding` and `embedding_bag` are collective: all ranks of the group call them alike.

    >>> from shardwright import sharded
    >>> table = sharded.ones(sharded.ChunkShardingSpec(0, ["rank:0/cpu", "rank:0/cpu"]), 5, 2)
    >>> [shard.tensor.shape for shard in table.local_shards()]
    [torch.Size([3, 2]), torch.Size([2, 2])]
    >>> table.gather().sum().item()
    10.0
    """

    _group: comm.Group
    _remote: RemoteShards | None

    def __new__(
        cls,
        sharding_spec: ShardingSpec,
        *size: Any,
        dtype: torch.dtype | None = None,
        layout: torch.layout = torch.strided,
        requires_grad: bool = False,
        pin_memory: bool = False,
        memory_format: torch.memory_format = torch.contiguous_format,
        process_group: Any = None,
        init_rrefs: bool = False,
    ) -> Self:
        shape = integers(size[0] if len(size) == 1 and isinstance(size[0], Sequence) else size, "size")
        if layout != torch.strided:
            raise ShardError(f"layout {layout}: the shards of a ShardedTensor are torch.strided")
        if memory_format not in (torch.contiguous_format, torch.channels_last):
            raise ShardError(f"memory format {memory_format}: new shards are contiguous_format or channels_last")
        properties = TensorProperties(
            dtype or torch.get_default_dtype(), layout, requires_grad, memory_format, pin_memory
        )
        if requires_grad and not (properties.dtype.is_floating_point or properties.dtype.is_complex):
            raise ShardError(f"requires_grad with {properties.dtype}: only floating point and complex have gradients")
        if memory_format == torch.channels_last and len(shape) != 4:
            raise ShardError(f"memory format channels_last with size {list(shape)}: it needs 4 dimensions")
        group = current.group_of(process_group)
        made = cls._bind(metadata_for(sharding_spec, shape, properties), sharding_spec, (), group)
        made._local_shards = [Shard(_allocate(shard, properties), shard) for shard in made._own()]
        if init_rrefs:
            made._remote = offer(made, group)
        return made

    @classmethod
    def _bind(
        cls, metadata: ShardedTensorMetadata, spec: ShardingSpec | None, shards: Sequence[Shard], group: comm.Group
    ) -> Self:
        made = cls._wrap(metadata, spec, shards)
        made._group, made._remote = group, None
        return made

    @classmethod
    def _init_from_local_shards_and_global_metadata(
        cls,
        local_shards: Sequence[Shard],
        sharded_tensor_metadata: ShardedTensorMetadata,
        process_group: Any = None,
        init_rrefs: bool = False,
        sharding_spec: ShardingSpec | None = None,
        *,
        run_check: bool = False,
    ) -> Self:
        """A ShardedTensor of these shards, with the metadata all ranks know already: ranks do not talk.

        Each rank checks its own shards; with `run_check` they tell each other, and a mistake is raised on all.
        """
        group = current.group_of(process_group)
        made = cls._bind(sharded_tensor_metadata, sharding_spec, local_shards, group)

        def check() -> tuple[None, str]:
            rank = group.ranks[group.rank]
            sharded_tensor_metadata.validate()
            check_shards(local_shards, rank, sharded_tensor_metadata.tensor_properties)
            given, due = [shard.metadata for shard in local_shards], made._own()
            if sorted(map(_key, given)) != sorted(map(_key, due)):
                raise ShardError(f"rank {rank} gave the shards {given}, and the metadata gives it {due}")
            properties = sharded_tensor_metadata.tensor_properties
            return None, f"{digest(made._table)} of size {list(sharded_tensor_metadata.size)}, {properties}"

        if run_check:
            together(check, "making a ShardedTensor of local shards", group)
        else:
            check()
        order = {_key(metadata): number for number, metadata in enumerate(made._own())}
        made._local_shards.sort(key=lambda shard: order[_key(shard.metadata)])
        if init_rrefs:
            made._remote = offer(made, group)
        return made

    @classmethod
    def _init_from_local_tensor(
        cls,
        local_tensor: Tensor,
        sharding_spec: ShardingSpec,
        *global_size: Any,
        process_group: Any = None,
        init_rrefs: bool = False,
    ) -> Self:
        """A ShardedTensor in which this tensor is the one shard that the spec gives this rank: no copy, no talk."""
        size = integers(
            global_size[0] if len(global_size) == 1 and isinstance(global_size[0], Sequence) else global_size, "size"
        )
        group = current.group_of(process_group)
        properties = TensorProperties.create_from_tensor(local_tensor)
        metadata = metadata_for(sharding_spec, size, properties)
        own = cls._bind(metadata, sharding_spec, (), group)._own()
        if len(own) != 1:
            raise ShardError(
                f"rank {group.ranks[group.rank]} holds {len(own)} shards under {sharding_spec}: one local tensor is "
                "one shard; use init_from_local_shards"
            )
        if own[0].shard_sizes != list(local_tensor.shape):
            raise ShardError(
                f"rank {group.ranks[group.rank]}: a local tensor of size {list(local_tensor.shape)} for shard sizes "
                f"{own[0].shard_sizes} at offsets {own[0].shard_offsets}"
            )
        return cls._init_from_local_shards_and_global_metadata(
            [Shard(local_tensor, own[0])], metadata, group.process_group, init_rrefs, sharding_spec
        )

    @cached_property
    def _table(self) -> RegionTable:
        """All shards as arrays, with the ranks that own them."""
        return self._metadata.table(owner_in(self._group))

    def _own(self) -> list[ShardMetadata]:
        """The metadata of this rank's shards."""
        mine = (self._table.ranks == self._group.ranks[self._group.rank]).nonzero()[0].tolist()
        return [self._metadata.shards_metadata[number] for number in mine]

    @property
    def _process_group(self) -> Any:
        return self._group.process_group

    def local_tensor(self) -> Tensor:
        """The tensor of this rank's only shard; with several or none it says so."""
        if len(self._local_shards) != 1:
            raise UnsupportedError(
                f"local_tensor of {self!r}: rank {self._group.ranks[self._group.rank]} holds {len(self._local_shards)} "
                "shards, not one: use local_shards()"
            )
        return self._local_shards[0].tensor

    def gather(
        self,
        dst: int = 0,
        out: Tensor | None = None,
        enforce_dtype: bool = False,
        dtype: torch.dtype | None = None,
    ) -> Tensor | None:
        """The whole tensor on the rank `dst`, None on the others. All ranks of the group call it.

        `out`, given on `dst` only, is filled; else a tensor is made, of `dtype` if that is given. With
        `enforce_dtype`, an `out` of another dtype is refused; without, values are converted.

        >>> from shardwright import sharded
        >>> sharded.ones(sharded.ChunkShardingSpec(0, ["rank:0/cpu"]), 2).gather(dtype=torch.int64)
        tensor([1, 1])
        """
        return gather(self, dst, out, enforce_dtype=enforce_dtype, dtype=dtype)

    def reshard(self, resharding_spec: ShardingSpec) -> Self:
        """This tensor itself, cut as the spec says: its shards are replaced, moving only what a rank lacks.

        Shards that are leaves become new leaves without gradients; where they have a history, gradients flow back.

        >>> from shardwright import sharded
        >>> table = sharded.ones(sharded.ChunkShardingSpec(0, ["rank:0/cpu"]), 4)
        >>> len(table.reshard(sharded.ChunkShardingSpec(0, ["rank:0/cpu"] * 2)).local_shards())
        2
        """
        reshard(self, resharding_spec)
        return self

    def remote_shards(self) -> dict[int, list[Any]]:
        """For each other rank, RRefs of its shards: `ref.to_here()` fetches one. It needs `init_rrefs=True`.

        `torch.distributed.rpc` must be running on all ranks of the group, before the tensor is made.
        """
        if self._remote is None:
            raise UnsupportedError(
                f"remote_shards of {self!r}: it was made without RRefs; make it with init_rrefs=True, after "
                "torch.distributed.rpc.init_rpc"
            )
        return self._remote.references(self)

    def cpu(self, memory_format: torch.memory_format = torch.preserve_format, process_group: Any = None) -> Self:
        """The tensor with its shards in host memory: itself where they are there already."""
        return self.to("cpu", memory_format=memory_format, process_group=process_group)

    def cuda(
        self,
        device: Any = None,
        non_blocking: bool = False,
        memory_format: torch.memory_format = torch.preserve_format,
        process_group: Any = None,
    ) -> Self:
        """The tensor with its shards on this rank's GPU; give a `process_group` that moves GPU memory, where needed."""
        where = torch.device("cuda", torch.cuda.current_device()) if device is None else torch.device(device)
        return self.to(where, non_blocking=non_blocking, memory_format=memory_format, process_group=process_group)

    def to(self, *args: Any, process_group: Any = None, **kwargs: Any) -> Self:
        """The tensor on another device, or of another dtype, as `Tensor.to`; itself where nothing changes.

        Every rank moves its own shards; on a GPU, to its current one, unless the device has a number.

        >>> from shardwright import sharded
        >>> sharded.ones(sharded.ChunkShardingSpec(0, ["rank:0/cpu"]), 2).to(torch.float64).dtype
        torch.float64
        """
        args = tuple(_sample(arg) if isinstance(arg, ShardedTensorBase) else arg for arg in args)
        tensors = [shard.tensor.to(*args, **kwargs) for shard in self._local_shards]
        # A rank without shards must find what the others find: by an empty tensor, and by the metadata.
        blank = torch.empty([0] * self.ndim, dtype=self.dtype, device=self.device)
        example = blank.to(*args, **{name: value for name, value in kwargs.items() if name != "memory_format"})
        known, wanted = self._metadata.tensor_properties, kwargs.get("memory_format", torch.preserve_format)
        kept = example is blank and wanted in (torch.preserve_format, known.memory_format)
        kept = kept and all(new is shard.tensor for new, shard in zip(tensors, self._local_shards, strict=True))
        device = tensors[0].device if tensors else example.device
        if kept and process_group is None:
            return self
        group = self._group if process_group is None else comm.Group.of(process_group)
        shards = [_moved(shard, device) for shard in self._metadata.shards_metadata]
        mine = iter(tensors)
        placed = dict(zip(map(_key, self._own()), mine, strict=True))
        properties = replace(
            known,
            dtype=example.dtype,
            memory_format=known.memory_format if wanted == torch.preserve_format else wanted,
            requires_grad=self.requires_grad
            and (example.dtype.is_floating_point or example.dtype.is_complex)
            and (kept or torch.is_grad_enabled()),
            pin_memory=known.pin_memory and kept,
        )
        metadata = ShardedTensorMetadata(shards, self.shape, properties)
        made = type(self)._bind(metadata, None, (), group)
        made._local_shards = [Shard(placed[_key(shard)], shard) for shard in made._own()]
        made._leaf = not properties.requires_grad or (self._leaf and kept)
        return made

    def _made_like(self, metadata: ShardedTensorMetadata, shards: Sequence[Shard]) -> Self:
        made = type(self)._bind(metadata, self._spec, shards, self._group)
        if "_table" in self.__dict__ and metadata.shards_metadata is self._metadata.shards_metadata:
            made.__dict__["_table"] = self._table
        return made

    def _become(self, other: ShardedTensorBase) -> None:
        super()._become(other)
        self.__dict__.pop("_table", None)
        if isinstance(other, ShardedTensor):
            self._group = other._group

    def __reduce_ex__(self, protocol: Any) -> Any:
        state = current.State.of(self._group)
        return _rebuild, (self._local_shards, self._metadata, self._spec, state, hasattr(self, "_is_param"))


def _rebuild(
    shards: list[Shard],
    metadata: ShardedTensorMetadata,
    spec: ShardingSpec | None,
    state: current.State,
    is_parameter: bool,
) -> ShardedTensor:
    """A ShardedTensor from what pickle holds of it, bound to the process group of the place that loads it."""
    made = ShardedTensor._bind(metadata, spec, shards, state.find())
    if is_parameter:
        made._is_param = True  # what makes isinstance(x, nn.Parameter) true
    return made


# torch.load with weights_only=True makes only what it was told is safe: these are values, and make nothing else.
torch.serialization.add_safe_globals(
    [
        _rebuild,
        current.State,
        Shard,
        ShardMetadata,
        ShardedTensorMetadata,
        TensorProperties,
        MEM_FORMAT_ENCODING,
        RemoteDevice,
        ChunkShardingSpec,
        EnumerableShardingSpec,
        LayoutShardingSpec,
        layout.Mesh,
        layout.Shard,
        layout.Ragged,
        layout.Replicate,
    ]
)


def _allocate(shard: ShardMetadata, properties: TensorProperties) -> Tensor:
    device = torch.device("cpu") if shard.placement is None else shard.placement.device()
    return torch.empty(
        shard.shard_sizes,
        dtype=properties.dtype,
        device=device,
        requires_grad=properties.requires_grad,
        pin_memory=properties.pin_memory,
        memory_format=properties.memory_format,
    )


def _moved(shard: ShardMetadata, device: torch.device) -> ShardMetadata:
    if shard.placement is None or shard.placement.device() == device:
        return shard
    moved = copy(shard)
    moved.placement = shard.placement.on(device)
    return moved


def _sample(tensor: ShardedTensorBase) -> Tensor:
    """A plain tensor with the dtype and device of a ShardedTensor, for `x.to(other)`."""
    return torch.empty(0, dtype=tensor.dtype, device=tensor.device)


def _key(shard: ShardMetadata) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return tuple(shard.shard_offsets), tuple(shard.shard_sizes)
