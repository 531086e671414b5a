"""`verify` reports all corruptions and reads every byte once in bounded memory."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from shardwright import checkpoint
from shardwright.errors import NotACheckpointError
from tests.peak_memory import peak_memory

BLOCK = 1 << 20


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 16
    path.write_bytes(data)


def test_verify_reads_every_byte_of_an_intact_checkpoint(saved: Path) -> None:
    told: list[tuple[int, int]] = []
    report = checkpoint.verify(saved, lambda done, total: told.append((done, total)))
    size = sum(path.stat().st_size for path in saved.glob("*.safetensors"))
    assert report
    assert (report.files, report.nbytes, report.corruptions, report.stray) == (4, size, (), ())
    assert told[-1] == (size, size)
    assert [done for done, _ in told] == sorted(done for done, _ in told)
    assert "is intact: 4 files" in str(report)


def test_verify_reports_all_corruptions(tmp_path: Path) -> None:
    checkpoint.save({"a": torch.zeros(3 * BLOCK // 4), "b": torch.zeros(2 * BLOCK // 4, 1)}, tmp_path)
    (file,) = tmp_path.glob("*.safetensors")
    data = file.stat().st_size - 5 * BLOCK
    for block in (0, 2, 4):
        flip(file, data + block * BLOCK + 77)
    report = checkpoint.verify(tmp_path)
    assert not report
    assert [(one.tensor, str(one.region), one.block) for one in report.corruptions] == [
        ("a", "[0:786432]", 0),
        ("a", "[0:786432]", 2),
        ("b", "[0:524288, 0:1]", 1),
    ]
    assert "is corrupted in 3 places" in str(report)
    assert f"{file.name}: block 1 of [0:524288, 0:1] of tensor 'b' does not match its checksum" in str(report)


def test_verify_reports_missing_truncated_and_stray_files(saved: Path) -> None:
    first, second, third, fourth = sorted(saved.glob("*.safetensors"))
    first.unlink()
    os.truncate(second, second.stat().st_size - 3)
    with third.open("ab") as file:
        file.write(b"more")
    flip(fourth, 60)
    (saved / "aaaaaa-00000-0.safetensors").write_bytes(b"left over")
    report = checkpoint.verify(saved)
    assert not report
    assert report.stray == ("aaaaaa-00000-0.safetensors",)
    found = {one.file: [] for one in report.corruptions}
    for one in report.corruptions:
        found[one.file].append(str(one))
    assert found.keys() == {first.name, second.name, third.name, fourth.name}
    assert found[first.name] == [f"{first.name} is missing"]
    assert "bytes, but the manifest says" in found[second.name][0]
    assert "is truncated" in found[second.name][1]
    assert len(found[third.name]) == 1
    assert "corrupted header" in found[fourth.name][0]


@pytest.mark.parametrize("at", [0, 20, 500, -1])
def test_verify_reports_a_corrupted_manifest(saved: Path, at: int) -> None:
    flip(saved / "manifest.json", at)
    report = checkpoint.verify(saved)
    assert not report
    assert report.corruptions[0].file == "manifest.json"


def test_verify_raises_if_there_is_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(NotACheckpointError):
        checkpoint.verify(tmp_path)


def test_verify_reports_data_files_that_are_not_regular_files(saved: Path) -> None:
    first, second, *_ = sorted(saved.glob("*.safetensors"))
    second.unlink()
    second.symlink_to(first)
    first.unlink()
    os.mkfifo(first)
    report = checkpoint.verify(saved)
    assert [one.file for one in report.corruptions] == [first.name, second.name]
    assert "not a regular file" in report.corruptions[0].problem
    assert "symbolic link" in report.corruptions[1].problem


def test_the_memory_of_verify_does_not_grow_with_the_checkpoint(tmp_path: Path) -> None:
    checkpoint.save({"w": torch.zeros(48 * BLOCK, dtype=torch.uint8)}, tmp_path)
    with peak_memory() as peak:
        assert checkpoint.verify(tmp_path)
    assert peak() < 16 * BLOCK


def test_a_checkpoint_without_tensors_is_intact(tmp_path: Path) -> None:
    checkpoint.save({"epoch": 3}, tmp_path)
    report = checkpoint.verify(tmp_path)
    assert report
    assert report.files == 0
