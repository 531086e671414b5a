"""`MixedPrecisionPolicy`: the dtypes in which parameters are gathered and gradients are reduced."""

from __future__ import annotations

from dataclasses import dataclass

import torch

__all__ = ["MixedPrecisionPolicy"]


@dataclass(frozen=True)
class MixedPrecisionPolicy:
    """The dtypes of a parallel model; the names are those of PyTorch's FSDP2.

    Parameters are stored, and updated by the optimizer, in the dtype they have. They are gathered in `param_dtype`, in
    which the module then computes, and gradients are reduced in `reduce_dtype` (`None`: in `param_dtype`). Both save
    bytes. `cast_forward_inputs` casts the floating-point inputs of the module's forward to `param_dtype`,
    `output_dtype` casts its outputs. `None` leaves a dtype as it is.

    >>> import torch
    >>> MixedPrecisionPolicy(torch.bfloat16, reduce_dtype=torch.float32).param_dtype
    torch.bfloat16
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    output_dtype: torch.dtype | None = None
    cast_forward_inputs: bool = True

    def gathered_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype in which a parameter of this dtype is gathered: only floating-point ones are cast."""
        return self.param_dtype if self.param_dtype is not None and dtype.is_floating_point else dtype

    def reduced_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype in which the gradient of a parameter of this dtype is reduced."""
        if self.reduce_dtype is not None and dtype.is_floating_point:
            return self.reduce_dtype
        return self.gathered_dtype(dtype)
