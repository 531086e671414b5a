"""Work with what others use: PyTorch's own DTensor and ShardedTensor, converted both ways.

Every name is imported when it is first used, so that importing a part of this package imports nothing of the others.
"""

import importlib
import typing

if typing.TYPE_CHECKING:
    from shardwright.interop.conversion import convert
    from shardwright.interop.tensors import (
        from_torch_dtensor,
        from_torch_metadata,
        from_torch_sharded_tensor,
        from_torch_spec,
        to_shardwright,
        to_torch_dtensor,
        to_torch_metadata,
        to_torch_sharded_tensor,
        to_torch_spec,
    )
else:  # hidden from type checkers, for which a module with __getattr__ has every name

    def __getattr__(name: str) -> object:
        """Import the part that defines a public name."""
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        part = "conversion" if name == "convert" else "tensors"
        return getattr(importlib.import_module(f"shardwright.interop.{part}"), name)

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})


__all__ = [
    "convert",
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
