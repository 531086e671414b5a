"""Reductions and the like along dimensions that no shard cuts: each shard computes its own, and ranks do not talk."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

from torch import Tensor

from shardwright.errors import TilingError
from shardwright.sharded.base.registry import implements_named, unsupported
from shardwright.sharded.base.shardwise import check_operands, made_like, recut, recut_shard, whole_of
from shardwright.sharded.base.tensor_base import ShardedTensorBase
from shardwright.sharded.metadata.tensor_metadata import check_tiling
from shardwright.sharded.ops.pointwise import pointwise
from shardwright.tensor.base.registry import canonical_name

__all__ = ["along", "cut_dims"]

# Where each operator takes the dimensions it runs over, if not by name; without any, it runs over all.
_OVER_ALL = {
    **dict.fromkeys("sum nansum mean nanmean amax amin prod all any argmax argmin max min".split(), 1),
    **dict.fromkeys("var std var_mean std_mean median nanmedian logsumexp count_nonzero aminmax".split(), 1),
    **dict.fromkeys("norm linalg_norm linalg_vector_norm".split(), 2),
}
_OVER_LAST = {"sort": 1, "argsort": 1, "mode": 1, "topk": 2, "kthvalue": 2}
_ALONG_ONE = dict.fromkeys("softmax log_softmax softmin cumsum cumprod logcumsumexp cummax cummin".split(), 1)


def cut_dims(tensor: ShardedTensorBase) -> list[int]:
    """The dimensions that some shard does not span."""
    shards, size = tensor._metadata.shards_metadata, tensor.shape
    return [dim for dim in range(len(size)) if any(shard.shard_sizes[dim] != size[dim] for shard in shards)]


@implements_named(*set(_OVER_ALL) - {"all", "any"}, *_OVER_LAST, *_ALONG_ONE)
def along(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """What the function makes of each shard, along dimensions that none of them cuts."""
    name, inplace = canonical_name(func)
    if name in ("max", "min") and (
        isinstance(kwargs.get("other"), Tensor) or any(isinstance(a, Tensor) for a in args[1:])
    ):
        return pointwise(func, args, kwargs)
    if inplace or kwargs.get("out") is not None:
        raise unsupported(func, "a ShardedTensor is not reduced in place or into another")
    tensor = check_operands(func, args, kwargs)
    rest, options = args[1:], {key: value for key, value in kwargs.items() if value is not tensor}
    asked = _asked(func, name, args, kwargs)
    # On the whole, without memory: dimensions that there are not are refused by torch itself, alike on all ranks.
    sample = func(whole_of(tensor), *rest, **options)
    dims = _dims(tensor, asked)
    if cut := sorted(set(dims) & set(cut_dims(tensor))):
        over = f"dimension {cut[0]}" if len(cut) == 1 else f"dimensions {cut}"
        why = f"it runs over {over} of {tensor!r}, which the shards cut: no rank has all of a row"
        norm = "; of gradients, sharded.clip_grad_norm_ finds the norm" if "norm" in name and asked is None else ""
        raise unsupported(func, why + norm)
    values = []
    for shard in tensor._local_shards:
        with warnings.catch_warnings() if not shard.tensor.numel() else nullcontext():
            if not shard.tensor.numel():  # torch warns that nothing has no variance; the whole has been asked above
                warnings.simplefilter("ignore")
            values.append(func(shard.tensor, *rest, **options))
    if isinstance(sample, Tensor):
        return _result(func, tensor, values, sample, dims)
    made = [
        _result(func, tensor, [value[number] for value in values], part, dims) for number, part in enumerate(sample)
    ]
    return type(sample)(made)


def _asked(func: Any, name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """The dimensions as they were named, None for all of them."""
    place = {**_OVER_ALL, **_OVER_LAST, **_ALONG_ONE}[name]
    place -= not isinstance(args[0] if args else None, Tensor)  # the tensor itself came by name
    asked = kwargs.get("dim", args[place] if len(args) > place else None)
    if isinstance(asked, bool):
        asked = None  # `x.var(False)` says unbiased
    if asked is None and name in _ALONG_ONE:
        raise unsupported(func, "without `dim` it is not clear along which dimension to go: give one")
    return -1 if asked is None and name in _OVER_LAST else asked


def _dims(tensor: ShardedTensorBase, asked: Any) -> tuple[int, ...]:
    """Dimensions counted from the front; none named are all."""
    ndim = tensor.ndim
    if asked is None or (isinstance(asked, list | tuple) and not asked):
        return tuple(range(ndim))
    named = asked if isinstance(asked, list | tuple) else (asked,)
    return tuple(dim % ndim for dim in named) if ndim else ()


def _result(
    func: Any, tensor: ShardedTensorBase, values: Sequence[Tensor], sample: Tensor, dims: tuple[int, ...]
) -> ShardedTensorBase:
    if sample.shape == tensor.shape:
        return made_like(func, tensor, values, sample)
    stays = sample.ndim == tensor.ndim
    origins = [None if dim in dims else dim for dim in range(tensor.ndim) if stays or dim not in dims]
    if len(origins) != sample.ndim:
        raise unsupported(func, f"it makes size {list(sample.shape)} of {tensor!r}")
    if not tensor.shape.numel():
        _check_whole(func, tensor, sample, origins)
    return recut(tensor, values, sample, origins)


def _check_whole(func: Any, tensor: ShardedTensorBase, sample: Tensor, origins: Sequence[int | None]) -> None:
    """Sees that the shards of a result tile it: those of a tensor without elements may lie on top of each other."""
    shards = [recut_shard(shard, sample.shape, origins) for shard in tensor._metadata.shards_metadata]
    try:
        check_tiling(shards, sample.shape)
    except TilingError as error:
        raise unsupported(
            func, f"of {tensor!r}, which has no elements, it would make shards that do not tile the result ({error})"
        ) from None
