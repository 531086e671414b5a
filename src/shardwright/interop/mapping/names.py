"""Patterns of tensor names: pure. `layers.{i}.{q,k}_proj.weight` is two patterns, each with the binding `i`.

A pattern matches whole names only. `{i}` matches one number or word (anything without a dot), `*` one or more dotted
components, and everything else itself.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import NamedTuple, TypeAlias, final

__all__ = ["STAR", "Binding", "NamePattern", "PatternError", "common_name", "parse_names"]

STAR = "*"
"""The binding of the part of a name that `*` matches."""

_IDENTIFIER = re.compile(r"[A-Za-z_]\w*")
_FORBIDDEN = re.compile(r"[\s{}=:,#*]")
_NUMBER = "0|[1-9][0-9]*"


class PatternError(ValueError):
    """An invalid name or index expression; the rule that contains it adds its line."""


@final
@dataclass(frozen=True, slots=True)
class Binding:
    """A part of a name that a pattern binds: `{i}`, or `*`."""

    name: str

    def __str__(self) -> str:
        return STAR if self.name == STAR else f"{{{self.name}}}"


Token: TypeAlias = str | Binding


@final
@dataclass(frozen=True)
class NamePattern:
    """One name of a rule: literal text and bindings, in order. `numbers` has the bindings that match numbers only."""

    tokens: tuple[Token, ...]
    numbers: frozenset[str] = frozenset()

    @property
    def bindings(self) -> frozenset[str]:
        """The names of its bindings."""
        return frozenset(token.name for token in self.tokens if isinstance(token, Binding))

    def with_numbers(self, numbers: Collection[str]) -> NamePattern:
        """Return the pattern in which these bindings match numbers only."""
        return NamePattern(self.tokens, self.bindings & frozenset(numbers))

    def match(self, name: str) -> dict[str, str] | None:
        """Return the values of the bindings if the whole name matches, else None."""
        found = self._regex.fullmatch(name)
        if found is None:
            return None
        return {STAR if key == "star" else key[2:]: value for key, value in found.groupdict().items()}

    def name(self, values: Mapping[str, object]) -> str:
        """Return the name with these values of the bindings."""
        return "".join(token if isinstance(token, str) else str(values[token.name]) for token in self.tokens)

    @cached_property
    def _regex(self) -> re.Pattern[str]:
        parts: list[str] = []
        bound: set[str] = set()
        for token in self.tokens:
            if isinstance(token, str):
                parts.append(re.escape(token))
                continue
            group = "star" if token.name == STAR else f"b_{token.name}"
            one = _NUMBER if token.name in self.numbers else "[^.]+"
            content = r"[^.]+(?:\.[^.]+)*" if token.name == STAR else one
            parts.append(f"(?P={group})" if token.name in bound else f"(?P<{group}>{content})")
            bound.add(token.name)
        return re.compile("".join(parts))

    def __str__(self) -> str:
        return "".join(map(str, self.tokens))


def parse_names(text: str) -> tuple[NamePattern, ...]:
    """Return the patterns of a comma-separated list of names, with alternatives such as `{q,k,v}` in their order."""
    return tuple(
        pattern
        for name in _split_outside_braces(text)
        for tokens in product(*_alternatives(name.strip()))
        for pattern in [_pattern(name.strip(), tokens)]
    )


def _split_outside_braces(text: str) -> Iterator[str]:
    depth, start = 0, 0
    for index, character in enumerate(text):
        depth += (character == "{") - (character == "}")
        if character == "," and depth == 0:
            yield text[start:index]
            start = index + 1
    yield text[start:]


def _alternatives(name: str) -> list[list[Token]]:
    """Return the tokens of a name as written, each with its alternatives."""
    if not name:
        raise PatternError("a name is empty")
    found: list[list[Token]] = []
    position = 0
    while position < len(name):
        if name[position] == "{":
            end = name.find("}", position)
            if end < 0:
                raise PatternError(f"{name!r} has a '{{' without a '}}'")
            found.append(_braces(name, name[position + 1 : end]))
            position = end + 1
        elif name[position] == "*":
            found.append([Binding(STAR)])
            position += 1
        else:
            end = min((at for at in (name.find(mark, position) for mark in "{*") if at >= 0), default=len(name))
            literal = name[position:end]
            if (bad := _FORBIDDEN.search(literal)) is not None:
                raise PatternError(f"{name!r} has {bad.group()!r}, which cannot be part of a name")
            found.append([literal])
            position = end
    return found


def _braces(name: str, content: str) -> list[Token]:
    words = [word.strip() for word in content.split(",")]
    if len(words) == 1:
        if not _IDENTIFIER.fullmatch(words[0]):
            raise PatternError(f"{name!r}: {{{content}}} must be an identifier such as {{i}}, or alternatives {{q,k}}")
        return [Binding(words[0])]
    for word in words:
        if _FORBIDDEN.search(word):
            raise PatternError(f"{name!r}: {word!r} in {{{content}}} cannot be part of a name")
    if len(set(words)) < len(words):
        raise PatternError(f"{name!r}: {{{content}}} has an alternative twice")
    return list(words)


def _pattern(name: str, tokens: tuple[Token, ...]) -> NamePattern:
    """Return the pattern, with adjacent text joined, after checking that names match it in one way only."""
    joined: list[Token] = []
    for token in tokens:
        if isinstance(token, str) and joined and isinstance(joined[-1], str):
            joined[-1] += token
        else:
            joined.append(token)
    pattern = NamePattern(tuple(token for token in joined if token != ""))
    components = "".join("\0" if isinstance(token, Binding) else token for token in pattern.tokens).split(".")
    if not all(components):
        raise PatternError(f"{name!r} has an empty component: two dots, or one at an end")
    if any(component.count("\0") > 1 for component in components):
        raise PatternError(
            f"{name!r} binds twice between two dots, so that names could match in several ways; use one binding there"
        )
    stars = [component for component in str(pattern).split(".") if STAR in component]
    if len(stars) > 1 or any(star != STAR for star in stars):
        raise PatternError(f"{name!r}: '*' stands for whole dotted components, once in a name, as in '*.weight'")
    return pattern


class _Step(NamedTuple):
    """What a pattern matches next: a character, or one or more of a class of characters."""

    character: str | None
    is_number: bool
    with_dots: bool
    repeats: bool

    def common(self, other: _Step) -> str | None:
        """Return a character that both match, if any."""
        if self.character is not None:
            return self.character if other.accepts(self.character) else None
        if other.character is not None:
            return other.character if self.accepts(other.character) else None
        return "0"

    def accepts(self, character: str) -> bool:
        if self.character is not None:
            return self.character == character
        return character.isdecimal() if self.is_number else self.with_dots or character != "."


def common_name(first: NamePattern, second: NamePattern) -> str | None:
    """Return a name that both patterns match, or None if there is none.

    Two uses of one binding in a name are taken as independent: patterns may then be reported that never meet.
    """
    steps = _steps(first), _steps(second)
    # A state is, for each pattern, the next step, and whether that step was already taken once and may repeat.
    start = ((0, False), (0, False))
    queue = deque([(start, "")])
    seen = {start}
    while queue:
        state, text = queue.popleft()
        if all(_is_end(at, of) for at, of in zip(state, steps, strict=True)):
            return text
        for i, j in product(_choices(state[0], steps[0]), _choices(state[1], steps[1])):
            a, b = steps[0][i], steps[1][j]
            character = a.common(b)
            following = ((i, True) if a.repeats else (i + 1, False), (j, True) if b.repeats else (j + 1, False))
            if character is not None and following not in seen:
                seen.add(following)
                queue.append((following, text + character))
    return None


def _steps(pattern: NamePattern) -> list[_Step]:
    steps: list[_Step] = []
    for token in pattern.tokens:
        if isinstance(token, str):
            steps += [_Step(character, False, False, False) for character in token]
        else:
            steps.append(_Step(None, token.name in pattern.numbers, token.name == STAR, True))
    return steps


def _choices(at: tuple[int, bool], steps: list[_Step]) -> list[int]:
    index, begun = at
    return [choice for choice in ((index, index + 1) if begun else (index,)) if choice < len(steps)]


def _is_end(at: tuple[int, bool], steps: list[_Step]) -> bool:
    index, begun = at
    return index + begun == len(steps)
