"""A captured program handed to one of torch.compile's backends, which compiles what lies between its movements."""

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
    """The program as a function of its tensors, compiled by the backend; its steps stay calls.

    Parameters enter before the compiled part begins: only there they are still the parameters themselves.
    """
    body = fx.GraphModule(module, fx.Graph())
    early = _without_entering(module.graph, body.graph)
    body.recompile()
    for node in body.graph.nodes:
        if node.op == "call_function" and captured_function(node.target) is not None:
            leave_eager(node.target)
    compiled = torch.compile(body, backend=backend, dynamic=False)

    def run(*tensors: Tensor) -> Sequence[Tensor]:
        entered = [step(tensors[place]) for step, place in early]
        plain = [tensor.view_as(tensor) if isinstance(tensor, DTensorBase) else tensor for tensor in tensors]
        return compiled(*plain, *entered)  # type: ignore[no-any-return]  # torch.compile keeps no types

    return run


def _without_entering(source: fx.Graph, target: fx.Graph) -> list[tuple[Callable[[Tensor], Tensor], int]]:
    """Copies a graph, with the parameters' entering left out and its results taken as further inputs."""
    inputs = [node for node in source.nodes if node.op == "placeholder"]
    known: dict[fx.Node, fx.Node] = {node: target.node_copy(node) for node in inputs}
    early: list[tuple[Any, int]] = []
    for node in source.nodes:
        if captured_function(node.target) is prepare_operand and node.args[0] in inputs:
            known[node] = target.placeholder(f"entered_{len(early)}")
            early.append((node.target, inputs.index(node.args[0])))
    for node in source.nodes:
        if node not in known:
            known[node] = target.node_copy(node, lambda other: known[other])
    return early
