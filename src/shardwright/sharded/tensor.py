"""`ShardedTensor`: a tensor as a list of explicit boxes on the ranks of a group."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor

from shardwright import comm, layout
from shardwright.errors import ArgumentTypeError, ShardError, UnsupportedError
from shardwright.layout.integers import integers
from shardwright.sharded.base.checks import check_kinds, check_shards, has_nested, refuse_nested
from shardwright.sharded.base.shardwise import empty_shard
from shardwright.sharded.base.tensor_base import ShardedTensorBase
from shardwright.sharded.metadata import process_group as current
from shardwright.sharded.metadata.digest import digest
from shardwright.sharded.metadata.owners import placed, same_device
from shardwright.sharded.metadata.properties import MEM_FORMAT_ENCODING, TensorProperties, empty_of
from shardwright.sharded.metadata.remote_device import RemoteDevice
from shardwright.sharded.metadata.shard import Shard
from shardwright.sharded.metadata.spec import (
    ChunkShardingSpec,
    EnumerableShardingSpec,
    LayoutShardingSpec,
    ShardingSpec,
    implement_shard,
    metadata_for,
)
from shardwright.sharded.metadata.tensor_metadata import ShardedTensorMetadata, ShardMetadata
from shardwright.sharded.transfer.gather import gather
from shardwright.sharded.transfer.remote_shards import RemoteShards, share_shards
from shardwright.sharded.transfer.reshard import reshard
from shardwright.sharded.transfer.scatter import scatter

__all__ = ["ShardedTensor"]


class ShardedTensor(ShardedTensorBase):
    """A tensor split into boxes; each rank of a group holds several, one or none of them.

    The constructor allocates uninitialised shards of a spec; the factories `zeros`, `ones`, `full`, `rand`, `randn`
    fill them, and `init_from_local_shards` uses existing shards. `gather`, `reshard`, comparisons and the sharded
    `linear`, `embedding` and `embedding_bag` are collective: all ranks of the group must call them.

    >>> from shardwright import sharded
    >>> table = sharded.ones(sharded.ChunkShardingSpec(0, ["rank:0/cpu", "rank:0/cpu"]), 5, 2)
    >>> [shard.tensor.shape for shard in table.local_shards()]
    [torch.Size([3, 2]), torch.Size([2, 2])]
    >>> table.gather().sum().item()
    10.0
    """

    _remote: RemoteShards | None = None

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
        if dtype is not None and not isinstance(dtype, torch.dtype):
            raise ArgumentTypeError(f"dtype must be a torch.dtype, got {dtype!r}")
        shape = integers(size[0] if len(size) == 1 and isinstance(size[0], Sequence) else size, "size")
        if layout != torch.strided:
            raise ShardError(f"layout must be torch.strided, got {layout}")
        if memory_format not in (torch.contiguous_format, torch.channels_last):
            raise ShardError(f"memory_format must be contiguous_format or channels_last, got {memory_format}")
        properties = TensorProperties(
            dtype or torch.get_default_dtype(), layout, requires_grad, memory_format, pin_memory
        )
        if requires_grad and not (properties.dtype.is_floating_point or properties.dtype.is_complex):
            raise ShardError(f"requires_grad=True needs a floating point or complex dtype, got {properties.dtype}")
        if memory_format == torch.channels_last and len(shape) != 4:
            raise ShardError(f"memory_format channels_last needs 4 dimensions, got size {list(shape)}")
        group = current.group_of(process_group)
        metadata = metadata_for(sharding_spec, shape, properties)
        if pin_memory:
            _check_pinning(metadata)
        tensor = cls._bind(metadata, sharding_spec, (), group)
        tensor._local_shards = [Shard(_allocate(shard, properties), shard) for shard in tensor._local_metadata()]
        if init_rrefs:
            tensor._remote = share_shards(tensor, group)
        return tensor

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
        """Return a ShardedTensor of these shards, with known metadata, without communication.

        Each rank validates its own shards. With `run_check` the call is collective: errors are raised on all ranks, and
        ranks without shards learn whether the tensor is a leaf.
        """
        group = current.group_of(process_group)

        def check() -> tuple[Self, str, bytes]:
            rank = group.global_rank
            if not isinstance(sharded_tensor_metadata, ShardedTensorMetadata):
                raise ArgumentTypeError(
                    f"expected a sharded.ShardedTensorMetadata, got {type(sharded_tensor_metadata).__name__}; convert "
                    "PyTorch's with shardwright.interop.from_torch_metadata"
                )
            sharded_tensor_metadata.validate()
            check_kinds(local_shards)
            check_shards(local_shards, rank, sharded_tensor_metadata.tensor_properties)
            tensor = cls._bind(sharded_tensor_metadata, sharding_spec, local_shards, group)
            passed, expected = [shard.metadata for shard in local_shards], tensor._local_metadata()
            if sorted(map(_key, passed)) != sorted(map(_key, expected)):
                raise ShardError(f"rank {rank} passed the shards {passed}, but the metadata says {expected}")
            _check_devices(local_shards, expected, rank)
            tensor._leaf, tensor._nested = all(shard.tensor.is_leaf for shard in local_shards), has_nested(local_shards)
            properties = sharded_tensor_metadata.tensor_properties
            description = f"{digest(tensor._table)} of size {list(sharded_tensor_metadata.size)}, {properties}"
            return tensor, description, f"{tensor._leaf} {tensor._nested}".encode()

        tensor: Self
        if run_check:
            tensor, flags = comm.agree(
                check, what="ShardedTensor from local shards", group=group, same=True, gather=True, unwrap=True
            )
            tensor._leaf = all(flag.startswith(b"True") for flag in flags)
            tensor._nested = any(flag.endswith(b"True") for flag in flags)
        else:
            tensor = check()[0]
        order = {_key(metadata): number for number, metadata in enumerate(tensor._local_metadata())}
        tensor._local_shards.sort(key=lambda shard: order[_key(shard.metadata)])
        if init_rrefs:
            tensor._remote = share_shards(tensor, group)
        return tensor

    @classmethod
    def _init_from_local_tensor(
        cls,
        local_tensor: Tensor,
        sharding_spec: ShardingSpec,
        *global_size: Any,
        process_group: Any = None,
        init_rrefs: bool = False,
    ) -> Self:
        """Return a ShardedTensor with this tensor as this rank's only shard. No copy, no communication."""
        size = integers(
            global_size[0] if len(global_size) == 1 and isinstance(global_size[0], Sequence) else global_size, "size"
        )
        group = current.group_of(process_group)
        properties = TensorProperties.create_from_tensor(local_tensor)
        metadata = metadata_for(sharding_spec, size, properties)
        shards = cls._bind(metadata, sharding_spec, (), group)._local_metadata()
        if len(shards) != 1:
            raise ShardError(
                f"rank {group.global_rank} has {len(shards)} shards under {sharding_spec}, expected exactly one: use "
                "init_from_local_shards"
            )
        if shards[0].shard_sizes != list(local_tensor.shape):
            raise ShardError(
                f"rank {group.global_rank}: the local tensor has size {list(local_tensor.shape)}, but the spec says "
                f"{shards[0].shard_sizes} at offsets {shards[0].shard_offsets}"
            )
        return cls._init_from_local_shards_and_global_metadata(
            [Shard(local_tensor, shards[0])], metadata, group.process_group, init_rrefs, sharding_spec
        )

    def local_tensor(self) -> Tensor:
        """Return the tensor of this rank's only shard; raise if it has several or none."""
        if len(self._local_shards) != 1:
            raise UnsupportedError(
                f"local_tensor of {self!r}: rank {self._group.global_rank} has {len(self._local_shards)} "
                "shards, expected exactly one: use local_shards()"
            )
        return self._local_shards[0].tensor

    def gather(
        self,
        dst: int = 0,
        out: Tensor | None = None,
        enforce_dtype: bool = False,
        dtype: torch.dtype | None = None,
    ) -> Tensor | None:
        """Return the global tensor on rank `dst`, None on the others. Collective.

        `out`, a plain tensor passed on `dst` only, is filled if given; otherwise a new tensor is returned, converted to
        `dtype` if given. With `enforce_dtype`, `out` must have the dtype of this tensor; otherwise values are
        converted.

        >>> from shardwright import sharded
        >>> sharded.ones(sharded.ChunkShardingSpec(0, ["rank:0/cpu"]), 2).gather(dtype=torch.int64)
        tensor([1, 1])
        """
        return gather(self, dst, out, enforce_dtype=enforce_dtype, dtype=dtype)

    def reshard(self, resharding_spec: ShardingSpec) -> Self:
        """Replace the shards by those of the spec, in place, and return this tensor. Collective.

        Each rank receives only what it lacks. Leaf shards become new leaves without gradients; otherwise gradients flow
        back. Under `no_grad`, shards with autograd history become shards that do not require grad. The memory format is
        kept, and so is pinning of shards in host memory. If the tensor already has this sharding and these placements,
        nothing changes, and the shards keep their gradients and history.

        >>> from shardwright import sharded
        >>> table = sharded.ones(sharded.ChunkShardingSpec(0, ["rank:0/cpu"]), 4)
        >>> len(table.reshard(sharded.ChunkShardingSpec(0, ["rank:0/cpu"] * 2)).local_shards())
        2
        """
        reshard(self, resharding_spec)
        return self

    def remote_shards(self) -> dict[int, list[Any]]:
        """Return RRefs of the other ranks' shards, by rank; `ref.to_here()` fetches one. Needs `init_rrefs=True`.

        `torch.distributed.rpc` must be running on all ranks of the group before the tensor is created.
        """
        if self._remote is None:
            raise UnsupportedError(
                f"remote_shards of {self!r}: it was created without RRefs; create it with init_rrefs=True, after "
                "torch.distributed.rpc.init_rpc"
            )
        return self._remote.references(self)

    def cpu(self, memory_format: torch.memory_format = torch.preserve_format, process_group: Any = None) -> Self:
        """Return the tensor with its shards in host memory; itself if they are there already."""
        return self.to("cpu", memory_format=memory_format, process_group=process_group)

    def cuda(
        self,
        device: Any = None,
        non_blocking: bool = False,
        memory_format: torch.memory_format = torch.preserve_format,
        process_group: Any = None,
    ) -> Self:
        """Return the tensor with its shards on this rank's GPU, and with another `process_group` if given."""
        target = torch.device("cuda", torch.cuda.current_device()) if device is None else torch.device(device)
        return self.to(target, non_blocking=non_blocking, memory_format=memory_format, process_group=process_group)

    def to(self, *args: Any, process_group: Any = None, **kwargs: Any) -> Self:
        """Return the tensor on another device or with another dtype, as `Tensor.to`; itself if nothing changes.

        Every rank moves its own shards, to its current GPU unless the device has an index. A change of dtype keeps all
        placements. A change of device changes the device type in all placements, and the index only for this rank's
        own shards, as other ranks may use another one.

        >>> from shardwright import sharded
        >>> sharded.ones(sharded.ChunkShardingSpec(0, ["rank:0/cpu"]), 2).to(torch.float64).dtype
        torch.float64
        """
        refuse_nested(self, "to")
        args = tuple(empty_shard(arg) if isinstance(arg, ShardedTensorBase) else arg for arg in args)
        kwargs = {name: empty_shard(arg) if isinstance(arg, ShardedTensorBase) else arg for name, arg in kwargs.items()}
        tensors = [shard.tensor.to(*args, **kwargs) for shard in self._local_shards]
        # A rank without shards uses an empty tensor and the metadata, to arrive at the same result.
        blank = torch.empty([0] * self.ndim, dtype=self.dtype, device=self.device)
        example = blank.to(*args, **{name: value for name, value in kwargs.items() if name != "memory_format"})
        current = self._metadata.tensor_properties
        memory_format = kwargs.get("memory_format", torch.preserve_format)
        unchanged = example is blank and memory_format in (torch.preserve_format, current.memory_format)
        unchanged = unchanged and all(
            new is shard.tensor for new, shard in zip(tensors, self._local_shards, strict=True)
        )
        device = _device_argument(args, kwargs)
        shards = self._metadata.shards_metadata if device is None else self._placed_on(device, tensors)
        unchanged = unchanged and _device_types(shards) == _device_types(self._metadata.shards_metadata)
        if unchanged and process_group is None:
            return self
        group = self._group if process_group is None else comm.Group.of(process_group)
        properties = replace(
            current,
            dtype=example.dtype,
            memory_format=current.memory_format if memory_format == torch.preserve_format else memory_format,
            requires_grad=self.requires_grad
            and (example.dtype.is_floating_point or example.dtype.is_complex)
            and (unchanged or torch.is_grad_enabled()),
            pin_memory=current.pin_memory and unchanged,
        )
        metadata = ShardedTensorMetadata(shards, self.shape, properties)
        spec = self._spec if shards is self._metadata.shards_metadata else None
        result = type(self)._bind(metadata, spec, (), group)
        result._local_shards = [
            Shard(tensor, shard) for tensor, shard in zip(tensors, result._local_metadata(), strict=True)
        ]
        result._leaf = not properties.requires_grad or (self._leaf and unchanged)
        return result

    def _placed_on(self, device: torch.device, tensors: Sequence[Tensor]) -> list[ShardMetadata]:
        """Return the metadata of all shards after every rank has moved its own to this device."""
        device_type = torch.device(device.type)
        local_rows = (self._table.ranks == self._group.global_rank).nonzero()[0].tolist()
        shards = []
        for shard in self._metadata.shards_metadata:
            current = None if shard.placement is None else shard.placement.device()
            stays = current is None or current in (device, device_type)
            shards.append(shard if stays else placed(shard, device_type))
        for number, tensor in zip(local_rows, tensors, strict=True):
            old = self._metadata.shards_metadata[number]
            stays = old.placement is None or same_device(old.placement.device(), tensor.device)
            shards[number] = old if stays else placed(old, tensor.device)
        unchanged = all(new is old for new, old in zip(shards, self._metadata.shards_metadata, strict=True))
        return self._metadata.shards_metadata if unchanged else shards

    def __copy__(self) -> Self:
        result = super().__copy__()
        result._remote = None  # the RRefs belong to the original
        return result

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
    """Unpickle a ShardedTensor and bind it to the current process group."""
    tensor = ShardedTensor._bind(metadata, spec, shards, state.find())
    if is_parameter:
        tensor._is_param = True  # makes isinstance(x, nn.Parameter) true
    return tensor


implement_shard(partial(scatter, ShardedTensor))

# torch.load with weights_only=True accepts only registered classes: these are plain values.
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
    return empty_of(properties, shard.shard_sizes, device).requires_grad_(properties.requires_grad)


def _check_pinning(metadata: ShardedTensorMetadata) -> None:
    if not torch.accelerator.is_available():
        raise UnsupportedError("pin_memory=True needs an accelerator, and none is available")
    for shard in metadata.shards_metadata:
        if shard.placement is not None and shard.placement.device().type != "cpu":
            raise ShardError(
                f"pin_memory=True needs shards in host memory, but shard {shard.region} is on {shard.placement}"
            )


def _check_devices(shards: Sequence[Shard], expected: Sequence[ShardMetadata], rank: int) -> None:
    """Raise unless the tensors are on the devices that the global metadata says."""
    tensors = {_key(shard.metadata): shard.tensor for shard in shards}
    for shard in expected:
        device = tensors[_key(shard)].device
        if shard.placement is not None and not same_device(shard.placement.device(), device):
            raise ShardError(
                f"rank {rank}: the shard {shard.region} is on {device}, but its placement is {shard.placement}"
            )


def _device_argument(args: Sequence[Any], kwargs: dict[str, Any]) -> torch.device | None:
    """Return the device among the arguments of `to`, or None."""
    for value in (*args[:1], kwargs.get("device"), kwargs.get("other")):
        if isinstance(value, Tensor):
            return value.device
        if isinstance(value, str | int | torch.device) and not isinstance(value, bool):  # a bool is non_blocking
            return torch.device(value)
    return None


def _device_types(shards: Sequence[ShardMetadata]) -> list[str | None]:
    return [None if shard.placement is None else shard.placement.device().type for shard in shards]


def _key(shard: ShardMetadata) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return tuple(shard.shard_offsets), tuple(shard.shard_sizes)
