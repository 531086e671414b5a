"""How a parameter is split over the ranks that gather it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shardwright import comm
from shardwright.errors import PlacementError
from shardwright.layout import Layout, Mesh, Ragged, Replicate, Shard

__all__ = ["Split", "peers_along", "split_along"]


@dataclass(frozen=True)
class Split:
    """A split along one dimension: the shape of the gathered tensor, the dimension, and every rank's extent along it.

    >>> Split((5, 3), 0, (3, 2)).local_shape(1)
    (2, 3)
    """

    shape: tuple[int, ...]
    dim: int
    sizes: tuple[int, ...]

    def local_shape(self, rank: int) -> tuple[int, ...]:
        """Return the shape of the piece of a rank of the group."""
        return (*self.shape[: self.dim], self.sizes[rank], *self.shape[self.dim + 1 :])


def split_along(layout: Layout, *mesh_dims: int) -> Split:
    """Return how a layout splits this rank's part of a tensor over mesh dimensions.

    The part is what the rank would hold if the tensor were replicated over them. Raise `PlacementError` if the ranks'
    pieces are not consecutive, as with `Shard(0)` over two mesh dimensions, only the outer one gathered.

    >>> from shardwright import Mesh, Shard
    >>> split_along(Layout(Mesh((1,)), [Shard(0)], (5, 3)), 0)
    Split(shape=(5, 3), dim=0, sizes=(5,))
    """
    rank = comm.rank()
    placements = [Replicate() if dim in mesh_dims else each for dim, each in enumerate(layout.placements)]
    whole = layout.replace(placements=placements).region(rank)
    pieces = [layout.region(peer) for peer in sorted(peers_along(layout.mesh, mesh_dims, rank))]
    dims = {each.dim for mesh_dim in mesh_dims if isinstance(each := layout.placements[mesh_dim], Shard | Ragged)}
    dim = min(dims, default=0)
    sizes = tuple(piece.size[dim] for piece in pieces)
    start = whole.offset[dim]
    for piece, size in zip(pieces, sizes, strict=True):
        if len(dims) > 1 or (size and piece.offset[dim] != start):
            over = ", ".join(map(str, mesh_dims))
            raise PlacementError(
                f"{layout}: the pieces along mesh dimension {over} are not consecutive in dimension {dim}, so they "
                "cannot be gathered into one: split over this mesh dimension last (the `order` of the layout)"
            )
        start += size
    return Split(tuple(whole.size), dim, sizes)


def peers_along(mesh: Mesh, mesh_dims: Sequence[int], rank: int) -> list[int]:
    """Return the ranks that differ from this one only along these mesh dimensions, including itself.

    >>> from shardwright import Mesh
    >>> peers_along(Mesh((2, 2, 2)), (0, 2), 2)
    [2, 3, 6, 7]
    """
    ranks = [rank]
    for mesh_dim in mesh_dims:
        ranks = [peer for each in ranks for peer in mesh.peers(each, mesh_dim)]
    return ranks
