"""Questions that need no computing, answered for the whole tensor, or for the kind of tensor its shards are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from shardwright.errors import ArgumentTypeError, UnsupportedError
from shardwright.sharded.base.registry import getters, implements, implements_named, name_of
from shardwright.sharded.base.shardwise import kind_of
from shardwright.sharded.base.tensor_base import ShardedTensorBase

__all__: list[str] = []

# The shards are all of one kind: a tensor of their dtype, on their device, answers for them.
_OF_A_KIND = """
is_cpu is_cuda is_ipu is_maia is_meta is_mkldnn is_mps is_mtia is_nested is_quantized is_sparse is_sparse_csr is_vulkan
is_xla is_xpu itemsize
""".split()
_ASKED_OF_A_KIND = """
is_floating_point is_complex is_signed is_conj is_neg is_inference is_distributed is_shared element_size get_device
_is_zerotensor
""".split()
# The object's own: hooks, names and the graph of the object are none, as those of its shards count.
_OF_THE_OBJECT = """
_backward_hooks _base _cdata _has_symbolic_sizes_strides _post_accumulate_grad_hooks _python_dispatch
grad_dtype name names output_nr volatile
""".split()

# The class answers them by itself, unless torch is asked past it: `Tensor.shape.__get__(x)`, `x._grad`.
_OF_THE_CLASS = "data device dtype grad grad_fn is_leaf layout ndim requires_grad shape".split()

Answer = Callable[..., Any]


@implements(*getters(*_OF_A_KIND))
def _of_a_kind(func: Any, args: Sequence[Any], _: dict[str, Any]) -> Any:
    return getattr(kind_of(args[0]), name_of(func))


@implements_named(*_ASKED_OF_A_KIND)
def _asked_of_a_kind(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    return func(kind_of(args[0] if args else kwargs["input"]))


@implements(*getters(*_OF_THE_CLASS))
def _of_the_class(func: Any, args: Sequence[Any], _: dict[str, Any]) -> Any:
    return getattr(args[0], name_of(func))


@implements(*getters(*_OF_THE_OBJECT))
def _of_the_object(func: Any, args: Sequence[Any], _: dict[str, Any]) -> Any:
    with torch._C.DisableTorchFunctionSubclass():
        return func(*args)


def _answer(*functions: Any) -> Callable[[Answer], Answer]:
    """Registers an answer that takes the tensor and the rest of the arguments."""

    def register(answer: Answer) -> Answer:
        @implements(*functions)
        def _(_: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
            return answer(*args, **kwargs)

        return answer

    return register


_answer(Tensor.size)(lambda input, dim=None: input.size(dim))
_answer(Tensor.numel, Tensor.nelement, torch.numel)(lambda input: input.shape.numel())
_answer(Tensor.dim, Tensor.ndimension)(lambda input: input.ndim)
_answer(*getters("nbytes"))(lambda input: input.shape.numel() * input.dtype.itemsize)
_answer(Tensor.is_same_size, torch.is_same_size)(lambda input, other: input.shape == other.shape)
_answer(Tensor.is_pinned)(lambda input, *_: input._metadata.tensor_properties.pin_memory)
_answer(Tensor.storage_offset)(lambda _: 0)


@_answer(Tensor.__len__)
def _len(input: ShardedTensorBase) -> int:
    if not input.ndim:
        raise ArgumentTypeError("len() of a 0-d tensor")  # as torch says it
    return input.shape[0]


@_answer(Tensor.is_contiguous)
def _is_contiguous(input: ShardedTensorBase, memory_format: torch.memory_format = torch.contiguous_format) -> bool:
    return all(shard.tensor.is_contiguous(memory_format=memory_format) for shard in input._local_shards)


@_answer(Tensor.is_coalesced)
def _is_coalesced(input: ShardedTensorBase) -> bool:
    return all(shard.tensor.is_coalesced() for shard in input._local_shards)


@_answer(Tensor.stride)
def _stride(input: ShardedTensorBase, dim: int | None = None) -> Any:
    """The strides that the whole tensor would have, had one rank all of it."""
    strides = _whole(input).stride()
    return strides if dim is None else strides[dim]


@_answer(Tensor.dim_order)
def _dim_order(input: ShardedTensorBase, **how: Any) -> Any:
    return _whole(input).dim_order(**how)


def _whole(tensor: ShardedTensorBase) -> Tensor:
    memory_format = tensor._metadata.tensor_properties.memory_format
    if memory_format == torch.preserve_format or tensor.ndim != 4:
        memory_format = torch.contiguous_format
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta", memory_format=memory_format)


@_answer(*getters("_version"))
def _version(input: ShardedTensorBase) -> int:
    return sum(shard.tensor._version for shard in input._local_shards)


@_answer(Tensor.retain_grad)
def _retain_grad(input: ShardedTensorBase) -> None:
    for shard in input._local_shards:
        shard.tensor.retain_grad()


@_answer(*getters("retains_grad"))
def _retains_grad(input: ShardedTensorBase) -> bool:
    return bool(input._local_shards) and all(shard.tensor.retains_grad for shard in input._local_shards)


@_answer(torch._has_compatible_shallow_copy_type)
def _may_be_assigned(input: Any, other: Any) -> bool:
    """Whether `module.to(...)` may assign to `.data`: to a parameter, which optimizers know, and not to its gradient,
    which is made anew of the shards' gradients whenever it is asked for."""
    return isinstance(other, ShardedTensorBase) and hasattr(input, "_is_param")


@_answer(Tensor.new_tensor)
def _new_tensor(input: ShardedTensorBase, data: Any, **how: Any) -> Tensor:
    """A plain tensor of these very values, as the caller has them on every rank."""
    return torch.empty(0, dtype=input.dtype, device=input.device).new_tensor(data, **how)


@implements(Tensor.backward)
def _backward(func: Any, args: Sequence[Any], _: dict[str, Any]) -> None:
    raise UnsupportedError(
        f"{name_of(func)}: the graph of {args[0]!r} is that of its shards: make a loss of this rank's shards and call "
        "its backward, as in sum(shard.tensor.sum() for shard in x.local_shards()).backward()"
    )


@implements(Tensor.__float__, Tensor.__int__, Tensor.__complex__, Tensor.__index__, Tensor.item, Tensor.tolist)
def _values(func: Any, args: Sequence[Any], _: dict[str, Any]) -> None:
    raise UnsupportedError(
        f"{name_of(func)}: the values of {args[0]!r} lie in shards on its ranks: gather() them on one, or ask each "
        "shard.tensor of local_shards()"
    )


_MEMORY = "its values lie in the shards, each in memory of its own: ask each shard.tensor of x.local_shards()"
_SPARSE = (
    "each sparse shard has its own: ask each shard.tensor of x.local_shards(). An optimizer for sparse gradients is "
    "given the shards by sharded.ShardedOptimizer({'table': x}, torch.optim.SparseAdam)"
)
_GRAPH = "the graph is that of the shards: do it with each shard.tensor of x.local_shards()"
_OTHER_SIZE = (
    "nothing says how a tensor of another size is cut: use torch.zeros_like and the like, or sharded.zeros(spec, size)"
)
# What is refused for a reason of its own; of everything else, `call` says that it is not computed shard by shard.
_REASONS = {
    _MEMORY: "data_ptr const_data_ptr untyped_storage storage _typed_storage storage_type share_memory_ numpy "
    "__array__ __dlpack__ __dlpack_device__ pin_memory set_ resize_ resize_as_ __cuda_array_interface__ is_set_to",
    _GRAPH: "register_hook register_post_accumulate_grad_hook",
    _OTHER_SIZE: "new_zeros new_empty new_ones new_full new_empty_strided new",
    _SPARSE: "indices values _indices _values _nnz sparse_dim dense_dim _dimI _dimV sparse_mask",
}


def _refuse(reason: str, functions: Sequence[Any]) -> None:
    @implements(*functions)
    def _(func: Any, _: Sequence[Any], __: dict[str, Any]) -> None:
        raise UnsupportedError(f"{name_of(func)} of a ShardedTensor: {reason}")


for _reason, _names in _REASONS.items():
    _functions = [getattr(Tensor, _name) for _name in _names.split() if callable(getattr(Tensor, _name, None))]
    _refuse(_reason, [*_functions, *getters(*_names.split())])
_refuse(
    "the graph is that of the shards: torch.autograd.grad(loss, [shard.tensor for shard in x.local_shards()])",
    [torch.autograd.grad],
)


@implements_named("result_type")
def _result_type(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    def kind(value: Any) -> Any:
        if not isinstance(value, ShardedTensorBase):
            return value
        return torch.empty([0] * value.ndim, dtype=value.dtype, device=value.device)

    return func(*map(kind, args), **{key: kind(value) for key, value in kwargs.items()})
