"""The products of experts with their tokens: one matrix for each expert, one run of rows for each matrix."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["compute_experts", "grouped_linear"]


def compute_experts(module: nn.Module, weights: Mapping[str, Tensor], rows: Tensor, counts: list[int]) -> Tensor:
    """Return what the experts of a module of `transformers` make of their rows: up, gate or activation, down."""
    experts: Any = module
    first = "gate_up_proj" if experts.has_gate else "up_proj"
    transposed = bool(experts.is_transposed)
    up = grouped_linear(rows, counts, weights[first], weights.get(f"{first}_bias"), transposed=transposed)
    inner: Tensor = experts._apply_gate(up) if experts.has_gate else experts.act_fn(up)
    return grouped_linear(inner, counts, weights["down_proj"], weights.get("down_proj_bias"), transposed=transposed)


def grouped_linear(
    rows: Tensor, counts: list[int], weight: Tensor, bias: Tensor | None = None, *, transposed: bool = False
) -> Tensor:
    """Multiply the first `counts[0]` rows by the first expert's matrix, the next by the second's, and so on.

    `weight` is (experts, outputs, inputs), or (experts, inputs, outputs) if `transposed`.

    >>> grouped_linear(torch.ones(3, 2), [1, 2], torch.tensor([[[1.0, 1.0]], [[2.0, 2.0]]])).tolist()
    [[2.0], [4.0], [4.0]]
    """
    matrices = weight if transposed else weight.transpose(-2, -1)
    rows = rows.to(weight.dtype)
    if not counts:  # no experts here, and so no rows: the result still depends on both
        return rows @ matrices.sum(0)
    if rows.is_cuda and rows.dtype is torch.bfloat16 and len(rows):
        ends = torch.tensor(counts, device=rows.device).cumsum(0).to(torch.int32)
        result: Tensor = torch.nn.functional.grouped_mm(rows, matrices, offs=ends)
    else:
        runs = torch.split(rows, counts)
        result = torch.cat([run @ matrix for run, matrix in zip(runs, matrices, strict=True)])
    if bias is None:
        return result
    index = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts)).to(bias.device)
    return result + bias.index_select(0, index)
