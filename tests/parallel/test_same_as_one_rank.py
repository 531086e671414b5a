"""`same_as_one_rank` accepts right parallel training, and reports every kind of wrong one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import shardwright as sw
from shardwright import comm
from shardwright.errors import ArgumentTypeError, TrainingMismatchError
from shardwright.testing import same_as_one_rank

EXECUTE = "shardwright.tensor.redistribute.autograd.execute"


class Tied(nn.Module):
    """A language model whose output layer is its embedding, with a layer between them that is sharded over tp."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.embedding = nn.Embedding(12, 8)
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(8, 12, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embedding(tokens)
        hidden = hidden + self.dropout(self.down(torch.relu(self.up(hidden))))
        return nn.functional.cross_entropy(self.head(hidden[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


TOKENS = torch.randint(0, 12, (6, 5), generator=torch.Generator().manual_seed(0))
MESHES = ({"replicate": 2}, {"dp": 2}, {"dp": 2, "tp": 2})


def fully_sharded(model: nn.Module, mesh: Any) -> None:
    """Shard parameters over dp by rows, and over tp as columns, then rows."""
    over_tp = {"up": [sw.Shard(0), sw.Shard(0)], "down": [sw.Shard(1), sw.Replicate()]}

    def partition(name: str, module: nn.Module, mesh: Any) -> None:
        for number, (key, parameter) in enumerate(list(module.named_parameters(recurse=False))):
            at = {
                "dp": sw.Shard(0),
                "replicate": sw.Replicate(),
                "tp": over_tp.get(name, [sw.Replicate()])[number],
            }
            placements = [at[dim] for dim in mesh.mesh_dim_names]
            module.register_parameter(key, sw.distribute_tensor(parameter, mesh, placements))

    sw.distribute_module(model, mesh, partition)


def test_right_training_is_accepted_on_several_meshes() -> None:
    comparisons = same_as_one_rank(Tied, TOKENS, fully_sharded, mesh=MESHES)
    assert [comparison.mesh for comparison in comparisons] == ["replicate=2", "dp=2", "dp=2, tp=2"]
    for comparison in comparisons:
        assert set(comparison.largest) == {"loss", "gradient", "gradient norm", "parameter"}
        assert max(comparison.largest.values()) < 1e-12


def test_clipping_adam_accumulation_and_ragged_batches_are_compared() -> None:
    def accumulate(model: nn.Module, batch: Any) -> Tensor:
        total = torch.zeros(())
        for micro in batch:
            loss = model(micro) / len(batch)
            loss.backward()
            total = total + loss.detach()
        return total

    same_as_one_rank(
        Tied,
        [TOKENS[:5], TOKENS[2:5]],
        fully_sharded,
        mesh={"dp": 2},
        step=accumulate,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
        steps=3,
        max_norm=0.1,
    )


def test_dropout_is_compared_with_a_world_of_one() -> None:
    def model() -> nn.Module:
        return Tied(dropout=0.5)

    same_as_one_rank(model, TOKENS, fully_sharded, mesh=MESHES, reference="shardwright")
    with pytest.raises(TrainingMismatchError):
        same_as_one_rank(model, TOKENS, fully_sharded, mesh={"dp": 2})


def test_float32_is_compared_within_its_rounding() -> None:
    same_as_one_rank(Tied, TOKENS, fully_sharded, mesh={"dp": 2}, dtype=torch.float32)


# --- mutants: each changes what one collective of the backward pass returns, or the model ---------------------------

Execute = Callable[[Any, Tensor], Tensor]


def dropped(execute: Execute, plan: Any, local: Tensor) -> Tensor:
    """Sum only what the first rank contributes."""
    return execute(plan, local if comm.rank() == 0 else torch.zeros_like(local))


def twice(execute: Execute, plan: Any, local: Tensor) -> Tensor:
    return execute(plan, local) * 2


def divided(execute: Execute, plan: Any, local: Tensor) -> Tensor:
    return execute(plan, local) / plan.source.mesh.shape[0]


def swapped(execute: Execute, plan: Any, local: Tensor) -> Tensor:
    """Give each rank the shard of the rank across the mesh, if the shards have one size."""
    mine = execute(plan, local)
    shapes = {plan.target.local_shape(rank) for rank in range(comm.world().size)}
    if len(shapes) > 1:
        return mine
    every = comm.all_gather(mine[None].contiguous())
    return every[comm.world().size - 1 - comm.rank()].clone()


def mutated_step(mutant: Callable[..., Tensor], only: int) -> Callable[[nn.Module, Any], Tensor]:
    """Return a step whose backward pass has its reduction number `only` changed by the mutant."""

    def step(model: nn.Module, batch: Any) -> Tensor:
        from shardwright.tensor.redistribute import autograd

        execute, count = autograd.execute, 0

        def mutated(plan: Any, local: Tensor) -> Tensor:
            nonlocal count
            if not any(placement.is_partial() for placement in plan.source.placements):
                return execute(plan, local)
            count += 1
            return mutant(execute, plan, local) if count == only + 1 else execute(plan, local)

        loss = model(batch)
        if isinstance(loss, sw.DTensor):
            with mock.patch(EXECUTE, mutated):
                loss.backward()
            assert count > only, f"the backward pass has only {count} reductions"
        else:
            loss.backward()
        return loss.detach()

    return step


@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("only", [0, 2])
@pytest.mark.parametrize("mutant", [dropped, twice, divided, swapped], ids=lambda mutant: mutant.__name__)
def test_a_wrong_reduction_is_reported(mesh: dict[str, int], only: int, mutant: Callable[..., Tensor]) -> None:
    if mutant is swapped and "replicate" in mesh:
        pytest.skip("replicas are equal: exchanging them changes nothing")
    with pytest.raises(TrainingMismatchError, match=r"gradient of step 0: .*rank \d: largest difference"):
        same_as_one_rank(Tied, TOKENS, fully_sharded, mesh=mesh, step=mutated_step(mutant, only), steps=1)


# Of a unit: what is summed by its one reduce-scatter, on this rank.
OF_UNITS: dict[str, Callable[[Tensor], Tensor]] = {
    "dropped": lambda tensor: tensor if comm.rank() == 0 else torch.zeros_like(tensor),
    "twice": lambda tensor: tensor * 2,
    "divided": lambda tensor: tensor / 2,
    "swapped": lambda tensor: torch.cat(tensor.tensor_split(2)[::-1]),
}


@pytest.mark.parametrize("mesh", [{"dp": 2}, {"dp": 2, "tp": 2}, {"replicate": 2, "dp": 2}], ids=str)
@pytest.mark.parametrize("mutant", OF_UNITS)
def test_a_wrong_reduction_of_a_unit_is_reported(mesh: dict[str, int], mutant: str) -> None:
    def step(model: nn.Module, batch: Any) -> Tensor:
        reduce, count = comm.start_reduce_scatter_many, 0

        def mutated(tensors: Any, *args: Any, **kwargs: Any) -> Any:
            nonlocal count
            count += 1
            return reduce([OF_UNITS[mutant](tensor) for tensor in tensors], *args, **kwargs)

        loss = model(batch)
        with mock.patch.object(comm, "start_reduce_scatter_many", mutated):
            loss.backward()
        assert count == isinstance(loss, sw.DTensor)
        return loss.detach()

    with pytest.raises(TrainingMismatchError, match=r"gradient of step 0: .*rank \d: largest difference"):
        same_as_one_rank(Tied, TOKENS, mesh=mesh, step=step, steps=1)


def test_a_cut_tie_is_reported() -> None:
    def untied(model: Any, mesh: Any) -> None:
        fully_sharded(model, mesh)
        model.head.weight = nn.Parameter(model.head.weight.detach().clone())

    with pytest.raises(TrainingMismatchError) as caught:
        same_as_one_rank(Tied, TOKENS, untied, mesh={"dp": 2})
    assert "embedding.weight, head.weight: rank 0: tied on one rank, but not here" in str(caught.value)
    assert "gradient of step 0: embedding.weight: rank 0: largest difference" in str(caught.value)


def test_swapped_shards_of_a_parameter_are_reported() -> None:
    def exchanged(model: Any, mesh: Any) -> None:
        fully_sharded(model, mesh)
        weight = model.up.weight
        every = comm.all_gather(weight.to_local().detach()[None].contiguous())
        with torch.no_grad():
            weight.to_local().copy_(every[1 - comm.rank()])

    with pytest.raises(TrainingMismatchError) as caught:
        same_as_one_rank(Tied, TOKENS, exchanged, mesh={"dp": 2})
    for rank in range(2):
        assert f"parameter before training: up.weight: rank {rank}: largest difference" in str(caught.value)
    assert "parameter before training: down" not in str(caught.value)


def test_a_replica_that_differs_on_one_rank_is_reported_for_that_rank() -> None:
    def changed(model: Any, mesh: Any) -> None:
        fully_sharded(model, mesh)
        if comm.rank() == 1:
            with torch.no_grad():
                model.down.bias.to_local()[0] += 1

    with pytest.raises(TrainingMismatchError) as caught:
        same_as_one_rank(Tied, TOKENS, changed, mesh={"replicate": 2})
    assert "parameter before training: down.bias: rank 1: largest difference 1" in str(caught.value)
    assert "parameter before training: down.bias: rank 0" not in str(caught.value)


def test_a_missing_gradient_is_reported() -> None:
    def frozen(model: Any, mesh: Any) -> None:
        fully_sharded(model, mesh)
        model.up.bias.requires_grad_(False)

    with pytest.raises(TrainingMismatchError, match=r"up\.bias: rank 0: no gradient here, but one rank has one"):
        same_as_one_rank(Tied, TOKENS, frozen, mesh={"dp": 2})


def test_nan_is_reported() -> None:
    def spoiled(model: Any, mesh: Any) -> None:
        fully_sharded(model, mesh)
        model.up.bias.register_hook(lambda gradient: gradient * float("nan"))

    with pytest.raises(TrainingMismatchError, match=r"up\.bias: rank 0: largest difference nan"):
        same_as_one_rank(Tied, TOKENS, spoiled, mesh={"dp": 2}, steps=1)


def test_a_mesh_without_names_is_rejected() -> None:
    for mesh in ({}, [], [{}]):
        with pytest.raises(ArgumentTypeError, match="sizes of mesh dimensions by name"):
            same_as_one_rank(Tied, TOKENS, fully_sharded, mesh=mesh)
