"""Parallel styles: how a module's parameters are placed over `tp`, and how its inputs and outputs are.

The names and arguments are those of `torch.distributed.tensor.parallel`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar, TypeAlias

from shardwright.errors import ArgumentTypeError, PlanError
from shardwright.layout import Placement
from shardwright.layout.placement import as_placement

__all__ = [
    "ColwiseParallel",
    "Ignored",
    "ParallelStyle",
    "Placements",
    "PrepareModuleInput",
    "PrepareModuleInputOutput",
    "PrepareModuleOutput",
    "Replicated",
    "RowwiseParallel",
    "SequenceParallel",
    "as_style",
]

# The placements of several inputs or outputs; None for a value that stays as it is.
Placed: TypeAlias = tuple[Placement | None, ...]


@dataclass(frozen=True, repr=False)
class ParallelStyle:
    """The base class of styles: what a `Plan` gives to the modules and parameters that a pattern matches.

    >>> import shardwright as sw
    >>> isinstance(sw.ColwiseParallel(), ParallelStyle)
    True
    """

    def __repr__(self) -> str:
        given = [
            f"{each.name}={getattr(self, each.name)!r}"
            for each in fields(self)
            if getattr(self, each.name) != each.default
        ]
        return f"{type(self).__name__}({', '.join(given)})"

    decides_parameters: ClassVar[bool] = True
    """True if the style places parameters, and not only inputs or outputs."""


@dataclass(frozen=True, repr=False, kw_only=True)
class ColwiseParallel(ParallelStyle):
    """Shard a linear layer by its outputs over `tp`, or an embedding by its columns.

    The input is needed on all ranks; the output is sharded in its last dimension, or redistributed to
    `output_layouts`. Shards begin at multiples of `multiple` outputs, for example the size of an attention head: if the
    number of heads does not divide by the number of ranks, some ranks have one more, and if there are fewer heads than
    ranks, the layer is replicated.

    For `parallelize_module`, `input_layouts` is the placement of a plain input, and `use_local_output` says whether the
    output is a plain local tensor. With `parallelize`, DTensors flow through the model.

    >>> import shardwright as sw
    >>> sw.ColwiseParallel(multiple=64)
    ColwiseParallel(multiple=64)
    """

    input_layouts: Placement | None = None
    output_layouts: Placement | None = None
    use_local_output: bool = True
    multiple: int = 1

    def __post_init__(self) -> None:
        _convert(self, "input_layouts", "output_layouts")
        _check_multiple(self)


@dataclass(frozen=True, repr=False, kw_only=True)
class RowwiseParallel(ParallelStyle):
    """Shard a linear layer by its inputs over `tp`, or an embedding by its rows (the vocabulary).

    The input is needed sharded in its last dimension (an embedding's on all ranks). The partial sums of the output are
    redistributed to `output_layouts`: `Replicate()` by default, by an all-reduce; `Shard(1)` by a reduce-scatter, for
    sequence parallelism. `multiple`, `input_layouts` and `use_local_output` are as for `ColwiseParallel`.

    >>> import shardwright as sw
    >>> sw.RowwiseParallel(output_layouts=sw.Shard(1))
    RowwiseParallel(output_layouts=Shard(1))
    """

    input_layouts: Placement | None = None
    output_layouts: Placement | None = None
    use_local_output: bool = True
    multiple: int = 1

    def __post_init__(self) -> None:
        _convert(self, "input_layouts", "output_layouts")
        _check_multiple(self)


@dataclass(frozen=True, repr=False, kw_only=True)
class SequenceParallel(ParallelStyle):
    """Run a normalization or dropout layer on activations that are sharded along the sequence over `tp`.

    Its parameters are replicated. `sequence_dim` is the dimension of the sequence in its input.

    >>> import shardwright as sw
    >>> sw.SequenceParallel()
    SequenceParallel()
    """

    sequence_dim: int = 1
    use_local_output: bool = False


@dataclass(frozen=True, repr=False, kw_only=True)
class PrepareModuleInput(ParallelStyle):
    """Redistribute the inputs of a module over `tp` before its forward; its parameters are not affected.

    `input_layouts` are the placements that plain inputs have, `desired_input_layouts` those that the module gets: one
    per positional argument, None for one that stays as it is. The others are for keyword arguments.

    >>> import shardwright as sw
    >>> sw.PrepareModuleInput(input_layouts=sw.Shard(1), desired_input_layouts=sw.Replicate())
    PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))
    """

    decides_parameters: ClassVar[bool] = False
    input_layouts: Any = None
    desired_input_layouts: Any = None
    input_kwarg_layouts: Any = None
    desired_input_kwarg_layouts: Any = None
    use_local_output: bool = False

    def __post_init__(self) -> None:
        _convert_many(self, "input_layouts", "desired_input_layouts")
        _convert_named(self, "input_kwarg_layouts", "desired_input_kwarg_layouts")
        _check_input_pairs(self)


@dataclass(frozen=True, repr=False, kw_only=True)
class PrepareModuleOutput(ParallelStyle):
    """Redistribute the outputs of a module over `tp` after its forward; its parameters are not affected.

    `output_layouts` are the placements that plain outputs have, `desired_output_layouts` those that they get.

    >>> import shardwright as sw
    >>> sw.PrepareModuleOutput(output_layouts=sw.Shard(1), desired_output_layouts=sw.Replicate())
    PrepareModuleOutput(output_layouts=(Shard(1),), desired_output_layouts=(Replicate(),))
    """

    decides_parameters: ClassVar[bool] = False
    output_layouts: Any = None
    desired_output_layouts: Any = None
    use_local_output: bool = True

    def __post_init__(self) -> None:
        _convert_many(self, "output_layouts", "desired_output_layouts")
        _check_pairs(self, "output_layouts", "desired_output_layouts")


@dataclass(frozen=True, repr=False, kw_only=True)
class PrepareModuleInputOutput(ParallelStyle):
    """Do what `PrepareModuleInput` and `PrepareModuleOutput` do, for one module.

    >>> import shardwright as sw
    >>> sw.PrepareModuleInputOutput(input_layouts=sw.Shard(1), desired_input_layouts=sw.Replicate(),
    ...                             output_layouts=sw.Partial(), desired_output_layouts=sw.Shard(1))
    PrepareModuleInputOutput(input_layouts=(Shard(1),), ...)
    """

    decides_parameters: ClassVar[bool] = False
    input_layouts: Any = None
    desired_input_layouts: Any = None
    input_kwarg_layouts: Any = None
    desired_input_kwarg_layouts: Any = None
    use_local_input: bool = False
    output_layouts: Any = None
    desired_output_layouts: Any = None
    use_local_output: bool = True

    def __post_init__(self) -> None:
        _convert_many(self, "input_layouts", "desired_input_layouts", "output_layouts", "desired_output_layouts")
        _convert_named(self, "input_kwarg_layouts", "desired_input_kwarg_layouts")
        _check_input_pairs(self)
        _check_pairs(self, "output_layouts", "desired_output_layouts")


@dataclass(frozen=True, repr=False)
class Replicated(ParallelStyle):
    """Replicate parameters over `tp`.

    >>> import shardwright as sw
    >>> sw.Plan({"**.norm": sw.Replicated()})["**.norm"]
    Replicated()
    """


@dataclass(frozen=True, repr=False)
class Ignored(ParallelStyle):
    """Leave parameters as plain tensors, over no mesh dimension sharded; they count as replicated in the forward.

    Every rank must keep the same values in them.

    >>> import shardwright as sw
    >>> sw.Plan({"adapter": sw.Ignored()})["adapter"]
    Ignored()
    """


@dataclass(frozen=True, repr=False)
class Placements(ParallelStyle):
    """Raw placements of parameters: by the name of a mesh dimension, or one for each dimension of the mesh."""

    by_name: tuple[tuple[str, Placement], ...] = ()
    in_order: tuple[Placement, ...] = ()

    def __repr__(self) -> str:
        return repr(dict(self.by_name)) if self.by_name else repr(list(self.in_order))

    def names(self) -> Iterator[str]:
        """Yield the names of mesh dimensions that are used."""
        yield from dict(self.by_name)


def as_style(value: object) -> ParallelStyle:
    """Convert a value of a plan to a style: a style, placements by mesh dimension, or a placement over `tp`.

    >>> from shardwright.layout import Shard
    >>> as_style({"tp": Shard(0)})
    {'tp': Shard(0)}
    """
    if isinstance(value, ParallelStyle):
        return value
    if isinstance(value, Mapping):
        return Placements(by_name=tuple((str(name), _parameter_placement(each)) for name, each in value.items()))
    if isinstance(value, Sequence) and not isinstance(value, str):
        return Placements(in_order=tuple(_parameter_placement(each) for each in value))
    try:
        return Placements(by_name=(("tp", _parameter_placement(value)),))
    except ArgumentTypeError:
        raise ArgumentTypeError(
            "expected a style such as ColwiseParallel(), a placement, or placements by the name of a mesh dimension, "
            f"got {type(value).__name__}: {value!r}"
        ) from None


def _parameter_placement(value: object) -> Placement:
    placement = as_placement(value)
    if placement.is_partial():
        raise PlanError(f"a parameter cannot be {placement!r}: use Shard, Ragged or Replicate")
    return placement


def _convert(style: ParallelStyle, *names: str) -> None:
    for name in names:
        value = getattr(style, name)
        if value is not None:
            object.__setattr__(style, name, as_placement(value))


def _convert_many(style: ParallelStyle, *names: str) -> None:
    for name in names:
        value = getattr(style, name)
        if value is not None:
            listed = value if isinstance(value, tuple | list) else (value,)
            converted: Placed = tuple(None if each is None else as_placement(each) for each in listed)
            object.__setattr__(style, name, converted)


def _convert_named(style: ParallelStyle, *names: str) -> None:
    for name in names:
        value = getattr(style, name)
        if value is not None:
            pairs = value.items() if isinstance(value, Mapping) else value
            converted = tuple((str(key), None if each is None else as_placement(each)) for key, each in pairs)
            object.__setattr__(style, name, converted)


def _check_input_pairs(style: Any) -> None:
    _check_pairs(style, "input_layouts", "desired_input_layouts")
    if {key for key, _ in style.input_kwarg_layouts or ()} - {
        key for key, _ in style.desired_input_kwarg_layouts or ()
    }:
        raise PlanError(
            f"{type(style).__name__}: input_kwarg_layouts names arguments that desired_input_kwarg_layouts does not"
        )


def _check_pairs(style: Any, name: str, desired: str) -> None:
    given, wanted = getattr(style, name), getattr(style, desired)
    if given is not None and (wanted is None or len(given) != len(wanted)):
        raise PlanError(
            f"{type(style).__name__}: {name} and {desired} must have the same length, got {given} and {wanted}"
        )


def _check_multiple(style: Any) -> None:
    if not isinstance(style.multiple, int) or style.multiple < 1:
        raise PlanError(f"{type(style).__name__}: multiple must be a positive int, got {style.multiple!r}")
