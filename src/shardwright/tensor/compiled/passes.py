"""From a recording to a program: what has no effect is left out, modes are set, calls are spelled as users do."""

from __future__ import annotations

from operator import getitem
from typing import Any

import torch
from torch import fx

from shardwright.tensor.compiled.codegen import spelled

__all__ = ["clean"]


def clean(graph: fx.Graph, grad_mode: bool) -> None:
    """Tidies a recorded graph in place; `grad_mode` is that of the call."""
    for node in reversed(list(graph.nodes)):
        if not node.users and _may_go(node):
            graph.erase_node(node)
    for node in graph.nodes:
        if isinstance(node.target, torch._ops.OpOverload):
            node.target = spelled(node)
    _set_grad_modes(graph, grad_mode)
    graph.lint()


def _may_go(node: fx.Node) -> bool:
    """Whether a call whose result nobody uses does nothing else."""
    if node.op == "get_attr" or node.target in (getitem, torch._C._set_grad_enabled):
        return True  # modes are set anew below: what is recorded of them is not complete
    target = node.target
    return isinstance(target, torch._ops.OpOverload) and not target._schema.is_mutable and not _draws(target)


def _draws(target: Any) -> bool:
    return torch.Tag.nondeterministic_seeded in target.tags


def _set_grad_modes(graph: fx.Graph, outside: bool) -> None:
    """Sets the mode of gradients wherever the recorded calls were made under another than the call before."""
    now = outside
    for node in list(graph.nodes):
        wanted = outside if node.op == "output" else node.meta.get("grad_mode", now)
        if node.op in ("call_function", "output") and node.target is not getitem and wanted != now:
            with graph.inserting_before(node):
                graph.call_function(torch._C._set_grad_enabled, (wanted,))
            now = wanted
