"""Functions of torch that read a tensor in C without calling `__torch_function__`: they would read this rank's shard.

torch makes new tensors from *data* (`torch.tensor(d)`) and from *numbers* (`torch.full((2,), d)`), and does not call
`__torch_function__` if these are tensors. So importing this package replaces these functions by ones that check their
arguments first:

- `torch.tensor(d)`, `plain.new_tensor(d)` and `plain.new(d)` give the global value, as `d.numpy()` does;
- `torch.as_tensor(d)` and `torch.asarray(d)` give a DTensor, as torch gives the tensor itself, converted if asked;
- `torch.full`, `torch.full_like`, `torch.arange` and the other factories take a number from `d.item()`;
- sparse and nested tensors, and `torch.utils.dlpack.to_dlpack` of a shard, raise.

A reference to one of these functions taken before shardwright was imported is still torch's own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.jit._builtins
import torch.utils.dlpack
from torch import Tensor
from torch.utils._device import _device_constructors

from shardwright.errors import UnsupportedError
from shardwright.tensor.base.replaced import is_replaced, replacing
from shardwright.tensor.base.tagging import DTensorBase
from shardwright.tensor.dispatch.storage_ops import refuse_shard

__all__ = ["install"]

_enabled = torch._C._is_torch_function_enabled
_FROM_NUMBERS = """full arange range linspace logspace scalar_tensor randint randperm eye tril_indices triu_indices
normal bartlett_window blackman_window hamming_window hann_window kaiser_window""".split()
_SPARSE = [f"sparse_{kind}_tensor" for kind in ("coo", "compressed", "csr", "csc", "bsr", "bsc")]


def install() -> None:
    """Replace torch's functions, or other packages' replacements of them. Idempotent."""
    _replace(torch, "tensor", _from_data)
    _replace(torch, "as_tensor", _converted("data", _as_tensor))
    _replace(torch, "asarray", _converted("obj", _asarray))
    for name in _FROM_NUMBERS:
        _replace(torch, name, _from_numbers)
    for home, name in ((torch, "full_like"), (Tensor, "new_full")):
        _replace(home, name, _from_number_beside_tensor)
    for name in _SPARSE:
        _replace(torch, name, _refusing)
    for name in ("nested_tensor", "as_nested_tensor"):
        _replace(torch.nested, name, _refusing)
    for home in (torch, torch.utils.dlpack):
        _replace(home, "to_dlpack", _exporting)
    for name in ("new_tensor", "new"):
        _replace(Tensor, name, _from_data_beside_self)


def _replace(home: Any, name: str, instead: Callable[[Any], Any]) -> None:
    original = getattr(home, name)
    if is_replaced(original):
        return
    replaced = replacing(original)(instead(original))
    constructors = _device_constructors()  # the functions that respect a default device; torch builds the set once
    if original in constructors:
        constructors.add(replaced)
    setattr(home, name, replaced)
    if home is not torch:
        return
    replaced.__module__, replaced.__qualname__ = "torch", name  # where pickle and torch.fx find it
    known = torch.jit._builtins  # TorchScript finds its operators by the identity of functions
    known._builtin_ops.append((original, f"aten::{name}"))
    if known._builtin_table is not None:
        known._builtin_table[id(replaced)] = f"aten::{name}"


def _from_data(original: Any) -> Any:
    def function(data: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(data, DTensorBase) and _enabled():
            data = data.full_tensor()  # type: ignore[attr-defined]  # DTensor has it
        return original(data, *args, **kwargs)

    return function


def _from_data_beside_self(original: Any) -> Any:
    def method(self: Tensor, *args: Any, **kwargs: Any) -> Any:
        if args and isinstance(args[0], DTensorBase) and not isinstance(self, DTensorBase) and _enabled():
            args = (args[0].full_tensor(), *args[1:])  # type: ignore[attr-defined]  # likewise
        elif isinstance(kwargs.get("data"), DTensorBase) and not isinstance(self, DTensorBase) and _enabled():
            kwargs["data"] = kwargs["data"].full_tensor()
        return original(self, *args, **kwargs)

    return method


def _converted(name: str, convert: Callable[..., Any]) -> Callable[[Any], Any]:
    def instead(original: Any) -> Any:
        def function(*args: Any, **kwargs: Any) -> Any:
            if isinstance(args[0] if args else kwargs.get(name), DTensorBase) and _enabled():
                return convert(*args, **kwargs)
            return original(*args, **kwargs)

        return function

    return instead


def _as_tensor(data: Tensor, dtype: torch.dtype | None = None, device: Any = None) -> Tensor:
    return data.to(device=data.device if device is None else device, dtype=dtype or data.dtype)


def _asarray(
    obj: Tensor, *, dtype: torch.dtype | None = None, device: Any = None, copy: bool | None = None, **options: Any
) -> Tensor:
    result = _as_tensor(obj, dtype, device)
    if copy is False and result is not obj:
        raise ValueError(f"asarray: copy=False, but a tensor of {obj.dtype} on {obj.device} has to be converted")
    if copy and result is obj:
        result = obj.clone()
    if not result.is_leaf and not options.get("requires_grad"):
        return result.detach()
    return result.requires_grad_(options.get("requires_grad", False))


def _from_numbers(original: Any) -> Any:
    def function(*args: Any, **kwargs: Any) -> Any:
        if any(isinstance(value, DTensorBase) for value in (*args, *kwargs.values())) and _enabled():
            args = tuple(map(_number, args))
            kwargs = {key: _number(value) for key, value in kwargs.items()}
        return original(*args, **kwargs)

    return function


def _from_number_beside_tensor(original: Any) -> Any:
    def function(*args: Any, **kwargs: Any) -> Any:
        given = (*args[1:], kwargs.get("fill_value"))
        if any(isinstance(value, DTensorBase) for value in given) and _enabled():
            args = (*args[:1], *map(_number, args[1:]))
            kwargs = {key: _number(value) if key == "fill_value" else value for key, value in kwargs.items()}
        return original(*args, **kwargs)

    return function


def _number(value: Any) -> Any:
    """Return a 0-dimensional DTensor as a number, unless it requires grad: the gradient would be lost."""
    if isinstance(value, DTensorBase) and value.dim() == 0 and not value.requires_grad:
        return value.item()
    return value


def _refusing(original: Any) -> Any:
    def function(*args: Any, **kwargs: Any) -> Any:
        for value in (*args, *kwargs.values()):
            if _has_dtensor(value) and _enabled():
                raise UnsupportedError(
                    f"{original.__name__} of a DTensor would read this rank's shard as if it were the global tensor: "
                    "the local tensors of a DTensor are dense. Use `x.full_tensor()`, or `x.to_local()`"
                )
        return original(*args, **kwargs)

    return function


def _has_dtensor(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return any(map(_has_dtensor, value))
    return isinstance(value, DTensorBase)


def _exporting(original: Any) -> Any:
    def function(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        if isinstance(tensor, DTensorBase) and _enabled():
            refuse_shard("to_dlpack", tensor)
        return original(tensor, *args, **kwargs)

    return function
