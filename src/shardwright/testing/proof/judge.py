"""Check a claim: run the local call of each simulated rank on its shards, forward and backward, in one process."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from shardwright.layout import Layout, Partial
from shardwright.tensor.base.gradient_types import dual
from shardwright.tensor.base.strategy import LocalContext
from shardwright.testing.operators.sample import Reference, Sample, reaching_gradients
from shardwright.testing.proof.claims import Claim
from shardwright.testing.proof.splitting import Mismatch, assemble, check_shapes, compare, split

__all__ = ["judge"]

DIFFERENTIABLE = ("sum", "avg")


def judge(sample: Sample, reference: Reference, claim: Claim, values: bool) -> None:
    """Raise `Mismatch` if the claim does not hold for the sample; `values=False` compares only shapes and dtypes."""
    generator = torch.Generator().manual_seed(0)
    ranks = claim.ins[0].mesh.size
    parts = [split(t.detach(), layout, generator) for t, layout in zip(sample.tensors, claim.ins, strict=True)]
    leaves = [
        [
            part[rank].clone().requires_grad_(requires)
            for part, requires in zip(parts, reference.needs_gradient, strict=True)
        ]
        for rank in range(ranks)
    ]
    outs = [_run(sample, claim, leaves[rank], rank) for rank in range(ranks)]
    for number, expected in enumerate(reference.outs):
        name = f"output {number}"
        output_values = [out[number].detach() for out in outs]
        if values:
            compare(assemble(output_values, claim.outs[number], name), expected, name)
            continue
        check_shapes(output_values, claim.outs[number], name)
        if output_values[0].dtype != expected.dtype:
            raise Mismatch(f"{name}: {output_values[0].dtype} instead of {expected.dtype}")
    if any(reference.needs_gradient) and values:
        _judge_gradients(reference, claim, leaves, outs)


def _run(sample: Sample, claim: Claim, leaves: Sequence[Tensor], rank: int) -> list[Tensor]:
    try:
        local = claim.run(LocalContext(claim.ins, claim.outs, rank)) if claim.run is not None else None
        # Leaves that require grad may not be written to; views of the copies are recognised by their memory.
        inputs = [leaf.clone() for leaf in leaves]
        outs = sample.call(inputs, local)
    except Exception as error:  # any exception of the local call is a fault of the rule
        raise Mismatch(f"the local call on rank {rank} raised {type(error).__name__}: {error}") from error
    if len(outs) != len(claim.outs):
        raise Mismatch(f"the local call on rank {rank} returned {len(outs)} tensors, the rule claims {len(claim.outs)}")
    if claim.fresh and not sample.inplace and any(_shares(out, tensor) for out in outs for tensor in inputs):
        raise Mismatch(f"output on rank {rank} is a view of an input, but the rule claims fresh outputs")
    return outs


def _shares(out: Tensor, tensor: Tensor) -> bool:
    return bool(out.numel()) and out.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr()


def _judge_gradients(
    reference: Reference, claim: Claim, leaves: Sequence[Sequence[Tensor]], outs: Sequence[Sequence[Tensor]]
) -> None:
    """Run the backward pass with seeds of the dual layouts and compare the gradients, which have dual layouts too."""
    seeds = [
        None if seed is None else _seeds(seed, layout, number)
        for number, (seed, layout) in enumerate(zip(reference.seeds, claim.outs, strict=True))
    ]
    by_rank = []
    for rank, (rank_outs, rank_leaves) in enumerate(zip(outs, leaves, strict=True)):
        rank_seeds = [None if seed is None else seed[rank] for seed in seeds]
        try:
            by_rank.append(reaching_gradients(rank_outs, rank_seeds, rank_leaves))
        except RuntimeError as error:
            raise Mismatch(f"the backward pass on rank {rank} raised: {error}") from error
    _check_participation(reference, outs, by_rank)
    for number, expected in enumerate(reference.gradients):
        if expected is None:
            continue
        layout = claim.ins[number]
        parts = [
            torch.zeros_like(leaf[number]) if gradient[number] is None else gradient[number]
            for gradient, leaf in zip(by_rank, leaves, strict=True)
        ]
        count = _mean_of(layout)
        scaled = [part if count == 1 else part * count for part in parts if part is not None]
        name = f"gradient of input {number}, laid out {dual(layout).placements[0]}"
        compare(assemble(scaled, dual(layout), name), expected, name)


def _check_participation(
    reference: Reference, outs: Sequence[Sequence[Tensor]], by_rank: Sequence[Sequence[Tensor | None]]
) -> None:
    """Check that all ranks or none take part in the backward pass: otherwise collectives there would hang."""
    for number, seed in enumerate(reference.seeds):
        if seed is not None and len({out[number].requires_grad for out in outs}) > 1:
            raise Mismatch(f"output {number} depends on the inputs on some ranks, but not on others")
    for number, expected in enumerate(reference.gradients):
        if expected is not None and len({gradient[number] is None for gradient in by_rank}) > 1:
            raise Mismatch(f"a gradient reaches input {number} on some ranks, but not on others")


def _seeds(seed: Tensor, layout: Layout, number: int) -> list[Tensor]:
    (placement,) = layout.placements
    if isinstance(placement, Partial) and placement.op not in DIFFERENTIABLE:
        raise Mismatch(f"output {number} is {placement}, which has no gradient, but one is required")
    count, parts = _mean_of(layout), split(seed, dual(layout), torch.Generator())
    return parts if count == 1 else [part / count for part in parts]


def _mean_of(layout: Layout) -> int:
    """Return the number of ranks over which a Partial("avg") averages, else 1: each has that share of the gradient."""
    return layout.mesh.size if layout.placements[0].is_partial("avg") else 1
