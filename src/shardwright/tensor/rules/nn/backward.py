"""Backward passes that are operators of their own in torch: each is linear in the incoming gradient."""

from __future__ import annotations

from typing import Any

from shardwright.tensor.base.registry import rule
from shardwright.tensor.base.strategy import Operand, Strategies, index_strategies
from shardwright.tensor.rules.elementwise.pointwise import pointwise

__all__ = ["ELEMENTWISE"]

# Pointwise, with the gradient as the first argument.
ELEMENTWISE = """
elu_backward gelu_backward hardshrink_backward hardsigmoid_backward hardswish_backward hardtanh_backward
leaky_relu_backward logit_backward mish_backward native_dropout_backward sigmoid_backward silu_backward
softplus_backward softshrink_backward tanh_backward threshold_backward
""".split()
rule(*ELEMENTWISE)(pointwise(lambda *_, **__: [[0]]))


@rule("_softmax_backward_data", "_log_softmax_backward_data")
def _softmax_backward(grad_output: Operand, output: Operand, dim: int, input_dtype: Any) -> Strategies:
    del input_dtype
    labels = list(range(output.ndim))
    operands = [grad_output, output]
    return Strategies(
        index_strategies(operands, [labels] * 2, [labels], terms=[[0]], whole={output.dim(dim)}, reduction=None)
    )
