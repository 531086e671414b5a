"""Pickle, torch.save and torch.load store a DTensor's shard and layout, and bind it to the loading world."""

from __future__ import annotations

import io
import pickle
from typing import Any

import pytest
import torch
from torch import nn

import shardwright as sw
from shardwright import comm
from shardwright.errors import TensorError
from shardwright.testing import Returned, on_ranks, outcomes, run_ranks

R, S0, S1, P = sw.Replicate(), sw.Shard(0), sw.Shard(1), sw.Partial()


def _mesh() -> Any:
    return sw.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))


def _saved(value: Any) -> io.BytesIO:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return file


def test_pickle_keeps_layout_and_values() -> None:
    def on_rank() -> None:
        mesh = _mesh()
        whole = torch.arange(20.0).reshape(5, 4)
        for x in (
            sw.distribute_tensor(whole, mesh, [S0, S1]),
            sw.distribute_tensor(whole, mesh, [R, sw.Ragged(0, (4, 1))]).requires_grad_(),
            sw.distribute_tensor(whole, mesh, [S0, S0], order=(1, 0)),
            nn.Parameter(sw.distribute_tensor(whole, mesh, [S0, R])),
            sw.DTensor.from_local(whole, mesh, [P, S0]),
        ):
            for copy in (pickle.loads(pickle.dumps(x)), torch.load(_saved(x), weights_only=True)):
                assert type(copy) is sw.DTensor
                assert copy.sharding is x.sharding
                assert copy.requires_grad == x.requires_grad
                assert isinstance(copy, nn.Parameter) == isinstance(x, nn.Parameter)
                assert torch.equal(copy, x)
                assert copy.to_local().data_ptr() != x.to_local().data_ptr()
                assert torch.equal(copy * 2, x * 2)  # it computes

    run_ranks(4, on_rank)


def test_only_the_shard_is_saved() -> None:
    def on_rank() -> None:
        x = sw.distribute_tensor(torch.zeros(4096, 16), _mesh(), [S0, S0])
        assert len(pickle.dumps(x)) < 4096 * 16 * 4 / 4 + 4096
        rows = x.to_local()[:1]
        view = sw.DTensor.from_local(rows, sw.init_device_mesh("cpu", (4,)), [S0])
        assert torch.equal(pickle.loads(pickle.dumps(view)), view)

    run_ranks(4, on_rank)


def test_modules_and_optimizers_load_with_weights_only() -> None:
    def on_rank() -> None:
        mesh = _mesh()
        layer = sw.distribute_module(nn.Linear(4, 6), mesh)
        optimizer = torch.optim.AdamW(layer.parameters())
        x = sw.distribute_tensor(torch.ones(8, 4), mesh, [S0, R])
        for _ in range(2):
            optimizer.zero_grad()
            layer(x).square().sum().backward()
            optimizer.step()
        file = _saved({"model": layer.state_dict(), "optimizer": optimizer.state_dict()})
        state = torch.load(file, weights_only=True)
        twin = sw.distribute_module(nn.Linear(4, 6), mesh)
        twin.load_state_dict(state["model"])
        again = torch.optim.AdamW(twin.parameters())
        again.load_state_dict(state["optimizer"])
        for module, step in ((layer, optimizer), (twin, again)):
            step.zero_grad()
            module(x).square().sum().backward()
            step.step()
        assert torch.equal(layer.weight, twin.weight)

    run_ranks(4, on_rank)


def test_loading_in_another_world_raises_with_the_remedy() -> None:
    def save() -> bytes:
        return pickle.dumps(sw.distribute_tensor(torch.arange(8.0), sw.init_device_mesh("cpu", (4,)), [S0]))

    files = run_ranks(4, save)

    def load(file: bytes) -> None:
        pickle.loads(file)

    with pytest.raises(TensorError, match=r"\[8\] \(0: S\(0\)\) was saved on Mesh\(4\); this is rank 0 of 1"):
        load(files[0])

    def swapped() -> None:
        pickle.loads(files[0])  # all ranks load rank 0's shard: its size fits, its values do not

    first, *others = outcomes(4, swapped)
    assert isinstance(first, Returned)
    for rank, other in enumerate(others, start=1):
        assert f"was saved by rank 0 and does not belong to rank {rank}" in other.message


@on_ranks(2, timeout=30)
def test_loading_another_ranks_shard_raises() -> None:
    buffer = io.BytesIO()
    torch.save(sw.distribute_tensor(torch.arange(8.0), sw.init_device_mesh("cpu", (2,)), [sw.Shard(0)]), buffer)
    data = comm.gather_bytes(buffer.getvalue())[0]
    if comm.rank() == 0:
        assert torch.load(io.BytesIO(data)).to_local().tolist() == [0, 1, 2, 3]
    else:
        with pytest.raises(TensorError, match="saved by rank 0 and does not belong to rank 1"):
            torch.load(io.BytesIO(data))
