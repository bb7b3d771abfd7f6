"""SkyRL's rollouts: its scripts play the engine and the environment."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from hpcrl.config import GeneratorConfig
from hpcrl.controller.metrics import batch_metrics
from hpcrl.envs.base import Messages, Turn
from hpcrl.rollout.engines.base import Generation, engine_sampling
from hpcrl.rollout.generate import GroupGenerator
from hpcrl.rollout.group import Group, apply_stop_reason
from hpcrl.rollout.transcript import Transcript
from hpcrl.types import Batch, Prompt, Row, Work
from tests.golden.adapters.advantages import ABOVE_0
from tests.golden.adapters.converted import skyrl
from tests.golden.case import Case
from tests.golden.letters import Letters


class Engine:
    """Says what the script has next."""

    version = 0

    def __init__(self, script: Sequence[Mapping[str, Any]]) -> None:
        self._script, self.prompts = iter(script), list[list[int]]()

    async def generate(self, prompt_ids: list[int], n_samples: int, *_: object) -> list[Generation]:
        self.prompts.append(list(prompt_ids))
        turns = [next(self._script) for _ in range(n_samples)]
        return [
            Generation(turn["ids"], turn.get("lp") or [0.0] * len(turn["ids"]), turn["stop"], [0] * len(turn["ids"]))
            for turn in turns
        ]


class Scripted:
    """Says and pays what the script has."""

    def __init__(self, extras: Mapping[str, Any]) -> None:
        self._turns = iter(extras["turns"])

    def init(self, messages: Messages) -> Messages:
        return messages

    def step(self, action: str) -> Turn:  # noqa: ARG002
        turn = next(self._turns)
        return Turn(turn["obs"], turn["reward"], turn["done"], action=turn.get("postprocessed_action"))

    def close(self) -> None:
        pass


def _play(case: Case, scripts: Sequence[Any]) -> tuple[list[Group], Engine]:
    settings = {name: value for name, value in case.params.items() if "." in name}
    config = skyrl({"trainer.placement.colocate_all": False, **settings})
    engine, env_class = Engine(case.inputs["engine_script"]), f"{Scripted.__module__}:{Scripted.__name__}"
    generator = GroupGenerator(engine, Letters(), config.generator, config.environment)

    async def play() -> list[Group]:
        rows = zip(case.inputs["prompts"], scripts, strict=True)
        prompts = [Prompt(str(at), messages, env_class, {"turns": turns}) for at, (messages, turns) in enumerate(rows)]
        return [await generator.generate(Work(prompt.uid, "train", prompt, 1, 0)) for prompt in prompts]

    return asyncio.run(play()), engine


def agent_loop(case: Case) -> dict[str, Any]:
    (group,), engine = _play(case, [case.inputs["env_script"]])
    rows = [_row(row, len(prompt)) for row, prompt in zip(group.samples, engine.prompts, strict=False)]
    step_wise = case.params.get("generator.step_wise_trajectories")
    return {"engine_prompts": engine.prompts, **({"steps": rows} if step_wise else rows[0])}


def _row(row: Row, start: int) -> dict[str, Any]:
    columns = {
        "response_ids": row.token_ids,
        "reward": row.rewards,
        "loss_mask": row.loss_mask,
        "rollout_logprobs": row.rollout_logprobs,
    }
    return {
        "prompt_ids": row.token_ids[:start].tolist(),
        "stop_reason": row.stop_reason,
        **{name: column[start:].tolist() for name, column in columns.items()},
    }


def generate(case: Case) -> dict[str, Any]:
    groups, engine = _play(case, case.inputs["env_script"])
    samples = [sample for group in groups for sample in group.samples]
    places = [
        (f"{group.work.prompt.uid}_{at}", turn + 1 == len(rows))
        for group in groups
        for at, rows in enumerate(group.rows)
        for turn in range(len(rows))
    ]
    starts = [len(prompt) for prompt in engine.prompts]

    def responses(name: str) -> list[Any]:
        return [getattr(sample, name)[start:].tolist() for sample, start in zip(samples, starts, strict=True)]

    metrics = batch_metrics(Batch(1, [group.meta(0, "") for group in groups], 0), ABOVE_0)
    step_wise = case.params.get("generator.step_wise_trajectories")
    return {
        "prompt_token_ids": engine.prompts,
        "response_ids": responses("token_ids"),
        "rewards": responses("rewards"),
        "loss_masks": responses("loss_mask"),
        "rollout_logprobs": responses("rollout_logprobs"),
        "stop_reasons": [sample.stop_reason for sample in samples],
        "rollout_metrics": {name: metrics[name] for name in case.outputs.get("rollout_metrics", ()) if name in metrics},
        "engine_prompts": engine.prompts,
        "trajectory_ids": [name for name, _ in places] if step_wise else None,
        "is_last_step": [last for _, last in places] if step_wise else None,
    }


def turn_masks(case: Case) -> dict[str, Any]:
    transcript, said, given = Transcript([]), case.inputs["output_ids"], case.inputs["output_logprobs"]
    count = len(said) - case.inputs["added_eos"]
    transcript.add_response(Generation(said, given or [0.0] * len(said), "stop", [0] * len(said)), count)
    transcript.add_context([*said[count:], *case.inputs["obs_ids"]])
    sample = transcript.sample("stop", {})
    return {"loss_mask": sample.loss_mask.tolist(), "rollout_logprobs": sample.rollout_logprobs.tolist()}


def per_token_rewards(case: Case) -> dict[str, Any]:
    transcript = Transcript([])
    for reward, at in case.inputs["per_step_rewards"]:
        transcript.add_context([0] * (at + 1 - len(transcript.token_ids)))
        transcript.add_reward(reward)
    transcript.add_context([0] * (case.inputs["response_len"] - len(transcript.token_ids)))
    return {"reward": transcript.sample("stop", {}).rewards.tolist()}


def zero_reward_on_non_stop(case: Case) -> dict[str, Any]:
    """A reward of the whole response is that of its only token."""
    config, given = GeneratorConfig(zero_reward_on_non_stop=True), case.inputs["rewards"]
    found = [
        apply_stop_reason(
            _sample(reward if isinstance(reward, list) else [reward], "rewards", reason), config
        ).rewards.tolist()
        for reward, reason in zip(given, case.inputs["stop_reasons"], strict=True)
    ]
    return {"rewards": [now if isinstance(was, list) else now[0] for now, was in zip(found, given, strict=True)]}


def overlong_filter(case: Case) -> dict[str, Any]:
    config = GeneratorConfig(apply_overlong_filtering=True)
    rows = zip(case.inputs["loss_masks"], case.inputs["stop_reasons"], strict=True)
    return {
        "loss_masks": [
            apply_stop_reason(_sample(mask, "loss_mask", reason), config).loss_mask.tolist() for mask, reason in rows
        ]
    }


def sampling_params(case: Case) -> dict[str, Any]:
    settings = case.inputs["sampling_params"].items()
    given = {f"generator.sampling_params.{name}": value for name, value in settings if value is not None}
    found = engine_sampling(skyrl(given, checked=False).generator.sampling_params, "train", sys.maxunicode + 1)
    return {**{name: found[name] for name in case.outputs if name in found}, "stop": found["stop"] or None}


def _sample(values: Sequence[float], name: str, stop_reason: Any) -> Row:
    values_T = np.array(values, np.float32)
    fields = dict.fromkeys(("loss_mask", "rollout_logprobs", "rewards"), np.zeros_like(values_T)) | {name: values_T}
    ids = np.zeros(len(values_T), np.int64)
    return Row(ids, versions=values_T.astype(np.int32), stop_reason=stop_reason, **fields)


ADAPTERS = {
    "rollout.agent_loop": agent_loop,
    "rollout.generate": generate,
    "rollout.per_token_rewards": per_token_rewards,
    "rollout.turn_masks": turn_masks,
    "rollout.zero_reward_on_non_stop": zero_reward_on_non_stop,
    "rollout.overlong_filter": overlong_filter,
    "engine.sampling_params": sampling_params,
}
