"""Teacher inputs of training groups beside their tokens: the policy's most probable tokens, and hints.

A hint is a prompt with which the policy teaches itself: the sample's prompt with the answer of another, successful sample of the group.
That is self-distillation with privileged context (SDPO, arXiv:2601.20802). Wrong hints have in its place answers
that earned less (RLCSD, arXiv:2606.11709).
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import islice

import numpy as np

from hpcrl.config.sections.distillation import DistillationConfig, SelfTeacherConfig
from hpcrl.data.chat.prompt_tokens import ChatTurns
from hpcrl.data.chat.template import Tools
from hpcrl.envs.base import Messages
from hpcrl.errors import ConfigError, DataError
from hpcrl.rollout.engines.base import Engine
from hpcrl.types import Hint, Row


@dataclass(frozen=True)
class SampleMessages:
    """The messages of one sample.

    Attributes:
        opening: those of its prompt.
        messages: those after the prompt.
        prompt_tokens: tokens of the prompt.
        tools: of the prompt's row.
    """

    opening: Messages
    messages: Messages
    prompt_tokens: int
    tools: Tools = ()

    @property
    def answer(self) -> str:
        """The policy's last response."""
        return next((one["content"] for one in reversed(self.messages) if one["role"] == "assistant"), "")

    @property
    def feedback(self) -> str:
        """The environment's observations."""
        return "\n\n".join(one["content"] for one in self.messages if one["role"] != "assistant")


@dataclass(frozen=True)
class TeacherInputs:
    """Adds teacher inputs to the rows of a group.

    Attributes:
        top_ids: number K of the policy's most probable tokens per position; 0: none.
        afterwards: compute these in one more pass over the whole sample, the prompt included, instead of as each token is sampled.
        hints: None: no hints.
    """

    top_ids: int = 0
    afterwards: bool = False
    hints: SelfTeacherConfig | None = None

    @classmethod
    def of(cls, distillation: DistillationConfig) -> TeacherInputs:
        wanted = distillation.enable and not distillation.top_k_from_teacher
        return cls(
            distillation.top_k if wanted else 0,
            distillation.rollout_top_k_recompute,
            distillation.self_teacher if distillation.self_teacher_model else None,
        )

    def check(self, vocabulary: int) -> None:
        """Raise ConfigError where top_ids needs more tokens than a vocabulary of this size has beside the sampled one."""
        if self.top_ids >= vocabulary:
            raise ConfigError(
                f"trainer.distillation.top_k: expected less than the policy's {vocabulary} tokens with top_k_from_teacher=false, found {self.top_ids}"
            )

    @property
    def generated(self) -> int:
        """Number of most probable tokens that the engine returns with each sampled token."""
        return 0 if self.afterwards else self.top_ids

    async def with_top_ids(self, rows: list[Row], engine: Engine) -> list[Row]:
        """Return the rows of a sample, trained ones with the most probable tokens [T, K] at each position but the first, if `afterwards` is set."""
        if not (self.top_ids and self.afterwards):
            return rows
        trained = [row for row in rows if row.loss_mask.any()]
        top_tokens = await asyncio.gather(*(engine.top_tokens(row.token_ids.tolist(), self.top_ids) for row in trained))
        tops = iter(np.array([[-1] * self.top_ids, *top], np.int32) for top in top_tokens)
        return [replace(row, top_ids=next(tops)) if row.loss_mask.any() else row for row in rows]

    def with_hints(
        self, rows: list[list[Row]], rewards: Sequence[float], samples: Sequence[SampleMessages], template: ChatTurns
    ) -> list[list[Row]]:
        """Return the rows of a group's samples, each sample of one row with a hint, if hints are on and another sample succeeded.

        That is the one with the highest reward, the first of several. Where its answer cannot be written as text, there is no hint.
        Wrong hints are of the unsuccessful samples that come next in the group after the sample: a draw, since samples are alike.
        """
        if self.hints is None:
            return rows
        failed = [own[-1].stop_reason == "failed" for own in rows]
        best = sorted(range(len(rows)), key=lambda at: (failed[at], -rewards[at]))
        answered = [at for at in best if not failed[at] and samples[at].answer]
        right = [at for at in answered if rewards[at] >= self.hints.success_reward]
        hinted, known = list[list[Row]](), dict[str, np.ndarray | None]()
        for at, own in enumerate(rows):
            other = next((one for one in right if one != at), None)
            prompt = None
            if other is not None and not failed[at]:
                prompt = self._prompt(samples[at], samples[other].answer, template, known)
            if prompt is not None:
                wrong = sorted(set(answered) - {*right, at}, key=lambda one: (one - at) % len(rows))
                prompts = (self._prompt(samples[at], samples[one].answer, template, known) for one in wrong)
                written = islice((ids for ids in prompts if ids is not None), self.hints.wrong_hints)
                hint = Hint(prompt, samples[at].prompt_tokens, tuple(written))
                own = [replace(row, hint=hint) for row in own]
            hinted.append(own)
        return hinted

    def _prompt(
        self, sample: SampleMessages, answer: str, template: ChatTurns, known: dict[str, np.ndarray | None]
    ) -> np.ndarray | None:
        """Return a sample's prompt with this answer as its hint, [H] int64; None where it has no message of the user, or no text for it.

        Args:
            known: prompts of the group by their messages: in one turn all samples that are shown an answer have the same.
        """
        messages = self._hinted(sample, answer)
        if messages is None:
            return None
        if (key := repr(messages)) not in known:
            known[key] = None
            with suppress(DataError):  # special tokens, which no text has
                known[key] = np.array(template.opening(messages, sample.tools).token_ids, np.int64)
        return known[key]

    def _hinted(self, sample: SampleMessages, answer: str) -> Messages | None:
        """Return the messages of a prompt with the hint in its last message of the user; None where it has none."""
        assert self.hints is not None
        last = max((at for at, one in enumerate(sample.opening) if one["role"] == "user"), default=None)
        if last is None:
            return None
        parts = {"{prompt}": sample.opening[last]["content"], "{answer}": answer, "{feedback}": sample.feedback}
        text = re.sub("|".join(map(re.escape, parts)), lambda match: parts[match[0]], self.hints.template)
        return [*sample.opening[:last], {**sample.opening[last], "content": text}, *sample.opening[last + 1 :]]
