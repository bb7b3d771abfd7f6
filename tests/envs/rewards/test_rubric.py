"""Rubrics as rewards with a weight: a judge grades responses beside other rewards, and whole samples beside their environment's."""

from __future__ import annotations

import asyncio
import re
import threading
from typing import Any

import pytest

from hpcrl.config import EnvironmentConfig
from hpcrl.config.sections.environment import LLMJudgeConfig, SkyRLGymConfig
from hpcrl.envs.rewards.grouped import WeightedGroupRewards
from hpcrl.envs.rewards.response import GroupSample, Response
from hpcrl.envs.rewards.weighted import WeightedRewards
from hpcrl.errors import DataError, ServiceError
from hpcrl.rollout.threads import CallThreads
from tests.envs.server import Asked, serving
from tests.envs.tasks.test_llm_judge import chat

PROMPT = [{"role": "user", "content": "2 + 2?"}]
CRITERIA = [{"criterion": "It is polite.", "weight": 3}, {"criterion": "It is short."}]
ANSWER = re.compile(r"The answer:\n\n\[(\w+)\]\n(.*)\n\[\1\]", re.DOTALL)


def environment(url: str, **custom: Any) -> EnvironmentConfig:
    judge = LLMJudgeConfig(model="judge-7b", base_url=url)
    return EnvironmentConfig(skyrl_gym=SkyRLGymConfig(llm_as_a_judge=judge), custom=custom)


def by_length(asked: Asked) -> tuple[int, Any]:
    """Grade politeness by a word, and shortness by letters."""
    system, user = (message["content"] for message in asked.json["messages"])
    (_, answer), *others = ANSWER.findall(user)
    assert not others
    grade = float("please" in answer) if "polite" in system else 1 / len(answer)
    return 200, chat(f"Reasons.\nFinal grade: {grade:.3f}")


def test_a_rubric_counts_beside_a_rule() -> None:
    response = Response(text="#### 4", ground_truth="4", messages=PROMPT, extras={"rubric": CRITERIA})
    with serving(by_length) as server:
        rewards = WeightedRewards("", {"gsm8k": 1.0, "rubric_judge": 0.5}, environment(server.url))
        turn = rewards(response)
    assert turn.metrics == {"gsm8k": 1.0, "rubric_judge": pytest.approx((0 * 3 + 0.167) / 4)}
    assert turn.reward == pytest.approx(1 + 0.5 * 0.167 / 4)
    assert all("user: 2 + 2?" in asked.json["messages"][1]["content"] for asked in server.asked)


def test_a_response_without_a_rubric_is_compared_with_the_ground_truth() -> None:
    with serving(lambda _: (200, chat("Final grade: 0.5"))) as server:
        rewards = WeightedRewards("", {"rubric_judge": 1.0}, environment(server.url))
        assert rewards(Response(text="4", ground_truth=4, messages=PROMPT)).reward == 0.5
    (asked,) = server.asked
    assert "the right answer is: 4" in asked.json["messages"][0]["content"]


def test_each_sample_of_a_group_is_graded_whole() -> None:
    talk = [{"role": "assistant", "content": "4, please"}, {"role": "user", "content": "And?"}]
    group = [
        GroupSample(text="4", reward=1.0, messages=PROMPT, conversation=[{"role": "assistant", "content": "4"}]),
        GroupSample(text="x", reward=0.0, messages=PROMPT, conversation=[*talk, {"role": "assistant", "content": "x"}]),
        GroupSample(text="22", reward=0.5, messages=PROMPT),
    ]
    with serving(by_length) as server:
        rewards = WeightedGroupRewards({"own": 1.0, "rubric_judge": 0.5}, environment(server.url, rubric=CRITERIA))
        found = rewards(group)
    whole = len("assistant: 4, please\n\nuser: And?\n\nassistant: x")
    expected = [1 / 4, (3 + round(1 / whole, 3)) / 4, 0.5 / 4]
    assert [one["rubric_judge"] for one in found if isinstance(one, dict)] == pytest.approx(expected), (
        "also the polite beginning of the second one counts"
    )
    assert len(server.asked) == 6
    assert rewards.added({"own": 9.0, "rubric_judge": 0.5}) == 0.25


def test_an_answer_without_a_grade_costs_one_sample_of_its_group() -> None:
    group = [GroupSample(text=text, reward=1.0, messages=PROMPT) for text in ("4", "silence", "22")]

    def judge(asked: Asked) -> tuple[int, Any]:
        silent = "silence" in asked.json["messages"][1]["content"] and "short" in asked.json["messages"][0]["content"]
        return (200, chat("I cannot say.")) if silent else by_length(asked)

    with serving(judge) as server:
        first, second, third = WeightedGroupRewards({"rubric_judge": 1.0}, environment(server.url, rubric=CRITERIA))(
            group
        )
    assert [first, third] == [{"rubric_judge": 1 / 4}, {"rubric_judge": 0.5 / 4}]
    assert isinstance(second, ServiceError)
    assert re.match(r"group reward 'rubric_judge': judge .*Final grade: X.*I cannot say", str(second))


def test_a_rubric_without_points_names_the_reward() -> None:
    with pytest.raises(DataError, match=r"reward 'rubric_judge': .*with a weight above 0"):
        WeightedRewards("", {"rubric_judge": 1.0}, environment("http://x", rubric=[3]))(Response(text="4"))


@pytest.mark.parametrize("status", [200, 503])
@pytest.mark.parametrize("cancelled", [False, True])
def test_nothing_more_is_asked_for_a_group_that_was_given_up(cancelled: bool, status: int) -> None:
    """Neither about the samples that wait for their turn, nor again about those of which the judge was asked."""
    group = [GroupSample(text=str(number), reward=1.0, messages=PROMPT) for number in range(12)]
    go, over = threading.Event(), threading.Event()

    def judge(_asked: Asked) -> tuple[int, Any]:
        go.wait()
        return status, chat("Final grade: 1")

    with serving(judge) as server:
        rewards = WeightedGroupRewards({"rubric_judge": 1.0}, environment(server.url, rubric="Polite?"))

        def graded() -> None:
            try:
                rewards(group)
            finally:
                over.set()

        async def main() -> None:
            threads = CallThreads(1, 300.0)
            call = threads.call(graded)
            while len(server.asked) < 8:
                await asyncio.sleep(0.01)
            if cancelled:
                call.known.cancel()  # as by the task that awaits it
            else:
                threads.give_up(call, lambda: None)
            go.set()
            assert await asyncio.to_thread(over.wait, 60)

        asyncio.run(main())
    assert len(server.asked) == 8


def test_an_error_ends_the_tries_about_the_other_samples() -> None:
    """Each of them lasts two minutes, in which Ctrl-C too would have to wait."""
    group = [GroupSample(text=f"<{number}>", reward=1.0, messages=PROMPT) for number in range(8)]

    def judge(asked: Asked) -> tuple[int, Any]:
        return (400 if "<0>" in asked.json["messages"][1]["content"] else 503), {}

    with serving(judge) as server:
        with pytest.raises(ServiceError, match="it answered 400"):
            WeightedGroupRewards({"rubric_judge": 1.0}, environment(server.url, rubric="Polite?"))(group)
        assert len(server.asked) < 40
