"""Reductions, products of matrices, embeddings, sorting, joining."""

from __future__ import annotations

import torch

from shardwright.testing.programs.draft.draft import NUMBERS, Draft, NoChoice

__all__ = ["average", "concatenate", "embedding", "product_of_matrices", "reduction", "sorted_values"]


def reduction(d: Draft) -> object:
    x = d.pick(dtypes=NUMBERS, full=True)
    value = d.value(x)
    keep = d.choice(("", ", keepdim=True"))
    if value.ndim and d.chance(0.7):
        dim = d.dim(value)
        text = d.choice(
            (
                f"{x}.sum({dim}{keep})",
                f"{x}.amax({dim}{keep})",
                f"{x}.amin({dim}{keep})",
                f"{x}.cumsum({dim})",
                f"{x}.max({dim}).values",
            )
        )
    else:
        text = d.choice((f"{x}.sum()", f"{x}.amax()", f"{x}.min()", f"torch.sum({x})"))
    if ("max" in text or "min" in text) and value.requires_grad:
        text = text.replace(x, f"{x}.detach()", 1)
    return d.assign(text, exact=d.is_exact(x))


def average(d: Draft) -> object:
    x = d.floating(full=True)
    value = d.value(x)
    if value.ndim and d.chance(0.7):
        dim = d.dim(value)
        text = d.choice((f"{x}.mean({dim})", f"{x}.var({dim}, correction=0)", f"torch.logsumexp({x}, {dim})"))
    else:
        text = d.choice((f"{x}.mean()", f"{x}.square().sum().add(1).sqrt()", f"torch.linalg.vector_norm({x} + 0.25)"))
    return d.assign(text, exact=False)


def product_of_matrices(d: Draft) -> object:
    x = d.floating(dims=(1, 3), full=True)
    value = d.value(x)
    inner = value.shape[-1]
    try:
        y = d.pick(
            lambda t: t.dtype == value.dtype and t.ndim == 2 and t.shape[0] == inner,
            full=True,
        )
    except NoChoice:
        y = d.leaf((inner, d.number(1, 5)), value.dtype)
    kind = d.number(0, 3)
    if kind == 0:
        weight = d.leaf((d.number(1, 4), inner), value.dtype)
        bias = f", {d.leaf((d.value(weight).shape[0],), value.dtype)}" if d.chance(0.5) else ""
        return d.assign(f"F.linear({x}, {weight}{bias})", exact=d.is_exact(x))
    if kind == 1:
        return d.assign(f"torch.einsum('...i,ij->...j', {x}, {y})", exact=d.is_exact(x, y))
    return d.assign(d.choice((f"{x} @ {y}", f"torch.matmul({x}, {y})")), exact=d.is_exact(x, y))


def embedding(d: Draft) -> object:
    rows, width = d.number(2, 6), d.number(1, 4)
    try:
        table = d.floating(dims=(2, 2), full=True)
        rows = d.value(table).shape[0]
    except NoChoice:
        table = d.leaf((rows, width), d.dtype())
    shape = d.choice(((3,), (2, 2), (5,)))
    count = 1
    for side in shape:
        count *= side
    index = d.leaf(shape, torch.int64, values=[d.number(0, rows - 1) for _ in range(count)], partial=False)
    return d.assign(f"F.embedding({index}, {table})", exact=d.is_exact(table))


def sorted_values(d: Draft) -> object:
    x = d.pick(dtypes=NUMBERS, dims=(1, 3), exact=True, full=True)
    value = d.value(x)
    dim = d.dim(value)
    kind = d.number(0, 2)
    if kind == 0:
        return d.assign(f"torch.sort({x}, stable=True, dim={dim})", exact=True, count=2)
    if kind == 1:
        return d.assign(f"{x}.detach().topk({d.number(1, value.shape[dim])}, {dim}).values", exact=True)
    return d.assign(f"{x}.argsort({dim}, stable=True)", exact=True)


def concatenate(d: Draft) -> object:
    x = d.pick(dims=(0, 3))
    value = d.value(x)
    candidates = [n for n in d.tensors() if d.value(n).shape == value.shape and d.value(n).dtype == value.dtype]
    y = d.choice(candidates)
    dim = d.number(0, value.ndim)
    if value.ndim and d.chance(0.6):
        return d.assign(f"torch.cat([{x}, {y}], {d.dim(value)})", exact=d.is_exact(x, y))
    return d.assign(f"torch.stack([{x}, {y}], {dim})", exact=d.is_exact(x, y))
