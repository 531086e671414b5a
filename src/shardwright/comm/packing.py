"""Pack boxes of a tensor into one flat buffer, and unpack them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from shardwright.layout import Region

__all__ = ["bits", "pack", "unpack"]

_CARRIERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}


def bits(tensor: Tensor) -> Tensor:
    """View the tensor as integers of the same width, because torch cannot concatenate or copy every dtype.

    >>> bits(torch.ones(2, dtype=torch.float8_e5m2)).dtype
    torch.uint8
    """
    return tensor.view(_CARRIERS[tensor.itemsize])


def pack(tensor: Tensor, frame: Region | None, boxes: Sequence[Region]) -> Tensor:
    """Flatten these boxes of a tensor that holds the region `frame` into one buffer; a view if one contiguous box.

    >>> pack(torch.arange(4).view(2, 2), None, [Region((0, 0), (2, 1)), Region((1, 1), (1, 1))])
    tensor([0, 2, 3])
    """
    data = bits(tensor)
    flat = [data[box.slices(frame)].reshape(-1) for box in boxes]
    if not flat:
        return tensor.new_empty(0)
    return (flat[0] if len(flat) == 1 else torch.cat(flat)).view(tensor.dtype)


def unpack(packed: Tensor, tensor: Tensor, frame: Region | None, boxes: Sequence[Region]) -> None:
    """Copy a buffer made by `pack` into these boxes of a tensor that holds the region `frame`.

    >>> out = torch.zeros(2, 2, dtype=torch.int64)
    >>> unpack(torch.tensor([5, 6]), out, None, [Region((0, 1), (2, 1))])
    >>> out
    tensor([[0, 5],
            [0, 6]])
    """
    data, target = bits(packed), bits(tensor)
    parts = torch.split(data, [box.volume for box in boxes])
    for box, part in zip(boxes, parts, strict=True):
        target[box.slices(frame)] = part.view(box.size)
