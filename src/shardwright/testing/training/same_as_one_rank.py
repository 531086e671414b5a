"""`same_as_one_rank`: train on several ranks and on one, and compare."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import inf, prod
from typing import Any, Literal

import torch
from torch import nn

from shardwright import comm
from shardwright.errors import ArgumentTypeError, TrainingMismatchError
from shardwright.parallel import parallelize, shard_batch
from shardwright.testing.ranks.pool import run_ranks
from shardwright.testing.training.compare import Comparison, Difference, Record, compare, record
from shardwright.testing.training.program import Parallelize, Program, Shard, default_step, train

__all__ = ["same_as_one_rank"]

TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 5e-3}


def same_as_one_rank(
    model: Callable[[], nn.Module],
    batch: Any,
    parallelize: Parallelize = parallelize,
    *,
    mesh: Mapping[str, int] | Sequence[Mapping[str, int]],
    shard: Shard = shard_batch,
    step: Callable[[nn.Module, Any], Any] = default_step,
    optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer] | None = None,
    steps: int = 2,
    max_norm: float = inf,
    dtype: torch.dtype | None = torch.float64,
    tolerance: float | None = None,
    reference: Literal["torch", "shardwright"] = "torch",
    seed: int = 0,
    timeout: float = 120.0,
) -> list[Comparison]:
    """Train on the ranks of each mesh and on one rank; raise `TrainingMismatchError` if anything differs.

    Compared are the loss, the gradient of every parameter and the gradient norm of each step, the parameters before
    and after, and which of them are tied. Every rank compares its own shards, so the error names parameter, rank and
    largest difference. The result has one `Comparison` per mesh, with the largest relative differences.

    - `model()` builds the plain model, after `torch.manual_seed(seed)`, in `dtype`.
    - `batch` is the global batch, or a function of the step's number that returns it. `step(model, batch)` returns the
      loss; by default it calls `model(**batch)` (a mapping), `model(*batch)` (a sequence) or `model(batch)`, and takes
      `loss` of the output. `backward` is called on the loss if it requires grad: a step may also call it itself, as
      for gradient accumulation, and return the detached loss.
    - `parallelize(model, mesh)` changes the model in place or returns a new one; `shard(batch, mesh)` distributes the
      global batch. By default they are `sw.parallelize` and `sw.shard_batch`. `mesh` has the sizes of the mesh
      dimensions by name; pass several to try each of them.
    - `optimizer(parameters)` is SGD by default. Adam divides gradients by their size, and so magnifies rounding of
      those that are almost zero: compare it in float64.
    - Gradients are clipped to `max_norm` by `torch.nn.utils.clip_grad_norm_`.
    - `tolerance` is relative to the largest value of each tensor: 1e-9 in float64, 1e-5 in float32.
    - `reference="torch"` trains the plain model with plain torch. `"shardwright"` runs the same program in a world of
      one rank: needed with dropout, since the random numbers of DTensors are not torch's.

    >>> import torch
    >>> from shardwright.testing import same_as_one_rank
    >>> def loss(model, batch):
    ...     return model(batch).square().mean()
    >>> comparisons = same_as_one_rank(
    ...     lambda: torch.nn.Linear(4, 2), torch.ones(6, 4), mesh={"dp": 2}, step=loss)
    >>> print(comparisons[0])
    dp=2: the same as on one rank; ...
    """
    if optimizer is None:
        optimizer = _sgd
    program = Program(model, batch, step, optimizer, steps, max_norm, dtype, seed)
    meshes = [dict(sizes) for sizes in ([mesh] if isinstance(mesh, Mapping) else mesh)]
    if not meshes or not all(meshes):
        raise ArgumentTypeError(f"same_as_one_rank: mesh must give the sizes of mesh dimensions by name, got {mesh!r}")
    if tolerance is None:
        tolerance = TOLERANCES.get(dtype or torch.get_default_dtype(), 1e-5)
    expected: dict[tuple[str, ...], Record] = {}
    comparisons = []
    for sizes in meshes:
        names = tuple(sizes) if reference == "shardwright" else ()
        if names not in expected:
            expected[names] = run_ranks(1, _on_one_rank, program, parallelize, shard, names, timeout=timeout)[0]
        ranks = prod(sizes.values())
        results = run_ranks(
            ranks, _on_ranks, program, parallelize, shard, sizes, expected[names], tolerance, timeout=timeout
        )
        comparisons.append(_merge(sizes, results, expected[names]))
    if not all(comparisons):
        failed = [str(comparison) for comparison in comparisons if not comparison]
        raise TrainingMismatchError("\n".join(failed))
    return comparisons


def _sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def _on_one_rank(program: Program, parallelize: Parallelize, shard: Shard, names: tuple[str, ...]) -> Record:
    """Train in a world of one rank: with plain torch, or in parallel on a mesh of ones with these names."""
    if not names:
        return record(train(program, None, None, None))
    return record(train(program, parallelize, shard, _mesh(dict.fromkeys(names, 1))))


def _on_ranks(
    program: Program, parallelize: Parallelize, shard: Shard, sizes: dict[str, int], expected: Record, tolerance: float
) -> tuple[list[Difference], dict[str, float]]:
    return compare(train(program, parallelize, shard, _mesh(sizes)), expected, tolerance)


def _mesh(sizes: dict[str, int]) -> Any:
    return comm.init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))


def _merge(
    sizes: dict[str, int], results: Sequence[tuple[list[Difference], dict[str, float]]], expected: Record
) -> Comparison:
    """Merge what the ranks of a mesh have found, in the order in which the program computes the values."""
    order = {key: index for index, key in enumerate(expected.values)}
    largest: dict[str, float] = {}
    for _, relative in results:
        for kind, value in relative.items():
            largest[kind] = max(largest.get(kind, 0.0), value)
    found = [difference for differences, _ in results for difference in differences]
    found.sort(key=lambda difference: (order.get((difference.what, difference.name), -1), difference.name))
    return Comparison(", ".join(f"{name}={size}" for name, size in sizes.items()), tuple(found), largest)
