"""`ShardedTensorBase`: what every sharded tensor has, and the attributes by which it passes for a torch.Tensor.

It holds no values itself: it is a list of local shards, which are ordinary tensors, and the metadata of all shards.
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

    `size`, `shape`, `dtype` and their like answer for the whole tensor.

    >>> from shardwright import sharded
    >>> table = sharded.zeros(sharded.ChunkShardingSpec(0, ["rank:0/cpu"]), 4, 2)
    >>> isinstance(table, ShardedTensorBase), table.shape, table.metadata().size
    (True, torch.Size([4, 2]), torch.Size([4, 2]))
    """

    _metadata: ShardedTensorMetadata
    _spec: ShardingSpec | None
    _local_shards: list[Shard]
    _leaf: bool = True  # said for all ranks: one without shards could not tell from them
    _nested: bool = False  # whether shards are sharded themselves, on any rank
    _group: comm.Group

    @classmethod
    def _wrap(cls, metadata: ShardedTensorMetadata, spec: ShardingSpec | None, local_shards: Sequence[Shard]) -> Self:
        """A tensor object of these shards; what is said of them has been checked."""
        properties = metadata.tensor_properties
        made: Self = Tensor._make_wrapper_subclass(
            cls, metadata.size, dtype=properties.dtype, device=torch.device("cpu")
        )
        # It has no memory: torch's C++ code that asks past the table of operators gets an error, not a null pointer.
        torch._C._set_throw_on_mutable_data_ptr(made)
        made._metadata, made._spec, made._local_shards = metadata, spec, list(local_shards)
        return made

    @classmethod
    def _bind(
        cls, metadata: ShardedTensorMetadata, spec: ShardingSpec | None, shards: Sequence[Shard], group: comm.Group
    ) -> Self:
        made = cls._wrap(metadata, spec, shards)
        made._group = group
        return made

    @cached_property
    def _table(self) -> RegionTable:
        """All shards as arrays, with the ranks that own them."""
        return self._metadata.table(owner_in(self._group))

    def _own(self) -> list[ShardMetadata]:
        """The metadata of this rank's shards."""
        mine = (self._table.ranks == self._group.global_rank).nonzero()[0].tolist()
        return [self._metadata.shards_metadata[number] for number in mine]

    @property
    def _process_group(self) -> Any:
        return self._group.process_group

    def local_shards(self) -> list[Shard]:
        """This rank's shards, in the order of the metadata; none where it holds none."""
        return self._local_shards

    def metadata(self) -> ShardedTensorMetadata:
        """All shards with their owners, the size and the properties: the same on every rank."""
        return self._metadata

    def shards_metadata(self) -> list[ShardMetadata]:
        """The metadata of all shards."""
        return self._metadata.shards_metadata

    def sharding_spec(self) -> ShardingSpec:
        """The spec it was made with, or the one that its shards amount to."""
        if self._spec is None:
            self._spec = infer_sharding_spec(self._metadata.shards_metadata, self._metadata.size)
        return self._spec

    def size(self, dim: int | None = None) -> Any:
        """The size of the whole tensor, or of one dimension of it."""
        return self._metadata.size if dim is None else self._metadata.size[dim]

    def dim(self) -> int:
        """How many dimensions it has."""
        return len(self._metadata.size)

    def numel(self) -> int:
        """How many elements the whole tensor has."""
        return self._metadata.size.numel()

    @property
    def shape(self) -> torch.Size:
        """The size of the whole tensor."""
        return self._metadata.size

    @property
    def ndim(self) -> int:
        """How many dimensions it has."""
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
        """The device of this rank's first shard; of the first shard of all where it has none."""
        if self._local_shards:
            return self._local_shards[0].tensor.device
        placements = [shard.placement for shard in self._metadata.shards_metadata if shard.placement is not None]
        return torch.device(placements[0].device().type) if placements else torch.device("cpu")

    @property
    def requires_grad(self) -> bool:
        """Whether gradients of its shards are wanted: the same on every rank."""
        return self._metadata.tensor_properties.requires_grad

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        self.requires_grad_(value)

    @property
    def is_leaf(self) -> bool:
        """Whether its shards are leaves of the graph: the same on every rank.

        A rank without shards takes that from the others. Of a tensor that was made without talking (of local shards and
        known metadata, or of PyTorch's) it says True, until a `reshard` tells.
        """
        return self._leaf

    @property
    def grad_fn(self) -> None:
        """None: the graph is that of the local shards."""
        return None

    @property
    def grad(self) -> Self | None:
        """The gradients of its shards, as a tensor sharded alike; None where none of this rank's shards has one.

        Where only some have one, the others' are zeros, made when it is read: the shards themselves are left without.
        """
        found = [shard.tensor.grad for shard in self._local_shards]
        known = next((gradient for gradient in found if gradient is not None), None)
        if known is None:
            return None
        gradients = [
            torch.zeros_like(shard.tensor, dtype=known.dtype, layout=known.layout, requires_grad=False)
            if gradient is None
            else gradient
            for gradient, shard in zip(found, self._local_shards, strict=True)
        ]
        made = self._with(gradients)
        made._metadata.tensor_properties.pin_memory = False  # autograd makes them, in memory that is not pinned
        return made

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        if value is None:
            for shard in self._local_shards:
                shard.tensor.grad = None
            return
        if not isinstance(value, ShardedTensorBase) or not self._is_cut_like(value):
            raise ShardError(f"the gradient of {self!r} is a ShardedTensor cut alike, not {value!r}")
        for shard, other in zip(self._local_shards, value._local_shards, strict=True):
            shard.tensor.grad = other.tensor

    @property
    def data(self) -> Self:
        """The same shards without history. Assigning replaces the shards, as `module.to(...)` does.

        What is assigned stays as it is: the new shards share its memory, and nothing of its history.
        """
        return self.detach()

    @data.setter
    def data(self, value: Tensor) -> None:
        if not isinstance(value, ShardedTensorBase) or value.shape != self.shape:
            raise ShardError(f"the data of {self!r} is a ShardedTensor of the same size, not {value!r}")
        wanted = self.requires_grad
        if wanted and not (value.dtype.is_floating_point or value.dtype.is_complex):
            raise ShardError(
                f"the data of {self!r}, which requires grad, cannot be {value.dtype}: only floating point and complex "
                "have gradients; call requires_grad_(False) first"
            )
        self._become(value.detach())
        self.requires_grad_(wanted)

    def requires_grad_(self, requires_grad: bool = True) -> Self:
        """Says whether gradients of its shards are wanted; every rank says the same."""
        for shard in self._local_shards:
            shard.tensor.requires_grad_(requires_grad)
        properties = replace(self._metadata.tensor_properties, requires_grad=requires_grad)
        self._metadata = replace(self._metadata, tensor_properties=properties)
        return self

    def detach(self) -> Self:
        """The same memory, without history."""
        return self._with([shard.tensor.detach() for shard in self._local_shards])

    def clone(self, *, memory_format: torch.memory_format = torch.preserve_format) -> Self:
        """A copy in memory of its own."""
        shards = [shard.tensor.clone(memory_format=memory_format) for shard in self._local_shards]
        made = self._with(shards, requires_grad=self.requires_grad and torch.is_grad_enabled())
        made._metadata.tensor_properties.pin_memory = False  # torch's clone is not pinned, either
        if memory_format != torch.preserve_format:
            made._metadata.tensor_properties.memory_format = memory_format
        return made

    def _with(
        self,
        tensors: Sequence[Tensor],
        *,
        requires_grad: bool = False,
        dtype: torch.dtype | None = None,
        device: torch.device | None = None,
    ) -> Self:
        """A tensor cut like this one, of these local tensors, which an operator made of its shards.

        `requires_grad` says whether they have a history, `dtype` what they are, where this rank has none to show, and
        `device` where they lie on all ranks, where that is not the kind of device that the placements name.
        """
        dtype = tensors[0].dtype if tensors else dtype or self.dtype
        layout = tensors[0].layout if tensors else self.layout
        properties = replace(self._metadata.tensor_properties, dtype=dtype, layout=layout, requires_grad=requires_grad)
        own = [shard.metadata for shard in self._local_shards]
        metadata = replace(self._metadata, tensor_properties=properties)
        if device is not None:
            metadata.shards_metadata = moved_to(device, metadata.shards_metadata)
            own = moved_to(device, own)
        made = self._made_like(metadata, [Shard(tensor, shard) for tensor, shard in zip(tensors, own, strict=True)])
        if device is not None:
            made._spec = None
        made._leaf = not requires_grad
        return made

    def _made_like(self, metadata: ShardedTensorMetadata, shards: Sequence[Shard]) -> Self:
        made = type(self)._bind(metadata, self._spec, shards, self._group)
        made._nested = self._nested
        if "_table" in self.__dict__ and metadata.shards_metadata is self._metadata.shards_metadata:
            made.__dict__["_table"] = self._table
        return made

    def _become(self, other: ShardedTensorBase) -> None:
        self._metadata, self._spec = other._metadata, other._spec
        self._local_shards, self._leaf, self._nested = list(other._local_shards), other._leaf, other._nested
        self._group = other._group
        self.__dict__.pop("_table", None)

    def _is_cut_like(self, other: ShardedTensorBase) -> bool:
        """Whether the shards are the same boxes on the same ranks, in the same order."""
        mine, theirs = self._metadata.shards_metadata, other._metadata.shards_metadata
        return mine is theirs or (self.shape == other.shape and mine == theirs)

    def __copy__(self) -> Self:
        """Another object of the same shards, with their history and in the same group."""
        made = type(self)._wrap(self._metadata, self._spec, self._local_shards)
        made.__dict__.update({**self.__dict__, "_local_shards": list(self._local_shards)})
        return made

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """A copy in memory of its own, which is not pinned, with copies of the shards' gradients. Of leaves alone."""
        if not self.is_leaf:
            raise UnsupportedError(
                f"deepcopy of {self!r}: its shards have a history, which cannot be copied: copy x.detach(), or use "
                "x.clone(), through which gradients flow"
            )
        shards = [shard.tensor.detach().clone() for shard in self._local_shards]
        copied = self._with(shards)
        copied._metadata = deepcopy(copied._metadata, memo)
        copied._metadata.tensor_properties.pin_memory = False  # torch's deepcopy is not pinned, either
        copied.requires_grad_(self.requires_grad)
        for tensor, shard in zip(shards, self._local_shards, strict=True):
            gradient = shard.tensor.grad
            tensor.grad = None if gradient is None else gradient.detach().clone()
        if hasattr(self, "_is_param"):
            copied._is_param = True  # what makes isinstance(x, nn.Parameter) true
        memo[id(self)] = copied
        return copied

    def __repr__(self, *, tensor_contents: object = None) -> str:
        mine = ", ".join(str(shard.metadata.region) for shard in self._local_shards)
        count = len(self._metadata.shards_metadata)
        return f"{type(self).__name__}({list(self.shape)}, {self.dtype}, {count} shards; here: {mine or 'none'})"

    __str__ = __repr__

    def __format__(self, spec: str) -> str:
        return format(repr(self), spec)

    def __bool__(self) -> bool:
        raise UnsupportedError(
            f"the truth of {self!r} lies on several ranks: compare with torch.equal or torch.allclose, or gather it"
        )

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Every torch function called with a ShardedTensor: those with a local meaning are called on the shards."""
        return call(func, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """What gets here went past the table of operators: there are no values to compute with."""
        raise UnsupportedError(f"{func}: a ShardedTensor holds no values of its own; use its local_shards()")
