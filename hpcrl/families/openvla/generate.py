"""Generates the group of episodes of one prompt: conversations whose answers are actions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

from hpcrl.data.vision.reader import Context
from hpcrl.data.vision.videos import EpisodeVideos, shown_in
from hpcrl.envs.base import Turn
from hpcrl.envs.tasks.robot import STATE_APART
from hpcrl.families.openvla.actions import ActionTurns, written
from hpcrl.rollout.engines.base import Engine, Generation, engine_sampling
from hpcrl.rollout.env_session import Answer
from hpcrl.rollout.generate import Episode, GroupGenerator
from hpcrl.runtime.threads import in_thread
from hpcrl.types import Kind, Work

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class ActionGroups(GroupGenerator):
    """Generates groups of episodes with one engine; many at a time.

    Args:
        actions: between tokens and actions.
        videos: of episodes; None: none are written.

    Others, and errors, as of `GroupGenerator`.
    """

    def __init__(
        self,
        engine: Engine,
        tokenizer: PreTrainedTokenizerBase,
        *arguments: Any,
        actions: ActionTurns,
        videos: EpisodeVideos | None = None,
        **options: Any,
    ) -> None:
        super().__init__(engine, tokenizer, *arguments, **options)
        self._actions, self._videos = actions, videos
        self._eos = cast("int | None", tokenizer.eos_token_id)
        self._extras[STATE_APART] = actions.states is not None

    def _sampling(self, kind: Kind) -> dict[str, Any]:
        params = self._params[kind]
        return engine_sampling(params, kind, self._vocabulary, self._teacher_inputs.generated) | self._actions.sampling

    async def _keep(self, work: Work, version: int, episodes: Sequence[Episode]) -> None:
        await super()._keep(work, version, episodes)
        if self._videos and self._videos.wants(work.kind):
            shown = [shown_in([*one.opening, *one.messages]) for one in episodes]
            await in_thread(self._videos.write, work.group_id, shown)

    def _next_prompt(self, episode: Episode, said: Generation, answer: Turn) -> Context:
        if not self._config.step_wise_trajectories:
            return super()._next_prompt(episode, said, answer)
        return self._template.opening(answer.observations, episode.tools)

    def _ask(self, episode: Episode, said: Generation, kind: Kind) -> Answer[Turn]:  # noqa: ARG002
        actions_KA = self._actions.actions(said.token_ids)
        episode.messages.append({"role": "assistant", "content": written(actions_KA)})
        return episode.session.act(actions_KA)

    def _say(self, episode: Episode, said: Generation, answer: Turn | None, *, over: bool) -> None:
        super()._say(episode, said, answer, over=over)
        if answer is not None and self._actions.parallel and self._eos is not None:
            episode.transcript.add_context([self._eos])  # each token has seen it
