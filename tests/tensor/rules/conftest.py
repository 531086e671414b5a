"""Compare DTensors with plain torch: every placement of the inputs, values and gradients, on several ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from shardwright.testing import run_ranks

Case = tuple[str, Callable[..., Any], Sequence[Tensor]]
AgainstTorch = Callable[..., None]


@pytest.fixture
def against_torch() -> AgainstTorch:
    """`against_torch(mesh_shape, cases)`: each case is a name, a function of tensors, and the tensors."""

    def on_a_rank(mesh_shape: Sequence[int], cases: Sequence[Case], max_combinations: int) -> list[str]:
        # Imports are inside: the function is pickled by value.
        import itertools
        import random

        import torch

        import shardwright as sw

        mesh = sw.init_device_mesh("cpu", tuple(mesh_shape))

        def placements(tensor: torch.Tensor) -> list[Any]:
            shards = [sw.Shard(dim) for dim in range(tensor.ndim)]
            return [sw.Replicate(), *shards, *([sw.Partial()] if tensor.is_floating_point() else [])]

        def distribute(tensor: torch.Tensor, chosen: Sequence[Any]) -> Any:
            unreduced = [sw.Replicate() if placement.is_partial() else placement for placement in chosen]
            local = sw.distribute_tensor(tensor.detach(), mesh, unreduced, src_data_rank=None).to_local()
            for placement, coordinate, ranks in zip(chosen, mesh.get_coordinate(), mesh_shape, strict=True):
                if placement.is_partial():  # partial values of different sizes and signs
                    noise = torch.arange(local.numel(), dtype=local.dtype).sin().reshape(local.shape)
                    local = (
                        local * (2 * (coordinate + 1) / (ranks * (ranks + 1))) + (2 * coordinate - ranks + 1) * noise
                    )
            distributed = sw.DTensor.from_local(local, mesh, chosen, shape=tensor.shape)
            return distributed.detach().requires_grad_(tensor.requires_grad)

        def results(call: Callable[..., Any], tensors: Sequence[Any]) -> tuple[list[Any], list[Any]]:
            given = call(*tensors)
            outs = list(given) if isinstance(given, tuple | list) else [given]
            full = [out.full_tensor() if isinstance(out, sw.DTensor) else out for out in outs]
            loss = sum(
                (out * torch.linspace(-1, 1, out.numel(), dtype=out.dtype).reshape(out.shape)).sum()
                for out in full
                if out.requires_grad
            )
            if isinstance(loss, torch.Tensor):
                loss.backward()
            gradients = [tensor.grad for tensor in tensors if tensor.requires_grad]
            grads = [grad.full_tensor() if isinstance(grad, sw.DTensor) else grad for grad in gradients]
            return [out.detach() for out in full], grads

        wrong = []
        for name, call, inputs in cases:
            expected = results(call, [x.detach().clone().requires_grad_(x.requires_grad) for x in inputs])
            choices = [list(itertools.product(placements(x), repeat=mesh.ndim)) for x in inputs]
            combinations = list(itertools.product(*choices))
            if len(combinations) > max_combinations:
                combinations = random.Random(0).sample(combinations, max_combinations)
            for combination in combinations:
                description = f"{name} {[tuple(map(str, chosen)) for chosen in combination]}"
                try:
                    actual = results(
                        call,
                        [distribute(x, chosen) for x, chosen in zip(inputs, combination, strict=True)],
                    )
                    for kind, ours, theirs in zip(("value", "gradient"), actual, expected, strict=True):
                        for mine, other in zip(ours, theirs, strict=True):
                            torch.testing.assert_close(mine, other, equal_nan=True, msg=lambda m, k=kind: f"{k}: {m}")
                except Exception as error:  # noqa: BLE001  # every combination is tried, then all are reported
                    wrong.append(f"{description}: {type(error).__name__}: {error}")
        return wrong

    def compare(mesh_shape: Sequence[int], cases: Sequence[Case], max_combinations: int = 40) -> None:
        ranks = 1
        for size in mesh_shape:
            ranks *= size
        wrong = run_ranks(ranks, on_a_rank, mesh_shape, cases, max_combinations, timeout=120)[0]
        assert not wrong, f"{len(wrong)} wrong:\n" + "\n".join(wrong[:12])

    return compare
