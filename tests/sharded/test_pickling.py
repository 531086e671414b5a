"""Pickle, torch.save, torch.load and deepcopy handle a rank's own shards, and bind to the group that loads them."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import shardwright as sw
from shardwright import comm, sharded
from shardwright.errors import UnsupportedError
from shardwright.sharded import ShardMetadata
from shardwright.testing import run_ranks


class Halves(sharded.ShardingSpec):
    """A spec of a user's own."""

    def build_metadata(
        self, tensor_sizes: torch.Size, tensor_properties: sharded.TensorProperties
    ) -> sharded.ShardedTensorMetadata:
        spec = sharded.ChunkShardingSpec(0, ["rank:0/cpu", "rank:0/cpu"])
        return spec.build_metadata(tensor_sizes, tensor_properties)


SPECS = (
    sharded.ChunkShardingSpec(0, ["rank:2/cpu", "rank:0/cpu", "rank:2/cpu"]),  # two shards on a rank, none on another
    sharded.EnumerableShardingSpec(
        [ShardMetadata([0, 0], [5, 1], "rank:1/cpu"), ShardMetadata([0, 1], [5, 2], "rank:0/cpu")]
    ),
    sharded.LayoutShardingSpec(sw.Mesh((3,)), [sw.Ragged(0, (3, 0, 2))]),
)


def _saved(value: Any) -> io.BytesIO:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return file


WAYS: dict[str, Callable[[Any], Any]] = {
    "pickle": lambda value: pickle.loads(pickle.dumps(value)),
    "torch.load": lambda value: torch.load(_saved(value), weights_only=False),
    "torch.load, weights only": lambda value: torch.load(_saved(value), weights_only=True),
    "deepcopy": copy.deepcopy,
}


def _whole() -> torch.Tensor:
    return torch.arange(15.0).reshape(5, 3)


def _check_copy(copied: Any, original: sharded.ShardedTensor) -> None:
    assert type(copied) is sharded.ShardedTensor
    assert copied is not original
    assert copied.metadata() == original.metadata()
    assert type(copied.sharding_spec()) is type(original.sharding_spec())
    assert copied.requires_grad == original.requires_grad
    assert isinstance(copied, nn.Parameter) == isinstance(original, nn.Parameter)
    assert len(copied.local_shards()) == len(original.local_shards())
    for mine, theirs in zip(copied.local_shards(), original.local_shards(), strict=True):
        assert torch.equal(mine.tensor, theirs.tensor)
        assert mine.tensor.requires_grad == theirs.tensor.requires_grad
        assert not mine.tensor.numel() or mine.tensor.data_ptr() != theirs.tensor.data_ptr()


def test_pickled_and_copied_tensors_equal_the_originals() -> None:
    def on_rank() -> None:
        for spec in SPECS:
            tensor = spec.shard(_whole())
            for original in (tensor, tensor.clone().requires_grad_(), nn.Parameter(tensor.clone())):
                for way in WAYS.values():
                    copied = way({"it": original})["it"]
                    _check_copy(copied, original)
                    gathered = copied.detach().gather()  # it is bound to the group
                    assert gathered is None or torch.equal(gathered, _whole())

    run_ranks(3, on_rank)


def test_a_module_with_sharded_parameters_is_copied_and_saved() -> None:
    def on_rank() -> None:
        layer = nn.Linear(3, 5)
        sharded.shard_parameter(layer, "weight", SPECS[0])
        for twin in (copy.deepcopy(layer), torch.load(_saved(layer), weights_only=False)):
            _check_copy(twin.weight, layer.weight)
            assert [name for name, _ in twin.named_parameters()] == ["weight", "bias"]

    run_ranks(3, on_rank)


def test_tensors_of_a_subgroup_load_only_in_that_group() -> None:
    def on_rank() -> list[str]:
        if comm.rank() == 0:
            return []
        group = comm.subgroup((1, 2))
        spec = sharded.ChunkShardingSpec(0, ["rank:1/cpu", "rank:2/cpu"])
        tensor = spec.shard(_whole(), src_rank=1, process_group=group.process_group)
        files = pickle.dumps(tensor), _saved(tensor).getvalue()
        with sharded.load_with_process_group(group.process_group):
            for copied in (pickle.loads(files[0]), torch.load(io.BytesIO(files[1]), weights_only=True)):
                _check_copy(copied, tensor)
                assert copied._process_group is group.process_group
                gathered = copied.gather(2)
                assert gathered is None or torch.equal(gathered, _whole())
            with (
                pytest.raises(UnsupportedError, match="cannot be nested"),
                sharded.load_with_process_group(group.process_group),
            ):
                pass
        with pytest.raises(UnsupportedError) as within, sharded.load_with_process_group(comm.world().process_group):
            pickle.loads(files[0])
        with pytest.raises(UnsupportedError) as outside:
            pickle.loads(files[0])
        return [str(within.value), str(outside.value)]

    nothing, first, second = run_ranks(3, on_rank)
    assert nothing == []
    assert (
        "pickled by rank 1 in a group of ranks [1, 2]; the group of load_with_process_group has ranks [0, 1, 2]"
        in (first[0])
    )
    assert "pickled by rank 2 in a group of ranks [1, 2]; the default process group has ranks [0, 1, 2]" in second[1]
    assert "load it inside `with sharded.load_with_process_group(group):`" in second[1]


def test_loading_the_part_of_another_rank_or_world_raises() -> None:
    def save() -> bytes:
        return pickle.dumps(SPECS[0].shard(_whole()))

    files = run_ranks(3, save)
    with pytest.raises(UnsupportedError, match=r"in a group of ranks \[0, 1, 2\]; .* has ranks \[0\], and this .* 0"):
        pickle.loads(files[0])

    def swapped() -> str:
        with pytest.raises(UnsupportedError) as raised:
            pickle.loads(files[(comm.rank() + 1) % 3])
        return str(raised.value)

    assert "pickled by rank 1 in a group of ranks [0, 1, 2]" in run_ranks(3, swapped)[0]


def test_pickling_works_without_a_process_group() -> None:
    tensor = sharded.ChunkShardingSpec(0, ["rank:0/cpu"] * 2).shard(_whole())
    for way in WAYS.values():
        _check_copy(way(tensor), tensor)
    with sharded.load_with_process_group(None):
        _check_copy(pickle.loads(pickle.dumps(tensor)), tensor)


def test_unpickled_tensors_have_no_autograd_history() -> None:
    leaf = sharded.ChunkShardingSpec(0, ["rank:0/cpu"]).shard(_whole().requires_grad_())
    computed = leaf._with([shard.tensor * 2 for shard in leaf.local_shards()], requires_grad=True)
    assert not computed.is_leaf
    copied = pickle.loads(pickle.dumps(computed))
    assert copied.is_leaf
    assert copied.requires_grad
    assert copied.local_tensor().is_leaf


def test_user_defined_specs_are_pickled() -> None:
    tensor = Halves().shard(_whole())
    with pytest.raises(pickle.UnpicklingError, match="Halves"):
        torch.load(_saved(tensor), weights_only=True)  # not registered as safe
    copied = torch.load(_saved(tensor), weights_only=False)
    _check_copy(copied, tensor)
    assert type(copied.sharding_spec()) is Halves
