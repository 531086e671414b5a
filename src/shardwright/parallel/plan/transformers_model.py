"""Models of `transformers`, recognized without importing it, and their configurations."""

from __future__ import annotations

import copy
import sys
from typing import Any

from torch import nn

__all__ = ["is_transformers_model", "own_configuration"]


def is_transformers_model(model: nn.Module) -> bool:
    """Return whether a model is one of `transformers`.

    >>> is_transformers_model(nn.Linear(1, 1))
    False
    """
    library = sys.modules.get("transformers.modeling_utils")
    return library is not None and isinstance(model, library.PreTrainedModel)


def own_configuration(model: Any) -> None:
    """Give a model of `transformers` a copy of its configuration, because others may be made from the same object."""
    copies: dict[int, Any] = {}
    copy.deepcopy(model.config, copies)
    for module in model.modules():
        for name, value in list(module.__dict__.items()):
            if type(value).__module__.startswith("transformers.") and hasattr(value, "_attn_implementation"):
                module.__dict__[name] = copies.get(id(value), value)
