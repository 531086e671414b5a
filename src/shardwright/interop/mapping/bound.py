"""A mapping bound to the names and shapes of source tensors: which targets they become, and from which pieces. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice, product
from math import prod
from typing import NamedTuple, TypeAlias, final

from shardwright.errors import MappingError, RegionError
from shardwright.interop.mapping.expression import Term
from shardwright.interop.mapping.names import NamePattern
from shardwright.interop.mapping.pieces import (
    IndexAxis,
    IndexBox,
    MappedPiece,
    Padding,
    StridedBox,
    index_boxes,
    merged_axes,
)
from shardwright.interop.mapping.rule import Rule, TermKey
from shardwright.interop.mapping.sizes import KnownShape, check_known, infer_sizes
from shardwright.layout import Region
from shardwright.listing import join_first

__all__ = ["BoundMapping"]

Shape: TypeAlias = tuple[int, ...]
Values: TypeAlias = dict[str, str]
_Key: TypeAlias = tuple[int, tuple[tuple[str, str], ...]]  # of an instance: its rule, and the values that names share

_MAX_LISTED = 8
_MAX_TENSORS = 1 << 20  # that a rule may make of one: more than any model has experts


class _Source(NamedTuple):
    """A source tensor of an instance: which of the rule's names it has, and its index along each axis in its name."""

    name: str
    tensor: int
    indices: dict[str, int]


class _Target(NamedTuple):
    """A target tensor: a tensor of an instance, and its index along each axis in its name."""

    instance: _Instance
    tensor: int
    indices: dict[str, int]
    shape: Shape


@final
@dataclass(frozen=True)
class _Instance:
    """A rule with the values of its bindings and the sizes of its axes. The sources are on its left side."""

    rule: Rule
    values: Values
    sizes: dict[str, int]

    @cached_property
    def source_terms(self) -> list[list[Term]]:
        """The terms of every source."""
        return [expression.terms(self.sizes) for expression in self.rule.left.expressions or ()]

    @cached_property
    def target_terms(self) -> list[list[Term]]:
        """The terms of every target."""
        return [expression.terms(self.sizes) for expression in self.rule.right.expressions or ()]

    @cached_property
    def partners(self) -> dict[TermKey, TermKey]:
        """The source term of every target term that is not padding."""
        return {target: source for source, target in self.rule.pairs}

    def pieces(self, tensor: int, indices: Mapping[str, int], region: Region) -> Iterator[MappedPiece | Padding]:
        """Yield the pieces of a region of a target tensor, term by term."""
        fixed = {axis: (index, index + 1) for axis, index in indices.items()}
        for number, term in enumerate(self.target_terms[tensor]):
            if any(self._size(axis) == 0 for axis in term.steps):
                continue
            partner = self.partners.get(TermKey(tensor, number))
            for box in _boxes(term, region, {axis: self._size(axis) for axis in term.steps}):
                if partner is None:
                    sizes, [steps] = merged_axes([b - a for a, b in box.values()], [list(term.steps.values())])
                    yield Padding(_strided(term, box, sizes, steps))
                else:
                    yield from self._mapped(term, partner, {**box, **fixed})

    def sources(self, tensor: int) -> Iterator[str]:
        """Yield the names of the sources of a target tensor."""
        for target, source in self.partners.items():
            if target.tensor == tensor:
                name = self.rule.left.names[source.tensor]
                for indices in _indices(name, self.rule.axes, self.sizes):
                    yield name.name({**self.values, **indices})

    def _mapped(self, target: Term, partner: TermKey, box: IndexBox) -> Iterator[MappedPiece]:
        """Yield the pieces of a box of axes: one for every source tensor along the axes in the names of sources."""
        source = self.source_terms[partner.tensor][partner.term]
        name = self.rule.left.names[partner.tensor]
        across = sorted(name.bindings & self.rule.axes)
        for chosen in product(*(range(*box[axis]) for axis in across)):
            indices = dict(zip(across, chosen, strict=True))
            here = box | {axis: (index, index + 1) for axis, index in indices.items()}
            # An axis that is in the names of one side has one index here, and is left out.
            axes = [axis for axis in target.steps if axis in source.steps]
            sizes, (source_steps, target_steps) = merged_axes(
                [here[axis][1] - here[axis][0] for axis in axes],
                [[side.steps[axis] for axis in axes] for side in (source, target)],
            )
            yield MappedPiece(
                name.name({**self.values, **indices}),
                _strided(source, here, sizes, source_steps),
                _strided(target, here, sizes, target_steps),
            )

    def _size(self, axis: str) -> int:
        return int(axis) if axis.isdecimal() else self.sizes[axis]


def _boxes(term: Term, region: Region, sizes: Mapping[str, int]) -> Iterator[IndexBox]:
    """Yield the boxes of a term's axes that are in a region, in the order of the axes."""
    by_dim: list[list[IndexBox]] = []
    for dim, (offset, low, high) in enumerate(zip(term.offset, region.offset, region.end, strict=True)):
        axes = [IndexAxis(axis, sizes[axis], step) for axis, (of, step) in term.steps.items() if of == dim]
        by_dim.append(list(index_boxes(axes, low - offset, high - offset)))
    for boxes in product(*by_dim):
        yield {axis: interval for box in boxes for axis, interval in box.items()}


def _strided(term: Term, box: IndexBox, sizes: tuple[int, ...], steps: tuple[tuple[int, int], ...]) -> StridedBox:
    """Return where a box of axes lies in the tensor of a term; `sizes` and `steps` are those of the merged axes."""
    offset, size = list(term.offset), [1] * len(term.offset)
    for axis, (dim, step) in term.steps.items():
        offset[dim] += box[axis][0] * step
    for length, (dim, step) in zip(sizes, steps, strict=True):
        size[dim] += (length - 1) * step
    return StridedBox(Region(offset, size), sizes, steps)


@final
class BoundMapping:
    """A mapping bound to source tensors: the targets by name, and the pieces that any region of them is made of.

    Made by `Mapping.bind`. `targets` has the shape of every target; `dropped` has the sources that rules drop.

    >>> import shardwright as sw
    >>> mapping = sw.Mapping("experts.{x}.{gate,up} = w13 : f e, f e = x (f + f) e")
    >>> bound = mapping.bind({f"experts.{x}.{part}": (4, 6) for x in range(2) for part in ("gate", "up")})
    >>> bound.targets
    {'w13': (2, 8, 6)}
    >>> for piece in bound.pieces("w13", sw.Region((1, 2, 0), (1, 3, 6))):
    ...     print(piece)
    experts.1.gate[2:4, 0:6] -> [1:2, 2:4, 0:6]
    experts.1.up[0:1, 0:6] -> [1:2, 4:5, 0:6]
    """

    targets: dict[str, Shape]
    dropped: tuple[str, ...]

    def __init__(
        self,
        rules: Sequence[Rule],
        sizes: Mapping[str, int],
        shapes: Mapping[str, Shape],
        target_shapes: Mapping[str, Shape],
    ) -> None:
        self._shapes, self._sizes, self._has_wanted = shapes, sizes, bool(target_shapes)
        self._targets: dict[str, _Target | str] = {}  # a target that is a source of another name has that name
        self._rules: dict[str, Rule] = {}  # by target
        self.targets = {}
        dropped: list[str] = []
        unmatched: list[str] = []
        groups: dict[_Key, list[_Source]] = {}
        matcher = _Matcher(rules)
        for name in shapes:
            found = matcher.find(name)
            if found is None:
                unmatched.append(name)
                continue
            index, tensor, values = found
            rule = rules[index]
            if rule.drops:
                dropped.append(name)
            elif rule.left.expressions is None:
                self._add(rule, rule.right.names[0].name(values), name, shapes[name])
            else:
                indices = {key: int(value) for key, value in values.items() if key in rule.axes}
                groups.setdefault(_key(index, rule, values), []).append(_Source(name, tensor, indices))
        if unmatched:
            raise MappingError(
                f"no rule matches {join_first([repr(name) for name in unmatched], _MAX_LISTED)}; add a rule, drop such "
                "tensors with 'NAME = -', or keep the names of all others with '* = *'"
            )
        known_targets = _known_targets(rules, target_shapes) if groups else {}
        for key, sources in groups.items():
            self._add_instance(rules[key[0]], dict(key[1]), sources, known_targets.get(key, []))
        self.dropped = tuple(dropped)

    def pieces(self, name: str, region: Region | None = None) -> list[MappedPiece | Padding]:
        """Return the pieces that a region of a target is made of; by default, of all of it.

        They tile the region: every element is in one piece.
        """
        if name not in self._targets:
            raise MappingError(f"the mapping gives no tensor named {name!r}")
        shape = self.targets[name]
        region = Region.whole(shape) if region is None else region
        if region.ndim != len(shape) or not Region.whole(shape).contains(region):
            raise RegionError(f"region {region} is not inside {name!r} of shape {list(shape)}")
        if region.is_empty:
            return []
        target = self._targets[name]
        if isinstance(target, str):
            steps = tuple((dim, 1) for dim, size in enumerate(region.size) if size > 1)
            box = StridedBox(region, tuple(size for size in region.size if size > 1), steps)
            return [MappedPiece(target, box, box)]
        return list(target.instance.pieces(target.tensor, target.indices, region))

    def renamed(self, name: str) -> str | None:
        """Return the source that a target is under another name, or the same; None if the rule has indices."""
        target = self._targets.get(name)
        return target if isinstance(target, str) else None

    def sources(self, name: str) -> tuple[str, ...]:
        """Return the names of the source tensors that a target is made of."""
        target = self._targets[name]
        return (target,) if isinstance(target, str) else tuple(dict.fromkeys(target.instance.sources(target.tensor)))

    def rule(self, name: str) -> Rule:
        """Return the rule that gives a target."""
        return self._rules[name]

    def _add(self, rule: Rule, name: str, target: _Target | str, shape: Shape) -> None:
        if name in self._targets:
            other = self._rules[name]
            raise rule.error(
                f"it gives a tensor {name!r}, and so does line {other.line}: `{other.text}`; change one of the names"
            )
        self._targets[name], self._rules[name], self.targets[name] = target, rule, shape

    def _add_instance(
        self, rule: Rule, values: Values, sources: Sequence[_Source], known_targets: Sequence[KnownShape]
    ) -> None:
        given = {**self._sizes, **self._counts(rule, sources)}
        known = [*self._known_sources(rule, sources), *known_targets]
        sizes = infer_sizes(rule, known, given)
        if self._has_wanted and not known_targets:
            # None of its targets is wanted: their names are needed, and the sizes that these depend on, and no shapes.
            axes = (rule.left.axes() | rule.right.axes()) - rule.axes
            sizes = {axis: 0 for axis in axes if not axis.isdecimal()} | sizes
        check_known(rule, known, sizes)
        self._check_complete(rule, values, sources, sizes)
        for name in rule.right.names:
            if (count := prod(sizes[axis] for axis in name.bindings & rule.axes)) > _MAX_TENSORS:
                raise rule.error(f"it would make {count} tensors {str(name)!r} of {sources[0].name!r}")
        instance = _Instance(rule, values, sizes)
        for tensor, (name, expression) in enumerate(zip(rule.right.names, rule.right.expressions or (), strict=True)):
            for indices in _indices(name, rule.axes, sizes):
                shape = expression.shape(sizes)
                self._add(rule, name.name({**values, **indices}), _Target(instance, tensor, indices, shape), shape)

    def _counts(self, rule: Rule, sources: Sequence[_Source]) -> dict[str, int]:
        """Return the lengths of the axes in the names of sources: one more than the largest index."""
        counts: dict[str, int] = {}
        for source in sources:
            for axis, index in source.indices.items():
                counts[axis] = max(counts.get(axis, 0), index + 1)
        for axis, count in counts.items():
            if axis in self._sizes and self._sizes[axis] != count:
                largest = max(sources, key=lambda source: source.indices.get(axis, -1))
                raise rule.error(
                    f"{axis}={self._sizes[axis]} was given, but the tensors have {count} indices of {{{axis}}}, up to "
                    f"{largest.name!r}"
                )
        return counts

    def _known_sources(self, rule: Rule, sources: Sequence[_Source]) -> Iterator[KnownShape]:
        seen: set[tuple[int, Shape]] = set()
        for source in sources:
            key = source.tensor, self._shapes[source.name]
            if key not in seen and rule.left.expressions is not None:
                seen.add(key)
                yield KnownShape(source.name, rule.left.expressions[source.tensor], key[1])

    def _check_complete(self, rule: Rule, values: Values, sources: Sequence[_Source], sizes: Mapping[str, int]) -> None:
        present = {source.name for source in sources}
        names = (
            name.name({**values, **indices}) for name in rule.left.names for indices in _indices(name, rule.axes, sizes)
        )
        # No more than are listed: a stray name such as `experts.999999999.w` would have a billion others missing.
        missing = list(islice((name for name in names if name not in present), _MAX_LISTED + 1))
        if missing:
            shown = ", ".join(map(repr, missing[:_MAX_LISTED])) + (", ..." if len(missing) > _MAX_LISTED else "")
            raise rule.error(f"the rule joins {sources[0].name!r} with tensors that are missing: {shown}")


def _key(index: int, rule: Rule, values: Values) -> _Key:
    return index, tuple(sorted((key, value) for key, value in values.items() if key not in rule.axes))


def _known_targets(rules: Sequence[Rule], shapes: Mapping[str, Shape]) -> dict[_Key, list[KnownShape]]:
    """Return the targets whose shapes are known, by instance; one for each shape of a tensor of a rule."""
    matcher = _Matcher([rule.swapped() for rule in rules])
    known: dict[_Key, list[KnownShape]] = {}
    seen: set[tuple[_Key, int, Shape]] = set()
    for name, shape in shapes.items():
        found = matcher.find(name)
        if found is None or (expressions := rules[found[0]].right.expressions) is None:
            continue
        index, tensor, values = found
        key = _key(index, rules[index], values)
        if (key, tensor, shape) not in seen:
            seen.add((key, tensor, shape))
            known.setdefault(key, []).append(KnownShape(name, expressions[tensor], shape))
    return known


def _indices(name: NamePattern, axes: frozenset[str], sizes: Mapping[str, int]) -> Iterator[dict[str, int]]:
    """Yield the indices of all tensors of a name along the axes in it."""
    yield from _indices_along(sorted(name.bindings & axes), sizes)


def _indices_along(axes: Sequence[str], sizes: Mapping[str, int]) -> Iterator[dict[str, int]]:
    """Yield the indices along these axes one by one, however many there are."""
    if not axes:
        yield {}
        return
    for index in range(sizes[axes[0]]):
        for others in _indices_along(axes[1:], sizes):
            yield {axes[0]: index, **others}


@final
class _Matcher:
    """Finds the rule of a name; the default rule is tried last."""

    def __init__(self, rules: Sequence[Rule]) -> None:
        self._by_suffix: defaultdict[str, list[tuple[int, int, NamePattern]]] = defaultdict(list)
        self._default = next((index for index, rule in enumerate(rules) if rule.is_default), None)
        for index, rule in enumerate(rules):
            for tensor, name in enumerate(rule.left.names):
                if index != self._default:
                    self._by_suffix[_last_component(name)].append((index, tensor, name))

    def find(self, name: str) -> tuple[int, int, Values] | None:
        """Return the index of the rule, that of the tensor within it, and the values of its bindings."""
        for index, tensor, pattern in self._candidates(name):
            values = pattern.match(name)
            if values is not None:
                return index, tensor, values
        return None if self._default is None else (self._default, 0, {"*": name})

    def _candidates(self, name: str) -> Iterable[tuple[int, int, NamePattern]]:
        yield from self._by_suffix.get(name.rpartition(".")[2], ())
        yield from self._by_suffix.get("", ())


def _last_component(name: NamePattern) -> str:
    """Return the text after the last dot, or '' if a binding is part of it."""
    last = name.tokens[-1]
    return last.rpartition(".")[2] if isinstance(last, str) and (len(name.tokens) == 1 or "." in last) else ""
