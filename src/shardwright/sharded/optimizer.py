"""`ShardedOptimizer`: any elementwise optimizer of torch, over the local shards of ShardedTensors.

Such an optimizer treats every element by itself, so each rank steps its own shards and no rank talks. What it
remembers of a shard has the shard's boxes: its state dict holds it as ShardedTensors, which reshard like any other.
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

# They compute with whole matrices, rows or norms, which a shard is not.
_NOT_ELEMENTWISE = ("Adafactor", "LBFGS", "Muon")


@final
class ShardedOptimizer(torch.optim.Optimizer):
    """An optimizer of this class over named ShardedTensors and plain tensors; more arguments are for the class.

    `param_groups` and `state` are those of the local tensors: learning rate schedulers work. `state_dict` goes by the
    names of the parameters, and `load_state_dict` takes one from parameters that were cut another way. A rank without
    shards has the same optimizer, with nothing to do. Parameters that are resharded need a new optimizer.

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
        # The base class is not initialised: what it would set up is the inner optimizer's, see __getattr__.
        if not (isinstance(optimizer_class, type) and issubclass(optimizer_class, torch.optim.Optimizer)):
            raise ArgumentTypeError(f"ShardedOptimizer: {optimizer_class!r} is not a class of optimizers")
        for name in _NOT_ELEMENTWISE:
            kind = getattr(torch.optim, name, None)
            if kind is not None and issubclass(optimizer_class, kind):
                raise UnsupportedError(
                    f"ShardedOptimizer: {optimizer_class.__name__} needs whole tensors, and a rank has shards: use an "
                    "elementwise optimizer such as AdamW, or DTensors (sharded.to_dtensor)"
                )
        self.named_params: dict[str, Tensor | ShardedTensor] = {}
        self._groups: list[list[str]] = []
        self._locals: dict[str, list[Tensor]] = {}
        group = {"params": self._take(named_params)}  # a group, as torch refuses an empty list but not an empty group
        self._inner = optimizer_class([group], *optimizer_args, **optimizer_kwargs)

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]  # an attribute there
        """The groups of local tensors, with their hyperparameters."""
        return self._inner.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]  # an attribute there
        """What is remembered of each local tensor."""
        return self._inner.state

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step of this rank's shards and the plain tensors; the ranks do not talk."""
        self._check_shards()
        return self._inner.step(closure) if closure is not None else self._inner.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drops the gradients, or sets them to zero."""
        self._inner.zero_grad(set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """One more group: `{"params": {"name": tensor, ...}, "lr": 0.1}`, its tensors by name."""
        params = param_group.get("params")
        if not isinstance(params, Mapping):
            raise ArgumentTypeError(
                f"add_param_group: params is a {type(params).__name__}: give tensors by name, {{'name': tensor}}"
            )
        self._inner.add_param_group({**param_group, "params": self._take(params)})

    def state_dict(self) -> dict[str, Any]:
        """The state by the names of the parameters, and the groups. All ranks of the parameters' groups call it.

        Of a ShardedTensor, what has the size of its shards is a ShardedTensor cut alike, and numbers are as they are;
        on ranks without shards, too. Memory is shared with the optimizer, as torch does it.
        """
        self._check_together("state_dict of a ShardedOptimizer")
        groups = [
            {**{key: value for key, value in group.items() if key != "params"}, "params": list(names)}
            for group, names in zip(self.param_groups, self._groups, strict=True)
        ]
        return {"state": export_state(self.named_params, self._inner.state), "param_groups": groups}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Takes over the state of an optimizer of the same parameters, however they were cut. All ranks call it."""
        self._check_together("load_state_dict of a ShardedOptimizer")
        states = import_state(self.named_params, state_dict, self._groups)
        numbers = iter(range(sum(map(len, self._locals.values()))))
        indices = {name: [next(numbers) for _ in self._locals[name]] for names in self._groups for name in names}
        groups = [
            {**group, "params": [index for name in names for index in indices[name]]}
            for group, names in zip(state_dict["param_groups"], self._groups, strict=True)
        ]
        flat = {
            index: one for name, each in states.items() for index, one in zip(indices[name], each, strict=True) if one
        }
        self._inner.load_state_dict({"state": flat, "param_groups": groups})

    def _take(self, named: Mapping[str, Tensor | ShardedTensor]) -> list[Tensor]:
        """The local tensors of a new group, which is remembered by names."""
        seen = {id(tensor): name for name, tensor in self.named_params.items()}
        for name, tensor in named.items():
            if not isinstance(tensor, Tensor):
                raise ArgumentTypeError(f"ShardedOptimizer: {name!r} is a {type(tensor).__name__}, not a tensor")
            if name in self.named_params:
                raise ShardError(f"ShardedOptimizer: {name!r} is in another group already")
            if (first := seen.setdefault(id(tensor), name)) != name:
                raise ShardError(f"ShardedOptimizer: {name!r} and {first!r} are one tensor: name it once")
        self.named_params.update(named)
        self._groups.append(list(named))
        self._locals.update({name: local_tensors(tensor) for name, tensor in named.items()})
        return [tensor for name in named for tensor in self._locals[name]]

    def _check_shards(self) -> None:
        """Sees that the tensors that are stepped are still those of the parameters."""
        for name, parameter in self.named_params.items():
            now, then = local_tensors(parameter), self._locals[name]
            if len(now) != len(then) or any(new is not old for new, old in zip(now, then, strict=True)):
                raise ShardError(
                    f"ShardedOptimizer: the shards of {name!r} are others than those it was made with: make a new "
                    "optimizer after a parameter was resharded or moved, and load its state_dict"
                )

    def _check_together(self, what: str) -> None:
        """`_check_shards` before ranks talk: one without shards cannot see what the others see."""

        def check() -> tuple[None, str]:
            self._check_shards()
            return None, ""

        for group, _ in by_group(self.named_params):
            comm.agree(check, what=what, group=group, same=True, unwrap=True)
        check()  # where there is no group

    def __getattr__(self, name: str) -> Any:
        """Hooks, defaults and what else torch keeps in an optimizer: that of the inner one."""
        if name == "_inner":
            raise AttributeError(name)  # asked for before it is there
        return getattr(self._inner, name)

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise UnsupportedError("ShardedOptimizer: it cannot be pickled or copied; save its state_dict()")


def local_tensors(parameter: Tensor | ShardedTensor) -> list[Tensor]:
    """What this rank holds of a parameter."""
    if isinstance(parameter, ShardedTensor):
        return [shard.tensor for shard in parameter.local_shards()]
    return [parameter]


def named_params_with_sharded_tensor(
    module: nn.Module, prefix: str = "", recurse: bool = True
) -> Iterator[tuple[str, Tensor | ShardedTensor]]:
    """The parameters of a module, and the ShardedTensors that it holds as attributes, by name, each once.

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
