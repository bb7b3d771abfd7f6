"""Reward functions of a user's own are called on a few rows before anything is queued, in a process of their own."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from hpcrl.config import Config
from hpcrl.errors import DataError
from hpcrl.launch.submit import own_rewards
from hpcrl.launch.submit.preflight import check_files
from tests.paths import QUICKSTART

REWARDS = """
import json, os, socket, subprocess, sys, time

import own_helper

def plain(response, environment):
    print("a function may print")
    return float(response.text == response.ground_truth)

def tagged(response, environment):
    return float(response.text == f"<answer>{response.ground_truth}</answer>")

def one(response):
    return 1.0

def keyword(response, environment, *, more):
    return 1.0

def any_number(*given, **more):
    return given[0].n_tokens / given[0].max_tokens

def broken(response, environment):
    own_helper.look(response)
    return 1 / 0

def deep(response, environment):
    return own_helper.look(json.loads("no JSON"))

def text(response, environment):
    return "0.5"

def alike(group, environment):
    assert [sample.reward for sample in group] == [1.0, 0.0] * (len(group) // 2) and len(group) > 1
    assert all(bool(sample.text) == bool(sample.reward) for sample in group)
    return [sample.n_tokens / sample.max_tokens for sample in group]

def crooked(group, environment):
    return own_helper.look(1 / len(group[1].text))

def few(group, environment):
    return [1.0]

def judged(response, environment):
    socket.create_connection(("127.0.0.1", 1), timeout=5)

def endless(response, environment):
    while response.text:
        time.sleep(0.01)
    return 0.0

def leaves(response, environment):
    left = subprocess.Popen(["sleep", "600"], start_new_session=True)
    open(__file__ + ".left", "w").write(str(left.pid))
    os._exit(3)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "own_scores.py").write_text(REWARDS)
    (tmp_path / "own_helper.py").write_text("def look(what):\n    return 0.0\n")
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row("spam", n)) + "\n" for n in range(6)))
    return tmp_path


def row(prompt: str, truth: Any) -> dict[str, Any]:
    return {"prompt": f"{prompt} {truth}", "reward_spec": {"ground_truth": f"t{truth}"}}


def checked(folder: Path, *rewards: str, data: str = "rows.jsonl", beside: str = "", **others: str) -> list[str]:
    """Return the warnings that name a reward, an answer or a ground truth."""
    weights = ", ".join(f'"own_scores:{name}" = 1.0' for name in rewards) + (f", {beside}" if beside else "")
    given = [
        f'python_path=["{folder}"]', f'data.train_data=["{folder / data}"]', "data.val_data=[]", "trainer.eval_interval=0",
        "trainer.train_batch_size=1", "trainer.policy_mini_batch_size=1", "environment.env_class=",
        f"environment.reward_function={{{weights}}}", *(f"{name}={value}" for name, value in others.items()),
    ]  # fmt: skip
    found = check_files(Config.from_toml([QUICKSTART], given))
    return [line for line in found if any(word in line for word in ("reward", "answer", "ground truth"))]


def test_functions_that_reward_the_ground_truth_are_no_matter(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert checked(folder, "plain", "any_number") == [], "one of several rewards compares"
    assert checked(folder, "any_number", beside="direct_math = 1.0") == []
    assert "a function may print" not in capfd.readouterr().out


def test_a_right_answer_that_is_worth_nothing_is_a_warning_with_the_form_that_is(folder: Path) -> None:
    file = folder / "rows.jsonl"
    assert checked(folder, "tagged") == [
        f'environment.reward_function: the right answer is worth 0.0 to own_scores:tagged: the ground truth "t0" as the response to row 0 of '
        f'{file}, where an empty answer is worth 0.0; written as "<answer>t0</answer>" it is worth 1.0'
    ]


@pytest.mark.parametrize(
    ("reward", "told"),
    [
        ("one", "expected a function of two arguments, (response, environment), found one(response): too many"),
        ("keyword", "found keyword(response, environment, *, more): missing a required argument: 'more'"),
        ("broken", "raised ZeroDivisionError: division by zero (own_scores.py:24: return 1 / 0); it was called with an empty answer"),
        ("deep", 'own_scores.py:27: return own_helper.look(json.loads("no JSON")))'),
        ("text", "reward 'own_scores:text': '0.5'; expected a finite number of at most 1e+30; it was called with an empty answer"),
    ],
)  # fmt: skip
def test_a_function_that_ends_the_run_is_refused(folder: Path, reward: str, told: str) -> None:
    with pytest.raises(DataError) as caught:
        checked(folder, reward)
    assert told in str(caught.value)
    assert str(caught.value).startswith("environment.reward_function")
    assert str(caught.value).count("own_scores:") == 1, "the same error of other rows is not repeated"


GROUP = "environment.group_reward_function"


def test_rewards_of_groups_are_called_with_a_group(folder: Path) -> None:
    assert checked(folder, "plain", **{GROUP: '{own = 1.0, "own_scores:alike" = 1.0}'}) == []


@pytest.mark.parametrize(
    ("reward", "told"),
    [
        ("one", "expected a function of two arguments, (group, environment), found one(response)"),
        ("few", "one for each sample, found [1.0]; it was called with 8 samples"),
        ("crooked", "division by zero (own_scores.py:38: return own_helper.look(1 / len(group[1].text))); it was called with 8 samples of row 0"),
    ],
)  # fmt: skip
def test_a_reward_of_groups_that_fails_is_refused(folder: Path, reward: str, told: str) -> None:
    with pytest.raises(DataError) as caught:
        checked(folder, "plain", **{GROUP: f'{{"own_scores:{reward}" = 1.0}}'})
    assert told in str(caught.value)
    assert str(caught.value).startswith(GROUP)


def test_what_this_machine_lacks_is_a_warning(folder: Path) -> None:
    (said,) = checked(folder, "judged")
    assert "raised ConnectionRefusedError" in said
    assert said.endswith("This machine may lack what the nodes have")


def test_calls_may_end_their_process_and_are_bounded_in_time(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (said,) = checked(folder, "leaves")
    assert "ended with status 3; see the output above; the last was own_scores:leaves with an empty answer" in said
    left = (folder / "own_scores.py.left").read_text()
    assert not Path("/proc", left).exists(), "what it has started in a session of its own ends too"
    monkeypatch.setattr(own_rewards, "_SECONDS", 0.1)  # before anything is called
    (said,) = checked(folder, "endless")
    assert said.endswith("the process that calls reward functions on a few rows did not end within 0.1 s")


@pytest.mark.faults_slow
def test_the_call_that_does_not_end_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own_rewards, "_SECONDS", 15.0)
    began = time.monotonic()
    (said,) = checked(folder, "endless")
    assert time.monotonic() - began < 60
    assert 'did not end within 15 s; the last was own_scores:endless with the ground truth "t0"' in said


def test_rows_without_a_ground_truth_are_reported(folder: Path) -> None:
    """The people's case: `answer` in the place of `ground_truth`."""
    rows = [{"prompt": "p", "reward_spec": {"answer": "81"}}, row("q", 1)]
    (folder / "bad.jsonl").write_text("".join(json.dumps(each) + "\n" for each in rows))
    (said,) = checked(folder, "plain", data="bad.jsonl")
    assert said.startswith(f"data.train_data: 1 of the first 2 rows of {folder / 'bad.jsonl'} have no ground truth")


def test_evaluation_has_its_own_and_the_same_check_is_made_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    evaluates = {
        "data.val_data": f'["{folder / "rows.jsonl"}"]', "trainer.eval_interval": "1",
        "environment.eval_reward_function": '{"own_scores:text" = 1.0}',
    }  # fmt: skip
    with pytest.raises(DataError, match=r"^environment.eval_reward_function: reward 'own_scores:text'"):
        checked(folder, "plain", **evaluates)
    assert checked(folder, "plain") == []
    monkeypatch.setattr(own_rewards, "_calls", lambda _: pytest.fail("called again"))
    assert checked(folder, "plain", **{"trainer.policy.optimizer_config.lr": "1e-3"}) == []
