"""Execute a transfer plan: from the shards of one table to those of another; gradients flow back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, final

import numpy as np
import torch
from torch import Tensor

from shardwright import comm
from shardwright.comm.region_exchange import Part, RegionTensor, copy_region, exchange_regions
from shardwright.errors import UnsupportedError
from shardwright.layout import Region, RegionTable
from shardwright.sharded.transfer.transfer_plan import plan_transfer_for_rank

__all__ = ["ShardTransfer"]

_BUFFER = 64 << 20  # bytes of scratch memory for packing, and as many for unpacking, per round


@final
@dataclass(frozen=True, eq=False)
class ShardTransfer:
    """A transfer from the shards of one table to those of another, among the ranks of a group.

    >>> import numpy as np
    >>> halves = RegionTable(np.array([0, 0]), np.array([[0], [2]]), np.array([[2], [2]]))
    >>> whole = RegionTable(np.array([0]), np.array([[0]]), np.array([[4]]))
    >>> ShardTransfer(halves, whole, comm.world()).run([torch.ones(2), torch.zeros(2)], like=torch.empty(0))
    [tensor([1., 1., 0., 0.])]
    """

    source: RegionTable
    target: RegionTable
    group: comm.Group

    @property
    def rank(self) -> int:
        """The global rank of this process."""
        return self.group.global_rank

    def run(self, local_tensors: Sequence[Tensor], like: Tensor, out: Sequence[Tensor] | None = None) -> list[Tensor]:
        """Return this rank's target tensors, given its source tensors, both in the order of their tables.

        `out` is filled if given; otherwise new tensors have the dtype and device of `like`. No gradient flows; see
        `apply`.
        """
        if out is None:
            out = [like.new_empty(self.target.sizes[row].tolist()) for row in self._rows(self.target)]
        with torch.no_grad():
            sources = self._region_tensors(self.source, [tensor.to(like.device) for tensor in local_tensors])
            self._execute(sources, self._region_tensors(self.target, out), self._rounds(like.itemsize))
        return list(out)

    def apply(self, local_tensors: Sequence[Tensor], like: Tensor) -> list[Tensor]:
        """Like `run`, but differentiable: gradients of the results flow back to the source tensors.

        Every rank with a source shard needs a target shard, else it would not take part in the backward transfer.
        """
        if not torch.is_grad_enabled():
            return self.run(local_tensors, like)
        missing = sorted(set(self.source.ranks.tolist()) - set(self.target.ranks.tolist()))
        if missing:
            raise UnsupportedError(
                f"ranks {missing} hold shards that require grad and would hold none afterwards, so no gradient could "
                "reach them: detach the tensor, or give every rank a shard, which may be empty"
            )
        # The anchor requires grad, so that a rank without source shards takes part in the backward transfer, too.
        anchor = like.new_empty(0).requires_grad_()
        return list(_TransferFunction.apply(self, like, anchor, *local_tensors))  # type: ignore[no-untyped-call]  # torch's stubs lack it

    def reverse(self) -> ShardTransfer:
        """The transfer in the opposite direction."""
        return ShardTransfer(self.target, self.source, self.group)

    def _rows(self, table: RegionTable) -> list[int]:
        """The rows of the table that belong to this rank."""
        rows: list[int] = np.flatnonzero(table.ranks == self.rank).tolist()
        return rows

    def _region_tensors(self, table: RegionTable, tensors: Sequence[Tensor]) -> dict[int, RegionTensor]:
        """This rank's tensors by their row in the table, each with its region."""
        by_row = {}
        for row, tensor in zip(self._rows(table), tensors, strict=True):
            region = Region(table.offsets[row].tolist(), table.sizes[row].tolist())
            by_row[row] = RegionTensor(tensor.detach().resolve_conj().resolve_neg(), region)
        return by_row

    def _rounds(self, itemsize: int) -> int:
        """The number of rounds, the same on all ranks: it follows from the most that any of them holds."""
        largest = 0
        for table in (self.source, self.target):
            if table.ranks.size:
                elements = np.bincount(table.ranks, weights=table.sizes.prod(axis=1).astype(np.float64))
                largest = max(largest, int(elements.max()) * itemsize)
        return max(1, -(-largest // _BUFFER))

    def _execute(self, sources: dict[int, RegionTensor], out: dict[int, RegionTensor], rounds: int) -> None:
        plan = plan_transfer_for_rank(self.source, self.target, self.rank)
        index = {rank: position for position, rank in enumerate(self.group.ranks)}
        sends: dict[int, list[Part]] = {}
        receives: dict[int, list[Part]] = {}
        rows = zip(*(column.tolist() for column in plan[:4]), strict=True)
        for row, (source, target, sender, receiver) in enumerate(rows):
            region = plan.region(row)
            if sender == receiver:
                copy_region(region, sources[source], out[target])
            elif sender == self.rank:
                sends.setdefault(index[receiver], []).append(Part(region, sources[source]))
            else:
                receives.setdefault(index[sender], []).append(Part(region, out[target]))
        exchange_regions(sends, receives, self.group, splits=rounds, rounds=rounds)()


class _TransferFunction(torch.autograd.Function):
    """A transfer as an autograd function; its backward is differentiable, too."""

    @staticmethod
    def forward(
        ctx: Any, transfer: ShardTransfer, like: Tensor, _: Tensor, *local_tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.transfer, ctx.like = transfer, like.detach()
        return tuple(transfer.run(local_tensors, like))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        back = ctx.transfer.reverse()
        return None, None, None, *back.apply([gradient.contiguous() for gradient in gradients], ctx.like)
