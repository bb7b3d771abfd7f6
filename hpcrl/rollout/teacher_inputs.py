"""What training groups have for teachers beside their tokens: those that the policy finds most probable, and hints.

A hint is what the policy itself is shown in the place of a sample's prompt when it teaches itself: the answer of another sample of the group
that succeeded (self-distillation with privileged context, such as SDPO, arXiv:2601.20802).
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

import numpy as np

from hpcrl.config.sections.distillation import DistillationConfig, SelfTeacherConfig
from hpcrl.data.chat.prompt_tokens import ChatTurns
from hpcrl.data.chat.template import Tools
from hpcrl.envs.base import Messages
from hpcrl.errors import ConfigError, DataError
from hpcrl.rollout.engines.base import Engine
from hpcrl.types import Hint, Row


@dataclass(frozen=True)
class Told:
    """What was said in a sample.

    Attributes:
        opening: the messages of its prompt.
        messages: what followed.
        prompt_tokens: tokens of the prompt.
        tools: of the prompt's row.
    """

    opening: Messages
    messages: Messages
    prompt_tokens: int
    tools: Tools = ()

    @property
    def answer(self) -> str:
        """What the policy said last."""
        return next((one["content"] for one in reversed(self.messages) if one["role"] == "assistant"), "")

    @property
    def feedback(self) -> str:
        """What the environment said."""
        return "\n\n".join(one["content"] for one in self.messages if one["role"] != "assistant")


@dataclass(frozen=True)
class Lessons:
    """What is wanted.

    Attributes:
        top_ids: tokens of a place that the policy finds most probable; 0: none.
        afterwards: these are found in one more pass over the whole sample, the prompt included, instead of as each token is sampled.
        hints: None: there are none.
    """

    top_ids: int = 0
    afterwards: bool = False
    hints: SelfTeacherConfig | None = None

    @classmethod
    def of(cls, distillation: DistillationConfig) -> Lessons:
        wanted = distillation.enable and not distillation.top_k_from_teacher
        return cls(
            distillation.top_k if wanted else 0,
            distillation.rollout_top_k_recompute,
            distillation.self_teacher if distillation.self_teacher_model else None,
        )

    def check(self, vocabulary: int) -> None:
        """Raise ConfigError where more tokens of a place are wanted than engines can tell beside the sampled one.

        Args:
            vocabulary: tokens that there are.
        """
        if self.top_ids >= vocabulary:
            raise ConfigError(
                f"trainer.distillation.top_k: expected less than the policy's {vocabulary} tokens with top_k_from_teacher=false, found {self.top_ids}"
            )

    @property
    def generated(self) -> int:
        """How many of the most probable tokens are wanted of a token when it is sampled."""
        return 0 if self.afterwards else self.top_ids

    async def with_top_ids(self, rows: list[Row], engine: Engine) -> list[Row]:
        """Return the rows of a sample with the most probable tokens in the place of each but the first, if they are wanted afterwards; not where nothing is trained."""
        if not (self.top_ids and self.afterwards):
            return rows
        trained = [row for row in rows if row.loss_mask.any()]
        found = await asyncio.gather(*(engine.top_tokens(row.token_ids.tolist(), self.top_ids) for row in trained))
        tops = iter(np.array([[-1] * self.top_ids, *top], np.int32) for top in found)
        return [replace(row, top_ids=next(tops)) if row.loss_mask.any() else row for row in rows]

    def with_hints(
        self, rows: list[list[Row]], rewards: Sequence[float], told: Sequence[Told], template: ChatTurns
    ) -> list[list[Row]]:
        """Return the rows of a group's samples, each sample of one row with a hint, if hints are wanted and another sample succeeded.

        That is the one with the highest reward, the first of several. Where what it said cannot be given as text, there is no hint.
        """
        if self.hints is None:
            return rows
        failed = [own[-1].stop_reason == "failed" for own in rows]
        best = sorted(range(len(rows)), key=lambda at: (failed[at], -rewards[at]))
        shown = [at for at in best if not failed[at] and rewards[at] >= self.hints.success_reward and told[at].answer]
        found = list[list[Row]]()
        for at, own in enumerate(rows):
            other = next((one for one in shown if one != at), None)
            messages = None if other is None or failed[at] else self._hinted(told[at], told[other].answer)
            if messages is not None:
                with suppress(DataError):  # special tokens, which no text has
                    hint = Hint(
                        np.array(template.opening(messages, told[at].tools).token_ids, np.int64), told[at].prompt_tokens
                    )
                    own = [replace(row, hint=hint) for row in own]
            found.append(own)
        return found

    def _hinted(self, told: Told, answer: str) -> Messages | None:
        """Return the messages of a prompt with the hint in its last message of the user; None where it has none."""
        assert self.hints is not None
        last = max((at for at, one in enumerate(told.opening) if one["role"] == "user"), default=None)
        if last is None:
            return None
        parts = {"{prompt}": told.opening[last]["content"], "{answer}": answer, "{feedback}": told.feedback}
        text = re.sub("|".join(map(re.escape, parts)), lambda found: parts[found[0]], self.hints.template)
        return [*told.opening[:last], {**told.opening[last], "content": text}, *told.opening[last + 1 :]]
