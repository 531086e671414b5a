"""Carrying out a plan of moves: shards go in, the shards wanted come out, and gradients the other way."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, final

import numpy as np
import torch
from torch import Tensor

from shardwright import comm
from shardwright.errors import UnsupportedError
from shardwright.layout import Region, RegionTable
from shardwright.sharded.transfer.transfer_plan import TransferPlan, plan_transfer_for_rank
from shardwright.tensor.redistribute.chunking import cut
from shardwright.tensor.redistribute.packing import bits

__all__ = ["Transfer"]

_BUFFER = 64 << 20  # bytes that are packed and landed at a time, each


@final
@dataclass(frozen=True, eq=False)
class Transfer:
    """From the shards of one table to those of another, on the ranks of a group. Pure until it is run.

    >>> import numpy as np
    >>> halves = RegionTable(np.array([0, 0]), np.array([[0], [2]]), np.array([[2], [2]]))
    >>> whole = RegionTable(np.array([0]), np.array([[0]]), np.array([[4]]))
    >>> Transfer(halves, whole, comm.world()).run([torch.ones(2), torch.zeros(2)], like=torch.empty(0))
    [tensor([1., 1., 0., 0.])]
    """

    source: RegionTable
    target: RegionTable
    group: comm.Group

    @property
    def rank(self) -> int:
        """The global rank of this process."""
        return self.group.ranks[self.group.rank]

    def run(self, held: Sequence[Tensor], like: Tensor, out: Sequence[Tensor] | None = None) -> list[Tensor]:
        """This rank's tensors of the target, given those of the source, each in the order of its table.

        `like` says dtype and device of what is made, or `out` is filled. No gradient flows; see `apply`.
        """
        mine, ours = self._numbers(self.source), self._numbers(self.target)
        held = [tensor.to(like.device) for tensor in held]
        if out is None:
            out = [like.new_empty(self.target.sizes[number].tolist()) for number in ours]
        moves = plan_transfer_for_rank(self.source, self.target, self.rank)
        with torch.no_grad():
            self._carry(
                moves,
                {number: _Box(self.source, number, tensor) for number, tensor in zip(mine, held, strict=True)},
                {number: _Box(self.target, number, tensor) for number, tensor in zip(ours, out, strict=True)},
                self._rounds(like.itemsize),
            )
        return list(out)

    def apply(self, held: Sequence[Tensor], like: Tensor) -> list[Tensor]:
        """`run`, differentiable: gradients of the results go back to where the values came from.

        Ranks that hold something before must hold something after, or they would not take part in the way back.
        """
        if not torch.is_grad_enabled():
            return self.run(held, like)
        missing = sorted(set(self.source.ranks.tolist()) - set(self.target.ranks.tolist()))
        if missing:
            raise UnsupportedError(
                f"ranks {missing} hold shards that need a gradient, and would hold none afterwards: they would never "
                "hear of it. Detach the tensor, or give every rank a shard, which may be empty"
            )
        # A rank that holds nothing takes part in the way back, too: the anchor makes its results need it.
        anchor = like.new_empty(0).requires_grad_()
        return list(_Move.apply(self, like, anchor, *held))  # type: ignore[no-untyped-call]  # torch's stubs lack it

    def reverse(self) -> Transfer:
        """The way back."""
        return Transfer(self.target, self.source, self.group)

    def _numbers(self, table: RegionTable) -> list[int]:
        found: list[int] = np.flatnonzero(table.ranks == self.rank).tolist()
        return found

    def _rounds(self, itemsize: int) -> int:
        """In how many rounds boxes are carried: all ranks find the same number, from what any of them holds."""
        most = 0
        for table in (self.source, self.target):
            if table.ranks.size:
                held = np.bincount(table.ranks, weights=table.sizes.prod(axis=1).astype(np.float64))
                most = max(most, int(held.max()) * itemsize)
        return max(1, -(-most // _BUFFER))

    def _carry(self, moves: TransferPlan, held: dict[int, _Box], wanted: dict[int, _Box], rounds: int) -> None:
        index = {rank: place for place, rank in enumerate(self.group.ranks)}
        going: dict[int, list[tuple[Region, _Box]]] = {}
        coming: dict[int, list[tuple[Region, _Box]]] = {}
        rows = zip(*(column.tolist() for column in moves[:4]), strict=True)
        for row, (source, target, sender, receiver) in enumerate(rows):
            region = moves.region(row)
            if sender == receiver:
                wanted[target].at(region).copy_(held[source].at(region))
            elif sender == self.rank:
                going.setdefault(index[receiver], []).append((region, held[source]))
            else:
                coming.setdefault(index[sender], []).append((region, wanted[target]))
        for number in range(rounds):
            self._round(going, coming, rounds, number)

    def _round(
        self,
        going: dict[int, list[tuple[Region, _Box]]],
        coming: dict[int, list[tuple[Region, _Box]]],
        rounds: int,
        number: int,
    ) -> None:
        sends: dict[int, Tensor] = {}
        for peer, boxes in going.items():
            if parts := [box.at(part).reshape(-1) for part, box in _parts(boxes, rounds, number)]:
                sends[peer] = parts[0] if len(parts) == 1 else torch.cat(parts)
        landings: dict[int, tuple[Tensor, list[Tensor]]] = {}
        for peer, boxes in coming.items():
            if places := [box.at(part) for part, box in _parts(boxes, rounds, number)]:
                direct = len(places) == 1 and places[0].is_contiguous()
                size = sum(place.numel() for place in places)
                landings[peer] = (places[0].view(-1) if direct else places[0].new_empty(size), [] if direct else places)
        if sends or landings:
            comm.exchange(sends, {peer: buffer for peer, (buffer, _) in landings.items()}, self.group)
        for buffer, places in landings.values():
            if places:
                pieces = torch.split(buffer, [place.numel() for place in places])
                for place, part in zip(places, pieces, strict=True):
                    place.copy_(part.view(place.shape))


class _Box:
    """A shard's tensor as integers of its width, which torch can copy and concatenate whatever its dtype."""

    __slots__ = ("data", "frame")

    def __init__(self, table: RegionTable, number: int, tensor: Tensor) -> None:
        self.frame = Region(table.offsets[number].tolist(), table.sizes[number].tolist())
        self.data = bits(tensor.detach().resolve_conj().resolve_neg())

    def at(self, region: Region) -> Tensor:
        return self.data[region.slices(self.frame)]


def _parts(boxes: list[tuple[Region, _Box]], rounds: int, number: int) -> Iterator[tuple[Region, _Box]]:
    """What of the boxes travels in this round."""
    for region, box in boxes:
        for part in cut(region, rounds)[number::rounds]:
            yield part, box


class _Move(torch.autograd.Function):
    """A relocation; its backward is the relocation back, as a function, so that it can be differentiated again."""

    @staticmethod
    def forward(ctx: Any, relocation: Transfer, like: Tensor, _: Tensor, *held: Tensor) -> tuple[Tensor, ...]:
        ctx.relocation, ctx.like = relocation, like.detach()
        return tuple(relocation.run(held, like))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        back = ctx.relocation.reverse()
        return None, None, None, *back.apply([gradient.contiguous() for gradient in gradients], ctx.like)
