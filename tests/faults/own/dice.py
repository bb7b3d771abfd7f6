"""An environment with a state, whose answers are random, for runs whose processes are killed in the middle of an episode."""

from __future__ import annotations

import os
import random
from collections.abc import Mapping
from typing import Any

from hpcrl.envs.base import Environment, Turn

TURNS = 5


class Dice(Environment):
    """Answers with letters that no other answer has, and notes them in the file `custom.answers`."""

    def __init__(self, extras: Mapping[str, Any]) -> None:
        self._answers, self._turns = extras["custom"]["answers"], 0

    def step(self, action: str) -> Turn:
        self._turns += 1
        letters = "".join(random.choices("abcdefghijkl", k=12))
        note = os.open(self._answers, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        os.write(note, f"{letters}\n".encode())
        os.close(note)
        metrics = {"turns": self._turns}
        return Turn([{"role": "user", "content": letters}], float(action.count("a")), self._turns == TURNS, metrics)

    def state(self) -> str | None:
        return str(self._turns)

    def resume(self, state: str) -> None:
        self._turns = int(state)
