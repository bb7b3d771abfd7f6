"""Rescoring of an evaluation's samples with other rewards, or a changed environment, without generating them again."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hpcrl.config import DataConfig, EnvironmentConfig, GeneratorConfig
from hpcrl.data.datasets import load_dataset
from hpcrl.data.prompts import set_aside
from hpcrl.data.sources import training_sources, validation_sources
from hpcrl.envs.registry import common_extras
from hpcrl.envs.tools.sandboxes import Sandboxes
from hpcrl.errors import DataError, SandboxError, ServiceError, UserCodeError
from hpcrl.observe.evaluations import response_tokens
from hpcrl.rollout.env_session import EnvSession, scorer_of
from hpcrl.rollout.threads import CallThreads
from hpcrl.types import LONGEST_FAILURE, Prompt, Work, plain_text

Line = dict[str, Any]
_AT_ONCE = 64


@dataclass
class Rescored:
    """Samples with their new scores.

    Attributes:
        lines: as they are dumped.
        failures: what went wrong in environments.
    """

    lines: list[Line] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)


def evaluation_prompts(
    data: DataConfig, environment: EnvironmentConfig, max_turns: int, *, offline: bool
) -> list[Prompt]:
    """Return the prompts that a configuration evaluates, those that are too long included.

    Args:
        offline: rows of datasets are trained.
    """
    sections = data, environment, max_turns
    if offline:
        return load_dataset(validation_sources(data, data.val_prompts), ("eval",), *sections)
    if data.test_size is not None:
        return set_aside(load_dataset(training_sources(data), ("train", "eval"), *sections), data.test_size)[1]
    return load_dataset(validation_sources(data, data.val_data), ("eval",), *sections)


def prompts_of(groups: Mapping[str, Line], prompts: Sequence[Prompt]) -> dict[str, Prompt]:
    """Return the prompt of each group of an evaluation. Those that were too long have no group; the others are in the dataset's order.

    Args:
        groups: a dumped sample of each, in their order.

    Raises:
        DataError: the dataset has other rows, or others in between.
    """
    found, rest = dict[str, Prompt](), iter(prompts)
    for group_id, line in groups.items():
        wanted = line["prompt"], line["data_source"]
        prompt = next((prompt for prompt in rest if (prompt.messages, prompt.data_source) == wanted), None)
        if prompt is None:
            raise DataError(
                f"group {group_id} of the evaluation has a prompt that the data have no more, or at another place: {wanted[0]!s:.200}; "
                "the data are to be those of the evaluation"
            )
        found[group_id] = prompt
    return found


async def rescore(
    samples: Mapping[tuple[str, int], Line],
    prompts: Mapping[str, Prompt],
    environment: EnvironmentConfig,
    generator: GeneratorConfig,
    sandboxes: Sandboxes | None = None,
    at_once: int | None = None,
) -> Rescored:
    """Return the samples of an evaluation with the scores that they have now. One that failed stays as it is.

    Args:
        samples: by group and place in it.
        prompts: of the groups.
        sandboxes: that environments may start; None: there are none.
        at_once: samples that are played at a time at most, such as sandboxes that there are; None: as many as ever.
    """
    rewards, extras = scorer_of(environment, "eval"), common_extras(environment, generator.max_turns, sandboxes)
    max_tokens, gym = generator.eval_sampling.max_generate_length, environment.skyrl_gym
    threads = CallThreads(gym.max_env_workers, environment.timeout_seconds) if gym.max_env_workers else None
    found, room = Rescored(), asyncio.Semaphore(min(_AT_ONCE, at_once or _AT_ONCE))

    async def one(group_id: str, line: Line) -> Line:
        if line["stop_reason"] == "failed":
            return line
        prompt = prompts[group_id]
        session = EnvSession(
            Work(group_id, "eval", prompt, 1, 0), rewards, {**extras, **prompt.extras}, max_tokens, threads
        )
        async with room:
            try:
                score, metrics = await _played(session, line)
            except (UserCodeError, ServiceError, SandboxError) as error:
                found.failures.append(plain_text(str(error), LONGEST_FAILURE))
                return {**line, "score": 0.0, "stop_reason": "failed"}
        counts = line["stop_reason"] == "stop" or not generator.zero_reward_on_non_stop
        return {**line, "score": score if counts else 0.0, "env_metrics": metrics}

    found.lines = await asyncio.gather(*(one(group_id, line) for (group_id, _), line in samples.items()))
    return found


async def _played(session: EnvSession, line: Line) -> tuple[float, dict[str, float]]:
    score, metrics, tokens = 0.0, dict[str, float](), response_tokens(line)
    try:
        await session.open().result()
        for text in _said(line):
            turn = await session.step(text, tokens).result()
            score += turn.reward
            metrics |= turn.metrics
            if turn.done:
                break
    finally:
        if (closing := session.close()) is not None:
            await closing.result()
    return score, metrics


def _said(line: Line) -> Iterator[str]:
    if (response := line.get("response")) is None:
        raise DataError("the samples of the evaluation have no responses; evaluate again with `hpcrl eval`")
    if isinstance(response, str):
        yield response
        return
    yield from (message["content"] for message in response if message["role"] == "assistant")
