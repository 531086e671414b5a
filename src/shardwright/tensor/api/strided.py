"""`Strided`, the class of DTensors whose shards do not tell the strides of the global tensor."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from shardwright.tensor.api.dtensor import DTensor
from shardwright.tensor.api.torch_hooks import functions_of, leave_eager
from shardwright.tensor.base.strides import meta_of
from shardwright.tensor.base.tagging import DTensorBase
from shardwright.tensor.dispatch.arguments import map_tensors, tensors_in
from shardwright.tensor.dispatch.shapes import call_on_meta
from shardwright.tensor.dispatch.view_outcome import record_result_strides

__all__ = ["Strided"]


class Strided(DTensor):
    """A DTensor with its global strides noted. What is computed from it follows them, as torch's results do."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is Tensor.is_contiguous and "_strides" in args[0].__dict__:
            return meta_of(args[0]).is_contiguous(*args[1:], **kwargs)
        result = DTensor.__torch_function__(func, types, args, kwargs)
        if type(result) is DTensor:
            given = list(tensors_in((*args, *kwargs.values())))
            if any("_strides" in tensor.__dict__ for tensor in given) and not any(result is one for one in given):
                _follow(result, func, args, kwargs, given)
        return result


def _follow(result: DTensor, func: Any, args: Any, kwargs: dict[str, Any], given: list[Tensor]) -> None:
    """Note the strides of a new tensor: element-wise operators keep those of their inputs."""
    if not all(isinstance(tensor, DTensorBase) for tensor in given):
        return
    try:
        found = call_on_meta(func, *map_tensors(args, kwargs, meta_of))  # type: ignore[arg-type]  # likewise
    except (NotImplementedError, RuntimeError):
        return  # an operator that torch has no meta kernel for: it does not keep strides
    if len(found) == 1 and tuple(found[0].shape) == tuple(result.shape) and not found[0].is_contiguous():
        record_result_strides(result, (found[0].stride(),), given)


for _function in functions_of(Strided):
    leave_eager(_function)
DTensorBase.strided = Strided  # `record_strides` lies below DTensor
