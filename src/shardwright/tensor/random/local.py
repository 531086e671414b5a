"""Fill local tensors with random numbers: choose seed, offset and region so that values do not depend on the layout."""

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

comm.on_forget(tracker.reset)  # ranks of a new world start from the same state

__all__ = ["fill_local", "next_key", "refuse_generator", "refuse_plain_draws", "same_draws", "scratch_seed"]


def next_key(mesh: Mesh) -> Key:
    """Return the seed and offset of the next random operator on this mesh, the same on all of its ranks.

    Ranks communicate only at the first operator on the mesh after `torch.manual_seed` set a new seed: that of the
    mesh's first rank is then used. After `shardwright.manual_seed` they never do.
    """
    refuse_capture("this operator draws random numbers in a way that a captured program cannot repeat")
    return tracker.next_offset(agree_seed=partial(_agree, mesh), among=mesh)


def _agree(mesh: Mesh, seed: int) -> int:
    if mesh.size == 1 or comm.rank() not in mesh:
        return seed
    group = comm.subgroup(sorted(mesh.ranks))
    seeds = comm.gather_bytes(str(seed).encode(), group=group, what="agreeing on the seed of torch.manual_seed")
    return int(seeds[group.ranks.index(mesh.ranks[0])])


def fill_local(
    out: Tensor, layout: Layout, fill: Callable[..., Tensor], *, features: bool = False, **how: Any
) -> Tensor:
    """Fill `out`, this rank's part of `layout`, with random numbers, in place and visibly to autograd.

    With `features=True`, use the numbers of a tensor whose dimensions from the third on have size 1.
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
    """Seed torch's generators with the same seed on every rank of the mesh, and restore them afterwards."""
    key = next_key(mesh)
    with torch.random.fork_rng():
        # Seeds of different offsets are far apart: multiples of an odd constant modulo 2^63.
        torch.manual_seed((key.seed + (key.offset + 1) * 0x9E3779B97F4A7C15) % 2**63)
        yield


@contextmanager
def same_draws(name: str, func: Any, mesh: Mesh) -> Iterator[None]:
    """Make every rank of the mesh draw the same numbers in a call on replicated tensors, or raise if they might differ.

    An operator that torch tags as `nondeterministic_seeded` draws from a generator with the same seed on every rank.
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
    """Raise if a generator is given: its state differs between ranks and does not account for shards."""
    if generator is not None:
        raise UnsupportedError(
            f"{name}: argument 'generator' is not supported, because its state is local to each rank: omit it, and use "
            "sw.manual_seed"
        )


def refuse_plain_draws(name: str) -> None:
    """Raise for torch's random factories with a DTensor as `out`: each rank would draw its own numbers."""
    if name in ("normal", "rand", "randint", "randn", "randperm"):
        raise UnsupportedError(
            f"torch.{name} with a DTensor as 'out' would draw different numbers on each rank: fill the tensor in place "
            f"(x.uniform_(), x.normal_(), x.random_(low, high)), or create it with sw.{name}"
        )
