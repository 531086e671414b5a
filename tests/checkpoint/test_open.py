"""`open` reads one save in one process; slices read only the blocks they need."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardwright import checkpoint
from shardwright.checkpoint.reading.indexing import slicing_of
from shardwright.errors import (
    ArgumentTypeError,
    CheckpointError,
    CorruptionError,
    MissingNameError,
    NotACheckpointError,
    RegionError,
)
from shardwright.storage import Calls, LocalStorage

BLOCK = 1 << 20


class CountingCalls(Calls):
    """How many bytes were read, of data files alone."""

    def __init__(self) -> None:
        self.paths: dict[int, str] = {}
        self.data = 0

    def open(self, path: str, flags: int, mode: int = 0o666) -> int:
        fd = super().open(path, flags, mode)
        self.paths[fd] = path
        return fd

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        got = super().preadv(fd, buffers, offset)
        if self.paths[fd].endswith(".safetensors"):
            self.data += got
        return got


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal in dtype, shape and bits."""
    return (
        a.dtype == b.dtype
        and a.shape == b.shape
        and bool((a.contiguous().reshape(-1).view(torch.uint8) == b.contiguous().reshape(-1).view(torch.uint8)).all())
    )


def test_open_reads_every_tensor_of_a_checkpoint_of_four_ranks(saved: Path, whole: dict[str, torch.Tensor]) -> None:
    with checkpoint.open(saved) as ckpt:
        for name, tensor in whole.items():
            assert ckpt[name].shape == tensor.shape
            assert ckpt[name].dtype == tensor.dtype
            assert same(ckpt[name].tensor(), tensor), name
        assert same(ckpt["array"][:], torch.arange(6.0, dtype=torch.float64).reshape(2, 3))
        assert same(ckpt["alias"][:], whole["plain"])
        assert same(ckpt["own.state.rank2"][:], torch.full((3,), 2))


INDICES: list[Any] = [
    slice(None),
    ...,
    5,
    -1,
    slice(3, 9),
    slice(-5, None),
    slice(None, None, 3),
    slice(None, None, -1),
    slice(20, 2, -4),
    slice(5, 5),
    slice(9, 3),
    (slice(2, 4), slice(None, None, -2)),
    (..., 3),
    (slice(1, 30, 7), 5),
    (3, -2),
    (None, 4),
    (slice(None), None, slice(1, 3)),
    (np.int64(2), torch.tensor(1)),
    (),
]


@pytest.mark.parametrize("index", INDICES, ids=str)
@pytest.mark.parametrize("name", ["rows", "replica", "pieces", "columns"])
def test_indexing_equals_numpy(saved: Path, whole: dict[str, torch.Tensor], name: str, index: Any) -> None:
    array = whole[name].numpy()
    with checkpoint.open(saved) as ckpt:
        try:
            right = array[index]
        except IndexError:
            with pytest.raises(RegionError):
                ckpt[name][index]
            return
        np.testing.assert_array_equal(ckpt[name][index].numpy(), right)
        np.testing.assert_array_equal(ckpt.numpy(name)[index], right)


def entries(extent: int) -> st.SearchStrategy[Any]:
    number = st.integers(-extent, extent - 1) if extent else st.nothing()
    bound = st.none() | st.integers(-extent - 2, extent + 2)
    step = st.none() | st.integers(-4, 4).filter(bool)
    return st.builds(slice, bound, bound, step) | number


@given(st.data())
def test_the_region_of_an_index_is_its_bounding_box(data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(0, 7), max_size=4)))
    index: tuple[Any, ...] = ()
    for extent in shape[: data.draw(st.integers(0, len(shape)))]:
        index += (None,) * data.draw(st.integers(0, 1)) + (data.draw(entries(extent)),)
    if data.draw(st.booleans()):
        index = (*index, ...)
    array = np.arange(math.prod(shape)).reshape(shape)
    wanted = slicing_of(index, shape)
    box = np.asarray(array[wanted.region.slices()])
    found = wanted.take(torch.from_numpy(box.copy()))
    np.testing.assert_array_equal(found.numpy(), array[index])
    if found.numel():  # the box begins and ends at elements that are wanted
        low, high = int(found.min()), int(found.max())
        assert (low, high) == (int(box.min()), int(box.max()))


@pytest.mark.parametrize(
    ("index", "error", "text"),
    [
        (37, RegionError, "index 37 is out of range for dimension 0 of size 37"),
        ((1, 2, 3), RegionError, "too many indices: got 3 for a tensor of 2 dimensions"),
        ((..., ...), RegionError, "only once"),
        (True, ArgumentTypeError, "bool"),
        ([1, 2], ArgumentTypeError, "integers, slices"),
        ("a", ArgumentTypeError, "str"),
        (1.5, ArgumentTypeError, "float"),
    ],
    ids=str,
)
def test_an_invalid_index_raises(saved: Path, index: Any, error: type[Exception], text: str) -> None:
    with checkpoint.open(saved) as ckpt, pytest.raises(error, match=text):
        ckpt["rows"][index]


def test_a_slice_reads_only_the_blocks_it_overlaps(tmp_path: Path) -> None:
    rows = 8 * BLOCK // 4096
    checkpoint.save({"w": torch.arange(8 * BLOCK // 4, dtype=torch.int32).reshape(rows, 1024)}, tmp_path)
    calls = CountingCalls()
    with checkpoint.open(LocalStorage(tmp_path, calls)) as ckpt:
        assert calls.data == 0
        assert ckpt["w"].shape == (rows, 1024)
        assert calls.data == 0
        assert int(ckpt["w"][300, 7]) == 300 * 1024 + 7
        header = calls.data - BLOCK
        assert header % 4096 == 0
        assert header < BLOCK
        for index, blocks in [((slice(0, 256),), 1), ((slice(250, 260),), 2), ((slice(None),), 8), ((..., 3), 8)]:
            before = calls.data
            ckpt["w"][index]
            assert calls.data - before == blocks * BLOCK, index


def test_a_wrong_name_raises_with_the_closest_match(saved: Path) -> None:
    with checkpoint.open(saved) as ckpt:
        with pytest.raises(MissingNameError, match=r"no tensor is stored under 'colums'; did you mean 'columns'\?"):
            ckpt["colums"]
        with pytest.raises(KeyError):
            ckpt["epoch"]
        with pytest.raises(MissingNameError, match="is a tensor"):
            ckpt.value("rows")
        assert ckpt.get("nothing") is None


def test_an_open_checkpoint_is_a_mapping_of_names(saved: Path, whole: dict[str, torch.Tensor]) -> None:
    with checkpoint.open(saved) as ckpt:
        expected = {*whole, "__metadata__~2", "alias", "array", *(f"own.state.rank{rank}" for rank in range(4))}
        assert set(ckpt) == set(ckpt.keys()) == expected
        assert len(ckpt) == len(expected)
        assert "rows" in ckpt
        assert "row" not in ckpt
        assert 3 not in ckpt


def test_value_and_tree_return_stored_values(saved: Path) -> None:
    with checkpoint.open(saved) as ckpt:
        assert ckpt.value("epoch") == 3
        assert ckpt.value("nested.a.1.0") == 2.5
        assert ckpt.value("nested.b") == b"bytes"
        assert ckpt.value("own.seed", rank=2) == 2
        tree = ckpt.tree(rank=3)
        assert tree["nested"] == {"a": [1, (2.5, None)], "b": b"bytes", "empty": {}}
        assert tree["own"]["seed"] == 3
        assert same(tree["own"]["state"][:], torch.full((3,), 3))
        assert isinstance(tree["array"][:], np.ndarray)


def test_numpy_of_a_bfloat16_tensor_raises(saved: Path) -> None:
    with checkpoint.open(saved) as ckpt, pytest.raises(ArgumentTypeError, match="numpy has no bfloat16"):
        ckpt["grid"].numpy()


def test_an_open_checkpoint_stays_readable_after_a_replacement(tmp_path: Path) -> None:
    checkpoint.save({"w": torch.zeros(4), "n": 1}, tmp_path)
    with checkpoint.open(tmp_path) as old:
        checkpoint.save({"w": torch.ones(4), "n": 2}, tmp_path)
        with checkpoint.open(tmp_path) as new:
            assert (old["w"][:].sum(), old.value("n")) == (0, 1)
            assert (new["w"][:].sum(), new.value("n")) == (4, 2)
            assert old.save_id != new.save_id


class ReplacedCalls(Calls):
    """Another save takes the checkpoint's place after the manifest was read, before a data file is opened."""

    def __init__(self, path: Path, times: int) -> None:
        self.path, self.times = path, times

    def open(self, path: str, flags: int, mode: int = 0o666) -> int:
        if path.endswith(".safetensors") and self.times:
            self.times -= 1
            checkpoint.save({"w": torch.full((4,), self.times)}, self.path)
        return super().open(path, flags, mode)


@pytest.mark.parametrize("times", [1, 3])
def test_open_and_read_return_the_new_checkpoint_if_replaced_meanwhile(tmp_path: Path, times: int) -> None:
    checkpoint.save({"w": torch.full((4,), 9)}, tmp_path)
    with checkpoint.open(LocalStorage(tmp_path, ReplacedCalls(tmp_path, times))) as ckpt:
        assert ckpt["w"][:].tolist() == [0] * 4
    checkpoint.save({"w": torch.full((4,), 9)}, tmp_path)
    assert checkpoint.read(LocalStorage(tmp_path, ReplacedCalls(tmp_path, times)))["w"].tolist() == [0] * 4


def test_a_missing_data_file_raises_without_retrying(saved: Path) -> None:
    next(saved.glob("*-00002-0.safetensors")).unlink()
    with pytest.raises(CorruptionError, match=r"a file of the checkpoint is missing: .*-00002-0\.safetensors"):
        checkpoint.open(saved)


def test_reading_from_a_closed_checkpoint_raises(saved: Path) -> None:
    ckpt = checkpoint.open(saved)
    ckpt.close()
    with pytest.raises(CheckpointError, match="is closed"):
        ckpt["rows"][:]


def test_opening_an_empty_directory_raises(tmp_path: Path) -> None:
    with pytest.raises(NotACheckpointError, match="holds no checkpoint"):
        checkpoint.open(tmp_path)


def test_slices_that_overlap_a_corrupted_block_raise(saved: Path) -> None:
    with checkpoint.open(saved) as ckpt:
        index = next(index for index in ckpt.metadata.storage_data if index.fqn == "big" and index.offset[0] == 0)
        info = ckpt.metadata.storage_data[index]
    path = saved / info.relative_path
    data = bytearray(path.read_bytes())
    data[info.offset] ^= 1
    path.write_bytes(data)
    with checkpoint.open(saved) as ckpt:
        assert ckpt["big"][1299, 5] == ckpt["big"][-1, 5]
        with pytest.raises(CorruptionError, match=r"block 0 of .* of tensor 'big' does not match"):
            ckpt["big"][0, 0]
