"""An environment as somebody has written it for SkyRL-Gym, whose package is not installed here.

`TextEnv` has the public methods and attributes of skyrl_gym's BaseTextEnv, and what `step` returns has the keys of its
BaseTextEnvStepOutput.
"""

from __future__ import annotations

import re
from typing import Any

CLOSED: list[str] = []


class TextEnv:
    def __init__(self) -> None:
        self.turns = 0
        self.max_turns = 1

    def init(self, prompt: list[dict[str, str]]) -> tuple[list[dict[str, str]], dict[str, Any]]:
        return prompt, {}

    def step(self, action: str) -> dict[str, Any]:
        raise NotImplementedError

    def get_metrics(self) -> dict[str, Any]:
        return {}

    def close(self) -> None:
        pass


class Calc(TextEnv):
    """Adds two numbers with a tool, `<calc>2+3</calc>`, then answers `<answer>5</answer>`."""

    def __init__(self, env_config: Any, extras: dict[str, Any]) -> None:
        super().__init__()
        self.truth = extras["reward_spec"]["ground_truth"]
        assert extras["reward_model"] == extras["reward_spec"]
        self.max_turns = extras["max_turns"]
        self.hint = env_config.get("hint", "") or getattr(env_config, "other_hint", "")
        self.name = extras.get("name", "")

    def init(self, prompt: list[dict[str, str]]) -> tuple[list[dict[str, str]], dict[str, Any]]:
        prompt[-1]["content"] += self.hint  # SkyRL's generator copies the prompt before
        return prompt, {"hint": self.hint}

    def step(self, action: str) -> dict[str, Any]:
        self.turns += 1
        found = re.fullmatch(r"(?s)(.*<calc>(\d+)\+(\d+)</calc>).*", action)
        if found is None:
            right = f"<answer>{self.truth}</answer>" in action
            return {"observations": None, "reward": float(right), "done": True, "metadata": {"right": right}}
        total = int(found[2]) + int(found[3])
        return {
            "observations": [{"role": "user", "content": f"<result>{total}</result>"}],
            "reward": 0.25,
            "done": self.turns >= self.max_turns,
            "metadata": {},
            "postprocessed_action": found[1],
        }

    def get_metrics(self) -> dict[str, Any]:
        return {"turns": self.turns, "tool": "calc", "used": self.turns > 1}

    def close(self) -> None:
        CLOSED.append(self.name)


class Letters(Calc):
    """Pays letters in two turns, for a policy that knows no numbers."""

    def step(self, action: str) -> dict[str, Any]:
        self.turns += 1
        done = self.turns == self.max_turns
        seen = [] if done else [{"role": "user", "content": "abc"}]
        return {"observations": seen, "reward": float(len(action)), "done": done, "metadata": {}}


class Unfinished(Calc):
    def init(self, prompt: list[dict[str, str]]) -> Any:
        return prompt

    def step(self, action: str) -> Any:
        return [], float(len(action)), True
