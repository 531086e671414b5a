"""`ShardedTensorBase`: the state of a sharded tensor, and the attributes of a torch.Tensor.

It holds no values itself, only a list of local shards, which are ordinary tensors, and the metadata of all shards.
Gradients, storage and devices are those of the local shards.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import replace
from functools import cached_property
from typing import Any, Self

import torch
from torch import Tensor

from shardwright import comm
from shardwright.errors import ShardError, UnsupportedError
from shardwright.layout import RegionTable
from shardwright.sharded.base.registry import call
from shardwright.sharded.metadata.owners import moved_to, owner_in
from shardwright.sharded.metadata.shard import Shard
from shardwright.sharded.metadata.spec import ShardingSpec, infer_sharding_spec
from shardwright.sharded.metadata.tensor_metadata import ShardedTensorMetadata, ShardMetadata

__all__ = ["ShardedTensorBase"]


class ShardedTensorBase(Tensor):
    """The state of every sharded tensor: local shards, the metadata of all shards, a spec and a group of ranks.

    `size`, `shape`, `dtype` and so on describe the global tensor.

    >>> from shardwright import sharded
    >>> table = sharded.zeros(sharded.ChunkShardingSpec(0, ["rank:0/cpu"]), 4, 2)
    >>> isinstance(table, ShardedTensorBase), table.shape, table.metadata().size
    (True, torch.Size([4, 2]), torch.Size([4, 2]))
    """

    _metadata: ShardedTensorMetadata
    _spec: ShardingSpec | None
    _local_shards: list[Shard]
    _leaf: bool = True  # the same on all ranks, including those without shards
    _nested: bool = False  # True if any shard on any rank is itself sharded
    _group: comm.Group

    @classmethod
    def _wrap(cls, metadata: ShardedTensorMetadata, spec: ShardingSpec | None, local_shards: Sequence[Shard]) -> Self:
        """Create the tensor object. The shards and their metadata have been validated."""
        properties = metadata.tensor_properties
        tensor: Self = Tensor._make_wrapper_subclass(
            cls, metadata.size, dtype=properties.dtype, device=torch.device("cpu")
        )
        # No memory: make C++ code that bypasses the operator table raise an error instead of reading a null pointer.
        torch._C._set_throw_on_mutable_data_ptr(tensor)
        tensor._metadata, tensor._spec, tensor._local_shards = metadata, spec, list(local_shards)
        return tensor

    @classmethod
    def _bind(
        cls, metadata: ShardedTensorMetadata, spec: ShardingSpec | None, shards: Sequence[Shard], group: comm.Group
    ) -> Self:
        tensor = cls._wrap(metadata, spec, shards)
        tensor._group = group
        return tensor

    @cached_property
    def _table(self) -> RegionTable:
        """All shards as arrays, with their owners."""
        return self._metadata.table(owner_in(self._group))

    def _local_metadata(self) -> list[ShardMetadata]:
        """Return the metadata of this rank's shards."""
        rows = (self._table.ranks == self._group.global_rank).nonzero()[0].tolist()
        return [self._metadata.shards_metadata[row] for row in rows]

    @property
    def _process_group(self) -> Any:
        return self._group.process_group

    def local_shards(self) -> list[Shard]:
        """Return this rank's shards in the order of the metadata; an empty list if it holds none."""
        return self._local_shards

    def metadata(self) -> ShardedTensorMetadata:
        """Return the metadata: all shards with their owners, the size and the properties. The same on every rank."""
        return self._metadata

    def shards_metadata(self) -> list[ShardMetadata]:
        """Return the metadata of all shards."""
        return self._metadata.shards_metadata

    def sharding_spec(self) -> ShardingSpec:
        """Return the spec it was created with, or one inferred from its shards."""
        if self._spec is None:
            self._spec = infer_sharding_spec(self._metadata.shards_metadata, self._metadata.size)
        return self._spec

    def size(self, dim: int | None = None) -> Any:
        """Return the global size, or that of one dimension."""
        return self._metadata.size if dim is None else self._metadata.size[dim]

    def dim(self) -> int:
        """Return the number of dimensions."""
        return len(self._metadata.size)

    def numel(self) -> int:
        """Return the number of elements of the global tensor."""
        return self._metadata.size.numel()

    @property
    def shape(self) -> torch.Size:
        """The global size."""
        return self._metadata.size

    @property
    def ndim(self) -> int:
        """The number of dimensions."""
        return len(self._metadata.size)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of all shards."""
        return self._metadata.tensor_properties.dtype

    @property
    def layout(self) -> torch.layout:
        """torch's layout of all shards."""
        return self._metadata.tensor_properties.layout

    @property
    def device(self) -> torch.device:
        """The device of this rank's first shard, or of the first shard of the tensor if this rank has none."""
        if self._local_shards:
            return self._local_shards[0].tensor.device
        placements = [shard.placement for shard in self._metadata.shards_metadata if shard.placement is not None]
        return torch.device(placements[0].device().type) if placements else torch.device("cpu")

    @property
    def requires_grad(self) -> bool:
        """True if its shards require grad. The same on every rank."""
        return self._metadata.tensor_properties.requires_grad

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        self.requires_grad_(value)

    @property
    def is_leaf(self) -> bool:
        """True if its shards are leaves of the autograd graph. The same on every rank.

        On a rank without shards, a tensor created without communication (from local shards and known metadata, or from
        PyTorch's) counts as a leaf until the next `reshard`.
        """
        return self._leaf

    @property
    def grad_fn(self) -> None:
        """None: the local shards are in the autograd graph, not this object."""
        return None

    @property
    def grad(self) -> Self | None:
        """The gradients of the shards, as a tensor with the same sharding; None if no local shard has a gradient.

        If only some have one, the others are filled with zeros here; the shards themselves stay without gradient.
        """
        gradients_or_none = [shard.tensor.grad for shard in self._local_shards]
        first = next((gradient for gradient in gradients_or_none if gradient is not None), None)
        if first is None:
            return None
        gradients = [
            torch.zeros_like(shard.tensor, dtype=first.dtype, layout=first.layout, requires_grad=False)
            if gradient is None
            else gradient
            for gradient, shard in zip(gradients_or_none, self._local_shards, strict=True)
        ]
        result = self._with(gradients)
        result._metadata.tensor_properties.pin_memory = False  # autograd allocates gradients in pageable memory
        return result

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        if value is None:
            for shard in self._local_shards:
                shard.tensor.grad = None
            return
        if not isinstance(value, ShardedTensorBase) or not self._has_same_shards(value):
            raise ShardError(f"the gradient of {self!r} must be a ShardedTensor with the same sharding, got {value!r}")
        for shard, other in zip(self._local_shards, value._local_shards, strict=True):
            shard.tensor.grad = other.tensor

    @property
    def data(self) -> Self:
        """The same shards, detached. Assigning replaces the shards, as `module.to(...)` does.

        The new shards share memory with the assigned tensor, but not its autograd history.
        """
        return self.detach()

    @data.setter
    def data(self, value: Tensor) -> None:
        if not isinstance(value, ShardedTensorBase) or value.shape != self.shape:
            raise ShardError(f"the data of {self!r} must be a ShardedTensor of the same size, got {value!r}")
        wanted = self.requires_grad
        if wanted and not (value.dtype.is_floating_point or value.dtype.is_complex):
            raise ShardError(
                f"the data of {self!r}, which requires grad, cannot be {value.dtype}: only floating point and complex "
                "dtypes have gradients; call requires_grad_(False) first"
            )
        self._become(value.detach())
        self.requires_grad_(wanted)

    def requires_grad_(self, requires_grad: bool = True) -> Self:
        """Set requires_grad of all shards; call it with the same value on every rank."""
        for shard in self._local_shards:
            shard.tensor.requires_grad_(requires_grad)
        properties = replace(self._metadata.tensor_properties, requires_grad=requires_grad)
        self._metadata = replace(self._metadata, tensor_properties=properties)
        return self

    def detach(self) -> Self:
        """Return a tensor that shares memory with this one, without autograd history."""
        return self._with([shard.tensor.detach() for shard in self._local_shards])

    def clone(self, *, memory_format: torch.memory_format = torch.preserve_format) -> Self:
        """Return a copy."""
        shards = [shard.tensor.clone(memory_format=memory_format) for shard in self._local_shards]
        result = self._with(shards, requires_grad=self.requires_grad and torch.is_grad_enabled())
        result._metadata.tensor_properties.pin_memory = False  # as torch's clone
        if memory_format != torch.preserve_format:
            result._metadata.tensor_properties.memory_format = memory_format
        return result

    def _with(
        self,
        tensors: Sequence[Tensor],
        *,
        requires_grad: bool = False,
        dtype: torch.dtype | None = None,
        device: torch.device | None = None,
    ) -> Self:
        """Return a tensor with the same sharding and these local tensors, the results of an operator.

        `dtype` is used on ranks without shards. `device` is given if the results are on another device type than the
        placements say.
        """
        dtype = tensors[0].dtype if tensors else dtype or self.dtype
        layout = tensors[0].layout if tensors else self.layout
        properties = replace(self._metadata.tensor_properties, dtype=dtype, layout=layout, requires_grad=requires_grad)
        shards = [shard.metadata for shard in self._local_shards]
        metadata = replace(self._metadata, tensor_properties=properties)
        if device is not None:
            metadata.shards_metadata = moved_to(device, metadata.shards_metadata)
            shards = moved_to(device, shards)
        result = self._new_like(metadata, [Shard(tensor, shard) for tensor, shard in zip(tensors, shards, strict=True)])
        if device is not None:
            result._spec = None
        result._leaf = not requires_grad
        return result

    def _new_like(self, metadata: ShardedTensorMetadata, shards: Sequence[Shard]) -> Self:
        result = type(self)._bind(metadata, self._spec, shards, self._group)
        result._nested = self._nested
        if "_table" in self.__dict__ and metadata.shards_metadata is self._metadata.shards_metadata:
            result.__dict__["_table"] = self._table
        return result

    def _become(self, other: ShardedTensorBase) -> None:
        self._metadata, self._spec = other._metadata, other._spec
        self._local_shards, self._leaf, self._nested = list(other._local_shards), other._leaf, other._nested
        self._group = other._group
        self.__dict__.pop("_table", None)

    def _has_same_shards(self, other: ShardedTensorBase) -> bool:
        """True if both have the same boxes on the same ranks, in the same order."""
        own_shards, other_shards = self._metadata.shards_metadata, other._metadata.shards_metadata
        return own_shards is other_shards or (self.shape == other.shape and own_shards == other_shards)

    def __copy__(self) -> Self:
        """Return another object with the same shards, autograd history and group."""
        result = type(self)._wrap(self._metadata, self._spec, self._local_shards)
        result.__dict__.update({**self.__dict__, "_local_shards": list(self._local_shards)})
        return result

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Copy values and gradients, into pageable memory. Only leaves can be copied."""
        if not self.is_leaf:
            raise UnsupportedError(
                f"deepcopy of {self!r}: only leaf tensors support deepcopy; copy x.detach(), or use x.clone(), which "
                "is differentiable"
            )
        shards = [shard.tensor.detach().clone() for shard in self._local_shards]
        copied = self._with(shards)
        copied._metadata = deepcopy(copied._metadata, memo)
        copied._metadata.tensor_properties.pin_memory = False  # as torch's deepcopy
        copied.requires_grad_(self.requires_grad)
        for tensor, shard in zip(shards, self._local_shards, strict=True):
            gradient = shard.tensor.grad
            tensor.grad = None if gradient is None else gradient.detach().clone()
        if hasattr(self, "_is_param"):
            copied._is_param = True  # what makes isinstance(x, nn.Parameter) true
        memo[id(self)] = copied
        return copied

    def __repr__(self, *, tensor_contents: object = None) -> str:
        local = ", ".join(str(shard.metadata.region) for shard in self._local_shards)
        count = len(self._metadata.shards_metadata)
        return f"{type(self).__name__}({list(self.shape)}, {self.dtype}, {count} shards; here: {local or 'none'})"

    __str__ = __repr__

    def __format__(self, spec: str) -> str:
        return format(repr(self), spec)

    def __bool__(self) -> bool:
        raise UnsupportedError(
            f"the truth value of {self!r} is distributed over ranks: use torch.equal or torch.allclose, or gather it"
        )

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Dispatch torch functions: those that can be computed shard by shard are."""
        return call(func, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Refuse calls that bypassed the operator table: there are no values to compute with."""
        raise UnsupportedError(f"{func}: a ShardedTensor holds no values of its own; use its local_shards()")
