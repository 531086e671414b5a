"""The sizes of the tensors that a test makes."""

from __future__ import annotations

from typing import Any

import torch


def noting(sizes: list[Any]) -> Any:
    """Return a torch.empty that appends the first size of every tensor it makes to `sizes`."""
    empty = torch.empty

    def noted(*size: Any, **kind: Any) -> torch.Tensor:
        sizes.append(size[0])
        return empty(*size, **kind)

    return noted
