"""An object with a state, for tests of when a load gives it one."""

from __future__ import annotations

from typing import Any


class CountingState:
    """An object that counts how often it is given a state."""

    def __init__(self, **state: Any) -> None:
        self.state, self.given = state, 0

    def state_dict(self) -> dict[str, Any]:
        return dict(self.state)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state, self.given = dict(state), self.given + 1
