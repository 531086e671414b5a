"""Mappings: rules that rename, permute, join and split the tensors of a checkpoint, in both directions."""

from shardwright.interop.mapping.bound import BoundMapping
from shardwright.interop.mapping.mapping import Mapping
from shardwright.interop.mapping.models import LLAMA, LLAMA_MEGATRON, MIXTRAL, QWEN3_MOE, SHIPPED
from shardwright.interop.mapping.pieces import MappedPiece, Padding, StridedBox

__all__ = [
    "LLAMA",
    "LLAMA_MEGATRON",
    "MIXTRAL",
    "QWEN3_MOE",
    "SHIPPED",
    "BoundMapping",
    "MappedPiece",
    "Mapping",
    "Padding",
    "StridedBox",
]
