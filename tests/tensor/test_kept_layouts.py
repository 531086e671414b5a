"""Layouts that the user chose are kept: activations stay where they are sharded, parameters are gathered or stay."""

from __future__ import annotations

import copy
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import shardwright as sw
from shardwright import comm
from shardwright.layout import Partial, Replicate, Shard
from shardwright.tensor.base.parameter_use import ParameterUse, set_parameter_use
from shardwright.testing import on_ranks
from tests.tensor.small_llama import LAYERS, LENGTH, WIDTH, Decoder, loss_of, tokens
from tests.tensor.values import close, randn, spread

R, P = Replicate(), Partial()
COLUMNWISE, ROWWISE = ("q", "k", "v", "gate", "up", "head", "embedding"), ("o", "down")


def parameter(value: Tensor, *placements: sw.Placement, gathered: set[int] | None = None) -> nn.Parameter:
    made = nn.Parameter(spread(value, *placements))
    if gathered is not None:
        set_parameter_use(made, ParameterUse(frozenset(gathered)))
    return made


def placements(result: Any) -> sw.Placement:
    [placement] = result.placements
    return placement


# --- one operator ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("gathered", [None, {0}])
def test_a_batch_stays_sharded_however_small_it_is(gathered: set[int] | None) -> None:
    @on_ranks(2)
    def work() -> None:
        values, ids = randn(2, 2, 8), torch.tensor([[1], [0]])
        x = spread(values, Shard(0))
        for dim in (0, 1):
            w = parameter(randn(64, 8), Shard(dim), gathered=gathered)
            with sw.trace() as seen:
                results = [functional.linear(x, w), functional.embedding(spread(ids, Shard(0)), w)]
            assert [placements(result) for result in results] == [Shard(0)] * 2
            assert {move.source.shape for move in seen.redistributions} == {(64, 8)}
            close(results[0], functional.linear(values, randn(64, 8)))
            close(results[1], randn(64, 8)[ids])
        for placement in (Shard(0), R):
            b = parameter(randn(8), placement, gathered=gathered)
            w = parameter(randn(8, seed=1), Shard(0), gathered=gathered)
            results = [x + b, x * w, functional.layer_norm(x, (8,), w, b)]
            assert [placements(result) for result in results] == [Shard(0)] * 3
            close(results[2], functional.layer_norm(values, (8,), randn(8, seed=1), randn(8)))

    work()


@on_ranks(2)
def test_a_gathered_parameter_is_gathered_for_a_replicated_batch() -> None:
    """Otherwise the result would be sharded by features: tensor parallelism over the mesh dimension of data."""
    x = spread(randn(4, 8), R)
    for rows in (Shard(0), Shard(1)):
        w, norm = parameter(randn(6, 8), rows, gathered={0}), parameter(randn(8), Shard(0), gathered={0})
        with comm.count() as traffic:
            result = functional.linear(x * norm, w)
        assert placements(result) == R
        assert dict(traffic.calls) == {"all_gather": 2}
        close(result, functional.linear(randn(4, 8) * randn(8), randn(6, 8)))


@on_ranks(2)
def test_values_derived_from_a_gathered_parameter_are_gathered_in_its_place() -> None:
    x, w = spread(randn(4, 8), Shard(0)), parameter(randn(6, 8), Shard(0), gathered={0})
    plain = randn(6, 8).requires_grad_()
    with sw.trace() as seen:
        results = [x @ w.T, x @ (1 + w).T, x[:, :6] @ w, functional.linear(x, w.double()[:5]), x * w[0]]
    assert {placements(result) for result in results} == {Shard(0)}
    assert not {(4, 8), (4, 6)} & {move.source.shape for move in seen.redistributions}  # of x
    a = randn(4, 8)
    expected = [a @ plain.T, a @ (1 + plain).T, a[:, :6] @ plain, functional.linear(a, plain[:5]), a * plain[0]]
    for ours, theirs in zip(results, expected, strict=True):
        close(ours, theirs)
    sum(result.sin().sum() for result in results).backward()
    sum(result.sin().sum() for result in expected).backward()
    close(w.grad, plain.grad)


@on_ranks(2)
def test_one_of_several_matrices_in_a_gathered_parameter_comes_to_the_batch() -> None:
    x, experts = spread(randn(6, 8), Shard(0)), parameter(randn(4, 8, 5), Shard(0), gathered={0})
    plain = randn(4, 8, 5).requires_grad_()
    with sw.trace() as seen:
        results = [x @ experts[index] for index in range(4)]
    assert {placements(result) for result in results} == {Shard(0)}
    assert (6, 8) not in {move.source.shape for move in seen.redistributions}
    sum(result.sin().sum() for result in results).backward()
    sum((randn(6, 8) @ plain[index]).sin().sum() for index in range(4)).backward()
    close(experts.grad, plain.grad)


@pytest.mark.parametrize("batch", [R, Shard(0), Shard(1), P])
def test_a_parameter_that_is_not_gathered_stays(batch: sw.Placement) -> None:
    """Tensor parallelism: sequences are gathered, partial sums reduced, and the weight is left where it is."""

    @on_ranks(2)
    def work() -> None:
        x = spread(randn(4, 6, 8), R if batch is P else batch)
        x = x.redistribute(placements=[P]) if batch is P else x
        columns, rows = (parameter(randn(64, 8), Shard(dim), gathered=set()) for dim in (0, 1))
        with sw.trace() as seen:
            wide, summed = functional.linear(x, columns), functional.linear(x, rows)
        assert placements(wide) == Shard(2)
        assert placements(summed) == P
        assert {move.source.shape for move in seen.redistributions} <= {(4, 6, 8)}
        close(wide, functional.linear(randn(4, 6, 8), randn(64, 8)))
        close(summed, functional.linear(randn(4, 6, 8), randn(64, 8)))

    work()


@on_ranks(2)
def test_without_a_use_a_parameter_stays_if_no_activation_is_sharded() -> None:
    x = spread(randn(4, 8), R)
    columns, rows = parameter(randn(64, 8), Shard(0)), parameter(randn(64, 8), Shard(1))
    with sw.trace() as seen:
        results = [functional.linear(x, columns), functional.linear(x, rows)]
        results.append(functional.linear(x.redistribute(placements=[P]), columns))
    assert [placements(result) for result in results] == [Shard(1), P, Shard(1)]
    assert all(move.source.shape == (4, 8) for move in seen.redistributions)
    for result in results:
        close(result, functional.linear(randn(4, 8), randn(64, 8)))


@on_ranks(2)
def test_operands_that_match_a_strategy_are_not_moved() -> None:
    x = spread(randn(4, 8), Shard(1))
    for gathered in (None, {0}, set[int]()):
        w = parameter(randn(6, 8), Shard(1), gathered=gathered)
        scale = parameter(randn(8), Shard(0), gathered=gathered)
        with comm.count() as traffic:
            results = [functional.linear(x, w), x * scale]
        assert not traffic.calls
        close(results[0], functional.linear(randn(4, 8), randn(6, 8)))
        close(results[1], randn(4, 8) * randn(8))


@on_ranks(2)
def test_an_in_place_write_to_a_parameter_keeps_its_layout() -> None:
    w = parameter(randn(6, 8), Shard(0), gathered={0})
    x = spread(randn(6, 8, seed=1), Shard(1))
    with torch.no_grad():
        w.add_(x).mul_(spread(randn(8, seed=2), R))
    assert placements(w) == Shard(0)
    close(w.detach(), (randn(6, 8) + randn(6, 8, seed=1)) * randn(8, seed=2))


@on_ranks(2)
def test_explain_says_which_rule_decided() -> None:
    mesh = sw.init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    x, w = (sw.distribute_tensor(randn(4, 8), mesh, [Shard(0)]) for _ in range(2))
    gathered, staying = nn.Parameter(w), nn.Parameter(w)
    set_parameter_use(gathered, ParameterUse(frozenset({0})))
    set_parameter_use(staying, ParameterUse(frozenset()))
    rules = []
    for weight in (gathered, staying, nn.Parameter(w)):
        seen = sw.explain(functional.linear, x, weight, quiet=True)
        rules.append(seen.operations[0].decided_by["dp"])
        assert f"dp: {rules[-1]}" in str(seen)
    assert rules == [
        "parameters are gathered, activations stay",
        "parameters stay sharded",
        "parameters are gathered, activations stay",
    ]


# --- a step of training ---------------------------------------------------------------------------------------------


def decoders(mesh: Any, *, uses: bool) -> tuple[nn.Module, nn.Module]:
    """Return a decoder that is fully sharded over "dp" and tensor parallel over "tp", and the same in plain torch."""
    torch.manual_seed(0)
    plain = Decoder().double()
    ours = copy.deepcopy(plain)
    names: tuple[str, ...] = mesh.mesh_dim_names
    for path, module in ours.named_modules():
        for name, value in list(module.named_parameters(recurse=False)):
            last = path.rpartition(".")[2]
            tensor_parallel = Shard(0) if last in COLUMNWISE else Shard(1) if last in ROWWISE else R
            chosen = [Shard(0) if mesh_dim == "dp" else tensor_parallel for mesh_dim in names]
            order = ("tp", "dp") if len(names) == 2 else None  # shards over tp first: a shard is gathered over dp
            sharded = nn.Parameter(sw.distribute_tensor(value.detach(), mesh, chosen, order=order))
            if uses:
                set_parameter_use(sharded, ParameterUse(frozenset(names.index(n) for n in names if n == "dp")))
            module.register_parameter(name, sharded)
    return ours, plain


def collectives(seen: sw.Trace, mesh: Any, mesh_dim: str) -> Counter[str]:
    """Count the collectives among the ranks of this rank's line along a mesh dimension, without those of one number."""
    ranks = tuple(mesh[mesh_dim].mesh.tolist())
    least = 8 * len(ranks)
    return Counter(event.kind for event in seen.collectives if event.ranks == ranks and event.received > least)


def moved(seen: sw.Trace, mesh_dim: int, shape: tuple[int, ...], backward: bool) -> Counter[tuple[str, str]]:
    """Count the redistributions of activations of a shape along a mesh dimension, by source and target."""
    pairs = ((move.source, move.target) for move in seen.redistributions if move.backward == backward)
    both = ((str(a.placements[mesh_dim]), str(b.placements[mesh_dim])) for a, b in pairs if a.shape == shape)
    return Counter(pair for pair in both if pair[0] != pair[1])


def train(
    mesh: Any, batch: list[sw.Placement], samples: int, *, uses: bool, sequences: bool = False
) -> list[tuple[sw.Trace, sw.Trace]]:
    """Train two steps, compare every loss and gradient with plain torch, and return traces of forward and backward."""
    ours, plain = decoders(mesh, uses=uses)
    if sequences:  # sharded over the last mesh dimension from the first activation on
        ours.embedding.register_forward_hook(lambda _, __, x: x.redistribute(placements=[*x.placements[:-1], Shard(1)]))
    optimizers = [torch.optim.AdamW(model.parameters(), lr=0.01) for model in (ours, plain)]
    traces = []
    for step in range(2):
        ids = tokens(samples, seed=step)
        sharded = sw.distribute_tensor(ids, mesh, batch)
        with sw.trace() as forward:
            loss = loss_of(ours, sharded)
        with sw.trace() as backward:
            loss.backward()
        expected = loss_of(plain, ids)
        expected.backward()
        torch.testing.assert_close(loss.full_tensor(), expected, rtol=1e-12, atol=1e-12)
        for (name, mine), theirs in zip(ours.named_parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(mine.grad.full_tensor(), theirs.grad, rtol=1e-9, atol=1e-12, msg=name)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        traces.append((forward, backward))
    return traces


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("uses", [False, True])
def test_fully_sharded_training_gathers_each_parameter_once_and_never_the_batch(ranks: int, uses: bool) -> None:
    @on_ranks(ranks)
    def work() -> None:
        mesh = sw.init_device_mesh("cpu", (ranks,), mesh_dim_names=("dp",))
        parameters = 3 + 9 * LAYERS
        for forward, backward in train(mesh, [Shard(0)], 4, uses=uses):
            assert collectives(forward, mesh, "dp") == {"all_gather": parameters}
            assert collectives(backward, mesh, "dp") == {"reduce_scatter": parameters}

    work()


@on_ranks(4)
def test_fully_sharded_and_tensor_parallel_training_keeps_both() -> None:
    mesh = sw.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    parameters = 3 + 9 * LAYERS
    for forward, backward in train(mesh, [Shard(0), R], 4, uses=True):
        assert collectives(forward, mesh, "dp") == {"all_gather": parameters}
        assert collectives(backward, mesh, "dp") == {"reduce_scatter": parameters}
        # Two all-reduces for each block, and one for the table of embeddings, which is sharded by rows.
        activations = (4, LENGTH, WIDTH)
        assert moved(forward, 1, activations, backward=False)["P(sum)", "R"] == 2 * LAYERS + 1
        # In backward likewise, and one for the input of the output layer, which is sharded by rows.
        assert moved(backward, 1, activations, backward=True)["P(sum)", "R"] == 2 * LAYERS + 1
        assert "exchange" not in collectives(forward, mesh, "tp") + collectives(backward, mesh, "tp")


@on_ranks(4)
def test_sequence_parallel_training_gathers_and_scatters_twice_for_each_block() -> None:
    mesh = sw.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    activations = (4, LENGTH, WIDTH)
    for forward, backward in train(mesh, [Shard(0), R], 4, uses=True, sequences=True):
        seen = moved(forward, 1, activations, backward=False)
        assert seen == {("S(1)", "Re"): 2 * LAYERS + 1, ("P(sum)", "S(1)"): 2 * LAYERS + 1}
        seen = moved(backward, 1, activations, backward=True)
        assert seen == {("P(sum)", "S(1)"): 2 * LAYERS + 1, ("S(1)", "Re"): 2 * LAYERS + 1}
        assert "exchange" not in collectives(forward, mesh, "tp") + collectives(backward, mesh, "tp")


@on_ranks(2)
def test_tensor_parallel_training_without_uses_moves_no_parameter() -> None:
    mesh = sw.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    ours, _ = decoders(mesh, uses=False)
    shapes = {tuple(parameter.shape) for parameter in ours.parameters() if parameter.ndim > 1}
    for forward, _ in train(mesh, [R], 3, uses=False):
        assert not {move.source.shape for move in forward.redistributions} & shapes
