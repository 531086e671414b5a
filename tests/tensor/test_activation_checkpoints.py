"""Activation checkpoints and saved-tensor hooks give the gradients of plain torch, however they are nested."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    checkpoint_sequential,
    create_selective_checkpoint_contexts,
    set_checkpoint_early_stop,
)

import shardwright as sw
from shardwright.testing import run_ranks

R, S0, S1 = sw.Replicate(), sw.Shard(0), sw.Shard(1)


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Any) -> Any:
        hidden = self.up(self.norm(x))
        return x + self.down(hidden.relu() / hidden.shape[0])  # by the global number of rows


Run = Callable[[nn.Module, Any], Any]
later = partial(checkpoint, use_reentrant=False)


def without_early_stop(model: Any, x: Any) -> Any:
    with set_checkpoint_early_stop(False):
        return later(model, x)


def nested(depth: int, model: Any, x: Any) -> Any:
    if depth == 0:
        return model(x)
    return later(lambda x: nested(depth - 1, model, x * 2), x)


def of_each(model: Any, x: Any) -> Any:
    """Each block in a checkpoint, all of them in another one."""

    def all_of_them(x: Any) -> Any:
        for block in model:
            x = later(block, x)
        return x

    return later(all_of_them, x)


def mixed(model: Any, x: Any) -> Any:
    return checkpoint(lambda x: later(model, x * 2), x, use_reentrant=True)


def selective(model: Any, x: Any) -> Any:
    def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> Any:
        kept = op in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

    return later(model, x, context_fn=partial(create_selective_checkpoint_contexts, policy))


def keeping(model: Any, x: Any) -> Any:
    """All results kept but those of one operator: every other one must run as often again as it did."""

    def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> Any:
        again = op is torch.ops.aten.relu.default
        return CheckpointPolicy.MUST_RECOMPUTE if again else CheckpointPolicy.MUST_SAVE

    return later(model, x, context_fn=partial(create_selective_checkpoint_contexts, policy))


def autocast(model: Any, x: Any) -> Any:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return nested(2, model, x).double()


def on_cpu(model: Any, x: Any) -> Any:
    with torch.autograd.graph.save_on_cpu():
        return model(x)


def shape_in_hooks(model: Any, x: Any) -> Any:
    """Hooks that look at shapes see the same one when they pack and when they unpack."""

    def unpack(packed: Any) -> Tensor:
        value, shape = packed
        assert type(value) is Tensor
        assert value.shape == shape
        return value / value.shape[0] * shape[0] if value.ndim and value.shape[0] else value

    with torch.autograd.graph.saved_tensors_hooks(lambda saved: (saved.detach(), saved.shape), unpack):
        return model(x)


def mutated(model: Any, x: Any) -> Any:
    with torch.autograd.graph.allow_mutation_on_saved_tensors():
        hidden = model(x * 1)
        squares = (hidden**2).sum()
        with torch.no_grad():
            hidden.mul_(0)
        squares.backward()
        return (x * 0).sum() + squares.detach()


RUNS: dict[str, Run] = {
    "later": later,
    "at once": partial(checkpoint, use_reentrant=True),
    "without early stop": without_early_stop,
    "nested twice": partial(nested, 2),
    "nested three times": partial(nested, 3),
    "each and all": of_each,
    "reentrant around not": mixed,
    "sequential": lambda model, x: checkpoint_sequential(model, 2, x, use_reentrant=False),
    "selective": selective,
    "selective, nested": lambda model, x: later(lambda x: selective(model, x * 2), x),
    "selective, keeping": keeping,
    "autocast": autocast,
    "saved on the CPU": on_cpu,
    "shapes in hooks": shape_in_hooks,
    "mutated": mutated,
}


def split(placement: Any, _: str, module: nn.Module, mesh: Any) -> None:
    for name, parameter in module.named_parameters(recurse=False):
        chosen = R if isinstance(module, nn.LayerNorm) else placement
        module.register_parameter(name, sw.distribute_tensor(parameter, mesh, [chosen]))


def same_gradients(names: list[str]) -> None:
    mesh = sw.init_device_mesh("cpu", (2,))
    torch.manual_seed(0)
    reference = nn.Sequential(Block(6), Block(6)).double()
    batch = torch.randn(5, 6, dtype=torch.float64)
    for name in names:
        run = RUNS[name]
        for placement, needed in ((R, True), (S0, False)):
            plain = copy.deepcopy(reference)
            ours = sw.distribute_module(copy.deepcopy(reference), mesh, partial(split, placement))
            mine = sw.distribute_tensor(batch, mesh, [S0])
            theirs = batch.clone()
            if needed or name in (
                "at once",
                "reentrant around not",
                "mutated",
            ):
                mine.requires_grad_()
                theirs.requires_grad_()
            for model, x in ((plain, theirs), (ours, mine)):
                for _ in range(2):
                    (run(model, x) ** 2).sum().backward()
            rough = 2e-2 if name == "autocast" else 1e-10
            for (key, value), other in zip(plain.named_parameters(), ours.parameters(), strict=True):
                assert value.grad is not None
                found = other.grad.full_tensor()
                assert torch.allclose(found, value.grad, rtol=rough, atol=rough), (name, placement, key)
            if theirs.requires_grad:
                assert torch.allclose(mine.grad.full_tensor(), theirs.grad, rtol=rough, atol=rough), (name, placement)


def quietly(names: list[str]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        same_gradients(names)


def test_checkpoints_and_hooks_give_the_gradients_of_plain_torch() -> None:
    run_ranks(2, quietly, list(RUNS))


def dropped() -> None:
    mesh = sw.init_device_mesh("cpu", (2,))
    x = sw.ones(64, 4, mesh=mesh, placements=[S0], requires_grad=True)
    y = nested(3, lambda x: nn.functional.dropout(x.sin(), 0.5).cos(), x)
    y.sum().backward()
    kept = (y != 1).to(x.dtype)
    inner = torch.sin(x.detach() * 8)
    slope = -torch.sin(2 * inner) * 2 * torch.cos(x.detach() * 8) * 8
    torch.testing.assert_close(x.grad.full_tensor(), (kept * slope).full_tensor())
    assert 0 < kept.sum().item() < 256


def test_nested_checkpoints_draw_the_same_random_numbers_again() -> None:
    run_ranks(2, dropped)


def parameters_alone() -> None:
    """Reentrant checkpoints of a plain input: the results are DTensors all the same."""
    mesh = sw.init_device_mesh("cpu", (2,))
    torch.manual_seed(0)
    plain = nn.Linear(6, 6).double()
    ours = sw.distribute_module(copy.deepcopy(plain), mesh, partial(split, S0))
    batch = torch.randn(5, 6, dtype=torch.float64)
    mine, theirs = batch.clone().requires_grad_(), batch.clone().requires_grad_()
    with sw.implicit_replication():
        (checkpoint(ours, mine, use_reentrant=True) ** 2).sum().backward()
    (checkpoint(plain, theirs, use_reentrant=True) ** 2).sum().backward()
    torch.testing.assert_close(mine.grad, theirs.grad)
    torch.testing.assert_close(ours.weight.grad.full_tensor(), plain.weight.grad)


def test_a_reentrant_checkpoint_of_a_plain_input_gives_the_gradients_of_plain_torch() -> None:
    run_ranks(2, parameters_alone)


def test_results_that_an_operator_saves_are_recomputed_with_their_local_shape() -> None:
    """`topk` saves its indices, which need no gradient and become a DTensor afterwards."""

    def work() -> bool:
        mesh = sw.init_device_mesh("cpu", (2,))
        values = torch.arange(15.0, dtype=torch.float64).view(5, 3).sin()
        x = sw.distribute_tensor(values, mesh, [S0]).requires_grad_()
        plain = values.clone().requires_grad_()
        for tensor in (x, plain):
            later(lambda x: (x.topk(2).values ** 3).sum(), tensor).backward()
        return torch.allclose(x.grad.full_tensor(), plain.grad)

    assert all(run_ranks(2, work))
