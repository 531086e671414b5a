"""Passes over a recorded graph: remove dead code, set the gradient mode, replace operators by cheaper functions."""

from __future__ import annotations

from operator import getitem
from typing import Any

import torch
from torch import fx

from shardwright.tensor.compiled.codegen import python_function

__all__ = ["clean"]


def clean(graph: fx.Graph, grad_mode: bool) -> None:
    """Run the passes on a recorded graph, in place; `grad_mode` is that of the caller."""
    for node in reversed(list(graph.nodes)):
        if not node.users and _is_removable(node):
            graph.erase_node(node)
    for node in graph.nodes:
        if isinstance(node.target, torch._ops.OpOverload):
            node.target = python_function(node)
    _set_grad_modes(graph, grad_mode)
    graph.lint()


def _is_removable(node: fx.Node) -> bool:
    """Return whether a call whose result is unused has no side effects."""
    if node.op == "get_attr" or node.target in (getitem, torch._C._set_grad_enabled):
        return True  # recorded mode changes are incomplete; they are set again below
    target = node.target
    return isinstance(target, torch._ops.OpOverload) and not target._schema.is_mutable and not _is_random(target)


def _is_random(target: Any) -> bool:
    return torch.Tag.nondeterministic_seeded in target.tags


def _set_grad_modes(graph: fx.Graph, callers_mode: bool) -> None:
    """Insert a call that sets the gradient mode wherever it differs from that of the previous recorded call."""
    current = callers_mode
    for node in list(graph.nodes):
        mode = callers_mode if node.op == "output" else node.meta.get("grad_mode", current)
        if node.op in ("call_function", "output") and node.target is not getitem and mode != current:
            with graph.inserting_before(node):
                graph.call_function(torch._C._set_grad_enabled, (mode,))
            current = mode
