"""Plain torch.optim optimizers over ShardedTensor parameters take the same steps as on unsharded tensors."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardwright import comm
from shardwright.sharded import ChunkShardingSpec, EnumerableShardingSpec, ShardedTensor, ShardingSpec, ShardMetadata
from shardwright.testing import run_ranks

SIZE = (5, 6)
STEPS = 4

Make = Callable[[list[Any]], torch.optim.Optimizer]


def _of(kind: str, **options: Any) -> Make:
    return lambda parameters: getattr(torch.optim, kind)(parameters, **options)


OPTIMIZERS: dict[str, Make] = {
    "SGD": _of("SGD", lr=0.1),
    "SGD with everything": _of("SGD", lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
    "SGD, maximizing": _of("SGD", lr=0.1, momentum=0.9, dampening=0.5, maximize=True),
    "Adam": _of("Adam"),
    "Adam with everything": _of("Adam", lr=0.01, amsgrad=True, weight_decay=0.1, maximize=True),
    "AdamW": _of("AdamW", lr=0.01),
    "AdamW, lr a tensor": _of("AdamW", lr=torch.tensor(0.01), foreach=False),
    "Adagrad": _of("Adagrad", lr_decay=0.1, weight_decay=0.1),
    "Adadelta": _of("Adadelta", weight_decay=0.1),
    "Adamax": _of("Adamax", weight_decay=0.1),
    "NAdam": _of("NAdam", decoupled_weight_decay=True, weight_decay=0.1),
    "RAdam": _of("RAdam", betas=(0.5, 0.6)),
    "RMSprop": _of("RMSprop", centered=True, momentum=0.9, weight_decay=0.1),
    "Rprop": _of("Rprop", lr=0.1),
    "ASGD": _of("ASGD", t0=2),
}


def specs() -> list[ShardingSpec]:
    last = comm.world().size - 1
    boxes = [((0, 0), (2, 6), last), ((2, 0), (3, 2), 0), ((2, 2), (3, 4), last)]
    return [
        ChunkShardingSpec(0, [f"rank:{rank}/cpu" for rank in range(last + 1)]),
        EnumerableShardingSpec([ShardMetadata(at, size, f"rank:{rank}/cpu") for at, size, rank in boxes]),
        ChunkShardingSpec(1, ["rank:0/cpu"] * 2),
    ]


def part(whole: Tensor, metadata: ShardMetadata) -> Tensor:
    return whole[metadata.region.slices(metadata.region.whole(whole.shape))]


def cut(whole: Tensor, spec: ShardingSpec) -> Any:
    made = ShardedTensor(spec, whole.shape, dtype=whole.dtype)
    for shard in made.local_shards():
        shard.tensor.copy_(part(whole, shard.metadata))
    return nn.Parameter(made)


def loss_of(parameters: list[Any], step: int) -> Tensor | None:
    """Compute elementwise gradients of plain tensors, or of this rank's shards."""
    pieces = [
        piece
        for parameter in parameters
        for piece in (
            [shard.tensor for shard in parameter.local_shards()]
            if isinstance(parameter, ShardedTensor)
            else [parameter]
        )
    ]
    terms = [((piece - 0.1) * (1 + step)).square().sum() + 0.1 * (piece**3).sum() for piece in pieces]
    return torch.stack(terms).sum() if terms else None


def train(parameters: list[Any], optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        loss = loss_of(parameters, step)
        if loss is not None:
            loss.backward()
        optimizer.step()


def compare(parameters: list[Any], wholes: list[nn.Parameter], what: str) -> None:
    for parameter, whole in zip(parameters, wholes, strict=True):
        for shard in parameter.local_shards():
            torch.testing.assert_close(
                shard.tensor, part(whole, shard.metadata), msg=lambda m: f"{what}: {m}", rtol=1e-12, atol=1e-12
            )


@pytest.mark.parametrize("count", [1, 3, 4])
def test_steps_equal_those_on_unsharded_tensors_also_after_a_state_dict(count: int) -> None:
    def on_a_rank() -> None:
        generator = torch.Generator().manual_seed(2)
        initial = [torch.randn(SIZE, dtype=torch.float64, generator=generator) for _ in specs()]
        for name, make in OPTIMIZERS.items():
            wholes = [nn.Parameter(value.clone()) for value in initial]
            parameters = [cut(value, spec) for value, spec in zip(initial, specs(), strict=True)]
            plain, ours = make(wholes), make(parameters)
            with comm.count() as traffic:
                train(wholes, plain, range(STEPS))
                train(parameters, ours, range(STEPS))
            assert not traffic.calls  # each shard has its own
            compare(parameters, wholes, name)
            assert all(parameter.is_leaf and parameter.requires_grad for parameter in parameters)
            # A second optimizer that takes over the state goes on as the first would have.
            state = copy.deepcopy(ours.state_dict())
            ours = make(parameters)
            ours.load_state_dict(state)
            train(wholes, plain, range(STEPS, STEPS + 2))
            train(parameters, ours, range(STEPS, STEPS + 2))
            compare(parameters, wholes, f"{name}, resumed")

    run_ranks(count, on_a_rank)


def test_the_state_of_a_parameter_has_its_sharding() -> None:
    def on_a_rank() -> None:
        for spec in specs():
            weight = cut(torch.ones(SIZE), spec)
            optimizer = torch.optim.Adam([weight])
            train([weight], optimizer, range(1))
            for moment in (optimizer.state[weight].get(name) for name in ("exp_avg", "exp_avg_sq")):
                if weight.local_shards():
                    assert isinstance(moment, ShardedTensor)
                    assert moment.metadata().shards_metadata == weight.metadata().shards_metadata

    run_ranks(3, on_a_rank)
