"""Collectives equal plain torch on full tensors: every dtype, uneven and empty pieces, any strides."""

from __future__ import annotations

import math

import pytest
import torch

from shardwright import comm
from shardwright.comm import reduce
from shardwright.errors import ArgumentTypeError, CollectiveArgumentError
from shardwright.testing import run_ranks

MOVABLE = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.complex64,
    torch.bool,
    torch.int16,
    torch.int64,
    torch.uint8,
    torch.uint16,
    torch.uint32,
    torch.uint64,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.bits16,
    torch.float4_e2m1fn_x2,
]
SIZES = [(2, 2, 2, 2), (3, 0, 1, 5), (0, 0, 0, 0), (0, 7, 0, 0), (1, 1, 1, 0)]


def raw(*shape, dtype, seed):
    """Random bytes of the dtype: transfers must not interpret them."""
    generator = torch.Generator().manual_seed(seed)
    width = dtype.itemsize
    high = 2 if dtype == torch.bool else 256
    count = math.prod(shape) * width
    return torch.randint(0, high, (count,), dtype=torch.uint8, generator=generator).view(dtype).reshape(shape)


def same_bytes(left, right):
    assert left.shape == right.shape
    assert left.dtype == right.dtype
    return torch.equal(left.contiguous().view(-1).view(torch.uint8), right.contiguous().view(-1).view(torch.uint8))


def cat(pieces, dim):
    dtype = pieces[0].dtype
    if dtype.itemsize == 1:  # torch does not concatenate all of these itself
        return torch.cat([piece.view(torch.uint8) for piece in pieces], dim).view(dtype)
    return torch.cat(pieces, dim)


def gathers():
    me, size = comm.world().rank, comm.world().size
    for dtype in MOVABLE:
        for sizes in (s[:size] for s in SIZES):
            for dim in (0, 1, -1):
                pieces = []
                for rank in range(size):
                    shape = [2, 2, 2]
                    shape[dim] = sizes[rank]
                    pieces.append(raw(*shape, dtype=dtype, seed=rank))
                assert same_bytes(comm.all_gather(pieces[me], sizes=sizes, dim=dim), cat(pieces, dim))
                pending = comm.start_all_gather(pieces[me], sizes=sizes, dim=dim)
                assert same_bytes(pending.wait(), cat(pieces, dim))
                assert pending.wait() is pending.wait()
    strided = torch.arange(6.0).reshape(2, 3).t() + me
    expected = torch.cat([torch.arange(6.0).reshape(2, 3).t() + rank for rank in range(size)])
    assert torch.equal(comm.all_gather(strided), expected)
    conjugate = torch.full((2,), complex(me, 1)).conj()
    assert comm.all_gather(conjugate).tolist() == [complex(rank, -1) for rank in range(size) for _ in range(2)]


def exchanges():
    me, size = comm.world().rank, comm.world().size

    def piece(source, target, dtype):
        return raw((source * 3 + target) % 4, 2, dtype=dtype, seed=source * size + target)

    for dtype in MOVABLE:
        sends = [piece(me, target, dtype) for target in range(size)]
        expected = [piece(source, me, dtype) for source in range(size)]
        for got in (
            comm.all_to_all(sends, [e.shape for e in expected]),
            comm.start_all_to_all(sends, [e.shape for e in expected]).wait(),
        ):
            assert all(same_bytes(g, e) for g, e in zip(got, expected, strict=True))
        for source in range(size):
            original = raw(3, 2, dtype=dtype, seed=source)
            mine = original if me == source else torch.empty_like(original)
            assert same_bytes(comm.broadcast(mine, src=source), original)
    # Only neighbours on a ring communicate; the buffer is strided.
    after, before = (me + 1) % size, (me - 1) % size
    buffer = torch.zeros(4, 2).t()
    comm.exchange({after: torch.full((2, 4), float(me))}, {before: buffer})
    assert torch.equal(buffer, torch.full((2, 4), float(before)))
    big = torch.full((1 << 20,), float(me))  # too big for any socket's buffer: both must send and receive at once
    landing = torch.empty_like(big)
    comm.start_exchange({after: big}, {before: landing}).wait()
    assert torch.equal(landing, torch.full_like(big, before))


REFERENCE = {
    "sum": lambda stack: stack.sum(0),
    "avg": lambda stack: stack.mean(0),
    "max": lambda stack: stack.amax(0),
    "min": lambda stack: stack.amin(0),
    "product": lambda stack: stack.prod(0),
}
BITS = {"band": lambda a, b: a & b, "bor": lambda a, b: a | b, "bxor": lambda a, b: a ^ b}
FLOATS = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2]
INTEGERS = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32, torch.uint64]


def numbers(rank, dtype):
    """Small integers: every dtype represents them and their sums exactly."""
    values = torch.tensor([[1, 2, 0], [2, 1, 1], [0, 2, 2], [1, 0, 1], [2, 2, 1]], dtype=torch.int64)
    return ((values + rank) % 3).to(dtype)


def reductions():
    me, size = comm.world().rank, comm.world().size
    sizes = {1: [5], 2: [2, 3], 4: [2, 0, 3, 0]}[size]
    at = sum(sizes[:me])
    for dtype in [*FLOATS, *INTEGERS, torch.bool, torch.complex64]:
        mine = numbers(me, dtype)
        wide = torch.stack(
            [numbers(rank, dtype).to(torch.complex128 if dtype.is_complex else torch.float64) for rank in range(size)]
        )
        for op, reference in REFERENCE.items():
            if (op == "avg" and dtype in [*INTEGERS, torch.bool]) or (op in ("max", "min") and dtype.is_complex):
                with pytest.raises(ArgumentTypeError, match=f"cannot reduce {dtype} by '{op}'"):
                    comm.all_reduce(mine, op=op)
                continue
            expected = reference(wide).to(dtype)
            before = mine.clone()
            for got in (comm.all_reduce(mine, op=op), comm.start_all_reduce(mine, op=op).wait()):
                assert same_bytes(got, expected), (dtype, op)
            assert same_bytes(mine, before)
            strided = mine.t().contiguous().t()
            assert same_bytes(comm.all_reduce_(strided, op=op), expected)
            assert same_bytes(comm.all_reduce_(mine.clone(), op=op), expected)
            for dim, part in ((0, mine), (1, mine.t())):
                want = (expected if dim == 0 else expected.t()).narrow(dim, at, sizes[me])
                assert same_bytes(comm.reduce_scatter(part, sizes=sizes, dim=dim, op=op), want), (dtype, op)
            assert same_bytes(comm.start_reduce_scatter(mine, sizes=sizes, op=op).wait(), expected[at : at + sizes[me]])


def bits_and_extremes():
    me, size = comm.world().rank, comm.world().size
    for dtype in [*INTEGERS, torch.bool]:
        for op, step in BITS.items():
            expected = numbers(0, torch.int64) if dtype != torch.bool else numbers(0, dtype)
            for rank in range(1, size):
                expected = step(expected, numbers(rank, expected.dtype))
            assert same_bytes(comm.all_reduce(numbers(me, dtype), op=op), expected.to(dtype)), (dtype, op)
    top = torch.tensor([2**64 - 1 - me, me], dtype=torch.uint64)
    assert comm.all_reduce(top, op="max").tolist() == [2**64 - 1, size - 1]
    assert comm.all_reduce(top, op="min").tolist() == [2**64 - size, 0]
    hole = torch.tensor([float("nan") if me == size - 1 else 1.0])
    assert comm.all_reduce(hole, op="max").isnan().all()
    assert comm.all_reduce(torch.ones(0, 3)).shape == (0, 3)
    assert comm.all_reduce(torch.tensor(2.0)).item() == 2.0 * size


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("cases", [gathers, exchanges, reductions, bits_and_extremes])
def test_collectives_equal_plain_torch_on_full_tensors(cases, size):
    run_ranks(size, cases)


@pytest.mark.parametrize("cases", [gathers, exchanges, reductions, bits_and_extremes])
def test_collectives_run_in_a_single_process_without_setup(cases):
    cases()


def test_collectives_in_subgroups_need_only_their_members():
    def body():
        me = comm.world().rank
        group = comm.subgroup([0, 2] if me % 2 == 0 else [1, 3])
        assert group is comm.subgroup([0, 2] if me % 2 == 0 else [1, 3])
        return comm.all_gather(torch.tensor([me]), group).tolist(), group.rank

    assert run_ranks(4, body) == [([0, 2], 0), ([1, 3], 0), ([0, 2], 1), ([1, 3], 1)]


def test_a_mesh_dimension_is_a_group():
    def body():
        from torch.distributed.device_mesh import init_device_mesh

        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        return comm.mesh_group(mesh, "dp").ranks, comm.mesh_group(mesh, 1).ranks

    assert run_ranks(4, body) == [((0, 2), (0, 1)), ((1, 3), (0, 1)), ((0, 2), (2, 3)), ((1, 3), (2, 3))]


def test_pending_collectives_may_be_waited_for_in_any_order():
    def body():
        me, size = comm.world().rank, comm.world().size
        gathered = comm.start_all_gather(torch.tensor([me]))
        reduced = comm.start_all_reduce(torch.tensor([me + 1], dtype=torch.int16))
        scattered = comm.start_reduce_scatter(torch.arange(size))
        works = [gathered, reduced, scattered]
        for work in works if me % 2 else reversed(works):
            work.wait()
        return [work.wait().tolist() for work in works]

    assert run_ranks(4, body) == [[[0, 1, 2, 3], [10], [4 * rank]] for rank in range(4)]


def test_results_never_share_memory_with_arguments():
    value = torch.ones(2)
    for result in (comm.all_gather(value), comm.all_reduce(value), comm.reduce_scatter(value), comm.broadcast(value)):
        assert result.data_ptr() != value.data_ptr()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: comm.all_gather(torch.ones(3), sizes=[1, 2]), r"2 sizes \[1, 2\] for a group of 1 ranks"),
        (lambda: comm.all_gather(torch.ones(3), sizes=[2]), r"sizes \[2\] give rank 0 extent 2 .* is \[3\]"),
        (lambda: comm.all_gather(torch.ones(3), dim=1), "dimension 1 is out of range for a tensor of 1 dimensions"),
        (lambda: comm.reduce_scatter(torch.ones(3), sizes=[2]), "add up to 2, but dimension 0 has extent 3"),
        (lambda: comm.all_to_all([torch.ones(1)], [(2,)]), r"sends itself \[1\], but expects \[2\]"),
        (lambda: comm.all_to_all([], []), "0 pieces to send"),
        (lambda: comm.broadcast(torch.ones(1), src=1), "source 1 is not in a group of 1"),
        (lambda: comm.exchange({2: torch.ones(1)}, {}), "peer 2 is not in a group of 1"),
        (lambda: comm.exchange({0: torch.ones(1)}, {}), "rank 0 lists itself only in its sends"),
        (lambda: comm.exchange({0: torch.ones(1)}, {0: torch.ones(2)}), r"\[1\], but expects torch.float32 \[2\]"),
    ],
)
def test_invalid_arguments_raise_with_the_values(call, message):
    with pytest.raises(CollectiveArgumentError, match=message):
        call()


def test_native_reduce_scatter_pads_uneven_pieces():
    """The path of GPUs; here gloo's own collective runs it."""

    def on_rank():
        group = comm.world()
        for parts, dim in (([2, 2, 2], 0), ([3, 3, 1], 0), ([1, 3, 2], 1)):
            shape = (sum(parts), 4) if dim == 0 else (2, sum(parts), 3)
            every = [torch.randn(shape, generator=torch.Generator().manual_seed(rank)) for rank in range(group.size)]
            for op in ("sum", "avg"):
                result = reduce._reduce_scatter_natively(every[group.rank], group, parts, dim, op).wait()
                total = sum(every) / (group.size if op == "avg" else 1)
                torch.testing.assert_close(result, torch.split(total, parts, dim)[group.rank])

    run_ranks(3, on_rank)
