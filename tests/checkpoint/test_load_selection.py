"""`only` leaves everything else as it is: unselected optimizers and objects are not called."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from shardwright import checkpoint
from shardwright.checkpoint import optimizer_state
from shardwright.errors import ArgumentTypeError
from tests.checkpoint.stateful import CountingState


def stepped(seed: int = 0) -> tuple[nn.Linear, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Linear(3, 3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.ones(3)).sum().backward()
    optimizer.step()
    return model, optimizer


@pytest.mark.parametrize("is_named", [False, True])
def test_an_optimizer_that_is_not_selected_is_not_changed(is_named: bool, tmp_path: Path) -> None:
    def state(model: nn.Linear, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        return {"model": model, "optim": optimizer_state(model, optimizer) if is_named else optimizer}

    checkpoint.save(state(*stepped()), tmp_path)
    model = nn.Linear(3, 3)
    fresh = torch.optim.AdamW(model.parameters(), lr=0.5)
    checkpoint.load(state(model, fresh), tmp_path, only="model.*")
    assert fresh.state_dict()["state"] == {}
    assert fresh.param_groups[0]["lr"] == 0.5
    first = "weight" if is_named else "0"
    checkpoint.load(state(model, fresh), tmp_path, only=f"optim.state.{first}.*")
    assert [len(fresh.state[one]) for one in model.parameters()] == [3, 0]
    assert fresh.state[model.weight]["step"].item() == 1.0
    assert fresh.param_groups[0]["lr"] == 0.5


def test_objects_without_selected_entries_are_not_called(tmp_path: Path) -> None:
    checkpoint.save({"k": CountingState(v=1), "w": torch.ones(1)}, tmp_path)
    other = CountingState(v=5)
    checkpoint.load({"k": other, "w": torch.zeros(1)}, tmp_path, only="w")
    assert (other.given, other.state) == (0, {"v": 5})
    checkpoint.load({"k": other, "w": torch.zeros(1)}, tmp_path)
    assert (other.given, other.state) == (1, {"v": 1})
    with pytest.raises(ArgumentTypeError, match="only must be a pattern or a list of patterns, got int"):
        checkpoint.load({"w": torch.zeros(1)}, tmp_path, only=5)  # type: ignore[arg-type]  # wrong on purpose
