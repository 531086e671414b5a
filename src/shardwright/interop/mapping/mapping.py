"""`Mapping`: rules that rename, permute, join and split the tensors of a checkpoint, in both directions."""

from __future__ import annotations

import re
from collections.abc import Mapping as MappingABC
from collections.abc import Sequence
from itertools import combinations
from typing import Any, final

import torch
from torch import Tensor

from shardwright.errors import ArgumentTypeError, MappingError
from shardwright.interop.mapping.bound import BoundMapping
from shardwright.interop.mapping.names import common_name
from shardwright.interop.mapping.pieces import MappedPiece
from shardwright.interop.mapping.rule import Rule, parse_rules

__all__ = ["Mapping"]


@final
class Mapping:
    """Rules, one per line, that say which tensors of one checkpoint are which of another, in both directions.

    A rule is `NAMES = NAMES : indices = indices`. `{i}` in a name binds a number or a word; `{q,k,v}` stands for
    several tensors; `*` for one or more dotted components. The indices are in the notation of einops, with `+` for
    parts that are joined along an axis. Without indices a rule renames; `NAME = -` drops; `* = *` keeps the names that
    no other rule matches. `#` starts a comment, and a line that ends with ':', '=' or ',' goes on in the next.

    >>> import torch
    >>> mapping = Mapping('''
    ...     layers.{i}.{q,k,v}.weight = layers.{i}.wqkv : (g n d) e, (g d) e, (g d) e = (g (n + 1 + 1) d) e
    ...     norm.weight = final_norm.weight
    ... ''', d=2)
    >>> state = {f"layers.0.{name}.weight": torch.randn(size, 3) for name, size in [("q", 8), ("k", 4), ("v", 4)]}
    >>> mapped = mapping.apply({**state, "norm.weight": torch.ones(3)})
    >>> {name: list(tensor.shape) for name, tensor in mapped.items()}
    {'final_norm.weight': [3], 'layers.0.wqkv': [16, 3]}
    >>> back = Mapping(str(mapping), d=2, n=2).inverse().apply(mapped)
    >>> all(torch.equal(back[name], state[name]) for name in state)
    True

    `sizes` are the lengths of axes that do not follow from the shapes of the tensors. Every rule is proved to be a
    bijection when it is made, but for padding, an axis called `pad`: it is dropped in one direction and zero in the
    other. No two rules may match one name, on either side.
    """

    def __init__(self, text: str, /, **sizes: int) -> None:
        if not isinstance(text, str):
            raise ArgumentTypeError(f"Mapping needs the text of its rules, got {type(text).__name__}")
        self._rules = tuple(parse_rules(text))
        self._sizes = sizes
        if not self._rules:
            raise MappingError("a mapping needs at least one rule, such as 'model.{i}.weight = layers.{i}.weight'")
        _check_sizes(self._rules, sizes)
        _check_overlaps(self._rules)

    @property
    def rules(self) -> tuple[Rule, ...]:
        """Its rules, in the order in which they are written; one for each tensor that a line renames."""
        return self._rules

    @property
    def sizes(self) -> dict[str, int]:
        """The lengths of axes that were given."""
        return dict(self._sizes)

    def inverse(self) -> Mapping:
        """Return the mapping in the other direction.

        >>> print(Mapping("a.{i}.weight = b.{i} : o i2 = i2 o").inverse())
        b.{i} = a.{i}.weight : i2 o = o i2
        """
        inverse = object.__new__(Mapping)
        inverse._rules = tuple(rule.swapped() for rule in self._rules)
        inverse._sizes = self._sizes
        return inverse

    def bind(self, tensors: MappingABC[str, Any], targets: MappingABC[str, Any] | None = None) -> BoundMapping:
        """Return the mapping of these tensors: its targets, and the pieces that regions of them are made of.

        `tensors` has tensors or shapes by name; so does `targets`, of which some or all may be known.

        >>> Mapping("w = p : v e = (v + pad) e").bind({"w": (6, 4)}, {"p": (8, 4)}).targets
        {'p': (8, 4)}
        """
        return BoundMapping(self._rules, self._sizes, _shapes(tensors), _shapes(targets or {}))

    def renamed(self, name: str) -> str | None:
        """Return the name that a plain value gets, by the rules without indices; None if a rule drops it.

        >>> mapping = Mapping("old.{i} = new.{i}\\nx = -")
        >>> mapping.renamed("old.3"), mapping.renamed("x"), mapping.renamed("epoch")
        ('new.3', None, 'epoch')
        """
        for rule in self._rules:
            if rule.left.expressions is None and not rule.is_default:
                for pattern in rule.left.names:
                    if (values := pattern.match(name)) is not None:
                        return None if rule.drops else rule.right.names[0].name(values)
        return name

    def names(self, tensors: MappingABC[str, Any]) -> dict[str, tuple[str, ...]]:
        """Return, for every target that these tensors (or shapes) become, the names of its sources.

        >>> Mapping("{q,k} = qk : d e, d e = (d + d) e").names({"q": (2, 3), "k": (2, 3)})
        {'qk': ('q', 'k')}
        """
        bound = self.bind(tensors)
        return {name: bound.sources(name) for name in bound.targets}

    def apply(self, state: MappingABC[str, Tensor]) -> dict[str, Tensor]:
        """Return the targets of these plain tensors. Those that are only renamed are the same tensors.

        >>> import torch
        >>> Mapping("w = v : a b = b a").apply({"w": torch.tensor([[1, 2, 3]])})
        {'v': tensor([[1], [2], [3]])}
        """
        for name, tensor in state.items():
            if type(tensor) not in (Tensor, torch.nn.Parameter):
                raise ArgumentTypeError(f"apply needs plain tensors, got {type(tensor).__name__} for {name!r}")
        bound = self.bind(state)
        with torch.no_grad():
            return {name: self._apply(bound, name, state) for name in bound.targets}

    def _apply(self, bound: BoundMapping, name: str, state: MappingABC[str, Tensor]) -> Tensor:
        if (source := bound.renamed(name)) is not None:
            return state[source]
        pieces = bound.pieces(name)
        sources = [state[source] for source in bound.sources(name)]
        check_one_dtype(bound.rule(name), {source: state[source].dtype for source in bound.sources(name)})
        result = torch.zeros(bound.targets[name], dtype=sources[0].dtype, device=sources[0].device)
        for piece in pieces:
            if isinstance(piece, MappedPiece):
                piece.copy(state[piece.name], result)
        return result

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Mapping):
            return NotImplemented
        return str(self) == str(other) and self._sizes == other._sizes

    def __hash__(self) -> int:
        return hash(str(self))

    def __str__(self) -> str:
        return "\n".join(map(str, self._rules))

    def __repr__(self) -> str:
        sizes = "".join(f", {name}={size}" for name, size in self._sizes.items())
        return f"Mapping({len(self._rules)} rules{sizes})"


def check_one_dtype(rule: Rule, dtypes: MappingABC[str, torch.dtype]) -> None:
    """Raise an error if tensors that are joined have different dtypes."""
    if len(set(dtypes.values())) > 1:
        first, other = next((a, b) for a, b in combinations(dtypes.items(), 2) if a[1] != b[1])
        raise rule.error(
            f"it joins {first[0]!r} of {first[1]} and {other[0]!r} of {other[1]}; convert one of them first"
        )


def _shapes(tensors: MappingABC[str, Any]) -> dict[str, tuple[int, ...]]:
    found: dict[str, tuple[int, ...]] = {}
    for name, value in tensors.items():
        shape = getattr(value, "shape", value)
        if not isinstance(shape, Sequence) or isinstance(shape, str):
            raise ArgumentTypeError(f"expected a tensor or a shape for {name!r}, got {type(value).__name__}")
        found[name] = tuple(map(int, shape))
    return found


def _check_sizes(rules: Sequence[Rule], sizes: MappingABC[str, int]) -> None:
    axes = {axis for rule in rules for axis in rule.left.axes() | rule.right.axes() | rule.axes}
    for name, size in sizes.items():
        if isinstance(size, bool) or not isinstance(size, int):
            raise ArgumentTypeError(f"the size {name}= must be an int, got {size!r}")
        if size < 0 or (size == 0 and not re.fullmatch(r"pad[0-9]*", name)):
            raise MappingError(f"the size {name}={size} must be positive")
        if name not in axes:
            known = ", ".join(sorted(axis for axis in axes if not axis.isdecimal())) or "none"
            raise MappingError(
                f"no rule has an axis {name!r}, of which the size {size} was given; the axes are: {known}"
            )


def _check_overlaps(rules: Sequence[Rule]) -> None:
    """Raise an error if a name could match two rules, or two names of one."""
    if sum(rule.is_default for rule in rules) > 1:
        raise [rule for rule in rules if rule.is_default][1].error("the mapping has this rule already; remove one")
    for side in ("left", "right"):
        names = [(rule, name) for rule in rules if not rule.is_default for name in (getattr(rule, side)).names]
        for (first, a), (second, b) in combinations(names, 2):
            if (name := common_name(a, b)) is not None:
                other = (
                    f"line {first.line}: `{first.text}`" if first.line != second.line else "another name of the rule"
                )
                raise second.error(
                    f"{str(b)!r} on the {side} and {str(a)!r} of {other} both match {name!r}; make them exclude each "
                    "other"
                )
