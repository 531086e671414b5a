"""Results that share memory in torch share it on every rank, or using them raises before anything is written."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import shardwright as sw
from shardwright.errors import InPlaceError, TensorError
from shardwright.testing import on_ranks

VIEWS: dict[str, Callable[[Any], Any]] = {
    "contiguous": lambda x: x.contiguous(),
    "reshape(-1)": lambda x: x.reshape(-1),
    "reshape(6, 2)": lambda x: x.reshape(6, 2),
    "reshape(3, 2, 2)": lambda x: x.reshape(3, 2, 2),
    "reshape_as": lambda x: x.reshape_as(x),
    "flatten": lambda x: x.flatten(),
    "ravel": lambda x: x.ravel(),
    "view": lambda x: x.view(3, 2, 2),
    "view_as": lambda x: x.view_as(x),
    "unflatten": lambda x: x.unflatten(1, (2, 2)),
    "to": lambda x: x.to(torch.float32),
    "to(memory_format)": lambda x: x.to(memory_format=torch.contiguous_format),
    "type_as": lambda x: x.type_as(x),
    "float": lambda x: x.float(),
    "double": lambda x: x.double(),
    "clone": lambda x: x.clone(),
    "expand": lambda x: x.expand(2, 3, 4),
    "expand_as": lambda x: x.expand_as(x),
    "broadcast_tensors": lambda x: torch.broadcast_tensors(x, x)[0],
    "atleast_3d": lambda x: torch.atleast_3d(x),
    "atleast_1d": lambda x: torch.atleast_1d(x),
    "squeeze": lambda x: x.squeeze(),
    "unsqueeze": lambda x: x.unsqueeze(1),
    "real": lambda x: x.real,
    "conj": lambda x: x.conj(),
    "resolve_conj": lambda x: x.resolve_conj(),
    "positive": lambda x: torch.positive(x),
    "sum_to_size": lambda x: x.sum_to_size(3, 4),
    "t": lambda x: x.t(),
    "t.contiguous": lambda x: x.t().contiguous(),
    "t.reshape": lambda x: x.t().reshape(12),
    "t.t.contiguous": lambda x: x.t().t().contiguous(),
    "(t + 1).contiguous": lambda x: (x.t() + 1).contiguous(),
    "permute": lambda x: x.permute(1, 0),
    "swapaxes": lambda x: x.swapaxes(0, 1),
    "movedim": lambda x: x.movedim(0, 1),
    "narrow": lambda x: x.narrow(1, 1, 2),
    "narrow.contiguous": lambda x: x.narrow(0, 1, 2).contiguous(),
    "[:, :3]": lambda x: x[:, :3],
    "[:, :3].contiguous": lambda x: x[:, :3].contiguous(),
    "[:, :2].flatten": lambda x: x[:, :2].flatten(),
    "[:2].reshape": lambda x: x[:2].reshape(8),
    "[:, 1:2].ravel": lambda x: x[:, 1:2].ravel(),
    "[::2]": lambda x: x[::2],
    "[1]": lambda x: x[1],
    "[1].contiguous": lambda x: x[1].contiguous(),
    "[:, 2]": lambda x: x[:, 2],
    "[:, 2].contiguous": lambda x: x[:, 2].contiguous(),
    "[:, 2].reshape": lambda x: x[:, 2].reshape(3, 1),
    "select": lambda x: x.select(1, 3),
    "[[0, 2]]": lambda x: x[[0, 2]],
    "split": lambda x: x.split(2, 1)[1],
    "chunk": lambda x: x.chunk(2)[0],
    "tensor_split": lambda x: x.tensor_split(3, 1)[2],
    "hsplit": lambda x: x.hsplit(2)[0],
    "unbind": lambda x: x.unbind(1)[1],
    "diagonal": lambda x: x.diagonal(1),
    "unfold": lambda x: x.unfold(1, 2, 2),
    "unfold(0)": lambda x: x.unfold(0, 2, 1),
    "as_strided": lambda x: x.as_strided((2, 2), (2, 1)),
    "as_strided(offset)": lambda x: x.as_strided((2, 2), (2, 1), 1),
    "detach": lambda x: x.detach(),
    "data": lambda x: x.data,
    "alias": lambda x: x[...],
}
SITUATIONS: dict[str, tuple[tuple[int, ...], Callable[[Any], Any]]] = {
    "as it was made": ((3, 4), lambda x: x),
    "transposed": ((4, 3), lambda x: x.t()),
    "sliced columns": ((3, 6), lambda x: x[:, 1:5]),
    "sliced rows": ((5, 4), lambda x: x[1:4]),
    "stepped": ((6, 4), lambda x: x[::2]),
    "computed": ((4, 3), lambda x: x.t() + 0),
    "picked": ((2, 3, 4), lambda x: x[1]),
}


FULL = os.environ.get("SHARDWRIGHT_BUDGET") == "full"


def numbers(*shape: int) -> Tensor:
    return torch.arange(1.0, 1 + torch.Size(shape).numel()).reshape(shape)


def written(tensor: Any) -> Exception | None:
    """Write to a tensor; return the error if it raises."""
    try:
        tensor.add_(tensor.new_ones(()))
    except RuntimeError as error:
        return error
    return None


def value(tensor: Any) -> Tensor | None:
    """Return the global value of a tensor; None if reading it raises."""
    try:
        return tensor.full_tensor().clone()
    except InPlaceError:
        return None


def check_view(
    view: Callable[[Any], Any], situation: str, mesh: Any, placement: Any, writes: tuple[bool, ...]
) -> str | None:
    """Compare value and aliasing of a view with torch's, and return what is wrong; `writes`: to the view or not."""
    shape, make = SITUATIONS[situation]
    for write_to_view in writes:
        plain, ours = numbers(*shape), sw.distribute_tensor(numbers(*shape), mesh, [placement])
        one, other = make(plain), make(ours)
        try:
            there = view(one)
        except RuntimeError:
            with pytest.raises(RuntimeError):
                view(other)
            return None
        try:
            here = view(other)
        except TensorError:
            return None  # refused on all ranks
        if not torch.equal(value(here), there):  # type: ignore[arg-type]  # nothing was written
            return "value"
        pairs = ((plain, ours), (one, other), (there, here))
        before = [tensor.clone() for tensor, _ in pairs]
        refused = written(here if write_to_view else ours)
        if refused is None and written(there if write_to_view else plain) is not None:
            return "torch refuses the write"
        for (tensor, spread), old in zip(pairs, before, strict=True):
            found, wanted = value(spread), tensor if refused is None else old
            if found is not None and not torch.equal(found, wanted):
                return f"after a write to the {'view' if write_to_view else 'original'}, refused: {refused!r}"
    return None


@pytest.mark.parametrize("situation", SITUATIONS)
@on_ranks(2)
def test_views_alias_as_in_torch_on_first_and_cached_calls(situation: str) -> None:
    mesh = sw.init_device_mesh("cpu", (2,))
    wrong = []
    if not FULL and situation in ("sliced rows", "stepped"):
        return
    for place, (name, view) in enumerate(VIEWS.items()):
        for dim in (0, 1) if FULL else (place % 2,):
            for turn in range(4):  # the second call is answered from a plan, which may be of other strides
                strides = "as it was made" if turn == 1 else situation
                writes = (True, False) if FULL else (turn == 0,)
                found = check_view(view, strides, mesh, sw.Shard(dim), writes) if FULL or turn < 3 else None
                if found is not None:
                    wrong.append((name, dim, turn, found))
    assert not wrong


STEPS: list[Callable[[Any, random.Random], Any]] = [
    lambda x, _: x.t() if x.ndim == 2 else x.unsqueeze(0),
    lambda x, _: x.contiguous(),
    lambda x, _: x.reshape(-1),
    lambda x, _: x.flatten(),
    lambda x, _: x.reshape(x.shape[0], -1, 1) if x.ndim and x.numel() else x.clone(),
    lambda x, _: x.detach() if not x.requires_grad else x * 1,
    lambda x, r: x[r.randrange(x.shape[0])] if x.ndim and x.shape[0] else x + 1,
    lambda x, r: x[..., r.randrange(x.shape[-1])] if x.ndim and x.shape[-1] else x + 1,
    lambda x, r: x[r.randrange(2) : r.randrange(1, 5)] if x.ndim else x * 2,
    lambda x, r: x[..., : r.randrange(1, 4)] if x.ndim else x * 2,
    lambda x, _: x[::2] if x.ndim else x.clone(),
    lambda x, _: x.unbind(0)[-1] if x.ndim and x.shape[0] else x + 1,
    lambda x, _: x.unfold(0, 2, 1) if x.ndim and x.shape[0] >= 2 else x.clone(),
    lambda x, _: x.squeeze(),
    lambda x, _: x * 2,
    lambda x, _: x + x,
    lambda x, _: x.clone(),
]
WRITES: list[Callable[[Any, Any, random.Random], Any]] = [
    lambda x, y, _: x.add_(1),
    lambda x, y, _: x.mul_(2),
    lambda x, y, _: x.zero_(),
    lambda x, y, _: x.copy_(y * 1) if x.shape == y.shape else x.fill_(3),
    lambda x, y, r: x.__setitem__(r.randrange(x.shape[0]), 5.0) if x.ndim and x.shape[0] else x.sub_(1),
    lambda x, y, r: x.__setitem__(slice(0, r.randrange(1, 3)), 7.0) if x.ndim else x.sub_(2),
    lambda x, y, r: x[r.randrange(x.shape[0])].add_(1) if x.ndim and x.shape[0] else x.sub_(1),
    lambda x, y, _: x.t_() if x.ndim == 2 else x.unsqueeze_(0),
    lambda x, y, _: x.squeeze_(),
]


def attempt(step: Callable[..., Any], *args: Any) -> tuple[Any, Exception | None]:
    try:
        return step(*args), None
    except RuntimeError as error:
        return None, error


def compare(live: list[tuple[Any, Any]], where: str) -> list[tuple[Any, Any]]:
    """Compare all live tensors with torch's, and return those that may still be read."""
    kept = []
    for plain, ours in live:
        found = value(ours.detach()) if not isinstance(attempt(ours.detach)[1], InPlaceError) else None
        if found is not None:
            assert tuple(found.shape) == tuple(plain.shape), where
            assert torch.equal(found, plain.detach()), where
            kept.append((plain, ours))
    return kept


def run_program(seed: int, mesh: Any, length: int) -> None:
    """Run a random program of views and writes on both, comparing all live tensors after every step."""
    dice = random.Random(seed)
    shape = dice.choice([(4, 3), (3, 4), (5, 2), (2, 2, 3), (6,), (1, 4)])
    placement = dice.choice([sw.Shard(0), sw.Shard(len(shape) - 1), sw.Replicate()])
    leaf, spread = numbers(*shape), sw.distribute_tensor(numbers(*shape), mesh, [placement])
    live: list[tuple[Any, Any]] = [(leaf, spread)]
    grads = dice.random() < 0.5
    if grads:
        leaf.requires_grad_()
        spread.requires_grad_()
        live = [(leaf * 1, spread * 1)]
    for number in range(length):
        plain, ours = dice.choice(live)
        other = dice.choice(live)
        writes = dice.random() < 0.4
        step: Any = dice.choice(WRITES if writes else STEPS)
        state = dice.getstate()
        more = (other[1], dice) if writes else (dice,)
        here, refused = attempt(step, ours, *more)
        where = f"seed {seed}, step {number}: {step.__code__.co_firstlineno - 1}, refused: {refused!r}"
        dice.setstate(state)
        if refused is None:
            there, error = attempt(step, plain, *((other[0], dice) if writes else (dice,)))
            if error is not None:
                return  # torch refuses what it could do: a write to one of several views
            if not writes:
                live.append((there, here))
        live = compare(live, where)
        if not live:
            return
    if grads:
        readable = [pair for pair in live if attempt(lambda pair=pair: pair[0] ** 2)[1] is None]
        total, sums = (sum((pair[side] ** 2).sum() for pair in readable) for side in (0, 1))
        if isinstance(total, Tensor) and total.requires_grad:
            _, failed = attempt(total.backward)
            _, refused = attempt(sums.backward)  # type: ignore[union-attr]  # a DTensor
            if failed is None:
                assert refused is None, f"seed {seed}: {refused!r}"
                torch.testing.assert_close(spread.grad.full_tensor(), leaf.grad, msg=f"seed {seed}: gradients")


@on_ranks(3, timeout=600)
def test_random_programs_of_views_and_writes_match_torch_or_raise() -> None:
    mesh = sw.init_device_mesh("cpu", (3,))
    for seed in range(600 if FULL else 16):
        run_program(seed, mesh, 12)
