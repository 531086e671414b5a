"""Targets that overlap in memory, or claim one stored entry twice, are refused before anything changes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from shardwright import checkpoint
from shardwright.checkpoint import PerRank
from shardwright.errors import LoadMismatchError


def test_overlapping_targets_are_refused_but_interleaved_ones_are_not(tmp_path: Path) -> None:
    checkpoint.save({"a": torch.ones(3), "b": torch.full((3,), 2.0)}, tmp_path)
    memory = torch.zeros(4)
    with pytest.raises(LoadMismatchError, match="memory: 'a' and 'b' overlap in memory but are not the same"):
        checkpoint.load({"a": memory[:3], "b": memory[1:]}, tmp_path)
    assert not memory.any()
    pairs = torch.zeros(3, 2)
    checkpoint.load({"a": pairs[:, 0], "b": pairs[:, 1]}, tmp_path)
    assert pairs.tolist() == [[1.0, 2.0]] * 3
    with pytest.raises(LoadMismatchError, match="'a' and 'b' overlap"):
        checkpoint.load({"a": pairs[:, 0], "b": pairs.view(-1)[2:5]}, tmp_path)
    checkpoint.save({"x": torch.arange(6.0).reshape(3, 2), "y": torch.zeros(2)}, tmp_path)
    with pytest.raises(LoadMismatchError, match=r"'x' has strides \[1, 1\], so several of its elements share memory"):
        checkpoint.load({"x": torch.zeros(4).as_strided((3, 2), (1, 1)), "y": torch.zeros(2)}, tmp_path)
    tied = torch.ones(2)
    checkpoint.save({"a": tied, "b": tied, "p": PerRank(tied)}, tmp_path)
    tied = torch.zeros(2)
    checkpoint.load({"a": tied, "b": tied, "p": PerRank(torch.zeros(2))}, tmp_path)
    assert tied.all()


def test_one_stored_entry_fills_one_leaf(tmp_path: Path) -> None:
    checkpoint.save({"a": {"b": torch.ones(1)}, 0: 5}, tmp_path)
    with pytest.raises(
        LoadMismatchError, match=r"missing: 'a.b' is not in the checkpoint \(it has one of that name, und"
    ):
        checkpoint.load({"a": {"b": torch.zeros(1)}, "a.b": torch.zeros(1), 0: 0}, tmp_path)
    with pytest.raises(LoadMismatchError, match="missing: '0' is not"):
        checkpoint.load({"a": {"b": torch.zeros(1)}, 0: 0, "0": 0}, tmp_path)
    with pytest.raises(LoadMismatchError, match="missing: 'False' is not"):
        checkpoint.load({"a": {"b": torch.zeros(1)}, False: 0}, tmp_path)
    checkpoint.save({"a.b": {"c": 1}}, tmp_path)
    assert checkpoint.load({"a": {"b.c": 0}}, tmp_path) == {"a": {"b.c": 1}}
    with pytest.raises(LoadMismatchError, match=r"twice: two leaves of the state have the name 'a.b.c'"):
        checkpoint.load({"a": {"b.c": 0, "b": {"c": 0}}}, tmp_path)
