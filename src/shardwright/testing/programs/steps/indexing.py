"""Indexing: numbers, slices, None, ellipses, masks, index tensors."""

from __future__ import annotations

import torch
from torch import Tensor

from shardwright.testing.programs.draft.draft import Draft, NoChoice

__all__ = ["index_text", "indexed", "indexed_by_tensor"]


def index_text(d: Draft, value: Tensor, *, tensors: bool = True) -> str:
    """Return the text between the brackets: numbers, slices, None, an ellipsis, masks, index tensors."""
    items: list[str] = []
    dims = list(value.shape)
    if tensors and d.chance(0.12) and dims:
        covered = d.number(1, len(dims))
        shape = tuple(dims[:covered])
        try:
            return d.pick(lambda t: t.dtype is torch.bool and tuple(t.shape) == shape)
        except NoChoice:
            return d.leaf(shape, torch.bool)
    used = d.number(1, len(dims)) if dims else 0
    items += [_one_index(d, extent, tensors=tensors) for extent in dims[:used]]
    if d.chance(0.15):
        items.insert(d.number(0, len(items)), "None")
    if d.chance(0.15):
        items.append("...")
        if used < len(dims) and d.chance(0.5):
            items.append(_one_index(d, dims[-1], tensors=tensors))
    return ", ".join(items) if items else "..."


def _one_index(d: Draft, extent: int, *, tensors: bool) -> str:
    kind = d.random.random()
    if extent and kind < 0.3:
        return str(d.number(-extent, extent - 1))
    if kind < 0.8 or not extent or not tensors:
        start, stop = d.number(-extent, extent), d.number(0, extent)
        step = f":{d.number(1, 3)}" if d.chance(0.3) else ""
        return (
            d.choice((":", f"{start}:", f":{stop}", f"{min(start, stop)}:{stop}", f"{start}:{stop}", f"{stop}:")) + step
        )
    if kind < 0.85:
        return str([d.number(-extent, extent - 1) for _ in range(d.number(1, 3))])
    shape = d.choice(((), (2,), (3,), (2, 2)))
    count = 1
    for side in shape:
        count *= side
    return d.leaf(shape, torch.int64, values=[d.number(0, extent - 1) for _ in range(count)], partial=False)


def indexed(d: Draft, of: str | None = None) -> list[str]:
    x = of or d.pick(dims=(1, 4))
    return d.assign(f"{x}[{index_text(d, d.value(x))}]", exact=d.is_exact(x))


def indexed_by_tensor(d: Draft) -> object:
    x = d.pick(dims=(1, 3), full=True)
    value = d.value(x)
    dim = d.dim(value)
    extent = value.shape[dim]
    kind = d.number(0, 3)
    if kind == 0:
        index = d.leaf((3,), torch.int64, values=[d.number(0, extent - 1) for _ in range(3)], partial=False)
        return d.assign(f"{x}.index_select({dim}, {index})", exact=d.is_exact(x))
    if kind == 1:
        shape = list(value.shape)
        count = 1
        for side in shape:
            count *= side
        index = d.leaf(shape, torch.int64, values=[d.number(0, extent - 1) for _ in range(count)], partial=False)
        return d.assign(f"{x}.gather({dim}, {index})", exact=d.is_exact(x))
    if kind == 2:
        index = d.leaf((3,), torch.int64, values=[d.number(0, value.numel() - 1) for _ in range(3)], partial=False)
        return d.assign(f"torch.take({x}, {index})", exact=d.is_exact(x))
    mask = d.leaf(value.shape, torch.bool)
    return d.assign(f"{x}.masked_fill({mask}, {d.number(-3, 3)})", exact=d.is_exact(x))
