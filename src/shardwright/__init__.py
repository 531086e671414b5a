"""Sharded tensors you can compute with, and checkpoints you can trust, on PyTorch."""

from shardwright.layout import Layout, Mesh, Partial, Placement, Ragged, Region, Replicate, Shard

__all__ = [
    "Layout",
    "Mesh",
    "Partial",
    "Placement",
    "Ragged",
    "Region",
    "Replicate",
    "Shard",
]

__version__ = "0.1.0"
