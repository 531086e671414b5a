"""Compile a captured program, between its redistributions, with a backend of torch.compile."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from shardwright.tensor.api.torch_hooks import leave_eager
from shardwright.tensor.base.capture import captured_function
from shardwright.tensor.base.tagging import DTensorBase
from shardwright.tensor.gradients.enter import prepare_operand

__all__ = ["with_backend"]


def with_backend(module: fx.GraphModule, backend: Callable[..., Any] | str) -> Callable[..., Sequence[Tensor]]:
    """Return the program as a function of its tensors, compiled by the backend; redistributions stay eager calls.

    Parameters are prepared before the compiled part, where they are still the parameter objects themselves.
    """
    body = fx.GraphModule(module, fx.Graph())
    early = _without_entering(module.graph, body.graph)
    body.recompile()
    for node in body.graph.nodes:
        if node.op == "call_function" and captured_function(node.target) is not None:
            leave_eager(node.target)
    compiled = torch.compile(body, backend=backend, dynamic=False)

    def run(*tensors: Tensor) -> Sequence[Tensor]:
        entered = [step(tensors[index]) for step, index in early]
        plain = [tensor.view_as(tensor) if isinstance(tensor, DTensorBase) else tensor for tensor in tensors]
        return compiled(*plain, *entered)  # type: ignore[no-any-return]  # torch.compile is untyped

    return run


def _without_entering(source: fx.Graph, target: fx.Graph) -> list[tuple[Callable[[Tensor], Tensor], int]]:
    """Copy a graph without the steps that prepare parameters; their results become additional inputs."""
    inputs = [node for node in source.nodes if node.op == "placeholder"]
    copies: dict[fx.Node, fx.Node] = {node: target.node_copy(node) for node in inputs}
    early: list[tuple[Any, int]] = []
    for node in source.nodes:
        if captured_function(node.target) is prepare_operand and node.args[0] in inputs:
            copies[node] = target.placeholder(f"entered_{len(early)}")
            early.append((node.target, inputs.index(node.args[0])))
    for node in source.nodes:
        if node not in copies:
            copies[node] = target.node_copy(node, lambda other: copies[other])
    return early
