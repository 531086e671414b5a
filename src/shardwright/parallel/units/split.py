"""How a parameter is split over the ranks that gather it."""

from __future__ import annotations

from dataclasses import dataclass

from shardwright import comm
from shardwright.errors import PlacementError
from shardwright.layout import Layout, Ragged, Replicate, Shard

__all__ = ["Split", "split_along"]


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


def split_along(layout: Layout, mesh_dim: int) -> Split:
    """Return how a layout splits this rank's part of a tensor over one mesh dimension.

    The part is what the rank would hold if the tensor were replicated over that mesh dimension. Raise `PlacementError`
    if the ranks' pieces are not consecutive, as with `Shard(0)` over two mesh dimensions, the outer one gathered.

    >>> from shardwright import Mesh, Shard
    >>> split_along(Layout(Mesh((1,)), [Shard(0)], (5, 3)), 0)
    Split(shape=(5, 3), dim=0, sizes=(5,))
    """
    rank = comm.rank()
    placements = [Replicate() if dim == mesh_dim else each for dim, each in enumerate(layout.placements)]
    whole = layout.replace(placements=placements).region(rank)
    pieces = [layout.region(peer) for peer in sorted(layout.mesh.peers(rank, mesh_dim))]
    placement = layout.placements[mesh_dim]
    dim = placement.dim if isinstance(placement, Shard | Ragged) else 0
    sizes = tuple(piece.size[dim] for piece in pieces)
    start = whole.offset[dim]
    for piece, size in zip(pieces, sizes, strict=True):
        if size and piece.offset[dim] != start:
            raise PlacementError(
                f"{layout}: the pieces along mesh dimension {mesh_dim} are not consecutive in dimension {dim}, so they "
                "cannot be gathered into one: split over this mesh dimension last (the `order` of the layout)"
            )
        start += size
    return Split(tuple(whole.size), dim, sizes)
