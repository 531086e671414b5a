"""The manifest: encoding round-trips, unknown fields are kept, and values that cannot be decoded are not written."""

from __future__ import annotations

import datetime
import enum
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardwright import checkpoint
from shardwright.checkpoint.format.data_file import DataFile, FileEntry
from shardwright.checkpoint.format.manifest import Manifest
from shardwright.checkpoint.format.tensor_table import TensorTable
from shardwright.checkpoint.format.values import DTYPES, EnumValue, decode_value, encode_value
from shardwright.checkpoint.format.write_layout import file_plan
from shardwright.errors import CorruptionError, FormatError, StateError, UnknownVersionError
from shardwright.layout import Layout, Mesh, Ragged, Replicate, Shard
from tests.checkpoint.fuzz import signed, unsigned, written


class Colour(enum.Enum):
    RED = 1


VALUES: list[Any] = [
    None, True, False, 0, -(2**63), 2**63 - 1, 2**63, -(10**30), 0.0, -0.0, 0.1, math.inf, -math.inf, 5e-324, "", "é\0",
    b"", b"\xff\0", 1 + 2j, complex(math.inf, -0.0), datetime.datetime(2024, 2, 29, 1, 2, 3, 4),
    datetime.datetime(2024, 2, 29, tzinfo=datetime.UTC), datetime.date(1, 1, 1), datetime.time(23, 59, 59, 999999),
    datetime.timedelta(-1, 5, 7), datetime.time(1, fold=1),
    datetime.datetime(2000, 1, 1, fold=1), torch.float8_e4m3fn, torch.complex32, np.float32(0.1), np.bool_(True),
    np.uint64(2**64 - 1), np.complex64(1j),
]  # fmt: skip


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_plain_values_round_trip_with_their_types(value: Any) -> None:
    node = json.loads(json.dumps(encode_value(value, "x")))
    found = decode_value(node)
    assert found == value
    assert type(found) is type(value)
    assert repr(found) == repr(value)  # -0.0 and 0.0 are equal


def test_nan_and_enums_round_trip() -> None:
    assert math.isnan(decode_value(encode_value(math.nan, "x") or []))
    assert decode_value(encode_value(Colour.RED, "x") or []) == EnumValue("Colour", "RED", 1)


@given(st.floats() | st.integers() | st.text() | st.binary() | st.complex_numbers() | st.timedeltas() | st.datetimes())
def test_random_plain_values_round_trip(value: Any) -> None:
    found = decode_value(json.loads(json.dumps(encode_value(value, "x"))))
    assert repr(found) == repr(value)


@pytest.mark.parametrize(
    "value", [torch.quint8, 10**5000, "\ud800", np.datetime64(0, "s")], ids=["quint8", "big", "surrogate", "time"]
)
def test_saving_a_value_that_cannot_be_decoded_raises(value: Any, tmp_path: Path) -> None:
    with pytest.raises(StateError, match=r"not stored|cannot be stored"):
        checkpoint.save({"x": value}, tmp_path)
    assert not (tmp_path / "manifest.json").exists()


def table_of(*layouts: Layout) -> TensorTable:
    names = [f"w{number}" for number in range(len(layouts))]
    return TensorTable.of(names, ["float32"] * len(layouts), [4] * len(layouts), layouts)


def manifest_of(table: TensorTable, ranks: int, extra: dict[str, Any] | None = None) -> Manifest:
    """A manifest of what these ranks would have written."""
    files = {}
    for rank in range(ranks):
        file = DataFile(file_plan(table, rank), "abcdef")
        if len(file.plan.tensors):
            files[rank] = FileEntry(file.size, file.header_size, "0" * 32)
    return Manifest("abcdef", ["l", *range(len(table))], table, files, extra or {})


LAYOUTS = [
    Layout(Mesh((4,)), [Shard(0)], (10, 3)),
    Layout(Mesh((4,)), [Shard(0)], (3, 3)),
    Layout(Mesh((2, 2), ("dp", "tp")), [Replicate(), Shard(1)], (8, 5)),
    Layout(Mesh((2, 2)), [Shard(0), Shard(0)], (9,), order=(1, 0)),
    Layout(Mesh((4,)), [Ragged(0, (1, 0, 5, 2))], (8,)),
    Layout(Mesh((2,), ranks=(3, 1)), [Replicate()], (300, 300)),
    Layout(Mesh((4,)), [Replicate()], ()),
    Layout(Mesh((4,)), [Shard(1)], (0, 7)),
]


@given(st.lists(st.sampled_from(LAYOUTS), max_size=12))
def test_layouts_and_encoded_bytes_round_trip(layouts: list[Layout]) -> None:
    manifest = manifest_of(table_of(*layouts), 4)
    data = manifest.encode()
    found = Manifest.decode(data)
    assert found.encode() == data
    assert [found.tensors.sharding(number) for number in range(len(layouts))] == layouts
    assert found.files == manifest.files
    assert json.loads(data)["shardwright"] == 1


def test_the_manifest_of_10_000_tensors_on_4096_ranks_is_small() -> None:
    layouts = [Layout(Mesh((4096,)), [Shard(0)], (8192, 8 * (number % 40 + 1))) for number in range(10_000)]
    table = table_of(*layouts)
    per_rank = int(sum(layout.region(0).volume * 4 for layout in layouts))
    files = {
        rank: FileEntry(1_200_000 // 4096 * 4096 + per_rank, 1_200_000 // 4096 * 4096, "0" * 32) for rank in range(4096)
    }
    data = Manifest("abcdef", ["l", *range(len(table))], table, files).encode()
    assert len(data) < 2_000_000
    assert len(Manifest.decode(data).tensors) == 10_000


def test_unknown_fields_are_preserved() -> None:
    plain = unsigned(manifest_of(table_of(LAYOUTS[0]), 4).encode())
    future = b'"future":{"b":[1.50,{"a":null},"\\u00e9"],"a":12345678901234567890123},"z":0,'
    found = Manifest.decode(signed(plain + future))
    assert list(found.extra) == ["future", "z"]
    assert future in found.encode()
    assert Manifest.decode(found.encode()).encode() == found.encode()


@pytest.mark.parametrize("version", [0, 2, 17])
def test_an_unknown_version_raises_if_the_digest_is_valid(version: int) -> None:
    data = manifest_of(table_of(LAYOUTS[0]), 4).encode().replace(b'{"shardwright":1,', b'{"shardwright":%d,' % version)
    with pytest.raises(CorruptionError, match="digest does not match its contents"):
        Manifest.decode(data)
    with pytest.raises(UnknownVersionError, match=f"version {version}, but this library reads version 1"):
        Manifest.decode(signed(unsigned(data)))


def test_a_wrong_digest_raises_corruption_error() -> None:
    data = manifest_of(table_of(LAYOUTS[0]), 4).encode()
    other = b"1" if data[-5:-4] != b"1" else b"2"
    for bad in (data[:-5] + other + data[-4:], data.replace(b"w0", b"w1"), data[:-1] + b" "):
        with pytest.raises(CorruptionError, match="digest does not match its contents"):
            Manifest.decode(bad)


def test_every_dtype_is_stored_with_its_itemsize() -> None:
    for name, dtype in DTYPES.items():
        fields = json.loads(manifest_of(table_of(LAYOUTS[6]), 4).encode())
        fields["tensors"][1] = [[name, dtype.itemsize]]
        fields["files"][1][0] += dtype.itemsize - 4
        assert Manifest.decode(written(fields)).tensors.dtypes == (name,)


def test_a_header_longer_than_safetensors_allows_raises() -> None:
    huge = TensorTable.of(["w"], ["float32"], [4], [Layout(Mesh((1,)), [Replicate()], (1 << 42,))])
    with pytest.raises(FormatError, match="safetensors allows at most 100000000"):
        DataFile(file_plan(huge, 0), "abcdef").header_size  # noqa: B018  # it is worked out here


def test_saving_a_manifest_longer_than_the_limit_raises(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardwright.checkpoint.format.manifest.MAX_BYTES", 5000)
    checkpoint.save({"x": "a" * 4000}, tmp_path)
    with pytest.raises(StateError, match="the manifest would have"):
        checkpoint.save({"x": "a" * 5000}, tmp_path)
    assert checkpoint.read(tmp_path) == {"x": "a" * 4000}
