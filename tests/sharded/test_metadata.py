"""Metadata round-trip through every serialisation, and validation names the first problem."""

from __future__ import annotations

import copy
import json
import pickle
import random
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tilings import random_tiling
from torch.distributed._shard.metadata import ShardMetadata as TorchShardMetadata
from torch.distributed._shard.sharded_tensor.metadata import TensorProperties as TorchTensorProperties
from torch.distributed.remote_device import _remote_device

from shardwright.errors import ArgumentTypeError, PlacementError, ShardError, TilingError, UnsupportedError
from shardwright.sharded import (
    MEM_FORMAT_ENCODING,
    EnumerableShardingSpec,
    RemoteDevice,
    ShardedTensorMetadata,
    ShardMetadata,
    TensorProperties,
)

DTYPES = sorted({d for d in vars(torch).values() if isinstance(d, torch.dtype)}, key=str)
FORMATS = [torch.contiguous_format, torch.channels_last, torch.preserve_format]


def copies(value: Any) -> list[Any]:
    """The value, written down and read in every way there is."""
    through_json = type(value).from_json(json.loads(json.dumps(value.to_json())))
    return [pickle.loads(pickle.dumps(value)), copy.deepcopy(value), copy.copy(value), through_json]


@given(st.sampled_from(DTYPES), st.sampled_from(FORMATS), st.booleans(), st.booleans())
def test_properties_survive_pickle_json_and_copies(
    dtype: torch.dtype, memory_format: torch.memory_format, requires_grad: bool, pinned: bool
) -> None:
    properties = TensorProperties(dtype, torch.strided, requires_grad, memory_format, pinned)
    for copied in copies(properties):
        assert copied == properties
        assert copied.memory_format is memory_format
        assert copied.dtype is dtype


@pytest.mark.parametrize("memory_format", FORMATS, ids=str)
def test_memory_formats_are_encoded_as_in_pytorch(memory_format: torch.memory_format) -> None:
    ours = TensorProperties(memory_format=memory_format)
    theirs = TorchTensorProperties(memory_format=memory_format).__getstate__()
    assert ours.__getstate__()[:3] == theirs[:3]
    assert (ours.__getstate__()[3].name, ours.to_json()["memory_format"]) == (theirs[3].name, theirs[3].value)


def test_an_unknown_memory_format_raises_when_encoded_and_decoded() -> None:
    properties = TensorProperties(memory_format=torch.channels_last_3d)
    for write in (pickle.dumps, copy.deepcopy, TensorProperties.to_json):
        with pytest.raises(UnsupportedError, match=r"torch\.channels_last_3d cannot be encoded: use one of"):
            write(properties)
    for encoding in (3, -1, "0", None):
        with pytest.raises(UnsupportedError, match=f"unknown memory format encoding {encoding!r}: expected one of 0 "):
            TensorProperties.from_json(TensorProperties().to_json() | {"memory_format": encoding})
    assert [encoding.value for encoding in MEM_FORMAT_ENCODING] == [0, 1, 2]


@pytest.mark.parametrize("name", ["float31", "Tensor", "nn", 7, None])
def test_an_unknown_dtype_raises(name: Any) -> None:
    with pytest.raises(ArgumentTypeError, match=r"does not name a torch\.dtype"):
        TensorProperties.from_json(TensorProperties().to_json() | {"dtype": name})


@pytest.mark.parametrize("dtype", [torch.float32, torch.int8, torch.complex64, torch.float8_e5m2], ids=str)
def test_properties_of_a_tensor_equal_pytorchs(dtype: torch.dtype) -> None:
    needs = dtype.is_floating_point or dtype.is_complex
    tensors = [torch.zeros(2, 3, dtype=dtype, requires_grad=needs), torch.zeros((), dtype=dtype)]
    tensors.append(torch.zeros(0, 2, 3, 4, dtype=dtype))
    for tensor in tensors:
        ours, theirs = (made.create_from_tensor(tensor) for made in (TensorProperties, TorchTensorProperties))
        for name in ("dtype", "layout", "requires_grad", "memory_format", "pin_memory"):
            assert getattr(ours, name) == getattr(theirs, name), name
    lying = torch.zeros(2, 3, 4, 5, dtype=dtype).to(memory_format=torch.channels_last)
    assert TensorProperties.create_from_tensor(lying).memory_format is torch.channels_last


@given(st.integers(0, 2**32), st.lists(st.integers(0, 7), min_size=1, max_size=3))
def test_metadata_of_any_tiling_are_valid_and_round_trip(seed: int, shape: list[int]) -> None:
    shards = random_tiling(random.Random(seed), shape, 5)
    metadata = ShardedTensorMetadata(shards, torch.Size(shape), TensorProperties(torch.float16))
    metadata.validate()
    for copied in copies(metadata):
        assert copied == metadata
        assert list(map(hash, copied.shards_metadata)) == list(map(hash, shards))
    table = metadata.table(lambda placement: placement.rank())
    assert [ShardMetadata(o, s, f"rank:{r}/cpu") for r, o, s in zip(*map(list, table), strict=True)] == shards


def test_equal_placements_have_the_same_owner() -> None:
    places = [RemoteDevice("rank:3/cpu"), RemoteDevice("rank:3/cpu"), "rank:2/cpu", _remote_device("rank:3/cpu")]
    shards = [ShardMetadata([n], [1], place) for n, place in enumerate(places)]
    assert places[0] is not places[1]
    table = ShardedTensorMetadata(shards, torch.Size([4])).table(lambda placement: placement.rank())
    assert table.ranks.tolist() == [3, 3, 2, 3]


@pytest.mark.parametrize("text", ["rank:1/cuda:0", "rank:0/cpu", "trainer0/cuda:3", "cuda:1", "cpu", "rank:12/meta"])
def test_placements_are_parsed_as_in_pytorch(text: str) -> None:
    ours, theirs = RemoteDevice(text), _remote_device(text)
    assert (ours.rank(), ours.worker_name(), ours.device()) == (theirs.rank(), theirs.worker_name(), theirs.device())
    assert ours == RemoteDevice(theirs) == RemoteDevice.of(str(theirs)) == pickle.loads(pickle.dumps(ours))
    assert hash(ours) == hash(RemoteDevice(theirs))
    assert str(ours) == text
    one, other = (made([0, 4], [2, 4], text) for made in (ShardMetadata, TorchShardMetadata))
    assert (one.shard_offsets, one.shard_sizes, str(one.placement)) == ([0, 4], [2, 4], str(other.placement))


@pytest.mark.parametrize("text", ["rank:-1/cpu", "rank:/cpu", "rank:1/gpu9", "/cpu", "", "rank:²/cpu", "rank:1/"])
def test_invalid_placements_raise_with_the_right_syntax(text: str) -> None:
    with pytest.raises(PlacementError, match=r"write rank:1/cuda:0"):
        ShardMetadata([0], [1], text)


@pytest.mark.parametrize(
    ("offsets", "sizes", "error", "words"),
    [
        ([0, 1], [2], ShardError, r"offsets \[0, 1\] and sizes \[2\]: both need one number per dimension"),
        ([-1], [2], ShardError, r"offsets \[-1\], sizes \[2\]: none may be negative"),
        ([1], [-2], ShardError, r"offsets \[1\], sizes \[-2\]: none may be negative"),
        ([0.5], [2], ArgumentTypeError, "shard offsets must be an int, got float: 0.5"),
        ([True], [2], ArgumentTypeError, "shard offsets must be an int, got bool: True"),
        ("0", [2], ArgumentTypeError, "shard offsets must be a sequence of ints, got str: '0'"),
    ],
)
def test_an_invalid_box_raises(offsets: Any, sizes: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        ShardMetadata(offsets, sizes, "rank:0/cpu")


def many_rows(count: int) -> list[ShardMetadata]:
    return [ShardMetadata([10 * n, 0], [10, 4], f"rank:{n % 4096}/cpu") for n in range(count)]


def test_the_first_overlap_gap_or_outside_of_100_000_shards_is_named() -> None:
    shards, size = many_rows(100_000), torch.Size([1_000_000, 4])
    ShardedTensorMetadata(shards, size).validate()
    longer = shards.copy()
    longer[70_001] = ShardMetadata([700_010, 0], [12, 4], "rank:369/cpu")
    with pytest.raises(TilingError) as caught:
        ShardedTensorMetadata(longer, size).validate()
    assert str(caught.value) == (
        "overlap: shard 70001 [700010:700022, 0:4] on rank:369/cpu and shard 70002 [700020:700030, 0:4] on "
        "rank:370/cpu both hold [700020:700022, 0:4]"
    )
    with pytest.raises(TilingError, match=r"shard 70001 .* and shard 70002 .* both hold \[700020:700022, 0:4\]"):
        EnumerableShardingSpec(longer)
    missing = shards[:40_000] + shards[40_001:50_000] + shards[50_001:]
    with pytest.raises(TilingError) as caught:
        ShardedTensorMetadata(missing, size).validate()
    assert str(caught.value) == "gap: nothing holds [400000:400010, 0:4] of [0:1000000, 0:4]"
    EnumerableShardingSpec(missing)  # a gap is a matter of the tensor's size
    both = [*missing, shards[60_000]]
    with pytest.raises(TilingError, match=r"overlap: shard 59998 \[600000:.*and shard 99998 .* \[600000:600010, 0:4\]"):
        EnumerableShardingSpec(both)
    with pytest.raises(TilingError, match=r"outside: shard 99999 \[999990:1000000, 0:4\] on rank:1695/cpu is not"):
        ShardedTensorMetadata(shards, torch.Size([999_999, 4])).validate()


def test_many_identical_shards_are_rejected_quickly() -> None:
    with pytest.raises(TilingError, match=r"overlap: shard 0 .* and shard 1 "):
        EnumerableShardingSpec(many_rows(1) * 100_000)


def test_shards_of_different_dimensionality_raise() -> None:
    mixed = [ShardMetadata([0], [2]), ShardMetadata([0, 0], [2, 2], "rank:1/cpu")]
    with pytest.raises(TilingError, match=r"shard 1 \[0:2, 0:2\] on rank:1/cpu has 2 dimensions, .* size \[2\] has 1"):
        ShardedTensorMetadata(mixed, torch.Size([2])).validate()
    with pytest.raises(TilingError, match=r"the same number of dimensions, got \[1, 2\]"):
        EnumerableShardingSpec(mixed)


def test_an_empty_tensor_may_have_no_shards_or_empty_ones() -> None:
    for shards in (
        [],
        [ShardMetadata([0, 0], [0, 5], "rank:0/cpu")],
        [ShardMetadata([0, 5], [0, 0], "rank:0/cpu")] * 2,
    ):
        ShardedTensorMetadata(shards, torch.Size([0, 5])).validate()
    ShardedTensorMetadata([ShardMetadata([], [], "rank:0/cpu")], torch.Size([])).validate()
    with pytest.raises(TilingError, match="gap"):
        ShardedTensorMetadata([], torch.Size([])).validate()
    with pytest.raises(TilingError, match="overlap"):
        ShardedTensorMetadata([ShardMetadata([], [], "rank:0/cpu")] * 2, torch.Size([])).validate()
