"""PyTorch's own distributed states: FSDP2, FSDP1, its DTensors and ShardedTensors, saved and loaded."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed import tensor as theirs
from torch.distributed._shard import sharded_tensor
from torch.distributed._shard.sharding_spec import ChunkShardingSpec as TheirChunks
from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import shardwright as sw
from shardwright import checkpoint, comm
from shardwright.errors import StateDiffersError
from shardwright.testing import run_ranks


@contextmanager
def quiet() -> Iterator[None]:
    """PyTorch warns of what it deprecates."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def build(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 10), nn.ReLU(), nn.Linear(10, 5))  # uneven, but where PyTorch cannot


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> list[float]:
    generator = torch.Generator().manual_seed(5)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        with quiet():
            loss = model(torch.randn(4, 6, generator=generator)).square().mean()
            loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def fsdp2(seed: int, shape: tuple[int, ...]) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model under fully_shard, over tensor parallelism where the mesh has two dimensions."""
    model = build(seed)
    names = ("dp", "tp")[: len(shape)]
    mesh = sw.init_device_mesh("cpu", shape, mesh_dim_names=names)
    if len(shape) == 2:
        parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    for layer in (model[0], model[2], model):
        fully_shard(layer, mesh=mesh["dp"])
    return model, torch.optim.AdamW(model.parameters(), lr=0.05)


def full(state: Any) -> dict[str, torch.Tensor]:
    with quiet():
        return {
            name: value.full_tensor() if isinstance(value, theirs.DTensor) else value for name, value in state.items()
        }


def test_fsdp2_states_load_with_another_world_size(tmp_path: Path) -> None:
    def save() -> tuple[dict[str, torch.Tensor], list[float]]:
        model, optimizer = fsdp2(1, (2,))
        train(model, optimizer, 2)
        assert any(isinstance(one, theirs.DTensor) for one in model.state_dict().values())
        checkpoint.save({"model": model, "optimizer": optimizer}, tmp_path / "objects")
        checkpoint.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "dicts")
        checkpoint.save({"optimizer": checkpoint.optimizer_state(model, optimizer)}, tmp_path / "named")
        before = full(model.state_dict())
        return before, train(model, optimizer, 2)

    def load(expected: dict[str, torch.Tensor], losses: list[float], shape: tuple[int, ...]) -> None:
        for place in ("objects", "dicts", "named"):
            model, optimizer = fsdp2(2, shape)
            parameters = list(model.parameters())
            if place == "named":
                checkpoint.load({"model": model}, tmp_path / "objects", only="model.*")
                checkpoint.load({"optimizer": checkpoint.optimizer_state(model, optimizer)}, tmp_path / place)
            else:
                checkpoint.load({"model": model, "optimizer": optimizer}, tmp_path / place)
            assert all(new is old for new, old in zip(model.parameters(), parameters, strict=True))
            for name, value in full(model.state_dict()).items():
                assert torch.equal(value, expected[name]), name
            for parameter in parameters:
                for value in (optimizer.state[parameter]["exp_avg"], optimizer.state[parameter]["exp_avg_sq"]):
                    assert isinstance(value, theirs.DTensor)
                    assert value.placements == parameter.placements
            assert train(model, optimizer, 2) == pytest.approx(losses, rel=1e-4)

    expected, losses = run_ranks(2, save)[0]
    made = checkpoint.read(tmp_path / "objects")["model"]
    assert all(torch.equal(made[name], value) for name, value in expected.items())
    plain = build(3)
    checkpoint.load({"model": plain}, tmp_path / "objects", only="model.*")
    assert all(torch.equal(value, expected[name]) for name, value in plain.state_dict().items())
    run_ranks(4, load, expected, losses, (2, 2))
    run_ranks(3, load, expected, losses, (3,))


def test_a_two_dimensional_fsdp2_state_with_strided_shards_is_saved(tmp_path: Path) -> None:
    """Tensor parallelism cuts first, then fully_shard: what PyTorch calls a strided shard."""

    def work() -> tuple[dict[str, torch.Tensor], list[str]]:
        model, _ = fsdp2(1, (2, 2))
        reference = build(1)
        checkpoint.save(model, tmp_path)
        return dict(reference.state_dict()), [str(value.placements) for value in model.state_dict().values()]

    expected, placements = run_ranks(4, work)[0]
    assert any("_StridedShard" in one for one in placements)
    made = checkpoint.read(tmp_path)
    assert made.keys() == expected.keys()
    assert all(torch.equal(made[name], value) for name, value in expected.items())


def test_pytorchs_and_shardwrights_dtensors_load_each_other(tmp_path: Path) -> None:
    def work() -> None:
        mesh = sw.init_device_mesh("cpu", (2,))
        whole = torch.arange(35.0).reshape(5, 7)
        theirs_ = theirs.distribute_tensor(whole, mesh, [theirs.Shard(0)])
        ours = sw.distribute_tensor(whole, mesh, [sw.Shard(1)])
        with quiet():
            old = sharded_tensor.zeros(TheirChunks(0, ["rank:0/cpu", "rank:1/cpu"]), 5, 7)
        for shard in old.local_shards():
            shard.tensor.copy_(whole[shard.metadata.shard_offsets[0] :][: shard.metadata.shard_sizes[0]])
        for number, source in enumerate((theirs_, ours, old, whole)):
            checkpoint.save({"w": source}, tmp_path / str(number))
            mine = sw.zeros(5, 7, mesh=mesh, placements=[sw.Ragged(0, (4, 1))])
            checkpoint.load({"w": mine}, tmp_path / str(number))
            assert torch.equal(mine.full_tensor(), whole)
            other = theirs.zeros(5, 7, device_mesh=mesh, placements=[theirs.Shard(1)])
            assert checkpoint.load({"w": other}, tmp_path / str(number))["w"] is other
            assert torch.equal(other.full_tensor(), whole)
            with quiet():
                table = sharded_tensor.zeros(TheirChunks(1, ["rank:1/cpu", "rank:0/cpu"]), 5, 7)
            checkpoint.load({"w": table}, tmp_path / str(number))
            for shard in table.local_shards():
                start, size = shard.metadata.shard_offsets[1], shard.metadata.shard_sizes[1]
                assert torch.equal(shard.tensor, whole[:, start : start + size])

    run_ranks(2, work)


def test_fsdp1_sharded_state_dicts_load_with_another_world_size(tmp_path: Path) -> None:
    def make(seed: int) -> FullyShardedDataParallel:
        with quiet():
            return FullyShardedDataParallel(build(seed), device_id=torch.device("cpu"), use_orig_params=True)

    def states(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        with quiet(), FullyShardedDataParallel.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
            return {
                "model": model.state_dict(),
                "optimizer": FullyShardedDataParallel.optim_state_dict(model, optimizer),
            }

    def save() -> dict[str, torch.Tensor]:
        model = make(1)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
        train(model, optimizer, 2)
        state = states(model, optimizer)
        assert any(isinstance(one, sharded_tensor.ShardedTensor) for one in state["model"].values())
        checkpoint.save(state, tmp_path)
        with quiet(), FullyShardedDataParallel.summon_full_params(model):
            return {name: value.detach().clone() for name, value in model.module.named_parameters()}

    def load(expected: dict[str, torch.Tensor]) -> None:
        model = make(2)
        with quiet(), FullyShardedDataParallel.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
            state = model.state_dict()
            checkpoint.load({"model": state}, tmp_path, only="model.*")
            model.load_state_dict(state)
        with quiet(), FullyShardedDataParallel.summon_full_params(model):
            for name, value in model.module.named_parameters():
                assert torch.equal(value, expected[name]), name

    expected = run_ranks(2, save)[0]
    made = checkpoint.read(tmp_path)
    assert all(torch.equal(made["model"][name], value) for name, value in expected.items())
    assert made["optimizer"]["state"]["0.weight"]["exp_avg"].shape == (10, 6)
    run_ranks(3, load, expected)


def test_ranks_outside_the_mesh_of_a_dtensor_save_nothing_of_it(tmp_path: Path) -> None:
    def work() -> None:
        world = sw.init_device_mesh("cpu", (3,))
        small = comm.DeviceMesh("cpu", [0, 2])
        made = theirs.distribute_tensor(torch.arange(5.0), small, [theirs.Shard(0)])
        checkpoint.save({"w": made, "all": theirs.ones(3, device_mesh=world, placements=[theirs.Shard(0)])}, tmp_path)
        target = theirs.zeros(5, device_mesh=small, placements=[theirs.Replicate()])
        checkpoint.load({"w": target}, tmp_path, only="w")
        if comm.rank() != 1:
            assert target.to_local().tolist() == [0, 1, 2, 3, 4]

    run_ranks(3, work)
    assert checkpoint.read(tmp_path)["w"].tolist() == [0, 1, 2, 3, 4]


def test_fsdp_on_slices_of_a_mesh_is_saved_as_replicas(tmp_path: Path) -> None:
    """What tensor parallel does not cut (a norm) is a DTensor on the slice of each tensor-parallel rank."""

    def make(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        mesh = sw.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        model = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 8), nn.LayerNorm(8))
        nn.init.normal_(model[2].weight)
        parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
        fully_shard(model, mesh=mesh["dp"])
        return model

    def body(folder: str) -> tuple[dict[str, torch.Tensor], str]:
        with quiet():
            model = make(1)
            optimizer = torch.optim.AdamW(model.parameters())
            model(torch.ones(2, 8)).square().sum().backward()
            optimizer.step()
            state = {"model": model, "optimizer": checkpoint.optimizer_state(model, optimizer)}
            checkpoint.save(state, folder, check_replicas=True)
            other = make(2)
            fresh = torch.optim.AdamW(other.parameters())
            checkpoint.load({"model": other, "optimizer": checkpoint.optimizer_state(other, fresh)}, folder)
            expected = {name: value.full_tensor().detach() for name, value in model.state_dict().items()}
            for name, value in other.state_dict().items():
                assert torch.equal(value.full_tensor(), expected[name]), name
            if comm.rank() == 3:  # a norm of another value on one slice is no replica
                model[2].weight.to_local().detach().fill_(7)
            with pytest.raises(StateDiffersError, match=r"2\.weight") as raised:
                checkpoint.save({"model": model}, folder, check_replicas=True)
        return expected, str(raised.value)

    found = run_ranks(4, body, str(tmp_path))
    assert len({text for _, text in found}) == 1
    made = checkpoint.read(tmp_path)
    assert all(torch.equal(made["model"][name], value) for name, value in found[0][0].items())
    assert made["optimizer"]["state"]["2.weight"]["exp_avg"].shape == (8,)


def test_layouts_that_are_not_slices_of_one_mesh_raise(tmp_path: Path) -> None:
    def body(folder: str) -> None:
        mesh = sw.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        mine = mesh["dp"]
        placement = theirs.Shard(0) if comm.rank() % 2 else theirs.Replicate()
        made = theirs.distribute_tensor(torch.arange(4.0), mine, [placement])
        with pytest.raises(StateDiffersError, match="w: "):
            checkpoint.save({"w": made}, folder)

    run_ranks(4, body, str(tmp_path))
