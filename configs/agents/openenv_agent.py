"""Plays an environment that an OpenEnv server has (openenv 0.10). It is started for each sample, by the Python that has openenv and OpenAI's client,
and needs nothing of hpcrl. A row says beside its prompt

    openenv = {"base_url": "http://host:8000", "reset": {"seed": 3}, "shows": "text", "says": "answer"}

`shows` names the field of an observation that the policy is shown (else it is shown all of it, as JSON), `says` the field of an action that its
answer becomes (else the answer is JSON of a whole action). The row's prompt stands before the first observation. The reward is the sum over the steps.
"""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path

from openai import AsyncOpenAI
from openenv import GenericEnvClient


def shown(observation: dict, field: str | None) -> dict[str, str]:
    text = json.dumps(observation, ensure_ascii=False) if field is None else str(observation[field])
    return {"role": "user", "content": text}


def action(text: str, field: str | None) -> dict | None:
    """Return what the policy wants done; None where it says no action."""
    if field is not None:
        return {field: text}
    try:
        found = json.loads(text)
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


async def play(row: dict) -> dict:
    """Play an episode to its end, or to the last turn that the row allows."""
    settings, messages, rewards = row["openenv"], list(row["prompt"]), list[float]()
    client, shows, says = AsyncOpenAI(), settings.get("shows"), settings.get("says")
    async with GenericEnvClient(base_url=settings["base_url"]) as env:
        result = await env.reset(**settings.get("reset", {}))
        while not result.done and len(rewards) < row["max_turns"]:
            messages.append(shown(result.observation, shows))
            answer = await client.chat.completions.create(model=os.environ["HPCRL_MODEL"], messages=messages)
            text = answer.choices[0].message.content
            messages.append({"role": "assistant", "content": text})
            if (wanted := action(text, says)) is None:
                break
            result = await env.step(wanted)
            rewards.append(float(result.reward or 0.0))
    return {"reward": sum(rewards), "metrics": {"steps": len(rewards)}}


if __name__ == "__main__":
    score = asyncio.run(play(json.loads(Path(os.environ["HPCRL_ROW"]).read_text())))
    Path(os.environ["HPCRL_REWARD"]).write_text(json.dumps(score))
