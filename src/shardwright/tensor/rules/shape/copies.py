"""`permute_copy` and its like: the view, copied. Also what reads a tensor's memory by numbers, `as_strided`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from shardwright.errors import UnsupportedError
from shardwright.tensor.dispatch.registry import composite, rule
from shardwright.tensor.local import DTensorBase, layout_of
from shardwright.tensor.rules.notation import Operand, Ways, index_ways
from shardwright.tensor.strides import global_stride

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


def _copied(view: Views) -> Callable[..., Any]:
    def compose(input: Any, *args: Any, **kwargs: Any) -> Any:
        return _copy(view(input, *args, **kwargs))

    return compose


for _name, _view in _VIEWS.items():
    composite(f"{_name}_copy")(_copied(_view))


@rule("as_strided")
def _as_strided(input: Operand, *_: Any, **__: Any) -> Ways:
    """Places in memory: the whole tensor's."""
    at = index_ways([input], [[None] * input.ndim], [[]], terms=[[0]], reduction=None)
    return Ways(at, fresh=False)


@rule("as_strided_scatter")
def _as_strided_scatter(input: Operand, src: Operand, *_: Any, **__: Any) -> Ways:
    labels: list[list[Any]] = [[None] * input.ndim, [None] * src.ndim]
    return Ways(index_ways([input, src], labels, [[None] * input.ndim], terms=[[0], [1]], reduction=None))


@composite("as_strided", "as_strided_scatter")
def _in_memory(input: Any, *_: Any, **__: Any) -> Any:
    """Refused where there is no memory of the whole that would be what the numbers mean."""
    layout = layout_of(input)
    whole = torch.empty(layout.shape, device="meta")
    if not layout.is_replicated and not layout.is_partial and global_stride(input) != whole.stride():
        raise UnsupportedError(
            f"as_strided of a DTensor {layout}, which is not contiguous: strides are places in the memory of one "
            "tensor, and this is spread over many. Use `x.contiguous()` first, or views that name dimensions"
        )
    return NotImplemented
