"""The address space of this process as one buffer, of which a slice costs a tenth of a microsecond."""

from __future__ import annotations

import ctypes
from typing import Final

__all__ = ["memory_at"]

_ADDRESS_SPACE: Final = memoryview((ctypes.c_char * (1 << 47)).from_address(0)).cast("B")


def memory_at(address: int, nbytes: int) -> memoryview:
    """Return the bytes at an address. The caller keeps the memory alive.

    >>> import torch
    >>> tensor = torch.tensor([1, 2], dtype=torch.uint8)
    >>> bytes(memory_at(tensor.data_ptr(), 2))
    b'\\x01\\x02'
    """
    return _ADDRESS_SPACE[address : address + nbytes]
