"""Optimizers in checkpoints: their state by the names of parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, final

import torch
from torch import Tensor, nn

from shardwright.checkpoint.state.marks import Stateful
from shardwright.errors import ArgumentTypeError, LoadMismatchError, StateError
from shardwright.sharded import ShardedOptimizer, named_params_with_sharded_tensor

__all__ = ["OptimizerState", "optimizer_state", "parameters_of"]


def optimizer_state(model: nn.Module | Mapping[str, Tensor], optimizer: torch.optim.Optimizer) -> OptimizerState:
    """The state of an optimizer by the names that the model (or a mapping) has for its parameters.

    An optimizer's own `state_dict` counts parameters, so it fits only the same parameters in the same order. This fits
    any optimizer of the same kind over parameters of these names: in another order, in other groups, some of them only,
    on other ranks.

    >>> import tempfile, torch
    >>> from shardwright import checkpoint
    >>> model = torch.nn.Linear(2, 1)
    >>> one = torch.optim.SGD([model.weight, model.bias], lr=0.1, momentum=0.9)
    >>> model(torch.ones(2)).sum().backward()
    >>> one.step()
    >>> other = torch.optim.SGD([model.bias, model.weight], lr=0.5, momentum=0.9)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     checkpoint.save(checkpoint.optimizer_state(model, one), folder)
    ...     _ = checkpoint.load(checkpoint.optimizer_state(model, other), folder)
    >>> other.state[model.weight]["momentum_buffer"], other.param_groups[0]["lr"]
    (tensor([[1., 1.]]), 0.1)
    """
    return OptimizerState(model, optimizer)


@final
class OptimizerState(Stateful):
    """What `optimizer_state` gives: `{"state": {name: ...}, "options": {name: ...}}`, the options of each group.

    >>> import torch
    >>> model = torch.nn.Linear(1, 1, bias=False)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> OptimizerState(model, optimizer).state_dict()["options"]["weight"]["lr"]
    0.1
    """

    def __init__(self, model: nn.Module | Mapping[str, Tensor], optimizer: torch.optim.Optimizer) -> None:
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise ArgumentTypeError(f"optimizer_state: {type(optimizer).__name__} is not an optimizer")
        if isinstance(model, nn.Module):
            named: Mapping[str, Tensor] = dict(named_params_with_sharded_tensor(model))
        elif isinstance(model, Mapping):
            named = model
        else:
            raise ArgumentTypeError(
                f"optimizer_state: {type(model).__name__} is neither a module nor a mapping of names to parameters"
            )
        self._optimizer = optimizer
        names: dict[int, str] = {}
        for name, tensor in named.items():
            names.setdefault(id(tensor), name)  # of several names, the first
        parameters = parameters_of(optimizer) or {}
        own = {key: names.get(id(tensor)) for key, tensor in parameters.items()}
        keys = iter(own)
        groups = optimizer._groups if isinstance(optimizer, ShardedOptimizer) else _groups(optimizer)
        self._groups = [[next(keys) for _ in group] for group in groups]
        nameless = [key for key, name in own.items() if name is None]
        if nameless:
            raise StateError(
                f"optimizer_state: {len(nameless)} of {len(own)} parameters of the {type(optimizer).__name__} are not "
                f"among those that have names; the first is {nameless[0]!r}. Give the model that it optimizes"
            )
        self._names: dict[Any, str] = {key: name for key, name in own.items() if name is not None}
        self.parameters: dict[str, Tensor] = {name: named[name] for name in self._names.values()}

    def state_dict(self) -> dict[str, Any]:
        """The state and the options of every parameter, by name; tensors are the optimizer's own."""
        given = self._optimizer.state_dict()
        options: dict[str, Any] = {}
        for keys, group in zip(self._groups, given["param_groups"], strict=True):
            for key in keys:
                options[self._names[key]] = {name: group[name] for name in group if name not in _OF_THE_GROUP}
        return {"state": {self._names[key]: one for key, one in given["state"].items()}, "options": options}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Gives it to the optimizer; parameters of one group must have been given the same options."""
        state, options = state_dict["state"], state_dict["options"]
        numbered = {key: state[name] for key, name in self._names.items() if name in state}
        own = self._optimizer.state_dict()["param_groups"]
        groups = [
            {**group, **self._common([self._names[key] for key in keys], options)}
            for keys, group in zip(self._groups, own, strict=True)
        ]
        self._optimizer.load_state_dict({"state": numbered, "param_groups": groups})

    def _common(self, names: Sequence[str], options: Mapping[str, Mapping[str, Any]]) -> Mapping[str, Any]:
        known = [name for name in names if name in options]
        for name in known[1:]:
            for option in options[name]:
                one, other = options[known[0]].get(option), options[name][option]
                if not _is_same(one, other):
                    raise LoadMismatchError(
                        f"{known[0]!r} and {name!r} are in one group of this optimizer, and were saved with "
                        f"{option}={one!r} and {option}={other!r}: put them in groups of their own"
                    )
        return options[known[0]] if known else {}


def _groups(optimizer: torch.optim.Optimizer) -> list[list[Tensor]]:
    return [list(group["params"]) for group in optimizer.param_groups]


_OF_THE_GROUP = ("params", "param_names")


def _is_same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        return isinstance(one, Tensor) and isinstance(other, Tensor) and torch.equal(one, other)
    return bool(one == other)


def parameters_of(value: Any) -> Mapping[Any, Tensor] | None:
    """The parameters of an optimizer by the keys that its state dict has for them; None of what is none."""
    if isinstance(value, OptimizerState):
        return value.parameters
    if isinstance(value, ShardedOptimizer):
        return value.named_params
    if isinstance(value, torch.optim.Optimizer):
        return dict(enumerate(tensor for group in _groups(value) for tensor in group))
    return None
