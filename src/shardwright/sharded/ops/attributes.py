"""Attributes and methods that need no computation: of the global tensor, or of the type of its shards."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from shardwright.errors import ArgumentTypeError, UnsupportedError
from shardwright.sharded.base.registry import getters, implements, implements_named, name_of
from shardwright.sharded.base.shardwise import empty_shard
from shardwright.sharded.base.tensor_base import ShardedTensorBase

__all__: list[str] = []

# The same for all shards: read from an empty tensor with their dtype and device.
_SHARD_ATTRIBUTES = """
is_cpu is_cuda is_ipu is_maia is_meta is_mkldnn is_mps is_mtia is_nested is_quantized is_sparse is_sparse_csr is_vulkan
is_xla is_xpu itemsize
""".split()
_SHARD_METHODS = """
is_floating_point is_complex is_signed is_conj is_neg is_inference is_distributed is_shared element_size get_device
_is_zerotensor
""".split()
# Read from the wrapper object itself, which has no hooks, names or graph.
_OBJECT_ATTRIBUTES = """
_backward_hooks _base _cdata _has_symbolic_sizes_strides _post_accumulate_grad_hooks _python_dispatch
grad_dtype name names output_nr volatile
""".split()

# Defined by the class; reached here only through torch: `Tensor.shape.__get__(x)`, `x._grad`.
_CLASS_ATTRIBUTES = "data device dtype grad grad_fn is_leaf layout ndim requires_grad shape".split()

Method = Callable[..., Any]


@implements(*getters(*_SHARD_ATTRIBUTES))
def _shard_attribute(func: Any, args: Sequence[Any], _: dict[str, Any]) -> Any:
    return getattr(empty_shard(args[0]), name_of(func))


@implements_named(*_SHARD_METHODS)
def _shard_method(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    return func(empty_shard(args[0] if args else kwargs["input"]))


@implements(*getters(*_CLASS_ATTRIBUTES))
def _class_attribute(func: Any, args: Sequence[Any], _: dict[str, Any]) -> Any:
    return getattr(args[0], name_of(func))


@implements(*getters(*_OBJECT_ATTRIBUTES))
def _object_attribute(func: Any, args: Sequence[Any], _: dict[str, Any]) -> Any:
    with torch._C.DisableTorchFunctionSubclass():
        return func(*args)


def _method(*functions: Any) -> Callable[[Method], Method]:
    """Register a function that takes the arguments of these torch functions."""

    def register(method: Method) -> Method:
        @implements(*functions)
        def _(_: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
            return method(*args, **kwargs)

        return method

    return register


_method(Tensor.size)(lambda input, dim=None: input.size(dim))
_method(Tensor.numel, Tensor.nelement, torch.numel)(lambda input: input.shape.numel())
_method(Tensor.dim, Tensor.ndimension)(lambda input: input.ndim)
_method(*getters("nbytes"))(lambda input: input.shape.numel() * input.dtype.itemsize)
_method(Tensor.is_same_size, torch.is_same_size)(lambda input, other: input.shape == other.shape)
_method(Tensor.is_pinned)(lambda input, *_: input._metadata.tensor_properties.pin_memory)
_method(Tensor.storage_offset)(lambda _: 0)


@_method(Tensor.__len__)
def _len(input: ShardedTensorBase) -> int:
    if not input.ndim:
        raise ArgumentTypeError("len() of a 0-d tensor")  # torch's message
    return input.shape[0]


@_method(Tensor.is_contiguous)
def _is_contiguous(input: ShardedTensorBase, memory_format: torch.memory_format = torch.contiguous_format) -> bool:
    return all(shard.tensor.is_contiguous(memory_format=memory_format) for shard in input._local_shards)


@_method(Tensor.is_coalesced)
def _is_coalesced(input: ShardedTensorBase) -> bool:
    return all(shard.tensor.is_coalesced() for shard in input._local_shards)


@_method(Tensor.stride)
def _stride(input: ShardedTensorBase, dim: int | None = None) -> Any:
    """The strides of the global tensor if it were on one rank."""
    strides = _global_meta(input).stride()
    return strides if dim is None else strides[dim]


@_method(Tensor.dim_order)
def _dim_order(input: ShardedTensorBase, **options: Any) -> Any:
    return _global_meta(input).dim_order(**options)


def _global_meta(tensor: ShardedTensorBase) -> Tensor:
    memory_format = tensor._metadata.tensor_properties.memory_format
    if memory_format == torch.preserve_format or tensor.ndim != 4:
        memory_format = torch.contiguous_format
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta", memory_format=memory_format)


@_method(*getters("_version"))
def _version(input: ShardedTensorBase) -> int:
    return sum(shard.tensor._version for shard in input._local_shards)


@_method(Tensor.retain_grad)
def _retain_grad(input: ShardedTensorBase) -> None:
    for shard in input._local_shards:
        shard.tensor.retain_grad()


@_method(*getters("retains_grad"))
def _retains_grad(input: ShardedTensorBase) -> bool:
    return bool(input._local_shards) and all(shard.tensor.retains_grad for shard in input._local_shards)


@_method(torch._has_compatible_shallow_copy_type)
def _may_be_assigned(input: Any, other: Any) -> bool:
    """True if `module.to(...)` may assign to `.data`: of a parameter, which optimizers refer to, but not of its
    gradient, which is rebuilt from the shards' gradients whenever it is read."""
    return isinstance(other, ShardedTensorBase) and hasattr(input, "_is_param")


@_method(Tensor.new_tensor)
def _new_tensor(input: ShardedTensorBase, data: Any, **options: Any) -> Tensor:
    """Return a plain tensor with these values, on every rank."""
    return torch.empty(0, dtype=input.dtype, device=input.device).new_tensor(data, **options)


@implements(Tensor.backward)
def _backward(func: Any, args: Sequence[Any], _: dict[str, Any]) -> None:
    raise UnsupportedError(
        f"{name_of(func)}: {args[0]!r} is not in the autograd graph, but its shards are: compute a loss from them and "
        "call its backward, as in sum(shard.tensor.sum() for shard in x.local_shards()).backward()"
    )


@implements(Tensor.__float__, Tensor.__int__, Tensor.__complex__, Tensor.__index__, Tensor.item, Tensor.tolist)
def _values(func: Any, args: Sequence[Any], _: dict[str, Any]) -> None:
    raise UnsupportedError(
        f"{name_of(func)}: the values of {args[0]!r} are in shards on several ranks: gather() them on one rank, or use "
        "each shard.tensor of local_shards()"
    )


_MEMORY = "each shard has its own memory: use each shard.tensor of x.local_shards()"
_SPARSE = (
    "each sparse shard has its own: use each shard.tensor of x.local_shards(). For sparse gradients, use "
    "sharded.ShardedOptimizer({'table': x}, torch.optim.SparseAdam)"
)
_GRAPH = "only the shards are in the autograd graph: use each shard.tensor of x.local_shards()"
_OTHER_SIZE = (
    "the sharding of a tensor of another size is unknown: use torch.zeros_like etc., or sharded.zeros(spec, size)"
)
# Refused for a specific reason; `call` refuses everything else as not computable shard by shard.
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
    "only the shards are in the autograd graph: torch.autograd.grad(loss, [s.tensor for s in x.local_shards()])",
    [torch.autograd.grad],
)


@implements_named("result_type")
def _result_type(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    def example(value: Any) -> Any:
        if not isinstance(value, ShardedTensorBase):
            return value
        return torch.empty([0] * value.ndim, dtype=value.dtype, device=value.device)

    return func(*map(example, args), **{key: example(value) for key, value in kwargs.items()})
