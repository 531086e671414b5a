"""All-gather and reduce-scatter of many tensors: one collective, equal to plain torch on full tensors."""

from __future__ import annotations

import math
from contextlib import contextmanager

import pytest
import torch

from shardwright import comm
from shardwright.comm import many
from shardwright.errors import ArgumentTypeError, CollectiveArgumentError
from shardwright.testing import run_ranks

DTYPES = [
    torch.float32,
    torch.bfloat16,
    torch.float64,
    torch.complex64,
    torch.bool,
    torch.int16,
    torch.uint64,
    torch.float8_e4m3fn,
]
SUMMABLE = [dtype for dtype in DTYPES if dtype is not torch.bool]
# Rows of each rank, by number of ranks: even, uneven, empty on some ranks, empty on all.
ROWS = {
    1: [(3,), (0,)],
    2: [(2, 2), (3, 1), (0, 4), (0, 0)],
    4: [(2, 2, 2, 2), (3, 3, 3, 1), (0, 5, 0, 1), (0, 0, 0, 0)],
}
WIDTHS = [(), (3,), (2, 5000)]


@contextmanager
def packing_less():
    """Send tensors of the last width in messages of their own, as larger ones are."""
    before, many._MAX_PACKED = many._MAX_PACKED, 1 << 14
    many._plan.cache_clear()
    try:
        yield
    finally:
        many._MAX_PACKED = before
        many._plan.cache_clear()


def raw(*shape, dtype, seed):
    """Random bytes of the dtype: transfers must not interpret them."""
    generator = torch.Generator().manual_seed(seed)
    high = 2 if dtype == torch.bool else 256
    count = math.prod(shape) * dtype.itemsize
    return torch.randint(0, high, (count,), dtype=torch.uint8, generator=generator).view(dtype).reshape(shape)


def as_bytes(tensor):
    return tensor.contiguous().view(-1).view(torch.uint8)


def cases(size):
    return [(dtype, rows, width) for dtype in DTYPES for rows in ROWS[size] for width in WIDTHS]


def gather():
    group = comm.world()
    listed = cases(group.size)
    pieces = [
        [raw(rows[rank], *width, dtype=dtype, seed=10 * index + rank) for rank in range(group.size)]
        for index, (dtype, rows, width) in enumerate(listed)
    ]
    mine, sizes = [each[group.rank] for each in pieces], [rows for _, rows, _ in listed]
    with comm.count() as traffic:
        pending = comm.start_all_gather_many(mine, sizes=sizes)
    with packing_less():
        again = comm.all_gather_many(mine, sizes=sizes)
    for start in (pending.wait(), again):
        for got, expected, piece in zip(start, pieces, mine, strict=True):
            assert torch.equal(as_bytes(got), torch.cat([as_bytes(each) for each in expected]))
            assert got.shape == (sum(len(each) for each in expected), *piece.shape[1:])
            assert got.dtype == piece.dtype
            assert not got.numel() or got.data_ptr() != piece.data_ptr()
    assert pending.wait() is pending.wait()
    others = sum(each.nbytes for row in pieces for each in row) - sum(each.nbytes for each in mine)
    return dict(traffic.calls), traffic.bytes, others


def scatter():
    group = comm.world()
    listed = [case for case in cases(group.size) if case[0] is not torch.bool]
    every = [
        [
            torch.randint(0, 3, (sum(rows), *width), generator=torch.Generator().manual_seed(10 * index + rank)).to(
                dtype
            )
            for rank in range(group.size)
        ]
        for index, (dtype, rows, width) in enumerate(listed)
    ]
    mine, sizes = [each[group.rank] for each in every], [rows for _, rows, _ in listed]
    with comm.count() as traffic:
        pending = comm.start_reduce_scatter_many(mine, sizes=sizes)
    with packing_less():
        again = comm.reduce_scatter_many(mine, sizes=sizes, present=[True] * len(mine))
    for got in (pending.wait(), again):
        for result, tensors, rows in zip(got, every, sizes, strict=True):
            dtype = tensors[0].dtype
            total = sum(each.to(torch.complex64 if dtype.is_complex else torch.float64) for each in tensors).to(dtype)
            first = sum(rows[: group.rank])
            expected = as_bytes(total)[first * total.stride(0) * dtype.itemsize :] if total.numel() else as_bytes(total)
            assert torch.equal(as_bytes(result), expected[: result.nbytes])
            assert result.dtype == dtype
            assert result.shape == (rows[group.rank], *total.shape[1:])
    return dict(traffic.calls), traffic.bytes, (group.size - 1) * sum(each.nbytes for each in pending.wait())


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize(("call", "kind"), [(gather, "all_gather"), (scatter, "reduce_scatter")])
def test_many_uneven_tensors_of_every_dtype_are_one_collective_of_their_own_bytes(call, kind, size):
    for calls, received, expected in run_ranks(size, call):
        assert calls == ({kind: 1} if size > 1 else {})
        assert received == (expected if size > 1 else 0)


def test_a_tensor_that_no_rank_has_is_none_on_all_ranks():
    def body():
        me = comm.world().rank
        given = [torch.full((4,), float(me)), torch.zeros(6), torch.ones(2) * (me == 1)]
        with comm.count() as traffic:
            results = comm.reduce_scatter_many(given, present=[True, False, me == 1], sizes=[[2, 2], [6, 0], [1, 1]])
        return [None if each is None else each.tolist() for each in results], traffic.bytes

    assert run_ranks(2, body) == [([[1, 1], None, [1]], 36), ([[1, 1], None, [1]], 12)]


def test_the_average_of_low_precision_floats_is_rounded_once():
    def body():
        tensors = [torch.full((4,), 257.0 if comm.world().rank else 1.0).to(torch.bfloat16), torch.ones(2)]
        return [each.tolist() for each in comm.reduce_scatter_many(tensors, op="avg")]

    assert run_ranks(2, body) == [[[128.0] * 2, [1.0]]] * 2


def test_collectives_of_many_tensors_overlap_with_others_in_any_order_of_waiting():
    def body():
        me = comm.world().rank
        first = comm.start_all_gather_many([torch.tensor([me]), torch.full((20000,), me)])
        reduced = comm.start_reduce_scatter_many([torch.ones(2), torch.full((40000,), me + 1)])
        second = comm.start_all_gather_many([torch.tensor([me + 10]), torch.full((20000,), me + 10)])
        works = [first, reduced, second]
        for work in works if me else reversed(works):
            work.wait()
        return [[each.unique().tolist() for each in work.wait()] for work in works]

    assert run_ranks(2, body) == [[[[0, 1], [0, 1]], [[2.0], [3]], [[10, 11], [10, 11]]]] * 2


def test_the_path_of_gpus_pads_uneven_tensors():
    """Here gloo's own collectives run it."""

    def on_rank():
        group, options = comm.world(), {"generator": torch.Generator().manual_seed(0)}
        rows = [(2, 2, 2), (3, 3, 1), (0, 1, 0), (0, 0, 0)]
        wholes = [torch.randn(sum(size), 4, **options) for size in rows]
        pieces = [torch.split(whole, size)[group.rank].clone() for whole, size in zip(wholes, rows, strict=True)]
        landed = [torch.empty_like(whole) for whole in wholes]
        operation = many.begin(group, "all_gather_many", torch.uint8)
        gathered = many._gather_natively(pieces, landed, tuple(rows), group, operation).wait()
        for got, expected in zip(gathered, wholes, strict=True):
            assert torch.equal(got, expected)
        for op in ("sum", "avg"):
            flags = torch.tensor([group.rank == 0, False, False, True], dtype=torch.int32)
            operation = many.begin(group, "reduce_scatter_many", torch.uint8, op=op)
            reduced = many._scatter_natively(wholes, tuple(rows), flags, group, operation, op).wait()
            factor = 3 if op == "sum" else 1
            assert reduced[1] is None
            assert reduced[2] is None
            torch.testing.assert_close(reduced[0], pieces[0] * factor)
            assert reduced[3].shape == (0, 4)
            every = many._scatter_natively(wholes, tuple(rows), None, group, operation, op).wait()
            for got, piece in zip(every, pieces, strict=True):
                torch.testing.assert_close(got, piece * factor)

    run_ranks(3, on_rank)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: comm.all_gather_many([torch.ones(3)], sizes=[[1, 2]]), r"2 sizes \[1, 2\] for a group of 1 ranks"),
        (lambda: comm.all_gather_many([torch.ones(3)], sizes=[[2]]), r"tensor 0 give rank 0 extent 2, .* is \[3\]"),
        (lambda: comm.all_gather_many([torch.ones(3)], sizes=[]), "sizes of 0 tensors, got 1 tensors"),
        (lambda: comm.all_gather_many([torch.ones(())]), "tensor 0 has no dimensions"),
        (lambda: comm.all_gather_many([torch.ones(1), torch.ones(1, device="meta")]), "tensor 1 is on meta"),
        (lambda: comm.reduce_scatter_many([torch.ones(3)], sizes=[[2]]), r"\[2\] of tensor 0 add up to 2"),
        (lambda: comm.reduce_scatter_many([torch.ones(3)], present=[]), "0 values in `present` for 1 tensors"),
    ],
)
def test_invalid_arguments_raise_with_the_values(call, message):
    with pytest.raises(CollectiveArgumentError, match=message):
        call()


def test_a_dtype_that_cannot_be_averaged_raises():
    with pytest.raises(ArgumentTypeError, match=r"cannot reduce torch\.int64 by 'avg'"):
        comm.reduce_scatter_many([torch.ones(2), torch.ones(2, dtype=torch.int64)], op="avg")
