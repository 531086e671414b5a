"""State that an object does not have yet is created and filled: optimizers, schedulers, pipeline stages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import shardwright as sw
from shardwright import checkpoint, comm
from shardwright.checkpoint import PerRank, optimizer_state
from shardwright.errors import LoadMismatchError, StateDiffersError
from shardwright.testing import run_ranks
from tests.checkpoint.stateful import CountingState


class Nested(torch.optim.Optimizer):
    """An optimizer whose state has all kinds of containers, and keys with dots."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # it takes none
        for group in self.param_groups:
            for one in group["params"]:
                self.state[one] = {
                    "a.b": one.detach() * 2,
                    "d": {"x": torch.ones(3), "0": 5, 0: 6},
                    "l": [torch.ones(2), {"z": 1}, []],
                    0: torch.zeros(1),
                    "none": None,
                    "e": {},
                    "t": (1, torch.ones(1), ()),
                }


@pytest.mark.parametrize("is_named", [False, True])
def test_nested_optimizer_state_round_trips(is_named: bool, tmp_path: Path) -> None:
    def state(model: nn.Linear, optimizer: Nested) -> Any:
        return optimizer_state(model, optimizer) if is_named else optimizer

    model, other = nn.Linear(3, 2), nn.Linear(3, 2)
    optimizer, fresh = Nested(model.parameters()), Nested(other.parameters())
    optimizer.step()
    checkpoint.save({"o": state(model, optimizer)}, tmp_path)
    checkpoint.load({"o": state(other, fresh)}, tmp_path)
    assert repr(fresh.state_dict()) == repr(optimizer.state_dict())


def test_optimizers_of_scalar_dtensors_and_of_pipeline_stages_resume(tmp_path: Path) -> None:
    def scalars() -> None:
        mesh = sw.init_device_mesh("cpu", (2,))

        def make() -> tuple[nn.Parameter, torch.optim.Optimizer]:
            one = nn.Parameter(sw.distribute_tensor(torch.tensor(2.0), mesh, [sw.Replicate()]))
            return one, torch.optim.AdamW([one], lr=0.1)

        def step(one: nn.Parameter, optimizer: torch.optim.Optimizer) -> float:
            one.grad = sw.distribute_tensor(torch.tensor(1.0), mesh, [sw.Replicate()])
            optimizer.step()
            return float(one.detach().full_tensor())  # type: ignore[attr-defined]  # a DTensor

        one, optimizer = make()
        step(one, optimizer)
        checkpoint.save({"p": one, "o": optimizer}, tmp_path / "scalar")
        other, fresh = make()
        checkpoint.load({"p": other, "o": fresh}, tmp_path / "scalar")
        assert isinstance(fresh.state[other]["exp_avg"], sw.DTensor)
        assert type(fresh.state[other]["step"]) is torch.Tensor
        assert step(other, fresh) == step(one, optimizer)

    def stages() -> None:
        """What one rank has in its object is not given to another's; what no rank has is given to all."""
        rank = comm.rank()
        saved = CountingState(**{f"stage{rank}": torch.full((2,), float(rank)), "new": [1, 2]})
        checkpoint.save({"k": saved}, tmp_path / "stages")
        mine = CountingState(**{f"stage{rank}": torch.zeros(2), "new": []})
        checkpoint.load({"k": mine}, tmp_path / "stages")
        assert set(mine.state) == {f"stage{rank}", "new"}
        assert mine.state[f"stage{rank}"].tolist() == [float(rank)] * 2
        assert mine.state["new"] == [1, 2]

    def own() -> None:
        """Values of ranks that are not there, and keys that are equal and not the same."""
        rank = comm.rank()
        with pytest.raises(StateDiffersError, match="key True on rank 0, and key 1 on rank 1"):
            checkpoint.save({"d": {(1 if rank else True): torch.ones(1)}}, tmp_path / "keys")
        checkpoint.save({"p": PerRank(rank), **({"q": PerRank(torch.ones(2))} if rank else {})}, tmp_path / "own")

    def work() -> None:
        scalars()
        stages()
        own()

    run_ranks(2, work)
    with pytest.raises(
        LoadMismatchError, match="unexpected: 'p' of rank 1 is in the checkpoint, and no rank 1 loads it"
    ):
        checkpoint.load({"p": PerRank(7)}, tmp_path / "own")
    assert checkpoint.load({"p": PerRank(7)}, tmp_path / "own", strict=False)["p"].value == 0
    made = checkpoint.read(tmp_path / "own")
    assert made["p"] == 0
    assert made["q"].value[1].tolist() == [1.0, 1.0]
    with checkpoint.open(tmp_path / "own") as opened:
        assert set(opened.tree()["q"].value) == {1}
        assert opened.tree(rank=1)["q"].shape == (2,)


def test_objects_get_state_entries_that_they_do_not_have_yet(tmp_path: Path) -> None:
    grown = CountingState(h=[1, (2, torch.ones(2))], best=torch.ones(1), more={"x.y": np.ones(2), "z": {}}, v=5)
    checkpoint.save({"k": grown}, tmp_path)
    for fresh in (
        CountingState(),
        CountingState(h=[], best=None, more={}, v=0),
        CountingState(h=[0, (0, torch.zeros(2)), 7], v=None),
    ):
        checkpoint.load({"k": fresh}, tmp_path)
        assert repr(sorted(fresh.state.items())) == repr(sorted(grown.state.items()))
        assert fresh.given == 1
    # In place where it can be; what is stored shorter is shorter; what is not stored is told.
    here = torch.zeros(1)
    fresh = CountingState(best=here)
    checkpoint.load({"k": fresh}, tmp_path)
    assert fresh.state["best"] is here
    assert here.all()
    with pytest.raises(LoadMismatchError, match=r"missing: 'k.other'"):
        checkpoint.load({"k": CountingState(other=1)}, tmp_path)
    checkpoint.load({"k": fresh}, tmp_path, only="k.v")
    assert fresh.state["v"] == 5
    checkpoint.save({"k": CountingState(h=[])}, tmp_path)
    fresh = CountingState(h=[1, 2])
    checkpoint.load({"k": fresh}, tmp_path)
    assert fresh.state == {"h": []}
    fresh = CountingState(h=[1, 2])
    checkpoint.load({"kk": fresh}, tmp_path, rename={"k.h": "kk.h"})
    assert fresh.state == {"h": []}


def test_schedulers_with_new_or_chained_state_resume(tmp_path: Path) -> None:
    from torch.optim import lr_scheduler

    def make() -> tuple[torch.optim.Optimizer, Any]:
        optimizer = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1)
        parts = [lr_scheduler.ConstantLR(optimizer), lr_scheduler.ExponentialLR(optimizer, 0.9)]
        return optimizer, lr_scheduler.SequentialLR(optimizer, parts, [2])

    def run(optimizer: torch.optim.Optimizer, scheduler: Any, steps: int) -> list[float]:
        rates = []
        for _ in range(steps):
            optimizer.step()
            scheduler.step()
            rates.append(optimizer.param_groups[0]["lr"])
        return rates

    one, two = make(), make()
    run(*one, 4)
    checkpoint.save({"o": one[0], "s": one[1]}, tmp_path)
    checkpoint.load({"o": two[0], "s": two[1]}, tmp_path)
    assert run(*two, 5) == run(*one, 5)
