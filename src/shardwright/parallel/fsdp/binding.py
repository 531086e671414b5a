"""The parameters of modules, and the unit that gathers them: shards outside forward, gathered tensors inside."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from shardwright.errors import InPlaceError, TensorError
from shardwright.parallel.units import MixedPrecisionPolicy, PackGatheredParameters, Unit
from shardwright.parallel.units.reduction import divisor
from shardwright.parallel.units.saved import packs_gathered_parameters
from shardwright.parallel.units.schedule import in_backward
from shardwright.tensor import DTensor

__all__ = ["BINDING", "Binding", "OwnerHooks", "Slot"]

BINDING = "_shardwright_fsdp"  # an attribute of modules that were passed to `fully_shard`

_NUMBER = -1  # of our forward hooks in a module; torch counts its own from 0


@dataclass(frozen=True, slots=True)
class Slot:
    """A name under which a module registers a parameter of a unit."""

    module: nn.Module
    key: str
    index: int  # of the parameter in its unit


@final
class Binding:
    """The unit of the modules passed to one call of `fully_shard`, and where its parameters are registered."""

    def __init__(
        self,
        unit: Unit,
        slots: Sequence[Slot],
        modules: Sequence[nn.Module],
        precision: MixedPrecisionPolicy,
        after_forward: bool | None,
        ignored: Sequence[tuple[nn.Module, str]] = (),
    ) -> None:
        self.unit = unit
        self.ignored = list(ignored)  # modules, and the names of parameters in them that no unit has
        self.slots = list(slots)
        self.modules = list(modules)
        self.precision = precision
        self.after_forward = after_forward  # whether to release after forward; None: unless it is the outermost module
        self.is_pinned = False  # gathered by `unshard`: registered outside forward, too
        self._ran: set[int] = set()  # the modules that ran since the unit was gathered
        self._registered: Sequence[Tensor] | None = None
        self._versions: list[int] = []

    # --- forward ----------------------------------------------------------------------------------------------------

    def call(self, module: nn.Module, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Call a method of one of the modules with its parameters gathered."""
        schedule = self.unit.schedule
        outermost = not schedule.running and not in_backward()
        if self.precision.cast_forward_inputs and self.precision.param_dtype is not None:
            args, kwargs = _cast((args, kwargs), self.precision.param_dtype)
        with self.gathered(module):
            result = function(*args, **kwargs)
        if self.precision.output_dtype is not None:
            result = _cast(result, self.precision.output_dtype)
        if outermost:
            if torch.is_grad_enabled():
                for value in pytree.tree_leaves(result):
                    if isinstance(value, Tensor) and value.requires_grad:
                        value.register_hook(lambda _: schedule.call_at_end_of_backward())  # type: ignore[no-untyped-call]  # torch's is untyped
            else:
                schedule.finish(evaluated=True)
        return result

    @contextmanager
    def gathered(self, module: nn.Module) -> Iterator[None]:
        """Gather the unit, and register the gathered tensors inside the context."""
        schedule = self.unit.schedule
        backward = in_backward()
        outermost = not schedule.running and not backward
        if outermost:
            self._refuse_unreduced()
            schedule.begin_forward()
        schedule.running += 1
        try:
            self._enter()
            written = None
            try:
                with PackGatheredParameters():
                    yield
            finally:
                self.unit.in_use -= 1
                if not self.unit.in_use:
                    self._ran.add(id(module))
                    written = self._leave(release=not backward and self._is_done(outermost))
            if written is not None:
                raise InPlaceError(
                    f"the parameter {self.unit.name(written)} was written to in forward, where it is a gathered copy: "
                    "the write would be lost; write to the sharded parameter outside forward"
                )
        except BaseException:
            if outermost:
                schedule.abandon()
            raise
        finally:
            schedule.running -= 1

    def _refuse_unreduced(self) -> None:
        """Raise if a parameter that was registered since would be trained on each rank by itself."""
        if not torch.is_grad_enabled() or divisor(None, self.unit.group, self.unit.replicas) == 1:
            return
        found = [
            (module, name)
            for root in self.modules
            for module in root.modules()
            for name, parameter in module._parameters.items()
            if type(parameter) is nn.Parameter and parameter.requires_grad
        ]
        if not found:
            return
        roots = [each for root in self.modules for each in root.modules()]
        bindings = [each.__dict__[BINDING] for each in roots if BINDING in each.__dict__]
        known = {(id(module), name) for binding in bindings for module, name in binding.ignored}
        known |= {(id(slot.module), slot.key) for binding in bindings for slot in binding.slots}
        names = {id(module): name for root in self.modules for name, module in root.named_modules()}
        new = [f"{names[id(module)]}.{name}".lstrip(".") for module, name in found if (id(module), name) not in known]
        if new:
            raise TensorError(
                f"parameters were registered in a module after fully_shard: {', '.join(new)}. Their gradients would "
                "not be reduced, and ranks would train different values: register them before fully_shard"
            )

    def _enter(self) -> None:
        if not self.unit.in_use:
            if self._registered is None:
                self._adopt_registered()
            self._register(self.unit.tensors())
        self.unit.in_use += 1

    def _leave(self, release: bool) -> int | None:
        """Register the shards again; return the index of a gathered tensor that was written to, or None."""
        versions = [0 if each.is_inference() else each._version for each in self._registered or ()]
        written = [index for index, (now, then) in enumerate(zip(versions, self._versions, strict=True)) if now != then]
        if release:
            self._ran.clear()
            self.unpin()
        elif not self.is_pinned:
            self._unregister(keep_history=len(self.modules) > 1)  # modules of one unit reduce together
        return written[0] if written else None

    def _is_done(self, outermost: bool) -> bool:
        """Return whether the unit is to be released after a forward of one of its modules."""
        if len(self.modules) > len(self._ran) and len(self.modules) > 1:
            return False  # the others follow; another unit that is needed before releases it
        if self.after_forward is None:
            return not (outermost and torch.is_grad_enabled())
        return self.after_forward

    # --- registration -----------------------------------------------------------------------------------------------

    def pin(self) -> None:
        """Gather the unit and register the gathered tensors until `unpin`."""
        if not self.is_pinned and not self.unit.in_use:
            self._adopt_registered()
            self._register(self.unit.tensors())
        self.is_pinned = self.unit.pinned = True

    def unpin(self) -> None:
        """Register the shards again, and release the unit."""
        self.is_pinned = self.unit.pinned = False
        if not self.unit.in_use:
            self._unregister()
            self.unit.release()

    def register_shards(self) -> None:
        """Register the sharded parameters."""
        self._put(self.unit.parameters)

    def _register(self, tensors: Sequence[Tensor]) -> None:
        self._registered = tensors
        self._versions = [0 if each.is_inference() else each._version for each in tensors]
        for tensor in tensors:
            tensor._is_param = True
        self._put(tensors)

    def _unregister(self, keep_history: bool = False) -> None:
        self.register_shards()
        self._registered = None
        if not keep_history:
            self.unit.drop_history()

    def _put(self, tensors: Sequence[Tensor]) -> None:
        for slot in self.slots:
            module = slot.module
            module._parameters[slot.key] = tensors[slot.index]  # type: ignore[assignment]  # it counts as a parameter
            if isinstance(module, nn.RNNBase):  # it computes with a list of its parameters
                names: list[str] = module._flat_weights_names
                module.__dict__["_flat_weights"] = [module._parameters.get(name) for name in names]

    def _adopt_registered(self) -> None:
        """Take over parameters that were registered since, as `load_state_dict(assign=True)` does."""
        parameters = self.unit.parameters
        for slot in self.slots:
            index = slot.index
            registered: Any = slot.module._parameters.get(slot.key)
            if registered is not parameters[index]:
                if not isinstance(registered, DTensor) or registered.sharding is not parameters[index]._layout:
                    raise TensorError(
                        f"the parameter {self.unit.name(index)} of a fully sharded module was replaced by "
                        f"{type(registered).__name__}, not a DTensor {parameters[index]._layout}: write its values "
                        "with copy_, or register a DTensor of the same placements"
                    )
                parameters[index] = registered
        self._put(parameters)  # tied parameters stay one


@final
class OwnerHooks:
    """Forward hooks of a module that owns parameters of a unit.

    Inside the forward of the unit's module the parameters are gathered. A module that is called by itself (by a user,
    or in backward by an activation checkpoint), or whose parameter is tied to one of another unit, gathers them. Inside
    a checkpoint our saved-tensor hooks must be the innermost, in forward as in recomputation: both save the same.
    """

    def __init__(self, bindings: Sequence[Binding]) -> None:
        self.bindings = list(bindings)
        self._entered: list[list[AbstractContextManager[None]]] = []

    def register(self, module: nn.Module) -> None:
        """Register the hooks, under the same number in all modules: compiled code is made once for equal modules."""
        before: Any = module._forward_pre_hooks
        before[_NUMBER] = self.before
        before.move_to_end(_NUMBER, last=False)
        module._forward_hooks[_NUMBER] = self.after
        module._forward_hooks_always_called[_NUMBER] = True

    def before(self, module: nn.Module, _: Any) -> None:
        """Gather the units that are not in use."""
        if torch.compiler.is_compiling():
            return
        entered: list[AbstractContextManager[None]] = []
        self._entered.append(entered)
        for binding in self.bindings:
            if not binding.unit.in_use:
                _enter(binding.gathered(module), entered)
        if not packs_gathered_parameters():
            _enter(PackGatheredParameters(), entered)

    def after(self, *_: Any) -> None:
        """Release the units that `before` has gathered."""
        if torch.compiler.is_compiling():
            return
        for context in reversed(self._entered.pop()):
            context.__exit__(None, None, None)


def _enter(context: AbstractContextManager[None], entered: list[AbstractContextManager[None]]) -> None:
    context.__enter__()
    entered.append(context)


def _cast(values: Any, dtype: torch.dtype) -> Any:
    return pytree.tree_map_only(Tensor, lambda each: each.to(dtype) if each.is_floating_point() else each, values)
