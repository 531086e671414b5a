"""Optimizer state in checkpoints, by parameter name."""

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
    """Return the state of an optimizer by the names of its parameters in the model (or in a mapping).

    An optimizer's own `state_dict` numbers its parameters, so it can be loaded only for the same parameters in the same
    order. This one can be loaded into any optimizer of the same type whose parameters have these names: in another
    order, in other groups, for some of them only, on other ranks.

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
    """The result of `optimizer_state`: `{"state": {name: ...}, "options": {name: ...}}`, with the options by parameter.

    >>> import torch
    >>> model = torch.nn.Linear(1, 1, bias=False)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> OptimizerState(model, optimizer).state_dict()["options"]["weight"]["lr"]
    0.1
    """

    def __init__(self, model: nn.Module | Mapping[str, Tensor], optimizer: torch.optim.Optimizer) -> None:
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise ArgumentTypeError(f"optimizer_state: expected an optimizer, got {type(optimizer).__name__}")
        if isinstance(model, nn.Module):
            named: Mapping[str, Tensor] = dict(named_params_with_sharded_tensor(model))
        elif isinstance(model, Mapping):
            named = model
        else:
            raise ArgumentTypeError(
                f"optimizer_state: expected a module or a mapping of names to parameters, got {type(model).__name__}"
            )
        self._optimizer = optimizer
        names: dict[int, str] = {}
        for name, tensor in named.items():
            names.setdefault(id(tensor), name)  # the first of several names
        parameters = parameters_of(optimizer) or {}
        name_of = {key: names.get(id(tensor)) for key, tensor in parameters.items()}
        keys = iter(name_of)
        groups = optimizer._groups if isinstance(optimizer, ShardedOptimizer) else _groups(optimizer)
        self._groups = [[next(keys) for _ in group] for group in groups]
        nameless = [key for key, name in name_of.items() if name is None]
        if nameless:
            raise StateError(
                f"optimizer_state: {len(nameless)} of {len(name_of)} parameters of the {type(optimizer).__name__} have "
                f"no name; the first is {nameless[0]!r}. Pass the model that it optimizes"
            )
        self._names: dict[Any, str] = {key: name for key, name in name_of.items() if name is not None}
        self.parameters: dict[str, Tensor] = {name: named[name] for name in self._names.values()}

    def state_dict(self) -> dict[str, Any]:
        """Return the state and the options of every parameter, by name; tensors are not copied."""
        original = self._optimizer.state_dict()
        options: dict[str, Any] = {}
        for keys, group in zip(self._groups, original["param_groups"], strict=True):
            for key in keys:
                options[self._names[key]] = {name: group[name] for name in group if name not in _NOT_OPTIONS}
        return {"state": {self._names[key]: value for key, value in original["state"].items()}, "options": options}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load the state into the optimizer; parameters of one group must have been saved with the same options."""
        state, options = state_dict["state"], state_dict["options"]
        numbered = {key: state[name] for key, name in self._names.items() if name in state}
        param_groups = self._optimizer.state_dict()["param_groups"]
        groups = [
            {**group, **self._common([self._names[key] for key in keys], options)}
            for keys, group in zip(self._groups, param_groups, strict=True)
        ]
        self._optimizer.load_state_dict({"state": numbered, "param_groups": groups})

    def _common(self, names: Sequence[str], options: Mapping[str, Mapping[str, Any]]) -> Mapping[str, Any]:
        saved = [name for name in names if name in options]
        for name in saved[1:]:
            for option in options[name]:
                first, second = options[saved[0]].get(option), options[name][option]
                if not _is_same(first, second):
                    raise LoadMismatchError(
                        f"{saved[0]!r} and {name!r} are in one group of this optimizer, but were saved with "
                        f"{option}={first!r} and {option}={second!r}; put them into separate groups"
                    )
        return options[saved[0]] if saved else {}


def _groups(optimizer: torch.optim.Optimizer) -> list[list[Tensor]]:
    return [list(group["params"]) for group in optimizer.param_groups]


_NOT_OPTIONS = ("params", "param_names")


def _is_same(first: Any, second: Any) -> bool:
    if isinstance(first, Tensor) or isinstance(second, Tensor):
        return isinstance(first, Tensor) and isinstance(second, Tensor) and torch.equal(first, second)
    return bool(first == second)


def parameters_of(value: Any) -> Mapping[Any, Tensor] | None:
    """Return the parameters of an optimizer by their state-dict keys; None if the object is not an optimizer."""
    if isinstance(value, OptimizerState):
        return value.parameters
    if isinstance(value, ShardedOptimizer):
        return value.named_params
    if isinstance(value, torch.optim.Optimizer):
        return dict(enumerate(tensor for group in _groups(value) for tensor in group))
    return None
