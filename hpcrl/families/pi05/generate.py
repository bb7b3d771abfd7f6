"""Generates the group of episodes of one prompt: PI0.5 makes chunks of actions, and the simulator of `robot` moves by them.

A sample is an episode. Each of its turns is a row of its own, with the observation that it was made for.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from hpcrl.config import EnvironmentConfig, GeneratorConfig
from hpcrl.config.sections.model import Pretrained
from hpcrl.config.sections.vla import VLAConfig
from hpcrl.data.vision.videos import EpisodeVideos
from hpcrl.envs.registry import common_extras
from hpcrl.envs.simulators.base import Bounds, Observation
from hpcrl.envs.tasks.robot import Robot
from hpcrl.errors import DataError, UserCodeError
from hpcrl.families.pi05.engine import ActionEngine
from hpcrl.families.pi05.inputs import load_tokenizer, resized, written_prompt
from hpcrl.families.pi05.samples import ACTIONS, IMAGES, PATH
from hpcrl.families.pi05.statistics import NormScale, statistics_of
from hpcrl.rollout.engines.base import Engine, Generation
from hpcrl.rollout.env_session import EnvSession
from hpcrl.rollout.generate import Generator, Maker
from hpcrl.rollout.generation_cache import GroupCache
from hpcrl.rollout.group import Group, apply_stop_reason, neutralize_failed, sample_reward
from hpcrl.rollout.threads import CallThreads
from hpcrl.runtime.threads import in_thread
from hpcrl.types import LONGEST_FAILURE, Kind, Row, StopReason, Work, plain_text

if TYPE_CHECKING:
    from PIL.Image import Image


@dataclass(frozen=True)
class Robotics:
    """Tokenizer and scales of a model's robot.

    Attributes:
        tokenizer: of the text.
        scales: of `state` and `actions`, from the model's statistics; empty: the simulator's bounds are.
    """

    tokenizer: Any
    scales: dict[str, NormScale]

    @classmethod
    def of(cls, model: Pretrained) -> Robotics:
        """Return that of a model; errors as of `load_tokenizer` and `statistics_of`."""
        return cls(load_tokenizer(model), statistics_of(model))

    def state(self, seen: np.ndarray, bounds: Bounds) -> np.ndarray:
        """Return a state as the network has it."""
        scale = self.scales.get("state") or NormScale.between(bounds.state_low, bounds.state_high, "state")
        return scale.of_first(len(seen), "state").to_network(seen)

    def actions(self, made: np.ndarray, bounds: Bounds) -> np.ndarray:
        """Return actions [n, D] of the network as those [n, A] of the simulator, within their bounds."""
        scale, size = self.scales.get("actions"), len(bounds.action_low)
        scale = scale or NormScale.between(bounds.action_low, bounds.action_high, "action")
        found = scale.of_first(size, "actions").to_robot(made[:, :size])
        return np.clip(found, bounds.action_low, bounds.action_high)


@dataclass
class _Episode:
    """One sample while it is generated.

    Attributes:
        shown: the images of all cameras, time after time, where there is a video of them.
    """

    session: EnvSession
    seed: int
    shown: list[list[np.ndarray]] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=dict)
    failure: str | None = None


class ActionGenerator:
    """Generates groups with one engine; all episodes of a group at the same time.

    Args:
        videos: of what robots do; None: none are written.
    """

    def __init__(
        self,
        engine: ActionEngine,
        config: GeneratorConfig,
        environment: EnvironmentConfig,
        vla: VLAConfig,
        robotics: Robotics,
        videos: EpisodeVideos | None = None,
    ) -> None:
        self._videos = videos
        self._engine, self._config, self._vla, self._robotics = engine, config, vla, robotics
        self._done_at_once = environment.skyrl_gym.robot.actions_per_turn
        if self._done_at_once > engine.architecture.chunk_size:
            raise DataError(
                f"environment.skyrl_gym.robot.actions_per_turn: expected at most {engine.architecture.chunk_size}, which the model's chunks "
                f"have, found {self._done_at_once}"
            )
        self._extras = common_extras(environment, config.max_turns)
        limits = environment.skyrl_gym.max_env_workers, environment.timeout_seconds
        self.threads = CallThreads(*limits) if limits[0] else None

    async def generate(self, work: Work, cache: GroupCache | None = None) -> Group:  # noqa: ARG002
        """Return the group; errors as of `GroupGenerator.generate`."""
        if work.prompt.env_class != "robot":
            raise DataError(
                f'row {work.prompt.uid}: env_class: expected "robot" of a policy that moves robots, found "{work.prompt.env_class}"'
            )
        started, version = time.monotonic(), self._engine.version
        extras = {**self._extras, **work.prompt.extras}
        sessions = [EnvSession(work, None, extras, self._done_at_once, self.threads) for _ in range(work.n_samples)]
        episodes = [_Episode(session, work.seed + number) for number, session in enumerate(sessions)]
        try:
            await asyncio.gather(*(self._play(episode, work) for episode in episodes))
        finally:
            for episode in episodes:
                await _closed(episode)
        if self._videos and self._videos.wants(work.kind):
            shown = [map(_frames, episode.shown) for episode in episodes]
            await in_thread(self._videos.write, work.group_id, shown)
        said = [_ended(episode) for episode in episodes]
        rows = [[apply_stop_reason(row, self._config) for row in own] for own in said]
        return Group(
            work=work,
            version=version,
            rows=neutralize_failed(rows) if work.kind == "train" else rows,
            conversations=[[] for _ in episodes],
            raw_rewards=[sample_reward(own) for own in said],
            failures=[episode.failure for episode in episodes if episode.failure],
            seconds=time.monotonic() - started,
        )

    async def _play(self, episode: _Episode, work: Work) -> None:
        try:
            seen, bounds = await episode.session.begin(Robot.begin).result()
            self._film(episode, work.kind, seen)
            for turn in range(self._config.max_turns):
                ids, images = self._shown(work, seen, bounds)
                seed = random.Random(f"turn-{episode.seed}-{turn}").getrandbits(31)
                size = len(bounds.action_low)
                sampling = {"kind": work.kind, "images": images, "action_size": size}
                (made,) = await self._engine.generate(ids, 1, seed, sampling)
                actions = self._robotics.actions(made.tensors[PATH][-1, : self._done_at_once], bounds)
                seen, answer = await episode.session.move(partial(Robot.move, actions=list(actions))).result()
                self._film(episode, work.kind, seen)
                done = int(answer.metrics["actions"] - episode.metrics.get("actions", 0))
                episode.metrics = answer.metrics
                episode.rows.append(_row(ids, made, answer.reward, images, done, size, work.kind))
                if answer.done:
                    return
        except UserCodeError as error:
            episode.failure = plain_text(str(error), LONGEST_FAILURE)
            if not episode.rows:
                episode.rows.append(_untrained(self._written(work, None)))

    def _film(self, episode: _Episode, kind: Kind, seen: Observation) -> None:
        if self._videos and self._videos.wants(kind):
            episode.shown.append(list(seen.images.values()))

    def _shown(self, work: Work, seen: Observation, bounds: Bounds) -> tuple[list[int], np.ndarray | None]:
        ids = self._written(work, self._robotics.state(seen.state, bounds) if self._vla.use_proprio else None)
        pictures = list(seen.images.values())
        if not pictures:
            return ids, None
        return ids, np.stack([resized(picture, self._engine.architecture.image_size) for picture in pictures])

    def _written(self, work: Work, state: np.ndarray | None) -> list[int]:
        text = written_prompt(work.prompt.messages[-1]["content"], state)
        return list(self._robotics.tokenizer(text).input_ids)


def _frames(images: list[np.ndarray]) -> list[Image]:
    from PIL.Image import fromarray

    return [fromarray(image) for image in images]


async def _closed(episode: _Episode) -> None:
    try:
        if answer := episode.session.close():
            await answer.result()
    except UserCodeError as error:
        episode.failure = episode.failure or plain_text(str(error), LONGEST_FAILURE)


def _ended(episode: _Episode) -> list[Row]:
    reason: StopReason = "failed" if episode.failure else "stop"
    for row in episode.rows:
        row.stop_reason, row.env_metrics = reason, episode.metrics
    return episode.rows


def _row(
    ids: list[int], made: Generation, reward: float, images: np.ndarray | None, done: int, size: int, kind: Kind
) -> Row:
    """Return the row of a turn whose first `done` actions were executed."""
    before = len(ids)
    rewards_T = np.zeros(before + done, np.float32)
    rewards_T[-1] = reward
    tensors = {PATH: made.tensors[PATH], ACTIONS: np.array([done, size], np.int32)}
    tensors |= {} if images is None else {IMAGES: images}
    return Row(
        token_ids=np.array([*ids, *made.token_ids[:done]], np.int64),
        loss_mask=np.array([0.0] * before + [1.0] * done, np.float32),
        rollout_logprobs=np.array([0.0] * before + made.logprobs[:done], np.float32),
        versions=np.array([-1] * before + made.versions[:done], np.int32),
        rewards=rewards_T,
        stop_reason="stop",
        tensors=tensors if kind == "train" else {},
    )


def _untrained(ids: list[int]) -> Row:
    nothing = np.zeros(len(ids), np.float32)
    versions = np.full(len(ids), -1, np.int32)
    return Row(np.array(ids, np.int64), nothing, nothing.copy(), versions, nothing.copy(), "failed")


def actions(
    config: GeneratorConfig,
    environment: EnvironmentConfig,
    vla: VLAConfig,
    robotics: Robotics,
    videos: EpisodeVideos | None = None,
) -> Maker:
    """Return the maker of the generator of policies that move robots; arguments as of `ActionGenerator`."""

    @asynccontextmanager
    async def made(engine: Engine) -> AsyncIterator[Generator]:
        assert isinstance(engine, ActionEngine)
        yield ActionGenerator(engine, config, environment, vla, robotics, videos)

    return made
