"""Run user-written autograd Functions on DTensors, in backward as in forward.

Autograd gives the backward of a `torch.autograd.Function` plain local gradients, and some of its saved tensors without
their layouts: its own outputs, and all of them under saved-tensor hooks. `Function.apply` does not call
`__torch_function__`. So importing this package replaces `Function.apply` and `ctx.save_for_backward`:

- A Function called with DTensors runs as a subclass of itself that records layouts. Its backward gets DTensors, and
  may return gradients in any layout: they are redistributed to the layout of each input's gradient.
- A Function that torch calls below interception, where DTensors count as local tensors, gets plain ones. Otherwise its
  saved tensors would be DTensors in backward, where interception is on, beside plain gradients.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from types import MethodType
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction, FunctionCtx, _SingleLevelFunction
from torch.nn.modules._functions import BackwardHookFunction

from shardwright.errors import MixedTensorsError, TensorError
from shardwright.layout import Layout
from shardwright.tensor.base import policy
from shardwright.tensor.base.capture import capture_call, is_capturing, refuse_capture
from shardwright.tensor.base.copied import is_copied, refuse_stale
from shardwright.tensor.base.gradient_types import REPLICATE
from shardwright.tensor.base.strides import copy_strides
from shardwright.tensor.base.tagging import DTensorBase, alias, disabled, no_torch_function, tag, tag_replicated
from shardwright.tensor.gradients.below_autograd import expect_plain_roots
from shardwright.tensor.gradients.engine import local_gradient, tag_gradient
from shardwright.tensor.redistribute.autograd import redistribute_local

__all__ = ["install", "layouts_of", "with_layout"]

_grad_fn = Tensor.grad_fn.__get__  # type: ignore[union-attr]  # a getset descriptor
_saved_tensors = torch._C._FunctionBase.saved_tensors.__get__  # type: ignore[attr-defined]  # likewise
_original: Any = vars(torch._C._FunctionBase)["apply"]


def install() -> tuple[Any, ...]:
    """Replace `Function.apply` and `ctx.save_for_backward`, and return the replacements.

    `Function.apply` calls that of its base class, which is replaced, so that an older `f = MyFunction.apply` works too.
    """
    _SingleLevelFunction.apply = classmethod(_apply)  # type: ignore[attr-defined]  # torch offers no other place
    FunctionCtx.save_for_backward = _save_for_backward  # type: ignore[method-assign, assignment]  # likewise
    return _apply, _save_for_backward


def _apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
    if not is_capturing():
        return _run(cls, *args, **kwargs)
    if cls is BackwardHookFunction:
        refuse_capture(
            "a module has a backward hook, which a replay would not call: remove it, or do not compile the module"
        )
    return capture_call(MethodType(_run, cls), *args, **kwargs)  # autograd differentiates the Function, not its body


def _run(cls: Any, *args: Any, **kwargs: Any) -> Any:
    for value in args:
        if type(value) is not Tensor and _has_dtensor(value):
            return _run_on_dtensors(cls, args, kwargs)
    if kwargs and _has_dtensor(kwargs):
        return _run_on_dtensors(cls, args, kwargs)
    result = _original.__get__(None, cls)(*args, **kwargs)
    if type(result) is not Tensor and _has_dtensor(result):
        _record_results(cls, args, result)
    return result


def _has_dtensor(value: Any) -> bool:
    kind = type(value)
    if kind is list or kind is tuple:
        return any(map(_has_dtensor, value))
    if kind is dict:
        return any(map(_has_dtensor, value.values()))
    return isinstance(value, DTensorBase)


def _run_on_dtensors(cls: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if not _is_ours(cls):
        if torch._C._is_torch_function_enabled():
            for value in (*args, *kwargs.values()):
                if isinstance(value, DTensorBase):
                    refuse_stale(cls.__name__, value)
            expect_plain_roots()
            result = _original.__get__(None, _layout_recording(cls))(*args, **kwargs)
            for value in result if isinstance(result, tuple) else (result,):
                if isinstance(value, DTensorBase) and is_copied(value):
                    value.__class__ = DTensorBase.copies  # only now: autograd has looked at it
            return result
        args = tuple(alias(value) if isinstance(value, DTensorBase) else value for value in args)
    return _original.__get__(None, cls)(*args, **kwargs)


def _is_ours(cls: Any) -> bool:
    return bool(cls.__module__.startswith("shardwright."))  # they compute on local tensors


def _sets_up_separately(cls: Any) -> bool:
    return cls.setup_context is not _SingleLevelFunction.setup_context


def _record_results(cls: Any, args: tuple[Any, ...], result: Any) -> None:
    """Record the layouts of DTensors that a Function returned for plain arguments, so that its backward gets DTensors.

    Reentrant activation checkpointing is such a Function, if the parameters are DTensors and the input is not.
    """
    if _is_ours(cls) or not torch._C._is_torch_function_enabled():
        return
    results = result if isinstance(result, tuple) else (result,)
    for value in results:
        node: Any = disabled(_grad_fn, (), (value,), {}) if isinstance(value, DTensorBase) else None
        if getattr(node, "_forward_cls", None) in (cls, _layout_recording(cls)):
            node.__class__ = _layout_recording(cls)._backward_cls
            node._layouts = layouts_of(args), layouts_of(results)


def _layout_recording(cls: Any) -> Any:
    """Return the subclass of a Function that records layouts in forward and restores them in backward."""
    known = cls.__dict__.get("_recording")
    if known is None:
        methods = {
            "forward": staticmethod(_forward_of(cls)),
            "setup_context": staticmethod(_SingleLevelFunction.setup_context),  # our forward calls the user's
            "__module__": cls.__module__,
            "__qualname__": cls.__qualname__,
        }
        known = type(cls)(cls.__name__, (cls,), methods)
        known._recording = cls._recording = known
        for name, member in vars(_Backward).items():
            if not name.startswith("__"):
                setattr(known._backward_cls, name, member)
    return known


def _forward_of(cls: Any) -> Any:
    separate = _sets_up_separately(cls)

    def forward(ctx: Any, *args: Any, **kwargs: Any) -> Any:
        if separate:
            result = cls.forward(*args, **kwargs)
            cls.setup_context(ctx, args, result)
        else:
            result = cls.forward(ctx, *args, **kwargs)
        is_tuple = isinstance(result, tuple)
        results = tuple(_own_object(value, args, ctx) for value in (result if is_tuple else (result,)))
        ctx._layouts = layouts_of(args), layouts_of(results)
        return results if is_tuple else results[0]

    return forward


def _own_object(value: Any, args: Sequence[Any], ctx: Any) -> Any:
    """Return an output, or a DTensor alias of it if it is an input, which autograd would replace by a plain tensor.

    A copy that looks like a view is aliased as well, because its class checks every use; the alias becomes such a copy
    when autograd has taken it.
    """
    if not isinstance(value, DTensorBase) or any(value is dirty for dirty in ctx.dirty_tensors or ()):
        return value
    if not is_copied(value) and not any(value is given for given in args):
        return value
    own: DTensorBase = tag(alias(value), value._layout)
    copy_strides(own, value)
    if is_copied(value):
        own._copied_by, own._base_version = value._copied_by, (value, None)
    return own


def layouts_of(values: Iterable[Any]) -> list[Layout | None]:
    """Return the layout of each value, None for values that are not DTensors."""
    return [value._layout if isinstance(value, DTensorBase) else None for value in values]


def _save_for_backward(ctx: Any, *tensors: Any) -> None:
    ctx.to_save = tensors
    for tensor in tensors:
        if type(tensor) is not Tensor and isinstance(tensor, DTensorBase):
            if torch._C._is_torch_function_enabled() and not _is_ours(ctx._forward_cls):
                ctx.__class__ = _layout_recording(ctx._forward_cls)._backward_cls
                ctx._layouts_of_saved = layouts_of(tensors)
            return


def with_layout(saved: Any, layout: Layout | None) -> Any:
    """Return a tensor saved by autograd with the layout that it had when it was saved."""
    if layout is None or not isinstance(saved, Tensor) or isinstance(saved, DTensorBase):
        return saved
    return tag(alias(saved), layout)


class _Backward:
    """Methods added to the context of a Function, which is a node of the graph, when layouts were recorded."""

    _layouts: tuple[list[Layout | None], list[Layout | None]]  # of the arguments, of the results

    @property
    def saved_tensors(self) -> tuple[Any, ...]:
        saved: tuple[Any, ...] = _saved_tensors(self)
        layouts = self.__dict__.get("_layouts_of_saved")
        return saved if layouts is None else tuple(map(with_layout, saved, layouts))

    def apply(self, *gradients: Any) -> Any:
        return self._plain(BackwardCFunction.apply(self, *self._shown(gradients)))  # type: ignore[arg-type, no-untyped-call]  # it is one

    def apply_boxed(self, gradients: list[Any]) -> Any:
        gradients[:] = self._shown(gradients)  # in place: the Function may free gradients that it has used
        return self._plain(BackwardCFunction.apply_boxed(self, gradients))  # type: ignore[arg-type, no-untyped-call]  # likewise

    def _shown(self, gradients: Sequence[Any]) -> list[Any]:
        known = self.__dict__.get("_layouts")
        if known is None:
            return list(gradients)
        return [
            gradient if gradient is None or layout is None else tag_gradient(gradient, layout)
            for gradient, layout in zip(gradients, known[1], strict=True)
        ]

    def _plain(self, given: Any) -> Any:
        known = self.__dict__.get("_layouts")
        if known is None:
            return given
        answers = given if isinstance(given, tuple) else (given,)
        needed = self.needs_input_grad  # type: ignore[attr-defined]  # it is a context
        name, ins = f"{self._forward_cls.__name__}.backward", known[0]  # type: ignore[attr-defined]  # likewise
        gradients = [
            _gradient_for(answer, layout, name, index) if needs else None
            for index, (answer, layout, needs) in enumerate(zip(answers, ins, needed, strict=False))
        ]
        return (*gradients, *answers[len(gradients) :])  # autograd raises if there are too many or too few


def _gradient_for(answer: Any, layout: Layout | None, name: str, index: int) -> Any:
    """Return a gradient given by backward for an argument of this layout as a plain local tensor for autograd."""
    if not isinstance(answer, Tensor):
        return answer
    answer = _before_delayed_error(answer)
    if layout is None:  # a plain tensor among DTensors counts as replicated
        return _replicated(answer) if isinstance(answer, DTensorBase) else answer
    if not isinstance(answer, DTensorBase):
        if not (policy.replicates_implicitly() or (answer.ndim == 0 and not answer.requires_grad)):
            raise MixedTensorsError(
                f"{name} returned a plain tensor of shape {tuple(answer.shape)} for argument {index}, a DTensor "
                f"{layout}: return a DTensor (DTensor.from_local makes one from a local tensor), or call the "
                "Function inside sw.local_map, where forward and backward both run on local tensors"
            )
        answer = tag_replicated(alias(answer), layout.mesh)
    if answer._layout.shape != layout.shape:
        try:
            answer = answer.sum_to_size(layout.shape)  # as torch does for broadcast arguments
        except RuntimeError:
            raise TensorError(
                f"{name} returned a gradient {answer._layout} for argument {index}, {layout}: the shapes do not match"
            ) from None
    return local_gradient(answer, layout, name)


def _replicated(gradient: DTensorBase) -> Tensor:
    layout = gradient._layout
    with no_torch_function():
        moved = redistribute_local(gradient, layout, layout.replace(placements=[REPLICATE] * layout.mesh.ndim))
        return moved if type(moved) is Tensor else moved.view_as(moved)


def _before_delayed_error(gradient: Tensor) -> Tensor:
    """Return a gradient with its layout if `once_differentiable` has appended a node that raises.

    The results of that node are plain; its inputs still have their layouts.
    """
    node: Any = gradient.grad_fn
    if isinstance(gradient, DTensorBase) or node is None or node.name() != "torch::autograd::Error":
        return gradient
    given = getattr(node.next_functions[gradient.output_nr][0], "variable", None)
    return with_layout(gradient, given._layout) if isinstance(given, DTensorBase) else gradient
