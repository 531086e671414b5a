"""Modules and optimizers; forgetting values and reading numbers."""

from __future__ import annotations

import torch

from shardwright.testing.programs.draft import NUMBERS, Draft, NoChoice

__all__ = ["forget", "module", "optimizer", "read_number"]


def module(d: Draft) -> object:
    x = d.floating(dims=(1, 3), full=True)
    value = d.value(x)
    fitting = [
        name
        for name in d.modules()
        if d.namespace[name].in_features == value.shape[-1] and d.namespace[name].weight.dtype == value.dtype
    ]
    if fitting and d.chance(0.7):
        name = d.choice(fitting)
        hook = d.random.random()
        if hook < 0.2:
            d.try_step(f"{name}.register_forward_hook(lambda module, args, out: out * 2)")
        elif hook < 0.4:
            d.try_step(f"{name}.register_forward_pre_hook(lambda module, args: (args[0] + 1,))")
        elif hook < 0.7:
            d.try_step(f"{name}.register_full_backward_hook(keep('{name}'))")
        return d.assign(f"{name}({x})", exact=False)
    weight = d.leaf((d.number(1, 4), value.shape[-1]), value.dtype, requires_grad=False, partial=False)
    bias = (
        d.leaf((d.value(weight).shape[0],), value.dtype, requires_grad=False, partial=False)
        if d.chance(0.5)
        else "None"
    )
    made = d.assign(f"linear({weight}, {bias})", exact=False)
    return made and d.assign(f"{made[0]}({x})", exact=False)


def optimizer(d: Draft) -> object:
    known = d.of(torch.optim.Optimizer)
    if known and d.chance(0.7):
        name = d.choice(known)
        return d.try_step(
            d.choice(
                (f"{name}.step()", f"{name}.step()", f"{name}.zero_grad()", f"{name}.zero_grad(set_to_none=False)")
            )
        )
    leaves = [
        n
        for n in d.tensors()
        if d.value(n).is_leaf and d.value(n).requires_grad and d.value(n).dtype in (torch.float32, torch.float64)
    ]
    parameters = ", ".join(d.random.sample(leaves, min(2, len(leaves))))
    if d.modules() and d.chance(0.5):
        parameters = f"*{d.choice(d.modules())}.parameters()"
    if not parameters:
        raise NoChoice
    kind = d.choice(
        (
            "SGD([{}], lr=0.5)",
            "SGD([{}], lr=0.5, momentum=0.5)",
            "Adam([{}], lr=0.5)",
            "AdamW([{}], lr=0.25, foreach=True)",
        )
    )
    return d.assign(f"torch.optim.{kind.format(parameters)}", exact=False)


def forget(d: Draft) -> object:
    if len(d.tensors()) < 5:
        raise NoChoice
    name = d.choice(d.tensors())
    d.exact.discard(name)
    return d.try_step(f"del {name}")


def read_number(d: Draft) -> object:
    x = d.pick(dtypes=NUMBERS, full=True, exact=True)
    return d.assign(
        d.choice((f"{x}.sum().item()", f"float({x}.amax())", f"int({x}.sum())", f"{x}.numel()")), exact=True
    )
