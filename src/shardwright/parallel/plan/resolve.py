"""Apply a plan to a model: decide the layout of every parameter, and find everything that is wrong at once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import nn

from shardwright.errors import LayoutError, PlanError
from shardwright.layout import Layout, Placement, Ragged, Replicate, Shard
from shardwright.listing import join_first
from shardwright.parallel.plan.layers import Matrix, matrix_of
from shardwright.parallel.plan.mesh_roles import NAMES, MeshRoles
from shardwright.parallel.plan.patterns import Pattern, Specificity
from shardwright.parallel.plan.styles import (
    ColwiseParallel,
    Ignored,
    ParallelStyle,
    Placements,
    Replicated,
    RowwiseParallel,
)
from shardwright.tensor import DTensor

__all__ = ["ParameterLayout", "Resolved", "resolve"]

_MAX_LISTED = 24
_REPLICATE = Replicate()


@dataclass(frozen=True, slots=True)
class ParameterLayout:
    """The layout of a parameter under all its names; no layout if it is ignored."""

    names: tuple[str, ...]
    layout: Layout | None
    gathered: frozenset[int]  # mesh dimensions over which it is gathered where it is used
    pattern: str | None  # that decides its placement over tp
    unit_dims: tuple[int, ...] = ()  # the same, if it can be gathered together with others: it is split along one


@dataclass(frozen=True, slots=True)
class Resolved:
    """A plan applied to a model: the layout of every parameter, and modules whose inputs or outputs have a style."""

    parameters: tuple[ParameterLayout, ...]
    modules: tuple[tuple[str, ParallelStyle], ...]

    def __str__(self) -> str:
        rows = [(", ".join(each.names), str(each.layout or "ignored")) for each in self.parameters]
        rows += [(name, repr(style)) for name, style in self.modules]
        width = max((len(name) for name, _ in rows), default=0)
        return "\n".join(f"{name:<{width}}  {text}" for name, text in rows)


@dataclass(frozen=True, slots=True)
class _Decision:
    """The style of a parameter, its pattern, and the name of the module or parameter that the pattern matches."""

    style: ParallelStyle
    pattern: str
    matched: str


class _Candidate(NamedTuple):
    """A pattern that matches a name, and how specific it is."""

    specificity: Specificity
    pattern: str
    style: ParallelStyle
    matched: str


def resolve(
    model: nn.Module,
    plan: Mapping[str, ParallelStyle],
    roles: MeshRoles,
    *,
    what: str,
    partial: bool = False,
    experts: frozenset[str] = frozenset(),
) -> Resolved:
    """Return the layout of every parameter under a plan; raise `PlanError` with everything that is wrong.

    `experts` are the names of parameters that are distributed over `ep` by experts. A partial plan decides only the
    parameters that it matches, and the result has only those.
    """
    resolver = _Resolver(model, plan, roles, experts)
    resolved = resolver.resolve(partial=partial)
    problems = resolver.problems
    if problems:
        count = f"{len(problems)} problem{'s' * (len(problems) > 1)}"
        raise PlanError(f"{what}: {count}\n  {join_first(problems, _MAX_LISTED, chr(10) + '  ')}")
    return resolved


class _Resolver:
    def __init__(
        self, model: nn.Module, plan: Mapping[str, ParallelStyle], roles: MeshRoles, experts: frozenset[str]
    ) -> None:
        self.roles, self.experts = roles, experts
        self.problems: list[str] = []
        self.modules = dict(model.named_modules(remove_duplicate=False))
        self.parameters = dict(model.named_parameters(remove_duplicate=False))
        self.patterns = [(Pattern(text), style) for text, style in plan.items()]
        names = [*self.modules, *self.parameters]
        self.matches: dict[str, list[tuple[Pattern, ParallelStyle]]] = {}
        for pattern, style in self.patterns:
            matched = [name for name in names if pattern.matches(name)]
            for name in matched:
                self.matches.setdefault(name, []).append((pattern, style))
            if not matched:
                self.problems.append(
                    f"pattern {pattern.text!r} matches no module and no parameter{self._near(pattern)}"
                )
            self._check_mesh_dimensions(pattern, style)

    def resolve(self, *, partial: bool) -> Resolved:
        groups: dict[int, list[str]] = {}
        for name, parameter in self.parameters.items():
            groups.setdefault(id(parameter), []).append(name)
        found: list[ParameterLayout] = []
        undecided: list[str] = []
        for names in groups.values():
            layouts = [self._parameter(name) for name in names]
            decided = [each for each in layouts if each.pattern is not None]
            if not decided and partial:
                continue
            if not decided and self.roles.tensor is not None:
                undecided.append(names[0])
            parameter = self.parameters[names[0]]
            if isinstance(parameter, DTensor):
                self.problems.append(f"{names[0]} is a DTensor already, {parameter.sharding}: parallelize a model once")
            self._check_tied(decided)
            chosen = (decided or layouts)[0]
            found.append(replace(chosen, names=tuple(names)))
        if undecided:
            self.problems.append(
                f"the plan does not place {join_first(undecided, 8)} over 'tp': add a pattern, for example "
                "'**': Replicated() for all the rest"
            )
        return Resolved(tuple(found), tuple(self._module_styles()))

    def _check_tied(self, decided: Sequence[ParameterLayout]) -> None:
        for other in decided[1:]:
            first = decided[0]
            if other.layout is not first.layout:
                self.problems.append(
                    f"{first.names[0]} and {other.names[0]} are tied (one parameter under two names), but the plan "
                    f"gives them {first.layout or 'no layout'} (by {first.pattern!r}) and "
                    f"{other.layout or 'no layout'} (by {other.pattern!r}): give both the same style"
                )

    def _near(self, pattern: Pattern) -> str:
        """Return a hint: names that end as the pattern does."""
        last = pattern.parts[-1] if pattern.parts else ""
        near = [name for name in (*self.modules, *self.parameters) if name and Pattern(f"**.{last}").matches(name)]
        return f" (there is {near[0]})" if near else ""

    def _check_mesh_dimensions(self, pattern: Pattern, style: ParallelStyle) -> None:
        if not isinstance(style, Placements):
            return
        unknown = [name for name in style.names() if name not in NAMES]
        if unknown:
            self.problems.append(f"pattern {pattern.text!r} names the mesh dimension {unknown[0]!r}; known are {NAMES}")
        if style.in_order and len(style.in_order) != self.roles.mesh.ndim:
            self.problems.append(
                f"pattern {pattern.text!r} has {len(style.in_order)} placements, but {self.roles.mesh!r} has "
                f"{self.roles.mesh.ndim} dimensions"
            )

    # --- parameters -----------------------------------------------------------------------------------------------

    def _parameter(self, name: str) -> ParameterLayout:
        parameter = self.parameters[name]
        decision = self._decision(name)
        style = None if decision is None else decision.style
        pattern = None if decision is None else decision.pattern
        if isinstance(style, Ignored):
            return ParameterLayout((name,), None, frozenset(), pattern)
        placements: list[Placement] = [_REPLICATE] * self.roles.mesh.ndim
        order: Sequence[int] | None = None
        over_tp = self.roles.tensor
        explicit: Mapping[str, Placement] = {}
        if isinstance(style, Placements):
            names = self.roles.mesh.names or ()
            explicit = dict(style.by_name) or dict(zip(names, style.in_order, strict=False))
            for mesh_dim, dim_name in enumerate(names):
                placements[mesh_dim] = explicit.get(dim_name, _REPLICATE)
        elif decision is not None and over_tp is not None:
            placements[over_tp] = self._over_tp(name, parameter, decision)
        gathering = self.roles.gathered
        if name in self.experts:
            gathering = self._distribute_experts(name, placements, explicit)
        elif not any((self.roles.mesh.names or ())[mesh_dim] in explicit for mesh_dim in gathering):
            for mesh_dim in gathering:
                placements[mesh_dim] = _over_dp(parameter, _REPLICATE if over_tp is None else placements[over_tp])
        gathered = frozenset(mesh_dim for mesh_dim in gathering if placements[mesh_dim].is_shard())
        if over_tp is not None and placements[over_tp].is_shard():
            # Shards of tp are split further over the data dimensions, so that gathering those leaves whole heads.
            order = [over_tp, *(mesh_dim for mesh_dim in range(len(placements)) if mesh_dim != over_tp)]
        try:
            layout = Layout(self.roles.mesh, placements, parameter.shape, order)
        except LayoutError as error:
            by = f" (by pattern {pattern!r})" if pattern is not None else ""
            self.problems.append(f"{name} of shape {tuple(parameter.shape)}{by}: {error}")
            layout = Layout(self.roles.mesh, [_REPLICATE] * self.roles.mesh.ndim, parameter.shape)
        dims = {each.dim for mesh_dim in gathered if isinstance(each := placements[mesh_dim], Shard | Ragged)}
        together = len(gathered) == len(gathering) and len(dims) == 1
        return ParameterLayout((name,), layout, gathered, pattern, gathering if together else ())

    def _distribute_experts(
        self, name: str, placements: list[Placement], explicit: Mapping[str, Placement]
    ) -> tuple[int, ...]:
        """Place experts over ep, and each along its first dimension over the others; return those that are gathered."""
        if explicit:
            self.problems.append(
                f"{name} is a parameter of experts, which ep distributes: the plan cannot place it as well. Remove its "
                "pattern, or use a mesh without ep"
            )
        gathering = tuple(mesh_dim for mesh_dim in self.roles.gathered if mesh_dim != self.roles.experts)
        for mesh_dim in range(len(placements)):
            kept = Shard(0) if mesh_dim == self.roles.experts else _REPLICATE
            placements[mesh_dim] = Shard(1) if mesh_dim in gathering else kept
        return gathering

    def _decision(self, name: str) -> _Decision | None:
        """Return the style of the most specific pattern that matches the parameter or a module around it."""
        parts = name.count(".") + 1
        candidates = []
        for matched in _enclosing(name):
            below = parts - (matched.count(".") + 1 if matched else 0)
            for pattern, style in self.matches.get(matched, ()):
                if style.decides_parameters:
                    specificity = (0,) * below + (pattern.specificity(matched) or ())
                    candidates.append(_Candidate(specificity, pattern.text, style, matched))
        best = self._most_specific(candidates)
        return None if best is None else _Decision(best.style, best.pattern, best.matched)

    def _most_specific(self, candidates: Sequence[_Candidate]) -> _Candidate | None:
        """Return the most specific of several patterns, a problem being that others are equally specific and differ."""
        if not candidates:
            return None
        best = max(candidates, key=lambda each: each.specificity)  # the first of equals, which matches the longest name
        for each in candidates:
            if each.specificity == best.specificity and each.style != best.style:
                pair = f"patterns {best.pattern!r} and {each.pattern!r} are equally specific, but differ: "
                if not any(problem.startswith(pair) for problem in self.problems):
                    self.problems.append(
                        f"{pair}{best.style!r} and {each.style!r}. Both match {each.matched or 'the model'!r}: make "
                        "one of them more specific, or remove it"
                    )
        return best

    def _over_tp(self, name: str, parameter: torch.Tensor, decision: _Decision) -> Placement:
        """Return the placement over tp that a style gives to a parameter."""
        style = decision.style
        if not isinstance(style, ColwiseParallel | RowwiseParallel):
            return _REPLICATE
        colwise = isinstance(style, ColwiseParallel)
        if decision.matched == name:  # the parameter itself: (..., outputs, inputs), or one value per output
            if parameter.ndim < 2:
                return self._split(0, parameter, style) if colwise and parameter.ndim else _REPLICATE
            return self._split(parameter.ndim - (2 if colwise else 1), parameter, style)
        owner, _, key = name.rpartition(".")
        matrix = matrix_of(self.modules[owner]) if owner == decision.matched else None
        if matrix is None or key not in ("weight", "bias"):
            module = self.modules[decision.matched]
            problem = (
                f"{style!r} does not fit {decision.matched or 'the model'} ({type(module).__name__}): it shards linear "
                "layers and embeddings; give other parameters placements"
            )
            if problem not in self.problems:
                self.problems.append(problem)
            return _REPLICATE
        if key == "bias":
            return self._split(0, parameter, style) if colwise else _REPLICATE
        return self._split(_sharded_dim(matrix, colwise=colwise), parameter, style)

    def _split(self, dim: int, parameter: torch.Tensor, style: ColwiseParallel | RowwiseParallel) -> Placement:
        """Shard a dimension over tp at multiples of `style.multiple`: evenly, or with some ranks having one more."""
        ranks, size = self.roles.size(self.roles.tensor), parameter.shape[dim]
        pieces, rest = divmod(size, style.multiple)
        if rest:
            self.problems.append(
                f"{style!r}: dimension {dim} of a parameter of shape {tuple(parameter.shape)} is not a multiple of "
                f"{style.multiple}"
            )
        if style.multiple == 1 or pieces % ranks == 0:
            return Shard(dim)
        if pieces < ranks:
            return _REPLICATE
        few, more = divmod(pieces, ranks)
        return Ragged(dim, [(few + (index < more)) * style.multiple for index in range(ranks)])

    # --- modules --------------------------------------------------------------------------------------------------

    def _module_styles(self) -> Iterator[tuple[str, ParallelStyle]]:
        """Yield the modules whose inputs or outputs are redistributed, with their style."""
        if self.roles.tensor is None:
            return
        seen: set[int] = set()
        for name, module in self.modules.items():
            if id(module) in seen:
                continue
            seen.add(id(module))
            for of_parameters in (True, False):
                best = self._most_specific(
                    [
                        _Candidate(pattern.specificity(name) or (), pattern.text, style, name)
                        for pattern, style in self.matches.get(name, ())
                        if style.decides_parameters is of_parameters
                    ]
                )
                if best is not None and not isinstance(best.style, Replicated | Ignored | Placements):
                    yield name, best.style


def _over_dp(parameter: torch.Tensor, over_tp: Placement) -> Placement:
    """Return the placement over dp: along the first dimension, or the second if heads split the first unevenly.

    Operators keep a dimension that is split into given sizes only if nothing else splits it.
    """
    dim = 1 if isinstance(over_tp, Ragged) and over_tp.dim == 0 else 0
    return Shard(dim) if dim < parameter.ndim else _REPLICATE


def _sharded_dim(matrix: Matrix, *, colwise: bool) -> int:
    return matrix.outputs if colwise else matrix.inputs


def _enclosing(name: str) -> Iterator[str]:
    """Yield the name, then those of the modules around it, the innermost first."""
    while name:
        yield name
        name = name.rpartition(".")[0]
    yield ""
