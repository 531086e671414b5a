"""`ShardedOptimizer`: any elementwise torch optimizer, applied to the local shards of ShardedTensors.

An elementwise optimizer updates every element independently, so each rank steps its own shards without communication.
Its state has the sharding of the parameters: in the state dict it consists of ShardedTensors, which can be resharded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NoReturn, final

import torch
from torch import Tensor, nn

from shardwright import comm
from shardwright.errors import ArgumentTypeError, ShardError, UnsupportedError
from shardwright.sharded.optimizer_state import by_group, export_state, import_state
from shardwright.sharded.tensor import ShardedTensor

__all__ = ["ShardedOptimizer", "local_tensors", "named_params_with_sharded_tensor"]

# They need complete matrices, rows or norms.
_NOT_ELEMENTWISE = ("Adafactor", "LBFGS", "Muon")


@final
class ShardedOptimizer(torch.optim.Optimizer):
    """An optimizer of the given class for named ShardedTensors and plain tensors.

    Further arguments go to the class. `param_groups` and `state` belong to the local tensors, so learning rate
    schedulers work. `state_dict` is keyed by parameter names; `load_state_dict` also accepts the state of parameters
    with another sharding. A rank without shards has the same optimizer, with nothing to step. After resharding a
    parameter, create a new optimizer.

    >>> import torch
    >>> from shardwright import sharded
    >>> table = sharded.ones(sharded.ChunkShardingSpec(0, ["rank:0/cpu"] * 2), 2, requires_grad=True)
    >>> optimizer = sharded.ShardedOptimizer({"table": table}, torch.optim.SGD, lr=0.5, momentum=0.9)
    >>> sum(shard.tensor.sum() for shard in table.local_shards()).backward()
    >>> optimizer.step()
    >>> table.gather()
    tensor([0.5000, 0.5000])
    >>> optimizer.state_dict()["state"]["table"]["momentum_buffer"]
    ShardedTensor([2], torch.float32, 2 shards; here: [0:1], [1:2])
    """

    def __init__(
        self,
        named_params: Mapping[str, Tensor | ShardedTensor],
        optimizer_class: type[torch.optim.Optimizer],
        *optimizer_args: Any,
        **optimizer_kwargs: Any,
    ) -> None:
        # The base class is not initialised: its attributes are those of the inner optimizer, see __getattr__.
        if not (isinstance(optimizer_class, type) and issubclass(optimizer_class, torch.optim.Optimizer)):
            raise ArgumentTypeError(
                f"ShardedOptimizer: expected a subclass of torch.optim.Optimizer, got {optimizer_class!r}"
            )
        for name in _NOT_ELEMENTWISE:
            kind = getattr(torch.optim, name, None)
            if kind is not None and issubclass(optimizer_class, kind):
                raise UnsupportedError(
                    f"ShardedOptimizer: {optimizer_class.__name__} is not elementwise and needs unsharded tensors: use "
                    "an elementwise optimizer such as AdamW, or DTensors (sharded.to_dtensor)"
                )
        self.named_params: dict[str, Tensor | ShardedTensor] = {}
        self._groups: list[list[str]] = []
        self._locals: dict[str, list[Tensor]] = {}
        group = {"params": self._take(named_params)}  # a group: torch rejects an empty list, but not an empty group
        self._inner = optimizer_class([group], *optimizer_args, **optimizer_kwargs)

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]  # an attribute there
        """The parameter groups of local tensors, with their hyperparameters."""
        return self._inner.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]  # an attribute there
        """The optimizer state of each local tensor."""
        return self._inner.state

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step this rank's shards and the plain tensors, without communication."""
        self._check_shards()
        return self._inner.step(closure) if closure is not None else self._inner.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Set the gradients to None, or to zero."""
        self._inner.zero_grad(set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group `{"params": {"name": tensor, ...}, "lr": 0.1}` with tensors by name."""
        params = param_group.get("params")
        if not isinstance(params, Mapping):
            raise ArgumentTypeError(
                f"add_param_group: params must be a dict {{'name': tensor}}, got {type(params).__name__}"
            )
        self._inner.add_param_group({**param_group, "params": self._take(params)})

    def state_dict(self) -> dict[str, Any]:
        """Return the state by parameter name, and the parameter groups. Collective.

        State entries of a ShardedTensor with the size of its shards become ShardedTensors with the same sharding;
        numbers stay numbers. The same on ranks without shards. Memory is shared with the optimizer, as in torch.
        """
        self._check_on_all_ranks("state_dict of a ShardedOptimizer")
        groups = [
            {**{key: value for key, value in group.items() if key != "params"}, "params": list(names)}
            for group, names in zip(self.param_groups, self._groups, strict=True)
        ]
        return {"state": export_state(self.named_params, self._inner.state), "param_groups": groups}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load the state of an optimizer of the same parameters, with any sharding. Collective."""
        self._check_on_all_ranks("load_state_dict of a ShardedOptimizer")
        states = import_state(self.named_params, state_dict, self._groups)
        counter = iter(range(sum(map(len, self._locals.values()))))
        indices = {name: [next(counter) for _ in self._locals[name]] for names in self._groups for name in names}
        groups = [
            {**group, "params": [index for name in names for index in indices[name]]}
            for group, names in zip(state_dict["param_groups"], self._groups, strict=True)
        ]
        flat = {
            index: state
            for name, local in states.items()
            for index, state in zip(indices[name], local, strict=True)
            if state
        }
        self._inner.load_state_dict({"state": flat, "param_groups": groups})

    def _take(self, named: Mapping[str, Tensor | ShardedTensor]) -> list[Tensor]:
        """Register a new group by name and return its local tensors."""
        seen = {id(tensor): name for name, tensor in self.named_params.items()}
        for name, tensor in named.items():
            if not isinstance(tensor, Tensor):
                raise ArgumentTypeError(f"ShardedOptimizer: {name!r} must be a tensor, got {type(tensor).__name__}")
            if name in self.named_params:
                raise ShardError(f"ShardedOptimizer: {name!r} is already in another group")
            if (first := seen.setdefault(id(tensor), name)) != name:
                raise ShardError(f"ShardedOptimizer: {name!r} and {first!r} are the same tensor: list it once")
        self.named_params.update(named)
        self._groups.append(list(named))
        self._locals.update({name: local_tensors(tensor) for name, tensor in named.items()})
        return [tensor for name in named for tensor in self._locals[name]]

    def _check_shards(self) -> None:
        """Raise if the parameters have other shards than when the optimizer was created."""
        for name, parameter in self.named_params.items():
            now, then = local_tensors(parameter), self._locals[name]
            if len(now) != len(then) or any(new is not old for new, old in zip(now, then, strict=True)):
                raise ShardError(
                    f"ShardedOptimizer: the shards of {name!r} have been replaced since the optimizer was created: "
                    "create a new optimizer after resharding or moving a parameter, and load the state_dict"
                )

    def _check_on_all_ranks(self, what: str) -> None:
        """Like `_check_shards`, but raise on all ranks, including those without shards."""

        def check() -> tuple[None, str]:
            self._check_shards()
            return None, ""

        for group, _ in by_group(self.named_params):
            comm.agree(check, what=what, group=group, same=True, unwrap=True)
        check()  # where there is no group

    def __getattr__(self, name: str) -> Any:
        """Delegate hooks, defaults and other attributes to the inner optimizer."""
        if name == "_inner":
            raise AttributeError(name)  # not set yet
        return getattr(self._inner, name)

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise UnsupportedError("ShardedOptimizer cannot be pickled or copied: save its state_dict()")


def local_tensors(parameter: Tensor | ShardedTensor) -> list[Tensor]:
    """Return the local tensors of a parameter."""
    if isinstance(parameter, ShardedTensor):
        return [shard.tensor for shard in parameter.local_shards()]
    return [parameter]


def named_params_with_sharded_tensor(
    module: nn.Module, prefix: str = "", recurse: bool = True
) -> Iterator[tuple[str, Tensor | ShardedTensor]]:
    """Yield the parameters of a module and its ShardedTensor attributes, with their names, each once.

    >>> from torch import nn
    >>> from shardwright import sharded
    >>> model = nn.Sequential(nn.Linear(2, 2))
    >>> model[0].table = sharded.ones(sharded.ChunkShardingSpec(0, ["rank:0/cpu"]), 2)
    >>> [name for name, _ in sharded.named_params_with_sharded_tensor(model)]
    ['0.weight', '0.bias', '0.table']
    """
    seen: set[int] = set()
    for path, holder in module.named_modules(prefix=prefix) if recurse else [(prefix, module)]:
        attributes = {name: value for name, value in vars(holder).items() if isinstance(value, ShardedTensor)}
        for name, tensor in {**holder._parameters, **attributes}.items():
            if tensor is not None and id(tensor) not in seen:
                seen.add(id(tensor))
                yield (f"{path}.{name}" if path else name), tensor
