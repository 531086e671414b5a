"""Raise for operations that would silently see only the shard, with the reason and the remedy.

A DTensor *is* its local tensor, so code that does not call `__torch_function__` sees the shard. These raise:

- through `__torch_function__`: collectives of `torch.distributed` (functional ones included; torch 2.11 calls it for
  some of them only), forward-mode derivatives, sparse and mkldnn layouts, `as_subclass`;
- through torch's hook on the registration of submodules: `DistributedDataParallel` and `DataParallel`, which would
  overwrite the other ranks' shards with one rank's;
- in methods of DTensor: access to memory (`data_ptr`, storages, dlpack, …), see `storage_ops`.

Where torch has no hook, importing this package replaces a function of torch by one that checks its arguments first.
The functions replaced are:

- here, the five with which the transforms of `torch.func` wrap and unwrap a tensor;
- in `constructors`, those that make tensors from data or numbers, sparse and nested tensors, and `to_dlpack`;
- in `scripts`, calls of TorchScript functions, and scripting, tracing and export of modules;
- in `gradients`, `Function.apply` and `ctx.save_for_backward` of autograd Functions (`functions`), the method that
  attaches backward hooks of modules to tensors (`module_hooks`), `saved_tensors_hooks.__enter__` and the inputs that an
  activation checkpoint saves (`saved_tensors`), and the function that starts a backward pass (`below_autograd`);
- in `random.events`, `manual_seed`, `get_rng_state` and `set_rng_state`;
- in `api.torch_hooks`, `nn.RNNBase.flatten_parameters`.

Elsewhere you get the shard, with its local shape: `torch.Tensor(d)`, `torch.FloatTensor(d)`, `plain.data = d`,
`plain.set_(d)`, `torch.Tensor.as_subclass(d, kind)`, C++ extensions that take an `at::Tensor`, FSDP's own wrapping. A
number that an operator of plain tensors reads from a DTensor (`plain.add(plain, alpha=d)`) is this rank's partial
value. Use `d.full_tensor()` or `d.item()`.
"""

from __future__ import annotations

from typing import Any

import torch._functorch.eager_transforms
import torch._functorch.vmap
from torch import Tensor, nn
from torch.nn.modules.module import register_module_module_registration_hook

from shardwright.errors import UnsupportedError
from shardwright.tensor.base.replaced import is_replaced, replacing
from shardwright.tensor.base.tagging import DTensorBase
from shardwright.tensor.dispatch import constructors

__all__ = ["as_subclass", "install", "refuse", "refuse_functional"]

_FORWARD = "(forward-mode derivatives) is not available for DTensors: use reverse mode, torch.autograd.grad"
_DENSE = "is not available: the local tensors of a DTensor are dense. Use `x.full_tensor()`, or `x.to_local()`"
_REASONS = {
    **dict.fromkeys(("_make_dual", "_unpack_dual", "_fw_primal"), _FORWARD),
    **dict.fromkeys(("to_sparse", "_to_sparse", "to_sparse_coo", "to_mkldnn"), _DENSE),
    **dict.fromkeys((f"to_sparse_{kind}" for kind in ("csr", "csc", "bsr", "bsc")), _DENSE),
    "as_subclass": "would drop the layout: use `x.to_local()` for this rank's part, `x.full_tensor()` for the whole",
}
_COLLECTIVES = frozenset(("c10d", "_c10d_functional", "_c10d_functional_autograd", "symm_mem"))


def refuse(name: str, func: Any) -> None:
    """Raise UnsupportedError for an operator that is not available for DTensors or would see only shards."""
    reason = _REASONS.get(name)
    if reason is not None:
        raise UnsupportedError(f"{name} of a DTensor {reason}")
    home = getattr(func, "__module__", None) or ""
    if home.startswith("torch.distributed") or getattr(func, "namespace", "") in _COLLECTIVES:
        raise UnsupportedError(
            f"{name} of a DTensor would combine shards as if they were whole tensors: use "
            "`x.redistribute(placements=...)` or `x.full_tensor()`, or communicate `x.to_local()`"
        )


def as_subclass(tensor: DTensorBase, kind: type) -> None:
    """Raise UnsupportedError for `Tensor.as_subclass`, which does not call `__torch_function__`."""
    del tensor, kind
    refuse("as_subclass", None)


def refuse_functional(value: object, where: str) -> None:
    """Raise UnsupportedError for a tensor wrapped by a torch.func transform."""
    if isinstance(value, Tensor) and torch._C._functorch.is_functorch_wrapped_tensor(value):
        raise UnsupportedError(f"{where}: a tensor inside a torch.func transform is used with a DTensor. {_FUNCTIONAL}")


_FUNCTIONAL = (
    "torch.func transforms drop the layout and would compute on this rank's shard alone: use torch.autograd.grad "
    "for derivatives and batched operators for vmap, or transform a function of `x.full_tensor()`"
)


def _without_dtensors(original: Any) -> Any:
    """Return the function with a check that raises for DTensors."""

    @replacing(original)
    def function(value: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(value, DTensorBase):
            raise UnsupportedError(f"torch.func of a DTensor {value._layout}: {_FUNCTIONAL}")
        return original(value, *args, **kwargs)

    return function


def _refuse_replicas(wrapper: nn.Module, name: str, module: nn.Module | None) -> None:
    """Raise if a DDP or DataParallel wrapper gets DTensors. torch calls this for every submodule registered."""
    del name
    if module is None or not isinstance(wrapper, nn.parallel.DistributedDataParallel | nn.DataParallel):
        return
    for key, parameter in module.named_parameters():
        if isinstance(parameter, DTensorBase):
            raise UnsupportedError(
                f"{type(wrapper).__name__}: parameter {key!r} is a DTensor {parameter._layout}, whose shard it would "
                "overwrite with another rank's: DTensors reduce their own gradients, so leave the wrapper out, and "
                "spread the batch over the mesh with Shard(0)"
            )


def install() -> None:
    """Install the checks that need a hook or replace a function. Idempotent."""
    for module, name in (
        (torch._functorch.eager_transforms, "_wrap_tensor_for_grad"),
        (torch._functorch.eager_transforms, "_maybe_wrap_functional_tensor"),
        (torch._functorch.eager_transforms, "_unwrap_for_grad"),
        (torch._functorch.vmap, "_add_batch_dim"),
        (torch._functorch.vmap, "_remove_batch_dim"),
    ):
        original = getattr(module, name)
        if not is_replaced(original):
            setattr(module, name, _without_dtensors(original))
    constructors.install()
    if _refuse_replicas not in nn.modules.module._global_module_registration_hooks.values():
        register_module_module_registration_hook(_refuse_replicas)
