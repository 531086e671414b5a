"""In the forward of a parallel model, plain tensors that its code makes count as replicated.

Models make plain tensors (`torch.arange`, masks) from arguments that are the same on all ranks. Inside the forward of a
parallel model, and of each of its blocks, which activation checkpointing calls again in backward, they count as
replicated; `sw.verify_ranks` checks that they are.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterable
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from typing import Any

from torch import nn

from shardwright.tensor import implicit_replication
from shardwright.tensor.base.sequence_attention import SequenceAttention, attend_sequences_by

__all__ = ["ReplicatingMethod", "replicate_plain_tensors"]


class _Entered(threading.local):
    """The contexts that this thread has entered, the innermost last, each with the module whose forward it is for."""

    def __init__(self) -> None:
        self.contexts: list[tuple[nn.Module, AbstractContextManager[Any]]] = []


_entered = _Entered()


def replicate_plain_tensors(modules: Iterable[nn.Module], attention: SequenceAttention | None = None) -> None:
    """Make plain tensors count as replicated inside the forward of each of these modules, also if it raises.

    Attention there is offered to `attention` first.
    """
    for module in modules:
        module.register_forward_pre_hook(partial(_enter, attention), prepend=True)
        module.register_forward_hook(_leave, always_call=True)


def _enter(attention: SequenceAttention | None, module: nn.Module, _: Any) -> None:
    context = ExitStack()
    context.enter_context(implicit_replication())
    context.enter_context(attend_sequences_by(attention))
    _entered.contexts.append((module, context))


def _leave(module: nn.Module, *_: Any) -> None:
    while any(each is module for each, _ in _entered.contexts):  # inner ones too, which an interrupt has left behind
        inner, context = _entered.contexts.pop()
        context.__exit__(None, None, None)
        if inner is module:
            break


class ReplicatingMethod:
    """A method of a parallel model, such as `generate`, in which plain tensors count as replicated.

    It is kept in the model's `__dict__`, and copied and pickled with it.
    """

    def __init__(self, model: nn.Module, name: str) -> None:
        self.model, self.name = model, name
        functools.update_wrapper(self, getattr(type(model), name), updated=())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with implicit_replication():
            return getattr(type(self.model), self.name)(self.model, *args, **kwargs)

    def __reduce__(self) -> tuple[type[ReplicatingMethod], tuple[nn.Module, str]]:
        return ReplicatingMethod, (self.model, self.name)
