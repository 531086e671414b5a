"""A transformer with dropout trains to the losses of a single rank on every mesh."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import Any

import pytest
import torch

import shardwright as sw
from shardwright.testing import run_ranks

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
FULL = os.environ.get("SHARDWRIGHT_BUDGET") == "full"
STEPS = 20
# How each mesh dimension treats parameters ("tp" by name, as the tensor-parallel example does); all cut the batch
# but "tp".
MESHES = {
    "2 data": ((2,), ("dp",)),
    "4 data": ((4,), ("dp",)),
    "4 fully sharded": ((4,), ("fs",)),
    "2x2 data x tensor": ((2, 2), ("dp", "tp")),
    "2x2x2 data x fully sharded x tensor": ((2, 2, 2), ("dp", "fs", "tp")),
}


def load(name: str) -> Any:
    """Import an example by its path: the file names begin with digits."""
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def train(
    shape: tuple[int, ...], names: tuple[str, ...], dtype: torch.dtype, dropout: float, layers: int
) -> list[float]:
    """Return the losses of 20 steps of AdamW, with the same program on every rank."""
    import sys

    sys.path.insert(0, str(EXAMPLES))
    transformer, parallel = load("transformer"), load("02_tensor_parallel")
    mesh = sw.init_device_mesh("cpu", shape, mesh_dim_names=names)
    rules = {"dp": lambda _: sw.Replicate(), "fs": lambda _: sw.Shard(0), "tp": parallel.placement}

    def partition(module_name: str, module: torch.nn.Module, mesh: sw.DeviceMesh) -> None:
        for key, parameter in module.named_parameters(recurse=False):
            placements = [rules[name](f"{module_name}.{key}") for name in names]
            module.register_parameter(key, sw.distribute_tensor(parameter, mesh, placements))

    sw.manual_seed(1)
    model = transformer.Transformer(layers=layers, dropout=dropout).to(dtype)
    sw.distribute_module(model, mesh, partition)
    model.reset()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for step in range(STEPS):
        tokens = torch.randint(0, 96, (8, 33), generator=torch.Generator().manual_seed(step))
        cut = [sw.Replicate() if name == "tp" else sw.Shard(0) for name in names]
        loss = model(sw.distribute_tensor(tokens, mesh, cut, src_data_rank=None))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.fixture(scope="module")
def single() -> dict[torch.dtype, list[float]]:
    """Return the losses on one rank."""
    return {dtype: run_ranks(1, train, (1,), ("dp",), dtype, 0.1, 4)[0] for dtype in (torch.float32, torch.float64)}


# Every mesh in both dtypes, or in one of them by turns.
RUNS = [
    (mesh, dtype)
    for number, mesh in enumerate(MESHES)
    for dtype in (torch.float32, torch.float64)
    if FULL or (dtype == torch.float64) == bool(number % 2)
]


@pytest.mark.timeout(400)
@pytest.mark.parametrize(("mesh", "dtype"), RUNS, ids=str)
def test_losses_on_every_mesh_match_a_single_rank(
    mesh: str, dtype: torch.dtype, single: dict[torch.dtype, list[float]]
) -> None:
    shape, names = MESHES[mesh]
    ranks = torch.Size(shape).numel()
    everywhere = run_ranks(ranks, train, shape, names, dtype, 0.1, 4, timeout=300.0)
    assert all(losses == everywhere[0] for losses in everywhere), "the ranks disagree about the loss"
    tolerance = 1e-5 if dtype == torch.float32 else 1e-9
    assert everywhere[0] == pytest.approx(single[dtype], rel=tolerance)


def test_losses_on_one_rank_match_plain_torch() -> None:
    """Without dropout, whose random numbers differ from torch's, one rank gives the losses of plain torch."""

    def both() -> tuple[list[float], list[float]]:
        import sys

        sys.path.insert(0, str(EXAMPLES))
        transformer = load("transformer")
        mesh = sw.init_device_mesh("cpu", (1,), mesh_dim_names=("dp",))
        torch.manual_seed(0)
        plain = transformer.Transformer(layers=2, dropout=0.0).double()
        plain.reset()
        ours = transformer.Transformer(layers=2, dropout=0.0).double()
        ours.load_state_dict(plain.state_dict())
        sw.distribute_module(ours, mesh)
        losses: tuple[list[float], list[float]] = ([], [])
        optimizers = [torch.optim.AdamW(model.parameters(), lr=3e-3) for model in (plain, ours)]
        for step in range(5):
            tokens = torch.randint(0, 96, (8, 33), generator=torch.Generator().manual_seed(step))
            batches = (tokens, sw.distribute_tensor(tokens, mesh, [sw.Shard(0)]))
            for model, batch, optimizer, found in zip((plain, ours), batches, optimizers, losses, strict=True):
                loss = model(batch)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                found.append(loss.item())
        return losses

    plain, ours = run_ranks(1, both)[0]
    assert ours == pytest.approx(plain, rel=1e-12)
