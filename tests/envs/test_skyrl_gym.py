"""Environments of SkyRL-Gym are played as they are: their constructor, prompts, outputs and metrics."""

from __future__ import annotations

import pytest

from hpcrl.config import EnvironmentConfig
from hpcrl.envs.base import Environment, Turn
from hpcrl.envs.registry import common_extras, environment_class, is_agent, make_environment
from hpcrl.errors import UserCodeError
from tests.envs import skyrl_calc

HERE = "tests.envs.skyrl_calc"
PROMPT = [{"role": "user", "content": "2+3?"}]


def made(name: str = "Calc", **settings: object) -> Environment:
    section = EnvironmentConfig(custom=settings)
    row = {"reward_spec": {"ground_truth": "5"}, "name": "row 1"}
    environment = make_environment(f"{HERE}:{name}", {**common_extras(section, 4), **row})
    assert not is_agent(environment)
    return environment  # type: ignore[return-value]


def test_a_conversation_with_its_tool() -> None:
    environment = made(hint=" Use <calc>.")
    assert environment.init(PROMPT) == [{"role": "user", "content": "2+3? Use <calc>."}]
    assert PROMPT == [{"role": "user", "content": "2+3?"}], "samples of a group share it"
    called = environment.step("Let me see. <calc>2+3</calc> and so on")
    assert called == Turn(
        [{"role": "user", "content": "<result>5</result>"}],
        0.25,
        False,
        {"turns": 1.0, "used": 0.0},
        "Let me see. <calc>2+3</calc>",
    )
    assert environment.step("<answer>5</answer>") == Turn([], 1.0, True, {"turns": 2.0, "used": 1.0})
    skyrl_calc.CLOSED.clear()
    environment.close()
    assert skyrl_calc.CLOSED == ["row 1"]


def test_its_settings_are_read_as_attributes_too() -> None:
    assert made(other_hint=" By hand.").init(PROMPT)[0]["content"] == "2+3? By hand."
    assert made().init(PROMPT) == PROMPT


def test_outputs_of_another_form_are_an_error_that_names_the_expected() -> None:
    environment = made("Unfinished")
    with pytest.raises(UserCodeError, match=r"init returned \[.*expected a tuple \(prompt, metadata\)"):
        environment.init(PROMPT)
    with pytest.raises(
        UserCodeError, match=r"step returned .*expected a dictionary with observations, reward and done"
    ):
        environment.step("5")


def test_environments_of_hpcrl_are_not_taken_for_one() -> None:
    assert environment_class("tests.rollout.environments:CountLetters").__name__ == "CountLetters"
