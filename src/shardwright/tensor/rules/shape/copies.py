"""`*_copy` operators, which copy a view, and `as_strided`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from shardwright.errors import UnsupportedError
from shardwright.tensor.base.copied import is_copied, mark_copied
from shardwright.tensor.base.gradient_types import REPLICATE
from shardwright.tensor.base.registry import composite, rule
from shardwright.tensor.base.strategy import Operand, Strategies, index_strategies
from shardwright.tensor.base.strides import is_contiguous
from shardwright.tensor.base.tagging import DTensorBase, layout_of, no_torch_function

__all__: list[str] = []

Views = Callable[..., Any]
_VIEWS: dict[str, Views] = {
    "alias": lambda x: x,
    "as_strided": torch.as_strided,
    "detach": torch.detach,
    "diagonal": torch.diagonal,
    "expand": torch.Tensor.expand,
    "narrow": torch.narrow,
    "permute": torch.permute,
    "select": torch.select,
    "slice": torch.ops.aten.slice,
    "split": torch.Tensor.split,
    "split_with_sizes": torch.split_with_sizes,
    "squeeze": torch.squeeze,
    "t": torch.t,
    "transpose": torch.transpose,
    "unbind": torch.unbind,
    "unfold": torch.Tensor.unfold,
    "unsqueeze": torch.unsqueeze,
    "view": torch.Tensor.view,
    "view_as_complex": torch.view_as_complex,
    "view_as_real": torch.view_as_real,
}


def _copy(value: Any) -> Any:
    if isinstance(value, DTensorBase):
        return value.clone(memory_format=torch.contiguous_format)
    return type(value)(_copy(item) for item in value)


def _copy_of_view(view: Views) -> Callable[..., Any]:
    def compose(input: Any, *args: Any, **kwargs: Any) -> Any:
        return _copy(view(input, *args, **kwargs))

    return compose


for _name, _view in _VIEWS.items():
    composite(f"{_name}_copy")(_copy_of_view(_view))


@rule("as_strided")
def _as_strided(input: Operand, *_: Any, **__: Any) -> Strategies:
    """Strides refer to the memory of the global tensor."""
    at = index_strategies([input], [[None] * input.ndim], [[]], terms=[[0]], reduction=None)
    return Strategies(at, fresh=False)


@rule("as_strided_scatter")
def _as_strided_scatter(input: Operand, src: Operand, *_: Any, **__: Any) -> Strategies:
    labels: list[list[Any]] = [[None] * input.ndim, [None] * src.ndim]
    return Strategies(index_strategies([input, src], labels, [[None] * input.ndim], terms=[[0], [1]], reduction=None))


@composite("as_strided")
def _as_strided_sharded(input: Any, *args: Any, **kwargs: Any) -> Any:
    """Read from the replicated tensor: strides refer to the memory of one tensor."""
    if layout_of(input).is_replicated:
        return NotImplemented
    _refuse_unknown_memory("as_strided", input, (*args[2:], kwargs.get("storage_offset")))
    result = _replicated(input).as_strided(*args, **kwargs)
    mark_copied(result, "as_strided", input)
    return result


@composite("as_strided_scatter")
def _as_strided_scatter_sharded(input: Any, src: Any, *args: Any, **kwargs: Any) -> Any:
    if layout_of(input).is_replicated and layout_of(src).is_replicated:
        return NotImplemented
    _refuse_unknown_memory("as_strided_scatter", input, (*args[2:], kwargs.get("storage_offset")))
    return torch.as_strided_scatter(_replicated(input), _replicated(src), *args, **kwargs)


def _replicated(input: Any) -> Any:
    mesh = layout_of(input).mesh
    return input.redistribute(placements=[REPLICATE] * mesh.ndim)


def _refuse_unknown_memory(name: str, input: Any, offsets: tuple[int | None, ...]) -> None:
    """Raise if strides or a storage offset do not refer to the memory of the replicated tensor."""
    layout = layout_of(input)
    if not is_contiguous(input):
        raise UnsupportedError(
            f"{name}: strides refer to the memory of one tensor, but the DTensor {layout} is not contiguous. "
            "Call x.contiguous() first, or use views that name dimensions"
        )
    with no_torch_function():
        is_view = input.is_inference() or is_copied(input) or isinstance(input._base, DTensorBase)
    if is_view and any(offset is not None for offset in offsets):
        raise UnsupportedError(
            f"{name}: the DTensor {layout} may be a view, whose storage offset on one device would depend on its base. "
            "Omit storage_offset to count from the first element, or clone() it first"
        )
