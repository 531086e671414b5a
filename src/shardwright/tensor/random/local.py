"""Random numbers in local tensors: which seed, which offset, which region, so that no layout shows in the values."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from shardwright import comm
from shardwright.errors import UnsupportedError
from shardwright.layout import Layout, Mesh, Region
from shardwright.tensor.base.capture import capture_call, is_capturing, refuse_capture
from shardwright.tensor.base.registry import overloads_of
from shardwright.tensor.base.tagging import local_region
from shardwright.tensor.random.offsets import tracker
from shardwright.tensor.random.philox import Key

comm.on_forget(tracker.reset)  # another world has another past, which all its ranks share

__all__ = ["draws_alike", "fill_local", "next_key", "refuse_generator", "refuse_plain_draws", "scratch_seed"]


def next_key(mesh: Mesh) -> Key:
    """The seed and offset of the next random operator on this mesh, the same on all of its ranks.

    Ranks communicate only at the first operator on the mesh after `torch.manual_seed` gave them a new seed: the seed of
    the mesh's first rank then counts. After `shardwright.manual_seed` they never do.
    """
    refuse_capture("this operator draws its numbers in a manner that a captured program cannot repeat")
    return tracker.next_offset(agree_seed=partial(_agree, mesh), among=mesh)


def _agree(mesh: Mesh, seed: int) -> int:
    if mesh.size == 1 or comm.rank() not in mesh:
        return seed
    group = comm.subgroup(sorted(mesh.ranks))
    said = comm.gather_bytes(str(seed).encode(), group=group, what="agreeing on the seed of torch.manual_seed")
    return int(said[group.ranks.index(mesh.ranks[0])])


def fill_local(
    out: Tensor, layout: Layout, fill: Callable[..., Tensor], *, features: bool = False, **how: Any
) -> Tensor:
    """`out`, this rank's part of `layout`, filled with random numbers in place, as autograd sees it.

    With `features`, the numbers are those of a tensor whose dimensions from the third on are 1.
    """
    if out.is_meta:
        return out
    if is_capturing():
        return capture_call(fill_local, out, layout, fill, features=features, **how)  # type: ignore[no-any-return]  # likewise a tensor
    key = next_key(layout.mesh)
    region, shape = local_region(layout), layout.shape
    if features:
        ones = (1,) * (layout.ndim - 2)
        region = Region((*region.offset[:2], *(0,) * len(ones)), (*region.size[:2], *ones))
        shape = (*shape[:2], *ones)
    if not (out.requires_grad and torch.is_grad_enabled()):
        return fill(out, region, shape, key.seed, key.offset, **how)
    return out.copy_(fill(torch.empty_like(out), region, shape, key.seed, key.offset, **how))


@contextmanager
def scratch_seed(mesh: Mesh) -> Iterator[None]:
    """torch's own generators, seeded alike on every rank of the mesh while it lasts, and put back afterwards."""
    key = next_key(mesh)
    with torch.random.fork_rng():
        # Far from any other operator's numbers: a step of an odd constant for each offset, modulo 2^63.
        torch.manual_seed((key.seed + (key.offset + 1) * 0x9E3779B97F4A7C15) % 2**63)
        yield


@contextmanager
def draws_alike(name: str, func: Any, mesh: Mesh) -> Iterator[None]:
    """Make every rank of the mesh draw the same numbers in a call on replicated tensors, or raise if they might differ.

    An operator that torch tags as `nondeterministic_seeded` draws from a generator that is seeded alike on every rank.
    One that draws without that tag, such as a custom operator, raises `UnsupportedError`.
    """
    if _is_seeded(func):
        with scratch_seed(mesh):
            yield
        return
    if mesh.size == 1 or is_capturing():
        yield
        return
    before = _generator_states()
    yield
    if any(not torch.equal(old, new) for old, new in zip(before, _generator_states(), strict=True)):
        raise UnsupportedError(
            f"{name} draws random numbers, which would differ between the ranks that hold the same replicated result: "
            "declare the operator with tags=(torch.Tag.nondeterministic_seeded,), so that all ranks draw the same "
            "numbers, or pass the random numbers to it as a tensor made with sw.rand"
        )


def _is_seeded(func: Any) -> bool:
    """Return whether torch tags an overload of this function as drawing random numbers."""
    return any(torch.Tag.nondeterministic_seeded in overload.tags for overload in overloads_of(func))


def _generator_states() -> list[Tensor]:
    """Return the states of torch's default generators, of the CPU and of the current CUDA device."""
    states = [torch.default_generator.get_state()]
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]  # torch's
        states.append(torch.cuda.get_rng_state())
    return states


def refuse_generator(name: str, generator: torch.Generator | None) -> None:
    """Refuses a generator: it has a state of its own on every rank, and draws without knowing which part it fills."""
    if generator is not None:
        raise UnsupportedError(
            f"{name}: argument 'generator' draws from a state that each rank has for itself, so the parts of one "
            "tensor would not fit together: leave it out, and seed with sw.manual_seed"
        )


def refuse_plain_draws(name: str) -> None:
    """Refuses torch's random factories with a DTensor as `out`: they would draw each rank's own numbers."""
    if name in ("normal", "rand", "randint", "randn", "randperm"):
        raise UnsupportedError(
            f"torch.{name} with a DTensor as 'out' draws each rank's own numbers: fill the tensor in place "
            f"(x.uniform_(), x.normal_(), x.random_(low, high)), or make it with sw.{name}"
        )
