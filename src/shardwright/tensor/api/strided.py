"""`Strided`, the class of DTensors whose global strides do not follow from their shards."""

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
    """A DTensor with its global strides recorded. Results of element-wise operators keep them, as in torch."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is Tensor.is_contiguous and "_strides" in args[0].__dict__:
            return meta_of(args[0]).is_contiguous(*args[1:], **kwargs)
        result = DTensor.__torch_function__(func, types, args, kwargs)
        if type(result) in (DTensor, DTensorBase.parameter_values):
            inputs = list(tensors_in((*args, *kwargs.values())))
            if any("_strides" in tensor.__dict__ for tensor in inputs) and not any(result is each for each in inputs):
                _keep_strides(result, func, args, kwargs, inputs)
        return result


def _keep_strides(result: DTensor, func: Any, args: Any, kwargs: dict[str, Any], inputs: list[Tensor]) -> None:
    """Record the strides of a new tensor: element-wise operators keep those of their inputs."""
    if not all(isinstance(tensor, DTensorBase) for tensor in inputs):
        return
    try:
        results = call_on_meta(func, *map_tensors(args, kwargs, meta_of))  # type: ignore[arg-type]  # likewise
    except (NotImplementedError, RuntimeError):
        return  # no meta kernel: the operator does not keep strides
    if len(results) == 1 and tuple(results[0].shape) == tuple(result.shape) and not results[0].is_contiguous():
        record_result_strides(result, (results[0].stride(),), inputs)


for _function in functions_of(Strided):
    leave_eager(_function)
DTensorBase.strided = Strided  # for `record_strides`, which is in a lower layer
