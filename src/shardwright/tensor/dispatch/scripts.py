"""TorchScript, tracing and export: programs that torch takes out of Python, where a DTensor is its shard.

- A scripted function takes its tensors in C++ and would compute on shards. Called with DTensors, it is computed on
  replicated tensors, as an operator without a rule is, and what it writes to is written back.
- A module whose parameters or buffers are DTensors is not scripted, traced or exported: the program would hold shards.
- An example input that is a DTensor is refused: the trace would mix global sizes with shards.
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
    """Replace torch's entry points, or what other packages have put in their place. Doing it twice changes nothing."""
    for kind in (torch._C.ScriptFunction, torch._C.ScriptMethod):
        if not is_replaced(kind.__call__):
            kind.__call__ = _call_whole(kind.__call__)  # type: ignore[method-assign]  # torch offers no other place
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


def _call_whole(original: Any) -> Any:
    def run(script: Any, *args: Any, **kwargs: Any) -> Any:
        return original(script, *args, **kwargs)

    @replacing(original)
    def call(script: Any, *args: Any, **kwargs: Any) -> Any:
        ours = list(_dtensors((*args, *kwargs.values())))
        if not ours or not _enabled():
            return original(script, *args, **kwargs)
        name = f"torch.jit::{script.name}"
        direct = {id(tensor) for tensor in tensors_in((*args, *kwargs.values()))}
        if any(id(tensor) not in direct for tensor in ours):
            raise UnsupportedError(
                f"{name}: a DTensor {ours[0]._layout} inside an argument that is neither a tensor nor a list of "
                "tensors, of which TorchScript would see this rank's shard: pass it as an argument of its own, or give "
                "`x.full_tensor()` or `x.to_local()`"
            )
        args, kwargs = admit_plain_tensors(name, args, kwargs)  # type: ignore[assignment]  # it gives a tuple
        return call_replicated(name, run, (script, *args), kwargs)

    return call


def _dtensors(value: Any) -> Iterator[DTensorBase]:
    """The DTensors in nested arguments; those that a module holds, too."""
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
                f"{name} with a DTensor {found._layout}: the program that it makes would hold and compute this rank's "
                "shard. Give it plain tensors, such as `x.full_tensor()`, or compile with `shardwright.compile`; for "
                "this rank's part alone, use `x.to_local()`"
            )
        return original(*args, **kwargs)

    return function
