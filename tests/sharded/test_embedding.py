"""Sharded `embedding` and `embedding_bag` equal torch's in values and gradients, for every tiling and argument."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

from shardwright import comm, sharded
from shardwright.errors import (
    CommError,
    DisagreementError,
    RankFailedError,
    ShardError,
    ShardwrightError,
    UnsupportedError,
)
from shardwright.sharded.ops import rows
from shardwright.testing import run_ranks
from tests.sharded.tilings import random_tiling

RANKS = 4


@dataclass(frozen=True)
class Case:
    """A table, its shards, what each rank looks up in it, and how. Bags are lists of indices; without, mode is None."""

    seed: int
    shape: tuple[int, int]
    tiling: tuple[sharded.ShardMetadata, ...]
    bags: tuple[tuple[tuple[int, ...], ...], ...]
    mode: str | None = None
    options: dict[str, Any] = field(default_factory=dict)
    weighted: bool = False
    include_last_offset: bool = False
    two_dimensional: bool = False
    dtype: torch.dtype = torch.int64

    @property
    def whole(self) -> Tensor:
        return torch.randn(self.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(self.seed))

    def input_of(self, rank: int) -> Tensor:
        flat = torch.tensor([index for bag in self.bags[rank] for index in bag], dtype=self.dtype)
        return flat.view(len(self.bags[rank]), -1) if self.two_dimensional else flat

    def weights_of(self, rank: int) -> Tensor | None:
        """The weight of each sample, a leaf."""
        if not self.weighted:
            return None
        made = torch.linspace(-1, 2, self.input_of(rank).numel(), dtype=torch.float64)
        return made.view(self.input_of(rank).shape).requires_grad_()

    def seed_of(self, out: Tensor, rank: int) -> Tensor:
        """What the loss of a rank weighs its result with."""
        generator = torch.Generator().manual_seed(self.seed + rank)
        return torch.randn(out.shape, dtype=out.dtype, generator=generator)

    def call(self, rank: int, table: Any, weights: Tensor | None) -> Tensor:
        """What a rank calls."""
        if self.mode is None:
            return functional.embedding(self.input_of(rank), table, **self.options)
        lengths = [len(bag) for bag in self.bags[rank]]
        offsets = np.cumsum([0, *lengths])[: None if self.include_last_offset else -1]
        return functional.embedding_bag(
            self.input_of(rank),
            table,
            None if self.two_dimensional else torch.tensor(offsets.tolist(), dtype=self.dtype),
            mode=self.mode,
            per_sample_weights=weights,
            include_last_offset=self.include_last_offset,
            **self.options,
        )

    def everything(self) -> Case:
        """All ranks' bags as those of one rank."""
        bags = (tuple(bag for one in self.bags for bag in one),)
        return replace(self, bags=bags, two_dimensional=False, include_last_offset=False)


def reference(case: Case) -> tuple[Tensor, list[Tensor], Tensor, list[Tensor | None]]:
    """Compute table, results and gradients in one process with the full table and all batches, by rank."""
    table, one = case.whole.requires_grad_(), case.everything()
    divided = case.mode is not None and case.options.get("scale_grad_by_freq", False)
    if divided:  # torch 2.13 divides gradients of bags by the frequency of another row: its own divisor is not used
        one = replace(
            one, options={name: value for name, value in case.options.items() if name != "scale_grad_by_freq"}
        )
    weights = [case.weights_of(rank) for rank in range(RANKS)]
    flat = torch.cat([each.reshape(-1) for each in weights if each is not None]) if case.weighted else None
    out = one.call(0, table, flat)
    sizes = [len(bags) if case.mode else sum(map(len, bags)) for bags in case.bags]
    outs = list(out.split(sizes))
    sum((piece * case.seed_of(piece, rank)).sum() for rank, piece in enumerate(outs)).backward()
    assert table.grad is not None
    gradient = table.grad.to_dense()
    if divided:
        gradient = gradient / torch.bincount(one.input_of(0), minlength=case.shape[0]).clamp(min=1)[:, None]
    return table.detach(), outs, gradient, [None if w is None else w.grad for w in weights]


def shards_of(case: Case) -> sharded.ShardedTensor:
    """The table of a case, sharded."""
    spec = sharded.EnumerableShardingSpec(list(case.tiling))
    table = sharded.empty(spec, *case.shape, dtype=torch.float64, requires_grad=True)
    with torch.no_grad():
        for shard in table.local_shards():
            shard.tensor.copy_(case.whole[shard.metadata.region.slices()])
    return table


def compare(case: Case, rank: int) -> None:
    table, outs, gradient, weight_gradients = reference(case)
    ours, weights = shards_of(case), case.weights_of(rank)
    out = case.call(rank, ours, weights)
    assert type(out) is Tensor
    (out * case.seed_of(outs[rank], rank).view(out.shape)).sum().backward()
    torch.testing.assert_close(out.flatten(0, -2), outs[rank], rtol=1e-10, atol=1e-12)
    scaled = replace(case, options=case.options | {"max_norm": None})  # the table is, and a norm of order 0 never ends
    torch.testing.assert_close(scaled.call(rank, table, weights), out, rtol=1e-10, atol=1e-12)  # its own input alone
    for shard in ours.local_shards():
        here = shard.metadata.region.slices()
        torch.testing.assert_close(shard.tensor, table[here], rtol=1e-10, atol=1e-12)
        assert shard.tensor.grad is not None
        assert shard.tensor.grad.is_sparse == bool(case.options.get("sparse"))
        torch.testing.assert_close(shard.tensor.grad.to_dense(), gradient[here], rtol=1e-10, atol=1e-12)
    if weights is not None and weights.numel():
        torch.testing.assert_close(weights.grad, weight_gradients[rank], rtol=1e-10, atol=1e-12)


def all_of(cases: list[Case]) -> list[str]:
    wrong = []
    for case in cases:
        try:
            compare(case, comm.rank())
        except Exception as error:  # noqa: BLE001  # every case is tried, then all are reported
            wrong.append(f"{case}: {type(error).__name__}: {error}")
    return wrong


def check(cases: list[Case]) -> None:
    wrong = [text for said in run_ranks(RANKS, all_of, cases) for text in said]
    assert not wrong, f"{len(wrong)} wrong:\n" + "\n".join(wrong[:4])


@st.composite
def tables(draw: st.DrawFn, **given: Any) -> Case:
    """Strategy: a table with its tiling, the indices of each rank, and options of both functions."""
    shape = draw(st.tuples(st.integers(1, 9), st.integers(1, 6)))
    tiling = random_tiling(random.Random(draw(st.integers(0, 10**6))), shape, RANKS)
    bag = st.lists(st.integers(0, shape[0] - 1), max_size=4).map(tuple)
    bags = st.lists(st.one_of(st.just(()), st.lists(bag, max_size=4).map(tuple)), min_size=RANKS, max_size=RANKS)
    options: dict[str, Any] = {}
    if draw(st.booleans()):
        options["padding_idx"] = draw(st.integers(-shape[0], shape[0] - 1))
    if draw(st.booleans()):
        options["max_norm"] = draw(st.sampled_from([0.5, 1.0, 2.0]))
        options["norm_type"] = draw(st.sampled_from([1, 2.0, 3.5, float("inf"), 0, -1.0]))
    if given.get("mode") != "max":
        options |= draw(st.sampled_from([{}, {"sparse": True}, {"scale_grad_by_freq": True}]))
    return Case(
        draw(st.integers(0, 99)),
        shape,
        tuple(tiling),
        tuple(draw(bags)),
        options=options,
        dtype=draw(st.sampled_from([torch.int64, torch.int32])),
        **given,
    )


@st.composite
def bags(draw: st.DrawFn) -> Case:
    """The same, in bags: by offsets, or as rows of equal length."""
    mode = draw(st.sampled_from(["sum", "mean", "max"]))
    case = draw(tables(mode=mode))
    if mode == "sum":
        case = replace(case, weighted=draw(st.booleans()))
    if draw(st.integers(0, 3)) == 0:
        length = draw(st.integers(1, 3))
        equal = tuple(
            tuple((*bag, *range(length))[:length] for bag in one) if case.shape[0] >= length else ()
            for one in case.bags
        )
        if all(equal):  # torch cannot tell the length of rows of an empty input from its flat list
            return replace(case, bags=equal, two_dimensional=True)
    return replace(case, include_last_offset=draw(st.booleans()))


@given(st.lists(tables(), min_size=1, max_size=12))
def test_embedding_equals_torch_for_any_tiling_and_arguments(cases: list[Case]) -> None:
    check(cases)


@given(st.lists(bags(), min_size=1, max_size=12))
def test_embedding_bag_equals_torch_for_any_tiling_and_arguments(cases: list[Case]) -> None:
    check(cases)


def test_scale_grad_by_freq_equals_torch_where_its_divisor_is_right() -> None:
    # It is, where the only index that occurs twice is the largest: 8, on ranks 1 and 3.
    inputs = [torch.tensor(indices, dtype=torch.int64) for indices in ([0, 2], [8, 3, 8], [], [5, 8, 8])]

    def on_a_rank() -> None:
        for mode in ("sum", "mean"):
            whole = torch.zeros(9, 4, dtype=torch.float64, requires_grad=True)
            bags, offsets = torch.cat(inputs), torch.tensor([0, 2, 5, 5])
            functional.embedding_bag(bags, whole, offsets, mode=mode, scale_grad_by_freq=True).sum().backward()
            table = sharded.ChunkShardingSpec(1, [f"rank:{rank}/cpu" for rank in (3, 1, 0)]).shard(whole)
            functional.embedding_bag(
                inputs[comm.rank()], table, torch.tensor([0]), mode=mode, scale_grad_by_freq=True
            ).sum().backward()
            for shard in table.local_shards():
                torch.testing.assert_close(shard.tensor.grad, whole.grad[shard.metadata.region.slices()])

    run_ranks(RANKS, on_a_rank)


def test_input_shapes_are_kept_and_unmodified_modules_work() -> None:
    def on_a_rank() -> None:
        rank = comm.rank()
        torch.manual_seed(0)
        plain, bag = nn.Embedding(10, 3, padding_idx=2), nn.EmbeddingBag(10, 3, mode="mean", include_last_offset=True)
        for module, given_to in (
            (plain, [(torch.randint(10, (2, rank, 3)),) for rank in range(RANKS)]),
            (bag, [(torch.randint(10, (5,)), torch.tensor([0, rank, 5])) for rank in range(RANKS)]),
        ):
            whole = module.weight.detach().clone()
            outs = [module(*each) for each in given_to]
            sum(out.square().sum() for out in outs).backward()
            expected = module.weight.grad.clone()
            placements = [f"rank:{rank}/cpu" for rank in (0, 1, 3, 0, 1)]
            module.weight = nn.Parameter(sharded.ChunkShardingSpec(0, placements).shard(whole))
            out = module(*given_to[rank])
            out.square().sum().backward()
            torch.testing.assert_close(out, outs[rank])
            for shard in module.weight.local_shards():
                torch.testing.assert_close(shard.tensor.grad, expected[shard.metadata.region.slices()])

    run_ranks(RANKS, on_a_rank)


def test_a_rank_receives_only_the_missing_pieces_of_its_distinct_rows() -> None:
    rng = random.Random(5)
    tilings = [random_tiling(rng, (40, 6), RANKS) for _ in range(12)]

    def on_a_rank() -> list[tuple[int, int]]:
        rank, found = comm.rank(), []
        for number, tiling in enumerate(tilings):
            table = sharded.ones(sharded.EnumerableShardingSpec(tiling), 40, 6, dtype=torch.float64)
            indices = torch.randint(40, (30,), generator=torch.Generator().manual_seed(number * RANKS + rank))
            with comm.count() as traffic:
                functional.embedding(indices, table)
            held = torch.zeros(40, 6, dtype=torch.bool)
            for shard in table.local_shards():
                held[shard.metadata.region.slices()] = True
            found.append((traffic.received["exchange"], int((~held)[indices.unique()].sum()) * 8))
        return found

    pairs = [pair for found in run_ranks(RANKS, on_a_rank) for pair in found]
    assert [received for received, _ in pairs] == [due for _, due in pairs]
    assert any(received for received, _ in pairs)


def test_gradients_are_differentiable() -> None:
    # The shard of rank 2 is empty, and rank 3 looks nothing up.
    boxes = [([0, 0], [4, 2], 0), ([0, 2], [4, 2], 1), ([4, 0], [5, 4], 3), ([9, 0], [0, 4], 2)]
    tiling = [sharded.ShardMetadata(offsets, sizes, f"rank:{rank}/cpu") for offsets, sizes, rank in boxes]
    inputs = [torch.tensor(indices, dtype=torch.int64) for indices in ([1, 1, 7], [1, 5], [0, 8, 8], [])]

    def on_a_rank() -> None:
        whole = torch.randn(9, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).requires_grad_()
        loss = functional.embedding(torch.cat(inputs), whole).pow(3).sum()
        (slope,) = torch.autograd.grad(loss, whole, create_graph=True)
        slope.square().sum().backward()
        table = sharded.EnumerableShardingSpec(tiling).shard(whole.detach()).requires_grad_()
        ours = functional.embedding(inputs[comm.rank()], table).pow(3).sum()
        slopes = torch.autograd.grad(ours, [shard.tensor for shard in table.local_shards()], create_graph=True)
        sum(slope.square().sum() for slope in slopes).backward()
        for shard in table.local_shards():
            torch.testing.assert_close(shard.tensor.grad, whole.grad[shard.metadata.region.slices()])

    run_ranks(RANKS, on_a_rank)


def test_invalid_arguments_on_one_rank_raise_on_all() -> None:
    i, w = torch.tensor([0, 3, 1]), torch.ones(3)
    bag, embed = functional.embedding_bag, functional.embedding
    wrong: list[tuple[Any, tuple[Any, ...], dict[str, Any], str]] = [
        (
            embed,
            (torch.tensor([[0, 1], [9, 2]]),),
            {},
            r"index 9 at \[1, 0\] of the input is out of range for a table of size \[9, 4\]",
        ),
        (embed, (torch.tensor([2, -1]),), {}, r"index -1 at \[1\] of the input"),
        (embed, (torch.ones(2),), {}, "the input must be torch.int32 or torch.int64, got torch.float32"),
        (embed, ([1, 2],), {}, "the input must be a plain tensor of indices, got list"),
        (embed, (i,), {"padding_idx": 9}, "padding_idx 9 is out of range for a table of 9 rows"),
        (bag, (torch.tensor([9]), torch.tensor([0])), {}, r"index 9 at \[0\] of the input"),
        (bag, (i.view(1, 3), torch.tensor([0])), {}, "offsets has to be None"),
        (bag, (i,), {}, "offsets has to be a 1D Tensor"),
        (bag, (i, torch.tensor([0.0])), {}, "offsets must be torch.int32 or torch.int64, got torch.float32"),
        (bag, (i, torch.tensor([1, 2])), {}, r"offsets\[0\] must be 0, got 1"),
        (bag, (i, torch.tensor([0, 2, 1])), {}, r"offsets\[2\] is 1 and offsets\[1\] is 2"),
        (bag, (i, torch.tensor([0, 4])), {}, r"offsets\[1\] is 4, but the input has only 3 indices"),
        (bag, (i, torch.tensor([0])), {"mode": "sum", "per_sample_weights": w[:2]}, "must have the same shape"),
        (bag, (i, torch.tensor([0])), {"mode": "mean", "per_sample_weights": w}, "only supported for mode='sum'"),
        (bag, (i, torch.tensor([0])), {"mode": "median"}, "mode has to be one of sum, mean or max"),
    ]

    def on_a_rank() -> list[str]:
        table = sharded.ones(sharded.ChunkShardingSpec(0, [f"rank:{rank}/cpu" for rank in (0, 1, 3)]), 9, 4)
        said = []
        for function, (given_input, *rest), options, _ in wrong:
            fine = (torch.tensor([1]), table, torch.tensor([0])) if function is bag else (torch.tensor([1]), table)
            with pytest.raises(RankFailedError) as caught:
                function(given_input, table, *rest, **options) if comm.rank() == 2 else function(*fine)
            assert caught.value.rank == 2
            said.append(str(caught.value))
        torch.testing.assert_close(functional.embedding(torch.tensor([comm.rank()]), table), torch.ones(1, 4))
        return said

    for said in run_ranks(RANKS, on_a_rank):
        for text, (*_, expected) in zip(said, wrong, strict=True):
            with pytest.raises(ShardwrightError, match=expected):
                raise ShardwrightError(text)


def test_different_arguments_on_ranks_raise_on_all() -> None:
    def on_a_rank() -> None:
        rank, index = comm.rank(), torch.tensor([0])
        table = sharded.ones(sharded.ChunkShardingSpec(0, ["rank:0/cpu", "rank:1/cpu"]), 8, 4)
        with pytest.raises(DisagreementError, match=r"rank 0 has .*max_norm=None.*rank 1 has .*max_norm=1\.0"):
            functional.embedding(index, table, max_norm=1.0 if rank else None)
        with pytest.raises(CommError, match=r"rank 0 is in 'embedding .*rank 1 in 'linear"):
            functional.linear(torch.ones(4), table) if rank else functional.embedding(index, table)
        table.requires_grad_()
        with torch.set_grad_enabled(rank == 0), pytest.raises(DisagreementError, match=r"rank 1 has .*no gradient"):
            functional.embedding(index, table)

    run_ranks(2, on_a_rank)


def test_a_table_must_be_a_matrix_and_the_input_plain() -> None:
    spec = sharded.ChunkShardingSpec(0, ["rank:0/cpu"])
    with pytest.raises(ShardError, match=r"must have two dimensions, got a ShardedTensor of size \[4\]"):
        functional.embedding(torch.tensor([0]), sharded.ones(spec, 4))
    with pytest.raises(UnsupportedError, match="got a weight of type Tensor"):
        functional.embedding(sharded.ones(spec, 4), torch.ones(2, 2))


def test_lookups_are_the_same_when_counts_go_through_all_to_all() -> None:
    def on_rank() -> None:
        spec = sharded.ChunkShardingSpec(0, ["rank:0/cpu", "rank:2/cpu", "rank:0/cpu"])
        table = sharded.rand(spec, 7, 2, requires_grad=True)
        indices = torch.arange(comm.rank() * 2)
        found = functional.embedding(indices, table)
        with mock.patch.object(rows, "_MAX_GATHERED_RANKS", 1):
            again = functional.embedding(indices, table)
        assert torch.equal(found, again)
        again.sum().backward()

    run_ranks(3, on_rank)
