"""Train in parallel: batches, plans and parallel models."""

from shardwright.parallel.batch import shard_batch
from shardwright.parallel.fsdp import FSDPModule, UnshardHandle, fully_shard, register_fsdp_forward_method
from shardwright.parallel.units import MixedPrecisionPolicy

__all__ = [
    "FSDPModule",
    "MixedPrecisionPolicy",
    "UnshardHandle",
    "fully_shard",
    "register_fsdp_forward_method",
    "shard_batch",
]
