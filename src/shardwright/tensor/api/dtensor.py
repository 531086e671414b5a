"""`DTensor`: a tensor distributed over a mesh of ranks. The object is its local tensor, tagged with a layout."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from shardwright import comm
from shardwright.errors import InPlaceError, MixedTensorsError, TensorError
from shardwright.layout import Layout, Placement
from shardwright.tensor.api.convert import rebuild, redistribute, to_local
from shardwright.tensor.api.from_local import from_local
from shardwright.tensor.base.checkpoint_protocol import provided
from shardwright.tensor.base.copied import is_copied, refuse_stale
from shardwright.tensor.base.gradient_types import REPLICATE
from shardwright.tensor.base.parameter_use import copy_use
from shardwright.tensor.base.strides import copy_strides, global_stride
from shardwright.tensor.base.tagging import DTensorBase, disabled, no_torch_function, tag
from shardwright.tensor.base.trace import on_trace
from shardwright.tensor.base.writes import count_writes_of, count_writes_through, data_of
from shardwright.tensor.dispatch import refusals, storage_ops
from shardwright.tensor.dispatch.cache import torch_function
from shardwright.tensor.dispatch.dispatcher import PASS_FUNCTIONS, intercept
from shardwright.tensor.dispatch.execute import call_known
from shardwright.tensor.gradients import engine
from shardwright.tensor.gradients.enter import forget_entered

__all__ = ["DTensor"]

_OF_ONE_OBJECT = frozenset(
    (
        *("_layout", "_copied_by", "_base_index", "_base_version", "_lookup_result", "_strides", "_number"),
        *("_shared", "_use", "_unit"),
    )
)  # not copied; the use is copied by `copy_use`
_enabled = torch._C._is_torch_function_enabled


def _attribute(name: str) -> Any:
    """Return torch's descriptor of a tensor attribute, which gives the value of the local tensor."""
    return getattr(Tensor, name)


_get_grad, _set_grad = _attribute("grad").__get__, _attribute("grad").__set__
_set_data = _attribute("data").__set__
_get_requires_grad, _set_requires_grad = _attribute("requires_grad").__get__, _attribute("requires_grad").__set__
_get_shape, _get_dtype, _get_device = (_attribute(name).__get__ for name in ("shape", "dtype", "device"))


class DTensor(DTensorBase):
    """A tensor distributed over a mesh of ranks, for use in ordinary torch code.

    Create one with `distribute_tensor`, `DTensor.from_local` or a factory (`sw.zeros`, `sw.randn`, …). Attributes and
    operators refer to the global tensor: `shape`, `stride`, indexing, arithmetic, gradients.

    >>> import torch, shardwright as sw
    >>> mesh = sw.init_device_mesh("cpu", (1,), mesh_dim_names=("dp",))
    >>> x = sw.distribute_tensor(torch.arange(6.0).reshape(2, 3), mesh, [sw.Shard(0)])
    >>> (x * 2).sum().item()
    30.0
    >>> x
    DTensor([2, 3] (dp: S(0)), float32, local on rank 0: tensor([[0., 1., 2.], [3., 4., 5.]]))
    """

    is_sparse = False
    is_quantized = False
    is_mkldnn = False
    is_nested = False
    is_sparse_csr = False

    __torch_function__: Any = classmethod(torch_function(PASS_FUNCTIONS, call_known, intercept))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call the function: torch never dispatches here, because DTensors are tagged plain tensors.

        Its presence keeps torch.compile from guarding on the local size of a DTensor.
        """
        with torch._C._DisableTorchDispatch():
            return func(*args, **(kwargs or {}))

    # --- conversion -------------------------------------------------------------------------------------------------

    @staticmethod
    def from_local(
        local_tensor: Tensor,
        device_mesh: Any = None,
        placements: Sequence[object] | None = None,
        *,
        run_check: bool | None = None,
        shape: Sequence[int] | None = None,
        stride: Sequence[int] | None = None,
        grad_placements: Sequence[object] | None = None,
    ) -> DTensor:
        """Return a DTensor whose local part is `local_tensor` on every rank, differentiably.

        Without `shape`, and with a `Shard` among the placements, the ranks along the sharding mesh dimensions gather
        their local sizes (one small message). Sizes that are not those of `torch.chunk` give a `Ragged` placement;
        sizes that fit no layout raise `LocalTensorError` on all of them, and so do dtypes or `requires_grad` that
        differ. Replicas and partial values are not compared and need no message.

        `run_check=False` sends nothing: all shards are taken to have this rank's size. `run_check=True` compares all
        ranks of the mesh, strides and the values of replicas included. With `shape`, only `run_check=True` sends
        anything; without it each rank checks its own local tensor. `stride` is accepted for compatibility
        with PyTorch: strides follow from the local tensor. `grad_placements` are the placements of the gradient that
        reaches `local_tensor`: `[Partial()]` for a replicated tensor gives each rank a partial gradient.

        Without a mesh, it is that of the enclosing `with mesh:`, or all ranks in one dimension. Without `placements`,
        the tensor is replicated. A rank outside the mesh gets an empty local tensor, whatever it passes.

        >>> import torch, shardwright as sw
        >>> mesh = sw.init_device_mesh("cpu", (1,))
        >>> sw.DTensor.from_local(torch.ones(2, 3), mesh, [sw.Shard(0)]).shape
        torch.Size([2, 3])
        """
        return from_local(
            local_tensor,
            device_mesh,
            placements,
            run_check=run_check,
            shape=shape,
            stride=stride,
            grad_placements=grad_placements,
        )

    def to_local(self, *, grad_placements: Sequence[object] | None = None) -> Tensor:
        """Return this rank's local tensor as a plain tensor, differentiably.

        The incoming gradient is assumed to have the layout of this tensor's gradient. If every rank uses a replicated
        tensor differently, pass `grad_placements=[Partial()]`: the gradient is then summed over the ranks.

        >>> import torch, shardwright as sw
        >>> sw.ones(2, mesh=sw.init_device_mesh("cpu", (1,))).to_local()
        tensor([1., 1.])
        """
        return to_local(self, grad_placements)

    def full_tensor(self, *, grad_placements: Sequence[object] | None = None) -> Tensor:
        """Return the global tensor on every rank, as a plain tensor, differentiably.

        >>> import torch, shardwright as sw
        >>> sw.zeros(3, mesh=sw.init_device_mesh("cpu", (1,)), placements=[sw.Shard(0)]).full_tensor()
        tensor([0., 0., 0.])
        """
        whole = self.redistribute(placements=[REPLICATE] * self._layout.mesh.ndim)
        return whole.to_local(grad_placements=grad_placements)

    def redistribute(
        self,
        device_mesh: Any = None,
        placements: Sequence[object] | None = None,
        *,
        order: Sequence[int | str] | None = None,
        async_op: bool = False,
        forward_dtype: torch.dtype | None = None,
        backward_dtype: torch.dtype | None = None,
    ) -> DTensor:
        """Return the same tensor under another layout, differentiably, on another mesh if one is given.

        Collective over the ranks of both meshes. `async_op=True` starts the redistribution and returns at once; the
        result waits when it is first used. If a gradient is recorded, the redistribution does not overlap.

        With `forward_dtype` the value is cast before it is sent, and the result has that dtype; with `backward_dtype`
        the gradient is cast before it is sent back. The gradient that arrives has the dtype of this tensor. A cast
        that could round or wrap partial values completes their sum first, in the dtype they have.

        >>> import torch, shardwright as sw
        >>> x = sw.ones(4, 2, mesh=sw.init_device_mesh("cpu", (1,), mesh_dim_names=("tp",)))
        >>> print(x.redistribute(placements=[sw.Shard(1)]).sharding)
        [4, 2] (tp: S(1))
        """
        return redistribute(self, device_mesh, placements, order, async_op, forward_dtype, backward_dtype)

    # --- the protocol of torch.distributed.checkpoint ---------------------------------------------------------------

    def __create_chunk_list__(self) -> list[Any]:
        """Return the chunks that this rank holds; see `checkpoint.chunk_list`."""
        return provided().chunk_list(self)

    def __get_tensor_shard__(self, index: Any) -> Tensor:
        """Return the local memory of a chunk; see `checkpoint.local_tensor_for`."""
        return provided().local_tensor_for(self, index)

    def __create_write_items__(self, fqn: str, object: Any) -> list[Any]:
        """Return the write items of this rank for `object`, which is this tensor; see `checkpoint.write_items`."""
        return provided().write_items(object, fqn)

    # --- metadata ---------------------------------------------------------------------------------------------------

    @property
    def sharding(self) -> Layout:
        """The Layout: which rank holds which region. (`Tensor.layout` keeps torch's meaning.)"""
        return self._layout

    @property
    def placements(self) -> tuple[Placement, ...]:
        """One placement per mesh dimension."""
        return self._layout.placements

    @property
    def device_mesh(self) -> comm.DeviceMesh:
        """The mesh, as the DeviceMesh that was given."""
        return comm.device_mesh_of(self._layout.mesh, self.device.type)

    @property
    def shape(self) -> torch.Size:
        if _enabled():
            return torch.Size(self._layout.shape)
        return disabled(_get_shape, (), (self,), {})

    @property
    def ndim(self) -> int:
        return len(self._layout.shape)

    @property
    def T(self) -> Tensor:  # noqa: N802  # torch's name
        return self.permute(*reversed(range(self.ndim)))

    @property
    def mT(self) -> Tensor:  # noqa: N802  # torch's name
        return self.transpose(-2, -1)

    @property
    def H(self) -> Tensor:  # noqa: N802  # torch's name
        return self.mT.conj() if self.is_complex() else self.mT

    @property
    def mH(self) -> Tensor:  # noqa: N802  # torch's name
        return self.H

    @property
    def real(self) -> Tensor:
        return torch.real(self)

    @property
    def imag(self) -> Tensor:
        return torch.imag(self)

    @property
    def nbytes(self) -> int:
        return self.numel() * self.element_size()

    @property
    def requires_grad(self) -> bool:
        return disabled(_get_requires_grad, (), (self,), {})

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        disabled(_set_requires_grad, (), (self, value), {})

    @property
    def dtype(self) -> torch.dtype:
        return disabled(_get_dtype, (), (self,), {})

    @property
    def device(self) -> torch.device:
        return disabled(_get_device, (), (self,), {})

    def size(self, dim: int | None = None) -> Any:
        if not _enabled():
            return disabled(Tensor.size, (), (self,) if dim is None else (self, dim), {})
        shape = torch.Size(self._layout.shape)
        return shape if dim is None else shape[dim]

    def dim(self) -> int:
        return len(self._layout.shape)

    def ndimension(self) -> int:
        return len(self._layout.shape)

    def numel(self) -> int:
        if _enabled():
            return torch.Size(self._layout.shape).numel()
        return disabled(Tensor.numel, (), (self,), {})

    def nelement(self) -> int:
        return self.numel()

    # torch does not dispatch these to __torch_function__.
    set_ = storage_ops.set_
    detach_ = storage_ops.detach_
    as_subclass = refusals.as_subclass  # type: ignore[assignment]  # it always raises
    resize_ = storage_ops.resize_
    resize_as_ = storage_ops.resize_as_  # type: ignore[assignment]  # narrower than torch's
    is_same_size = storage_ops.is_same_size
    is_set_to = storage_ops.is_set_to

    # Memory is exposed only if this rank holds the global tensor; the other methods that do so are set below.
    __cuda_array_interface__ = property(storage_ops.cuda_array_interface)
    __dlpack_c_exchange_api__ = storage_ops.NoExchange()

    def _has_compatible_shallow_copy_type(self, other: Tensor) -> bool:
        """Tell `nn.Module._apply` that `.data =` takes a DTensor on any device, so that it keeps the parameter."""
        return isinstance(other, DTensor)

    def stride(self, dim: int | None = None) -> Any:
        if not _enabled():
            return disabled(Tensor.stride, (), (self,) if dim is None else (self, dim), {})
        strides = global_stride(self)
        return strides if dim is None else strides[dim]

    def __len__(self) -> int:
        if not self._layout.shape:
            raise TypeError("len() of a 0-d tensor")
        return self.shape[0]

    def __iter__(self) -> Iterator[Tensor]:
        if not self._layout.shape:
            raise TypeError("iteration over a 0-d tensor")
        return iter(self.unbind(0))

    def __bool__(self) -> bool:
        return bool(self._local_item())

    def __float__(self) -> float:
        return float(self.item())

    def __int__(self) -> int:
        return int(self._local_item())

    def __index__(self) -> int:
        return self._local_item().__index__()

    def __complex__(self) -> complex:
        return complex(self.item())

    def __contains__(self, element: Any) -> bool:
        return bool((self == element).any().item())

    def __format__(self, spec: str) -> str:
        return format(self.item(), spec) if not self._layout.shape and spec else str(self)

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        with no_torch_function():
            kind = "Parameter" if getattr(self, "_is_param", False) else "DTensor"
            rank, dtype = comm.rank(), str(self.dtype).removeprefix("torch.")
            local = " ".join(repr(self.detach().view_as(self)).split())
            grad = ", requires_grad=True" if self.requires_grad and self.is_leaf else ""
            grad = f", grad_fn={type(self.grad_fn).__name__}" if self.grad_fn is not None else grad
        return f"{kind}({self._layout}, {dtype}{grad}, local on rank {rank}: {local})"

    # --- the global value -------------------------------------------------------------------------------------------

    def item(self) -> Any:
        """Return the one element, the same on every rank of the mesh; nan on a rank outside it.

        A bool cannot be nan: outside the mesh it raises `TensorError`, and so do `bool(x)` and `int(x)`, because
        ranks that branch differently run different programs.
        """
        if not _enabled():
            return disabled(Tensor.item, (), (self,), {})
        whole = self.full_tensor()
        if comm.rank() in self._layout.mesh or self.numel() != 1:
            return whole.item()
        return self._local_item() if whole.dtype is torch.bool else float("nan")

    def _local_item(self) -> Any:
        """Return the one element, or raise on a rank outside the mesh."""
        if _enabled() and comm.rank() not in self._layout.mesh:
            raise TensorError(
                f"the value of a DTensor {self._layout} is not known on rank {comm.rank()}, which is outside its mesh "
                f"{self._layout.mesh!r}: decide on the ranks of the mesh (mesh.get_coordinate() is not None), or "
                "redistribute it to a mesh of all ranks first"
            )
        return self.item()

    def tolist(self) -> Any:
        """Return the global tensor as nested lists, on every rank."""
        return self.full_tensor().tolist() if _enabled() else disabled(Tensor.tolist, (), (self,), {})

    def numpy(self, *, force: bool = False) -> Any:
        """Return the global tensor as a numpy array, on every rank."""
        if not _enabled():
            return disabled(Tensor.numpy, (), (self,), {"force": force})
        return self.full_tensor().numpy(force=force)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        """Return the global tensor as a numpy array, on every rank."""
        whole: Any = self.full_tensor() if _enabled() else self
        array = whole.__array__() if dtype is None else whole.__array__(dtype)
        return array.copy() if copy else array

    # --- gradients --------------------------------------------------------------------------------------------------

    @property
    def grad(self) -> DTensor | None:
        gradient = disabled(_get_grad, (), (self,), {})
        if gradient is not None and not isinstance(gradient, DTensor):
            # Set by autograd as a plain tensor: tag it in place, because its identity matters.
            gradient.__class__ = DTensor
            gradient._layout = engine.gradient_layout(self._layout)
        return gradient

    @grad.setter
    def grad(self, gradient: Tensor | None) -> None:
        if gradient is not None:
            if not isinstance(gradient, DTensor):
                raise MixedTensorsError(f".grad of a DTensor {self._layout} must be a DTensor, got a plain tensor")
            layout = engine.gradient_layout(self._layout)
            if gradient._layout is not layout:
                raise TensorError(f".grad {gradient._layout} does not fit {self._layout}: redistribute it to {layout}")
            if is_copied(gradient):  # autograd adds to it, and does not add to what a view would show
                raise InPlaceError(
                    f".grad = {gradient._layout}, which looks like a view but is a copy, because "
                    f"{gradient._copied_by} of a sharded dimension needed communication: clone() it first"
                )
        disabled(_set_grad, (), (self, gradient), {})

    @grad.deleter
    def grad(self) -> None:
        disabled(_set_grad, (), (self, None), {})

    @property
    def data(self) -> DTensor:
        data: DTensor = tag(data_of(self), self._layout)
        copy_strides(data, self)
        copy_use(data, self)
        return data

    @data.setter
    def data(self, value: Tensor) -> None:
        if not isinstance(value, DTensor):
            raise MixedTensorsError(f".data of a DTensor {self._layout} must be a DTensor, got a plain tensor")
        refuse_stale(".data =", value)
        with no_torch_function():
            alias_of = value.detach()
            if torch._has_compatible_shallow_copy_type(self, alias_of):
                disabled(_set_data, (), (self, alias_of), {})
            else:  # from meta or another device: the object stays, as `to_empty` and `to` need for ties
                alias_of.requires_grad_(self.requires_grad)
                torch._C._swap_tensor_impl(self, alias_of)
        self._layout = value._layout
        copy_strides(self, value)
        del alias_of  # it shares the memory
        count_writes_through(self, value)
        forget_entered()

    def backward(
        self,
        gradient: Tensor | None = None,
        retain_graph: bool | None = None,
        create_graph: bool = False,
        inputs: Any = None,
    ) -> None:
        """Accumulate gradients in the leaves, as in torch; autograd runs natively on local tensors."""
        engine.backward(self, gradient, retain_graph, create_graph, inputs)

    def register_hook(self, hook: Callable[[Tensor], Tensor | None]) -> Any:
        """Register a hook that is called with the gradient as a DTensor; its result, if any, replaces the gradient."""
        return engine.register_hook(self, hook)

    def retain_grad(self) -> None:
        """Keep the gradient of this tensor in `.grad`, although it is not a leaf."""
        engine.retain_grad(self)

    # --- copies -----------------------------------------------------------------------------------------------------

    def __copy__(self) -> DTensor:
        """Return another tensor object on the same memory, with the same attributes."""
        with no_torch_function():
            result = tag(self.detach(), self._layout)
            result.requires_grad_(self.requires_grad)
        copy_strides(result, self)
        copy_use(result, self)
        result.__dict__.update({k: v for k, v in self.__dict__.items() if k not in _OF_ONE_OBJECT})
        return result

    def __deepcopy__(self, memo: dict[int, Any]) -> DTensor:
        """Return a copy as torch does: of a parameter the values alone, of a tensor also `.grad` and attributes."""
        if id(self) in memo:
            return memo[id(self)]
        is_parameter = "_is_param" in self.__dict__
        if not is_parameter and not self.is_leaf:
            raise RuntimeError("only DTensors created by the user (graph leaves) support the deepcopy protocol")
        with no_torch_function():
            local = self.detach()
            # As in torch: copies of tensors that share memory share it too, but a parameter is cloned.
            copied = local.clone(memory_format=torch.preserve_format) if is_parameter else copy.deepcopy(local, memo)
            memo[id(self)] = result = tag(copied, self._layout)
            result.requires_grad_(self.requires_grad)
            copy_use(result, self)
            if not is_parameter:
                count_writes_of(result)  # copies that share memory have version counters of their own
                copy_strides(result, self)
        if is_parameter:
            result._is_param = True  # what makes isinstance(x, nn.Parameter) true
            return result
        if self.grad is not None:
            result.grad = copy.deepcopy(self.grad, memo)
        others = {k: v for k, v in self.__dict__.items() if k not in _OF_ONE_OBJECT}
        result.__dict__.update(copy.deepcopy(others, memo))
        return result

    def __reduce_ex__(self, protocol: Any) -> Any:
        with no_torch_function():
            local = self.detach().view_as(self)
            is_parameter = getattr(self, "_is_param", False)
            use = self.__dict__.get("_use")
            used = () if use is None else (sorted(use.gathered), use.dtype)
            return rebuild, (local, self._layout.to_json(), comm.rank(), self.requires_grad, is_parameter, *used)

    def __hash__(self) -> int:
        return id(self)


for _name in storage_ops.EXPOSING:
    setattr(DTensor, _name, storage_ops.exposing(_name))


def _traced(_: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
    """`__torch_function__` while a trace is open: without the fast path, so that every call is recorded."""
    return intercept(func, types, args, kwargs or {})


_untraced = DTensor.__dict__["__torch_function__"]


def _switch(on: bool) -> None:
    setattr(DTensor, "__torch_function__", classmethod(_traced) if on else _untraced)  # noqa: B010  # mypy rejects an assignment


on_trace(_switch)
