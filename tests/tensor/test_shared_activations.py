"""One redistribution of an activation serves all its users, as long as its value stays the same, and no longer."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any
from weakref import ref

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from torch.utils.flop_counter import FlopCounterMode

import shardwright as sw
from shardwright import comm
from shardwright.layout import Partial, Replicate, Shard
from shardwright.tensor.base.parameter_use import ParameterUse, set_parameter_use
from shardwright.tensor.gradients import share
from shardwright.testing import on_ranks
from tests.tensor.values import close, randn, spread

R, P = Replicate(), Partial()


def weights(count: int = 3, width: int = 8) -> tuple[list[nn.Parameter], list[Tensor]]:
    """Return weights sharded by rows that stay where they are, and the same as plain tensors."""
    plain = [randn(6, width, seed=seed + 1).requires_grad_() for seed in range(count)]
    ours = [nn.Parameter(spread(weight.detach(), Shard(0))) for weight in plain]
    for weight in ours:
        set_parameter_use(weight, ParameterUse())
    return ours, plain


def activation(*placements: sw.Placement) -> tuple[Any, Any, Tensor, Tensor]:
    """Return an activation and the leaf it is computed from, and the same as plain tensors."""
    leaf, plain = spread(randn(4, 6, 8), *placements).requires_grad_(), randn(4, 6, 8).requires_grad_()
    return leaf * 2, leaf, plain * 2, plain


def project(x: Any, ws: Any) -> Any:
    """Return a number that depends on all projections of x."""
    return sum((functional.linear(x, w).sin() * (i + 1)).sum() for i, w in enumerate(ws))


def moves(seen: sw.Trace, backward: bool = False) -> list[str]:
    """Return the redistributions of activations, as "source → target"."""
    mine = [move for move in seen.redistributions if move.source.shape == (4, 6, 8) and move.backward == backward]
    return [f"{move.source.placements[0]} → {move.target.placements[0]}" for move in mine]


def results_of(tensor: Any) -> int:
    shared = tensor.__dict__.get("_shared")
    return 0 if shared is None else len(shared.results)


@on_ranks(2)
def test_three_projections_gather_a_sequence_once_and_scatter_its_gradient_once() -> None:
    x, leaf, plain, plain_leaf = activation(Shard(1))
    ours, theirs = weights()
    with sw.trace() as seen:
        loss = project(x, ours)
        loss.backward()
    assert moves(seen) == ["S(1) → Re"]
    assert moves(seen, backward=True) == ["P(sum) → S(1)"]
    expected = project(plain, theirs)
    expected.backward()
    close(loss, expected)
    close(leaf.grad, plain_leaf.grad)
    for mine, other in zip(ours, theirs, strict=True):
        close(mine.grad, other.grad)


@on_ranks(2)
def test_three_projections_reduce_the_gradient_of_a_replicated_activation_once() -> None:
    x, leaf, plain, plain_leaf = activation(R)
    ours, theirs = weights()
    loss = project(x, ours)
    with sw.trace() as backward:
        loss.backward()
    assert moves(backward, backward=True) == ["P(sum) → R"]
    project(plain, theirs).backward()
    close(leaf.grad, plain_leaf.grad)


@on_ranks(2)
def test_three_users_complete_a_partial_sum_once() -> None:
    x = spread(randn(4, 8), R).redistribute(placements=[P])
    with comm.count() as once:
        x.sin()
    with comm.count() as thrice:
        results = [x.cos(), x.exp(), x.tanh()]
    assert not thrice.calls  # the first user completed it
    assert once.calls
    close(results[0], randn(4, 8).cos())


WRITES: dict[str, Callable[[Any], Any]] = {
    "in place": lambda x: x.add_(1),
    "through a view": lambda x: x[:, :, 0].add_(1),
    "through a detached tensor": lambda x: x.detach().add_(1),
    "through .data": lambda x: x.data.add_(1),
    "through .data of a detached tensor": lambda x: x.detach().data.add_(1),
    "through .data of a view": lambda x: x[..., 1:].data.add_(1),
    "through its local tensor": lambda x: x.to_local().detach().add_(1),
}


@pytest.mark.parametrize("name", WRITES)
@pytest.mark.parametrize("records", [True, False])
def test_a_written_activation_is_redistributed_again(name: str, records: bool) -> None:
    write = WRITES[name]

    @on_ranks(2)
    def work() -> None:
        with torch.set_grad_enabled(records):
            x, _, plain, _ = activation(Shard(1))
            ours, theirs = weights()
            functional.linear(x, ours[0])
            write(x)
            if name == "through its local tensor":
                plain.data.add_(1)
            else:
                write(plain)
            close(functional.linear(x, ours[1]), functional.linear(plain, theirs[1]))

    work()


@on_ranks(2)
def test_ranks_with_empty_shards_agree_that_an_activation_was_written_to() -> None:
    x = spread(randn(1, 1, 8), Shard(1)).requires_grad_() * 1
    ours, theirs = weights()
    functional.linear(x, ours[0])
    x.data.add_(1)
    close(functional.linear(x, ours[1]), functional.linear(randn(1, 1, 8) + 1, theirs[1]))


@on_ranks(2)
def test_memory_replaced_after_a_use_is_redistributed_again() -> None:
    ours, theirs = weights()
    with torch.no_grad():
        for replace in (lambda x, y: setattr(x, "data", y), lambda x, y: x.set_(y), torch.utils.swap_tensors):
            x, y = spread(randn(4, 6, 8), Shard(1)), spread(randn(4, 6, 8, seed=9), Shard(1))
            functional.linear(x, ours[0])
            functional.linear(y, ours[0])
            replace(x, y)
            close(functional.linear(x, ours[1]), functional.linear(randn(4, 6, 8, seed=9), theirs[1]))


@on_ranks(2)
def test_results_without_a_gradient_are_not_used_where_one_is_recorded() -> None:
    x, leaf, plain, plain_leaf = activation(Shard(1))
    ours, theirs = weights()
    with torch.no_grad():
        functional.linear(x, ours[0])
    project(x, ours).backward()
    project(plain, theirs).backward()
    close(leaf.grad, plain_leaf.grad)


@on_ranks(2)
def test_gradients_of_the_second_order_go_through_a_shared_redistribution() -> None:
    x, leaf, plain, plain_leaf = activation(Shard(1))
    ours, theirs = weights()
    (first,) = torch.autograd.grad(project(x, ours), leaf, create_graph=True)
    (expected,) = torch.autograd.grad(project(plain, theirs), plain_leaf, create_graph=True)
    (first.square().sum() + project(x, ours)).backward()
    (expected.square().sum() + project(plain, theirs)).backward()
    close(leaf.grad, plain_leaf.grad)
    close(ours[1].grad, theirs[1].grad)


@on_ranks(2)
def test_a_hook_sees_the_sum_of_the_gradients_of_all_users() -> None:
    x, _, plain, _ = activation(Shard(1))
    ours, theirs = weights()
    seen: list[Any] = []
    functional.linear(x, ours[0])
    x.register_hook(seen.append)
    plain.register_hook(seen.append)
    project(x, ours).backward()
    project(plain, theirs).backward()
    assert len(seen) == 2
    close(seen[0], seen[1])


@on_ranks(2)
def test_results_that_share_memory_with_a_redistributed_input_are_not_shared() -> None:
    x = spread(randn(4, 6), Shard(1))
    for _ in range(2):
        flat = x.reshape(24)
        assert x.flatten().sum().item() == pytest.approx(randn(4, 6).sum().item())
        flat.to_local().add_(1)
    close(x.reshape(24), randn(4, 6).reshape(24))


@on_ranks(2)
def test_an_activation_and_its_redistributions_are_freed_together_without_the_garbage_collector() -> None:
    ours, _ = weights()
    gc.collect()
    gc.disable()
    try:
        for records in (True, False):
            with torch.set_grad_enabled(records):
                x = activation(Shard(1))[0]
                functional.linear(x, ours[0])
                assert results_of(x) == 1
                shared = ref(x._shared)
                del x
                assert shared() is None
    finally:
        gc.enable()


@on_ranks(2)
def test_a_backward_pass_drops_redistributions_of_tensors_that_live_on() -> None:
    x = activation(Shard(1))[0]
    ours, _ = weights()
    project(x, ours).backward()
    assert results_of(x) == 0
    assert not share.results_by_tensor


@on_ranks(2)
def test_without_gradients_only_the_last_few_redistributions_are_kept() -> None:
    ours, _ = weights(1)
    with torch.no_grad():
        kept = [spread(randn(2, 4, 8, seed=seed), Shard(1)) for seed in range(10)]
        for x in kept:
            functional.linear(x, ours[0])
    assert [results_of(x) for x in kept] == [0] * 6 + [1] * share.MAX_WITHOUT_GRADIENT


@on_ranks(2)
def test_frozen_parameters_are_not_kept_gathered() -> None:
    x = spread(randn(4, 8), Shard(0))
    w = nn.Parameter(spread(randn(6, 8), Shard(0)), requires_grad=False)
    set_parameter_use(w, ParameterUse(frozenset({0})))
    functional.linear(x, w)
    assert results_of(w) == 0


@pytest.mark.parametrize("reentrant", [True, False])
def test_activation_checkpointing_keeps_no_redistributed_input(reentrant: bool) -> None:
    @on_ranks(2)
    def work() -> None:
        x, leaf, plain, plain_leaf = activation(Shard(1))
        ours, theirs = weights()

        def block(value: Any, *ws: Any) -> Any:
            return project(value.sin(), ws) + project(value, ws)

        with sw.trace() as forward:
            loss = checkpoint(block, x, *ours, use_reentrant=reentrant)
        assert len(moves(forward)) == 2
        if not reentrant:
            assert results_of(x) == 0
        with sw.trace() as backward:
            loss.backward()
        assert sorted(moves(backward, backward=True)) == ["P(sum) → S(1)"] * 2 + ["S(1) → Re"] * 2
        block(plain, *theirs).backward()
        close(leaf.grad, plain_leaf.grad)
        for mine, other in zip(ours, theirs, strict=True):
            close(mine.grad, other.grad)

    work()


@on_ranks(2)
def test_saved_tensors_on_the_cpu_and_nested_hooks_give_the_same_gradients() -> None:
    x, leaf, plain, plain_leaf = activation(Shard(1))
    ours, theirs = weights()
    with torch.autograd.graph.save_on_cpu():
        functional.linear(x, ours[0])
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
            loss = project(x, ours)
        loss = loss + project(x, ours)
    loss = loss + project(x, ours)
    loss.backward()
    (3 * project(plain, theirs)).backward()
    close(leaf.grad, plain_leaf.grad)


@on_ranks(2)
def test_a_dispatch_mode_on_one_rank_alone_changes_no_decision() -> None:
    x, leaf, plain, plain_leaf = activation(Shard(1))
    ours, theirs = weights()
    with FlopCounterMode(display=False) if comm.rank() == 0 else nullcontext():
        project(x, ours).backward()
    project(plain, theirs).backward()
    close(leaf.grad, plain_leaf.grad)


@on_ranks(2)
def test_selective_checkpointing_repeats_the_same_operators() -> None:
    x, leaf, plain, plain_leaf = activation(Shard(1))
    ours, theirs = weights()

    def keep_products(_: Any, op: Any, *__: Any, **___: Any) -> Any:
        return CheckpointPolicy.MUST_SAVE if op is torch.ops.aten.mm.default else CheckpointPolicy.PREFER_RECOMPUTE

    contexts = partial(create_selective_checkpoint_contexts, keep_products)
    loss = checkpoint(lambda v, *ws: project(v.sin(), ws), x, *ours, use_reentrant=False, context_fn=contexts)
    loss.backward()
    project(plain.sin(), theirs).backward()
    close(leaf.grad, plain_leaf.grad)


@on_ranks(2)
def test_inference_mode_is_correct_after_writes() -> None:
    ours, theirs = weights()
    with torch.inference_mode():
        x = spread(randn(4, 6, 8), Shard(1))
        functional.linear(x, ours[0])
        x.to_local().add_(1)
        close(functional.linear(x, ours[0]), functional.linear(randn(4, 6, 8) + 1, theirs[0].detach()))


@on_ranks(2)
def test_copies_of_an_activation_share_nothing_with_it() -> None:
    ours, theirs = weights()
    with torch.no_grad():
        x = spread(randn(4, 6, 8), Shard(1))
        functional.linear(x, ours[0])
        for copied in (copy.copy(x), copy.deepcopy(x)):
            assert "_shared" not in copied.__dict__
            close(functional.linear(copied, ours[0]), functional.linear(randn(4, 6, 8), theirs[0]))


@on_ranks(2)
def test_a_compiled_program_shares_redistributions_and_repeats_them_at_every_call() -> None:
    ours, theirs = weights()

    def program(x: Any, *ws: Any) -> Any:
        return project(x * 2, ws)

    compiled = sw.compile(program)
    for seed in range(3):
        leaf, plain = spread(randn(4, 6, 8, seed=seed), Shard(1)).requires_grad_(), randn(4, 6, 8, seed=seed)
        plain.requires_grad_()
        with sw.trace() as seen:
            loss = compiled(leaf, *ours)
        assert moves(seen) == ["S(1) → Re"]
        loss.backward()
        expected = program(plain, *theirs)
        expected.backward()
        close(loss, expected)
        close(leaf.grad, plain.grad)


@on_ranks(2)
def test_an_activation_used_before_a_capture_is_redistributed_inside_it() -> None:
    ours, theirs = weights()
    x = spread(randn(4, 6, 8), Shard(1))
    functional.linear(x, ours[0])
    compiled = sw.compile(lambda x, w: functional.linear(x, w))
    for _ in range(2):
        close(compiled(x, ours[0]), functional.linear(randn(4, 6, 8), theirs[0]))
        with torch.no_grad():
            x.add_(0)


@on_ranks(2)
def test_tensors_made_outside_of_inference_mode_are_redistributed_in_it() -> None:
    """What is made in inference mode has no version counter, by which a write to a shared result is noticed."""
    mesh = sw.init_device_mesh("cpu", (2,))
    local = torch.ones(2, 3) * (1 + comm.rank())
    for x in (sw.DTensor.from_local(local, mesh, [sw.Partial()]), sw.DTensor.from_local(local, mesh, [sw.Shard(0)])):
        for _ in range(2):
            with torch.inference_mode():
                y, z = x + 1, x.full_tensor() @ torch.ones(3, 2)
            torch.testing.assert_close(y.full_tensor(), x.full_tensor() + 1)
            torch.testing.assert_close(z, x.full_tensor() @ torch.ones(3, 2))
