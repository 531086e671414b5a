"""Layers that can be sharded by columns or rows: which dimensions of their parameters are outputs and inputs."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor, nn

__all__ = ["Matrix", "matrix_of"]


class Matrix(NamedTuple):
    """The dimensions of a layer's weight that are its outputs and inputs, and their sizes."""

    kind: str  # 'linear' or 'embedding'
    outputs: int
    inputs: int
    out_size: int
    in_size: int


def matrix_of(module: nn.Module) -> Matrix | None:
    """Return how a layer's weight is laid out; None if it is not a linear layer or an embedding.

    Linear layers are `nn.Linear` and modules like it (`in_features`, `out_features`, a weight of that shape), and
    `Conv1D` of `transformers`, whose weight is transposed.

    >>> matrix_of(nn.Linear(3, 5))
    Matrix(kind='linear', outputs=0, inputs=1, out_size=5, in_size=3)
    """
    weight = module._parameters.get("weight")
    if not isinstance(weight, Tensor) or weight.ndim != 2:
        return None
    shape = tuple(weight.shape)
    if isinstance(module, nn.Embedding):
        return Matrix("embedding", 1, 0, shape[1], shape[0])
    if shape == (getattr(module, "out_features", None), getattr(module, "in_features", None)):
        return Matrix("linear", 0, 1, *shape)
    if type(module).__name__ == "Conv1D" and shape[1] == getattr(module, "nf", None):
        return Matrix("linear", 1, 0, shape[1], shape[0])
    return None
