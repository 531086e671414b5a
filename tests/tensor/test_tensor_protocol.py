"""Attributes and methods of a DTensor describe the global tensor, and reading metadata never communicates."""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import shardwright as sw
from shardwright import comm
from shardwright.testing import run_ranks

R, S0, S1, P = sw.Replicate(), sw.Shard(0), sw.Shard(1), sw.Partial()
ATEN = operator.attrgetter("ops.aten")  # looked up by name: functions sent to the pool cannot refer to torch.ops

# Not about the global value: identity, or local state of this process.
OF_THIS_PROCESS = {
    *("data_ptr", "untyped_storage", "storage", "_typed_storage", "_cdata", "_use_count", "_backward_hooks"),
    *("_post_accumulate_grad_hooks", "_python_dispatch", "grad_fn", "_grad_fn", "_base", "_is_view"),
    *("__dict__", "_layout"),
}
COUNTERS = ("__hash__", "_version", "output_nr")
COMPARABLE = (bool, int, str, tuple, torch.dtype, torch.device, type(None))
# These compute a tensor, or no longer exist.
VALUES = {
    *("volatile", "is_nonzero", "_is_all_true", "_is_any_true", "__cuda_array_interface__"),
    *("T", "mT", "H", "mH", "real", "imag", "data", "grad", "_grad"),
}
QUESTIONS = {
    *("data_ptr", "element_size", "storage_offset", "untyped_storage", "get_device", "dim", "ndimension", "numel"),
    *("nelement", "size", "stride", "dim_order", "type", "has_names", "_use_count", "_dimI", "_dimV"),
    *("_has_symbolic_sizes_strides", "__len__", "__hash__", "_nested_tensor_size"),
}


def _mesh() -> Any:
    return sw.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))


def _answer(tensor: Any, name: str) -> Any:
    """Return the attribute or the result of the method; the type of the error if it raises."""
    try:
        value = getattr(tensor, name)
        return value() if callable(value) and not isinstance(value, torch.Tensor) else value
    except (RuntimeError, TypeError, AttributeError, NotImplementedError, ValueError) as error:
        return type(error)


def _about(kind: type) -> list[str]:
    """Return all attributes and predicates of the class; generated, so that new ones are not missed."""
    names = []
    for name in dir(kind):
        value = getattr(kind, name, None)
        asked = name.startswith(("is_", "_is_", "has_")) or name in QUESTIONS
        plain = not callable(value) and not name.startswith("__")
        if (asked or plain) and name not in VALUES and name not in ("is_set_to", "is_same_size"):
            names.append(name)
    return names


def test_metadata_describes_the_global_tensor_without_communication() -> None:
    """Every getter and predicate of torch.Tensor."""

    def on_rank() -> dict[str, str]:
        mesh, wrong = _mesh(), {}
        whole = torch.arange(20.0).reshape(5, 4)
        for placements in ([S0, S1], [S1, R], [R, R]):
            x = sw.distribute_tensor(whole, mesh, placements)
            for name in _about(torch.Tensor):
                with comm.count() as traffic:
                    ours = _answer(x, name)
                if traffic.calls.total():
                    wrong[name] = "communicates"
                elif name not in OF_THIS_PROCESS:
                    reference = _answer(whole, name)
                    if type(reference) not in (type(ours), type) and not isinstance(reference, type(ours)):
                        wrong[name] = f"{ours!r} of type {type(ours).__name__}, not {reference!r}"
                    elif name not in COUNTERS and isinstance(reference, COMPARABLE) and ours != reference:
                        wrong[name] = f"{ours!r}, not {reference!r}"
        return wrong

    assert len(_about(torch.Tensor)) > 50
    for wrong in run_ranks(4, on_rank):
        assert wrong == {}


def test_predicates_describe_the_global_tensor() -> None:
    def on_rank() -> None:
        mesh = _mesh()
        value = torch.randn(5, 4, generator=torch.Generator().manual_seed(0))
        x, y = sw.distribute_tensor(value, mesh, [S0, S1]), sw.distribute_tensor(value, mesh, [R, S0])
        other = sw.distribute_tensor(torch.ones(6, 4), mesh, [S0, S1])
        with comm.count() as traffic:
            assert torch.is_tensor(x)
            assert torch.numel(x) == 20
            assert torch.is_floating_point(x)
            assert not torch.is_complex(x)
            assert torch.is_nonzero(sw.ones((), mesh=mesh)) is True
            assert torch.result_type(x, 1.0) == torch.float32
            assert torch.result_type(x, x.to(torch.float64)) == torch.float64
            assert torch.is_same_size(x, y)
            assert not x.is_same_size(other)  # although rank 0 holds equally much of both
            assert torch.Tensor.dim(x) == 2
            assert torch.Tensor.size(x) == (5, 4)
            assert torch.broadcast_shapes(x.shape, y.shape) == (5, 4)
            assert len({x, y, x}) == 2
            assert {x: 1}[x] == 1
        assert traffic.calls.total() == 0
        assert torch.equal(x, y)
        assert not torch.equal(x, other)
        assert torch.allclose(x, y + 1e-9)
        assert not torch.allclose(x, y + 1)
        assert bool((x == y).all())
        torch.testing.assert_close(x.full_tensor(), value)

    run_ranks(4, on_rank)


def test_global_values_are_read_on_every_rank() -> None:
    def on_rank() -> None:
        mesh = _mesh()
        value = torch.arange(20.0).reshape(5, 4)
        for placements in ([S0, S1], [S0, S0], [R, S1]):
            x = sw.distribute_tensor(value, mesh, placements)
            assert x.tolist() == value.tolist()
            assert np.array_equal(x.numpy(), value.numpy())
            assert np.array_equal(np.asarray(x), value.numpy())
            assert x.sum().item() == 190.0
            assert float(x.sum()) == 190.0
            assert int(x.max()) == 19
            assert bool(x.sum() > 3)
            assert complex(x.sum()) == 190 + 0j
            assert [0, 1, 2][x.to(torch.int64).sum() - 188] == 2
            assert len(x) == 5
            assert [row.tolist() for row in x] == value.tolist()
            assert 7.0 in x
            assert 70.0 not in x
            assert f"{x.sum():.1f}" == "190.0"
            assert "S(1)" in repr(x) or "S(0)" in repr(x)
            assert str(x) == repr(x) == f"{x}"
            assert [r.tolist() for r in reversed(x)] == value.flip(0).tolist()
        addends = sw.DTensor.from_local(torch.ones(3), mesh, [P, R])
        assert addends.tolist() == [2.0] * 3
        with pytest.raises(RuntimeError, match="elements cannot be converted to Scalar"):
            x.item()
        with pytest.raises(TypeError, match="0-d"):
            len(x.sum())

    run_ranks(4, on_rank)


def test_copies_keep_layout_values_and_attributes() -> None:
    """The class has no slots, and an object that returns from C++ keeps its class and layout."""

    def on_rank() -> None:
        mesh = _mesh()
        x = sw.distribute_tensor(torch.arange(20.0).reshape(5, 4), mesh, [S0, S1]).requires_grad_()
        (x**2).sum().backward()
        deep = copy.deepcopy(x)
        assert deep.sharding is x.sharding
        assert deep.requires_grad
        assert torch.equal(deep, x)
        assert torch.equal(deep.grad, x.grad)
        assert deep.grad is not x.grad
        with torch.no_grad():
            deep.zero_()
        assert x.sum().item() == 190
        shallow = copy.copy(x)
        assert shallow.sharding is x.sharding
        assert torch.equal(shallow, x)
        with pytest.raises(RuntimeError, match="graph leaves"):
            copy.deepcopy(x * 2)
        x.note = "kept"
        assert copy.deepcopy(x).note == "kept"
        y = x * 2
        node = y.grad_fn
        del y
        assert node is not None
        (x * 3).sum().backward()
        gradient = x.grad
        del gradient  # only C++ refers to it now
        assert isinstance(x.grad, sw.DTensor)
        assert x.grad.sharding is x.sharding

    run_ranks(4, on_rank)


RETURN_THEIR_INPUT: dict[str, Callable[[Any], Any]] = {
    "flatten": lambda x: x.flatten(0, 0),
    "contiguous": lambda x: x.contiguous(),
    "to": lambda x: x.to(torch.float32),
    "to device": lambda x: x.to("cpu"),
    "float": lambda x: x.float(),
    "cpu": lambda x: x.cpu(),
    "dropout": lambda x: torch.nn.functional.dropout(x, 0.5, training=False),
    "real": lambda x: torch.real(x),
    "positive": lambda x: torch.positive(x),
    "broadcast_tensors": lambda x: torch.broadcast_tensors(x, x)[0],
    "type_as": lambda x: x.type_as(x),
    "conj": lambda x: torch.conj(x),
    "resolve_conj": lambda x: x.resolve_conj(),
    "sum_to_size": lambda x: x.sum_to_size(5, 4),
    "atleast_1d": lambda x: torch.atleast_1d(x),
    "atleast_2d": lambda x: torch.atleast_2d(x),
    "reshape": lambda x: x.reshape(5, 4),
    "view_as": lambda x: x.view_as(x),
    "expand": lambda x: x.expand(5, 4),
    "type": lambda x: x.type(torch.float32),
    "detach_": lambda x: x.detach().detach_(),
    "requires_grad_": lambda x: x.detach().requires_grad_(),
    "squeeze": lambda x: x.squeeze(),
    "as_tensor": lambda x: torch.as_tensor(x),
    "aten.alias": lambda x: ATEN(torch).alias.default(x),
}


def test_functions_that_may_return_their_input_leave_it_unchanged() -> None:
    """An argument keeps class, layout, memory and identity."""

    def on_rank() -> dict[str, str]:
        mesh, wrong = _mesh(), {}
        value = torch.arange(20.0).reshape(5, 4)
        for placements in ([S0, S1], [R, S0], [R, R], [P, R]):
            for name, function in RETURN_THEIR_INPUT.items():
                given = value if P not in placements else value / 2
                if P in placements:
                    x = sw.DTensor.from_local(given.clone(), mesh, placements)
                else:
                    x = sw.distribute_tensor(given, mesh, placements)
                layout, memory = x.sharding, x.to_local().data_ptr()
                result = function(x)
                if not isinstance(result, sw.DTensor) or not torch.equal(result.full_tensor(), value):
                    wrong[name] = f"{placements}: gave {result}"
                elif x.sharding is not layout or type(x) is not sw.DTensor or x.to_local().data_ptr() != memory:
                    wrong[name] = f"{placements}: its argument became {x.sharding}"
                elif result is x and result.sharding is not layout:
                    wrong[name] = "retagged its argument"
        return wrong

    for wrong in run_ranks(4, on_rank):
        assert wrong == {}


def test_out_returns_the_given_tensor_and_plain_targets_raise() -> None:
    """`out=` returns the tensor that was given."""

    def on_rank() -> None:
        mesh = _mesh()
        x = sw.distribute_tensor(torch.arange(20.0).reshape(5, 4), mesh, [S0, S1])
        out = sw.zeros(5, 4, mesh=mesh, placements=[R, S0])
        layout = out.sharding
        assert torch.add(x, 1, out=out) is out
        assert out.sharding is layout
        assert torch.equal(out.full_tensor(), torch.arange(20.0).reshape(5, 4) + 1)
        assert torch.linalg.vector_norm(x, out=None).shape == ()
        with pytest.raises(RuntimeError, match="argument 'out' is a plain tensor"):
            torch.add(x, 1, out=torch.zeros(5, 4))

    run_ranks(4, on_rank)


def test_errors_of_operators_reach_the_user_unchanged() -> None:
    """A TypeError would become "unsupported operand type(s)"."""
    x = sw.ones(3, mesh=sw.init_device_mesh("cpu", (1,)))
    for operate in (operator.add, operator.mul, operator.truediv, operator.matmul, operator.lt, operator.pow):
        for sides in ((x, torch.ones(3)), (torch.ones(3), x)):
            with pytest.raises(sw.errors.MixedTensorsError, match="is a plain tensor"):
                operate(*sides)


def test_aten_overloads_use_the_rules_of_their_operators() -> None:
    """`torch.ops.aten.*` packets and overloads use the rule of the torch function."""

    def on_rank() -> None:
        mesh = _mesh()
        value = torch.randn(4, 4, generator=torch.Generator().manual_seed(0))
        x = sw.distribute_tensor(value, mesh, [S0, S1])
        aten = ATEN(torch)
        for ours, reference in [
            (aten.add.Tensor(x, x), value + value),
            (aten.add(x, x), value + value),
            (aten.mul.Scalar(x, 2.0), value * 2),
            (aten.relu.default(x), value.relu()),
            (aten.neg(x), -value),
            (aten.sum.dim_IntList(x, [0]), value.sum(0)),
            (aten._softmax.default(x, -1, False), value.softmax(-1)),
            (aten.mm.default(x, x), value @ value),
            (aten.t.default(x), value.T),
        ]:
            torch.testing.assert_close(ours.full_tensor(), reference)
        with comm.count() as traffic:
            assert aten.add.Tensor(x, x).sharding is x.sharding
            assert aten.relu.default(x).sharding is x.sharding
            y = aten.mul_.Tensor(x, x)
        assert y is x
        assert traffic.calls.total() == 0
        torch.testing.assert_close(x.full_tensor(), value * value)

    run_ranks(4, on_rank)


def test_writes_are_never_lost() -> None:
    """The DTensor holds whatever torch writes to it."""

    def on_rank() -> None:
        mesh = _mesh()
        value = torch.arange(20.0).reshape(5, 4)

        def check(name: str, write: Callable[[Any], Any]) -> None:
            for placements in ([S0, S1], [R, S0]):
                x, reference = sw.distribute_tensor(value, mesh, placements), value.clone()
                layout = x.sharding
                write(x)
                write(reference)
                assert x.sharding is layout, name
                torch.testing.assert_close(x.full_tensor(), reference, msg=name)

        check("setitem", lambda x: x.__setitem__(2, 5.0))
        check("setitem slice", lambda x: x.__setitem__((slice(1, 4), slice(None, None, 2)), 7.0))
        check("setitem mask", lambda x: x.__setitem__(x > 9, 0.0))
        check("fill_diagonal_", lambda x: x.fill_diagonal_(3.0))
        check("masked_fill_", lambda x: x.masked_fill_(x > 3, 1.0))
        check("sort out of order", lambda x: x.copy_(x.flip(0)))
        check("triu_", lambda x: x.triu_())
        check("clamp_", lambda x: x.clamp_(2, 9))
        check("exponential rules", lambda x: x.mul_(2).add_(1).sqrt_())
        norm, plain = torch.nn.BatchNorm1d(4), torch.nn.BatchNorm1d(4)
        norm = sw.distribute_module(norm, mesh)
        norm(sw.distribute_tensor(value, mesh, [S0, R]))
        plain(value)
        torch.testing.assert_close(norm.running_mean.full_tensor(), plain.running_mean)
        torch.testing.assert_close(norm.running_var.full_tensor(), plain.running_var)
        assert norm.num_batches_tracked.item() == 1

    run_ranks(4, on_rank)


def test_python_composites_read_global_sizes() -> None:
    """Torch functions written in Python would mix global and local sizes if they were not decomposed."""

    def on_rank() -> None:
        mesh = _mesh()
        value = torch.randn(5, 4, generator=torch.Generator().manual_seed(0))
        x = sw.distribute_tensor(value, mesh, [S0, S1])
        for name, function in {
            "cosine_similarity": lambda x: torch.nn.functional.cosine_similarity(x, x + 1),
            "normalize": lambda x: torch.nn.functional.normalize(x, dim=0),
            "split": lambda x: torch.cat(torch.split(x, 2)),
            "tensordot": lambda x: torch.tensordot(x, x, dims=([0], [0])),
            "einsum": lambda x: torch.einsum("ij,kj->ik", x, x),
            "norm": lambda x: torch.norm(x, dim=1),
            "cdist": lambda x: torch.cdist(x, x),
            "unravel": lambda x: torch.atleast_3d(x),
            "meshgrid": lambda x: torch.meshgrid(x[0], x[1], indexing="ij")[0],
            "block_diag": lambda x: torch.block_diag(x, x),
            "rsub": lambda x: 1 - x,
            "rdiv of a partial sum": lambda x: 1 / (x * x).sum(0),
            "rpow": lambda x: 2**x,
            "rfloordiv": lambda x: 3 // (x + 10),
            "stft sizes": lambda x: x.unflatten(1, (2, 2)),
        }.items():
            torch.testing.assert_close(function(x).full_tensor(), function(value), msg=name)

    run_ranks(4, on_rank)
