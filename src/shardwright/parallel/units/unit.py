"""`Unit`: parameters that are gathered together, released together, and whose gradients are reduced together."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager
from copy import deepcopy
from typing import Any, final

import torch
from torch import Tensor

from shardwright import comm
from shardwright.errors import InPlaceError, TensorError
from shardwright.parallel.units.functions import GatherParameters, share
from shardwright.parallel.units.precision import MixedPrecisionPolicy
from shardwright.parallel.units.reduction import Reduction, divisor, needs_gradient_now
from shardwright.parallel.units.saved import PackGatheredParameters, forget_buffers, remember_buffers
from shardwright.parallel.units.schedule import Schedule, Scheduled
from shardwright.parallel.units.split import Split
from shardwright.tensor.base.tagging import DTensorBase, no_torch_function
from shardwright.tensor.base.writes import MemoryVersion, memory_version, was_written

__all__ = ["Unit"]


@final
class Unit:
    """Parameters that are gathered together where they are used, and whose gradients are reduced together.

    `parameters` are DTensors, whose local tensors are split over `group` as `splits` say. They are gathered by one
    collective when the first of them is needed, and released when another unit is, unless that is part of this one.
    The gathered tensors are plain; each rank may use them differently. Their gradients are summed over the ranks, or
    averaged if `mean`, in one reduce-scatter, and then over `replicas`, the group of ranks that hold the same pieces.

    >>> import torch, shardwright as sw
    >>> from shardwright import comm
    >>> from shardwright.parallel.units import split_along
    >>> mesh = sw.init_device_mesh("cpu", (1,))
    >>> weight = sw.distribute_tensor(torch.ones(2, 3, requires_grad=True), mesh, [sw.Shard(0)])
    >>> unit = Unit([weight], [split_along(weight.sharding, 0)], comm.group_along(weight.sharding.mesh, 0))
    >>> unit.demand(0).sum().backward()
    >>> weight.grad.to_local()
    tensor([[1., 1., 1.],
            [1., 1., 1.]])
    """

    def __init__(
        self,
        parameters: Sequence[Any],
        splits: Sequence[Split],
        group: comm.Group,
        *,
        replicas: comm.Group | None = None,
        mesh_dims: frozenset[int] = frozenset((0,)),
        precision: MixedPrecisionPolicy | None = None,
        mean: bool = False,
        reshard_after_forward: bool = True,
        schedule: Schedule | None = None,
        parent: Unit | None = None,
        number: int = 0,
        names: Sequence[str] = (),
    ) -> None:
        self.parameters: list[DTensorBase] = list(parameters)
        self.splits = tuple(splits)
        self.group, self.replicas = group, replicas
        self._mesh_dims = mesh_dims
        self.precision = precision or MixedPrecisionPolicy()
        self.mean = mean
        self.divide_by: float | None = None  # what gradients are divided by, if not by the number of ranks
        self.reshard_after_forward = reshard_after_forward
        self.reshard_after_backward = True
        self.reduces = True  # False: gradients are accumulated without reduction
        self.sums_replicas = True  # False: likewise
        self.in_use = 0  # how many forwards of its modules run
        self.pinned = False  # stays gathered until it is released explicitly
        self.parent = parent
        self.number = number  # in the tags of its messages, the same on all ranks
        self.names = tuple(names)
        self.schedule = schedule or Schedule()
        self.schedule.units.append(self)
        self._pending: comm.Pending[list[Tensor]] | None = None
        self._values: list[Tensor] | None = None
        self._tensors: Sequence[Tensor] | None = None  # the values with a history, for one graph
        self._marks: list[MemoryVersion] = []  # of the parameters, when they were gathered
        self._addresses: list[int] = []
        self._accumulated: dict[int, Tensor] = {}  # gradients without reduction, by parameter

    def __deepcopy__(self, memo: dict[int, Any]) -> Unit:
        memo[id(self)] = made = Unit.__new__(Unit)
        made.__dict__.update(self.__dict__)
        made.parameters = [deepcopy(parameter, memo) for parameter in self.parameters]
        made.parent = deepcopy(self.parent, memo)
        made.schedule = deepcopy(self.schedule, memo)
        made.schedule.units.append(made)
        made.in_use, made.pinned = 0, False
        made._pending = made._values = made._tensors = None
        made._marks, made._addresses, made._accumulated = [], [], {}
        return made

    @property
    def mesh_dims(self) -> frozenset[int]:
        """The mesh dimensions of the parameters over which it gathers them, or sums their gradients."""
        return self._mesh_dims

    def saving(self) -> AbstractContextManager[None]:
        """Return a context in which autograd saves gathered parameters as references to their units."""
        return PackGatheredParameters()

    # --- gathering --------------------------------------------------------------------------------------------------

    def demand(self, index: int) -> Tensor:
        """Return a gathered parameter, differentiably: one collective gathers the unit if it is not gathered yet."""
        tensors, parameter = self._tensors, self.parameters[index]
        if tensors is not None and not was_written(parameter, self._marks[index]):
            tensor = tensors[index]
            if tensor.requires_grad == parameter.requires_grad or not torch.is_grad_enabled():
                return tensor
        return self.tensors()[index]

    def tensors(self) -> Sequence[Tensor]:
        """Return all gathered parameters, differentiably if gradients are recorded."""
        values = self.values()
        with no_torch_function():
            wanted = [parameter.requires_grad for parameter in self.parameters]
            if not torch.is_grad_enabled() or not any(wanted):
                return self._tensors or values
            if self._tensors is None or [tensor.requires_grad for tensor in self._tensors] != wanted:
                self._tensors = GatherParameters.apply(self, *self.parameters)  # type: ignore[no-untyped-call]  # torch's is untyped
            return self._tensors

    def values(self) -> list[Tensor]:
        """Return the gathered values, without gradients."""
        if self._is_stale():
            self.release()
        if self._values is None:
            self.schedule.release_others(self)
            self.start()
            assert self._pending is not None
            landed = self._pending.wait()
            with no_torch_function(), torch.no_grad():
                self._values = [_unrolled(value, split) for value, split in zip(landed, self.splits, strict=True)]
            self._pending = None
            self._addresses = remember_buffers(self, self._values)
            self.schedule.advance(self)
        return self._values

    def start(self) -> None:
        """Start gathering, unless the values are there or in flight."""
        if self._values is not None or self._pending is not None:
            return
        with no_torch_function(), torch.no_grad():
            self._refuse_meta()
            self._marks = [memory_version(parameter) for parameter in self.parameters]
            pieces = [
                _rolled(parameter.detach().to(self.precision.gathered_dtype(parameter.dtype)), split)
                for parameter, split in zip(self.parameters, self.splits, strict=True)
            ]
            if self.group.size == 1:
                shared = [share(piece) for piece in pieces]
                self._pending = comm.Pending("all_gather_many", self.group, (), lambda: shared)
            else:
                sizes = [split.sizes for split in self.splits]
                with comm.moving_tensor(self.number):
                    self._pending = comm.start_all_gather_many(pieces, self.group, sizes)
        self.schedule.gathered.append(self)
        self.schedule.count_gathered_bytes()

    def release(self) -> None:
        """Drop the gathered values; tensors that are still used elsewhere keep their memory."""
        if self._pending is not None:
            self._pending.wait()  # the buffers must not be freed while they are received
        forget_buffers(self._addresses)
        self._addresses = []
        self._pending = self._values = self._tensors = None
        if self in self.schedule.gathered:
            self.schedule.gathered.remove(self)

    @property
    def gathered_bytes(self) -> int:
        """The bytes of the gathered parameters; on one rank they are the parameters themselves."""
        if self.group.size == 1:
            return 0
        return sum(
            math.prod(split.shape) * self.precision.gathered_dtype(parameter.dtype).itemsize
            for parameter, split in zip(self.parameters, self.splits, strict=True)
        )

    @property
    def is_gathered(self) -> bool:
        """Whether the values are there or in flight."""
        return self._values is not None or self._pending is not None

    def drop_history(self) -> None:
        """Keep the values, and drop the tensors that belong to the graph of a forward pass."""
        self._tensors = None

    def _is_stale(self) -> bool:
        """Return whether gathered values cannot be used: a parameter was written to, or they lack a version counter."""
        if not self.is_gathered:
            return False
        if self._values and self._values[0].is_inference() and not torch.is_inference_mode_enabled():
            return True
        return any(map(was_written, self.parameters, self._marks))

    def _refuse_meta(self) -> None:
        for index, parameter in enumerate(self.parameters):
            if parameter.is_meta and not comm.is_simulated():
                raise TensorError(
                    f"the parameter {self.name(index)} is on the meta device and has no values: call "
                    "to_empty(device=...) and initialize it, or load a checkpoint, before it is used"
                )

    def name(self, index: int) -> str:
        """Return the name of a parameter, for error messages."""
        return repr(self.names[index]) if index < len(self.names) else f"number {index} of a unit"

    # --- saved tensors ----------------------------------------------------------------------------------------------

    def mark(self, index: int) -> MemoryVersion:
        """Return the version of a parameter's memory when it was gathered."""
        return self._marks[index]

    def value_again(self, index: int, mark: Any) -> Tensor:
        """Return the gathered value of a parameter that autograd had saved; raise if it was written to since."""
        if was_written(self.parameters[index], mark):
            raise InPlaceError(
                f"backward: the parameter {self.name(index)}, which is needed to compute gradients, was written to "
                "since it was used (by an optimizer step, or load_state_dict): run backward before writing to "
                "parameters, or compute the loss again"
            )
        self.schedule.call_at_end_of_backward()
        return self.values()[index]

    # --- what stays gathered ----------------------------------------------------------------------------------------

    def keeps(self, other: Scheduled, backward: bool) -> bool:
        """Return whether `other` stays gathered while this unit is in use."""
        assert isinstance(other, Unit)
        if other.in_use or other.pinned or not (backward or other.reshard_after_forward):
            return True
        ancestor = self.parent
        while ancestor is not None:
            if ancestor is other:
                return True
            ancestor = ancestor.parent
        return False

    def keeps_at_rest(self, evaluated: bool) -> bool:
        """Return whether this unit stays gathered between steps; `evaluated` if the last one had no backward."""
        reshards = self.reshard_after_forward if evaluated else self.reshard_after_backward
        return bool(self.in_use) or self.pinned or not reshards

    def gathers_ahead(self) -> bool:
        """Return whether gathering this unit ahead saves time: a single rank has nothing to wait for."""
        return self.group.size > 1

    # --- gradients --------------------------------------------------------------------------------------------------

    def reduce(
        self, gradients: Sequence[Tensor | None], needed: Sequence[bool], accumulates: bool
    ) -> list[Tensor | None]:
        """Reduce the gradients of the parameters that need one, and return this rank's pieces.

        If they are only accumulated in `.grad`, the reduction is started, and None is returned: it lands at the end of
        the backward pass, or when the next unit reduces. A parameter that no rank has used gets None.
        """
        self.schedule.call_at_end_of_backward()
        nothing: list[Tensor | None] = [None] * len(gradients)
        with no_torch_function():
            if all(needed) and not (self.in_use or self.pinned) and self.reshard_after_backward:
                self.release()  # all uses have computed their gradients: none needs the values again
            mine = {
                index: self._prepared(index, gradient)
                for index, gradient in enumerate(gradients)
                if needed[index] and gradient is not None
            }
            if accumulates:  # otherwise these gradients are returned, and have nothing to do with those of .grad
                for index, before in self._accumulated.items():
                    mine[index] = mine[index].add_(before) if index in mine else before
                self._accumulated = {}
                if not self.is_reducing:
                    self._accumulated = mine
                    return nothing
            indices = tuple(index for index, needs in enumerate(needed) if needs)
            self.schedule.land()
            reduction = self._start_reduction(indices, mine)
            if accumulates and reduction.takes_time() and not needs_gradient_now(reduction.parameters):
                self.schedule.reduction = reduction
                return nothing
            found = dict(zip(indices, reduction.results(), strict=True))
        return [found.get(index) for index in range(len(gradients))]

    @property
    def is_reducing(self) -> bool:
        """Whether backward reduces gradients now, over all ranks."""
        return self.reduces and self.sums_replicas

    def flush(self) -> None:
        """Reduce gradients that were accumulated without reduction, if reduction is on again, and add them."""
        if not self._accumulated or not self.is_reducing:
            return
        with no_torch_function(), torch.no_grad():
            mine, self._accumulated = self._accumulated, {}
            indices = tuple(index for index, parameter in enumerate(self.parameters) if parameter.requires_grad)
            self._start_reduction(indices, mine).land()

    def discard_gradients(self) -> None:
        """Drop gradients that were accumulated without reduction."""
        self._accumulated = {}

    def reduce_pieces(self, indices: tuple[int, ...], gradients: Sequence[Tensor]) -> list[Tensor]:
        """Reduce the gradients of some parameters and return this rank's pieces, at once."""
        with no_torch_function(), torch.no_grad():
            mine = {index: self._prepared(index, each) for index, each in zip(indices, gradients, strict=True)}
            return [piece for piece in self._start_reduction(indices, mine).results() if piece is not None]

    def gather_pieces(self, indices: tuple[int, ...], pieces: Sequence[Tensor]) -> list[Tensor]:
        """Gather tensors that are split like some parameters, at once."""
        with no_torch_function(), torch.no_grad():
            splits = [self.splits[index] for index in indices]
            dtypes = [self.precision.gathered_dtype(self.parameters[index].dtype) for index in indices]
            sent = [
                _rolled(piece.detach().to(dtype), split)
                for piece, dtype, split in zip(pieces, dtypes, splits, strict=True)
            ]
            with comm.moving_tensor(self.number):
                landed = comm.all_gather_many(sent, self.group, [split.sizes for split in splits])
            return [_unrolled(value, split) for value, split in zip(landed, splits, strict=True)]

    def _prepared(self, index: int, gradient: Tensor) -> Tensor:
        """Return a gradient as a new tensor in the dtype in which it is reduced."""
        if gradient.layout is not torch.strided:
            raise TensorError(
                f"the gradient of {self.name(index)} is sparse, and cannot be reduced with its unit: make it dense "
                "(sparse=False)"
            )
        dtype = self.precision.reduced_dtype(self.parameters[index].dtype)
        accumulates = not self.is_reducing or self._accumulated
        return gradient.to(dtype, copy=True) if accumulates else gradient.to(dtype)

    def _start_reduction(self, indices: tuple[int, ...], mine: dict[int, Tensor]) -> Reduction:
        splits = [self.splits[index] for index in indices]
        tensors = []
        for index, split in zip(indices, splits, strict=True):
            gradient = mine.get(index)
            if gradient is None:
                parameter = self.parameters[index]
                dtype = self.precision.reduced_dtype(parameter.dtype)
                gradient = torch.zeros(split.shape, dtype=dtype, device=parameter.device)
            tensors.append(_rolled(gradient, split))
        scale = 1.0
        if self.mean or self.divide_by is not None:
            scale = 1 / divisor(self.divide_by, self.group, self.replicas)
        with comm.moving_tensor(self.number):
            return Reduction(
                [self.parameters[index] for index in indices],
                splits,
                tensors,
                [index in mine for index in indices],
                self.group,
                self.replicas,
                scale,
            )


def _rolled(tensor: Tensor, split: Split) -> Tensor:
    """Return a tensor with the dimension along which it is split first."""
    return tensor.movedim(split.dim, 0) if split.dim else tensor


def _unrolled(tensor: Tensor, split: Split) -> Tensor:
    """Return a gathered tensor with its own order of dimensions."""
    return tensor.movedim(0, split.dim).contiguous() if split.dim else tensor
