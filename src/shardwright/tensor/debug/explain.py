"""`explain`: show the communication of a function without running it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

from shardwright.tensor.base.parameter_use import copy_use
from shardwright.tensor.base.tagging import DTensorBase, no_torch_function, tag
from shardwright.tensor.base.trace import Trace, trace

__all__ = ["explain"]


def explain(fn: Callable[..., Any], *args: Any, quiet: bool = False, **kwargs: Any) -> Trace:
    """Print the operators, redistributions, bytes and source lines of `fn(*args, **kwargs)`, without communicating.

    The function runs on meta tensors, which have no values: its arguments, nested in lists, tuples and dicts or held
    by modules, are replaced for the call. A function that reads values cannot be explained. `quiet=True` returns the
    trace without printing it.

    >>> import torch, shardwright as sw
    >>> x = sw.ones(4, 4, mesh=sw.init_device_mesh("cpu", (1,)), placements=[sw.Shard(0)])
    >>> seen = sw.explain(lambda x: x @ x, x, quiet=True)
    >>> [operation.name for operation in seen.operations]
    ['matmul']
    """
    with trace() as seen:
        if isinstance(fn, torch.nn.Module):
            tensors = {name: _to_meta(value) for name, value in _named_tensors(fn)}
            torch.func.functional_call(fn, tensors, tuple(_replace_tensors(a) for a in args), _replace_tensors(kwargs))
        else:
            fn(*(_replace_tensors(value) for value in args), **_replace_tensors(kwargs))
    if not quiet:
        Console().print(seen.table())
    return seen


def _named_tensors(module: torch.nn.Module) -> list[tuple[str, Tensor]]:
    return [*module.named_parameters(), *module.named_buffers()]


def _replace_tensors(value: Any) -> Any:
    if isinstance(value, Tensor):
        return _to_meta(value)
    if isinstance(value, dict):
        return {key: _replace_tensors(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_replace_tensors(item) for item in value)
    return value


def _to_meta(tensor: Tensor) -> Tensor:
    with no_torch_function():
        meta = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
        if isinstance(tensor, DTensorBase):
            meta = tag(meta, tensor._layout)
            copy_use(meta, tensor)
            if "_is_param" in tensor.__dict__:
                meta._is_param = True  # the layouts that operators keep depend on it
        return meta.requires_grad_(tensor.requires_grad)
