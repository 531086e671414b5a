"""Capture a program: run it once, and record everything it does to local tensors.

The recording is made above autograd, so that a replay is differentiated natively, as the program itself is. The run
that captures the program is also the first call.
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

# Functions that pass values of tensors to Python, on which a captured program cannot depend.
VALUES = frozenset(
    """item tolist numpy __array__ __bool__ __float__ __int__ __index__ __complex__ __repr__ __str__ __format__
    __contains__ is_nonzero equal allclose __dlpack__ __reduce_ex__""".split()
)
GRADIENTS = frozenset(("backward", "grad"))
HOOKS = "the program registers a hook on a tensor ({}), which a replay would not repeat: register it on the result"
REQUIRES_GRAD = (
    "the program changes requires_grad of a tensor, which a replay would not repeat: pass a tensor that requires grad, "
    "or detach it"
)
_set_requires_grad, _set_grad = (getattr(Tensor, name).__set__ for name in ("requires_grad", "grad"))


def capture(call: Callable[[], Any], tensors: Sequence[Tensor]) -> tuple[Any, Program]:
    """Run `call`; return its result, and the program it ran as a function of these tensors.

    Raise CaptureError if the program does something that a replay could not repeat.
    """
    from torch.fx.experimental.proxy_tensor import get_proxy_mode, make_fx  # slow to import

    results: list[Any] = []

    def traced(*_: Tensor) -> list[Tensor]:
        mode = get_proxy_mode()
        assert mode is not None
        _record_lines(mode.tracer)
        with _capture_checks(mode.tracer):
            results.append(call())
        return [value for value in pytree.tree_leaves(results[0]) if isinstance(value, Tensor)]

    forget_entered()  # operands shared with earlier operators would not be part of the program
    try:
        with capturing(False):
            module = make_fx(traced, pre_dispatch=True)(*tensors)
    except CaptureError:
        raise
    except RuntimeError as error:
        if "get value out of a tracing tensor" in str(error):
            _refuse_values(_user_line(error), "item", error)
        raise
    finally:
        forget_entered()
    clean(module.graph, torch.is_grad_enabled())
    _check_graph(module)
    module.recompile()
    return results[0], Program(module, results[0], tensors)


@contextmanager
def _capture_checks(tracer: Any) -> Iterator[None]:
    """Raise, while the program runs, for everything in it that a replay could not repeat."""
    with ExitStack() as stack:
        stack.enter_context(capturing())
        stack.enter_context(comm.listen(_refuse_transfer))
        stack.enter_context(_without_hooks())
        stack.enter_context(_Checker(tracer))
        yield


def _refuse_transfer(_: comm.Transfer) -> None:
    refuse_capture("the program communicates other than by redistributing DTensors")


@contextmanager
def _without_hooks() -> Iterator[None]:
    """Raise if a tensor hook is registered; those of DTensors are registered below what `_Checker` sees."""
    register = Tensor.register_hook

    def refuse_hook(tensor: Tensor, hook: Callable[..., Any]) -> Any:
        refuse_capture(HOOKS.format("register_hook"))
        return register(tensor, hook)  # type: ignore[no-untyped-call]  # torch's own

    Tensor.register_hook = refuse_hook  # type: ignore[method-assign]  # restored below
    try:
        yield
    finally:
        Tensor.register_hook = register  # type: ignore[method-assign]  # likewise


class _Checker(TorchFunctionMode):
    """Raise if the program calls a function that a replay could not repeat."""

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
                refuse_capture("the program computes gradients itself: return the value to differentiate instead")
            if name in ("retain_grad", "register_post_accumulate_grad_hook"):
                refuse_capture(HOOKS.format(name))
            if (name == "requires_grad_" or func == _set_requires_grad) and _changes_requires_grad(*args, **kwargs):
                refuse_capture(REQUIRES_GRAD)
            if func == _set_grad:
                refuse_capture("the program sets the gradient of a tensor: do so outside of the compiled function")
            for tensor in (*tensors_in(args), *tensors_in(kwargs.values())):
                if not has_proxy_slot(tensor, self.tracer):
                    with capturing(False):  # describing the tensor may read it
                        raise CaptureError(f"{source_line()}: {uncaptured_tensor_message(tensor)}")
        return func(*args, **kwargs)


def _changes_requires_grad(tensor: Tensor, requires_grad: bool = True) -> bool:
    return tensor.requires_grad is not bool(requires_grad)


def _refuse_values(line: str, name: str, cause: Exception | None = None) -> NoReturn:
    raise CaptureError(
        f"{line}: the program reads a value of a tensor ({name.strip('_')}), which a replay could not repeat: compute "
        "with the tensor instead (torch.where for a choice), or move this line out of the compiled function"
    ) from cause


def _user_line(error: BaseException) -> str:
    """Return the innermost line of the user's program in the traceback of an error."""
    for frame, line in reversed(list(traceback.walk_tb(error.__traceback__))):
        if is_user_frame(frame):
            return f"{frame.f_code.co_filename.rsplit('/', 1)[-1]}:{line}"
    return "?"


def _record_lines(tracer: Any) -> None:
    """Make every recorded node store its source line and gradient mode, which torch does not record."""
    create = tracer.create_node

    def create_node(*args: Any, **kwargs: Any) -> fx.Node:
        node: fx.Node = create(*args, **kwargs)
        node.meta["line"], node.meta["grad_mode"] = source_line(), torch.is_grad_enabled()
        return node

    tracer.create_node = create_node


def _check_graph(module: fx.GraphModule) -> None:
    """Raise if the recorded program cannot be replayed faithfully."""
    for node in module.graph.nodes:
        target, line = node.target, node.meta.get("line", "?")
        if isinstance(target, torch._ops.OpOverload):
            if torch.Tag.dynamic_output_shape in target.tags:
                raise CaptureError(
                    f"{line}: the size of the result of {target.overloadpacket.__name__} depends on values, but a "
                    "captured program has fixed sizes: move this line out of the compiled function"
                )
            if target.namespace == "c10d":
                raise CaptureError(
                    f"{line}: the program calls a collective of torch.distributed: redistribute DTensors instead"
                )
