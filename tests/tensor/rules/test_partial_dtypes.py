"""A cast of a partial sum is the cast of the sum: partial values are never rounded, truncated or wrapped separately."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional

import shardwright as sw
from shardwright.errors import InPlaceError
from shardwright.tensor.dispatch.decompose import python_body, writes_to_intermediates
from shardwright.testing import on_ranks, prove

S, R, P = sw.Shard, sw.Replicate, sw.Partial


def partial_sum(values: list[list[float]], dtype: torch.dtype, op: str = "sum") -> sw.DTensor:
    """Return a DTensor whose partial value on rank r is `values[r]`."""
    mesh = sw.init_device_mesh("cpu", (2,))
    return sw.DTensor.from_local(torch.tensor(values[mesh.get_rank()], dtype=dtype), mesh, [P(op)])


# They cancel: rounded separately, 1e5 and -99999 become 0 in bfloat16 and NaN in float16.
CANCEL = [[1e5, 300.0, 0.75], [-99999.0, -299.0, 0.75]]

CASTS = {
    "half": lambda x: x.half(),
    "bfloat16": lambda x: x.bfloat16(),
    "float": lambda x: x.float(),
    "double": lambda x: x.double(),
    "cfloat": lambda x: x.cfloat(),
    "int": lambda x: x.int(),
    "bool": lambda x: (x - 1).bool(),
    "to dtype": lambda x: x.to(torch.bfloat16),
    "to dtype by name": lambda x: x.to(dtype=torch.float16),
    "to device and dtype": lambda x: x.to("cpu", torch.bfloat16),
    "to complex": lambda x: x.to(torch.complex64),
    "to whole numbers": lambda x: x.to(torch.int16),
    "to another": lambda x: x.to(torch.zeros((), dtype=torch.float16)),
    "type": lambda x: x.type(torch.bfloat16),
    "type by name": lambda x: x.type("torch.HalfTensor"),
    "type by class": lambda x: x.type(torch.HalfTensor),
    "type_as": lambda x: x.type_as(torch.zeros((), dtype=torch.float16)),
    "sum": lambda x: x.sum(dtype=torch.float16),
    "mean": lambda x: x.mean(dtype=torch.float16),
    "cumsum": lambda x: x.cumsum(0, dtype=torch.bfloat16),
    "nansum": lambda x: x.nansum(dtype=torch.float16),
    "to narrow and back": lambda x: x.bfloat16().double(),
    "copy into narrower": lambda x: torch.empty_like(x, dtype=torch.bfloat16).copy_(x),
    "a product with a wide number": lambda x: x[0] * torch.ones(3, dtype=torch.float16),
    "a sum with a wide number": lambda x: x[0] + torch.zeros(3, dtype=torch.bfloat16),
}


@on_ranks(2, timeout=60)
def test_casting_a_partial_sum_gives_the_cast_of_the_sum() -> None:
    for dtype in (torch.float64, torch.float32):
        for op in ("sum", "avg", "max"):
            for name, cast in CASTS.items():
                x = partial_sum(CANCEL, dtype, op)
                with sw.implicit_replication():
                    found = cast(x)
                expected = cast(x.full_tensor())
                assert found.dtype == expected.dtype, (name, dtype, op)
                same = torch.testing.assert_close
                same(found.full_tensor(), expected, rtol=0, atol=0, msg=lambda m, n=name, o=op: f"{n} of {o}: {m}")


@on_ranks(2, timeout=60)
def test_lossless_casts_keep_partial_sums_partial() -> None:
    x = partial_sum(CANCEL, torch.float32)
    with sw.trace() as seen:
        results = [x.double(), x.to(torch.float64), x.to(torch.complex64), x.float(), x.to(x.double())]
    assert not seen.redistributions
    assert all(result.sharding.is_partial for result in results)
    assert all(result.full_tensor().real[0] == 1 for result in results)


@on_ranks(2, timeout=60)
def test_small_integers_wrap_around_before_they_are_widened() -> None:
    x = partial_sum([[100, 3], [100, 4]], torch.int8)
    assert x.full_tensor().tolist() == [-56, 7]
    for found in (x.to(torch.int32), x.long(), x.float(), x * 1.0, x / 1):
        assert found.full_tensor().tolist() == [-56, 7]
    assert x.sum().item() == -49
    assert x.cumsum(0).full_tensor().tolist() == [-56, -49]
    assert torch.cat([x.float(), x]).full_tensor().tolist() == [-56, 7, -56, 7]


@on_ranks(2, timeout=60)
def test_to_other_uses_only_its_dtype_and_keeps_its_layout() -> None:
    x = partial_sum(CANCEL, torch.float32)
    other = sw.distribute_tensor(torch.zeros(64, dtype=torch.float64), sw.init_device_mesh("cpu", (2,)), [S(0)])
    with sw.trace() as seen:
        found = x.to(other), x.type_as(other)
    assert not seen.redistributions
    assert all(one.dtype == torch.float64 and one.full_tensor()[0] == 1 for one in found)


@on_ranks(2, timeout=60)
def test_autocast_reduces_partial_sums_before_casting() -> None:
    w = torch.eye(3)
    x = partial_sum(CANCEL, torch.float32).reshape(1, 3)
    weight = sw.distribute_tensor(w, sw.init_device_mesh("cpu", (2,)), [R()])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = [x @ weight, functional.linear(x, weight), torch.einsum("bi,ij->bj", x, weight)]
        expected = x.full_tensor() @ w
    for one in found:
        assert torch.equal(one.full_tensor(), expected)


@on_ranks(2, timeout=60)
def test_writing_a_wider_partial_sum_to_a_partial_sum_is_correct_or_raises() -> None:
    wide = partial_sum(CANCEL, torch.float64)
    expected = wide.full_tensor().half()
    for op in ("sum", "avg", "max"):
        target = partial_sum([[0.0] * 3] * 2, torch.float16, op)
        target.copy_(wide)
        assert torch.equal(target.full_tensor(), expected), op
    target = partial_sum([[0.0] * 3] * 2, torch.float16)
    target[:] = wide
    assert torch.equal(target.full_tensor(), expected)
    target = partial_sum([[1.0] * 3, [2.0] * 3], torch.float16)
    for write in (target.add_, target.sub_):
        with pytest.raises(InPlaceError):
            write(wide)
        assert target.full_tensor().tolist() == [3.0] * 3


@on_ranks(2, timeout=60)
def test_the_gradient_of_a_cast_partial_sum_is_that_of_the_sum() -> None:
    x = partial_sum(CANCEL, torch.float32).requires_grad_()
    y = x.bfloat16()
    (y * y).sum().backward()
    assert x.grad.full_tensor().tolist() == [2.0, 2.0, 3.0]


@on_ranks(2, timeout=60)
def test_torch_functions_that_write_in_place_internally_accept_partial_sums() -> None:
    mesh = sw.init_device_mesh("cpu", (2,))
    torch.manual_seed(0)
    x, target, var = torch.randn(3, 3), torch.randn(3, 3), torch.rand(3, 3) + 1
    spread = [
        sw.distribute_tensor(t, mesh, [R()]).redistribute(placements=[P()]).requires_grad_() for t in (x, target, var)
    ]
    loss = functional.gaussian_nll_loss(*spread, full=True)
    own = [t.clone().requires_grad_() for t in (x, target, var)]
    expected = functional.gaussian_nll_loss(*own, full=True)
    torch.testing.assert_close(loss.full_tensor(), expected)
    loss.backward()
    expected.backward()
    for ours, theirs in zip(spread, own, strict=True):
        torch.testing.assert_close(ours.grad.full_tensor(), theirs.grad)
    sw.manual_seed(0)
    drawn = functional.gumbel_softmax(spread[0], hard=True).full_tensor()
    assert drawn.sum(-1).tolist() == [1.0] * 3
    out = sw.distribute_tensor(torch.zeros(3, 3), mesh, [S(0)])
    for placement in (P(), S(1)):
        with torch.no_grad():
            functional.normalize(
                sw.distribute_tensor(x, mesh, [R()]).redistribute(placements=[placement]), p=1.0, out=out
            )
        torch.testing.assert_close(out.full_tensor(), functional.normalize(x, p=1.0))


def test_all_torch_functions_that_write_in_place_internally_are_tested() -> None:
    public = [
        getattr(module, name) for module in (functional, torch.functional) for name in dir(module) if name[0] != "_"
    ]
    found = {f.__name__ for f in public if callable(f) and python_body(f) is not None and writes_to_intermediates(f)}
    # All of these are tested with partial sums above; add new ones there too.
    assert found <= {"gaussian_nll_loss", "gumbel_softmax", "normalize"}, found


def test_rules_are_proved_for_int_and_bool_tensors() -> None:
    small = torch.tensor([[100, 27, 3], [-90, 5, 77]], dtype=torch.int8)
    image = torch.randint(0, 200, (1, 2, 4, 4), dtype=torch.uint8)
    bools = torch.tensor([True, False, True, True])
    for proof in (
        prove(torch.sum, small, ranks=5),
        prove(torch.cumsum, small, 1, ranks=5),
        prove(torch.add, small, small.float(), ranks=5),
        prove(torch.mul, small, 0.5, ranks=5),
        prove(torch._C._nn.upsample_bilinear2d, image, [6, 6], False, ranks=5),
        prove(torch.pixel_shuffle, bools.reshape(1, 4, 1, 1), 2, ranks=5),
        prove(torch._C._nn.im2col, bools.reshape(1, 1, 2, 2), [2, 2], [1, 1], [0, 0], [1, 1], ranks=3),
    ):
        assert not proof.wrong, proof


@on_ranks(2, timeout=60)
def test_half_precision_modules_accept_partial_sums() -> None:
    layer = sw.distribute_module(nn.Linear(3, 2).bfloat16(), sw.init_device_mesh("cpu", (2,)))
    x = partial_sum(CANCEL, torch.float32).reshape(1, 3)
    found = layer(x.to(layer.weight.dtype)).full_tensor()
    expected = functional.linear(x.full_tensor().bfloat16(), layer.weight.full_tensor(), layer.bias.full_tensor())
    assert torch.equal(found, expected)
