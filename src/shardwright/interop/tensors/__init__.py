"""Conversion from and to PyTorch's own DTensor and ShardedTensor."""

from shardwright.interop.tensors.dtensor import from_torch_dtensor, to_shardwright, to_torch_dtensor
from shardwright.interop.tensors.sharded import (
    from_torch_metadata,
    from_torch_sharded_tensor,
    from_torch_spec,
    to_torch_metadata,
    to_torch_sharded_tensor,
    to_torch_spec,
)

__all__ = [
    "from_torch_dtensor",
    "from_torch_metadata",
    "from_torch_sharded_tensor",
    "from_torch_spec",
    "to_shardwright",
    "to_torch_dtensor",
    "to_torch_metadata",
    "to_torch_sharded_tensor",
    "to_torch_spec",
]
