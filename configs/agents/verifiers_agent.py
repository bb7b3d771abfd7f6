"""Plays an environment of `verifiers` (0.4) as it is. It is started for each sample, by the Python that has that package, and needs nothing of hpcrl.

    python verifiers_agent.py '{"taskset": {"id": "my-taskset"}, "agent": {"runtime": {"type": "subprocess"}}}' > rows.jsonl

prints the rows of an environment, one per task; what it is given is what verifiers calls the block [env].

    [environment.skyrl_gym.agent]
    command = ["/envs/verifiers/bin/python", "./agents/verifiers_agent.py"]

The reward is the sum of those of the episode's traces, weighted as the taskset says; metrics are the means over them. docs/agents.md says more.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections import defaultdict
from pathlib import Path
from statistics import fmean

import verifiers.v1 as vf
from verifiers.v1.utils.loaders import resolve_env_config


def environment(settings: dict) -> vf.Env:
    return vf.load_environment(resolve_env_config(settings))


def print_rows(settings: dict) -> None:
    env = environment(settings)
    for task in env.taskset:
        row = {"prompt": [{"role": "user", "content": task.data.prompt_text}], "env_class": "agent"}
        box = {"image": env.image_of(task.data)} if settings.get("id") == "hpcrl-sandbox" else {}
        print(json.dumps({**row, **box, "verifiers": settings, "task": task.data.idx}))


async def play(row: dict) -> dict:
    """Play a row's task, with the endpoint as the model's provider; return the reward and the metrics."""
    env = environment(row["verifiers"])
    (task,) = env.taskset.include(idx=[str(row["task"])])
    endpoint = vf.EvalClientConfig(base_url=os.environ["OPENAI_BASE_URL"], api_key_var="OPENAI_API_KEY")
    async with env.serving():
        episode = await env.run_episode(task, vf.ModelContext(model=os.environ["HPCRL_MODEL"], client=endpoint))
    if not episode.ok:
        errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
        sys.exit("; ".join(f"{error.type}: {error.message}" for error in errors))
    metrics = defaultdict(list)
    for trace in episode.traces:
        for name, value in trace.metrics.items():
            metrics[name].append(value)
    means = {name: fmean(values) for name, values in metrics.items() if None not in values}
    return {"reward": sum(trace.reward for trace in episode.traces), "metrics": means}


if __name__ == "__main__":
    if sys.argv[1:]:
        print_rows(json.loads(sys.argv[1]))
    else:
        score = asyncio.run(play(json.loads(Path(os.environ["HPCRL_ROW"]).read_text())))
        Path(os.environ["HPCRL_REWARD"]).write_text(json.dumps(score))
