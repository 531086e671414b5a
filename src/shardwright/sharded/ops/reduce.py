"""Reductions, scans and sorts along unsharded dimensions: computed shard by shard, without communication."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

from torch import Tensor

from shardwright.errors import TilingError
from shardwright.sharded.base.registry import implements_named, unsupported
from shardwright.sharded.base.shardwise import check_operands, global_meta, map_shard, result_like, result_with_dims
from shardwright.sharded.base.tensor_base import ShardedTensorBase
from shardwright.sharded.metadata.tensor_metadata import check_tiling
from shardwright.sharded.ops.pointwise import pointwise
from shardwright.tensor.base.registry import canonical_name

__all__ = ["along", "sharded_dims"]

# Position of the `dim` argument; without it, the operator runs over all dimensions.
_OVER_ALL = {
    **dict.fromkeys("sum nansum mean nanmean amax amin prod all any argmax argmin max min".split(), 1),
    **dict.fromkeys("var std var_mean std_mean median nanmedian logsumexp count_nonzero aminmax".split(), 1),
    **dict.fromkeys("norm linalg_norm linalg_vector_norm".split(), 2),
}
_OVER_LAST = {"sort": 1, "argsort": 1, "mode": 1, "topk": 2, "kthvalue": 2}
_ALONG_ONE = dict.fromkeys("softmax log_softmax softmin cumsum cumprod logcumsumexp cummax cummin".split(), 1)


def sharded_dims(tensor: ShardedTensorBase) -> list[int]:
    """Return the dimensions that some shard does not span."""
    shards, size = tensor._metadata.shards_metadata, tensor.shape
    return [dim for dim in range(len(size)) if any(shard.shard_sizes[dim] != size[dim] for shard in shards)]


@implements_named(*set(_OVER_ALL) - {"all", "any"}, *_OVER_LAST, *_ALONG_ONE)
def along(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Apply the function to each shard, along unsharded dimensions."""
    name, inplace = canonical_name(func)
    if name in ("max", "min") and (
        isinstance(kwargs.get("other"), Tensor) or any(isinstance(a, Tensor) for a in args[1:])
    ):
        return pointwise(func, args, kwargs)
    if inplace or kwargs.get("out") is not None:
        raise unsupported(func, "in-place and out= variants are not supported")
    tensor = check_operands(func, args, kwargs)
    rest, options = args[1:], {key: value for key, value in kwargs.items() if value is not tensor}
    dim = _dim_argument(func, name, args, kwargs)
    # On a meta tensor of the global size torch refuses invalid dimensions, identically on all ranks.
    sample = func(global_meta(tensor), *rest, **options)
    dims = _dims(tensor, dim)
    if split := sorted(set(dims) & set(sharded_dims(tensor))):
        over = f"dimension {split[0]}" if len(split) == 1 else f"dimensions {split}"
        why = f"it runs over {over} of {tensor!r}, which is sharded along it"
        norm = "; for the norm of gradients use sharded.clip_grad_norm_" if "norm" in name and dim is None else ""
        raise unsupported(func, why + norm)
    values = []
    for shard in tensor._local_shards:
        with warnings.catch_warnings() if not shard.tensor.numel() else nullcontext():
            if not shard.tensor.numel():  # torch warns about empty shards; the global call above has warned already
                warnings.simplefilter("ignore")
            values.append(func(shard.tensor, *rest, **options))
    if isinstance(sample, Tensor):
        return _result(func, tensor, values, sample, dims)
    results = [
        _result(func, tensor, [value[number] for value in values], part, dims) for number, part in enumerate(sample)
    ]
    return type(sample)(results)


def _dim_argument(func: Any, name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Return the `dim` argument, None for all dimensions."""
    position = {**_OVER_ALL, **_OVER_LAST, **_ALONG_ONE}[name]
    position -= not isinstance(args[0] if args else None, Tensor)  # the tensor was passed by keyword
    dim = kwargs.get("dim", args[position] if len(args) > position else None)
    if isinstance(dim, bool):
        dim = None  # `x.var(False)`: unbiased
    if dim is None and name in _ALONG_ONE:
        raise unsupported(func, "`dim` is required")
    return -1 if dim is None and name in _OVER_LAST else dim


def _dims(tensor: ShardedTensorBase, dim: Any) -> tuple[int, ...]:
    """Return non-negative dimensions; None or an empty list means all."""
    ndim = tensor.ndim
    if dim is None or (isinstance(dim, list | tuple) and not dim):
        return tuple(range(ndim))
    dims = dim if isinstance(dim, list | tuple) else (dim,)
    return tuple(index % ndim for index in dims) if ndim else ()


def _result(
    func: Any, tensor: ShardedTensorBase, values: Sequence[Tensor], sample: Tensor, dims: tuple[int, ...]
) -> ShardedTensorBase:
    if sample.shape == tensor.shape:
        return result_like(func, tensor, values, sample)
    stays = sample.ndim == tensor.ndim
    origins = [None if dim in dims else dim for dim in range(tensor.ndim) if stays or dim not in dims]
    if len(origins) != sample.ndim:
        raise unsupported(func, f"its result on {tensor!r} has size {list(sample.shape)}")
    if not tensor.shape.numel():
        _check_result(func, tensor, sample, origins)
    return result_with_dims(tensor, values, sample, origins)


def _check_result(func: Any, tensor: ShardedTensorBase, sample: Tensor, origins: Sequence[int | None]) -> None:
    """Raise unless the shards of the result tile it: shards of an empty tensor may overlap."""
    shards = [map_shard(shard, sample.shape, origins) for shard in tensor._metadata.shards_metadata]
    try:
        check_tiling(shards, sample.shape)
    except TilingError as error:
        raise unsupported(func, f"{tensor!r} is empty, and its shards would not tile the result ({error})") from None
