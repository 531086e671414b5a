"""A program on a submesh runs on all ranks: outside the mesh every operator is a no-op."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

import shardwright as sw
from shardwright import comm
from shardwright.errors import TensorError, UnsupportedError
from shardwright.testing import run_ranks

SOME = sw.Mesh((2,), ("dp",), ranks=(0, 2))  # ranks 1 and 3 are outside
ALL = sw.Mesh((4,), ("all",))


def inside() -> bool:
    return comm.rank() in SOME


class Net(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.embedding, self.norm = nn.Embedding(16, 8), nn.LayerNorm(8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.convolution, self.batch_norm = nn.Conv1d(8, 8, 3, padding=1), nn.BatchNorm1d(8)
        self.dropout, self.head = nn.Dropout(dropout), nn.Linear(8, 16)

    def forward(self, tokens: Any) -> Any:
        x = self.embedding(tokens)
        y = self.norm(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        x = self.batch_norm(self.convolution(x.transpose(1, 2))).transpose(1, 2)
        return self.head(self.dropout(nn.functional.gelu(x)).reshape(-1, 8))


def train(model: nn.Module, tokens: Any, targets: Any) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    seen: list[float] = []
    for _ in range(2):
        optimizer.zero_grad()
        logits = model(tokens)
        loss = nn.functional.cross_entropy(logits, targets.reshape(-1))
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        right = (logits.argmax(-1) == targets.reshape(-1)).sum()
        seen += [loss.item(), norm.item(), right.item()]
    return seen


def test_training_on_a_submesh_runs_on_every_rank() -> None:
    def work() -> None:
        torch.manual_seed(0)
        plain = Net()
        tokens, targets = torch.randint(16, (4, 6)), torch.randint(16, (4, 6))
        ours = Net()
        ours.load_state_dict(plain.state_dict())
        sw.distribute_module(ours, SOME)
        rows = [sw.distribute_tensor(x, SOME, [sw.Shard(0)]) for x in (tokens, targets)]
        losses, expected = train(ours, *rows), train(plain, tokens, targets)
        if inside():
            assert losses == pytest.approx(expected, rel=1e-4)
        else:
            assert all(math.isnan(value) for value in losses)
            assert all(p.grad is not None and not p.grad.to_local().numel() for p in ours.parameters())
        weight = ours.head.weight.redistribute(ALL, [sw.Replicate()])  # available again on a mesh of all ranks
        torch.testing.assert_close(weight.to_local(), plain.head.weight, rtol=1e-3, atol=1e-4)

    run_ranks(4, work)


def test_values_outside_the_mesh_are_empty_or_nan_or_raise() -> None:
    def work() -> None:
        x = sw.DTensor.from_local(torch.ones(4, 3), SOME, [sw.Shard(0)])
        y = sw.distribute_tensor(torch.ones(8, 3), SOME, [sw.Shard(0)])
        assert x.shape == (8, 3)
        assert x.equal(y)
        assert torch.allclose(x, y)
        total = (x + y).sum()
        if inside():
            assert total.item() == 48
            return
        assert math.isnan(total.item())
        assert math.isnan(float(total))
        for value in (
            x,
            x.sum(),
            x.full_tensor(),
            x.redistribute(placements=[sw.Replicate()]),
            sw.zeros((), mesh=SOME),
        ):
            local = value.to_local() if isinstance(value, sw.DTensor) else value
            assert local.numel() == 0
        for decision in (lambda: bool(total > 0), lambda: int(total), lambda: (x > 0).all().item(), lambda: [0][total]):
            with pytest.raises(TensorError, match=r"is not known on rank [13], which is outside its mesh"):
                decision()

    run_ranks(4, work)


def test_operators_outside_the_mesh_give_the_same_layouts_without_values() -> None:
    def work() -> list[tuple[str, str, bool]]:
        x = sw.distribute_tensor(torch.randn(4, 6), SOME, [sw.Shard(0)]).requires_grad_()
        y = sw.zeros(4, 6, mesh=SOME, placements=[sw.Shard(0)])
        with torch.no_grad():
            y.mul_(2).add_(x)
            y[1] = 3
            y[:, 1:3].zero_()
            y.uniform_()
        with torch.autocast("cpu", torch.bfloat16):
            half = x @ x.t()
        results = [
            x.reshape(2, 12),
            x.sort(dim=1)[1],
            x.detach(),
            x.to(torch.float64),
            x.t().softmax(0).sum(0),
            x > 0,
            x.split(3, dim=1)[1],
            torch.linalg.svdvals(x),
            x * 2.0,
            half,
            nn.functional.dropout(x),
            torch.cat([x, x], 1).mean(),
            y,
            torch.stack(torch._foreach_norm([y, y])),
        ]
        (gradient,) = torch.autograd.grad((x**3).sum(), x, create_graph=True)
        gradient.sum().backward()
        return [(str(r.sharding), str(r.dtype), r.requires_grad) for r in (*results, gradient, x.grad)]

    first, *others = run_ranks(4, work)
    assert others == [first] * 3


def test_random_numbers_on_a_submesh_advance_the_offsets_of_all_ranks() -> None:
    def work() -> list[float]:
        sw.manual_seed(5)
        sw.rand(3, mesh=SOME)
        nn.functional.dropout(sw.ones(4, mesh=SOME))
        sw.randperm(4, mesh=SOME)
        torch.bernoulli(sw.full((3,), 0.5, mesh=SOME))
        return sw.rand(4, mesh=ALL).to_local().tolist()

    first, *others = run_ranks(4, work)
    assert others == [first] * 3


def test_scalar_on_a_submesh_can_be_redistributed_to_all_ranks() -> None:
    def work() -> float:
        loss = sw.distribute_tensor(torch.ones(4, 3), SOME, [sw.Shard(0)]).sum()
        return loss.redistribute(ALL, [sw.Replicate()]).item()

    assert run_ranks(4, work) == [12.0] * 4


def test_gradient_of_a_plain_tensor_outside_the_mesh_is_zero() -> None:
    def work() -> list[float]:
        local = torch.ones(2, requires_grad=True)
        (sw.DTensor.from_local(local, SOME, [sw.Shard(0)]) * 3).sum().backward()
        assert local.grad is not None
        return local.grad.tolist()

    assert run_ranks(4, work) == [[3.0, 3.0] if rank in (0, 2) else [0.0, 0.0] for rank in range(4)]


def test_local_map_outside_the_mesh_gives_empty_tensors_of_the_same_layout() -> None:
    def work() -> tuple[str, ...]:
        x = sw.distribute_tensor(torch.arange(10.0).reshape(5, 2), SOME, [sw.Shard(0)]).requires_grad_()
        bias = torch.ones(2)  # a plain tensor in the closure

        def function(local: torch.Tensor, plain: torch.Tensor, factor: int) -> Any:
            shifted = local * factor + bias + plain
            return torch.cat([shifted, shifted]), shifted.sum(0), factor, shifted.argmax(0)

        mapped = sw.local_map(function, ([sw.Shard(0)], [sw.Partial()], None, None))
        for _ in range(2):
            doubled, total, factor, plain = mapped(x, torch.ones(2), 3)
        assert factor == 3
        assert not isinstance(plain, sw.DTensor)
        assert doubled.requires_grad
        (doubled.sum() + total.sum()).backward()
        assert x.grad is not None
        if inside():
            assert doubled.full_tensor()[:3].tolist() == [[2.0, 5.0], [8.0, 11.0], [14.0, 17.0]]
            assert x.grad.full_tensor().tolist() == [[9.0, 9.0]] * 5
        else:
            assert [t.to_local().numel() for t in (doubled, total, x.grad)] == [0, 0, 0]
        return str(doubled.sharding), str(total.sharding), str(plain.dtype), str((doubled + 1).sharding)

    assert len(set(run_ranks(4, work))) == 1


def test_local_map_of_a_function_that_needs_values_raises_outside_the_mesh() -> None:
    def work() -> None:
        x = sw.ones(4, mesh=SOME, placements=[sw.Shard(0)])
        mapped = sw.local_map(lambda local: local[: int(local.sum())], [sw.Shard(0)], [[sw.Shard(0)]])
        if inside():
            assert mapped(x).shape == (4,)
            return
        with pytest.raises(UnsupportedError, match=r"rank [13] is outside the mesh"):
            mapped(x)

    run_ranks(4, work)
