"""A mesh knows where every rank is, beside or without a process group."""

from __future__ import annotations

import pickle

import numpy as np
import torch
from hypothesis import given

from shardwright import Mesh
from shardwright.testing.strategies import meshes


@given(meshes())
def test_coordinates_and_ranks_are_inverse(mesh: Mesh) -> None:
    for coordinate in np.ndindex(mesh.shape):
        rank = mesh.rank_at(coordinate)
        assert mesh.coordinate(rank) == coordinate
        assert mesh.array[coordinate] == rank
        assert mesh.ranks[mesh.position(rank)] == rank
        assert rank in mesh
    assert mesh.size in (len(mesh.ranks), int(np.prod(mesh.shape)))
    assert -1 not in mesh
    assert "0" not in mesh


@given(meshes())
def test_peers_differ_along_one_mesh_dimension(mesh: Mesh) -> None:
    for rank in mesh.ranks:
        for dim in range(mesh.ndim):
            here = list(mesh.coordinate(rank))
            here[dim] = slice(None)
            assert mesh.peers(rank, dim) == tuple(mesh.array[tuple(here)])


@given(meshes())
def test_equal_meshes_are_one_object(mesh: Mesh) -> None:
    assert Mesh(mesh.shape, mesh.names, list(mesh.ranks)) is mesh
    assert pickle.loads(pickle.dumps(mesh)) is mesh
    assert Mesh.from_json(mesh.to_json()) is mesh
    assert Mesh.of(mesh) is mesh


def test_a_mesh_is_created_from_a_device_mesh_without_importing_torch_distributed() -> None:
    class DeviceMesh:  # what of torch's DeviceMesh is looked at
        mesh = torch.tensor([[4, 5], [6, 7]])
        mesh_dim_names = ("dp", "tp")

    assert Mesh.of(DeviceMesh()) is Mesh((2, 2), ("dp", "tp"), (4, 5, 6, 7))


def test_str_and_repr_are_readable() -> None:
    assert repr(Mesh((2, 4), ("dp", "tp"))) == "Mesh(dp=2, tp=4)"
    assert repr(Mesh((2,), ranks=(5, 3))) == "Mesh(2, ranks=(5, 3))"
    assert "… 12 in all" in repr(Mesh((12,), ranks=range(1, 13)))
