"""Tensors of any dtype as arrays that numpy computes with."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

__all__ = ["as_numbers"]

_PLAIN = frozenset(
    {
        torch.float64,
        torch.float32,
        torch.float16,
        torch.int64,
        torch.int32,
        torch.int16,
        torch.int8,
        torch.uint8,
        torch.uint16,
        torch.uint32,
        torch.uint64,
    }
)


def as_numbers(tensor: Tensor) -> npt.NDArray[Any]:
    """Return the values of a tensor as numbers of numpy, exactly: bfloat16 and 8-bit floats as float32, bools as 0, 1.

    Complex numbers stay complex; of packed dtypes (two numbers in a byte), the bytes are returned.

    >>> as_numbers(torch.tensor([1.5, -2.0], dtype=torch.bfloat16))
    array([ 1.5, -2. ], dtype=float32)
    """
    if tensor.dtype in _PLAIN or tensor.dtype in (torch.complex64, torch.complex128):
        return np.asarray(tensor.numpy())
    if tensor.dtype == torch.bool:
        return np.asarray(tensor.view(torch.uint8).numpy())
    if tensor.dtype == torch.complex32:
        return np.asarray(tensor.to(torch.complex64).numpy())
    if tensor.dtype.is_floating_point and "_x2" not in str(tensor.dtype):
        return np.asarray(tensor.to(torch.float32).numpy())
    return np.asarray(tensor.contiguous().view(torch.uint8).numpy())
