"""Generates the group of samples of one prompt: chat template, engine, environment.

A sample grows turn by turn: the engine continues its tokens, the environment answers the text, and its observations are added to the
tokens. It ends when the environment is done or at a limit. The samples of a group go on at their own pace.

With generator.step_wise_trajectories each turn begins with the conversation so far as the chat template writes it, and becomes a row of
its own: the template may write past responses differently.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import TYPE_CHECKING, Any, Protocol

from hpcrl.config import EnvironmentConfig, GeneratorConfig, SamplingParams
from hpcrl.config.sections.model import Pretrained
from hpcrl.data.chat.messages import read_tools
from hpcrl.data.chat.prompt_tokens import ChatTurns
from hpcrl.data.chat.template import Tools
from hpcrl.data.vision.reader import Context, ImageReader, SeenImage
from hpcrl.envs.base import Messages, Turn
from hpcrl.envs.registry import common_extras
from hpcrl.envs.rewards.grouped import WeightedGroupRewards
from hpcrl.envs.rewards.remote import Endpoints
from hpcrl.envs.tools.sandboxes import Sandboxes
from hpcrl.errors import (
    ConfigError,
    DataError,
    EngineError,
    RefusedRequestError,
    SandboxError,
    ServiceError,
    UserCodeError,
)
from hpcrl.rollout.endpoint.server import PolicyServer, serving
from hpcrl.rollout.engines.base import Engine, Generation, Heard, engine_sampling
from hpcrl.rollout.env_session import Answer, EnvSession, ask, place_of, scorer_of
from hpcrl.rollout.generation_cache import GroupCache
from hpcrl.rollout.group import Group, apply_stop_reason, neutralize_failed, sample_reward
from hpcrl.rollout.group_rewards import group_sample, with_group_rewards
from hpcrl.rollout.images.preparing import ImagePreparation
from hpcrl.rollout.images.saved import SampleImages
from hpcrl.rollout.teacher_inputs import SampleMessages, TeacherInputs
from hpcrl.rollout.threads import CallThreads
from hpcrl.rollout.transcript import Transcript
from hpcrl.rundir.commit import digest_of
from hpcrl.runtime.threads import in_thread
from hpcrl.types import LONGEST_FAILURE, Kind, Row, StopReason, Work, plain_text

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# of one sample; any other error would come again with the next
_FAILURES = (UserCodeError, ServiceError, SandboxError, RefusedRequestError)


class Generator(Protocol):
    """Generates groups with one engine, many at a time.

    Attributes:
        threads: in which environments and rewards are called; None: they are called without.
    """

    threads: CallThreads | None

    async def generate(self, work: Work, cache: GroupCache | None = None) -> Group:
        """Return the group of a piece of work; errors as of `GroupGenerator.generate`."""
        ...


Maker = Callable[[Engine], AbstractAsyncContextManager[Generator]]
"""Returns the generator of an engine, for a `with` statement: the part that a family of policies brings."""


@dataclass
class Episode:
    """One sample while it is generated.

    Attributes:
        cache: of its group's turns.
        number: in its group.
        seed: of the first turn.
        tools: of its row, for the chat template.
        prompt: of the first turn.
        transcripts: one, or with step-wise trajectories one per turn.
        opening: what the environment begins with.
        past: the conversation as the policy is shown it, with step-wise trajectories; else only what came before the sample.
        messages: those after the prompt.
        anchor: digest of what names the state that the policy acts in next.
        failure: why it cannot go on: its environment failed, or the engine refuses what it asks.
    """

    session: EnvSession
    cache: GroupCache
    number: int
    seed: int
    sampling: dict[str, Any]
    tools: Tools
    prompt: Context = field(default_factory=lambda: Context([]))
    transcripts: list[Transcript] = field(default_factory=list)
    opening: Messages = field(default_factory=list)
    past: Messages = field(default_factory=list)
    messages: Messages = field(default_factory=list)
    anchor: str = ""
    metrics: dict[str, float] = field(default_factory=dict)
    stop_reason: StopReason = "stop"
    failure: str | None = None

    async def say(
        self,
        turn: int,
        prompt: Context,
        limits: Mapping[str, Any] | None = None,
        heard: Heard | None = None,
    ) -> Generation:
        """Return the policy's next response; `limits` override sampling parameters, and `heard` is as of `Engine.generate`."""
        seed = random.Random(f"turn-{self.seed}-{turn}").getrandbits(31) if turn else self.seed
        sampling = {**self.sampling, **(limits or {})}
        ids, images = prompt
        (said,) = await self.cache.generate(self.number, turn, ids, 1, seed, sampling, heard, images)
        return said

    @property
    def transcript(self) -> Transcript:
        return self.transcripts[-1]

    @property
    def judged(self) -> Messages:
        """The conversation up to the policy's last response."""
        after = next((at for at, one in enumerate(reversed(self.messages)) if one["role"] == "assistant"), 0)
        return self.opening + self.messages[: len(self.messages) - after]

    @property
    def shown(self) -> list[SeenImage]:
        """The images of all turns, in their order; one that a later turn's prompt repeats is there once."""
        found = {image.digest: image for transcript in self.transcripts for image in transcript.images}
        return list(self.transcript.images if len(self.transcripts) == 1 else found.values())

    def rows(self) -> list[Row]:
        reason: StopReason = "failed" if self.failure else self.stop_reason
        return [transcript.sample(reason, self.metrics) for transcript in self.transcripts]


class GroupGenerator:
    """Generates groups with one engine; many at a time.

    Args:
        tokenizer: of the policy; it owns the chat template.
        config: without a `max_input_length` of its own, a sample may become as long as it likes.
        baselines: whether each training group also gets a greedy response, of which only the reward is kept.
        services: returns the reward service that gets the next request; None: the one that the process's variables name.
        server: at which environments ask the policy themselves; None: there is none.
        reader: of the policy; None: it sees no images.
        kept: where images that samples were shown are kept; None: nowhere.
        teacher_inputs: what training groups have for teachers; None: nothing.
        model: of the policy, whose files name tokens that end a turn; None: only its tokenizer and the template do.
        sandboxes: that environments may start; None: there are none.
    """

    def __init__(
        self,
        engine: Engine,
        tokenizer: PreTrainedTokenizerBase,
        config: GeneratorConfig,
        environment: EnvironmentConfig,
        baselines: bool = False,
        services: Callable[[], Endpoints] | None = None,
        teacher_inputs: TeacherInputs | None = None,
        server: PolicyServer | None = None,
        reader: ImageReader | None = None,
        kept: SampleImages | None = None,
        model: Pretrained | None = None,
        sandboxes: Sandboxes | None = None,
    ) -> None:
        self._engine, self._config, self._baselines, self._server = engine, config, baselines, server
        self._teacher_inputs = teacher_inputs or TeacherInputs()
        special = config.chat_template.allow_special_tokens
        self._template = ChatTurns(tokenizer, config.chat_template_kwargs, special, reader, model)
        self._images, self._kept = ImagePreparation(reader), kept if reader else None
        self._vocabulary = len(tokenizer)
        self._teacher_inputs.check(self._vocabulary)
        gym, self._judged = environment.skyrl_gym, environment.reward_model.model is not None
        self._extras = common_extras(environment, config.max_turns, sandboxes)
        self._params = {"train": config.sampling_params, "eval": config.eval_sampling}
        self._rewards = {kind: scorer_of(environment, kind, services) for kind in ("train", "eval")}
        together = environment.group_reward_function
        self._group_rewards = WeightedGroupRewards(together, environment) if together else None
        limits = gym.max_env_workers, environment.timeout_seconds
        self.threads = CallThreads(*limits) if gym.max_env_workers else None
        self._settings = repr((environment, config.max_turns))  # that answers of environments depend on

    async def generate(self, work: Work, cache: GroupCache | None = None) -> Group:
        """Return the group. A sample whose environment fails or times out, or whose request the engine refuses, is marked as failed. It is not trained, and counts in its group as the mean of the others.

        Args:
            cache: turns of the group that earlier workers have finished.

        Raises:
            HpcrlError: an environment or a reward lacks something that no other sample would have; the message names it and the group.
            EngineError: the engine failed.
        """
        version = self._engine.version if work.version is None else work.version
        cache = cache or GroupCache(self._engine, work.group_id, version=work.version)
        started = time.monotonic()
        sampling = self._sampling(work.kind)
        n, compared = work.n_samples, self._baselines and work.kind == "train"
        tools = read_tools(work.prompt.extras.get("tools"))
        episodes = [Episode(self._session(work, cache, i), cache, i, work.seed + i, sampling, tools) for i in range(n)]
        if compared:
            greedy = {**sampling, "temperature": 0.0, "logprobs": 0}
            episodes.append(Episode(self._session(work, cache, n), cache, n, work.seed, greedy, tools))
        try:
            await self._generate(episodes, work)
        finally:
            await self._close(episodes)
        await self._keep(work, version, episodes[:n])
        said = [episode.rows() for episode in episodes[:n]]
        rows = [[apply_stop_reason(row, self._config) for row in own] for own in said]
        if work.kind == "train":
            rows = await self._compared(work, episodes[:n], rows)
            pairs = zip(episodes[:n], rows, strict=True)
            rows = neutralize_failed(await asyncio.gather(*(self._with_top_ids(*pair) for pair in pairs)))
            told = [
                SampleMessages(one.past, one.messages, len(one.transcripts[0].prompt), tools) for one in episodes[:n]
            ]
            rows = self._teacher_inputs.with_hints(rows, [sample_reward(own) for own in rows], told, self._template)
        else:  # experts are for training
            rows = [[replace(row, tensors={}) for row in own] for own in rows]
        return Group(
            work=work,
            version=version,
            rows=rows,
            conversations=[episode.messages for episode in episodes[:n]],
            raw_rewards=[sample_reward(own) for own in said],
            failures=[episode.failure for episode in episodes if episode.failure],
            seconds=time.monotonic() - started,
            baseline=self._baseline(episodes[n], rows) if compared else None,
            cached_tokens=cache.cached_tokens,
            judged=[episode.judged for episode in episodes[:n] if self._judged],
        )

    async def _compared(self, work: Work, episodes: Sequence[Episode], rows: list[list[Row]]) -> list[list[Row]]:
        """Return the rows with the rewards of their whole group; where these cannot be had, every sample has failed."""
        rewards, there = self._group_rewards, [at for at, episode in enumerate(episodes) if not episode.failure]
        if rewards is None or not there:
            return rows
        most = self._params[work.kind].max_generate_length
        group = [group_sample(work.prompt, rows[at], episodes[at].messages, most) for at in there]
        try:
            values = await ask(lambda: rewards(group), self.threads, place_of(work)).result()
        except _FAILURES as error:
            for at in there:
                rows[at] = self._failed(episodes[at], error, rows[at])
        else:
            for at, own in zip(there, values, strict=True):
                if isinstance(own, ServiceError):
                    rows[at] = self._failed(episodes[at], ServiceError(f"{place_of(work)}: {own}"), rows[at])
                else:
                    rows[at] = with_group_rewards(rows[at], own, rewards)
        return rows

    def _failed(self, episode: Episode, error: Exception, rows: Sequence[Row]) -> list[Row]:
        episode.failure = _told(error)
        return [apply_stop_reason(replace(row, stop_reason="failed"), self._config) for row in rows]

    async def _with_top_ids(self, episode: Episode, rows: list[Row]) -> list[Row]:
        try:
            return await self._teacher_inputs.with_top_ids(rows, self._engine)
        except _FAILURES as error:
            return self._failed(episode, error, rows)

    def _sampling(self, kind: Kind) -> dict[str, Any]:
        template, top_ids = self._template, self._teacher_inputs.generated
        return engine_sampling(self._params[kind], kind, self._vocabulary, top_ids, template.never_said, template.ends)

    async def _keep(self, work: Work, version: int, episodes: Sequence[Episode]) -> None:
        """Write the input images of a finished group, where they are wanted."""
        if self._kept and self._kept.wants(work.kind, version):
            await in_thread(self._kept.save_inputs, work.group_id, [episode.shown for episode in episodes])

    def _baseline(self, greedy: Episode, samples: Sequence[Sequence[Row]]) -> float:
        if greedy.failure:
            return fmean(sample_reward(rows) for rows in samples)
        return sample_reward([apply_stop_reason(row, self._config) for row in greedy.rows()])

    def _session(self, work: Work, cache: GroupCache, number: int) -> EnvSession:
        extras = {**self._extras, **work.prompt.extras}
        tokens, prompt = self._params[work.kind].max_generate_length, work.prompt
        name = [work.group_id, number, work.asked, prompt.env_class, prompt.messages, self._settings]
        answers = cache.answers(digest_of(json.dumps(name, default=str).encode()))
        return EnvSession(work, self._rewards[work.kind], extras, tokens, self.threads, answers)

    async def _generate(self, episodes: Sequence[Episode], work: Work) -> None:
        """Generate the samples of a group, and its greedy response, which is the last of the episodes where there is one."""
        episodes[0].cache.leave(range(work.n_samples))  # an environment may wait long for what it begins with
        asked = [(episode, episode.session.open()) for episode in episodes]
        if self._config.max_turns > 1 or self._extras["sandboxes"]:
            # a sample that has begun does not wait for others, which may need the place that it has
            await asyncio.gather(*(self._begun(*one, episodes, work) for one in asked))
            return
        for one in asked:
            await self._open(*one, episodes, work)
        samples, greedy = episodes[: work.n_samples], episodes[work.n_samples :]
        first = await self._together(samples)
        own = [self._turns(episode, work.kind) for episode in (*greedy, *(samples if first is None else ()))]
        await asyncio.gather(*own, *([] if first is None else [self._only_turns(samples, first, work.kind)]))

    async def _begun(self, episode: Episode, asked: Answer[Messages], group: Sequence[Episode], work: Work) -> None:
        await self._open(episode, asked, group, work)
        await self._turns(episode, work.kind)
        await self._close([episode])

    async def _open(self, episode: Episode, asked: Answer[Messages], group: Sequence[Episode], work: Work) -> None:
        """Begin a sample with what its environment answers."""
        opened: Messages = list(work.prompt.messages)
        try:
            opened = await asked.result()
        except _FAILURES as error:
            episode.failure = _told(error)
        alike = (one.prompt for one in group if one.transcripts and one.opening == opened)  # as a rule all are
        if (prompt := next(alike, None)) is None:
            _held = await self._images.prepare(opened)  # until the template wants them
            prompt = self._template.opening(opened, episode.tools)
        episode.prompt, episode.transcripts = prompt, [Transcript(*prompt)]
        episode.opening, episode.past, episode.anchor = opened, list(opened), _anchor(opened)

    async def _close(self, episodes: Sequence[Episode]) -> None:
        for episode, answer in [(episode, episode.session.close()) for episode in episodes]:
            try:
                if answer:
                    await answer.result()
            except _FAILURES as error:
                episode.failure = episode.failure or _told(error)

    async def _together(self, episodes: Sequence[Episode]) -> Sequence[Generation] | None:
        """Return the first turns from one request, which ends with the longest, where no sample goes on after it."""
        prompt, images, first = episodes[0].transcript.token_ids, episodes[0].transcript.images, episodes[0]
        alike = all(
            (one.transcript.token_ids, one.transcript.images) == (prompt, images) and not one.failure
            for one in episodes
        )
        if self._config.max_turns > 1 or not alike or first.session.plays or self._too_long(first, prompt):
            return None
        with suppress(RefusedRequestError):  # each sample asks for itself, and hears why
            return await first.cache.generate(0, 0, prompt, len(episodes), first.seed, first.sampling, images=images)
        return None

    async def _only_turns(self, episodes: Sequence[Episode], said: Sequence[Generation], kind: Kind) -> None:
        asked = [self._ask(episode, one, kind) for episode, one in zip(episodes, said, strict=True)]
        for episode, one, asked_one in zip(episodes, said, asked, strict=True):
            self._say(episode, one, await self._answer(episode, asked_one), over=True)

    async def _turns(self, episode: Episode, kind: Kind) -> None:
        if episode.failure:
            return
        if episode.session.plays:
            await self._play(episode, self._params[kind])
            return
        prompt = episode.prompt
        for turn in range(self._config.max_turns):
            if self._too_long(episode, prompt.token_ids):
                return
            if turn and self._config.step_wise_trajectories:
                episode.transcripts.append(Transcript(*prompt))
            episode.transcript.follow(prompt)
            try:
                said = await episode.say(turn, prompt)
            except _FAILURES as error:
                episode.failure = _told(error)
                return
            answer = await self._answer(episode, self._ask(episode, said, kind))
            if answer is None or answer.done or turn + 1 == self._config.max_turns:
                self._say(episode, said, answer, over=True)
                return
            self._say(episode, said, answer, over=False)
            try:
                _held = await self._images.prepare(answer.observations)
                prompt = self._next_prompt(episode, said, answer)
            except DataError as error:  # the observations have no tokens
                episode.failure = _told(error)
                return

    async def _play(self, episode: Episode, params: SamplingParams) -> None:
        if self._server is None or self.threads is None:
            raise ConfigError(
                f"{episode.session.where}: it asks the policy itself; set generator.inference_engine.enable_http_endpoint=true, and "
                "environment.skyrl_gym.max_env_workers above 0"
            )
        async with self._server.session(episode.say, params) as (session, endpoint):
            answer = await self._heard(episode, episode.session.play(episode.past, endpoint))
        if isinstance(session.failure, EngineError):
            raise session.failure
        if session.failure:  # by the environment's answer
            episode.failure = _told(session.failure)
        episode.messages, episode.stop_reason = session.conversation(episode.past), session.stop_reason
        if not session.answers:
            episode.failure = episode.failure or f"{episode.session.where}: it ended and had asked the policy nothing"
            return
        episode.transcripts = session.transcripts()
        if answer is not None:
            episode.transcript.add_reward(answer.reward)

    async def _heard(self, episode: Episode, asked: Answer[Turn]) -> Turn | None:
        """Return the environment's answer; None where it failed."""
        try:
            answer = await asked.result()
        except _FAILURES as error:
            episode.failure = _told(error)
            return None
        episode.metrics |= answer.metrics
        return answer

    def _too_long(self, episode: Episode, prompt: Sequence[int]) -> bool:
        longest = self._config.max_input_length
        if longest is not None and len(prompt) > longest:
            episode.stop_reason = "length"
            return True
        return False

    def _next_prompt(self, episode: Episode, said: Generation, answer: Turn) -> Context:
        if not self._config.step_wise_trajectories:
            if answer.fresh:
                raise ConfigError(
                    f"{episode.session.where}: its next turn is shown another conversation; set generator.step_wise_trajectories=true"
                )
            transcript = episode.transcript
            before = Context(transcript.token_ids, transcript.images)
            return before.followed_by(self._following(transcript, answer.observations, episode.tools))
        if answer.fresh:
            episode.past = list(answer.observations)
            return self._template.opening(episode.past, episode.tools)
        content = self._template.decoded(said.token_ids) if answer.action is None else answer.action
        episode.past += [{"role": "assistant", "content": content}, *answer.observations]
        return self._template.opening(episode.past, episode.tools)

    def _ask(self, episode: Episode, said: Generation, kind: Kind) -> Answer[Turn]:
        params = self._params[kind]
        text = self._template.text(said.token_ids, params.stop or [], keep=params.include_stop_str_in_output)
        episode.messages.append({"role": "assistant", "content": text})
        episode.stop_reason = said.stop_reason
        return episode.session.step(text, len(said.token_ids))

    async def _answer(self, episode: Episode, asked: Answer[Turn]) -> Turn | None:
        """Return the environment's answer to the policy's text; None where it failed."""
        text, answer = episode.messages[-1]["content"], await self._heard(episode, asked)
        if answer is None:
            return None
        if answer.action == text:
            answer = replace(answer, action=None)
        if answer.action is not None:
            episode.messages[-1]["content"] = answer.action
        episode.messages += answer.observations
        return answer

    def _say(self, episode: Episode, said: Generation, answer: Turn | None, *, over: bool) -> None:
        """Add the policy's response, up to the part that the environment keeps, and its reward."""
        token_ids, transcript = said.token_ids, episode.transcript
        if answer is None:
            transcript.add_response(said)
            return transcript.end_turn("", episode.anchor)
        if answer.action is not None:
            if kept := self._template.count_of(answer.action, token_ids):
                transcript.add_response(said, kept, trained=answer.trained)
            else:
                transcript.add_context(self._template.continued(transcript.token_ids, answer.action))
        elif not over and not self._config.use_conversation_multi_turn and token_ids[-1] in self._template.ends:
            transcript.add_response(said, len(token_ids) - 1, trained=answer.trained)
        else:
            transcript.add_response(said, trained=answer.trained)
        transcript.add_reward(answer.reward)
        transcript.end_turn(answer.role, episode.anchor)
        for role, reward in answer.rewards.items():
            any(one.reward_role(role, reward) for one in reversed(episode.transcripts))
        episode.anchor = _anchor(answer.observations if answer.anchor is None else answer.anchor)
        return None

    def _following(self, transcript: Transcript, observations: Messages, tools: Tools) -> Context:
        if not self._config.use_conversation_multi_turn:
            return self._template.plain(observations)
        end = self._config.append_eos_token_after_stop_str_in_multi_turn
        return self._template.between(transcript.token_ids, observations, tools, end=end)


def _anchor(named: Messages | str) -> str:
    """Return the digest of what names a state."""
    return digest_of(json.dumps(named, default=str).encode())


def _told(error: Exception) -> str:
    """Return the text of a failure; a user's exception may contain anything."""
    return plain_text(str(error), LONGEST_FAILURE)


def conversations(
    tokenizer: PreTrainedTokenizerBase,
    config: GeneratorConfig,
    environment: EnvironmentConfig,
    reader: ImageReader | None = None,
    kept: SampleImages | None = None,
    generator: Callable[..., GroupGenerator] = GroupGenerator,
    *,
    replica: int = 0,
    baselines: bool = False,
    rewards: Callable[[], Endpoints] | None = None,
    teacher_inputs: TeacherInputs | None = None,
    model: Pretrained | None = None,
    sandboxes: Sandboxes | None = None,
) -> Maker:
    """Return the maker of the generator of language models; arguments as of `GroupGenerator`, or of `generator` in its place."""

    @asynccontextmanager
    async def made(engine: Engine) -> AsyncIterator[Generator]:
        async with serving(config, tokenizer, replica, model, reader) as server:
            yield generator(
                engine, tokenizer, config, environment, baselines, rewards, teacher_inputs, server, reader, kept, model, sandboxes
            )  # fmt: skip

    return made
