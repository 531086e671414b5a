"""A training program: built the same way on every rank, run step by step, and observed at fixed points."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from shardwright.errors import ArgumentTypeError
from shardwright.tensor import manual_seed

__all__ = ["Observed", "Parallelize", "Program", "Shard", "default_step", "tied_names", "train"]

Parallelize: TypeAlias = Callable[[nn.Module, Any], Any]
Shard: TypeAlias = Callable[[Any, Any], Any]


@dataclass(frozen=True, slots=True)
class Program:
    """What is trained: a model, its batches, the step that computes the loss, and the optimizer."""

    model: Callable[[], nn.Module]
    batch: Any
    step: Callable[[nn.Module, Any], Any]
    optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer]
    steps: int
    max_norm: float
    dtype: torch.dtype | None
    seed: int


class Observed(NamedTuple):
    """A value of the training run: what it is, the name of its parameter ('' if it has none), and the tensor."""

    what: str
    name: str
    value: Tensor | None


def train(program: Program, parallelize: Parallelize | None, shard: Shard | None, mesh: Any) -> Iterator[Observed]:
    """Run the program and yield parameters, losses, gradients and gradient norms, in an order all ranks share.

    Without `parallelize`, the model is trained with plain torch.
    """
    torch.manual_seed(program.seed)
    model = _cast_module(program.model(), program.dtype)
    if parallelize is not None:
        model = parallelize(model, mesh) or model
    manual_seed(program.seed)
    torch.manual_seed(program.seed)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = program.optimizer(trained)
    yield from _parameters(model, "parameter before training")
    for step in range(program.steps):
        batch = program.batch(step) if callable(program.batch) else program.batch
        batch = _cast_batch(batch, program.dtype)
        loss = program.step(model, batch if shard is None else shard(batch, mesh))
        if not isinstance(loss, Tensor):
            raise ArgumentTypeError(
                f"same_as_one_rank: the step must return the loss as a tensor, got {type(loss).__name__}"
            )
        if loss.requires_grad:
            loss.backward()  # type: ignore[no-untyped-call]  # torch's is untyped
        yield Observed(f"loss of step {step}", "", loss.detach())
        for name, parameter in model.named_parameters(remove_duplicate=False):
            yield Observed(f"gradient of step {step}", name, parameter.grad)
        yield Observed(f"gradient norm of step {step}", "", torch.nn.utils.clip_grad_norm_(trained, program.max_norm))
        optimizer.step()
        optimizer.zero_grad()
    yield from _parameters(model, f"parameter after {program.steps} steps")


def tied_names(values: Iterable[tuple[str, Any]]) -> set[tuple[str, ...]]:
    """Return the names of each tensor that is registered under several."""
    names: dict[int, list[str]] = {}
    for name, value in values:
        names.setdefault(id(value), []).append(name)
    return {tuple(tied) for tied in names.values() if len(tied) > 1}


def _parameters(model: nn.Module, what: str) -> Iterator[Observed]:
    """Yield every parameter under each of its names; tied parameters are the same object under several."""
    for name, parameter in model.named_parameters(remove_duplicate=False):
        yield Observed(what, name, parameter)


def default_step(model: nn.Module, batch: Any) -> Any:
    """Call the model with the batch and return the loss: the output itself, its attribute or its key `loss`."""
    if isinstance(batch, Mapping):
        output = model(**batch)
    elif isinstance(batch, tuple | list):
        output = model(*batch)
    else:
        output = model(batch)
    if isinstance(output, Mapping):
        output = output["loss"]
    return getattr(output, "loss", output)


def _cast_module(model: nn.Module, dtype: torch.dtype | None) -> nn.Module:
    return model if dtype is None else model.to(dtype)


def _cast_batch(value: Any, dtype: torch.dtype | None) -> Any:
    """Return the batch with its floating-point tensors in `dtype`."""
    if dtype is None:
        return value
    if isinstance(value, Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    if isinstance(value, Mapping):
        return {key: _cast_batch(item, dtype) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_cast_batch(item, dtype) for item in value)
    return value
