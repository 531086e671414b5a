"""What a function would move, before anything moves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

from shardwright.tensor.base.tagging import DTensorBase, no_torch_function, tag
from shardwright.tensor.base.trace import Trace, trace

__all__ = ["explain"]


def explain(fn: Callable[..., Any], *args: Any, quiet: bool = False, **kwargs: Any) -> Trace:
    """Prints what `fn(*args, **kwargs)` would move: operators, movements, bytes, source lines. Nothing moves.

    It runs the function on tensors without values (torch's meta device): its arguments, nested in lists, tuples and
    dicts or held by modules, are replaced for the call. A function that looks at values cannot be explained.
    `quiet=True` gives the trace without printing it.

    >>> import torch, shardwright as sw
    >>> x = sw.ones(4, 4, mesh=sw.init_device_mesh("cpu", (1,)), placements=[sw.Shard(0)])
    >>> seen = sw.explain(lambda x: x @ x, x, quiet=True)
    >>> [operation.name for operation in seen.operations]
    ['matmul']
    """
    with trace() as seen:
        if isinstance(fn, torch.nn.Module):
            tensors = {name: _without_values(value) for name, value in _named_tensors(fn)}
            torch.func.functional_call(fn, tensors, tuple(_replace(a) for a in args), _replace(kwargs))
        else:
            fn(*(_replace(value) for value in args), **_replace(kwargs))
    if not quiet:
        Console().print(seen.table())
    return seen


def _named_tensors(module: torch.nn.Module) -> list[tuple[str, Tensor]]:
    return [*module.named_parameters(), *module.named_buffers()]


def _replace(value: Any) -> Any:
    if isinstance(value, Tensor):
        return _without_values(value)
    if isinstance(value, dict):
        return {key: _replace(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_replace(item) for item in value)
    return value


def _without_values(tensor: Tensor) -> Tensor:
    with no_torch_function():
        meta = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
        if isinstance(tensor, DTensorBase):
            meta = tag(meta, tensor._layout)
        return meta.requires_grad_(tensor.requires_grad)
