"""Capturing a program: it runs once, for real, and everything it does to local tensors is recorded.

The recording is made above autograd, so that a replay is differentiated as the program itself is: natively. What was
run to capture the program is also the result of that first call.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NoReturn

import torch
from torch import Tensor, fx
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from shardwright import comm
from shardwright.errors import CaptureError
from shardwright.tensor.base.capture import capturing, is_capturing, refuse_capture, uncaptured_tensor_message
from shardwright.tensor.base.trace import is_user_frame, source_line
from shardwright.tensor.compiled.passes import clean
from shardwright.tensor.compiled.program import Program
from shardwright.tensor.dispatch.arguments import tensors_in
from shardwright.tensor.gradients.enter import forget_entered

__all__ = ["capture"]

# What gives values, or text made of them, to Python: a program cannot depend on those.
VALUES = frozenset(
    """item tolist numpy __array__ __bool__ __float__ __int__ __index__ __complex__ __repr__ __str__ __format__
    __contains__ is_nonzero equal allclose __dlpack__ __reduce_ex__""".split()
)
GRADIENTS = frozenset(("backward", "grad"))
HOOKS = (
    "the program registers a hook on a tensor ({}), which a replay would not do again: register it on what is returned"
)
ASKING = (
    "the program changes whether a tensor requires a gradient, which a replay would not do again: give it a tensor "
    "that does, or detach what does not"
)
_set_requires_grad, _set_grad = (getattr(Tensor, name).__set__ for name in ("requires_grad", "grad"))


def capture(call: Callable[[], Any], tensors: Sequence[Tensor]) -> tuple[Any, Program]:
    """What `call` returns, and the program that it is, of these tensors."""
    from torch.fx.experimental.proxy_tensor import get_proxy_mode, make_fx  # slow to import

    results: list[Any] = []

    def traced(*_: Tensor) -> list[Tensor]:
        mode = get_proxy_mode()
        assert mode is not None
        _note_where(mode.tracer)
        with _watching(mode.tracer):
            results.append(call())
        return [value for value in pytree.tree_leaves(results[0]) if isinstance(value, Tensor)]

    forget_entered()  # what operators share would be none of the program's
    try:
        with capturing(False):
            module = make_fx(traced, pre_dispatch=True)(*tensors)
    except CaptureError:
        raise
    except RuntimeError as error:
        if "get value out of a tracing tensor" in str(error):
            _refuse_values(_line_of(error), "item", error)
        raise
    finally:
        forget_entered()
    clean(module.graph, torch.is_grad_enabled())
    _check(module)
    module.recompile()
    return results[0], Program(module, results[0], tensors)


@contextmanager
def _watching(tracer: Any) -> Iterator[None]:
    with ExitStack() as stack:
        stack.enter_context(capturing())
        stack.enter_context(comm.listen(_refuse_transfer))
        stack.enter_context(_without_hooks())
        stack.enter_context(_Watch(tracer))
        yield


def _refuse_transfer(_: comm.Transfer) -> None:
    refuse_capture("the program communicates by other means than movements of DTensors")


@contextmanager
def _without_hooks() -> Iterator[None]:
    """Refuses hooks of tensors. DTensors register theirs below what `_Watch` sees."""
    register = Tensor.register_hook

    def refused(tensor: Tensor, hook: Callable[..., Any]) -> Any:
        refuse_capture(HOOKS.format("register_hook"))
        return register(tensor, hook)  # type: ignore[no-untyped-call]  # torch's own

    Tensor.register_hook = refused  # type: ignore[method-assign]  # put back below
    try:
        yield
    finally:
        Tensor.register_hook = register  # type: ignore[method-assign]  # likewise


class _Watch(TorchFunctionMode):
    """Sees every function the program calls, and refuses what a replay could not repeat."""

    def __init__(self, tracer: Any) -> None:
        super().__init__()
        self.tracer = tracer

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        from torch.fx.experimental.proxy_tensor import has_proxy_slot  # slow to import

        kwargs = kwargs or {}
        if is_capturing():
            name = getattr(func, "__name__", "")
            if name in VALUES:
                _refuse_values(source_line(), name)
            if name in GRADIENTS:
                refuse_capture("the program takes gradients itself: return what is to be differentiated instead")
            if name in ("retain_grad", "register_post_accumulate_grad_hook"):
                refuse_capture(HOOKS.format(name))
            if (name == "requires_grad_" or func == _set_requires_grad) and _changes_asking(*args, **kwargs):
                refuse_capture(ASKING)
            if func == _set_grad:
                refuse_capture("the program sets the gradient of a tensor: do so outside of what is compiled")
            for tensor in (*tensors_in(args), *tensors_in(kwargs.values())):
                if not has_proxy_slot(tensor, self.tracer):
                    with capturing(False):  # a description may look at the tensor
                        raise CaptureError(f"{source_line()}: {uncaptured_tensor_message(tensor)}")
        return func(*args, **kwargs)


def _changes_asking(tensor: Tensor, requires_grad: bool = True) -> bool:
    return tensor.requires_grad is not bool(requires_grad)


def _refuse_values(line: str, name: str, cause: Exception | None = None) -> NoReturn:
    raise CaptureError(
        f"{line}: the program looks at a value ({name.strip('_')}), which a replay could not do again: compute with "
        "the tensor instead (torch.where for a choice), or leave this line out of what is compiled"
    ) from cause


def _line_of(error: BaseException) -> str:
    """The innermost line of the user's program that an error came through."""
    for frame, line in reversed(list(traceback.walk_tb(error.__traceback__))):
        if is_user_frame(frame):
            return f"{frame.f_code.co_filename.rsplit('/', 1)[-1]}:{line}"
    return "?"


def _note_where(tracer: Any) -> None:
    """Has every recorded call remember its line, and whether gradients were recorded: torch tells of neither."""
    create = tracer.create_node

    def create_node(*args: Any, **kwargs: Any) -> fx.Node:
        node: fx.Node = create(*args, **kwargs)
        node.meta["line"], node.meta["grad_mode"] = source_line(), torch.is_grad_enabled()
        return node

    tracer.create_node = create_node


def _check(module: fx.GraphModule) -> None:
    """Refuses what was recorded but would not be the same program again."""
    for node in module.graph.nodes:
        target, line = node.target, node.meta.get("line", "?")
        if isinstance(target, torch._ops.OpOverload):
            if torch.Tag.dynamic_output_shape in target.tags:
                raise CaptureError(
                    f"{line}: the size of what {target.overloadpacket.__name__} returns depends on values: a captured "
                    "program has fixed sizes; leave this line out of what is compiled"
                )
            if target.namespace == "c10d":
                raise CaptureError(
                    f"{line}: the program calls a collective of torch.distributed: move DTensors instead"
                )
