"""Sharded `linear` equals torch's in values and gradients for every tiling of the weight, with minimal traffic."""

from __future__ import annotations

import random
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

from shardwright import comm, sharded
from shardwright.errors import DisagreementError, RankFailedError, ShardError, ShardwrightError
from shardwright.testing import run_ranks
from tests.sharded.tilings import random_tiling

RANKS = 4
CLOSE = {"rtol": 1e-10, "atol": 1e-12}


class Case(NamedTuple):
    """A weight, a bias, the shards of both, the leading sizes of each rank's batch, and who wants gradients."""

    seed: int
    shape: tuple[int, int]
    tiling: list[sharded.ShardMetadata]
    bias: str
    bias_tiling: list[sharded.ShardMetadata]
    batches: list[tuple[int, ...]]
    weight_requires_grad: bool
    inputs_require_grad: list[bool]

    def tensors(self) -> tuple[Tensor, list[Tensor], list[Tensor]]:
        """The weight, the ranks' inputs, the ranks' biases: leaves."""
        generator = torch.Generator().manual_seed(self.seed)

        def draw(*size: int) -> Tensor:
            return torch.randn(size, dtype=torch.float64, generator=generator)

        weight = draw(*self.shape).requires_grad_(self.weight_requires_grad)
        inputs = [
            draw(*batch, self.shape[1]).requires_grad_(wanted)
            for batch, wanted in zip(self.batches, self.inputs_require_grad, strict=True)
        ]
        biases = [draw(self.shape[0]).requires_grad_() for _ in range(RANKS)]
        return weight, inputs, [biases[0]] * RANKS if self.bias == "sharded" else biases


def sharded_like(whole: Tensor, tiling: list[sharded.ShardMetadata]) -> sharded.ShardedTensor:
    spec = sharded.EnumerableShardingSpec(tiling)
    made = sharded.empty(spec, *whole.shape, dtype=whole.dtype, requires_grad=whole.requires_grad)
    with torch.no_grad():
        for shard in made.local_shards():
            shard.tensor.copy_(whole[shard.metadata.region.slices()])
    return made


def compare(case: Case, rank: int) -> None:
    weight, inputs, biases = case.tensors()
    none = case.bias == "none"
    outs = [functional.linear(x, weight, None if none else bias) for x, bias in zip(inputs, biases, strict=True)]
    losses = sum(out.square().sum() for out in outs)
    if losses.requires_grad:
        losses.backward()
    own = inputs[rank].detach().requires_grad_(inputs[rank].requires_grad)
    ours = sharded_like(weight, case.tiling)
    bias: Any = None if none else biases[rank].detach().requires_grad_()
    if case.bias == "sharded":
        bias = sharded_like(biases[0], case.bias_tiling)
    out = functional.linear(own, ours, bias)
    assert type(out) is Tensor
    if out.requires_grad:
        out.square().sum().backward()
    torch.testing.assert_close(out, outs[rank], **CLOSE)
    torch.testing.assert_close(own.grad, inputs[rank].grad, **CLOSE)
    sides = [(ours, weight)] if case.weight_requires_grad else []
    if case.bias == "sharded":
        sides.append((bias, biases[0]))
    elif not none:
        torch.testing.assert_close(bias.grad, biases[rank].grad, **CLOSE)
    for tensor, whole in sides:
        for shard in tensor.local_shards():
            torch.testing.assert_close(shard.tensor.grad, whole.grad[shard.metadata.region.slices()], **CLOSE)


def all_of(cases: list[Case]) -> list[str]:
    wrong = []
    for case in cases:
        try:
            compare(case, comm.rank())
        except Exception as error:  # noqa: BLE001  # every case is tried, then all are reported
            wrong.append(f"{case}: {type(error).__name__}: {error}")
    return wrong


@st.composite
def weights(draw: st.DrawFn) -> Case:
    shape = draw(st.tuples(st.integers(1, 7), st.integers(1, 7)))
    rng = random.Random(draw(st.integers(0, 10**6)))
    batch = st.lists(st.integers(0, 3), max_size=2).map(tuple)
    return Case(
        draw(st.integers(0, 99)),
        shape,
        random_tiling(rng, shape, RANKS),
        draw(st.sampled_from(["none", "plain", "sharded"])),
        random_tiling(rng, shape[:1], RANKS),
        draw(st.lists(batch, min_size=RANKS, max_size=RANKS)),
        draw(st.booleans()),
        draw(st.lists(st.booleans(), min_size=RANKS, max_size=RANKS)),
    )


@given(st.lists(weights(), min_size=1, max_size=12))
def test_linear_equals_torch_for_any_tiling_batches_and_gradients(cases: list[Case]) -> None:
    wrong = [text for said in run_ranks(RANKS, all_of, cases) for text in said]
    assert not wrong, f"{len(wrong)} wrong:\n" + "\n".join(wrong[:4])


def test_each_owner_receives_its_columns_of_the_batch_once_and_returns_one_sum() -> None:
    rng = random.Random(3)
    tilings = [random_tiling(rng, (12, 10), RANKS) for _ in range(12)]

    def held(tiling: list[sharded.ShardMetadata], rank: int, dim: int) -> int:
        """How many rows or columns a rank holds something of."""
        ours = [s for s in tiling if s.placement.rank() == rank and 0 not in s.shard_sizes]
        return len({i for s in ours for i in range(s.shard_offsets[dim], s.shard_offsets[dim] + s.shard_sizes[dim])})

    def on_a_rank() -> list[tuple[int, int]]:
        rank, found = comm.rank(), []
        for tiling in tilings:
            weight = sharded.ones(sharded.EnumerableShardingSpec(tiling), 12, 10, dtype=torch.float64)
            with comm.count() as traffic:
                functional.linear(torch.ones(rank + 1, 10, dtype=torch.float64), weight)
            others = [other for other in range(RANKS) if other != rank]
            batches = sum(other + 1 for other in others) * held(tiling, rank, 1)
            sums = (rank + 1) * sum(held(tiling, other, 0) for other in others)
            found.append((traffic.received["exchange"], (batches + sums) * 8))
        return found

    pairs = [pair for found in run_ranks(RANKS, on_a_rank) for pair in found]
    assert [received for received, _ in pairs] == [due for _, due in pairs]
    assert any(received for received, _ in pairs)


def test_gradients_are_differentiable_also_on_a_rank_without_shards() -> None:
    boxes = [([0, 0], [3, 2], 0), ([0, 2], [3, 3], 1), ([3, 0], [2, 5], 3)]
    tiling = [sharded.ShardMetadata(offsets, sizes, f"rank:{rank}/cpu") for offsets, sizes, rank in boxes]

    def on_a_rank() -> None:
        generator = torch.Generator().manual_seed(0)
        weight = torch.randn(5, 5, dtype=torch.float64, generator=generator).requires_grad_()
        inputs = [torch.randn(rank, 5, dtype=torch.float64, generator=generator).requires_grad_() for rank in range(4)]
        loss = sum(functional.linear(x, weight).pow(3).sum() for x in inputs)
        slopes = torch.autograd.grad(loss, [weight, *inputs], create_graph=True)
        sum(slope.square().sum() for slope in slopes).backward()
        ours, own = sharded_like(weight, tiling), inputs[comm.rank()].detach().requires_grad_()
        leaves = [own, *(shard.tensor for shard in ours.local_shards())]
        slopes = torch.autograd.grad(functional.linear(own, ours).pow(3).sum(), leaves, create_graph=True)
        sum(slope.square().sum() for slope in slopes).backward()
        torch.testing.assert_close(own.grad, inputs[comm.rank()].grad, **CLOSE)
        for shard in ours.local_shards():
            torch.testing.assert_close(shard.tensor.grad, weight.grad[shard.metadata.region.slices()], **CLOSE)

    run_ranks(RANKS, on_a_rank)


def test_backward_through_stacked_layers_runs_in_the_same_order_on_all_ranks() -> None:
    # Rank 2 holds nothing and has an empty batch; the table is looked up twice.
    rng = random.Random(1)
    owners = (0, 1, 3)
    tilings = [
        [
            sharded.ShardMetadata(one.shard_offsets, one.shard_sizes, f"rank:{owners[one.placement.rank()]}/cpu")
            for one in random_tiling(rng, shape, len(owners))
        ]
        for shape in ((9, 4), (5, 4), (3, 5))
    ]
    inputs = [torch.arange(count) % 9 for count in (4, 7, 0, 12)]

    def network(indices: Tensor, table: Any, first: Any, second: Any) -> Tensor:
        embedded = functional.embedding(indices, table) * functional.embedding(8 - indices, table)
        return functional.linear(functional.linear(embedded, first).tanh(), second).square().sum()

    def on_a_rank() -> None:
        generator = torch.Generator().manual_seed(0)
        wholes = [
            torch.randn(shape, dtype=torch.float64, generator=generator).requires_grad_()
            for shape in ((9, 4), (5, 4), (3, 5))
        ]
        sum(network(indices, *wholes) for indices in inputs).backward()
        ours = [sharded_like(whole, tiling) for whole, tiling in zip(wholes, tilings, strict=True)]
        network(inputs[comm.rank()], *ours).backward()
        for tensor, whole in zip(ours, wholes, strict=True):
            for shard in tensor.local_shards():
                torch.testing.assert_close(shard.tensor.grad, whole.grad[shard.metadata.region.slices()], **CLOSE)

    run_ranks(RANKS, on_a_rank)


def test_an_unmodified_module_works_also_under_autocast() -> None:
    def on_a_rank() -> None:
        torch.manual_seed(0)
        module, x = nn.Linear(6, 5), torch.randn(3, 6)
        with torch.autocast("cpu", torch.bfloat16):
            low = module(x)
        high = module(x)
        placements = [f"rank:{rank}/cpu" for rank in (0, 1, 3, 0, 1)]
        module.weight = nn.Parameter(sharded.ChunkShardingSpec(0, placements).shard(module.weight.detach()))
        torch.testing.assert_close(module(x), high)
        with torch.autocast("cpu", torch.bfloat16):
            out = module(x)
        assert out.dtype == torch.bfloat16
        torch.testing.assert_close(out, low, rtol=2e-2, atol=2e-2)
        out.float().sum().backward()
        expected = (RANKS * x.sum(0)).expand(5, 6)
        for shard in module.weight.local_shards():
            torch.testing.assert_close(
                shard.tensor.grad, expected[shard.metadata.region.slices()], rtol=2e-2, atol=2e-2
            )

    run_ranks(RANKS, on_a_rank)


def test_invalid_arguments_on_one_rank_raise_on_all() -> None:
    wrong: list[tuple[Any, Any, str]] = [
        (torch.ones(2, 5), None, r"must be 6 for a weight of size \[4, 6\], got size \[2, 5\]"),
        (torch.tensor(1.0), None, r"got size \[\]"),
        (torch.ones(6), torch.ones(5), r"the bias must have size \[4\] on cpu, got \[5\] on cpu"),
    ]

    def on_a_rank() -> list[str]:
        weight = sharded.ones(sharded.ChunkShardingSpec(1, [f"rank:{rank}/cpu" for rank in (0, 1, 3)]), 4, 6)
        said = []
        for x, bias, _ in wrong:
            x, bias = (x, bias) if comm.rank() == 2 else (torch.ones(6), None)
            with pytest.raises(RankFailedError) as caught:
                functional.linear(x, weight, bias)
            assert caught.value.rank == 2
            said.append(str(caught.value))
        with (
            pytest.raises(
                DisagreementError, match=r"rank 0 has .*torch\.float32, no.*rank 1 has .*torch\.bfloat16, no"
            ),
            torch.autocast("cpu", torch.bfloat16),
        ):
            functional.linear(torch.ones(6, dtype=torch.bfloat16 if comm.rank() == 1 else torch.float32), weight)
        with pytest.raises(ShardError, match=r"the input is torch\.float64, but the weight is torch\.float32"):
            functional.linear(torch.ones(6, dtype=torch.float64), weight)
        torch.testing.assert_close(functional.linear(torch.ones(6), weight), torch.full((4,), 6.0))
        return said

    for said in run_ranks(RANKS, on_a_rank):
        for text, (*_, expected) in zip(said, wrong, strict=True):
            with pytest.raises(ShardwrightError, match=expected):
                raise ShardwrightError(text)
