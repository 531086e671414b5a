"""Loaded values are cast only on request, window by window, without a copy of the full tensor."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from shardwright import checkpoint
from shardwright.errors import RankFailedError, ShardwrightError


@pytest.mark.parametrize("stored", [torch.float64, torch.bfloat16, torch.int16, torch.bool])
def test_cast_equals_tensor_to(stored: torch.dtype, tmp_path: Path) -> None:
    values = torch.randn(700, 900).mul_(100).to(stored)
    checkpoint.save({"w": values}, tmp_path)
    for target in (torch.zeros(700, 900), torch.zeros(900, 700).T, torch.zeros(700, 900, dtype=torch.complex64).conj()):
        found = checkpoint.load({"w": target}, tmp_path, cast=True)["w"]
        assert found is target
        assert torch.equal(found, values.to(target.dtype))


def test_a_dtype_mismatch_raises_without_cast(tmp_path: Path) -> None:
    checkpoint.save({"w": torch.full((3,), 300.7)}, tmp_path)
    target = torch.zeros(3, dtype=torch.int8)
    with pytest.raises((ShardwrightError, RankFailedError), match="float32"):
        checkpoint.load({"w": target}, tmp_path)
    assert not target.any()


def test_load_fills_conjugate_and_negative_views(tmp_path: Path) -> None:
    values = torch.randn(50, 60, dtype=torch.complex64)
    checkpoint.save({"w": values, "i": values.imag.clone()}, tmp_path)
    whole = torch.zeros(50, 60, dtype=torch.complex64)
    target = {"w": torch.zeros_like(values).conj(), "i": whole.conj().imag}
    assert target["w"].is_conj()
    assert target["i"].is_neg()
    checkpoint.load(target, tmp_path)
    assert torch.equal(target["w"], values)
    assert torch.equal(target["i"], values.imag)


@pytest.mark.gpu
def test_load_fills_cuda_tensors_in_place(tmp_path: Path) -> None:
    values = torch.randn(3000, 1500, device="cuda")
    checkpoint.save({"w": values, "columns": values[:, ::2]}, tmp_path)
    target = {"w": torch.zeros_like(values), "columns": torch.zeros(3000, 750, device="cuda", dtype=torch.float64)}
    checkpoint.load(target, tmp_path, cast=True)
    assert torch.equal(target["w"], values)
    assert torch.equal(target["columns"], values[:, ::2].double())
