"""`FSDPModule`: the class of a module whose parameters are fully sharded."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from types import MethodType
from typing import Any, final

from torch import nn

from shardwright.errors import ArgumentTypeError, TensorError
from shardwright.parallel.fsdp.binding import BINDING, Binding

__all__ = ["FSDPModule", "UnshardHandle", "binding_of", "register_fsdp_forward_method", "sharded_class"]


@final
class UnshardHandle:
    """An `unshard` that was started: `wait` registers the gathered parameters.

    >>> import torch, shardwright as sw
    >>> layer = sw.fully_shard(torch.nn.Linear(2, 2))
    >>> layer.unshard(async_op=True).wait()
    """

    def __init__(self, binding: Binding) -> None:
        self._binding: Binding | None = binding

    def wait(self) -> None:
        """Wait for the parameters, and register them."""
        if self._binding is not None:
            self._binding.pin()
            self._binding = None


class FSDPModule:
    """A module whose parameters are fully sharded; `fully_shard` gives modules this class beside their own.

    The methods are those of PyTorch's class of this name. Those about prefetching and events are accepted as hints: the
    order of units is recorded, and one is gathered ahead.

    >>> import torch, shardwright as sw
    >>> layer = sw.fully_shard(torch.nn.Linear(2, 2))
    >>> isinstance(layer, sw.FSDPModule), isinstance(layer, torch.nn.Linear)
    (True, True)
    """

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module with its parameters gathered."""
        binding = binding_of(self)
        return binding.call(self, super().__call__, args, kwargs)  # type: ignore[arg-type, misc]  # it is a module

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """Gather the parameters of this module's unit and register them, until `reshard` or the end of a forward.

        With `async_op`, the gathering is started, and `wait` of the returned handle registers the parameters.

        >>> import torch, shardwright as sw
        >>> layer = sw.fully_shard(torch.nn.Linear(2, 2))
        >>> layer.unshard()
        >>> isinstance(layer.weight, sw.DTensor)
        False
        """
        binding = binding_of(self)
        binding.unit.start()
        handle = UnshardHandle(binding)
        if async_op:
            return handle
        handle.wait()
        return None

    def reshard(self) -> None:
        """Release the gathered parameters of this module's unit and register the sharded ones.

        >>> import torch, shardwright as sw
        >>> layer = sw.fully_shard(torch.nn.Linear(2, 2))
        >>> layer.unshard()
        >>> layer.reshard()
        >>> isinstance(layer.weight, sw.DTensor)
        True
        """
        binding_of(self).unpin()

    def set_requires_gradient_sync(self, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
        """Choose whether backward reduces gradients, or accumulates them on each rank without reduction.

        Accumulated gradients are added in the next backward pass that reduces. Until then `.grad` lacks them.

        >>> import torch, shardwright as sw
        >>> sw.fully_shard(torch.nn.Linear(2, 2)).set_requires_gradient_sync(False)
        """
        for binding in _bindings(self, recurse):
            binding.unit.reduces = requires_gradient_sync

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """Choose whether backward sums gradients over replicas; without it, they are accumulated without reduction.

        >>> import torch, shardwright as sw
        >>> sw.fully_shard(torch.nn.Linear(2, 2)).set_requires_all_reduce(True)
        """
        for binding in _bindings(self, recurse):
            if binding.unit.replicas is not None:
                binding.unit.sums_replicas = requires_all_reduce

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Accept whether the next backward pass is the last of a step: gradients are complete after each.

        >>> import torch, shardwright as sw
        >>> sw.fully_shard(torch.nn.Linear(2, 2)).set_is_last_backward(True)
        """

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Choose whether parameters are released after forward, and gathered again in backward.

        >>> import torch, shardwright as sw
        >>> sw.fully_shard(torch.nn.Linear(2, 2)).set_reshard_after_forward(False)
        """
        if not isinstance(reshard_after_forward, bool):
            raise ArgumentTypeError(
                f"reshard_after_forward must be a bool, got {type(reshard_after_forward).__name__}: "
                f"{reshard_after_forward!r}"
            )
        for binding in _bindings(self, recurse):
            binding.after_forward = binding.unit.reshard_after_forward = reshard_after_forward

    def set_reshard_after_backward(self, reshard_after_backward: bool, *, recurse: bool = True) -> None:
        """Choose whether parameters are released after backward; without it, the next forward need not gather them.

        >>> import torch, shardwright as sw
        >>> sw.fully_shard(torch.nn.Linear(2, 2)).set_reshard_after_backward(False)
        """
        for binding in _bindings(self, recurse):
            binding.unit.reshard_after_backward = reshard_after_backward

    def set_gradient_divide_factor(self, factor: float) -> None:
        """Divide sums of gradients by this factor, in place of the number of ranks.

        >>> import torch, shardwright as sw
        >>> sw.fully_shard(torch.nn.Linear(2, 2)).set_gradient_divide_factor(1.0)
        """
        for binding in _bindings(self, recurse=False):
            binding.unit.divide_by = float(factor)

    def set_modules_to_forward_prefetch(self, modules: list[FSDPModule]) -> None:
        """Accept a hint: the order of units is recorded, and the next one is gathered ahead.

        >>> import torch, shardwright as sw
        >>> sw.fully_shard(torch.nn.Linear(2, 2)).set_modules_to_forward_prefetch([])
        """
        _check_modules(modules)

    def set_modules_to_backward_prefetch(self, modules: list[FSDPModule]) -> None:
        """Accept a hint: the order of units is recorded, and the next one is gathered ahead.

        >>> import torch, shardwright as sw
        >>> sw.fully_shard(torch.nn.Linear(2, 2)).set_modules_to_backward_prefetch([])
        """
        _check_modules(modules)

    def set_unshard_in_backward(self, unshard_in_backward: bool) -> None:
        """Accept a hint: in backward, parameters are gathered when they are needed, and not otherwise.

        >>> import torch, shardwright as sw
        >>> sw.fully_shard(torch.nn.Linear(2, 2)).set_unshard_in_backward(True)
        """

    def reset_iter_state(self) -> None:
        """Release everything that a forward or backward which raised has left gathered.

        The next step does so itself.

        >>> import torch, shardwright as sw
        >>> sw.fully_shard(torch.nn.Linear(2, 2)).reset_iter_state()
        """
        for binding in _bindings(self, recurse=True):
            binding.unit.discard_gradients()
        binding_of(self).unit.schedule.begin_forward()
        binding_of(self).unit.schedule.abandon()


def _check_modules(modules: Sequence[Any]) -> None:
    for module in modules:
        if not isinstance(module, FSDPModule):
            raise ArgumentTypeError(f"expected modules that fully_shard was called on, got {type(module).__name__}")


def binding_of(module: Any) -> Binding:
    """Return the unit of a fully sharded module and where its parameters are registered."""
    binding: Binding | None = module.__dict__.get(BINDING)
    if binding is None:
        raise TensorError(f"fully_shard was not called on this {type(module).__name__}")
    return binding


def _bindings(module: Any, recurse: bool) -> Iterator[Binding]:
    found = [module] if not recurse else [each for each in module.modules() if isinstance(each, FSDPModule)]
    yield from {id(binding_of(each)): binding_of(each) for each in found}.values()


@functools.cache
def _sharded_class(cls: Any) -> Any:
    return type(f"FSDP{cls.__name__}", (FSDPModule, cls), {"__module__": cls.__module__})


def sharded_class(module: nn.Module, binding: Binding) -> None:
    """Make a module an FSDPModule, beside its own class."""
    module.__dict__[BINDING] = binding
    own: Any = type(module)
    module.__class__ = _sharded_class(own)


def register_fsdp_forward_method(module: nn.Module, method_name: str) -> None:
    """Gather the parameters around another method of a fully sharded module, as around its forward.

    A module that is not fully sharded is left as it is.

    >>> import torch, shardwright as sw
    >>> class Layer(torch.nn.Linear):
    ...     def project(self, x):
    ...         return x @ self.weight
    >>> layer = sw.fully_shard(Layer(2, 2))
    >>> sw.register_fsdp_forward_method(layer, "project")
    >>> layer.project(torch.ones(2)).shape
    torch.Size([2])
    """
    if not isinstance(module, FSDPModule):
        return
    original = getattr(module, method_name, None)
    if not callable(original):
        raise ArgumentTypeError(f"{type(module).__name__} has no method {method_name!r}")
    function = type(module).__dict__.get(method_name) or getattr(original, "__func__", None)

    @functools.wraps(original)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        bound = original if function is None else functools.partial(function, self)
        return binding_of(self).call(self, bound, args, kwargs)

    setattr(module, method_name, MethodType(method, module))
