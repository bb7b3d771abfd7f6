"""An environment of one's own that plays guess_number by asking the policy at its endpoint, in the rollout worker."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import httpx

from hpcrl.envs.base import AgentEnvironment, Endpoint, Messages, Turn
from hpcrl.envs.tasks.guess_number import GuessNumber

_HTTP = httpx.Client(timeout=60)


class Guessing(AgentEnvironment):
    """The game of guess_number, over HTTP."""

    def __init__(self, extras: Mapping[str, Any]) -> None:
        self._game, self._turns = GuessNumber(extras), extras["max_turns"]

    def play(self, messages: Messages, endpoint: Endpoint) -> Turn:
        url, headers = f"{endpoint.base_url}/chat/completions", {"authorization": f"Bearer {endpoint.key}"}
        turn = Turn([], 0.0, True)
        for _ in range(self._turns):
            body = {"model": endpoint.model, "messages": messages}
            answer = _HTTP.post(url, json=body, headers=headers).raise_for_status()
            said = answer.json()["choices"][0]["message"]
            turn = self._game.step(said["content"])
            if turn.done:
                break
            messages = [*messages, said, *turn.observations]
        return Turn([], turn.reward, True, turn.metrics)
