"""Backward passes: native autograd on local tensors, with initial gradients and gradients of the dual layout.

The engine always runs with interception on: hooks, such as those of activation checkpointing, compute with DTensors
and would otherwise see shards.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from shardwright.errors import MixedTensorsError, TensorError, UnsupportedError
from shardwright.layout import Layout, Partial
from shardwright.tensor.base.capture import refuse_capture
from shardwright.tensor.base.copied import refuse_stale
from shardwright.tensor.base.gradient_types import dual, without_entered
from shardwright.tensor.base.tagging import DTensorBase, alias, no_torch_function, tag
from shardwright.tensor.gradients.below_autograd import run_backward
from shardwright.tensor.gradients.enter import forget_entered, reduce_immediately
from shardwright.tensor.gradients.share import watch_gradient
from shardwright.tensor.redistribute.autograd import redistribute_local

__all__ = ["backward", "grad", "gradient_layout", "local_gradient", "register_hook", "retain_grad", "tag_gradient"]


def gradient_layout(layout: Layout) -> Layout:
    """Return the layout, as users see it, of the gradient of a tensor with this layout."""
    return without_entered(dual(layout))


def backward(
    tensors: Any,
    grad_tensors: Any = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    inputs: Any = None,
) -> None:
    """`torch.autograd.backward` for DTensors: gradients accumulate in the leaves' `.grad`."""
    roots, seeds = _roots(tensors, grad_tensors)
    wanted = () if inputs is None else (inputs,) if isinstance(inputs, Tensor | GradientEdge) else tuple(inputs)
    _watch(wanted)
    keep = create_graph if retain_graph is None else retain_graph
    try:
        run_backward(roots, seeds, keep, create_graph, wanted, allow_unreachable=True, accumulate_grad=True)
    finally:
        forget_entered()


def grad(
    outputs: Any,
    inputs: Any,
    grad_outputs: Any = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    only_inputs: bool = True,
    allow_unused: bool | None = None,
    is_grads_batched: bool = False,
    materialize_grads: bool = False,
) -> tuple[Tensor | None, ...]:
    """`torch.autograd.grad` for DTensors: each gradient has the `gradient_layout` of its input."""
    if is_grads_batched or not only_inputs:
        raise TensorError("torch.autograd.grad of DTensors does not support is_grads_batched and only_inputs=False")
    roots, seeds = _roots(outputs, grad_outputs)
    wanted = (inputs,) if isinstance(inputs, Tensor | GradientEdge) else tuple(inputs)
    for target in wanted:
        _refuse_edge(target)
    _watch(wanted)
    keep = create_graph if retain_graph is None else retain_graph
    allowed = materialize_grads if allow_unused is None else allow_unused
    try:
        with reduce_immediately():
            gradients: Any = run_backward(
                roots, seeds, keep, create_graph, wanted, allow_unreachable=allowed, accumulate_grad=False
            )
    finally:
        forget_entered()
    results: list[Tensor | None] = []
    seen = {id(seed) for seed in seeds}
    for value, target in zip(gradients, wanted, strict=True):
        if value is None and materialize_grads:
            value = torch.zeros_like(target, requires_grad=create_graph)
        elif value is not None and isinstance(target, DTensorBase) and not isinstance(value, DTensorBase):
            if target._layout.is_partial:
                value = tag_gradient(value, target._layout)
            else:
                if id(value) in seen:  # one tensor may be the gradient of several inputs, or the initial gradient
                    value = alias(value)
                seen.add(id(value))
                value = tag(value, gradient_layout(target._layout))
        results.append(value)
    return tuple(results)


def _watch(targets: Sequence[Any]) -> None:
    for target in targets:
        if isinstance(target, DTensorBase):
            watch_gradient(target)


def _refuse_edge(target: Any) -> None:
    """Raise UnsupportedError for a gradient edge, which has no layout."""
    if isinstance(target, GradientEdge):
        raise UnsupportedError(
            "a GradientEdge cannot be used with DTensors: it has no layout, so this rank's part would count as the "
            "global gradient. Pass the tensor instead of the edge"
        )


def _roots(tensors: Any, seeds: Any) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    refuse_capture("the program computes gradients itself: return the value to differentiate, and do so outside")
    roots = (tensors,) if isinstance(tensors, Tensor | GradientEdge) else tuple(tensors)
    given: Sequence[Any] = (seeds,) if seeds is None or isinstance(seeds, Tensor) else tuple(seeds)
    if len(given) == 1 and given[0] is None:
        given = (None,) * len(roots)
    if len(given) != len(roots):
        raise TensorError(f"backward: expected one gradient per tensor, got {len(given)} for {len(roots)} tensors")
    return roots, tuple(_seed(root, seed) for root, seed in zip(roots, given, strict=True))


def _seed(root: Any, given: Tensor | None) -> Tensor | None:
    """Return the initial gradient as a plain local tensor."""
    if isinstance(given, DTensorBase) and not isinstance(root, DTensorBase):
        _refuse_edge(root)
        raise MixedTensorsError(
            f"backward: got a DTensor {given._layout} as the gradient of a plain tensor of shape {tuple(root.shape)}: "
            "pass the part that corresponds to the plain tensor, x.to_local() or x.full_tensor()"
        )
    if not isinstance(root, DTensorBase):
        return given if given is not None or not isinstance(root, Tensor) else torch.ones_like(root)
    layout = root._layout
    if given is None:
        with no_torch_function():
            if not root.requires_grad:
                return None  # the engine raises
            if any(size != 1 for size in layout.shape):
                raise TensorError(
                    f"backward of a tensor {layout}: a gradient can be created implicitly only for one element; "
                    "pass `gradient=`, or reduce the tensor first"
                )
            return torch.full_like(root, _share(layout)).detach()
    if isinstance(given, DTensorBase):
        refuse_stale("backward: the gradient", given)
        if given._layout.shape != layout.shape:
            raise TensorError(f"backward: the shape of the gradient {given._layout} does not match the tensor {layout}")
        with no_torch_function():
            moved = redistribute_local(given, given._layout, dual(layout))
            seed = moved if type(moved) is Tensor else moved.view_as(moved)
            return seed * _share(layout) if _share(layout) != 1.0 else seed
    raise MixedTensorsError(
        f"backward: got a plain tensor of shape {tuple(given.shape)} as the gradient of a DTensor {layout}: "
        "pass a DTensor (distribute_tensor, or DTensor.from_local)"
    )


def _share(layout: Layout) -> float:
    share = 1.0
    for placement, ranks in zip(layout.placements, layout.mesh.shape, strict=True):
        if isinstance(placement, Partial) and placement.op == "avg":
            share /= ranks
    return share


def tag_gradient(gradient: Tensor, layout: Layout) -> Any:
    """Return the DTensor that users see for a plain local gradient inside the engine.

    `layout` is that of the tensor whose gradient it is.
    """
    with no_torch_function():
        if gradient.requires_grad and layout.is_partial:
            # Inside the engine it is Entered; users get Replicate, whose own gradient is counted once.
            gradient = redistribute_local(gradient, dual(layout), gradient_layout(layout))
        share = _share(layout)
        fresh = gradient.view_as(gradient) if share == 1.0 else gradient / share
    return tag(fresh, gradient_layout(layout))


def local_gradient(answer: Any, layout: Layout, source: str) -> Tensor:
    """Return a gradient given by user code for a tensor of this layout as the plain local tensor the engine needs.

    Raise if it is not a DTensor, or has another shape.
    """
    if not isinstance(answer, DTensorBase):
        raise MixedTensorsError(f"{source} of a DTensor {layout} returned a plain tensor: return a DTensor")
    refuse_stale(f"{source} of a DTensor {layout}", answer)
    if answer._layout.shape != layout.shape:
        raise TensorError(f"{source} of a DTensor {layout} returned {answer._layout}: the shapes must be the same")
    with no_torch_function():
        moved = redistribute_local(answer, answer._layout, dual(layout))
        share = _share(layout)
        if share != 1.0:
            return moved * share
        return moved if type(moved) is Tensor else moved.view_as(moved)


def register_hook(tensor: DTensorBase, hook: Callable[[Tensor], Tensor | None]) -> Any:
    """`Tensor.register_hook`, for a hook that sees the gradient as a DTensor."""
    layout = tensor._layout
    watch_gradient(tensor)

    def tagged(gradient: Tensor | None) -> Tensor | None:
        # torch calls hooks with None for an output that backward does not reach.
        answer = hook(None if gradient is None else tag_gradient(gradient, layout))  # type: ignore[arg-type]  # as torch
        return None if answer is None else local_gradient(answer, layout, "a hook")

    with no_torch_function():
        return Tensor.register_hook(tensor, tagged)  # type: ignore[no-untyped-call]  # torch's own


def retain_grad(tensor: DTensorBase) -> None:
    """`Tensor.retain_grad`."""
    watch_gradient(tensor)
    with no_torch_function():
        Tensor.retain_grad(tensor)
