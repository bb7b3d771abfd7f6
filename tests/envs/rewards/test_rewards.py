"""Each named reward, on what policies say when they are wrong, half right, or right in another way."""

from __future__ import annotations

import sys
import time
from typing import Any

import pytest

from hpcrl.config import EnvironmentConfig
from hpcrl.config.sections.environment import OverlongRewardConfig
from hpcrl.config.sections.functions import COMPARING_REWARDS, IMAGE_REWARDS
from hpcrl.envs.base import user_code
from hpcrl.envs.rewards import weighted
from hpcrl.envs.rewards.numbers import normal_form
from hpcrl.envs.rewards.response import Response, truth_of, truth_text
from hpcrl.envs.rewards.weighted import REWARDS, WeightedRewards
from hpcrl.errors import ConfigError, DataError, UserCodeError
from hpcrl.types import LONGEST_FAILURE

ENVIRONMENT = EnvironmentConfig()
HERE_ALONE = [name for name in REWARDS if not name.endswith("_judge")]  # they ask no model


def value(name: str, text: str, ground_truth: Any = None) -> float:
    return REWARDS[name](Response(text=text, ground_truth=ground_truth), ENVIRONMENT)


def test_the_configuration_knows_these_names() -> None:
    needing = set()
    for name in HERE_ALONE:
        try:
            REWARDS[name](Response(text="x", max_tokens=1), ENVIRONMENT)
        except DataError:
            needing.add(name)
    assert needing == {*COMPARING_REWARDS, *IMAGE_REWARDS, "by_data_source"}


@pytest.mark.parametrize("name", COMPARING_REWARDS)
@pytest.mark.parametrize("truth", [None, "", " \n", True, ["4"], {"answer": 4}])
def test_without_a_ground_truth_nothing_is_compared(name: str, truth: Any) -> None:
    with pytest.raises(DataError, match="the row needs a ground truth, a text or a number"):
        value(name, "4", truth)


@pytest.mark.parametrize("name", [name for name in HERE_ALONE if name not in (*IMAGE_REWARDS, "by_data_source")])
@pytest.mark.parametrize(
    "text", ["", " ", "\n\n", "\x00", "\ufffd\ud800", "<answer>", "\\boxed{", "#### ", "Answer:", "𝟜" * 9]
)
def test_no_text_is_too_odd_to_be_wrong(name: str, text: str) -> None:
    assert value(name, text, "4") in (0.0, -1.0)


@pytest.mark.parametrize(
    ("text", "truth", "expected"),
    [
        ("B", "B", 1),
        (" b\n", "B", 1),
        ("The answer is B", "B", 0),
        ("<answer>B</answer>", "B", 1),
        ("<think>A?</think>\n\n<answer>\n b \n</answer> because", "<answer>B</answer>", 1),
        ("<answer>A</answer><answer>B</answer>", "B", 0),
        ("<answer>A</answer><answer>B</answer>", "A", 1),
        ("<answer><answer>B</answer></answer>", "B", 0),
        ("<answer>B", "B", 0),
        ("</answer>B<answer>", "B", 0),
        ("</answer><answer>B</answer>", "B", 1),
        ("<answer></answer>", "B", 0),
        ("<ANSWER>B</ANSWER>", "B", 0),
        ("<answer>ÉCOLE</answer>", "école", 1),
        ("<answer>4</answer>", 4, 1),
        ("<answer>4.0</answer>", 4, 0),
        ("<think><answer>A</answer>?</think><answer>B</answer>", "B", 1),
        ("<think>A?</think>\nB", "B", 1),
    ],
)
def test_single_choice(text: str, truth: Any, expected: float) -> None:
    assert value("single_choice", text, truth) == expected


GOOD = "<think>{}</think>\n\n<answer>{}</answer>"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (GOOD.format("a", "b"), 1),
        (GOOD.format("", ""), 1),
        (GOOD.format("a\n\nb < c", "x\n\n<b>y</b>"), 1),
        (GOOD.format("a", "b") + "\n", 1),
        (GOOD.format("a", "b") + "\n\n", 0),
        (GOOD.format("a", "b") + " ", 0),
        (" " + GOOD.format("a", "b"), 0),
        (GOOD.format("<think>a", "b"), 0),
        (GOOD.format("a</think>", "b"), 0),
        (GOOD.format("a", "b</answer>\n<answer>c"), 0),
        (GOOD.format("a", "<answer>b"), 0),
        (GOOD.format("a", "b").replace("\n\n", "\n"), 0),
        (GOOD.format("a", "b").replace("\n\n", "\r\n\r\n"), 0),
        (GOOD.format("a", "b").upper(), 0),
        ("<think>a</think>\n\n", 0),
        ("<answer>b</answer>", 0),
        ("<think></answer>", 0),
    ],
)
def test_format(text: str, expected: float) -> None:
    assert value("format", text) == expected


@pytest.mark.parametrize(
    ("text", "truth", "expected"),
    [
        ("6 * 7\n#### 42", "42", 1),
        ("#### 42", "6 * 7 = <<6*7=42>>42\n#### 42", 1),
        ("#### 42", 42, 1),
        ("#### 42", 42.0, 1),
        ("#### 42.", "42", 1),
        ("#### 42.00", "42", 1),
        ("#### 1,234,567", "1234567", 1),
        ("#### 1234567", "#### 1,234,567", 1),
        ("#### -3", "-3", 1),
        ("#### 3", "-3", 0),
        ("#### 0.50", ".5", 1),
        ("42", "42", 0),
        ("####42", "42", 0),
        ("#### $42", "42", 0),
        ("#### forty-two", "42", 0),
        ("#### 42\n#### 43", "42", 1),
        ("#### 42\n#### 43", "43", 0),
        ("#### .,.,", "42", 0),
        ("#### 1.2.3", "1.2", 0),
        ("#### 4" + "0" * 400, "4" + "0" * 400, 1),
        ("#### 4" + "0" * 400, "4" + "0" * 399 + "1", 0),
        ("#### 9007199254740993", "9007199254740992", 0),
        ("#### ４２", "42", 0),
        ("#### 1,234.50", "1234.5", 1),
        ("#### 42%", "42", 1),
        ("#### 42 apples, 7 of them red", "42", 1),
        (r"#### 42\text{ cm}", "42", 1),
        ("**#### 42**", "42", 1),
        ("#### 42/7", "42", 0),
        ("#### 42 / 7", "42", 0),
        ("#### 42 * 7", "42", 0),
        ("#### 1/2", "1", 0),
        ("#### 5 1/2", "5", 0),
        ("#### 5½", "5", 0),
        (r"#### 5\frac{1}{2}", "5", 0),
        ("#### 42^2", "42", 0),
        ("#### 1e3", "1", 0),
        ("#### 10:30", "10", 0),
        ("#### 42-43", "42", 0),
        ("#### 0,7", "7", 0),
        ("#### 3,4", "34", 0),
        ("#### 3,4", "3", 0),
        ("#### 42/7\n#### 42", "42", 0),
        ("<think>#### 41?</think>\n#### 42", "42", 1),
        ("<think>#### 42?</think>\n42", "42", 0),
        ("#### \N{MINUS SIGN}5", "-5", 1),
        ("#### -5", "\N{MINUS SIGN}5", 1),
        ("#### 5", "\N{MINUS SIGN}5", 0),
    ],
)
def test_gsm8k(text: str, truth: Any, expected: float) -> None:
    assert value("gsm8k", text, truth) == expected


@pytest.mark.parametrize("truth", ["forty-two", "42 apples", "nan", "#### x"])
def test_gsm8k_wants_a_number_as_ground_truth(truth: str) -> None:
    with pytest.raises(DataError, match="expected a number as ground truth"):
        value("gsm8k", "no number either", truth)


@pytest.mark.parametrize(
    ("text", "truth", "expected"),
    [
        ("Answer: 42", "42", 1),
        ("so the ANSWER :   42  ", 42, 1),
        ("Answer: 41\nAnswer: 42", "42", 1),
        ("Answer: 42\nAnswer: 41", "42", -1),
        ("42", "42", -1),
        ("Answer:", "42", -1),
        ("Answer:\n42", "42", 1),
        ("Final answer:\n\nAnswer: 42", "42", 1),
        ("The final answer: Answer: 42", "42", 1),
        ("Answer: 3, no, Answer: 42", "42", 1),
        ("Answer: 42\nAnswer: \n", "42", 1),
        ("Answer: 42, or answer : 3", "42", -1),
        ("Answer: $", "42", -1),
        ("Answer: " + "9" * 1001, "9" * 1000, -1),
        ("Answer: 41" + "9" * 2000 + "\nAnswer: 42", "42", 1),
        ("Answer: $x = 1{,}234$", "1,234", 1),
        ("Answer: 1,234,567", "1234567", 1),
        ("Answer: (1,2)", "(1, 2)", 1),
        ("Answer: -7", "7", -1),
        (r"Answer: $\boxed{\frac12}$", r"\frac{1}{2}", 1),
        (r"Answer: \sqrt3", r"\sqrt{3}", 1),
        (r"Answer: 5\text{ cm}", "5", 1),
        (r"Answer: 5 \text{m}^2", "5 square meters", 1),
        (r"Answer: 90^\circ", "90 degrees", 1),
        ("Answer: an apple", "apple", 1),
        ("Answer: Apple", "apple", -1),
        (r"Answer: \boxed{\frac{1}{", "1", -1),
        (r"Answer: \text{Alice and Bob}", r"\text{Alice} \text{ and } \text{Bob}", -1),
        ("answer: " + "9" * 500, "9" * 500, 1),
        ("Answer: π", "π", 1),
        ("Answer: 3,4", "34", -1),
        ("Answer: 3,4", "3, 4", 1),
        ("<think>Answer: 41</think>\nAnswer: 42", "42", 1),
        ("<think>Answer: 42</think>\n42", "42", -1),
        ("Answer: \N{MINUS SIGN}5", "-5", 1),
    ],
)
def test_direct_math(text: str, truth: Any, expected: float) -> None:
    assert value("direct_math", text, truth) == expected


@pytest.mark.parametrize(
    ("truth", "words"),
    [
        ("units", "nothing is left of 'units'"),
        ("x=", "nothing is left of 'x='"),
        ("$$", "nothing is left"),
        ("9" * 1001, "at most 1000 characters, found 1001"),
    ],
)
def test_direct_math_wants_an_answer_as_ground_truth(truth: str, words: str) -> None:
    with pytest.raises(DataError, match=words):
        value("direct_math", "Answer: $", truth)


@pytest.mark.parametrize("name", ["single_choice", "gsm8k", "direct_math", "format"])
@pytest.mark.parametrize(
    "unit",
    [
        "</think>",
        "#### 4 ",
        "#### 4,444",
        "because the value ",
        "$",
        r"\boxed{",
        "answer: ",
        "answer",
        "answer ",
        "Answer:\n",
        r"\text{",
        "#### ",
        "#### 4",
        " ",
    ],
)
def test_a_long_text_is_scored_at_once(name: str, unit: str) -> None:
    """A regular expression keeps Python to itself: all other threads wait for it."""
    text = "Answer: " + (unit * 100_000)[:100_000]
    started = time.process_time()
    assert value(name, text, "42") in (0.0, -1.0)
    assert time.process_time() - started < 0.5


def test_the_normal_form_is_its_own() -> None:
    for answer in (r"\frac{1}{2}", r"2\sqrt{3}", "1234", "(1,2)", "x+1", r"\pi"):
        assert normal_form(answer) == answer


@pytest.mark.parametrize(
    ("n_tokens", "expected"), [(1, 0), (60, 0), (61, -0.05), (80, -1), (99, -1.95), (100, -2), (101, -2), (10**9, -2)]
)
def test_overlong(n_tokens: int, expected: float) -> None:
    environment = EnvironmentConfig(overlong_reward=OverlongRewardConfig(buffer_length=40, penalty_factor=2.0))
    found = REWARDS["overlong"](
        Response(text="what it says is no matter", n_tokens=n_tokens, max_tokens=100), environment
    )
    assert found == pytest.approx(expected)


@pytest.mark.parametrize(
    ("extras", "expected"),
    [
        ({}, None),
        ({"reward_spec": None}, None),
        ({"reward_spec": "4"}, None),
        ({"reward_spec": {"ground_truth": 4}}, 4),
    ],
)
def test_where_the_ground_truth_is(extras: dict[str, Any], expected: Any) -> None:
    assert truth_of(extras) == expected


@pytest.mark.parametrize(
    ("truth", "text"),
    [(None, ""), ("a\x1b", "a\N{REPLACEMENT CHARACTER}"), (["é", 1], '["é", 1]'), ("x" * 9999, "x" * 2000)],
)
def test_the_ground_truth_for_people(truth: Any, text: str) -> None:
    assert truth_text({"reward_spec": {"ground_truth": truth}}) == text


OWN = """
import math

def length(response, environment):
    return len(response.text) * environment.custom["each"]

def yes(response, environment):
    return True

def nothing(response, environment):
    return math.nan

NUMBER = 3
"""


@pytest.fixture
def own_module(tmp_path, monkeypatch):
    (tmp_path / "my_rewards.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    yield
    sys.modules.pop("my_rewards", None)


@pytest.mark.usefixtures("own_module")
def test_ones_own_rewards_count_by_their_weights() -> None:
    weights = {"my_rewards:length": -0.5, "my_rewards:yes": 3, "format": 0.0}
    turn = WeightedRewards("here", weights, EnvironmentConfig(custom={"each": 2}))(Response(text="four"))
    assert turn.metrics == {"my_rewards:length": 8.0, "my_rewards:yes": 1.0, "format": 0.0}
    assert (turn.reward, turn.done) == (-4.0 + 3.0, True)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("gsm8", "environment.reward_function: nothing is called 'gsm8'; did you mean gsm8k"),
        ("chess", "known: single_choice, boxed_math"),
        ("my_rewards:other", "module 'my_rewards' has no function 'other'"),
        ("my_rewards:NUMBER", "has no function 'NUMBER'"),
        ("nowhere:f", "cannot import 'nowhere'"),
    ],
)
@pytest.mark.usefixtures("own_module")
def test_a_wrong_name_is_a_clear_error(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        WeightedRewards("environment.reward_function", {name: 1.0}, ENVIRONMENT)


@pytest.mark.usefixtures("own_module")
def test_a_reward_that_is_no_number() -> None:
    with pytest.raises(UserCodeError, match="reward 'my_rewards:nothing': nan; expected a finite number"):
        WeightedRewards("", {"my_rewards:nothing": 1.0}, ENVIRONMENT)(Response(text=""))


def test_names_of_rewards_need_no_computer_algebra() -> None:
    assert weighted.__name__ in sys.modules
    assert "math_verify" not in sys.modules


def test_an_exception_is_quoted_in_part() -> None:
    """A reward may put a whole response into it, and logs, messages and reports repeat the error."""
    with pytest.raises(UserCodeError) as caught, user_code("reward 'mine'"):
        raise ValueError("x" * 10**6)
    assert str(caught.value) == f"reward 'mine' raised ValueError: {'x' * LONGEST_FAILURE}"
