"""PyTorch's own sharded tensors, converted both ways. Only here are they known."""

from shardwright.interop.torch_sharded import (
    from_torch_metadata,
    from_torch_sharded_tensor,
    from_torch_spec,
    to_torch_metadata,
    to_torch_sharded_tensor,
    to_torch_spec,
)

__all__ = [
    "from_torch_metadata",
    "from_torch_sharded_tensor",
    "from_torch_spec",
    "to_torch_metadata",
    "to_torch_sharded_tensor",
    "to_torch_spec",
]
