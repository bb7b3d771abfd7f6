"""The quickstart's reward cannot be had with anything but the right answer."""

import pytest

from hpcrl.envs.tasks.sort_letters import SortLetters
from hpcrl.errors import DataError

PROMPT = [{"role": "user", "content": "sort: gdbca"}]


def environment(answer: str = "abcdg") -> SortLetters:
    return SortLetters({"reward_spec": {"method": "rule", "ground_truth": answer}})


def test_right_answer():
    env = environment()
    assert env.init(PROMPT) == PROMPT
    turn = env.step("abcdg")
    assert (turn.reward, turn.done, turn.observations) == (1.0, True, [])
    assert turn.metrics == {"letters_in_place": 1.0}


@pytest.mark.parametrize(
    ("action", "in_place"),
    [
        ("", 0.0),
        ("abcd", 0.8),
        ("abcdgg", 1.0),  # the end marker is missing and the text runs on
        ("abcdg abcdg", 1.0),
        ("abcdg ", 1.0),
        (" abcdg", 0.0),
        ("The answer: abcdg", 0.0),
        ("ABCDG", 0.0),
        ("abcdG", 0.8),
        ("gdbca", 0.0),
        ("abcgd", 0.6),
        ("a b c d g", 0.2),
        ("<|end|>", 0.0),
    ],
)
def test_everything_else_earns_nothing(action, in_place):
    turn = environment().step(action)
    assert (turn.reward, turn.done) == (0.0, True)
    assert turn.metrics["letters_in_place"] == pytest.approx(in_place)


@pytest.mark.parametrize(("action", "reward"), [("aabbz", 1.0), ("abz", 0.0), ("aabz", 0.0), ("ababz", 0.0)])
def test_a_letter_that_comes_twice_is_wanted_twice(action, reward):
    assert environment("aabbz").step(action).reward == reward


@pytest.mark.parametrize(
    "extras", [{}, {"reward_spec": None}, {"reward_spec": {}}, {"reward_spec": {"ground_truth": ""}}]
)
def test_no_ground_truth_is_an_error_and_not_a_reward(extras):
    with pytest.raises(DataError, match="ground_truth"):
        SortLetters(extras)
