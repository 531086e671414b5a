"""The kinds of steps of random programs, and their relative frequencies.

A kind is a function that adds one step or more to a draft, or raises `NoChoice` if the draft has no suitable values.
"""

from __future__ import annotations

from collections.abc import Callable

from shardwright.testing.programs.draft.draft import Draft
from shardwright.testing.programs.steps.gradients import (
    backward,
    checkpointed,
    gradient_settings,
    user_function,
    without_grad,
)
from shardwright.testing.programs.steps.indexing import indexed, indexed_by_tensor
from shardwright.testing.programs.steps.modules import delete_tensor, module, optimizer, read_number
from shardwright.testing.programs.steps.reductions import (
    average,
    concatenate,
    embedding,
    product_of_matrices,
    reduction,
    sorted_values,
)
from shardwright.testing.programs.steps.values import (
    binary,
    cast,
    comparison,
    copy_or_detach,
    logical,
    new_leaf,
    new_like,
    nonlinear,
    norm_layer,
    pointwise,
    redistributed,
)
from shardwright.testing.programs.steps.views import split, strided, view
from shardwright.testing.programs.steps.writes import (
    reshape_in_place,
    write,
    write_at,
    write_masked,
    write_out,
    write_tensor,
    write_to_view,
)

__all__ = ["KINDS", "Step"]

Step = Callable[[Draft], object]

KINDS: dict[Step, float] = {
    new_leaf: 3,
    new_like: 1,
    pointwise: 4,
    binary: 5,
    nonlinear: 2.5,
    norm_layer: 1,
    comparison: 1,
    logical: 0.7,
    cast: 2,
    copy_or_detach: 3,
    redistributed: 2,
    view: 9,
    strided: 0.8,
    split: 2,
    indexed: 7,
    indexed_by_tensor: 2,
    reduction: 3,
    average: 1.5,
    product_of_matrices: 3,
    embedding: 1,
    sorted_values: 1.2,
    concatenate: 2,
    write: 5,
    write_tensor: 3,
    write_at: 6,
    write_masked: 2,
    write_out: 1,
    write_to_view: 5,
    reshape_in_place: 0.8,
    backward: 5,
    gradient_settings: 3,
    user_function: 1,
    checkpointed: 1,
    without_grad: 1.5,
    module: 2,
    optimizer: 2,
    delete_tensor: 1.5,
    read_number: 0.7,
}
