"""CTC loss: the sequences of a batch are independent of each other."""

from __future__ import annotations

from typing import Any

import torch

from shardwright.tensor.base.registry import composite, rule
from shardwright.tensor.base.strategy import Labels, Local, LocalContext, Operand, Strategies, index_strategies
from shardwright.tensor.base.tagging import tag_replicated

__all__: list[str] = []

NONE, MEAN = 0, 1  # torch's enum values of `reduction`
BATCH = "batch"


@rule("ctc_loss")
def _ctc_loss(
    log_probs: Operand,
    targets: Operand,
    input_lengths: Any,
    target_lengths: Any,
    blank: int = 0,
    reduction: Any = MEAN,
    zero_infinity: bool = False,
) -> Strategies | None:
    """Padded targets are sharded with their sequences; concatenated targets and their lengths are replicated."""
    del blank, zero_infinity
    if reduction != NONE:
        return None
    batch: Labels = [BATCH] if log_probs.ndim == 3 else []
    padded = targets.ndim == 2
    labelled: list[tuple[Any, Labels]] = [
        (log_probs, [None, *batch, None]),
        (targets, [*batch, None] if padded else [None]),
    ]
    labelled += [(input_lengths, [*batch]), (target_lengths, [*batch] if padded else [None])]
    given = [(operand, labels) for operand, labels in labelled if isinstance(operand, Operand)]
    operands, ins = [operand for operand, _ in given], [labels[: operand.ndim] for operand, labels in given]
    return Strategies(
        index_strategies(operands, ins, [batch]), run=_local_sequences, shapes=(log_probs.shape[1:2] if batch else (),)
    )


def _local_sequences(context: LocalContext) -> Local:
    """Return the call for this rank's sequences."""
    layout = context.outs[0]
    region = layout.region(context.rank)
    sharded = bool(layout.ndim and layout.cut_by(0))
    mine = slice(region.offset[0], region.offset[0] + region.size[0]) if sharded else slice(None)

    def local(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        names = ("log_probs", "targets", "input_lengths", "target_lengths")
        given = dict(zip(names, args, strict=False)) | kwargs
        log_probs, targets, lengths, counts = (given.pop(name) for name in names)
        if log_probs.is_meta or 0 in region.size:  # torch rejects empty inputs; the result still depends on them
            return log_probs.sum((0, -1))
        if not sharded:
            return func(*args, **kwargs)
        if targets.ndim == 1:
            ends = [0, *torch.as_tensor(counts).cumsum(0).tolist()]
            targets, counts = targets[ends[mine.start] : ends[mine.stop]], counts[mine]
        elif not isinstance(counts, torch.Tensor):
            counts = counts[mine]
        lengths = lengths if isinstance(lengths, torch.Tensor) else lengths[mine]
        return func(log_probs, targets, lengths, counts, *args[4:], **given)

    return local


@composite("ctc_loss")
def _reduced(
    log_probs: Any,
    targets: Any,
    input_lengths: Any,
    target_lengths: Any,
    blank: int = 0,
    reduction: Any = MEAN,
    zero_infinity: bool = False,
) -> Any:
    """The mean is over losses per label."""
    if isinstance(reduction, str) or reduction == NONE:
        return NotImplemented  # nn.functional's: its body calls torch's
    losses: Any = torch.ctc_loss(log_probs, targets, input_lengths, target_lengths, blank, NONE, zero_infinity)
    if reduction != MEAN:
        return losses.sum()
    counts = target_lengths
    if not isinstance(counts, torch.Tensor):
        mesh = losses._layout.mesh
        lengths = torch.tensor(counts, device=losses.device)
        counts = tag_replicated(lengths, mesh)
    return (losses / counts.clamp_min(1).to(losses.dtype)).mean()
