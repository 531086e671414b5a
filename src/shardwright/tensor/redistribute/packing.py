"""Boxes of a tensor laid one after the other, and back."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from shardwright.layout import Region

__all__ = ["bits", "pack", "unpack"]

_CARRIERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}


def bits(tensor: Tensor) -> Tensor:
    """The tensor as integers of its width: torch cannot concatenate or copy every dtype, but these it can.

    >>> bits(torch.ones(2, dtype=torch.float8_e5m2)).dtype
    torch.uint8
    """
    return tensor.view(_CARRIERS[tensor.itemsize])


def pack(tensor: Tensor, frame: Region | None, boxes: Sequence[Region]) -> Tensor:
    """These boxes of a tensor that holds `frame`, flat; a view where there is one and it lies in one stretch.

    >>> pack(torch.arange(4).view(2, 2), None, [Region((0, 0), (2, 1)), Region((1, 1), (1, 1))])
    tensor([0, 2, 3])
    """
    data = bits(tensor)
    flat = [data[box.slices(frame)].reshape(-1) for box in boxes]
    if not flat:
        return tensor.new_empty(0)
    return (flat[0] if len(flat) == 1 else torch.cat(flat)).view(tensor.dtype)


def unpack(packed: Tensor, tensor: Tensor, frame: Region | None, boxes: Sequence[Region]) -> None:
    """Puts what `pack` made into its places in a tensor that holds `frame`.

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
