"""Writes in place: operators, `x[i] = y`, masks, `out=`, changes of shape."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from shardwright.testing.programs.draft.draft import NUMBERS, Draft, NoChoice, broadcasts
from shardwright.testing.programs.steps.indexing import index_text, indexed
from shardwright.testing.programs.steps.values import copy_or_detach
from shardwright.testing.programs.steps.views import split, view

__all__ = ["reshape_in_place", "write", "write_at", "write_masked", "write_out", "write_tensor", "write_to_view"]


def _target(d: Draft, fits: Callable[[Tensor], bool] = lambda _: True, *, numbers: bool = True) -> str:
    return d.pick(lambda t: d.is_small(t) and fits(t), dtypes=NUMBERS if numbers else None)


def write_to_view(d: Draft) -> object:
    """Take a view of a view, or what may be a copy of it, and write to one of them: the others show it, or do not."""
    names = [_target(d, lambda t: t.ndim > 0 and (not t.is_leaf or not t.requires_grad))]
    for _ in range(d.number(1, 3)):
        kind = d.choice((view, view, indexed, copy_or_detach, split))
        if d.value(names[-1]).ndim or kind is copy_or_detach:
            views = kind(d, names[-1])
            names += views[-1:]
    return write(d, d.choice(names))


def write(d: Draft, to: str | None = None) -> object:
    x = to or _target(d)
    value = d.value(x)
    is_integer = not value.is_floating_point()
    text = d.choice(
        (
            f"{x} += {d.number(1, 4)}",
            f"{x} *= {d.choice((-1, 2))}",
            f"{x}.add_({d.number(-4, -1)})",
            f"{x}.zero_()",
            f"{x}.fill_({d.number(-3, 3)})",
            f"{x}.clamp_(-3, 4)",
            f"{x}.neg_()",
            f"{x}.relu_()" if not is_integer else f"{x}.abs_()",
            f"{x} -= {d.number(1, 3)}",
            f"{x}.mul_(2)",
            f"torch.relu_({x})",
        )
    )
    return _written(d, text, x)


def write_tensor(d: Draft) -> object:
    x = _target(d)
    value = d.value(x)
    y = d.pick(
        lambda t: broadcasts(t.shape, value.shape, to=value.shape) and torch.can_cast(t.dtype, value.dtype),
        dtypes=NUMBERS,
    )
    if not d.is_small(d.value(y) * 2):
        raise NoChoice
    text = d.choice(
        (
            f"{x} += {y}",
            f"{x}.copy_({y})",
            f"{x}.add_({y}, alpha=2)",
            f"{x} -= {y}",
            f"{x}.copy_({y}, non_blocking=True)",
            f"{x}.data.copy_({y})",
        )
    )
    return _written(d, text, x, y)


def write_at(d: Draft) -> object:
    x = _target(d, lambda t: t.ndim > 0)
    value = d.value(x)
    index = index_text(d, value)
    kind = d.number(0, 5)
    if kind <= 1:
        return _written(d, f"{x}[{index}] = {d.number(-4, 4)}", x)
    if kind == 2:
        return _written(d, f"{x}[{index}] += {d.number(1, 3)}", x)
    if kind == 3:
        return _written(d, f"{x}[{index}].{d.choice(('zero_', 'neg_', 'abs_'))}()", x)
    try:
        shape = eval(f"{x}[{index}]", d.namespace).shape
    except (IndexError, RuntimeError, TypeError, ValueError) as error:
        raise NoChoice from error
    if torch.Size(shape).numel() > 200:
        raise NoChoice
    try:
        y = d.pick(lambda t: t.dtype == value.dtype and broadcasts(t.shape, shape, to=shape) and d.is_small(t))
    except NoChoice:
        y = d.leaf(tuple(shape), value.dtype)
    return _written(d, f"{x}[{index}] {d.choice(('=', '=', '+=', '*='))} {y}", x, y)


def write_masked(d: Draft) -> object:
    x = _target(d, lambda t: t.ndim > 0)
    value = d.value(x)
    kind = d.number(0, 5)
    dim = d.dim(value)
    extent = value.shape[dim]
    if kind <= 1 or not extent:
        mask = d.leaf(value.shape, torch.bool)
        text = d.choice((f"{x}.masked_fill_({mask}, {d.number(-3, 3)})", f"{x}[{mask}] = {d.number(-3, 3)}"))
        return _written(d, text, x)
    index = d.leaf((2,), torch.int64, values=[d.number(0, extent - 1) for _ in range(2)], partial=False)
    if kind == 2:
        return _written(d, f"{x}.index_fill_({dim}, {index}, {d.number(-3, 3)})", x)
    shape = list(value.shape)
    shape[dim] = 2
    y = d.leaf(tuple(shape), value.dtype)
    if kind == 3:
        return _written(d, f"{x}.index_add_({dim}, {index}, {y})", x)
    if kind == 4:
        distinct = d.random.sample(range(extent), min(2, extent))
        index = d.leaf((len(distinct),), torch.int64, values=distinct, partial=False)
        shape[dim] = len(distinct)
        y = d.leaf(tuple(shape), value.dtype)
        return _written(d, f"{x}.index_copy_({dim}, {index}, {y})", x)
    index_shape = tuple(2 if at == dim % value.ndim else side for at, side in enumerate(value.shape))
    count = torch.Size(index_shape).numel()
    indices = d.leaf(index_shape, torch.int64, values=[d.number(0, extent - 1) for _ in range(count)], partial=False)
    return _written(d, f"{x}.scatter_add_({dim}, {indices}, {y})", x)


def write_out(d: Draft) -> object:
    x = _target(d, lambda t: not t.requires_grad)
    value = d.value(x)
    y = d.pick(lambda t: t.shape == value.shape and t.dtype == value.dtype and not t.requires_grad)
    text = d.choice(
        (f"torch.add({y}, {d.number(1, 3)}, out={x})", f"torch.mul({y}, {y}, out={x})", f"torch.neg({y}, out={x})")
    )
    return _written(d, text, x, y)


def reshape_in_place(d: Draft) -> object:
    x = _target(d, lambda t: t.ndim > 0)
    value = d.value(x)
    options = [
        f"{x}.transpose_({d.dim(value)}, {d.dim(value)})",
        f"{x}.unsqueeze_({d.number(0, value.ndim)})",
        f"{x}.squeeze_()",
    ]
    if value.ndim == 2:
        options.append(f"{x}.t_()")
    return _written(d, d.choice(options), x)


def _written(d: Draft, text: str, target: str, *operands: str) -> object:
    inexact = not d.is_exact(target, *operands)
    mode = d.random.random()
    if mode < 0.3 and d.value(target).requires_grad:
        text = f"with torch.no_grad(): {text}"
    accepted = d.try_step(text, keep_refused=d.chance(0.05))
    if accepted and inexact:  # aliases of the target are inexact, too
        d.exact -= {name for name in d.exact & set(d.tensors()) if d.share_memory(name, target)}
    if accepted and d.chance(0.25):
        d.try_step(text)
    return accepted
