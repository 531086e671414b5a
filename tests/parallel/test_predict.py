"""A prediction counts exactly what the ranks communicate and hold."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import shardwright as sw
from shardwright import comm
from shardwright.errors import ArgumentTypeError, MeshError, PlanError
from shardwright.testing import run_ranks


class Block(nn.Module):
    def __init__(self, width: int = 6, hidden: int = 10) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x: Any) -> Any:
        return x + self.down(self.up(self.norm(x)).relu())


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 6)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Any) -> Any:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        logits = self.head(x)
        return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


PLAN = {
    "blocks.*.up": sw.ColwiseParallel(),
    "blocks.*.down": sw.RowwiseParallel(),
    "**": sw.Replicated(),
}
MESHES = {
    "dp": ((4,), ("dp",)),
    "replicate x dp": ((2, 2), ("replicate", "dp")),
    "dp x tp": ((2, 2), ("dp", "tp")),
}


def plan_for(names: tuple[str, ...]) -> Any:
    return PLAN if "tp" in names else {}


def tokens() -> torch.Tensor:
    return torch.arange(7 * 5).reshape(7, 5) % 11  # 7 samples: uneven over 4 ranks


def counted(shape: tuple[int, ...], names: tuple[str, ...], options: dict[str, Any]) -> Any:
    """Return the collectives of the second step, the local bytes, and what this rank predicts for itself."""
    mesh = sw.init_device_mesh("cpu", shape, mesh_dim_names=names)
    model = sw.parallelize(Model(), mesh, plan_for(names), **options)
    batch = sw.shard_batch(tokens(), mesh)
    forward: list[comm.Transfer] = []
    backward: list[comm.Transfer] = []
    for _ in range(2):
        forward, backward = [], []
        with comm.listen(forward.append):
            loss = model(batch)
        with comm.listen(backward.append):
            loss.backward()
        model.zero_grad()
    held = sum(parameter.to_local().nbytes for parameter in model.parameters())
    prediction = sw.predict(
        Model(),
        dict(zip(names, shape, strict=True)),
        plan_for(names),
        tokens(),
        rank=comm.rank(),
        device="cpu",
        **options,
    )
    seen = (tuple(forward), tuple(backward), held)
    return seen, (prediction.forward, prediction.backward, prediction.parameter_bytes)


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("options", [{}, {"checkpoint": True}], ids=["plain", "checkpointed"])
def test_prediction_equals_what_every_rank_counts(mesh: str, options: dict[str, Any]) -> None:
    for seen, predicted in run_ranks(4, counted, *MESHES[mesh], options, timeout=120):
        assert predicted == seen
        assert seen[0]
        assert seen[1]


def test_prediction_of_a_large_mesh_needs_no_ranks() -> None:
    with torch.device("meta"):
        model = Model()
    prediction = sw.predict(model, {"dp": 64, "tp": 2}, PLAN, torch.zeros(256, 5, dtype=torch.long))
    assert prediction.mesh.size == 128
    assert prediction.traffic.calls["reduce_scatter"] >= 1
    assert "dp=64, tp=2" in str(prediction)
    assert comm.world().size == 1
    assert all(parameter.is_meta for parameter in model.parameters())


def test_prediction_leaves_the_model_as_it_was() -> None:
    model = Model()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    prediction = sw.predict(model, {"dp": 2}, {}, tokens())
    assert prediction.parameters[0].layout is not None
    assert type(model.embedding.weight) is nn.Parameter
    assert model.head.weight is model.embedding.weight
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)


def test_without_a_batch_layouts_are_predicted_and_no_step() -> None:
    prediction = sw.predict(Model(), {"dp": 4}, {})
    assert not prediction.forward
    assert not prediction.backward
    assert {parameter.name for parameter in prediction.parameters} == {name for name, _ in Model().named_parameters()}


def test_loss_may_be_a_function_of_the_output() -> None:
    model, batch = nn.Linear(4, 8), torch.ones(6, 4)
    with_loss = sw.predict(model, {"dp": 2}, {}, batch, loss=lambda output: output.square().mean())
    assert with_loss.traffic == sw.predict(model, {"dp": 2}, {}, batch).traffic
    assert sw.predict(model, {"dp": 2}, {}, [batch]).traffic == with_loss.traffic
    assert sw.predict(model, {"dp": 2}, {}, {"input": batch}).traffic == with_loss.traffic


def test_bad_arguments_are_refused() -> None:
    with pytest.raises(MeshError, match="maps names to sizes"):
        sw.predict(nn.Linear(2, 2), {"dp": 0})
    with pytest.raises(PlanError, match="matches"):
        sw.predict(nn.Linear(2, 2), {"dp": 2}, {"layers.*": sw.Replicated()})
    with pytest.raises(ArgumentTypeError, match="expected a module"):
        sw.predict("model", {"dp": 2})  # type: ignore[arg-type]  # on purpose
    mesh = sw.init_device_mesh("cpu", (1,), mesh_dim_names=("dp",))
    with pytest.raises(ArgumentTypeError, match="distributed already"):
        sw.predict(sw.parallelize(nn.Linear(2, 2), mesh, {}), {"dp": 2})
    assert comm.world().size == 1
