"""The loss of language models of `transformers`, with the sequence kept apart from the batch.

`ForCausalLMLoss` flattens batch and sequence, and a flat dimension cannot be sharded as both: the logits, the largest
tensor of the model, would be redistributed. This one computes the same on unflattened logits.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.nn.functional import cross_entropy, pad

from shardwright.tensor.base.tagging import DTensorBase

__all__ = ["causal_lm_loss", "use_context_loss"]


def use_context_loss(model: Any) -> None:
    """Replace the loss of a model of `transformers` if it is `ForCausalLMLoss`."""
    from transformers.loss.loss_utils import ForCausalLMLoss

    if getattr(model, "loss_function", None) is ForCausalLMLoss:
        model.loss_function = causal_lm_loss


def causal_lm_loss(
    logits: Tensor,
    labels: Tensor | None,
    vocab_size: int,
    num_items_in_batch: Any = None,
    ignore_index: int = -100,
    shift_labels: Tensor | None = None,
    **options: Any,
) -> Tensor:
    """Return the cross entropy of every position's logits and the next position's label, as `ForCausalLMLoss` does.

    >>> import torch
    >>> logits, labels = torch.zeros(1, 3, 4), torch.tensor([[0, 1, 2]])
    >>> round(causal_lm_loss(logits, labels, 4).exp().item(), 6)
    4.0
    """
    if not isinstance(logits, DTensorBase) or logits.ndim != 3:
        from transformers.loss.loss_utils import ForCausalLMLoss

        plain: Tensor = ForCausalLMLoss(
            logits, labels, vocab_size, num_items_in_batch, ignore_index, shift_labels, **options
        )
        return plain
    if shift_labels is None:
        assert labels is not None
        shift_labels = pad(labels, (0, 1), value=ignore_index)[..., 1:]
    reduction = "mean" if num_items_in_batch is None else "sum"
    targets = shift_labels.to(logits.device)
    loss = cross_entropy(logits.float().transpose(1, 2), targets, ignore_index=ignore_index, reduction=reduction)
    return loss if num_items_in_batch is None else loss / num_items_in_batch
