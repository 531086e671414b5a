"""`Plan`: an immutable mapping of patterns to styles. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import final

from shardwright.errors import ArgumentTypeError
from shardwright.parallel.plan.styles import ParallelStyle, as_style

__all__ = ["Plan"]


@final
class Plan(Mapping[str, ParallelStyle]):
    """How the modules and parameters of a model are parallelized: patterns over their dotted names, and styles.

    `*`, `?` and `[...]` match within one part of a name, `**` matches any number of parts. A value is a style
    (`ColwiseParallel()`, `RowwiseParallel()`, `SequenceParallel()`, `PrepareModuleInput()`, `PrepareModuleOutput()`,
    `PrepareModuleInputOutput()`, `Replicated()`, `Ignored()`), a placement over `tp`, or placements by the name of a
    mesh dimension, or one for each mesh dimension. `Replicated`, `Ignored` and placements also hold for
    everything inside a module.

    The most specific pattern decides. Patterns are compared part by part from the end of the name: a literal part is
    more specific than one with `*`, and that is more specific than a part matched by `**`, or inside the module that
    the pattern matches. Two equally specific patterns that differ are an error when the plan is used, and so is a
    pattern that matches nothing.

    A plan is immutable and prints as a table; `plan | {...}` is a new plan with some patterns added or replaced.

    >>> import shardwright as sw
    >>> plan = sw.Plan({"layers.*.up": sw.ColwiseParallel(), "layers.*.down": sw.RowwiseParallel()})
    >>> print(plan | {"**": sw.Replicated()})
    layers.*.up    ColwiseParallel()
    layers.*.down  RowwiseParallel()
    **             Replicated()
    """

    __slots__ = ("_rules",)

    def __init__(self, rules: Mapping[str, object] | None = None) -> None:
        if rules is not None and not isinstance(rules, Mapping):
            raise ArgumentTypeError(f"Plan: expected a mapping of patterns to styles, got {type(rules).__name__}")
        converted: dict[str, ParallelStyle] = {}
        for pattern, style in (rules or {}).items():
            if not isinstance(pattern, str):
                raise ArgumentTypeError(f"Plan: a pattern must be a str, got {type(pattern).__name__}: {pattern!r}")
            converted[pattern] = as_style(style)
        self._rules: Mapping[str, ParallelStyle] = MappingProxyType(converted)

    def __getitem__(self, pattern: str) -> ParallelStyle:
        return self._rules[pattern]

    def __iter__(self) -> Iterator[str]:
        return iter(self._rules)

    def __len__(self) -> int:
        return len(self._rules)

    def __or__(self, other: Mapping[str, object]) -> Plan:
        return Plan({**self._rules, **other})

    def __hash__(self) -> int:
        return hash(frozenset(self._rules.items()))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Plan) and dict(self._rules) == dict(other._rules)

    def __reduce__(self) -> tuple[type[Plan], tuple[dict[str, ParallelStyle]]]:
        return Plan, (dict(self._rules),)

    def __repr__(self) -> str:
        return f"Plan({dict(self._rules)!r})"

    def __str__(self) -> str:
        width = max(map(len, self._rules), default=0)
        return "\n".join(f"{pattern:<{width}}  {style!r}" for pattern, style in self._rules.items())
