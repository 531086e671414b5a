"""Hypothesis strategies for shapes, regions, meshes, placements and layouts, including empty and uneven ones.

>>> from hypothesis import given, settings
>>> @settings(max_examples=5, database=None)
... @given(layouts())
... def every_layout_tiles_its_tensor(layout):
...     assert Region.whole(layout.shape).covers(region for region, _ in layout.regions())
>>> every_layout_tiles_its_tensor()
"""

from __future__ import annotations

from math import prod

from hypothesis import strategies as st

from shardwright.layout import Layout, Mesh, Partial, Placement, Ragged, Region, Replicate, Shard

__all__ = ["layouts", "meshes", "placements", "regions", "shapes"]

NAMES = ("dp", "tp", "pp", "cp")


def shapes(min_dims: int = 0, max_dims: int = 4, max_side: int = 9) -> st.SearchStrategy[tuple[int, ...]]:
    """Shapes of tensors, with sizes from 0 to `max_side`.

    >>> from hypothesis import find
    >>> find(shapes(min_dims=2), lambda shape: 3 in shape)  # the simplest one with a size of 3
    (0, 3)
    """
    return st.lists(st.integers(0, max_side), min_size=min_dims, max_size=max_dims).map(tuple)


@st.composite
def regions(draw: st.DrawFn, parent: Region) -> Region:
    """Regions inside `parent`, empty ones included.

    >>> from hypothesis import find
    >>> find(regions(Region.whole((4, 4))), lambda region: region.volume > 1)
    Region[0:1, 0:2]
    """
    offset, size = [], []
    for low, extent in zip(parent.offset, parent.size, strict=True):
        start = draw(st.integers(low, low + extent))
        offset.append(start)
        size.append(draw(st.integers(0, low + extent - start)))
    return Region(offset, size)


@st.composite
def meshes(
    draw: st.DrawFn, min_dims: int = 1, max_dims: int = 3, max_size: int = 12, *, size: int | None = None
) -> Mesh:
    """Meshes of at most `max_size` ranks, or of exactly `size`; named or not, ranks in any order.

    >>> from hypothesis import find
    >>> find(meshes(size=4), lambda mesh: mesh.ndim == 2)
    Mesh(1, 4)
    """
    ndim = draw(st.integers(min_dims, max_dims))
    shape: list[int] = []
    for dim in range(ndim):
        if size is None:
            shape.append(draw(st.integers(1, max(1, max_size // prod(shape)))))
        else:
            remaining = size // prod(shape)
            divisors = [n for n in range(1, remaining + 1) if remaining % n == 0]
            shape.append(remaining if dim == ndim - 1 else draw(st.sampled_from(divisors)))
    names = draw(st.none() | st.just(NAMES[:ndim])) if ndim <= len(NAMES) else None
    ranks = draw(st.none() | st.permutations(range(prod(shape))))
    return Mesh(shape, names, ranks)


@st.composite
def placements(
    draw: st.DrawFn, shape: tuple[int, ...], mesh: Mesh, *, partial: bool = True, ragged: bool = True
) -> tuple[Placement, ...]:
    """Placements, one per mesh dimension, that are valid for a tensor of this shape on this mesh.

    >>> from hypothesis import find
    >>> find(placements((4, 4), Mesh((2, 2))), lambda chosen: chosen[1] == Shard(0))
    (Replicate(), Shard(0))
    """
    chosen: list[Placement] = []
    sharded: set[int] = set()
    for count in mesh.shape:
        kinds = ["replicate"] + ["shard"] * 2 * bool(shape) + ["partial"] * partial
        unsharded = [dim for dim in range(len(shape)) if dim not in sharded]
        kinds += ["ragged"] * bool(ragged and unsharded)
        match draw(st.sampled_from(kinds)):
            case "replicate":
                chosen.append(Replicate())
            case "partial":
                chosen.append(Partial(draw(st.sampled_from(["sum", "avg", "max", "min"]))))
            case "shard":
                chosen.append(Shard(draw(st.integers(0, len(shape) - 1))))
                sharded.add(chosen[-1].dim)  # type: ignore[attr-defined]  # it is the Shard appended above
            case "ragged":
                dim = draw(st.sampled_from(unsharded))
                ends = sorted(draw(st.lists(st.integers(0, shape[dim]), min_size=count - 1, max_size=count - 1)))
                chosen.append(Ragged(dim, [b - a for a, b in zip([0, *ends], [*ends, shape[dim]], strict=True)]))
                sharded.add(dim)
    return tuple(chosen)


@st.composite
def layouts(
    draw: st.DrawFn,
    shape: st.SearchStrategy[tuple[int, ...]] | None = None,
    mesh: st.SearchStrategy[Mesh] | None = None,
    *,
    partial: bool = True,
    ragged: bool = True,
    reorder: bool = True,
) -> Layout:
    """Layouts over random meshes: uneven, empty, nested in any order, with or without `Partial` and `Ragged`.

    >>> from hypothesis import find
    >>> find(layouts(), lambda layout: Shard(1) in layout.placements)
    Layout([0, 0] (0: S(1)), Mesh(1))
    """
    chosen_shape = draw(shapes() if shape is None else shape)
    chosen_mesh = draw(meshes() if mesh is None else mesh)
    chosen = draw(placements(chosen_shape, chosen_mesh, partial=partial, ragged=ragged))
    # Ragged must split first, which left-to-right order satisfies: only layouts without it are reordered.
    movable = reorder and not any(isinstance(placement, Ragged) for placement in chosen)
    order = draw(st.none() | st.permutations(range(chosen_mesh.ndim))) if movable else None
    return Layout(chosen_mesh, chosen, chosen_shape, order)
