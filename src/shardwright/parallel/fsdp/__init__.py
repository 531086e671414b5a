"""Fully sharded data parallelism on plain tensors: the API of PyTorch's FSDP2."""

from shardwright.parallel.fsdp.apply import fully_shard
from shardwright.parallel.fsdp.module import FSDPModule, UnshardHandle, register_fsdp_forward_method

__all__ = ["FSDPModule", "UnshardHandle", "fully_shard", "register_fsdp_forward_method"]
