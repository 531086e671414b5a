"""The memory of this process as one buffer: a slice of it costs a tenth of a microsecond, whatever lies there."""

from __future__ import annotations

import ctypes
from typing import Final

__all__ = ["memory_at"]

_WHOLE: Final = memoryview((ctypes.c_char * (1 << 47)).from_address(0)).cast("B")


def memory_at(address: int, nbytes: int) -> memoryview:
    """The bytes at an address. Whoever asks keeps alive what lies there.

    >>> import torch
    >>> tensor = torch.tensor([1, 2], dtype=torch.uint8)
    >>> bytes(memory_at(tensor.data_ptr(), 2))
    b'\\x01\\x02'
    """
    return _WHOLE[address : address + nbytes]
