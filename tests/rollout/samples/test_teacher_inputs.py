"""Hints: whose answer is shown to whom, and how the prompt then reads."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer

from hpcrl.config.sections.distillation import DistillationConfig, SelfTeacherConfig
from hpcrl.config.validate import build
from hpcrl.data.chat.prompt_tokens import ChatTurns
from hpcrl.data.chat.template import Tools
from hpcrl.data.vision.reader import Context
from hpcrl.envs.base import Messages
from hpcrl.errors import ConfigError, DataError
from hpcrl.rollout.teacher_inputs import SampleMessages, TeacherInputs
from hpcrl.types import Row
from tests.rollout.material import QUICKSTART

TEMPLATE = ChatTurns(AutoTokenizer.from_pretrained(QUICKSTART), {})
HINTS = SelfTeacherConfig(model="policy", template="{prompt}{answer}{feedback}", success_reward=1.0)
OPENING = [{"role": "system", "content": "ab"}, {"role": "user", "content": "sort: bca"}]


def told(answer: str, *feedback: str) -> SampleMessages:
    said = [{"role": "user", "content": text} for text in feedback]
    return SampleMessages(OPENING, [*said, {"role": "assistant", "content": answer}], 9)


def row(stop_reason: str = "stop") -> Row:
    zeros = np.zeros(12, np.float32)
    return Row(np.zeros(12, np.int64), zeros, zeros, zeros.astype(np.int32), zeros, stop_reason)  # type: ignore[arg-type]


def shown(
    rewards: Sequence[float], answers: Sequence[str], failed: int | None = None, wrong_hints: int = 0
) -> list[str | None]:
    """Return what each sample is shown of others, of those that it is shown something; behind a space what wrong hints show."""
    rows = [[row("failed" if at == failed else "stop")] for at in range(len(rewards))]
    hints = replace(HINTS, wrong_hints=wrong_hints)
    found = TeacherInputs(hints=hints).with_hints(rows, rewards, [told(answer) for answer in answers], TEMPLATE)
    prompts = [None if (hint := own[0].hint) is None else (hint.token_ids, *hint.wrong) for own in found]
    texts = [None if own is None else [TEMPLATE.decoded(ids.tolist()) for ids in own] for own in prompts]
    return [None if own is None else " ".join(re.sub(r".*sort: bca", "", text) for text in own) for own in texts]


def test_each_is_shown_the_best_answer_of_another() -> None:
    assert shown([0.0, 1.0, 2.0], ["a", "b", "c"]) == ["c", "c", "b"]
    assert shown([1.0, 0.5, 1.0], ["a", "b", "c"]) == ["c", "a", "a"]


def test_without_a_success_of_another_there_is_no_hint() -> None:
    assert shown([0.9, 0.0], ["a", "b"]) == [None, None]
    assert shown([0.0, 1.0], ["a", "b"]) == ["b", None]
    assert shown([1.0, 0.0], ["", "b"]) == [None, None], "nothing was said"
    assert shown([1.0, 0.0, 0.0], ["a", "b", "c"], failed=0) == [None, None, None]
    assert shown([0.0, 1.0], ["a", "b"], failed=0) == [None, None], "it is not trained"


def test_wrong_hints_are_the_next_unsuccessful_answers() -> None:
    answers = ["a", "b", "c", "", "e"]
    assert shown([0.0, 1.0, 0.5, 0.9, 0.0], answers, wrong_hints=2) == ["b c e", None, "b e a", "b e a", "b a c"]
    assert shown([0.0, 1.0, 1.0, 1.0, 0.0], answers, wrong_hints=3) == ["b e", "c e a", "b e a", "b e a", "b a"]
    assert shown([0.0, 1.0, 0.5, 0.9, 0.0], answers, failed=2, wrong_hints=1) == ["b e", None, None, "b e", "b a"]
    assert shown([0.0, 0.0, 0.5, 0.9, 0.0], answers, wrong_hints=4) == [None] * 5, "no answer is right"


def test_a_prompt_with_a_hint_is_made_once_for_all_that_are_shown_it() -> None:
    """Rewriting each for each sample would hold up the worker, whose other groups generate meanwhile."""
    teacher = TeacherInputs(hints=replace(HINTS, wrong_hints=3))
    answers = [told(answer) for answer in ("a", "b", "c", "d", "e")]
    rows = teacher.with_hints([[row()] for _ in answers], [1.0, 0.0, 0.0, 0.0, 0.0], answers, TEMPLATE)
    hints = [hint for own in rows if (hint := own[0].hint) is not None]
    assert len(hints) == 4
    assert len({id(ids) for hint in hints for ids in (hint.token_ids, *hint.wrong)}) == 5, "one right, four wrong"


def test_a_hint_takes_the_place_of_the_prompt() -> None:
    rows = TeacherInputs(hints=HINTS).with_hints(
        [[row()], [row()]], [1.0, 0.0], [told("abc"), told("c", "aa", "bb")], TEMPLATE
    )
    assert rows[0][0].hint is None
    hint = rows[1][0].hint
    assert hint is not None
    assert hint.replaces == 9
    expected = [OPENING[0], {"role": "user", "content": "sort: bcaabcaa\n\nbb"}]
    assert hint.token_ids.tolist() == TEMPLATE.opening(expected).token_ids


def test_what_answers_look_like_templates_is_text() -> None:
    """Each place of the template is filled once."""
    teacher_inputs = TeacherInputs(hints=replace(HINTS, template="{answer}{prompt}"))
    others = [told("{prompt}{feedback}"), told("c", "aa")]
    hint = teacher_inputs.with_hints([[row()], [row()]], [1.0, 0.0], others, TEMPLATE)[1][0].hint
    assert hint is not None
    expected = [OPENING[0], {"role": "user", "content": "{prompt}{feedback}sort: bca"}]
    assert hint.token_ids.tolist() == TEMPLATE.opening(expected).token_ids


def test_without_a_message_of_the_user_there_is_no_hint() -> None:
    alone = replace(told("a"), opening=OPENING[:1])
    rows = TeacherInputs(hints=HINTS).with_hints([[row()], [row()]], [1.0, 0.0], [alone, alone], TEMPLATE)
    assert [own[0].hint for own in rows] == [None, None]


def test_what_cannot_be_given_as_text_is_not_shown() -> None:
    class Refusing(ChatTurns):
        def opening(self, messages: Messages, tools: Tools = ()) -> Context:  # noqa: ARG002
            raise DataError(f"a special token in {messages}")

    template = Refusing(AutoTokenizer.from_pretrained(QUICKSTART), {})
    rows = TeacherInputs(hints=HINTS).with_hints([[row()], [row()]], [1.0, 1.0], [told("a"), told("b")], template)
    assert [own[0].hint for own in rows] == [None, None]


def test_what_settings_want() -> None:
    def wanted(**distillation: Any) -> TeacherInputs:
        return TeacherInputs.of(build(DistillationConfig, {"enable": True, **distillation}))

    assert wanted(model_path="t", top_k=4) == TeacherInputs()
    assert wanted(model_path="t", top_k=4, top_k_from_teacher=False).generated == 4
    again = wanted(model_path="t", top_k=4, top_k_from_teacher=False, rollout_top_k_recompute=True)
    assert (again.top_ids, again.generated) == (4, 0)
    assert wanted(self_teacher={"model": "ema"}).hints == SelfTeacherConfig(model="ema")
    with pytest.raises(ConfigError, match=r"expected less than the policy's 4 tokens .*, found 4"):
        again.check(4)
    again.check(5)


def test_where_nobody_wants_hints_rows_stay_as_they_are() -> None:
    rows = [[row()], [row()]]
    assert TeacherInputs().with_hints(rows, [1.0, 1.0], [told("a"), told("b")], TEMPLATE) is rows
