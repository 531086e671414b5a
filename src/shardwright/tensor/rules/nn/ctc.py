"""The CTC loss: sequences of a batch are independent of each other, wherever the labels of each are written down."""

from __future__ import annotations

from typing import Any

import torch

from shardwright.tensor.base.registry import composite, rule
from shardwright.tensor.base.strategy import Labels, Local, LocalContext, Operand, Strategies, index_strategies
from shardwright.tensor.base.tagging import tag_replicated

__all__: list[str] = []

NONE, MEAN = 0, 1  # torch's numbers for `reduction`
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
    """Labels in a row of each sequence are cut with it; those of all in one row are whole, and so are their counts."""
    del blank, zero_infinity
    if reduction != NONE:
        return None
    batch: Labels = [BATCH] if log_probs.ndim == 3 else []
    in_rows = targets.ndim == 2
    labelled: list[tuple[Any, Labels]] = [
        (log_probs, [None, *batch, None]),
        (targets, [*batch, None] if in_rows else [None]),
    ]
    labelled += [(input_lengths, [*batch]), (target_lengths, [*batch] if in_rows else [None])]
    given = [(operand, labels) for operand, labels in labelled if isinstance(operand, Operand)]
    operands, ins = [operand for operand, _ in given], [labels[: operand.ndim] for operand, labels in given]
    return Strategies(
        index_strategies(operands, ins, [batch]), run=_sequences, shapes=(log_probs.shape[1:2] if batch else (),)
    )


def _sequences(context: LocalContext) -> Local:
    """The call for this rank's sequences."""
    layout = context.outs[0]
    region = layout.region(context.rank)
    cut = bool(layout.ndim and layout.cut_by(0))
    mine = slice(region.offset[0], region.offset[0] + region.size[0]) if cut else slice(None)

    def local(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        names = ("log_probs", "targets", "input_lengths", "target_lengths")
        given = dict(zip(names, args, strict=False)) | kwargs
        log_probs, targets, lengths, counts = (given.pop(name) for name in names)
        if log_probs.is_meta or 0 in region.size:  # torch has no loss of nothing; still a function of the input
            return log_probs.sum((0, -1))
        if not cut:
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
    """The mean is of losses per label."""
    if isinstance(reduction, str) or reduction == NONE:
        return NotImplemented  # nn.functional's: its body calls torch's
    each: Any = torch.ctc_loss(log_probs, targets, input_lengths, target_lengths, blank, NONE, zero_infinity)
    if reduction != MEAN:
        return each.sum()
    counts = target_lengths
    if not isinstance(counts, torch.Tensor):
        mesh = each._layout.mesh
        written = torch.tensor(counts, device=each.device)
        counts = tag_replicated(written, mesh)
    return (each / counts.clamp_min(1).to(each.dtype)).mean()
