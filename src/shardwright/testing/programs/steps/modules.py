"""Modules and optimizers; forgetting values and reading numbers."""

from __future__ import annotations

import torch

from shardwright.testing.programs.draft.draft import NUMBERS, Draft, NoChoice

__all__ = ["delete_tensor", "module", "optimizer", "read_number"]


def module(d: Draft) -> object:
    x = d.floating(dims=(1, 3), full=True)
    value = d.value(x)
    fitting = [
        name
        for name in d.modules()
        if d.namespace[name].in_features == value.shape[-1] and d.namespace[name].weight.dtype == value.dtype
    ]
    if fitting and d.chance(0.7):
        return _called(d, d.choice(fitting), x)
    weight = d.leaf((d.number(1, 4), value.shape[-1]), value.dtype, requires_grad=False, partial=False)
    bias = (
        d.leaf((d.value(weight).shape[0],), value.dtype, requires_grad=False, partial=False)
        if d.chance(0.5)
        else "None"
    )
    names = d.assign(f"linear({weight}, {bias})", exact=False)
    return names and _called(d, names[0], x)


def _called(d: Draft, name: str, x: str) -> object:
    """Call a module, often with a new hook, and sometimes run backward through it."""
    hook = d.random.random()
    if hook < 0.2:
        d.try_step(f"{name}.register_forward_hook(lambda module, args, out: out * 2)")
    elif hook < 0.35:
        d.try_step(f"{name}.register_forward_pre_hook(lambda module, args: (args[0] + 1,))")
    elif hook < 0.55:
        d.try_step(f"{name}.register_full_backward_hook(keep('{name}'))")
    out = d.assign(f"{name}({x})", exact=False)
    if out and d.chance(0.5):
        d.try_step(f"{out[0]}.sum().backward()")
    return out


def optimizer(d: Draft) -> object:
    existing = d.of(torch.optim.Optimizer)
    if existing and d.chance(0.7):
        return _stepped(d, d.choice(existing))
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
            # A large eps: with the default, a gradient that is 0 but for rounding moves a parameter by lr.
            "Adam([{}], lr=0.5, eps=0.25)",
            "AdamW([{}], lr=0.25, eps=0.25, foreach=True)",
        )
    )
    names = d.assign(f"torch.optim.{kind.format(parameters)}", exact=False)
    return names and _stepped(d, names[0])


def _stepped(d: Draft, name: str) -> object:
    """Make a step of an optimizer, often after a backward, or clear its gradients."""
    losses = [n for n in d.tensors() if d.value(n).requires_grad and d.value(n).is_floating_point()]
    if losses and d.chance(0.6):
        d.try_step(f"{d.choice(losses)}.sum().backward(retain_graph=True)")
    if d.chance(0.25):
        return d.try_step(d.choice((f"{name}.zero_grad()", f"{name}.zero_grad(set_to_none=False)")))
    parameters = [p for group in d.namespace[name].param_groups for p in group["params"]]
    memory = {p.untyped_storage().data_ptr() for p in parameters}
    d.exact -= {n for n in d.exact & set(d.tensors()) if d.value(n).untyped_storage().data_ptr() in memory}
    return d.try_step(f"{name}.step()")


def delete_tensor(d: Draft) -> object:
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
