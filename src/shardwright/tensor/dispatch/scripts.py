"""TorchScript, tracing and export: programs that run outside Python, where a DTensor is its shard.

- A scripted function reads its tensors in C++ and would compute on shards. Called with DTensors, it runs on replicated
  tensors, like an operator without a rule, and its writes are written back.
- Scripting, tracing or exporting a module with DTensor parameters or buffers raises: the program would hold shards.
- A DTensor as example input raises: the trace would mix global sizes with shards.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.export
import torch.jit
from torch import nn

from shardwright.errors import UnsupportedError
from shardwright.tensor.base.replaced import is_replaced, replacing
from shardwright.tensor.base.tagging import DTensorBase
from shardwright.tensor.dispatch.arguments import admit_plain_tensors, tensors_in
from shardwright.tensor.dispatch.fallback import call_replicated

__all__ = ["install"]

_enabled = torch._C._is_torch_function_enabled


def install() -> None:
    """Replace torch's entry points, or other packages' replacements of them. Idempotent."""
    for kind in (torch._C.ScriptFunction, torch._C.ScriptMethod):
        if not is_replaced(kind.__call__):
            kind.__call__ = _call_on_replicated(kind.__call__)  # type: ignore[method-assign]  # torch offers no other place
    for home, name in (
        (torch.jit._recursive, "create_script_module"),
        (torch.jit, "trace"),
        (torch.jit, "trace_module"),
        (torch.jit, "_get_trace_graph"),
        (torch.export, "export"),
    ):
        original = getattr(home, name)
        if not is_replaced(original):
            setattr(home, name, _refusing(original))


def _call_on_replicated(original: Any) -> Any:
    def run(script: Any, *args: Any, **kwargs: Any) -> Any:
        return original(script, *args, **kwargs)

    @replacing(original)
    def call(script: Any, *args: Any, **kwargs: Any) -> Any:
        dtensors = list(_dtensors((*args, *kwargs.values())))
        if not dtensors or not _enabled():
            return original(script, *args, **kwargs)
        name = f"torch.jit::{script.name}"
        direct = {id(tensor) for tensor in tensors_in((*args, *kwargs.values()))}
        if any(id(tensor) not in direct for tensor in dtensors):
            raise UnsupportedError(
                f"{name}: a DTensor {dtensors[0]._layout} inside an argument that is neither a tensor nor a list of "
                "tensors: TorchScript would see this rank's shard. Pass it as a separate argument, or pass "
                "`x.full_tensor()` or `x.to_local()`"
            )
        args, kwargs = admit_plain_tensors(name, args, kwargs)  # type: ignore[assignment]  # it gives a tuple
        return call_replicated(name, run, (script, *args), kwargs)

    return call


def _dtensors(value: Any) -> Iterator[DTensorBase]:
    """Yield the DTensors in nested arguments, including those that a module holds."""
    if isinstance(value, DTensorBase):
        yield value
    elif isinstance(value, nn.Module):
        yield from _dtensors([*value.parameters(), *value.buffers()])
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _dtensors(item)
    elif isinstance(value, dict):
        yield from _dtensors(list(value.values()))


def _refusing(original: Any) -> Any:
    @replacing(original)
    def function(*args: Any, **kwargs: Any) -> Any:
        found = next(_dtensors((*args, kwargs)), None)
        if found is not None and _enabled():
            name = {"create_script_module": "torch.jit.script"}.get(original.__name__, original.__name__)
            raise UnsupportedError(
                f"{name} with a DTensor {found._layout}: the resulting program would hold and compute this rank's "
                "shard. Pass plain tensors, such as `x.full_tensor()`, or compile with `shardwright.compile`; for "
                "this rank's part alone, use `x.to_local()`"
            )
        return original(*args, **kwargs)

    return function
