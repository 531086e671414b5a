"""Many small tensors: shared work is done once, and tensors that need special treatment are still correct."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import shardwright as sw
from shardwright import checkpoint
from shardwright.checkpoint.format.data_file import DataFile
from shardwright.checkpoint.reading import match


def entries_of(folder: Path) -> dict[str, object]:
    (file,) = folder.glob("*.safetensors")
    data = file.read_bytes()
    found: dict[str, object] = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    return found


def test_exact_overlap_checks_run_only_for_tensors_that_may_overlap(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[str] = []
    exact = match._range
    monkeypatch.setattr(match, "_range", lambda wanted, part: looks.append(wanted.name) or exact(wanted, part))
    checkpoint.save({f"t{n}": torch.full((4, 6), float(n)) for n in range(100)}, tmp_path)
    table = torch.zeros(4, 600)
    columns = {f"t{n}": table[:, 6 * n : 6 * n + 6] for n in range(100)}
    apart = {f"t{n}": torch.zeros(4, 6) for n in range(100)}
    checkpoint.load(apart, tmp_path)
    assert looks == []
    checkpoint.load(columns, tmp_path)  # their bytes interleave
    assert sorted(looks) == sorted(columns)
    for n, (one, other) in enumerate(zip(apart.values(), columns.values(), strict=True)):
        assert one.eq(n).all()
        assert other.eq(n).all()


def test_the_header_describes_identical_tensors_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    described: list[int] = []
    describe = DataFile._describe
    monkeypatch.setattr(
        DataFile, "_describe", lambda self, chunk, tensor: described.append(chunk) or describe(self, chunk, tensor)
    )
    state = {f"t{n}": torch.zeros(3, dtype=(torch.float32, torch.complex128)[n % 2]) for n in range(100)}
    checkpoint.save(state, tmp_path)
    assert len(described) == 2
    entries = entries_of(tmp_path)
    assert entries["t0"] == {"dtype": "F32", "shape": [3], "data_offsets": [2400, 2412]}
    assert entries["t1"] == {"dtype": "U8", "shape": [3, 16], "data_offsets": [0, 48]}


@pytest.mark.parametrize("odd", ['a"b', "a\\", "a\n", "a@[0:2]", "a]", "a\u2028é"])
def test_names_that_need_escaping_round_trip(tmp_path: Path, odd: str) -> None:
    state = {"first": torch.zeros(2), odd: torch.ones(2), "last": torch.full((2,), 2.0)}
    checkpoint.save(state, tmp_path)
    key = "a@[0:2]@[0:2]" if odd == "a@[0:2]" else odd
    assert list(entries_of(tmp_path)) == ["__metadata__", "first", key, "last"]
    target = {name: torch.zeros(2) for name in state}
    checkpoint.load(target, tmp_path)
    assert all(torch.equal(target[name], state[name]) for name in state)


def test_a_tensor_and_a_dtensor_of_the_same_memory_are_stored_as_one(tmp_path: Path) -> None:
    local = torch.arange(6.0)
    whole = sw.DTensor.from_local(local, sw.init_device_mesh("cpu", (1,)), [sw.Replicate()], run_check=False)
    assert whole.to_local().data_ptr() == local.data_ptr()
    checkpoint.save({"plain": local, "spread": whole}, tmp_path)
    loaded = checkpoint.read(tmp_path)
    assert loaded["plain"] is loaded["spread"]


def test_non_contiguous_conjugate_and_cast_targets_are_filled(tmp_path: Path) -> None:
    state = {f"t{n}": torch.randn(2, 3, dtype=torch.complex64) for n in range(4)}
    checkpoint.save(state, tmp_path)
    memory = [torch.zeros(2, 3, dtype=torch.complex64) for _ in range(4)]
    memory[1] = torch.zeros(3, 2, dtype=torch.complex64).T
    memory[2] = torch.zeros(2, 3, dtype=torch.complex64).conj()
    memory[3] = torch.zeros(2, 3, dtype=torch.complex128)
    checkpoint.load(dict(zip(state, memory, strict=True)), tmp_path, cast=True)
    assert all(torch.equal(one.to(torch.complex64), other) for one, other in zip(memory, state.values(), strict=True))


def test_load_increments_the_version_counter_of_every_tensor(tmp_path: Path) -> None:
    state = {"a": torch.ones(2), "b": torch.nn.Parameter(torch.ones(2)), "c": torch.ones(0)}
    with torch.inference_mode():
        state["d"] = torch.ones(2)
    checkpoint.save(state, tmp_path)
    before = {name: state[name]._version for name in "abc"}
    checkpoint.load(state, tmp_path)
    assert all(state[name]._version > before[name] for name in before)
