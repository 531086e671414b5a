"""`TensorMeta`: shape, stride and dtype of a tensor."""

from __future__ import annotations

from typing import NamedTuple

import torch

from shardwright.tensor.api.dtensor import DTensor

__all__ = ["TensorMeta"]


class TensorMeta(NamedTuple):
    """The global shape, stride and dtype of a tensor.

    >>> import torch, shardwright as sw
    >>> sw.TensorMeta.of(sw.ones(2, 3, mesh=sw.init_device_mesh("cpu", (1,))))
    TensorMeta(shape=torch.Size([2, 3]), stride=(3, 1), dtype=torch.float32)
    """

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: torch.Tensor | DTensor) -> TensorMeta:
        """Return the metadata of a tensor, plain or distributed.

        >>> import torch, shardwright as sw
        >>> sw.TensorMeta.of(torch.zeros(2)).stride
        (1,)
        """
        return cls(tensor.shape, tensor.stride(), tensor.dtype)
