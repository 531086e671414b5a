"""Optimizers in checkpoints: their state by the names of parameters, and made where they have not stepped yet.

What an optimizer remembers exists only once it has stepped. So when a state is loaded into one that has not, what the
checkpoint has for a parameter is made for it first: with the parameter's layout where it has its shape. Nothing is
stepped for it, and the optimizer itself is given all of it at the end, by its own `load_state_dict`, or nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, final

import torch
from torch import Tensor, nn

from shardwright.checkpoint.format.stored import StoredEntry, StoredTensor
from shardwright.checkpoint.format.tensors import TensorTable
from shardwright.checkpoint.read.match import fits, patterns_of
from shardwright.checkpoint.state.flatten import Keys
from shardwright.checkpoint.state.grown import ABSENT, Behind, behind, behind_text, grow, grown, plain, planted
from shardwright.checkpoint.state.leaves import to_ours
from shardwright.checkpoint.state.marks import Stateful
from shardwright.checkpoint.state.names import joined
from shardwright.checkpoint.state.values import DTYPES
from shardwright.errors import ArgumentTypeError, LoadMismatchError, StateError
from shardwright.layout import Replicate
from shardwright.sharded import ShardedOptimizer, ShardedTensor, named_params_with_sharded_tensor
from shardwright.tensor import DTensor, empty

__all__ = ["OptimizerState", "completing", "optimizer_state"]


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
        parameters = _parameters(optimizer) or {}
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


@final
class completing:  # noqa: N801  # it is called like a function
    """What gives an object's state, as `flatten` found it, back with what is stored for it besides.

    That is what an optimizer that has not stepped lacks, and what any other object does that is no module. Only names
    that `only` chooses are made. `made` are the tensors without contents: they must be filled, or not be given. `grown`
    are the places, among all that is stored, of what objects that are no optimizers lacked.
    """

    def __init__(
        self, stored: Sequence[StoredEntry], table: TensorTable, only: str | Sequence[str] | None = None
    ) -> None:
        self._table, self.made = table, _Made()
        self.grown: set[int] = set()
        self._places = {id(one): place for place, one in enumerate(stored)}
        patterns = patterns_of(only)
        self._stored = [one for one in stored if patterns is None or fits(one.name, patterns)]

    def without(self, entries: Iterable[StoredEntry]) -> completing:
        """The same, which does not make these."""
        other = completing([], self._table)
        left_out = {id(one) for one in entries}
        other._places, other._stored = self._places, [one for one in self._stored if id(one) not in left_out]
        return other

    def __call__(self, value: Any, state: Any, name: str, keys: Keys) -> Any:
        if isinstance(value, nn.Module) or not self._stored:
            return state
        parameters = _parameters(value)
        if parameters is None:
            return grow(state, behind(self._stored, name, keys), self._make_plain)
        if not isinstance(state, Mapping) or not isinstance(state.get("state"), dict):
            return state
        remembered = dict(state["state"])
        new: dict[Any, list[Behind]] = {}
        for key, one in _of_parameters(behind(self._stored, joined(name, "state"), (*keys, "state")), parameters):
            if key not in remembered:
                new.setdefault(key, []).append(one)
        for key, entries in new.items():
            made = grown(planted(entries), partial(self._make_like, parameters[key]))
            if made is not ABSENT:
                remembered[key] = made
        return {**state, "state": remembered}

    def _make_plain(self, entry: StoredEntry, depth: int) -> Any:
        if entry.of_rank or Behind(entry.path[len(entry.path) - depth :], "", entry).has_codec:
            return ABSENT  # only a state that has it already knows how it is wrapped
        if id(entry) in self._places:
            self.grown.add(self._places[id(entry)])
        what = entry.what
        if not isinstance(what, StoredTensor):
            return plain(what.value)
        made = torch.empty(self._table.shape(what.number), dtype=self._dtype(what))
        return self.made.keep(made.numpy() if what.is_array else made)

    def _dtype(self, what: StoredTensor) -> torch.dtype:
        return DTYPES[self._table.dtypes[what.number]]

    def _make_like(self, parameter: Tensor, entry: StoredEntry, depth: int) -> Any:
        if entry.of_rank or Behind(entry.path[len(entry.path) - depth :], "", entry).has_codec:
            return ABSENT
        what = entry.what
        if not isinstance(what, StoredTensor):
            return plain(what.value)
        if what.is_array:
            return self.made.keep(torch.empty(self._table.shape(what.number), dtype=self._dtype(what)).numpy())
        is_step = depth == 1 and entry.path[-1:] == ("step",)
        return self.made.keep(_made(parameter, is_step, what.number, self._table))


@final
class _Made:
    """What was made, by identity; it is kept, so that no other can have it."""

    def __init__(self) -> None:
        self._kept: dict[int, Any] = {}

    def keep(self, value: Any) -> Any:
        self._kept[id(value)] = value
        return value

    def __contains__(self, value: object) -> bool:
        return id(value) in self._kept


def _parameters(value: Any) -> Mapping[Any, Tensor] | None:
    """The parameters of an optimizer by the keys that its state dict has for them; None of what is none."""
    if isinstance(value, OptimizerState):
        return value.parameters
    if isinstance(value, ShardedOptimizer):
        return value.named_params
    if isinstance(value, torch.optim.Optimizer):
        return dict(enumerate(tensor for group in _groups(value) for tensor in group))
    return None


def _of_parameters(entries: Iterable[Behind], parameters: Mapping[Any, Tensor]) -> Iterator[tuple[Any, Behind]]:
    """What is stored of parameters: of which, and under which keys behind it."""
    by_text = {str(key): key for key in parameters}
    for one in entries:
        first = one.keys[0]
        if first in parameters and type(first) is type(by_text.get(str(first))):
            yield first, one.below(1)
            continue
        rest = ".".join(map(str, one.keys))
        at = len(rest)
        while at > 0 and rest[:at] not in by_text:
            at = rest.rfind(".", 0, at)  # names have dots, too: the longest that fits
        if at == len(rest):
            yield by_text[rest], Behind((), "", one.entry)
        elif at > 0:
            yield by_text[rest[:at]], behind_text(one.entry, rest[at + 1 :])


def _made(parameter: Tensor, is_step: bool, number: int, table: TensorTable) -> Tensor:
    """Room for a stored tensor of a parameter's state."""
    shape, dtype = table.shape(number), DTYPES[table.dtypes[number]]
    is_like = tuple(parameter.shape) == shape and not is_step
    if dtype.is_floating_point and parameter.dtype.is_floating_point and not is_step:
        dtype = parameter.dtype  # as torch has it: the optimizer would convert it anyway, and cast= is to say so
    if not shape and not is_like:
        return torch.empty((), dtype=dtype)
    if isinstance(parameter, ShardedTensor):
        if not is_like:
            return torch.empty(shape, dtype=dtype)
        shards = [torch.empty_like(shard.tensor, dtype=dtype) for shard in parameter.local_shards()]
        return parameter._with([shard.requires_grad_(False) for shard in shards], dtype=dtype)
    if is_like:
        return torch.empty_like(parameter, dtype=dtype, requires_grad=False)
    ours = to_ours(parameter)
    if not isinstance(ours, DTensor):
        return torch.empty(shape, dtype=dtype, device=parameter.device)
    whole = empty(*shape, dtype=dtype, mesh=ours.device_mesh, placements=[Replicate()] * ours.device_mesh.ndim)
    if isinstance(parameter, DTensor):
        return whole
    from shardwright.interop import to_torch_dtensor  # the parameter is PyTorch's: it is imported already

    return to_torch_dtensor(whole)
