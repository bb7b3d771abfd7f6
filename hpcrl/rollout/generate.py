"""Turns one piece of work into a group of samples: chat template, engine, environment.

A sample grows turn by turn through three verbs: `_prompt` (what the policy sees), `_sample` (what it says), `_pay` (what the
environment answers, or named rewards in its place). This version plays one turn.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from hpcrl.config import EnvironmentConfig, GeneratorConfig, SamplingParams, eval_sampling
from hpcrl.config.derive import reward_weights
from hpcrl.data.chat import prompt_ids
from hpcrl.envs.blame import Blame
from hpcrl.envs.environment import Environment, Messages, Turn
from hpcrl.envs.make import make_environment
from hpcrl.envs.rewards.response import Response, truth_of
from hpcrl.envs.rewards.weighted import WeightedRewards
from hpcrl.errors import ConfigError, DataError
from hpcrl.rollout.client import EngineClient, Generation
from hpcrl.rollout.threads import in_thread
from hpcrl.types import GroupMeta, Kind, Sample, Work

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_HALF_A_CHARACTER = "\ufffd"  # what tokens decode to that end within a character


@dataclass(frozen=True)
class Group:
    """The finished samples of one prompt.

    Attributes:
        texts: the responses as the environment saw them.
        raw_rewards: what the environment paid each sample, whatever became of it.
        seconds: from claim to the last token.
        baseline: reward of the greedy response; None where there is none.
    """

    work: Work
    samples: list[Sample]
    texts: list[str]
    raw_rewards: list[float]
    seconds: float
    baseline: float | None = None

    @property
    def oldest_version(self) -> int:
        return min(int(sample.versions[sample.versions >= 0].min()) for sample in self.samples)

    @property
    def response_lengths(self) -> list[int]:
        """Tokens that the policy chose, trained or not."""
        return [int((sample.versions >= 0).sum()) for sample in self.samples]

    def meta(self, replica: int, path: str) -> GroupMeta:
        return GroupMeta(
            group_id=self.work.group_id,
            kind=self.work.kind,
            replica=replica,
            path=path,
            rewards=[float(sample.rewards.sum()) for sample in self.samples],
            lengths=[len(sample.token_ids) for sample in self.samples],
            response_lengths=self.response_lengths,
            stop_reasons=[sample.stop_reason for sample in self.samples],
            oldest_version=self.oldest_version,
            newest_version=max(int(sample.versions.max()) for sample in self.samples),
            data_source=self.work.prompt.data_source,
            seconds=self.seconds,
            env_metrics=[sample.env_metrics for sample in self.samples],
            raw_rewards=self.raw_rewards,
            baseline=self.baseline,
        )


class GroupGenerator:
    """Generates groups with one engine; many at a time.

    Args:
        tokenizer: of the policy; it owns the chat template.
        baselines: whether each training group also gets a greedy response, which is paid like a sample but of which only the reward
            is kept.
    """

    def __init__(
        self,
        engine: EngineClient,
        tokenizer: PreTrainedTokenizerBase,
        config: GeneratorConfig,
        environment: EnvironmentConfig,
        baselines: bool = False,
    ) -> None:
        self._engine, self._tokenizer, self._config = engine, tokenizer, config
        self._baselines = baselines
        gym = environment.skyrl_gym
        self._extras = {"custom": environment.custom, "max_turns": config.max_turns, "skyrl_gym": gym}
        self._params = {"train": config.sampling_params, "eval": eval_sampling(config)}
        self._rewards = {"train": _rewards(environment, "train"), "eval": _rewards(environment, "eval")}
        self._stepping = asyncio.Semaphore(gym.max_env_workers) if gym.max_env_workers else None

    async def generate(self, work: Work) -> Group:
        """Return the group.

        Raises:
            HpcrlError: an environment or a reward failed; the message names it and the group.
            EngineError: the engine failed.
        """
        started = time.monotonic()
        environments: list[Environment] = []
        n, compared = work.n_samples, self._baselines and work.kind == "train"
        with self._blame(work):
            try:
                openings = self._open(work, n + compared, environments)
            except BaseException:
                _close(environments)
                raise
        try:
            prompts = [self._prompt(messages) for messages in openings]
            sampling = engine_sampling(self._params[work.kind])
            turns = [self._turn(work, environments[:n], prompts[:n], sampling)]
            if compared:
                turns.append(self._turn(work, environments[n:], prompts[n:], {**sampling, "temperature": 0.0}))
            (samples, texts), *greedy = await asyncio.gather(*turns)
        finally:
            with self._blame(work):
                _close(environments)
        raw_rewards = [float(sample.rewards.sum()) for sample in samples]
        samples = [judged(sample, self._config) for sample in samples]
        baseline = float(judged(greedy[0][0][0], self._config).rewards.sum()) if greedy else None
        return Group(work, samples, texts, raw_rewards, time.monotonic() - started, baseline)

    def _open(self, work: Work, count: int, environments: list[Environment]) -> list[Messages]:
        """Return what starts each of `count` responses; their environments, if there are any, are added to the list."""
        if self._rewards[work.kind] is not None:
            return [list(work.prompt.messages)] * count
        extras = {**self._extras, **work.prompt.extras}
        for _ in range(count):
            environments.append(make_environment(work.prompt.env_class, extras))
        return [environment.init(list(work.prompt.messages)) for environment in environments]

    async def _turn(
        self, work: Work, environments: Sequence[Environment], prompts: list[list[int]], sampling: dict[str, Any]
    ) -> tuple[list[Sample], list[str]]:
        version = self._engine.version
        generations = await self._sample(prompts, work.seed, sampling)
        version = min(version, self._engine.version)  # all tokens count as the older one if it changed meanwhile
        texts = [self._text(said.token_ids, self._params[work.kind]) for said in generations]
        scorers = self._scorers(work, environments, generations, texts)
        turns = await asyncio.gather(*(self._pay(work, scorer) for scorer in scorers))
        parts = zip(prompts, generations, turns, strict=True)
        return [_as_sample(prompt, said, turn, version) for prompt, said, turn in parts], texts

    def _scorers(
        self, work: Work, environments: Sequence[Environment], generations: Sequence[Generation], texts: Sequence[str]
    ) -> list[Callable[[], Turn]]:
        """Return what scores each sample."""
        rewards, prompt = self._rewards[work.kind], work.prompt
        if rewards is None:
            return [partial(environment.step, text) for environment, text in zip(environments, texts, strict=True)]
        response = Response(
            text="",
            ground_truth=truth_of(prompt.extras),
            max_tokens=self._params[work.kind].max_generate_length,
            messages=prompt.messages,
            extras=prompt.extras,
        )
        said = zip(texts, generations, strict=True)
        return [partial(rewards, replace(response, text=text, n_tokens=len(g.token_ids))) for text, g in said]

    def _prompt(self, messages: Messages) -> list[int]:
        return prompt_ids(self._tokenizer, messages, self._config.chat_template_kwargs)

    async def _sample(self, prompts: list[list[int]], seed: int, sampling: dict[str, Any]) -> list[Generation]:
        if all(prompt == prompts[0] for prompt in prompts):
            return await self._engine.generate(prompts[0], len(prompts), seed, sampling)
        alone = (self._engine.generate(prompt, 1, seed + i, sampling) for i, prompt in enumerate(prompts))
        return [generation for (generation,) in await asyncio.gather(*alone)]

    def _text(self, token_ids: list[int], params: SamplingParams) -> str:
        """Return a response as the environment sees it: without special tokens, and up to the stop text that ended it."""
        text = str(self._tokenizer.decode(token_ids, skip_special_tokens=True))
        if not params.stop:
            return text
        before = str(self._tokenizer.decode(token_ids[:-1], skip_special_tokens=True)).rstrip(_HALF_A_CHARACTER)
        return cut_at_stop(text, len(before), params.stop, keep=params.include_stop_str_in_output)

    async def _pay(self, work: Work, scorer: Callable[[], Turn]) -> Turn:
        with self._blame(work):
            if self._stepping is None:
                turn = _checked(scorer())
            else:
                async with self._stepping:
                    turn = _checked(await in_thread(scorer))
        if not turn.done:
            raise ConfigError(
                f"environment {work.prompt.env_class!r} wants another turn (group {work.group_id}); this version of hpcrl "
                "plays one turn: return Turn(..., done=True)"
            )
        return turn

    def _blame(self, work: Work) -> Blame:
        group = f"group {work.group_id} (row {work.prompt.uid})"
        paid_by_environment = self._rewards[work.kind] is None
        return Blame(f"environment {work.prompt.env_class!r}, {group}" if paid_by_environment else group)


def _rewards(environment: EnvironmentConfig, kind: Kind) -> WeightedRewards | None:
    weights = reward_weights(environment, kind)
    own = kind == "eval" and environment.eval_reward_function
    setting = "environment.eval_reward_function" if own else "environment.reward_function"
    return WeightedRewards(setting, weights, environment) if weights else None


def _checked(turn: Turn) -> Turn:
    """Return the turn with plain Python numbers, which is what files and messages can hold."""
    numbers = {"reward": turn.reward, **turn.metrics}
    for name, value in numbers.items():
        if not math.isfinite(float(value)):
            raise DataError(f"{name} is {value}; expected a finite number")
    return replace(turn, reward=float(turn.reward), metrics={name: float(turn.metrics[name]) for name in turn.metrics})


def judged(sample: Sample, config: GeneratorConfig) -> Sample:
    """Return the sample with what the configuration makes of one that did not end by itself."""
    if sample.stop_reason == "stop":
        return sample
    if config.zero_reward_on_non_stop:
        sample = replace(sample, rewards=torch.zeros_like(sample.rewards))
    if config.apply_overlong_filtering:
        sample = replace(sample, loss_mask=torch.zeros_like(sample.loss_mask))
    return sample


def cut_at_stop(text: str, before: int, stop: Sequence[str], *, keep: bool) -> str:
    """Return `text` up to the first stop text that its last token completed, the whole text if there is none.

    Args:
        before: characters of the text without its last token.
        keep: whether the stop text stays at the end.
    """
    starts = {one: text.find(one, max(0, before - len(one) + 1)) for one in stop}
    found = [one for one in stop if starts[one] >= 0]
    if not found:
        return text
    first = min(found, key=lambda one: starts[one] + len(one))
    return text[: starts[first] + len(first) * keep]


def engine_sampling(params: SamplingParams) -> dict[str, Any]:
    """Return the configured sampling under vLLM's names."""
    return {
        **params.additional_kwargs,
        "max_tokens": params.max_generate_length,
        "temperature": params.temperature,
        "top_p": params.top_p,
        "top_k": params.top_k,
        "min_p": params.min_p,
        "repetition_penalty": params.repetition_penalty,
        "stop": params.stop or [],
    }


def _as_sample(prompt: list[int], said: Generation, turn: Turn, version: int) -> Sample:
    n_prompt, n_said = len(prompt), len(said.token_ids)
    assert n_said > 0, "an engine returns at least the end-of-sequence token"
    rewards = torch.zeros(n_prompt + n_said)
    rewards[-1] = turn.reward
    return Sample(
        token_ids=torch.tensor(prompt + said.token_ids),
        loss_mask=torch.tensor([0.0] * n_prompt + [1.0] * n_said),
        rollout_logprobs=torch.tensor([0.0] * n_prompt + said.logprobs),
        versions=torch.tensor([-1] * n_prompt + [version] * n_said, dtype=torch.int32),
        rewards=rewards,
        stop_reason=said.stop_reason,
        env_metrics=turn.metrics,
    )


def _close(environments: Sequence[Environment]) -> None:
    for environment in environments:
        environment.close()
