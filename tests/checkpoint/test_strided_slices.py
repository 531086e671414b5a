"""Slices of a stored tensor with a large step, invalid slices, and bool tensors in verify."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from shardwright import checkpoint
from shardwright.errors import ArgumentTypeError, RegionError
from shardwright.storage import LocalStorage
from tests.checkpoint.allocations import noting
from tests.checkpoint.calls import CountingReads

MIB = 1 << 20


def test_verify_reports_bool_tensors_with_invalid_bytes(tmp_path: Path) -> None:
    good, bad = torch.ones(2 * MIB, dtype=torch.bool), torch.ones(2 * MIB, dtype=torch.uint8)
    bad[MIB + 5] = 2
    checkpoint.save({"good": good, "bad": bad.view(torch.bool), "other": bad}, tmp_path)
    report = checkpoint.verify(tmp_path)
    assert not report
    (damage,) = report.corruptions
    assert (damage.tensor, damage.block) == ("bad", 1)
    assert "other than 0 and 1" in str(damage)


def test_a_slice_with_a_large_step_reads_only_the_wanted_layers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = torch.arange(8000 * 600, dtype=torch.int32).reshape(8000, 600)
    cube = torch.arange(40 * 30 * 5000, dtype=torch.int32).reshape(40, 30, 5000)
    truths = torch.arange(4 * MIB).reshape(4, MIB) % 3 == 0
    checkpoint.save({"w": whole, "c": cube, "t": truths}, tmp_path)
    calls = CountingReads()
    with checkpoint.open(LocalStorage(str(tmp_path), calls)) as saved:
        assert torch.equal(saved["w"][:1], whole[:1])
        sizes: list[Any] = []
        before = calls.read
        with monkeypatch.context() as patched:
            patched.setattr(torch, "empty", noting(sizes))
            assert torch.equal(saved["w"][::4000], whole[::4000])
        assert calls.read - before <= 3 * MIB
        assert [2, 600] in sizes
        assert [4001, 600] not in sizes
        rows: list[Any] = [np.s_[::-3000], np.s_[7000:10:-2500, 5:9], np.s_[None, ::5000, None, ::-7], np.s_[::3, 3]]
        for index in rows:
            assert np.array_equal(saved.numpy("w")[index], whole.numpy()[index]), index
        layers: list[Any] = [np.s_[::-9, ::11, 3:7], np.s_[..., ::29, ::2], np.s_[3, None, ::-14], np.s_[5:5:20]]
        for index in [*layers, np.s_[::20]]:
            assert np.array_equal(saved.numpy("c")[index], cube.numpy()[index]), index
        assert torch.equal(saved["t"][::2], truths[::2])


def test_an_invalid_slice_is_refused_with_its_dimension(tmp_path: Path) -> None:
    checkpoint.save({"w": torch.ones(4, 4)}, tmp_path)
    with checkpoint.open(tmp_path) as saved:
        with pytest.raises(RegionError, match=r"slice\(None, None, 0\) of dimension 1: the step must not be 0"):
            saved["w"][:, ::0]
        with pytest.raises(ArgumentTypeError, match=r"slice\('a', None, None\) of dimension 0"):
            saved["w"]["a":]
