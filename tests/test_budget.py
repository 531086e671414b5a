"""Every property is tried with the project's budget, whatever was imported before it."""

from __future__ import annotations

import os

import torch.testing._internal.common_utils  # noqa: F401  # it loads a profile of its own: 10 examples, at random
from hypothesis import settings


def test_the_budget_survives_the_profile_that_torch_loads() -> None:
    full = os.environ.get("SHARDWRIGHT_BUDGET") == "full"
    assert settings.default.max_examples == (1000 if full else 25)
    assert settings.default.derandomize is not full
    assert settings.default.deadline is None
