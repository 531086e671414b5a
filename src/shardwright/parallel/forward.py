"""Run the forward of a parallel model: plain tensors that its code makes count as replicated.

Models make plain tensors (`torch.arange`, masks) from arguments that are the same on all ranks. Inside the forward of a
parallel model, and of each of its blocks, which activation checkpointing calls again in backward, they count as
replicated; `sw.verify_ranks` checks that they are. What is passed in must be DTensors: a plain batch could be a
different one on each rank.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor, nn

from shardwright.errors import MeshMismatchError, MixedTensorsError, TensorError
from shardwright.layout import Mesh
from shardwright.tensor import DTensor, implicit_replication
from shardwright.tensor.base.policy import replicates_implicitly

__all__ = ["ReplicatingMethod", "check_inputs", "replicate_plain_tensors"]


class _Entered(threading.local):
    """The contexts that this thread has entered, the innermost last, each with the module whose forward it is for."""

    def __init__(self) -> None:
        self.contexts: list[tuple[nn.Module, AbstractContextManager[None]]] = []


_entered = _Entered()


def replicate_plain_tensors(modules: Iterable[nn.Module]) -> None:
    """Make plain tensors count as replicated inside the forward of each of these modules, also if it raises."""
    for module in modules:
        module.register_forward_pre_hook(_enter, prepend=True)
        module.register_forward_hook(_leave, always_call=True)


def _enter(module: nn.Module, _: Any) -> None:
    context = implicit_replication()
    context.__enter__()
    _entered.contexts.append((module, context))


def _leave(module: nn.Module, *_: Any) -> None:
    while any(each is module for each, _ in _entered.contexts):  # inner ones too, which an interrupt has left behind
        inner, context = _entered.contexts.pop()
        context.__exit__(None, None, None)
        if inner is module:
            break


def check_inputs(model: nn.Module, mesh: Mesh) -> None:
    """Make the model refuse plain inputs, inputs on another mesh, and a forward while parameters have no memory."""
    model.register_forward_pre_hook(functools.partial(_check, mesh), prepend=True, with_kwargs=True)


def _check(mesh: Mesh, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    inputs = [(f"argument {index}", value) for index, value in enumerate(args)] + [
        (f"argument {name!r}", value) for name, value in kwargs.items()
    ]
    for name, value in inputs:
        if isinstance(value, DTensor) and value.sharding.mesh is not mesh:
            raise MeshMismatchError(
                f"{type(model).__name__}: {name} is on {value.sharding.mesh!r}, but the model on {mesh!r}: use "
                "sw.shard_batch(batch, mesh) with the mesh of the model"
            )
        if isinstance(value, Tensor) and not isinstance(value, DTensor) and value.ndim and not replicates_implicitly():
            raise MixedTensorsError(
                f"{type(model).__name__}: {name} is a plain tensor of shape {tuple(value.shape)}, which may be another "
                "one on each rank: pass the batch through sw.shard_batch(batch, mesh), or use `with "
                "sw.implicit_replication():` if every rank holds the same values"
            )
    empty = [name for name, parameter in model.named_parameters() if parameter.is_meta]
    if empty and not any(isinstance(value, Tensor) and value.is_meta for _, value in inputs):
        raise TensorError(
            f"{type(model).__name__}: parameter {empty[0]} is on the meta device, without values: call "
            "model.to_empty(device=...) and initialize the model, or load a checkpoint, before its first use"
        )


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
