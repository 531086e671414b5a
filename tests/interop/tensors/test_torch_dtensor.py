"""PyTorch's DTensors convert to ours and back: the same memory, the same regions, no communication."""

from __future__ import annotations

import subprocess
import sys
from itertools import product

import pytest
import torch
from torch.distributed import tensor as theirs
from torch.distributed.tensor.placement_types import _StridedShard

import shardwright as sw
from shardwright import comm
from shardwright.errors import ArgumentTypeError, UnsupportedError
from shardwright.interop import from_torch_dtensor, to_shardwright, to_torch_dtensor
from shardwright.testing import run_ranks


def test_pytorchs_dtensors_are_converted_without_copying() -> None:
    def work() -> None:
        flat = sw.init_device_mesh("cpu", (4,))
        grid = sw.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        kinds = [theirs.Shard(0), theirs.Shard(1), theirs.Shard(-1), theirs.Replicate()]
        cases = [(flat, [kind]) for kind in kinds] + [(grid, list(pair)) for pair in product(kinds, kinds)]
        for mesh, placements in cases:
            for size in [(8, 4), (5, 3), (1, 7), (0, 2)]:
                whole = torch.arange(float(torch.Size(size).numel())).reshape(size)
                made = theirs.distribute_tensor(whole, mesh, placements)
                with comm.count() as traffic:
                    ours = from_torch_dtensor(made)
                    back = to_torch_dtensor(ours)
                assert traffic.calls.total() == 0
                assert ours.device_mesh is mesh
                assert ours.to_local().data_ptr() == made.to_local().data_ptr() == back.to_local().data_ptr()
                assert torch.equal(ours.full_tensor(), whole)
                assert torch.equal(back.full_tensor(), whole)
                assert back.placements == made.placements
                assert (back.shape, back.stride(), back.device_mesh) == (made.shape, made.stride(), made.device_mesh)

    run_ranks(4, work)


def test_partial_placements_keep_their_reduction() -> None:
    def work() -> None:
        mesh = sw.init_device_mesh("cpu", (2,))
        for op in ("sum", "avg", "max", "min"):
            local = torch.tensor([1.0 + comm.rank(), 5.0])
            made = theirs.DTensor.from_local(local, mesh, [theirs.Partial(op)])
            ours = from_torch_dtensor(made)
            assert ours.placements == (sw.Partial(op),)
            assert torch.equal(ours.full_tensor(), made.full_tensor())
            assert to_torch_dtensor(ours).placements == made.placements

    run_ranks(2, work)


def test_strided_shards_round_trip() -> None:
    def work() -> None:
        mesh = sw.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        for rows in (8, 7, 3):
            whole = torch.arange(rows * 2.0).reshape(rows, 2)
            ours = sw.distribute_tensor(whole, mesh, [sw.Shard(0), sw.Shard(0)], order=("tp", "dp"))
            made = to_torch_dtensor(ours)
            assert made.placements == (_StridedShard(0, split_factor=2), theirs.Shard(0))
            back = from_torch_dtensor(made)
            assert back.sharding is ours.sharding
            assert torch.equal(back.full_tensor(), whole)
            assert torch.equal(made.full_tensor(), whole)

    run_ranks(4, work)


def test_conversions_are_differentiable_and_accept_parameters() -> None:
    def work() -> None:
        mesh = sw.init_device_mesh("cpu", (2,))
        parameter = torch.nn.Parameter(theirs.distribute_tensor(torch.ones(5, 2), mesh, [theirs.Shard(0)]))
        ours = from_torch_dtensor(parameter)
        assert ours.requires_grad
        (ours * 3).sum().backward()
        assert torch.equal(parameter.grad.full_tensor(), torch.full((5, 2), 3.0))

        mine = torch.nn.Parameter(sw.distribute_tensor(torch.ones(5, 2), mesh, [sw.Shard(0)]))
        (to_torch_dtensor(mine) * 2).sum().backward()
        assert torch.equal(mine.grad.full_tensor(), torch.full((5, 2), 2.0))
        with torch.no_grad():
            to_torch_dtensor(mine).fill_(7.0)
        assert torch.equal(mine.detach().full_tensor(), torch.full((5, 2), 7.0))

    run_ranks(2, work)


def test_layouts_that_pytorch_cannot_express_raise() -> None:
    def work() -> None:
        mesh = sw.init_device_mesh("cpu", (2,))
        ragged = sw.distribute_tensor(torch.ones(5), mesh, [sw.Ragged(0, (4, 1))])
        with pytest.raises(
            UnsupportedError, match=r"no placement with explicit sizes like S\(0: 4\+1\).*redistribute it"
        ):
            to_torch_dtensor(ragged)

    run_ranks(2, work)
    with pytest.raises(ArgumentTypeError, match="expected PyTorch's DTensor, got Tensor"):
        from_torch_dtensor(torch.ones(2))
    with pytest.raises(ArgumentTypeError, match="expected a shardwright DTensor, got Tensor"):
        to_torch_dtensor(torch.ones(2))


def test_to_shardwright_converts_only_pytorchs_tensors() -> None:
    def work() -> None:
        mesh = sw.init_device_mesh("cpu", (2,))
        made = theirs.distribute_tensor(torch.arange(3.0), mesh, [theirs.Shard(0)])
        assert isinstance(to_shardwright(made), sw.DTensor)
        ours = sw.ones(3, mesh=mesh)
        assert to_shardwright(ours) is ours

    run_ranks(2, work)
    plain = torch.ones(2)
    assert to_shardwright(plain) is plain


def test_importing_and_saving_does_not_import_pytorchs_dtensor() -> None:
    code = (
        "import sys, tempfile, torch, shardwright as sw\n"
        "from shardwright import checkpoint\n"
        "with tempfile.TemporaryDirectory() as folder:\n"
        "    checkpoint.save({'w': torch.ones(2), 'm': torch.nn.Linear(2, 2)}, folder)\n"
        "    checkpoint.read(folder)\n"
        "found = [m for m in sys.modules if m.startswith(('torch.distributed.tensor', 'torch.distributed._shard'))]\n"
        "assert not found, found\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
