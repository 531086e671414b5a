"""The reduction of a unit's gradients, in flight."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, final

import torch
from torch import Tensor

from shardwright import comm
from shardwright.parallel.units.split import Split
from shardwright.tensor.base.tagging import DTensorBase, no_torch_function

__all__ = ["Reduction", "divisor", "needs_gradient_now"]

_gradient: Any = Tensor.grad  # torch's descriptor: it sees the local tensor
_get_grad, _set_grad = _gradient.__get__, _gradient.__set__


def divisor(chosen: float | None, group: comm.Group, replicas: comm.Group | None) -> float:
    """Return what a sum of gradients is divided by: the number of ranks, unless another factor was chosen.

    >>> divisor(None, comm.world(), None), divisor(8.0, comm.world(), None)
    (1.0, 8.0)
    """
    return chosen if chosen is not None else float(group.size * (replicas.size if replicas is not None else 1))


def needs_gradient_now(parameters: Sequence[DTensorBase]) -> bool:
    """Return whether a hook gets the gradients as soon as autograd has them."""
    return any(
        bool(parameter._backward_hooks) or bool(getattr(parameter, "_post_accumulate_grad_hooks", None))
        for parameter in parameters
    )


@final
class Reduction:
    """One reduce-scatter of gradients, and then their sum over replicas; started when it is made."""

    def __init__(
        self,
        parameters: Sequence[DTensorBase],
        splits: Sequence[Split],
        tensors: Sequence[Tensor],
        present: Sequence[bool],
        group: comm.Group,
        replicas: comm.Group | None,
        scale: float,
    ) -> None:
        self.parameters = parameters
        self._splits, self._replicas = splits, replicas
        # The sum over many ranks of float16 gradients could overflow: they are divided first.
        early = scale != 1 and any(tensor.dtype is torch.float16 for tensor in tensors)
        given = [tensor * scale for tensor in tensors] if early else tensors
        self._scale = 1.0 if early else scale
        self._group, self._device = group, given[0].device if given else torch.device("cpu")
        self._dtypes = [tensor.dtype for tensor in given]
        self._rests = [tensor.shape[1:] for tensor in given]
        if group.size == 1:
            own: list[Tensor | None] = [each if has else None for each, has in zip(given, present, strict=True)]
            self._pending = comm.Pending("reduce_scatter_many", group, (), lambda: own)
        else:
            sizes = [split.sizes for split in splits]
            self._pending = comm.start_reduce_scatter_many(given, group, sizes, present=present)

    def takes_time(self) -> bool:
        """Return whether there is anything to wait for."""
        return self._group.size > 1 or (self._replicas is not None and self._replicas.size > 1)

    def land(self) -> None:
        """Wait, and add the results to the gradients of the parameters."""
        with no_torch_function(), torch.no_grad():
            for parameter, result in zip(self.parameters, self.results(), strict=True):
                if result is None or not parameter.requires_grad:  # frozen since forward: as in plain torch
                    continue
                before = _get_grad(parameter)
                if before is None:
                    _set_grad(parameter, result)  # DTensor.grad tags it when it is read
                else:
                    before.add_(result)

    def discard(self) -> None:
        """Wait, and drop the results."""
        self._pending.wait()

    def results(self) -> list[Tensor | None]:
        """Wait for the results: this rank's pieces in the dtypes of the parameters; None if no rank had a gradient."""
        pieces = self._pending.wait()
        if self._replicas is not None and self._replicas.size > 1:
            shapes = [
                (split.sizes[self._group.rank], *rest) for split, rest in zip(self._splits, self._rests, strict=True)
            ]
            pieces = _sum_over(pieces, shapes, self._dtypes, self._device, self._replicas)
        return [
            None if piece is None else _finished(piece, parameter.dtype, self._scale, split)
            for piece, parameter, split in zip(pieces, self.parameters, self._splits, strict=True)
        ]


def _sum_over(
    pieces: Sequence[Tensor | None],
    shapes: Sequence[tuple[int, ...]],
    dtypes: Sequence[torch.dtype],
    device: torch.device,
    replicas: comm.Group,
) -> list[Tensor | None]:
    """Return the pieces summed over the replicas, in one collective for each dtype.

    A piece that is absent here counts as zero, and is absent in the result if all replicas lack it: the number of ranks
    that have it is summed with the pieces.
    """
    found: dict[int, Tensor | None] = {}
    for dtype in dict.fromkeys(dtypes):
        indices = [index for index, each in enumerate(dtypes) if each is dtype]
        given = [pieces[index] for index in indices]
        counts = torch.ones(len(given), dtype=dtype, device=device)
        missing = any(piece is None for piece in given)
        if missing:  # otherwise the host need not wait for the device
            counts = torch.tensor([piece is not None for piece in given], dtype=dtype, device=device)
        flat = [
            torch.zeros(math.prod(shapes[index]), dtype=dtype, device=counts.device)
            if piece is None
            else piece.reshape(-1)
            for index, piece in zip(indices, given, strict=True)
        ]
        total = comm.all_reduce(torch.cat([*flat, counts]), replicas)
        *parts, counts = torch.split(total, [*(len(each) for each in flat), len(counts)])
        absent = [False] * len(given) if not missing else [not count for count in counts.tolist()]
        for index, part, is_absent in zip(indices, parts, absent, strict=True):
            found[index] = None if is_absent else part.view(shapes[index])
    return [found[index] for index in range(len(pieces))]


def _finished(piece: Tensor, dtype: torch.dtype, scale: float, split: Split) -> Tensor:
    result = piece.to(dtype)
    result = result * scale if scale != 1 else result
    return result.movedim(0, split.dim).contiguous() if split.dim else result
