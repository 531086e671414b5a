"""Views, and what looks like them: permutations, reshapes, strides, splits."""

from __future__ import annotations

import torch
from torch import Tensor

from shardwright.testing.programs.draft.draft import Draft, NoChoice

__all__ = ["split", "strided", "view"]


def view(d: Draft, of: str | None = None) -> list[str]:
    x = of or d.pick(dims=(1, 4))
    value = d.value(x)
    dim, n = d.dim(value), value.ndim
    extent = value.shape[dim]
    order = d.random.sample(range(n), n)
    start = d.number(0, extent)
    options = [
        f"{x}.transpose({dim}, {d.dim(value)})",
        f"{x}.permute({order})",
        f"{x}.unsqueeze({d.number(0, n)})",
        f"{x}.narrow({dim}, {start}, {d.number(0, extent - start)})",
        f"{x}.squeeze()",
        f"{x}.flatten()",
        f"{x}.flatten({d.number(0, n - 1)})",
        f"{x}.reshape(-1)",
        f"{x}.view(-1)",
        f"{x}.view({_reshaped(d, value)})",
        f"{x}.reshape({_reshaped(d, value)})",
        f"{x}.expand({d.number(1, 3)}, {', '.join(['-1'] * n)})",
        f"{x}.view_as({x})",
        f"{x}.ravel()",
        f"{x}.movedim({dim}, {d.number(0, n - 1)})",
        f"torch.flip({x}, ({dim},))",
        f"torch.roll({x}, {d.number(-2, 2)}, {dim})",
        f"{x}.unflatten({dim}, (-1, {extent if extent else 1}))",
    ]
    if extent:
        options += [
            f"{x}.select({dim}, {d.number(-extent, extent - 1)})",
            f"{x}.unfold({dim}, {d.number(1, min(extent, 3))}, {d.number(1, 3)})",
        ]
    if n >= 2:
        options += [f"{x}.mT", f"torch.diagonal({x}, {d.number(-1, 1)})", f"torch.tril({x})"]
    if n == 2:
        options += [f"{x}.t()", f"{x}.T"]
    return d.assign(d.choice(options), exact=d.is_exact(x))


def _reshaped(d: Draft, value: Tensor) -> tuple[int, ...]:
    count = value.numel()
    if not count:
        return tuple(value.shape)
    first = d.choice([n for n in range(1, count + 1) if count % n == 0])
    second = d.choice([n for n in range(1, count // first + 1) if (count // first) % n == 0])
    return (first, second, count // first // second) if d.chance(0.4) else (first, count // first)


def strided(d: Draft) -> object:
    x = d.pick(lambda t: t.is_contiguous() and t.numel() >= 4, dims=(1, 3))
    count = d.value(x).numel()
    rows, step, offset = d.number(1, 3), d.number(1, 2), d.number(0, 1)
    columns = max(1, (count - offset) // (rows * step))
    offset_argument = f", {offset}" if d.chance(0.5) else ""
    return d.assign(
        f"{x}.as_strided(({rows}, {columns}), ({columns * step}, {step}){offset_argument})", exact=d.is_exact(x)
    )


def split(d: Draft, of: str | None = None) -> list[str]:
    x = of or d.pick(dims=(1, 4), full=True)
    value = d.value(x)
    dim = d.dim(value)
    extent = value.shape[dim]
    count = d.number(1, min(extent, 3))
    kind = d.number(0, 3)
    if kind == 0:
        parts = len(torch.chunk(value, count, dim))
        text = f"torch.chunk({x}, {count}, {dim})"
    elif kind == 1:
        parts = -(-extent // count)
        text = f"{x}.split({count}, {dim})"
    elif kind == 2 and extent <= 5:
        parts, text = extent, f"{x}.unbind({dim})"
    else:
        marks = sorted(d.number(0, extent) for _ in range(2))
        parts = 3
        text = f"torch.split({x}, {[marks[0], marks[1] - marks[0], extent - marks[1]]}, {dim})"
    if parts > 4:
        raise NoChoice
    return d.assign(text if parts > 1 else f"{text}[0]", exact=d.is_exact(x), count=parts)
