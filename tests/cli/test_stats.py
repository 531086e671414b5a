"""`shardwright stats`: numpy's numbers, a block at a time, without cancellation."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch

from shardwright import checkpoint
from shardwright.cli.moments import Moments
from tests.cli.conftest import Cli
from tests.cli.example import weights


def test_stats_are_those_of_numpy(cli: Cli, step: Path) -> None:
    found = {tensor["name"]: tensor for tensor in cli("stats", step, "--json").json["tensors"]}
    for name, tensor in weights(200).items():
        array, stats = tensor.double().numpy(), found[f"model.{name}"]
        assert (stats["minimum"], stats["maximum"]) == (array.min(), array.max())
        assert stats["mean"] == pytest.approx(array.mean(), rel=1e-12, abs=1e-15)
        assert stats["std"] == pytest.approx(array.std(), rel=1e-12, abs=1e-15)
        if stats["std"]:
            assert stats["histogram"] == np.histogram(array, 16, (array.min(), array.max()))[0].tolist()


def test_nan_and_infinite_values_are_counted_and_left_out(cli: Cli, tmp_path: Path) -> None:
    w = torch.tensor([1.0, 3.0, math.nan, math.inf, -math.inf, 0.0, math.nan])
    checkpoint.save({"w": w, "bad": torch.full((2,), math.nan), "none": torch.zeros(0)}, tmp_path / "c")
    w_stats, bad, none = cli("stats", tmp_path / "c", "--json").json["tensors"]
    assert (w_stats["nans"], w_stats["infinities"], w_stats["zeros"], w_stats["minimum"], w_stats["maximum"]) == (
        2,
        2,
        1,
        0,
        3,
    )
    assert w_stats["mean"] == pytest.approx(4 / 3)
    assert (bad["nans"], bad["minimum"], bad["mean"], bad["std"], bad["histogram"]) == (2, None, None, None, [])
    assert (none["elements"], none["minimum"]) == (0, None)
    assert cli("stats", tmp_path / "c").code == 0
    assert cli("stats", tmp_path / "c", "--fail-on-nan").code == 1
    assert cli("stats", tmp_path / "c", "none", "--fail-on-nan").code == 0


def test_a_tensor_of_many_blocks_gives_the_same_numbers(cli: Cli, tmp_path: Path) -> None:
    """Larger than what is kept in memory: it is read twice, in 18 MiB of 4 MiB blocks."""
    whole = torch.randn(3 << 19, 3, generator=torch.Generator().manual_seed(0)) + 1e4
    checkpoint.save({"w": whole}, tmp_path / "c")
    (stats,) = cli("stats", tmp_path / "c", "--json", "--bins", "7").json["tensors"]
    array = whole.double().numpy()
    assert stats["mean"] == pytest.approx(array.mean(), rel=1e-14)
    assert stats["std"] == pytest.approx(array.std(), rel=1e-10)
    assert stats["histogram"] == np.histogram(array, 7)[0].tolist()


@pytest.mark.parametrize(
    ("numbers", "mean", "std"),
    [
        (np.array([1e9 + 4, 1e9 + 7, 1e9 + 13, 1e9 + 16]), 1e9 + 10, math.sqrt(22.5)),
        (np.array([1e300, 3e300]), 2e300, 1e300),
        (np.array([-1.7e308, 1.7e308]), 0.0, 1.7e308),
        (np.array([2**62, 2**62 + 2**40]), 2.0**62 + 2**39, 2.0**39),
        (np.array([7] * 10, np.uint64), 7.0, 0.0),
    ],
)
def test_nothing_cancels_and_nothing_overflows(numbers: np.ndarray, mean: float, std: float) -> None:
    for parts in (1, len(numbers)):
        moments = Moments()
        for block in np.split(numbers, parts):
            moments.add(block)
        assert moments.mean == pytest.approx(mean, rel=1e-15)
        assert moments.std == pytest.approx(std, rel=1e-12)


@pytest.mark.parametrize(
    "dtype",
    [torch.bool, torch.uint16, torch.uint64, torch.int64, torch.float16, torch.float8_e4m3fn, torch.complex64],
    ids=str,
)
def test_every_dtype_has_stats(cli: Cli, tmp_path: Path, dtype: torch.dtype) -> None:
    checkpoint.save({"w": torch.tensor([0.0, 1.0, 3.0]).to(dtype)}, tmp_path / "c")
    (stats,) = cli("stats", tmp_path / "c", "--json").json["tensors"]
    assert (stats["minimum"], stats["zeros"]) == (0, 1)
    assert stats["maximum"] == (1 if dtype == torch.bool else 3)


def test_extremes_of_64_bit_integers_are_exact(cli: Cli, tmp_path: Path) -> None:
    checkpoint.save({"w": torch.tensor([-(2**63), 2**63 - 1])}, tmp_path / "c")
    (stats,) = cli("stats", tmp_path / "c", "--json").json["tensors"]
    assert (stats["minimum"], stats["maximum"]) == (-(2**63), 2**63 - 1)


def test_bins_out_of_range_are_misuse(cli: Cli, step: Path) -> None:
    assert cli("stats", step, "--bins", "0").code == 2
    assert cli("stats", step, "--bins", "many").code == 2
