"""Saved-tensor hooks get plain local tensors, and inputs of activation checkpoints keep their layouts.

A DTensor is saved by operators as the local tensor that it is, in a place where interception is off; what was saved is
unpacked in backward, where it is on. A hook that kept the DTensor itself would see the local shape in one and the
global shape in the other. So importing this package replaces two methods of torch:

- `saved_tensors_hooks.__enter__`: packing gets a plain alias of a DTensor, and runs with interception on, so that a
  hook may compute with DTensors that it holds itself. Unpacking gives back what was packed, which is plain.
- those of a checkpoint's frame that save its inputs and unpack them to compute again: in a nested checkpoint they go
  through the hooks of the outer one, and come back plain.
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

__all__ = ["install"]


def install() -> tuple[Any, ...]:
    """Replace the methods, and return what replaces them."""
    saved_tensors_hooks.__enter__ = _enter  # type: ignore[method-assign]  # torch offers no other place
    frame: Any = checkpoint._CheckpointFrame
    if hasattr(frame, "save_inputs"):  # before torch 2.13 an autograd Function saves them
        frame.save_inputs, frame.get_inputs = _with_layouts(frame.save_inputs, frame.get_inputs)
    return _enter, _pack_plain


def _enter(hooks: saved_tensors_hooks) -> None:
    pack: Any = hooks.pack_hook
    if not isinstance(pack, torch.fx.GraphModule):  # which compilers look into
        pack = partial(_pack_plain, pack)
    torch._C._autograd._push_saved_tensors_default_hooks(pack, hooks.unpack_hook)


def _pack_plain(pack: Callable[[Tensor], Any], tensor: Tensor) -> Any:
    if not isinstance(tensor, DTensorBase):
        return pack(tensor)
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
        with (
            torch.enable_grad()
        ):  # off in backward, where an alias would not require grad: fewer tensors are saved then
            return [with_layout(value, layout) for value, layout in zip(get(self), self.layouts, strict=True)]

    return save_inputs, get_inputs
