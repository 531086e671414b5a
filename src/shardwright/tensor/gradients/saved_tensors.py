"""Saved-tensor hooks get plain local tensors, and inputs of activation checkpoints keep their layouts.

Operators save a DTensor as its local tensor, with interception off; saved tensors are unpacked in backward, with
interception on. A hook that kept the DTensor itself would see the local shape when packing and the global shape when
unpacking. So importing this package replaces these methods of torch:

- `saved_tensors_hooks.__enter__`: packing gets a plain alias of a DTensor, and runs with interception on, so that a
  hook may compute with its own DTensors. Unpacking returns what was packed, which is plain.
- `saved_tensors_hooks.__exit__`: redistributed activations that were shared while the hooks were active are dropped.
- the methods of a checkpoint frame that save its inputs and unpack them for recomputation: in a nested checkpoint they
  go through the hooks of the outer one, which return plain tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, wraps
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils import checkpoint

from shardwright.tensor.base.tagging import DTensorBase, alias
from shardwright.tensor.gradients.functions import layouts_of, with_layout
from shardwright.tensor.gradients.share import enter_hooks, exit_hooks

__all__ = ["install"]


def install() -> tuple[Any, ...]:
    """Replace the methods, and return the replacements."""
    saved_tensors_hooks.__enter__ = _enter  # type: ignore[method-assign]  # torch offers no other place
    saved_tensors_hooks.__exit__ = _exit  # type: ignore[method-assign]  # likewise
    frame: Any = checkpoint._CheckpointFrame
    if hasattr(frame, "save_inputs"):  # before torch 2.13 an autograd Function saves them
        frame.save_inputs, frame.get_inputs = _with_layouts(frame.save_inputs, frame.get_inputs)
    return _enter, _exit, _pack_plain


def _enter(hooks: saved_tensors_hooks) -> None:
    enter_hooks()
    pack: Any = hooks.pack_hook
    if not isinstance(pack, torch.fx.GraphModule):  # compilers inspect it
        pack = partial(_pack_plain, pack)
    torch._C._autograd._push_saved_tensors_default_hooks(pack, hooks.unpack_hook)


def _exit(_: saved_tensors_hooks, *__: object) -> None:
    torch._C._autograd._pop_saved_tensors_default_hooks()
    exit_hooks()


def _pack_plain(pack: Callable[[Tensor], Any], tensor: Tensor) -> Any:
    if not isinstance(tensor, DTensorBase):
        # An operator on local tensors may save its result, the indices of topk for example, which is tagged afterwards.
        may_be_tagged = not tensor.requires_grad and not torch._C._is_torch_function_enabled()
        return pack(alias(tensor) if may_be_tagged else tensor)
    plain = alias(tensor)
    with torch._C._EnableTorchFunction():
        return pack(plain)


def _with_layouts(save: Any, get: Any) -> tuple[Any, Any]:
    @wraps(save)
    def save_inputs(self: Any, *args: Any) -> None:
        save(self, *args)
        self.layouts = layouts_of(args)

    @wraps(get)
    def get_inputs(self: Any) -> list[Any]:
        # Grad mode is off in backward: an alias would not require grad, and fewer tensors would be saved.
        with torch.enable_grad():
            return [with_layout(value, layout) for value, layout in zip(get(self), self.layouts, strict=True)]

    return save_inputs, get_inputs
