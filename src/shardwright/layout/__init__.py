"""Geometry as pure values: regions, placements, meshes and layouts. No process group, no communication."""

from shardwright.layout.layout import Holding, Layout, RegionTable
from shardwright.layout.mesh import Mesh
from shardwright.layout.overlap import Boxes, Overlaps, overlaps
from shardwright.layout.placement import Partial, Placement, Ragged, Replicate, Shard, as_placement
from shardwright.layout.region import ByteRuns, Coverage, Exact, Gap, Outside, Overlap, Region

__all__ = [
    "Boxes",
    "ByteRuns",
    "Coverage",
    "Exact",
    "Gap",
    "Holding",
    "Layout",
    "Mesh",
    "Outside",
    "Overlap",
    "Overlaps",
    "Partial",
    "Placement",
    "Ragged",
    "Region",
    "RegionTable",
    "Replicate",
    "Shard",
    "as_placement",
    "overlaps",
]
