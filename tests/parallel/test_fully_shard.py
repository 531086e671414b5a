"""`fully_shard` trains as plain torch does on the batches of all ranks, with the collectives and memory it promises."""

from __future__ import annotations

import copy
import time

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

import shardwright as sw
from shardwright import comm
from shardwright.testing import run_ranks
from tests.parallel.models import batch, loss_of, make, train_on_one_rank

EXACT = 1e-9


def world():
    return comm.world().size


def shard(model, **options):
    """Shard every block and the model, as scripts do."""
    mesh = options.pop("mesh", None) or sw.init_device_mesh("cpu", (world(),))
    for block in model.blocks:
        sw.fully_shard(block, mesh=mesh, **options)
    return sw.fully_shard(model, mesh=mesh, **options)


def mean_over_ranks(value):
    return (comm.all_reduce(value.detach().clone()) / world()).item()


def difference(model, gradients):
    """Return the largest difference of gradients; every parameter has one exactly where the reference has."""
    found = {name: p.grad.full_tensor() for name, p in model.named_parameters() if p.grad is not None}
    assert found.keys() == gradients.keys()
    return max((found[name] - gradients[name]).abs().max().item() for name in gradients)


def train(model, reference, steps=2):
    """Train as the reference was trained, and compare; return the traffic of each step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=True)
    traffic = []
    for step in range(steps):
        loss, norm, gradients = reference[step]
        with comm.count() as forward:
            found = loss_of(model, batch(comm.rank(), step))
        with comm.count() as backward:
            found.backward()
        assert difference(model, gradients) < EXACT
        assert abs(mean_over_ranks(found) - loss) < EXACT
        assert abs(nn.utils.clip_grad_norm_(model.parameters(), 0.5).item() - norm) < EXACT
        optimizer.step()
        optimizer.zero_grad()
        traffic.append((forward, backward))
    return traffic


def trained_alike(**options):
    def body():
        shards = shard(make(**options))
        return [
            [dict(part.calls) for part in step] for step in train(shards, train_on_one_rank(make(**options), world()))
        ]

    return body


@pytest.mark.parametrize("size", [1, 2, 4])
def test_training_equals_plain_torch_and_counts_the_textbook_collectives(size):
    for options in ({}, {"tied": True}):
        for steps in run_ranks(size, trained_alike(**options)):
            for forward, backward in steps:
                assert forward == ({"all_gather": 4} if size > 1 else {})
                assert backward == ({"all_gather": 3, "reduce_scatter": 4} if size > 1 else {})


@pytest.mark.parametrize("mode", ["reentrant", "non-reentrant"])
def test_activation_checkpointing_gathers_each_unit_once_in_recomputation(mode):
    for steps in run_ranks(2, trained_alike(checkpointing=mode)):
        for forward, backward in steps:
            assert forward == {"all_gather": 4}
            assert backward == {"all_gather": 3, "reduce_scatter": 4}


def test_only_the_unpadded_bytes_are_sent():
    def body():
        model = shard(make())
        total = sum(p.numel() * 8 for p in model.parameters())
        root = sum(p.numel() * 8 for name, p in model.named_parameters() if not name.startswith("blocks"))
        mine = sum(p.to_local().numel() * 8 for p in model.parameters())
        of_root = sum(p.to_local().numel() * 8 for n, p in model.named_parameters() if not n.startswith("blocks"))
        ((forward, backward),) = train(model, train_on_one_rank(make(), world()), steps=1)
        assert forward.bytes == total - mine
        assert backward.received["all_gather"] == (total - mine) - (root - of_root)
        assert backward.received["reduce_scatter"] == (world() - 1) * mine

    run_ranks(4, body)


def test_at_most_the_root_and_two_units_are_gathered_and_nothing_at_rest():
    def body():
        live = []  # of each gathering: references to its memory, or None while it is in flight
        start, peak = comm.start_all_gather_many, 0

        def counted(*args):
            pending, number = start(*args), len(live)
            finish = pending._finish
            live.append(None)

            def landed():
                result = finish()
                live[number] = [StorageWeakRef(each.untyped_storage()) for each in result]
                return result

            pending._finish = landed
            return pending

        def gathered(most):
            """Return how many are alive; wait if they are too many: a watching thread may look at one for a moment."""
            deadline = time.monotonic() + 10
            while True:
                count = sum(refs is None or not all(ref.expired() for ref in refs) for refs in live)
                if count <= most or time.monotonic() > deadline:
                    return count
                time.sleep(0.01)

        def observe(*_):
            nonlocal peak
            peak = max(peak, gathered(most=3))

        comm.start_all_gather_many = counted
        try:
            model = shard(make(layers=6))
            for block in model.blocks:
                block.register_forward_hook(observe)
                block.down.register_full_backward_hook(observe)
            for step in range(3):
                loss = loss_of(model, batch(comm.rank(), step))
                assert gathered(most=1) == 1  # the root
                loss.backward()
                assert gathered(most=0) == 0
                model.zero_grad()
            with torch.no_grad():
                loss_of(model, batch(comm.rank(), 0))
            assert gathered(most=0) == 0
        finally:
            comm.start_all_gather_many = start
        return peak

    assert max(run_ranks(2, body)) == 3


def test_mixed_precision_gathers_and_reduces_in_the_dtypes_asked_for():
    class Double(nn.Linear):
        def forward(self, x):
            assert type(self.weight) is torch.Tensor
            assert isinstance(self.weight, nn.Parameter)
            assert self.weight.dtype is x.dtype is torch.bfloat16
            assert next(self.parameters()).dtype is torch.bfloat16
            return super().forward(x)

    def body():
        torch.manual_seed(0)
        model, plain = nn.Sequential(Double(5, 3)), None
        plain = copy.deepcopy(model[0])
        policy = sw.MixedPrecisionPolicy(torch.bfloat16, torch.float32, output_dtype=torch.float32)
        sw.fully_shard(model[0], mp_policy=policy)
        sw.fully_shard(model, mp_policy=policy)
        inputs = [torch.randn(4, 5, generator=torch.Generator().manual_seed(rank)) for rank in range(world())]
        with comm.count() as traffic:
            result = model(inputs[comm.rank()])
            assert result.dtype is torch.float32
            result.sum().backward()
        low = [p.detach().bfloat16().requires_grad_() for p in (plain.weight, plain.bias)]
        for each in inputs:
            nn.functional.linear(each.bfloat16(), *low).float().sum().backward()
        for mine, other in zip(model.parameters(), low, strict=True):
            assert mine.dtype is mine.grad.dtype is torch.float32
            torch.testing.assert_close(mine.grad.full_tensor(), other.grad.float() / world(), rtol=1e-2, atol=1e-2)
        return dict(traffic.received)

    rank0, rank1 = run_ranks(2, body)
    # 18 elements: rank 0 holds 12 of them (2 + 1 rows, 2 + 1 biases), gathered twice in 2 bytes, reduced in 4.
    assert rank0 == {"all_gather": 6 * 2, "reduce_scatter": 12 * 4}
    assert rank1 == {"all_gather": 12 * 2, "reduce_scatter": 6 * 4}


def test_frozen_and_unused_parameters_have_no_gradient():
    class Branches(nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.unused, self.frozen = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
            self.only_first = nn.Linear(4, 4)
            self.frozen.requires_grad_(False)

        def forward(self, x, first):
            x = self.frozen(torch.tanh(self.used(x)))
            return self.only_first(x) if first else x

    def body():
        torch.manual_seed(0)
        plain = Branches().double()
        model = sw.fully_shard(copy.deepcopy(plain))
        inputs = [torch.randn(3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(r)) for r in range(2)]
        with comm.count() as traffic:
            model(inputs[comm.rank()], comm.rank() == 0).sum().backward()
        for rank, each in enumerate(inputs):
            (plain(each, rank == 0).sum() / 2).backward()
        for (name, mine), other in zip(model.named_parameters(), plain.parameters(), strict=True):
            if "unused" in name or "frozen" in name:
                assert mine.grad is None
                assert other.grad is None
            else:
                torch.testing.assert_close(mine.grad.full_tensor(), other.grad, rtol=0, atol=EXACT)
        return dict(traffic.calls)

    assert run_ranks(2, body) == [{"all_gather": 1, "reduce_scatter": 1}] * 2
