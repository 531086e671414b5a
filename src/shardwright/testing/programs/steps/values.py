"""New values, element by element: leaves, arithmetic, smooth functions, casts, copies, other layouts."""

from __future__ import annotations

import torch

from shardwright.testing.programs.draft.draft import NUMBERS, Draft, NoChoice, broadcasts

__all__ = [
    "binary",
    "cast",
    "comparison",
    "copy_or_detach",
    "logical",
    "new_leaf",
    "new_like",
    "nonlinear",
    "norm_layer",
    "pointwise",
    "redistributed",
]


def new_leaf(d: Draft) -> object:
    dtype = d.choice((d.dtype(), d.dtype(), d.dtype(), torch.int64, torch.bool))
    return d.leaf(d.shape(0 if d.chance(0.1) else 1, 3), dtype)


def new_like(d: Draft) -> object:
    x = d.pick(dtypes=NUMBERS)
    template = d.choice(
        ("torch.zeros_like({})", "torch.ones_like({})", "torch.full_like({}, 3)", "{}.new_zeros((4, 3))")
    )
    return d.assign(template.format(x), exact=True)


def pointwise(d: Draft) -> object:
    x = d.pick(dtypes=NUMBERS)
    text = d.choice(
        (
            f"{x} * {int(d.factor()) or 2}",
            f"{x} + {d.number(-3, 3)}",
            f"-{x}",
            f"{x}.abs()",
            f"torch.relu({x})",
            f"{d.number(1, 5)} - {x}",
            f"{x}.clamp(-2, 3)",
            f"{x}.square()",
            f"{x}.clamp_min({d.number(-2, 2)})",
        )
    )
    return d.assign(text, exact=d.is_exact(x))


def binary(d: Draft) -> object:
    x = d.pick(dtypes=NUMBERS)
    shape, dtype = d.value(x).shape, d.value(x).dtype
    try:
        y = d.pick(lambda t: broadcasts(t.shape, shape), dtypes=NUMBERS)
    except NoChoice:
        y = d.leaf(shape if d.chance(0.6) else shape[-1:], dtype)
    text = d.choice(
        (
            f"{x} + {y}",
            f"{x} * {y}",
            f"{x} - {y}",
            f"torch.maximum({x}, {y})",
            f"torch.where({x} > {y}, {x}, {y})",
            f"torch.add({x}, {y}, alpha=2)",
            f"torch.minimum({x}, {y})",
        )
    )
    exact = d.is_exact(x, y)
    if ">" in text and not exact:
        raise NoChoice
    return d.assign(text, exact=exact)


def nonlinear(d: Draft) -> object:
    x = d.floating()
    value = d.value(x)
    dim = d.dim(value) if value.ndim else 0
    text = d.choice(
        (
            f"torch.sigmoid({x})",
            f"torch.tanh({x})",
            f"F.gelu({x})",
            f"torch.softmax({x}, {dim})",
            f"F.log_softmax({x}, {dim})",
            f"{x} / 3",
            f"{x}.clamp(-3, 3).exp()",
            f"F.silu({x})",
            f"F.softplus({x})",
            f"{x} / ({x}.abs() + 1)",
        )
    )
    return d.assign(text, exact=False)


def norm_layer(d: Draft) -> object:
    x = d.floating(dims=(1, 4), full=True)
    value = d.value(x)
    last = value.shape[-1]
    if d.chance(0.5):
        weight = d.leaf((last,), value.dtype)
        return d.assign(f"F.layer_norm({x}, ({last},), {weight}, None, 1.0)", exact=False)
    return d.assign(f"F.layer_norm({x}, ({last},), eps=1.0)", exact=False)


def comparison(d: Draft) -> object:
    x = d.pick(dtypes=NUMBERS, exact=True)
    sign = d.choice((">", "<=", "==", "!="))
    return d.assign(f"{x} {sign} {d.number(-1, 2)}", exact=True)


def logical(d: Draft) -> object:
    x = d.pick(dtypes=(torch.bool,))
    text = d.choice((f"~{x}", f"{x} & True", f"{x}.any()", f"{x}.all()", f"{x}.sum()", f"{x}.to(torch.float32)"))
    return d.assign(text, exact=True)


def cast(d: Draft) -> object:
    x = d.pick()
    value = d.value(x)
    exact = d.is_exact(x)
    targets = [*d.dtypes, d.dtypes[0]] + ([torch.int64, torch.bool] if exact else [])
    dtype = d.choice(targets)
    text = d.choice((f"{x}.to({dtype})", f"{x}.type({dtype})", f"{x}.to({dtype}, copy=True)"))
    if dtype is torch.float64 and d.chance(0.3):
        text = f"{x}.double()"
    return d.assign(text, exact=exact and (value.dtype is not torch.bfloat16))


def copy_or_detach(d: Draft, of: str | None = None) -> list[str]:
    x = of or d.pick()
    text = d.choice(
        (
            f"{x}.clone()",
            f"{x}.detach()",
            f"{x}.contiguous()",
            f"{x}.detach().clone()",
            f"{x}.clone(memory_format=torch.contiguous_format)",
            f"copy.deepcopy({x})",
            f"{x}.data",
            f"{x}.detach().requires_grad_(True)",
        )
    )
    return d.assign(text, exact=d.is_exact(x))


def redistributed(d: Draft) -> object:
    x = d.pick()
    value = d.value(x)
    placements, _ = d.placements(value.shape, partial=value.dtype is not torch.bool and d.chance(0.3))
    for op in ("avg", "max", "min"):
        placements = placements.replace(f"Partial('{op}')", "Partial('sum')")
    return d.assign(f"redistribute({x}, {placements})", exact=d.is_exact(x))
