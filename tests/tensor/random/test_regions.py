"""For any region, device and memory format, a part is bitwise the slice of the global tensor."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from shardwright import Layout, Mesh, Region, Replicate, Shard
from shardwright.errors import RegionError
from shardwright.tensor.random import (
    fill_bernoulli,
    fill_cauchy,
    fill_exponential,
    fill_geometric,
    fill_integers,
    fill_log_normal,
    fill_normal,
    fill_scaled_mask,
    fill_uniform,
    keep_mask,
    lanes,
    permutation,
)
from shardwright.testing.strategies import regions, shapes

REALS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
NUMBERS = [*REALS, torch.complex64, torch.complex128]
INTEGERS = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]

# Each fill with its dtypes and parameters.
FILLS: dict[str, tuple[Callable[..., Tensor], list[torch.dtype], dict[str, float]]] = {
    "uniform": (fill_uniform, NUMBERS, {}),
    "uniform in an interval": (fill_uniform, NUMBERS, {"low": -3.0, "high": 2.5}),
    "normal": (fill_normal, NUMBERS, {}),
    "normal, scaled": (fill_normal, NUMBERS, {"mean": 2.0, "std": 0.1}),
    "bernoulli": (fill_bernoulli, [*REALS, *INTEGERS, torch.bool], {"p": 0.3}),
    "scaled mask": (fill_scaled_mask, NUMBERS, {"keep_probability": 0.9}),
    "integers": (fill_integers, [*REALS, *INTEGERS], {"low": 3, "high": 100}),
    "wide integers": (fill_integers, [torch.int64], {"low": -(2**62), "high": 2**62 + 5}),
    "exponential": (fill_exponential, REALS, {"rate": 2.0}),
    "log-normal": (fill_log_normal, REALS, {"mean": 0.5, "std": 0.25}),
    "cauchy": (fill_cauchy, REALS, {"median": 1.0, "sigma": 2.0}),
    "geometric": (fill_geometric, [*REALS, *INTEGERS], {"p": 0.2}),
}
CASES = [(name, dtype) for name, (_, dtypes, _) in FILLS.items() for dtype in dtypes]

every_fill = pytest.mark.parametrize("name", FILLS)
every_fill_and_type = pytest.mark.parametrize(("name", "dtype"), CASES)


def filled(name: str, dtype: torch.dtype, region: Region, shape: tuple[int, ...], device: str = "cpu") -> Tensor:
    fill, _, parameters = FILLS[name]
    out = torch.empty(region.size, dtype=dtype, device=device)
    assert fill(out, region, shape, seed=17, offset=4, **parameters) is out
    return out


@st.composite
def shape_and_region(draw: st.DrawFn) -> tuple[tuple[int, ...], Region]:
    shape = draw(shapes(max_dims=3, max_side=11))
    return shape, draw(regions(Region.whole(shape)))


@every_fill_and_type
@given(case=shape_and_region())
def test_region_equals_the_slice_of_the_global_tensor(
    name: str, dtype: torch.dtype, case: tuple[tuple[int, ...], Region]
) -> None:
    shape, region = case
    whole = filled(name, dtype, Region.whole(shape), shape)
    assert torch.equal(filled(name, dtype, region, shape), whole[region.slices()])


@every_fill
@given(case=shape_and_region(), size=st.integers(11, 40))
def test_values_do_not_depend_on_the_piece_size(name: str, case: tuple[tuple[int, ...], Region], size: int) -> None:
    shape, region = case
    dtype = FILLS[name][1][-1]
    expected = filled(name, dtype, region, shape)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lanes, "_CPU_PIECE", size)
        assert torch.equal(filled(name, dtype, region, shape), expected)


@every_fill
@pytest.mark.parametrize("placements", [[Shard(0), Replicate()], [Shard(1), Shard(0)], [Shard(0), Shard(0)]])
def test_every_layout_gives_the_same_global_tensor(name: str, placements: list[Shard | Replicate]) -> None:
    shape, dtype = (97, 1003), FILLS[name][1][0]
    whole = filled(name, dtype, Region.whole(shape), shape)
    for region, _ in Layout(Mesh((4, 2)), placements, shape).regions():
        assert torch.equal(filled(name, dtype, region, shape), whole[region.slices()])


@pytest.mark.parametrize("columns", [1, 3, 64, 500, 2000])
def test_long_and_short_runs_of_a_large_tensor_agree(columns: int) -> None:
    shape = (400, 2000)
    whole = fill_uniform(torch.empty(shape), Region.whole(shape), shape, 1, 2)
    for first in range(0, 2000 - columns + 1, 499):
        region = Region((7, first), (390, columns))
        part = fill_uniform(torch.empty(region.size), region, shape, 1, 2)
        assert torch.equal(part, whole[region.slices()])


def test_huge_tensors_have_numbers_at_large_indices() -> None:
    shape = (2**31, 2**30)
    region = Region((2**31 - 2, 2**30 - 3), (2, 3))
    below = Region((2**31 - 1, 2**30 - 3), (1, 3))
    part = fill_normal(torch.empty(2, 3), region, shape, 0, 0)
    assert torch.equal(part[1:], fill_normal(torch.empty(1, 3), below, shape, 0, 0))


@every_fill
def test_values_do_not_depend_on_the_memory_format(name: str) -> None:
    fill, dtypes, parameters = FILLS[name]
    shape, region = (6, 10), Region((1, 2), (4, 7))
    expected = filled(name, dtypes[0], region, shape)
    base = torch.zeros(14, 9, dtype=dtypes[0])
    strided = base[::2, 1:5].t()
    fill(strided, region, shape, 17, 4, **parameters)
    assert torch.equal(strided, expected)
    assert not base[1::2].any()


@every_fill
def test_scalars_and_empty_tensors_are_filled(name: str) -> None:
    dtype = FILLS[name][1][0]
    assert filled(name, dtype, Region((), ()), ()).shape == ()
    assert filled(name, dtype, Region((3, 0), (0, 5)), (9, 5)).numel() == 0


def test_parameters_that_require_grad_are_filled() -> None:
    parameter = torch.nn.Parameter(torch.zeros(4))
    version = parameter._version
    fill_normal(parameter, Region.whole((4,)), (4,), 0, 0)
    assert parameter.detach().all()
    assert parameter._version > version
    strided = torch.nn.Parameter(torch.zeros(4, 2)[:, 0])
    fill_normal(strided, Region.whole((4,)), (4,), 0, 0)
    assert torch.equal(strided, parameter)


def test_tensor_of_probabilities_equals_a_scalar_probability() -> None:
    shape, region = (5, 8), Region((1, 2), (3, 5))
    by_number = fill_bernoulli(torch.empty(3, 5), region, shape, 1, 2, p=0.37)
    by_tensor = fill_bernoulli(torch.empty(3, 5), region, shape, 1, 2, p=torch.full((3, 5), 0.37, dtype=torch.float64))
    assert torch.equal(by_number, by_tensor)
    probabilities = torch.tensor([0.0, 1.0]).repeat(500)
    certain = fill_bernoulli(torch.empty(1000), Region.whole((1000,)), (1000,), 0, 0, p=probabilities)
    assert torch.equal(certain, probabilities)


def test_dropout_mask_is_the_same_for_every_dtype() -> None:
    shape, region = (50, 30), Region((10, 5), (20, 20))
    kept = keep_mask(region, shape, 1, 2, 0.8)
    for dtype in NUMBERS:
        mask = fill_scaled_mask(torch.empty(20, 20, dtype=dtype), region, shape, 1, 2, 0.8)
        assert torch.equal(mask != 0, kept)
        assert set(mask[kept].tolist()) == {torch.tensor(1 / 0.8, dtype=dtype).item()}


def test_tensor_of_another_size_than_the_region_raises() -> None:
    with pytest.raises(RegionError, match=r"shape \(3,\) cannot hold region \[0:4\], of size \(4,\)"):
        fill_uniform(torch.empty(3), Region((0,), (4,)), (8,), 0, 0)
    with pytest.raises(RegionError, match="is not inside"):
        fill_uniform(torch.empty(4), Region((6,), (4,)), (8,), 0, 0)


@pytest.mark.gpu
@every_fill_and_type
def test_cuda_gives_the_same_numbers_as_cpu(name: str, dtype: torch.dtype) -> None:
    shape = (301, 1007)
    for region in (Region.whole(shape), Region((3, 0), (200, 1007)), Region((5, 11), (250, 123))):
        on_cuda = filled(name, dtype, region, shape, "cuda").cpu()
        assert torch.equal(on_cuda, filled(name, dtype, region, shape))


@pytest.mark.gpu
def test_cuda_gives_the_same_masks_and_permutations_as_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lanes, "_DEVICE_PIECE", 1000)
    region, shape = Region((5, 11), (250, 123)), (301, 1007)
    assert torch.equal(keep_mask(region, shape, 1, 2, 0.3, "cuda").cpu(), keep_mask(region, shape, 1, 2, 0.3))
    assert torch.equal(permutation(10_001, 1, 2, "cuda").cpu(), permutation(10_001, 1, 2))
    p = torch.rand(250, 123)
    on_cpu = fill_bernoulli(torch.empty(250, 123), region, shape, 1, 2, p)
    assert torch.equal(fill_bernoulli(torch.empty(250, 123).cuda(), region, shape, 1, 2, p.cuda()).cpu(), on_cpu)
