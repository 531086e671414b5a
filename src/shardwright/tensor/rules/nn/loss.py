"""Losses: local sums divided by global counts; logits sharded by class stay sharded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from shardwright.tensor.base.registry import Op, composite, rule
from shardwright.tensor.base.strategy import Labels, Local, LocalContext, Operand, Strategies, index_strategies
from shardwright.tensor.base.tagging import DTensorBase, alias, no_torch_function, tag_replicated
from shardwright.tensor.dispatch.arguments import map_tensors, tensors_in
from shardwright.tensor.dispatch.execute import call_by_rule
from shardwright.tensor.rules.elementwise.pointwise import broadcast_labels, operands_in, pointwise
from shardwright.tensor.rules.shared.index_range import check_range

__all__: list[str] = []

NONE, MEAN, SUM = 0, 1, 2  # torch's enum values of `reduction`


def _register_loss(
    name: str, function: Callable[..., Any], position: int, unreduced: Callable[..., Strategies | None]
) -> None:
    """Register an unreduced loss and its reductions; `position` is that of torch's `reduction` argument.

    nn.functional's function of the same name takes the reduction as a string; its body calls this one.
    """

    def reduction_of(args: Any, kwargs: dict[str, Any]) -> Any:
        return kwargs.get("reduction", args[position] if len(args) > position else MEAN)

    def compose(*args: Any, **kwargs: Any) -> Any:
        reduction = reduction_of(args, kwargs)
        if reduction not in (MEAN, SUM):
            return NotImplemented
        given = list(args)
        if len(given) > position:
            given[position] = NONE
        else:
            kwargs["reduction"] = NONE
        losses = function(*given, **kwargs)
        return losses.mean() if reduction == MEAN else losses.sum()

    def find_strategies(*args: Any, **kwargs: Any) -> Strategies | None:
        return unreduced(*args, **kwargs) if reduction_of(args, kwargs) == NONE else None

    rule(name)(find_strategies)
    composite(name)(compose)


def _register_pointwise(name: str, function: Callable[..., Any], position: int) -> None:
    _register_loss(name, function, position, pointwise())


_register_pointwise("mse_loss", torch._C._nn.mse_loss, 2)
_register_pointwise("l1_loss", torch._C._nn.l1_loss, 2)
_register_pointwise("smooth_l1_loss", torch._C._nn.smooth_l1_loss, 2)
_register_pointwise("huber_loss", torch._C._nn.huber_loss, 2)
_register_pointwise("soft_margin_loss", torch._C._nn.soft_margin_loss, 2)
_register_pointwise("kl_div", torch.kl_div, 2)
_register_pointwise("binary_cross_entropy", torch._C._nn.binary_cross_entropy, 3)
_register_pointwise("binary_cross_entropy_with_logits", torch.binary_cross_entropy_with_logits, 4)
_register_pointwise("poisson_nll_loss", torch.poisson_nll_loss, 5)
_register_pointwise("hinge_embedding_loss", torch.hinge_embedding_loss, 3)
_register_pointwise("margin_ranking_loss", torch.margin_ranking_loss, 4)


def _by_sample(
    input: Operand, target: Operand, *args: Any, weight: Operand | None = None, **_: Any
) -> Strategies | None:
    """A loss per sample; the class dimension is replicated."""
    weights = operands_in(*args, weight)
    batch: Labels = ["batch"] if input.ndim == 2 else []
    ins: list[Labels] = [[*batch, None], [*batch, None][: target.ndim], *([None] * other.ndim for other in weights)]
    return Strategies(
        index_strategies([input, target, *weights], ins, [batch]), shapes=(input.shape[:1] if batch else (),)
    )


def _by_class(input: Operand, target: Operand, *args: Any, **kwargs: Any) -> Strategies | None:
    """The same with one class per sample: the loss of a single sample has the shape of its target, () or (1,)."""
    if input.ndim == 2 or not target.ndim:
        return _by_sample(input, target, *args, **kwargs)
    operands = operands_in(input, target, *args, *kwargs.values())
    return Strategies(
        index_strategies(operands, [[None] * operand.ndim for operand in operands], [[None]]), shapes=(target.shape,)
    )


_register_loss("multi_margin_loss", torch._C._nn.multi_margin_loss, 5, _by_class)
_register_loss("multilabel_margin_loss", torch._C._nn.multilabel_margin_loss, 2, _by_sample)


def _mean_or_sum(losses: Any, reduction: int) -> Any:
    return losses if reduction == NONE else losses.mean() if reduction == MEAN else losses.sum()


@composite("triplet_margin_loss")
def _triplet_margin_loss(
    anchor: Any,
    positive: Any,
    negative: Any,
    margin: float = 1.0,
    p: float = 2.0,
    eps: float = 1e-6,
    swap: bool = False,
    reduction: Any = MEAN,
    **_: Any,
) -> Any:
    if isinstance(reduction, str) or not anchor.ndim == positive.ndim == negative.ndim:
        return NotImplemented  # nn.functional's: its body calls torch's, which raises the error
    far = torch.pairwise_distance(anchor, negative, p, eps)
    if swap:
        far = torch.minimum(far, torch.pairwise_distance(positive, negative, p, eps))
    return _mean_or_sum((torch.pairwise_distance(anchor, positive, p, eps) - far + margin).clamp_min(0), reduction)


@composite("cosine_embedding_loss")
def _cosine_embedding_loss(
    input1: Any, input2: Any, target: Any, margin: float = 0.0, reduction: Any = MEAN, **_: Any
) -> Any:
    if isinstance(reduction, str) or not input1.ndim == input2.ndim == target.ndim + 1:
        return NotImplemented  # the same
    squares = [(x * x).sum(-1) + 1e-12 for x in (input1, input2)]
    cosine = (input1 * input2).sum(-1) / (squares[0] * squares[1]).sqrt()
    same = (1 - cosine).masked_fill(target != 1, 0.0)
    different = (cosine - margin).clamp_min(0).masked_fill(target != -1, 0.0)
    return _mean_or_sum(same + different, reduction)


def _gather_class(input: Tensor, target: Tensor, dim: int, ignore_index: int) -> Tensor:
    """Return the input at each target's class; 0 for ignored targets. Defines the operator `GATHER_CLASS`."""
    return _gather_class_of_shard(input, target, dim, ignore_index, 0, input.shape[dim])


def _gather_class_of_shard(
    input: Tensor, target: Tensor, dim: int, ignore_index: int, first: int, count: int
) -> Tensor:
    """The same on a shard of the classes, from `first` on, of `count` in all; 0 for classes of other ranks."""
    if not target.is_meta:
        check_range("cross_entropy: target", target, count, ignore_index)
    if not input.shape[dim]:  # still depends on the input: every rank has the same graph
        return input.sum(dim)
    inside = (target >= first) & (target < first + input.shape[dim]) & (target != ignore_index)
    result = input.gather(dim, torch.where(inside, target - first, 0).unsqueeze(dim)).squeeze(dim)
    return result.masked_fill(~inside, 0)


def _gather_class_rule(input: Operand, target: Operand, dim: int, ignore_index: int) -> Strategies:
    labels: Labels = list(range(input.ndim))
    kept = [label for label in labels if label != dim]

    def run(context: LocalContext) -> Local:
        layout = context.ins[0]
        first, count = layout.region(context.rank).offset[dim], layout.shape[dim]
        return lambda _, args, __: _gather_class_of_shard(args[0], args[1], dim, ignore_index, first, count)

    return Strategies(index_strategies([input, target], [labels, kept], [kept], terms=[[0]]), run=run)


GATHER_CLASS = Op("pick_class", rule=_gather_class_rule)


def _per_class(weight: Any, input: Any, dim: int) -> Any:
    """Reshape values per class to broadcast with the input."""
    return weight.reshape(-1, *[1] * (input.ndim - dim - 1))


def _class_dim(input: Any) -> int:
    return 0 if input.ndim == 1 else 1


def _is_plain(*tensors: Any) -> bool:
    """True if torch's call on local tensors gives the global loss: nothing is sharded or partial."""
    for tensor in tensors:
        if isinstance(tensor, DTensorBase):
            for placement, ranks in zip(tensor._layout.placements, tensor._layout.mesh.shape, strict=True):
                if ranks > 1 and not placement.is_replicate():
                    return False
    return True


def _reduced(loss: Any, counted: Any, reduction: int) -> Any:
    """Reduce a loss per target; the mean is over the counted targets of all ranks."""
    if reduction == NONE:
        return loss
    return loss.sum() if reduction == SUM else loss.sum() / counted.sum()


@rule("cross_entropy_loss", "nll_loss_nd", "nll_loss2d")
def _replicated_loss(input: Operand, target: Operand, weight: Operand | None = None, *_: Any, **__: Any) -> Strategies:
    operands = operands_in(input, target, weight)
    return Strategies(index_strategies(operands, [[None] * operand.ndim for operand in operands], [[]], reduction=None))


@composite("cross_entropy_loss")
def _cross_entropy(
    input: Any,
    target: Any,
    weight: Any = None,
    reduction: int = MEAN,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> Any:
    if _is_plain(input, target, weight):
        return NotImplemented
    dim = _class_dim(input)
    wide = input.float() if input.dtype in (torch.float16, torch.bfloat16) else input
    log_probs = torch.log_softmax(wide, dim)
    if target.dtype.is_floating_point:
        loss = _loss_of_probabilities(log_probs, target, weight, reduction, label_smoothing, dim)
    else:
        loss = _loss_of_classes(log_probs, target, weight, reduction, ignore_index, label_smoothing, dim)
    return loss.to(input.dtype)


def _loss_of_probabilities(log_probs: Any, target: Any, weight: Any, reduction: int, smoothing: float, dim: int) -> Any:
    classes = log_probs.shape[dim]
    smoothed = target * (1 - smoothing) + smoothing / classes if smoothing else target
    loss = -(
        log_probs * smoothed * _per_class(weight, log_probs, dim) if weight is not None else log_probs * smoothed
    ).sum(dim)
    return _mean_or_sum(loss, reduction)


def _loss_of_classes(
    log_probs: Any, target: Any, weight: Any, reduction: int, ignore_index: int, smoothing: float, dim: int
) -> Any:
    counted = target != ignore_index
    loss = -call_by_rule(GATHER_CLASS, False, _gather_class, (log_probs, target, dim, ignore_index), {})
    share: Any = counted.to(log_probs.dtype)
    if weight is not None:
        weights = _per_class(weight, log_probs, dim).expand(log_probs.shape)
        share = call_by_rule(GATHER_CLASS, False, _gather_class, (weights, target, dim, ignore_index), {})
        loss = loss * share
    loss = _reduced(loss, share, reduction)
    if not smoothing:
        return loss
    spread = -(log_probs if weight is None else log_probs * _per_class(weight, log_probs, dim)).sum(dim)
    spread = _reduced(spread.masked_fill(counted.logical_not(), 0.0), share, reduction)
    return loss * (1 - smoothing) + spread * (smoothing / log_probs.shape[dim])


@composite("nll_loss_nd", "nll_loss", "nll_loss2d")
def _nll_loss(
    input: Any, target: Any, weight: Any = None, reduction: Any = MEAN, ignore_index: int = -100, **_: Any
) -> Any:
    if isinstance(reduction, str) or _is_plain(input, target, weight):
        return NotImplemented  # nn.functional's takes a string: its body calls torch's
    return _loss_of_classes(input, target, weight, reduction, ignore_index, 0.0, _class_dim(input))


def _is_sharded_along(first: Any, second: Any, dim: int) -> bool:
    ndim = max(first.ndim, second.ndim, 1)
    for tensor in (first, second):
        own = dim % ndim - (ndim - tensor.ndim)
        if own >= 0 and any(tensor._layout.mesh.shape[m] > 1 for m in tensor._layout.cut_by(own)):
            return True
    return False


@composite("cosine_similarity")
def _cosine_sharded(x1: Any, x2: Any, dim: int = 1, eps: float = 1e-8) -> Any:
    if not _is_sharded_along(x1, x2, dim):
        return NotImplemented
    x1, x2 = torch.broadcast_tensors(x1, x2)  # type: ignore[no-untyped-call]  # untyped in torch
    norms = [torch.linalg.vector_norm(x, dim=dim, keepdim=True).clamp_min(eps) for x in (x1, x2)]
    return ((x1 / norms[0]) * (x2 / norms[1])).sum(dim)


@rule("cosine_similarity")
def _cosine(x1: Operand, x2: Operand, dim: int = 1, eps: float = 1e-8) -> Strategies:
    del eps
    ins, out = broadcast_labels([x1, x2])
    along = dim % max(len(out), 1)
    kept = [label for label in out if label != along]
    return Strategies(index_strategies([x1, x2], ins, [kept], whole={along}, reduction=None))


@composite("pairwise_distance")
def _pairwise_distance(x1: Any, x2: Any, p: float = 2.0, eps: float = 1e-6, keepdim: bool = False) -> Any:
    return torch.linalg.vector_norm(x1 - x2 + eps, p, dim=-1, keepdim=keepdim)


@composite("linear_cross_entropy")
def _linear_cross_entropy(*args: Any, **kwargs: Any) -> Any:
    """Chunked (if requested) only when nothing is sharded: shards are smaller already."""
    if kwargs.get("options") is None:
        return NotImplemented
    tensors = [tensor for tensor in tensors_in([*args, *kwargs.values()]) if isinstance(tensor, DTensorBase)]
    if not _is_plain(*tensors):
        return torch.nn.functional.linear_cross_entropy(*args, **{**kwargs, "options": None})
    mesh = tensors[0]._layout.mesh
    with no_torch_function():  # so that what it saves for backward is plain, too
        given, named = map_tensors(args, kwargs, alias)
        loss = torch.nn.functional.linear_cross_entropy(*given, **named)
        return tag_replicated(loss, mesh)
