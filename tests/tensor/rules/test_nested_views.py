"""Views of a dimension that several mesh dimensions shard: correct, and bounded in bytes on meshes of any size."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest
import torch

import shardwright as sw
from shardwright.layout import Layout, Mesh, Placement
from shardwright.tensor.base.tagging import no_torch_function, tag
from shardwright.tensor.redistribute import plan
from shardwright.testing import on_ranks

S, R = sw.Shard, sw.Replicate


def meta_dtensor(
    mesh: Mesh, shape: tuple[int, ...], *placements: Placement, dtype: torch.dtype = torch.float32
) -> sw.DTensor:
    """Return a DTensor on a mesh of any size, without values or ranks."""
    layout = Layout(mesh, placements, shape)
    with no_torch_function():
        return tag(torch.empty(layout.local_shape(0), dtype=dtype, device="meta"), layout)


@pytest.mark.parametrize("tables", [(S(0), S(0)), (S(1), S(0))], ids=str)
@pytest.mark.parametrize("join", [False, True], ids=["heads", "rows"])
def test_views_of_fsdp_tensor_parallel_activations_never_gather_them(
    tables: tuple[Placement, Placement], join: bool
) -> None:
    """The batch grows with the mesh; what a rank receives does not."""
    length, width, words = 512, 1024, 32_000
    for data, tensor in ((2, 2), (8, 8), (64, 8), (512, 8)):
        mesh, batch = Mesh((data, tensor), ("dp", "tp")), 2 * data
        with sw.trace() as seen:
            tokens = meta_dtensor(mesh, (batch, length), S(0), R(), dtype=torch.int64)
            hidden = torch.nn.functional.embedding(tokens, meta_dtensor(mesh, (words, width), *tables))
            mixed = torch.nn.functional.linear(hidden, meta_dtensor(mesh, (3 * width, width), S(0), S(0)))
            viewed = mixed.view(batch * length, 3 * width) if join else mixed.view(batch, length, 48, width // 16)
        received = Counter[str]()
        for redistribution in seen.redistributions:
            received[redistribution.operation] += redistribution.received
        per_rank = batch * length * 3 * width * 4 // data  # bytes of the activations of a data-parallel rank
        assert seen.redistributions
        assert not viewed.sharding.is_replicated
        assert received["view"] <= per_rank // tensor if join else not received["view"], (data, tensor, received)
        assert sum(received.values()) < 40 << 20, (data, tensor, received)


@on_ranks(4, timeout=60)
def test_views_of_nested_shards_match_torch() -> None:
    mesh = sw.init_device_mesh("cpu", (2, 2))
    views = {
        (8, 3, 4): [(8, 12), (24, 4), (8, 3, 2, 2), (96,), (2, 4, 3, 4), (4, 2, 12)],
        (3, 4, 2): [(3, 8), (12, 2), (3, 2, 2, 2), (24,), (3, 1, 8), (1, 3, 8)],
        (5, 4): [(5, 2, 2), (20,), (5, 1, 4), (10, 2)],
        (6, 4): [(6, 2, 2), (24,), (2, 3, 4), (3, 2, 4), (12, 2)],
    }
    for shape, wanted in views.items():
        plain = torch.arange(float(torch.Size(shape).numel())).reshape(shape)
        for placements in itertools.product([S(d) for d in range(len(shape))], repeat=2):
            for view in wanted:
                x = sw.distribute_tensor(plain, mesh, placements).requires_grad_()
                y = x.view(view)
                assert torch.equal(y.full_tensor(), plain.view(view)), (shape, placements, view)
                (y * y).sum().backward()
                assert torch.equal(x.grad.full_tensor(), 2 * plain), (shape, placements, view)


@on_ranks(4, timeout=60)
def test_a_view_that_keeps_a_nested_dimension_does_not_communicate() -> None:
    mesh = sw.init_device_mesh("cpu", (2, 2))
    for rows in (3, 5, 8):
        x = sw.distribute_tensor(torch.zeros(rows, 12), mesh, [S(0), S(0)])
        with sw.trace() as seen:
            y = x.view(rows, 3, 4)
        assert not seen.redistributions
        assert y.placements == x.placements
        y.add_(1)
        assert x.full_tensor().sum().item() == rows * 12


def test_partial_sums_are_reduce_scattered_into_equal_shards_if_possible() -> None:
    """Backends reduce-scatter only equal shards natively; others are point-to-point messages."""
    for data, tensor in ((8, 8), (64, 8)):
        mesh = Mesh((data, tensor), ("dp", "tp"))
        hidden = meta_dtensor(mesh, (2 * data, 512, 1024), S(0), sw.Partial())
        with sw.trace() as seen:
            torch.nn.functional.gelu(hidden + meta_dtensor(mesh, (2 * data, 512, 1024), S(0), S(1)))
            torch.nn.functional.linear(hidden, meta_dtensor(mesh, (3072, 1024), S(0), S(0)))
        scattered = 0
        for redistribution in seen.redistributions:
            for step in plan(redistribution.source, redistribution.target, itemsize=4).steps:
                scattered += step.kind == "reduce-scatter"
                sizes = {step.after.local_shape(rank) for rank in mesh.ranks[:: max(1, data // 8)]}
                assert step.kind != "reduce-scatter" or len(sizes) == 1, (str(step), str(step.after))
        assert scattered
