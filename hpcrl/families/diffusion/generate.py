"""Generates the group of pictures of one prompt: engine, then rewards. A sample is one row: its prompt, then its trained denoising
steps."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import cast

import numpy as np

from hpcrl.config import EnvironmentConfig, GeneratorConfig
from hpcrl.envs.base import Turn
from hpcrl.envs.registry import common_extras
from hpcrl.errors import SandboxError, ServiceError, UserCodeError
from hpcrl.families.diffusion.engine import DiffusionEngine
from hpcrl.families.diffusion.pipelines.samples import IMAGE, LATENTS
from hpcrl.rollout.engines.base import Engine, Generation
from hpcrl.rollout.env_session import EnvSession, scorer_of
from hpcrl.rollout.generate import Generator, Maker
from hpcrl.rollout.generation_cache import GroupCache
from hpcrl.rollout.group import Group, apply_stop_reason, neutralize_failed, sample_reward
from hpcrl.rollout.images.saved import SampleImages
from hpcrl.rollout.threads import CallThreads
from hpcrl.runtime.threads import in_thread
from hpcrl.types import LONGEST_FAILURE, Row, Work, plain_text


class PictureGenerator:
    """Generates groups with one engine.

    Args:
        kept: where pictures are kept; None: nowhere.
    """

    def __init__(
        self,
        engine: DiffusionEngine,
        config: GeneratorConfig,
        environment: EnvironmentConfig,
        kept: SampleImages | None = None,
    ) -> None:
        self._engine, self._config, self._kept = engine, config, kept
        self._extras = common_extras(environment, config.max_turns)
        self._rewards = {kind: scorer_of(environment, kind) for kind in ("train", "eval")}
        limits = environment.skyrl_gym.max_env_workers, environment.timeout_seconds
        self.threads = CallThreads(*limits) if limits[0] else None

    async def generate(self, work: Work, cache: GroupCache | None = None) -> Group:  # noqa: ARG002
        """Return the group; errors as of `GroupGenerator.generate`."""
        started, version = time.monotonic(), self._engine.version
        prompt = prompt_text(work)
        prompt_ids = self._engine.prompt_tokens(prompt)
        sampling = {"prompt": prompt, "kind": work.kind}
        said = await self._engine.generate(prompt_ids, work.n_samples, work.seed, sampling)
        if self._kept and self._kept.wants(work.kind, version):
            await in_thread(self._kept.save_generated, work.group_id, [one.tensors[IMAGE] for one in said])
        answers = await asyncio.gather(*(self._scored(work, one) for one in said))
        rows = [[_row(prompt_ids, one, turn)] for one, (turn, _) in zip(said, answers, strict=True)]
        kept = [[apply_stop_reason(row, self._config) for row in own] for own in rows]
        return Group(
            work=work,
            version=version,
            rows=neutralize_failed(kept) if work.kind == "train" else kept,
            conversations=[[] for _ in said],
            raw_rewards=[sample_reward(own) for own in rows],
            failures=[failure for _, failure in answers if failure],
            seconds=time.monotonic() - started,
        )

    async def _scored(self, work: Work, said: Generation) -> tuple[Turn | None, str | None]:
        extras = {**self._extras, **work.prompt.extras}
        session = EnvSession(work, self._rewards[work.kind], extras, len(said.token_ids), self.threads)
        try:
            shown = said.tensors[IMAGE], said.tensors.get(LATENTS)
            return await session.step("", len(said.token_ids), *shown).result(), None
        except (UserCodeError, ServiceError, SandboxError) as error:
            return None, plain_text(str(error), LONGEST_FAILURE)


def pictures(config: GeneratorConfig, environment: EnvironmentConfig, kept: SampleImages | None = None) -> Maker:
    """Return the maker of the generator of diffusion policies; arguments as of `PictureGenerator`."""

    @asynccontextmanager
    async def made(engine: Engine) -> AsyncIterator[Generator]:
        assert isinstance(engine, DiffusionEngine)
        yield PictureGenerator(engine, config, environment, kept)

    return made


def prompt_text(work: Work) -> str:
    """Return the text of the picture: the last message of the prompt."""
    return work.prompt.messages[-1]["content"]


def _row(prompt_ids: list[int], said: Generation, turn: Turn | None) -> Row:
    before, steps = len(prompt_ids), len(said.token_ids)
    rewards_T = np.zeros(before + steps, np.float32)
    rewards_T[-1] = turn.reward if turn else 0.0
    tensors = cast("dict[str, np.ndarray]", said.tensors)
    return Row(
        token_ids=np.array([*prompt_ids, *said.token_ids], np.int64),
        loss_mask=np.array([0.0] * before + [1.0] * steps, np.float32),
        rollout_logprobs=np.array([0.0] * before + said.logprobs, np.float32),
        versions=np.array([-1] * before + said.versions, np.int32),
        rewards=rewards_T,
        stop_reason="stop" if turn else "failed",
        env_metrics=turn.metrics if turn else {},
        tensors={name: value for name, value in tensors.items() if name not in (IMAGE, LATENTS)},
    )
