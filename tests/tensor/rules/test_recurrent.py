"""Recurrent nets match torch in values and gradients; a sharded batch needs no communication."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import shardwright as sw
from shardwright.errors import MixedTensorsError
from shardwright.testing import run_ranks

R, S = sw.Replicate(), sw.Shard
KINDS: dict[str, Callable[..., nn.Module]] = {
    "LSTM": lambda: nn.LSTM(3, 4, num_layers=2, bidirectional=True, dtype=torch.float64),
    "LSTM that projects": lambda: nn.LSTM(3, 4, proj_size=2, batch_first=True, dtype=torch.float64),
    "GRU": lambda: nn.GRU(3, 4, num_layers=2, batch_first=True, dtype=torch.float64),
    "RNN": lambda: nn.RNN(3, 4, bidirectional=True, nonlinearity="relu", bias=False, dtype=torch.float64),
}
CELLS: list[Callable[..., nn.Module]] = [
    lambda: nn.LSTMCell(3, 4, dtype=torch.float64),
    lambda: nn.GRUCell(3, 4, dtype=torch.float64),
    lambda: nn.RNNCell(3, 4, bias=False, dtype=torch.float64),
]


def shard_weights(name: str, module: nn.Module, mesh: Any) -> None:
    del name
    for key, value in list(module.named_parameters(recurse=False)):
        setattr(module, key, nn.Parameter(sw.distribute_tensor(value.detach(), mesh, [S(0)] + [R] * (mesh.ndim - 1))))


def twins(make: Callable[..., nn.Module], mesh: Any, sharded: bool) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    plain = make()
    return plain, sw.distribute_module(deepcopy(plain), mesh, shard_weights if sharded else None)


def flat(results: Any) -> list[Any]:
    return [results] if isinstance(results, Tensor) else [x for result in results for x in flat(result)]


def compare(plain: nn.Module, ours: nn.Module, whole: Tensor, x: Any, *rest: Any) -> None:
    """Compare results, and their gradients for the input and the weights."""
    whole.requires_grad_()
    expected, found = flat(plain(whole)), flat(ours(x.requires_grad_(), *rest))
    for theirs, mine in zip(expected, found, strict=True):
        torch.testing.assert_close(mine.full_tensor(), theirs)
    sum((result.sin().sum() for result in expected), torch.zeros(())).backward()
    sum(result.sin().sum().full_tensor() for result in found).backward()
    torch.testing.assert_close(x.grad.full_tensor(), whole.grad)
    for mine, theirs in zip(ours.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad.full_tensor(), theirs.grad)  # type: ignore[union-attr]  # DTensors'


@pytest.mark.parametrize("kind", KINDS)
def test_recurrent_nets_match_torch(kind: str) -> None:
    def on_a_rank() -> None:
        mesh = sw.init_device_mesh("cpu", (4,))
        for size in (5, 2):  # uneven shards, and empty ones
            for sharded in (False, True):
                for placement in (R, S(0), S(1), S(2)):
                    plain, ours = twins(KINDS[kind], mesh, sharded)
                    whole = torch.randn(size, size, 3, dtype=torch.float64)
                    compare(plain, ours, whole, sw.distribute_tensor(whole.detach(), mesh, [placement]))

    run_ranks(4, on_a_rank, timeout=120)


def test_recurrent_cells_match_torch_on_a_2d_mesh() -> None:
    def on_a_rank() -> None:
        mesh = sw.init_device_mesh("cpu", (2, 2))
        for make in CELLS:
            for sharded in (False, True):
                for placements in ([S(0), S(0)], [S(0), R], [R, S(1)]):
                    plain, ours = twins(make, mesh, sharded)
                    whole = torch.randn(5, 3, dtype=torch.float64)
                    compare(plain, ours, whole, sw.distribute_tensor(whole.detach(), mesh, placements))

    run_ranks(4, on_a_rank, timeout=120)


def test_a_sharded_batch_needs_no_communication_and_stays_sharded() -> None:
    def on_a_rank() -> tuple[int, list[str]]:
        mesh = sw.init_device_mesh("cpu", (4,))
        _, ours = twins(KINDS["LSTM"], mesh, sharded=False)
        with sw.trace() as seen:
            out, states = ours(sw.rand(6, 8, 3, mesh=mesh, placements=[S(1)], dtype=torch.float64))
        return seen.received, [str(x.placements) for x in (out, *states)]

    assert run_ranks(4, on_a_rank)[0] == (0, [str((S(1),))] * 3)


def test_dropout_between_layers_is_the_same_in_every_layout() -> None:
    def on_a_rank() -> list[Tensor]:
        mesh = sw.init_device_mesh("cpu", (4,))
        results = []
        for placement in (R, S(0), S(1)):
            torch.manual_seed(0)
            net = nn.LSTM(3, 4, num_layers=3, dropout=0.5, bidirectional=True, dtype=torch.float64)
            ours = sw.distribute_module(net, mesh)
            sw.manual_seed(1)
            x = sw.distribute_tensor(torch.ones(5, 6, 3, dtype=torch.float64), mesh, [placement])
            with sw.trace() as seen:
                out, (last, _) = ours(x)
            assert not any(operation.fell_back for operation in seen.operations)
            assert last.shape == (6, 6, 4)
            results.append(out.full_tensor().detach())
        return results

    whole, *others = run_ranks(4, on_a_rank)[0]
    for other in others:
        torch.testing.assert_close(other, whole)


def test_packed_sequences_match_torch() -> None:
    def on_a_rank() -> None:
        mesh = sw.init_device_mesh("cpu", (2,))
        lengths = torch.tensor([4, 2, 5])
        for dropout, placement in ((0.0, R), (0.0, S(0)), (0.5, S(1))):
            torch.manual_seed(0)
            plain = nn.GRU(3, 4, num_layers=2, batch_first=True, dropout=dropout, dtype=torch.float64)
            ours = sw.distribute_module(deepcopy(plain), mesh)
            whole = torch.randn(3, 5, 3, dtype=torch.float64)
            x, counts = (sw.distribute_tensor(t, mesh, [p]) for t, p in ((whole, placement), (lengths, R)))
            packed, last = ours(pack_padded_sequence(x, counts, batch_first=True, enforce_sorted=False))
            padded, sizes = pad_packed_sequence(packed, batch_first=True)
            assert padded.full_tensor().shape == (3, 5, 4)
            assert sizes.full_tensor().tolist() == [4, 2, 5]
            if not dropout:
                theirs, end = plain(pack_padded_sequence(whole, lengths, batch_first=True, enforce_sorted=False))
                torch.testing.assert_close(padded.full_tensor(), pad_packed_sequence(theirs, batch_first=True)[0])
                torch.testing.assert_close(last.full_tensor(), end)

    run_ranks(2, on_a_rank)


def test_a_plain_initial_state_raises() -> None:
    def on_a_rank() -> None:
        mesh = sw.init_device_mesh("cpu", (2,))
        _, ours = twins(KINDS["RNN"], mesh, sharded=False)
        x = sw.rand(6, 4, 3, mesh=mesh, placements=[S(1)], dtype=torch.float64)
        with pytest.raises(MixedTensorsError, match=r"rnn_relu: argument 1 is a plain tensor of shape \(2, 4, 4\)"):
            ours(x, torch.zeros(2, 4, 4, dtype=torch.float64))
        plain, _ = twins(KINDS["RNN"], mesh, sharded=False)
        with pytest.raises(MixedTensorsError, match="is a plain tensor"):
            plain(x)

    run_ranks(2, on_a_rank)
