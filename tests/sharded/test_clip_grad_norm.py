"""clip_grad_norm_ computes the global norm, as torch does for unsharded tensors."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from shardwright import comm, sharded
from shardwright.errors import (
    ArgumentTypeError,
    DisagreementError,
    RankFailedError,
    ShardError,
)
from shardwright.sharded import (
    ShardedTensor,
)
from shardwright.testing import run_ranks
from tests.sharded.specs_and_errors import chunks, error_text


@pytest.mark.parametrize("order", [2.0, 1, 3.5, 0.0, float("inf"), float("-inf")])
def test_clipping_equals_torch_on_unsharded_tensors(order: float) -> None:
    def on_rank() -> None:
        torch.manual_seed(1)
        full = [torch.rand(7, 3), torch.rand(5), torch.rand(4, dtype=torch.complex64), torch.rand(6)]
        gradients = [torch.randn_like(tensor) for tensor in full]
        gradients[1][2:] = 0
        specs = (chunks(0, 2, 0), chunks(1, 1, 1, 1, 1, 1), chunks(2))
        parameters: list[Tensor] = [
            spec.shard(tensor).requires_grad_() for spec, tensor in zip(specs, full, strict=False)
        ]
        parameters.append(full[3].clone().requires_grad_())
        for parameter, gradient in zip(parameters, gradients, strict=True):
            for shard in parameter.local_shards() if isinstance(parameter, ShardedTensor) else ():
                shard.tensor.grad = gradient[shard.metadata.region.slices()].clone()
        parameters[3].grad = gradients[3].clone()
        flat = torch.cat([gradient.abs().flatten() for gradient in gradients])
        norm = sharded.clip_grad_norm_(parameters, 0.7, order)
        assert type(norm) is Tensor
        torch.testing.assert_close(norm, torch.linalg.vector_norm(flat, order))
        factor = min(1.0, 0.7 / (norm.item() + 1e-6))
        for parameter, gradient in zip(parameters, gradients, strict=True):
            for shard in parameter.local_shards() if isinstance(parameter, ShardedTensor) else ():
                torch.testing.assert_close(shard.tensor.grad, gradient[shard.metadata.region.slices()] * factor)
        torch.testing.assert_close(parameters[3].grad, gradients[3] * factor)

    run_ranks(3, on_rank)


def test_the_norm_without_gradients_is_zero() -> None:
    def on_rank() -> None:
        untouched = sharded.rand(chunks(0), 3, requires_grad=True)
        assert sharded.clip_grad_norm_(untouched, 1.0) == 0

    run_ranks(3, on_rank)


def test_clipping_supports_sparse_gradients() -> None:
    def on_rank() -> None:
        table = sharded.rand(chunks(0, 1), 6, 2, requires_grad=True)  # rank 2 has no shard
        functional.embedding(torch.tensor([1, 4]), table, sparse=True).sum().backward()
        assert sharded.clip_grad_norm_([table], 1e9) == torch.tensor([3.0] * 4).norm()

    run_ranks(3, on_rank)


def test_clipping_raises_on_all_ranks() -> None:
    def on_rank() -> list[str]:
        table = sharded.rand(chunks(0, 1), 6, 2, requires_grad=True)  # rank 2 has no shard
        functional.embedding(torch.tensor([1, 4]), table, sparse=True).sum().backward()
        here = comm.rank()
        if table.grad is not None:
            table.grad.mul_(float("nan"))
        return [
            error_text(ShardError, lambda: sharded.clip_grad_norm_([table], 1.0, error_if_nonfinite=True)),
            error_text(DisagreementError, lambda: sharded.clip_grad_norm_([table], 1.0 + here)),
            error_text(RankFailedError, lambda: sharded.clip_grad_norm_([table], "1" if here else 1.0)),
            error_text(ArgumentTypeError, lambda: sharded.clip_grad_norm_([table], 1.0, None)),
        ]

    first, second, third = run_ranks(3, on_rank)
    assert first == second == third
