"""Gradients: backward, hooks, functions with a backward of their own, activation checkpoints, modes."""

from __future__ import annotations

from shardwright.testing.programs.draft.draft import Draft, NoChoice

__all__ = ["backward", "checkpointed", "gradient_settings", "user_function", "without_grad"]


def backward(d: Draft) -> object:
    x = d.floating(fits=lambda t: t.requires_grad, full=True)
    value = d.value(x)
    weighted = d.choice((f"{x}.sum()", f"({x} * {x}).sum()", f"({x} * 2).sum()"))
    if not value.ndim and d.chance(0.5):
        weighted = x
    kind = d.number(0, 4)
    keep = d.chance(0.05)
    if kind == 0:
        loss = d.assign(weighted, exact=d.is_exact(x))
        if not loss or not d.try_step(f"{loss[0]}.backward(retain_graph=True)", keep_refused=keep):
            return False
        return d.try_step(f"{loss[0]}.backward()", keep_refused=keep)
    if kind == 1:
        leaves = [n for n in d.tensors() if d.value(n).is_leaf and d.value(n).requires_grad]
        inputs = d.random.sample(leaves, min(len(leaves), 2))
        if not inputs:
            raise NoChoice
        graph = d.choice(("", ", create_graph=True", ", retain_graph=True"))
        text = f"torch.autograd.grad({weighted}, [{', '.join(inputs)}], materialize_grads=True{graph})"
        # Clones: torch may give several inputs one gradient, or one that shares memory with something else.
        text = f"map(torch.clone, {text})" if len(inputs) > 1 else f"{text}[0].clone()"
        return d.assign(text, exact=False, count=len(inputs))
    if kind == 2 and value.ndim:
        seed = d.leaf(tuple(value.shape), value.dtype, requires_grad=False)
        return d.try_step(f"{x}.backward({seed}.clone(), retain_graph=True)", keep_refused=keep)
    retain = d.choice(("", "retain_graph=True"))
    return d.try_step(f"{weighted}.backward({retain})", keep_refused=keep)


def gradient_settings(d: Draft) -> object:
    x = d.floating()
    value = d.value(x)
    leaf = value.is_leaf and value.requires_grad
    if value.requires_grad:
        options = [
            f"{x}.register_hook(lambda g: g * 2)",
            f"{x}.register_hook(keep('{x}'))",
            f"{x}.register_hook(lambda g: g + 1)",
        ]
        if not leaf:
            options += [f"{x}.retain_grad()"] * 2
        elif value.grad is not None:
            options += [f"{x}.grad = None", f"{x}.grad.zero_()", f"{x}.grad += 1", f"{x}.grad *= 2"]
        if leaf:
            options += [f"{x}.register_post_accumulate_grad_hook(keep('{x}+'))", f"{x}.requires_grad_(False)"]
        else:
            options.append(f"{x}.detach_()")
        return d.try_step(d.choice(options))
    if any(name != x and d.share_memory(name, x) for name in d.tensors()):
        raise NoChoice  # torch's own answers about views of what became a leaf later are odd
    return d.try_step(d.choice((f"{x}.requires_grad_(True)", f"{x}.requires_grad = True")))


def user_function(d: Draft) -> object:
    x = d.floating(dims=(1, 3), full=True)
    value = d.value(x)
    if d.chance(0.5):
        return d.assign(f"Scale.apply({x}, {d.factor()})", exact=d.is_exact(x))
    bias = d.leaf((value.shape[-1],), value.dtype)
    return d.assign(f"AddBias.apply({x}, {bias})", exact=d.is_exact(x))


def checkpointed(d: Draft) -> object:
    x = d.floating(full=True)
    value = d.value(x)
    kind = d.number(0, 3)
    if kind == 0:
        return d.assign(f"checkpoint(lambda x: torch.sigmoid(x * 2) * x, {x}, use_reentrant=False)", exact=False)
    if kind == 1:
        inner = "checkpoint(lambda y: torch.tanh(y) * y, x * 2, use_reentrant=False)"
        return d.assign(f"checkpoint(lambda x: {inner} + x, {x}, use_reentrant=False)", exact=False)
    if not value.ndim:
        raise NoChoice
    weight = d.leaf((d.number(1, 4), value.shape[-1]), value.dtype, requires_grad=True)
    mode = d.choice(("True", "False", "False"))
    return d.assign(f"checkpoint(lambda x: F.linear(x, {weight}).sigmoid(), {x}, use_reentrant={mode})", exact=False)


def without_grad(d: Draft) -> object:
    """Compute without gradients, or in inference mode."""
    x = d.floating()
    mode = d.choice(("no_grad", "no_grad", "inference_mode"))
    name = d.fresh()
    options = [f"{x} * 2", f"{x} + 1", f"{x}.clone()"]
    if mode == "no_grad" and not d.value(x).requires_grad:  # torch's own answers about other views are odd
        options += [f"{x}.view(-1)", f"{x}[...]", f"{x}[0:1]" if d.value(x).ndim else f"-{x}"]
    text = d.choice(options)
    accepted = d.try_step(f"with torch.{mode}(): {name} = {text}")
    if accepted and d.is_exact(x):
        d.exact.add(name)
    return accepted
