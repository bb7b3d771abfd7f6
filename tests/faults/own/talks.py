"""An environment of long conversations, for runs whose rollout workers are killed in the middle of one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hpcrl.envs.base import Messages, Turn

TURNS = 5


class Talks:
    """Pays each turn for letters in order, and says goodbye in the last one."""

    def __init__(self, extras: Mapping[str, Any]) -> None:  # noqa: ARG002
        self._turns = 0

    def init(self, messages: Messages) -> Messages:
        return messages

    def step(self, action: str) -> Turn:
        self._turns += 1
        in_order = float(list(action) == sorted(action))
        return Turn([{"role": "user", "content": "dacb"}], in_order, done=self._turns == TURNS)

    def close(self) -> None:
        pass
