"""A judge model that compares the samples of a group: what it is asked, which verdicts count, and what its preferences are worth."""

from __future__ import annotations

import re
from typing import Any

import pytest

from hpcrl.config import EnvironmentConfig
from hpcrl.config.sections.environment import LLMJudgeConfig, SkyRLGymConfig
from hpcrl.envs.rewards.pairwise import pairwise_judge
from hpcrl.envs.rewards.response import GroupSample
from hpcrl.errors import ConfigError, ServiceError
from tests.envs.server import Asked, serving
from tests.envs.tasks.test_llm_judge import chat

PROMPT = [{"role": "user", "content": "Say a number."}]
ANSWERS = re.compile(r"Answer \d:\n\n\[\w+\]\n(.*?)\n\[\w+\]", re.DOTALL)


def environment(
    url: str | None, model: str | None = "judge-7b", comparisons: int = 2, **custom: Any
) -> EnvironmentConfig:
    judge = LLMJudgeConfig(model=model, base_url=url, comparisons=comparisons)
    return EnvironmentConfig(skyrl_gym=SkyRLGymConfig(llm_as_a_judge=judge), custom=custom)


def group(*texts: str, **more: Any) -> list[GroupSample]:
    return [GroupSample(text=text, reward=0.0, messages=PROMPT, **more) for text in texts]


def larger(request: Asked) -> tuple[int, Any]:
    """Prefer the larger number."""
    first, second = map(int, ANSWERS.findall(request.json["messages"][1]["content"]))
    return 200, chat(f"Reasons.\nBetter: {'same' if first == second else 1 if first > second else 2}")


@pytest.mark.parametrize("comparisons", [1, 2, 3, 9])
def test_each_sample_is_shown_first_as_often_as_second(comparisons: int) -> None:
    with serving(larger) as server:
        values = pairwise_judge(group("3", "1", "4", "4"), environment(server.url, comparisons=comparisons))
    shown = [ANSWERS.findall(asked.json["messages"][1]["content"]) for asked in server.asked]
    rounds = min(comparisons, 3)
    assert len(shown) == 4 * rounds
    for place in (0, 1):
        assert sorted(pair[place] for pair in shown) == sorted(["3", "1", "4", "4"] * rounds)
    assert sum(values) == pytest.approx(2.0), "half of all comparisons are won"
    if rounds == 3:
        assert values == pytest.approx([1 / 3, 0.0, 5 / 6, 5 / 6])


def test_a_judge_that_prefers_a_place_prefers_no_sample() -> None:
    with serving(lambda _: (200, chat("Better: 1"))) as server:
        assert pairwise_judge(group("3", "1", "4", "5", "9"), environment(server.url)) == [0.5] * 5
        assert pairwise_judge(group("3"), environment(server.url)) == [0.5]
    assert len(server.asked) == 10, "a sample alone is not judged"


@pytest.mark.parametrize(
    ("verdict", "first"),
    [("**Better:** 2", 0.0), ("better = `1`.", 1.0), ("Better: 1\nOn reflection:\nBetter: same", 0.5)],
)
def test_the_last_verdict_counts(verdict: str, first: float) -> None:
    with serving(
        lambda request: (
            200,
            chat(verdict if ANSWERS.findall(request.json["messages"][1]["content"])[0] == "a" else "Better: same"),
        )
    ) as server:
        values = pairwise_judge(group("a", "b"), environment(server.url, comparisons=1))
    assert values == [(first + 0.5) / 2, 1 - (first + 0.5) / 2]


@pytest.mark.parametrize(
    "said", ["", "The first.", "Better: 3", "Better: both", "Better: 1 or 2", "Better: 1\nBetter: it depends"]
)
def test_a_sample_without_any_verdict_is_an_error(said: str) -> None:
    with serving(lambda _: (200, chat(said))) as server:
        found = pairwise_judge(group("a", "b"), environment(server.url))
    assert all(isinstance(one, ServiceError) and "ends with `Better: 1`" in str(one) for one in found)
    assert len(found) == 2


def test_a_comparison_without_a_verdict_is_left_out() -> None:
    """5 is never compared: it costs itself alone. Between 1 and 3 one of two verdicts is missing."""

    def judge(request: Asked) -> tuple[int, Any]:
        shown = ANSWERS.findall(request.json["messages"][1]["content"])
        return (200, chat("I cannot say.")) if "5" in shown or shown == ["1", "3"] else larger(request)

    with serving(judge) as server:
        first, second, third, fourth = pairwise_judge(group("3", "1", "5", "2"), environment(server.url, comparisons=3))
    assert [first, second, fourth] == [1.0, 0.0, 0.5]
    assert isinstance(third, ServiceError)


def test_a_judge_that_does_not_answer_costs_the_group() -> None:
    with serving(lambda _: (400, {})) as server, pytest.raises(ServiceError, match="it answered 400"):
        pairwise_judge(group("a", "b"), environment(server.url))


def test_the_judge_reads_rubric_truth_and_whole_conversations() -> None:
    talk = [
        {"role": "assistant", "content": "Hm?"},
        {"role": "user", "content": "Go on."},
        {"role": "assistant", "content": "7"},
    ]
    with serving(lambda _: (200, chat("Better: same"))) as server:
        pairwise_judge(group("7", "8", ground_truth="7"), environment(server.url))
        pairwise_judge(group("7", "8"), environment(server.url, rubric="Prefer odd numbers {x}."))
        pairwise_judge(group("7", "8", conversation=talk, extras={"rubric": "Prefer talk."}), environment(server.url))
        criteria = [{"criterion": "It is odd.", "weight": 2}, {"criterion": "It is low."}]
        pairwise_judge(group("7", "8", extras={"rubric": criteria}), environment(server.url))
    asked = [request.json["messages"] for request in server.asked]
    assert all("user: Say a number." in user["content"] for _, user in asked)
    assert "agrees better with the right answer: 7\n" in asked[0][0]["content"]
    assert "Prefer odd numbers {x}." in asked[2][0]["content"]
    assert "Prefer talk." in asked[4][0]["content"]
    assert "by this: It is odd. (weight 2); It is low. (weight 1)\n" in asked[6][0]["content"]
    assert "assistant: Hm?\n\nuser: Go on.\n\nassistant: 7" in asked[4][1]["content"]
    assert asked[0][1]["content"] != asked[1][1]["content"], "the mark is another one"


def test_what_it_needs() -> None:
    with pytest.raises(ConfigError, match=r"llm_as_a_judge\.model: required by pairwise_judge"):
        pairwise_judge(group("a", "b"), environment("http://x", None))
