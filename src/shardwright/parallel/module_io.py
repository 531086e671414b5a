"""Hooks that redistribute the inputs and outputs of a module over one mesh dimension, as its style says."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from shardwright.layout import Mesh, Placement, Replicate, Shard
from shardwright.parallel.plan.layers import matrix_of
from shardwright.parallel.plan.styles import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
)
from shardwright.tensor import DTensor
from shardwright.tensor.gradients.share import gather_for_operators

__all__ = ["install"]

_REPLICATE, _LAST = Replicate(), Shard(-1)


@dataclass(frozen=True, slots=True)
class _Boundary:
    """The mesh dimension over which values are redistributed, and whether plain values are local shards or replicated.

    `local` is the semantics of `parallelize_module`: plain tensors go in and come out, and the style says how they are
    placed. Otherwise DTensors flow through the model, and plain values stay as they are.
    """

    mesh: Mesh
    mesh_dim: int
    local: bool

    def enter(self, value: Any, given: Placement | None, wanted: Placement | None) -> Any:
        """Return a value with the placement `wanted`; a plain one has the placement `given`."""
        if not isinstance(value, Tensor) or not value.ndim:
            return value
        if not isinstance(value, DTensor):
            if not self.local or (given is None and wanted is None):
                return value
            value = DTensor.from_local(value, self.mesh, self._placements(given or wanted))
        return value if wanted is None else self._move(value, wanted)

    def leave(self, value: Any, given: Placement | None, wanted: Placement | None, *, plain: bool) -> Any:
        """Return a value with the placement `wanted`, as a plain local tensor if asked for."""
        value = self.enter(value, given, wanted)
        return value.to_local() if plain and isinstance(value, DTensor) else value

    def _placements(self, placement: Placement | None) -> list[Placement]:
        return [
            placement if mesh_dim == self.mesh_dim and placement is not None else _REPLICATE
            for mesh_dim in range(self.mesh.ndim)
        ]

    def _move(self, value: DTensor, wanted: Placement) -> DTensor:
        placements = list(value.sharding.placements)
        if isinstance(wanted, Shard) and wanted.dim < 0:
            wanted = Shard(wanted.dim + value.ndim)
        if placements[self.mesh_dim] == wanted:
            return value
        placements[self.mesh_dim] = wanted
        if self.local:
            return value.redistribute(placements=placements)
        moved: DTensor = gather_for_operators(value, value.sharding.replace(placements=placements))
        return moved


@dataclass(frozen=True, slots=True)
class _BeforeForward:
    """A forward pre-hook that redistributes positional and keyword arguments."""

    boundary: _Boundary
    given: tuple[Placement | None, ...]
    wanted: tuple[Placement | None, ...]
    named: tuple[tuple[str, Placement | None], ...] = ()
    named_wanted: tuple[tuple[str, Placement | None], ...] = ()
    plain: bool = False

    def __call__(
        self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        named, named_wanted = dict(self.named), dict(self.named_wanted)
        changed = [
            self.boundary.leave(value, _at(self.given, index), _at(self.wanted, index), plain=self.plain)
            for index, value in enumerate(args)
        ]
        return tuple(changed), {
            name: self.boundary.leave(value, named.get(name), named_wanted.get(name), plain=self.plain)
            for name, value in kwargs.items()
        }


@dataclass(frozen=True, slots=True)
class _AfterForward:
    """A forward hook that redistributes the output, or each of several outputs."""

    boundary: _Boundary
    given: tuple[Placement | None, ...]
    wanted: tuple[Placement | None, ...]
    plain: bool = False

    def __call__(self, _: nn.Module, __: Any, result: Any) -> Any:
        if not isinstance(result, tuple | list):
            return self.boundary.leave(result, _at(self.given, 0), _at(self.wanted, 0), plain=self.plain)
        return type(result)(
            self.boundary.leave(value, _at(self.given, index), _at(self.wanted, index), plain=self.plain)
            for index, value in enumerate(result)
        )


def install(module: nn.Module, style: ParallelStyle, mesh: Mesh, mesh_dim: int, *, local: bool) -> None:
    """Register the hooks that a style needs on a module."""
    boundary = _Boundary(mesh, mesh_dim, local)
    before: _BeforeForward | None = None
    after: _AfterForward | None = None
    match style:
        case ColwiseParallel() | RowwiseParallel() | SequenceParallel():
            given, wanted, output = _layer_placements(module, style, local=local)
            before = _BeforeForward(boundary, (given,), (wanted,))
            after = _AfterForward(boundary, (), (output,), plain=local and style.use_local_output)
        case PrepareModuleInput():
            before = _before(style, boundary, plain=local and style.use_local_output)
        case PrepareModuleOutput():
            after = _after(style, boundary)
        case PrepareModuleInputOutput():
            before = _before(style, boundary, plain=local and style.use_local_input)
            after = _after(style, boundary)
    if before is not None and (local or any(before.wanted) or any(placement for _, placement in before.named_wanted)):
        module.register_forward_pre_hook(before, with_kwargs=True)
    if after is not None and (local or any(after.wanted)):
        module.register_forward_hook(after)


def _layer_placements(
    module: nn.Module, style: ColwiseParallel | RowwiseParallel | SequenceParallel, *, local: bool
) -> tuple[Placement, Placement | None, Placement | None]:
    """Return the placement of a layer's plain input, the one that its forward gets, and that of its output.

    None leaves a DTensor to the operator, which redistributes it if it must; several layers then share that.
    """
    needed: Placement
    match style:
        case ColwiseParallel():
            needed, output = _REPLICATE, style.output_layouts or (_LAST if local else None)
        case RowwiseParallel():
            matrix = matrix_of(module)
            needed = _REPLICATE if matrix is not None and matrix.kind == "embedding" else _LAST
            output = style.output_layouts or _REPLICATE
        case SequenceParallel():
            sequence = Shard(style.sequence_dim)
            return sequence, sequence, None
    return style.input_layouts or needed, needed if local else None, output


def _before(
    style: PrepareModuleInput | PrepareModuleInputOutput, boundary: _Boundary, *, plain: bool
) -> _BeforeForward:
    return _BeforeForward(
        boundary,
        style.input_layouts or (),
        style.desired_input_layouts or (),
        style.input_kwarg_layouts or (),
        style.desired_input_kwarg_layouts or (),
        plain,
    )


def _after(style: PrepareModuleOutput | PrepareModuleInputOutput, boundary: _Boundary) -> _AfterForward:
    plain = boundary.local and style.use_local_output
    return _AfterForward(boundary, style.output_layouts or (), style.desired_output_layouts or (), plain)


def _at(placements: Sequence[Placement | None], index: int) -> Placement | None:
    return placements[index] if index < len(placements) else None
