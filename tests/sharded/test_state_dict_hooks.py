"""ShardedTensor attributes of modules are in the state dict under their names, and are loaded from it."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardwright import comm, sharded
from shardwright.testing import run_ranks

ROWS = sharded.ChunkShardingSpec(0, ["rank:0/cpu", "rank:1/cpu"])
COLUMNS = sharded.ChunkShardingSpec(1, ["rank:1/cpu", "rank:1/cpu", "rank:0/cpu"])


def _values(start: float) -> Tensor:
    return torch.arange(12.0).reshape(4, 3) + start


def _model(spec: sharded.ShardingSpec, start: float, *, parameter: bool = False) -> nn.Module:
    """Tables on the module itself, on a child and on a grandchild that has two names."""
    model = nn.ModuleDict({"left": nn.Linear(2, 1), "right": nn.Sequential(nn.Identity())})
    model["again"] = model["right"]
    model.table = spec.shard(_values(start))
    model["left"].table = spec.shard(_values(start + 100))
    model["right"][0].table = spec.shard(_values(start + 200))
    if parameter:
        model.weight = nn.Parameter(spec.shard(_values(start + 300)))
    return model


def _hooked(model: nn.Module) -> nn.Module:
    model._register_state_dict_hook(sharded.state_dict_hook)
    model._register_load_state_dict_pre_hook(sharded.pre_load_state_dict_hook, True)
    return model


def _holds(tensor: Any, start: float) -> None:
    assert isinstance(tensor, sharded.ShardedTensor)
    for shard in tensor.local_shards():
        assert torch.equal(shard.tensor, _values(start)[shard.metadata.region.slices()])


KEYS = ["table", "left.table", "right.0.table", "again.0.table"]


def test_attributes_are_in_the_state_dict_under_their_dotted_names() -> None:
    def on_rank() -> None:
        for spec in (ROWS, COLUMNS):  # the model that loads is sharded by rows
            saved = _hooked(_model(spec, 0)).state_dict(prefix="model.")
            tables = [key for key, value in saved.items() if isinstance(value, sharded.ShardedTensor)]
            assert tables == [f"model.{key}" for key in KEYS]
            file = io.BytesIO()
            torch.save(saved, file)
            file.seek(0)
            loaded = {key.removeprefix("model."): value for key, value in torch.load(file).items()}

            outer = nn.ModuleDict({"model": _hooked(_model(ROWS, -7))})  # the hooks are those of an inner module
            model = outer["model"]
            shards = [shard.tensor for shard in model.table.local_shards()]
            keys = outer.load_state_dict({f"model.{key}": value for key, value in loaded.items()})
            assert (keys.missing_keys, keys.unexpected_keys) == ([], [])
            now = [shard.tensor for shard in model.table.local_shards()]
            assert all(new is old for new, old in zip(now, shards, strict=True))  # an optimizer may hold them
            for start, tensor in ((0, model.table), (100, model["left"].table), (200, model["right"][0].table)):
                _holds(tensor, start)
                assert tensor.sharding_spec() == ROWS
            assert loaded["table"].sharding_spec() == spec  # the loaded tensor is unchanged

    run_ranks(2, on_rank)


def test_parameters_with_another_sharding_are_resharded() -> None:
    def on_rank() -> None:
        saved = _hooked(_model(COLUMNS, 0, parameter=True)).state_dict()
        assert "weight" in saved
        model = _hooked(_model(ROWS, -7, parameter=True))
        shards = [shard.tensor for shard in model.weight.local_shards()]
        model.load_state_dict(saved)
        _holds(model.weight, 300)
        assert all(shard.tensor is old for shard, old in zip(model.weight.local_shards(), shards, strict=True))
        assert saved["weight"].sharding_spec() == COLUMNS

    run_ranks(2, on_rank)


def test_missing_unexpected_and_mismatched_keys_are_reported() -> None:
    def on_rank() -> list[str]:
        saved = _hooked(_model(ROWS, 0)).state_dict()
        model = _hooked(_model(ROWS, -7))
        keys = model.load_state_dict({**saved, "other": torch.ones(1)}, strict=False)
        assert (keys.missing_keys, keys.unexpected_keys) == ([], ["other"])
        some = {key: value for key, value in saved.items() if key != "left.table"} | {"left.tabel": saved["table"]}
        model.load_state_dict(some, strict=False)
        with pytest.raises(RuntimeError) as missing:
            model.load_state_dict(some)
        _holds(model["left"].table, 100)  # from the first load
        with pytest.raises(RuntimeError) as misfits:
            model.load_state_dict({**saved, "table": sharded.zeros(ROWS, 5, 3), "left.table": torch.zeros(4, 3)})
        _holds(model.table, 0)
        return [str(missing.value), str(misfits.value)]

    first, second = run_ranks(2, on_rank)
    assert first == second
    assert 'Missing key(s) in state_dict: "left.table"' in first[0]
    assert 'Unexpected key(s) in state_dict: "left.tabel"' in first[0]
    assert "table: expected a ShardedTensor of size [4, 3], got size [5, 3]" in first[1]
    assert "left.table: expected a ShardedTensor, got Tensor: shard it with spec.shard(tensor)" in first[1]
    assert "key(s)" not in first[1]


def test_hooks_on_a_module_and_on_its_children_load_each_tensor_once() -> None:
    def on_rank() -> None:
        saved = _hooked(_model(ROWS, 0)).state_dict()
        model = _hooked(_model(ROWS, -7))
        for child in (model["left"], model["right"], model["right"][0]):
            _hooked(child)
        assert set(model.state_dict()) == set(saved)
        keys = model.load_state_dict(saved)
        assert (keys.missing_keys, keys.unexpected_keys) == ([], [])
        _holds(model["right"][0].table, 200)

    run_ranks(2, on_rank)


def test_assign_and_none_attributes_take_the_loaded_tensor() -> None:
    def on_rank() -> None:
        saved = _hooked(_model(COLUMNS, 0)).state_dict()
        model = _hooked(_model(ROWS, -7))
        model.table = None
        model.load_state_dict(saved)
        assert model.table is saved["table"]
        model["left"].table = ROWS.shard(_values(1)).to(torch.float64)
        model.load_state_dict(saved, assign=True)
        assert model["left"].table.dtype == torch.float32
        assert model["left"].table.sharding_spec() == ROWS
        _holds(model["left"].table, 100)

    run_ranks(2, on_rank)


def test_loading_transfers_only_what_a_rank_lacks() -> None:
    def on_rank() -> tuple[int, int]:
        moved = []
        for spec in (ROWS, COLUMNS):
            saved = nn.Identity()
            saved.table = spec.shard(_values(0))
            target = nn.Identity()
            target.table = ROWS.shard(_values(-7))
            state = _hooked(saved).state_dict()
            with comm.count() as traffic:
                _hooked(target).load_state_dict(state)
            moved.append(traffic.bytes)
        return moved[0], moved[1]

    # Rank 0 holds one column and wants two rows of three columns; rank 1 holds the other two.
    assert run_ranks(2, on_rank) == [(0, 2 * 2 * 4), (0, 2 * 1 * 4)]
