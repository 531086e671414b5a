"""Route tokens to the ranks of their experts, compute them there, and combine the results."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from shardwright import comm
from shardwright.parallel.experts.exchange import send_rows

__all__ = ["Compute", "route"]

# Takes tokens in the order of this rank's experts, and how many tokens each of them has.
Compute: TypeAlias = Callable[[Tensor, list[int]], Tensor]


def route(
    tokens: Tensor, chosen: Tensor, weights: Tensor, experts: Sequence[range], compute: Compute, group: comm.Group
) -> Tensor:
    """Return the weighted sum of what the chosen experts make of each token.

    `tokens` is (tokens, features), `chosen` and `weights` are (tokens, choices); `experts` are those of each rank. The
    numbers of tokens are exchanged first, then the tokens, then the results.

    >>> group = comm.subgroup([comm.rank()])
    >>> tokens, chosen = torch.ones(2, 3), torch.tensor([[0], [1]])
    >>> route(tokens, chosen, torch.full((2, 1), 0.5), [range(2)], lambda rows, counts: rows * 4, group)
    tensor([[2., 2., 2.],
            [2., 2., 2.]])
    """
    count, choices = chosen.shape
    flat = chosen.reshape(-1)
    by_expert = torch.argsort(flat, stable=True)
    totals = torch.bincount(flat, minlength=experts[-1].stop)
    own = experts[group.rank]
    announced = comm.all_to_all([totals[each.start : each.stop] for each in experts], [(len(own),)] * group.size, group)
    numbers = torch.stack(announced).tolist()  # by rank, then by expert of this rank
    per_expert = totals.tolist()
    sent = [sum(per_expert[each.start : each.stop]) for each in experts]
    received = [sum(row) for row in numbers]
    rows = send_rows(tokens.index_select(0, by_expert // choices), sent, received, group)
    # They come by rank, and by expert within each: bring those of one expert together.
    labels = torch.tensor([expert for row in numbers for expert in range(len(row))], device=tokens.device)
    runs = torch.tensor([size for row in numbers for size in row], device=tokens.device)
    together = torch.argsort(torch.repeat_interleave(labels.long(), runs.long()), stable=True)
    computed = compute(rows.index_select(0, together), [sum(column) for column in zip(*numbers, strict=True)])
    returned = send_rows(computed.index_select(0, torch.argsort(together)), received, sent, group)
    in_order = returned.index_select(0, torch.argsort(by_expert)).view(count, choices, tokens.shape[1])
    return (in_order * weights.unsqueeze(-1)).sum(1).to(tokens.dtype)
