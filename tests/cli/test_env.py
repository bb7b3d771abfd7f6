"""`hpcrl env …` as a user types it: a conversation over a pipe, and what is said of input that cannot be used."""

from __future__ import annotations

import io
import json
import os
import pty
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hpcrl.cli.main import main
from hpcrl.envs.registry import ENVIRONMENTS
from tests.envs.server import Asked, serving
from tests.envs.tasks.test_llm_judge import chat
from tests.paths import ROOT

OWN = '''
class Echo:
    """Says it again."""

    def __init__(self, extras):
        self.extras = extras

    def init(self, messages):
        return [*messages, {"role": "user", "content": f"{self.extras['custom']} {self.extras['max_turns']}"}]

    def step(self, action):
        from hpcrl.envs.base import Turn

        if action == "crash":
            raise KeyError("nothing here")
        return Turn([{"role": "user", "content": f"<{action}>"}], 0.25, action == "end", {"length": len(action)}, action="…")

    def close(self):
        print("closed")
'''


def env(*words: str, said: str | bytes = "", cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run the command with `said` as its input."""
    command = [sys.executable, "-m", "hpcrl.cli.main", "env", *words]
    given = said.encode() if isinstance(said, str) else said
    variables = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, input=given, capture_output=True, check=False, cwd=cwd, env=variables, timeout=60)
    return subprocess.CompletedProcess(command, done.returncode, done.stdout.decode(), done.stderr.decode())


@pytest.fixture
def own(tmp_path: Path) -> Path:
    """A folder with an environment of the user's, rows, and a configuration that names both."""
    (tmp_path / "echoing.py").write_text(OWN)
    rows = [{"question": f"row {number}", "env_class": "chess"} for number in range(3)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "my.toml").write_text(
        'python_path = ["."]\n[data]\ntrain_data = ["./rows.jsonl"]\nprompt_column = "question"\n'
        "[trainer]\neval_interval = 0\n[trainer.policy.model]\npath = 'm'\n[environment.custom]\nloud = true\n"
    )
    return tmp_path


def test_ls_names_all_and_what_they_are_about(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["env", "ls"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == sorted(ENVIRONMENTS)
    assert all(len(line.split()) > 3 for line in lines)
    assert "guess_number      Find a number between two others" in "\n".join(lines)


def test_without_torch() -> None:
    code = (
        "import sys; from hpcrl.cli.main import main; main(['env', 'ls']); main(['env', 'try', 'countdown'])\n"
        "print(sorted(name for name in ('torch', 'transformers', 'pyarrow', 'math_verify') if name in sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], stdin=subprocess.DEVNULL, capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines()[-1] == "[]"


def test_several_turns_from_a_pipe(tmp_path: Path) -> None:
    row = {"prompt": "from 1 to 15", "low": 1, "high": 15, "reward_spec": {"ground_truth": "6"}}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row))
    words = ("try", "guess_number", "--data", str(tmp_path / "rows.jsonl"))
    done = env(*words, said="8\n\nfour\n\n6")
    assert (done.returncode, done.stderr) == (0, "")
    metrics = [
        "reward {}\n  found {}\n  guesses {}\n  valid_guesses {}\n\n".format(*line.split())
        for line in ("0 0 1 1", "0 0 2 0.5", "1 1 3 0.666667")
    ]
    assert done.stdout == (
        f"[user]\nfrom 1 to 15\n\n{metrics[0]}[user]\nLower.\n\n{metrics[1]}[user]\nSay a whole number from 1 to 15.\n\n{metrics[2]}"
        "done after 3 turns, total reward 1\n"
    )
    over = env(*words, said="8\n\n\n\n")
    assert over.returncode == 1
    assert "the input ended before the environment was done, after 3 turns" in over.stderr
    assert over.stdout.count("Say a whole number") == 2, "an empty line is an action too"
    ten = env(*words, said="1\n\n" * 11)
    assert ten.returncode == 0
    assert ten.stdout.endswith("ended by generator.max_turns = 10 after 10 turns, total reward 0\n")


@pytest.mark.parametrize(
    ("said", "reward"),
    [
        ("<think>a\nb</think>\n\\\n<answer>c</answer>\n", 1),
        ("<think>a\r\n</think>\r\n\\\r\n<answer>ü</answer>\r\n\r\n", 1),
        ("<think>a</think>\n\n<answer>c</answer>\n", 0),
    ],
)
def test_an_action_of_several_lines(said: str, reward: int) -> None:
    done = env("try", "format", "--sample", "1", said=said)
    assert done.returncode == 0
    assert f"done after 1 turn, total reward {reward}\n" in done.stdout


def test_a_users_own_with_its_configuration(own: Path) -> None:
    done = env("try", "echoing:Echo", "--config", "my.toml", "--sample", "2", said="hey", cwd=own)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == (
        "[user]\nrow 2\n\n[user]\n{'loud': True} 1\n\n[replaced by]\n…\n\nreward 0.25\n  length 3\n\n"
        "ended by generator.max_turns = 1 after 1 turn, total reward 0.25\nclosed\n"
    )
    done = env("try", "echoing:Echo", "--config", "my.toml", said="crash", cwd=own)
    assert done.returncode == 8
    assert "environment 'echoing:Echo' raised KeyError: 'nothing here'" in done.stderr
    assert done.stdout.endswith("closed\n")


REWARDS = """
def tagged(response, environment):
    assert response.extras["level"] == 3 and response.max_tokens == environment.custom.get("longest", 1024)
    return float(f"<answer>{response.ground_truth}</answer>" in response.text)


def broken(response, environment):
    return 1 / 0
"""


@pytest.fixture
def rewarded(own: Path) -> Path:
    """That folder with reward functions, and rows that they score."""
    (own / "scoring.py").write_text(REWARDS)
    (own / "sums.jsonl").write_text('{"prompt": "2 + 2?", "reward_spec": {"ground_truth": "4"}, "level": 3}\n')
    (own / "scored.toml").write_text(
        "python_path = ['.']\n[data]\ntrain_data = ['./sums.jsonl']\n[generator.sampling_params]\nmax_generate_length = 50\n"
        "[environment]\nreward_function = {'scoring:tagged' = 0.5, direct_math = 0.1}\ncustom = {longest = 50}\n"
    )
    return own


def test_a_reward_function_is_tried_on_a_row(rewarded: Path) -> None:
    shown = "[ground truth]\n4\n\n[user]\n2 + 2?\n\n"
    done = env("try", "scoring:tagged", "--data", "sums.jsonl", said="It is <answer>4</answer>", cwd=rewarded)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"{shown}reward 1\n  scoring:tagged 1\n\ndone after 1 turn, total reward 1\n"
    done = env("try", "--config", "scored.toml", said="<answer>4</answer>\nAnswer: 4", cwd=rewarded)
    assert (done.returncode, done.stderr) == (0, "")
    assert "reward 0.6\n  scoring:tagged 1\n  direct_math 1\n" in done.stdout
    done = env("try", "boxed_math", "--data", "sums.jsonl", said="\\boxed{4}", cwd=rewarded)
    assert done.stdout.endswith("total reward 1\n")
    done = env("try", "scoring:broken", "--data", "sums.jsonl", said="x", cwd=rewarded)
    assert done.returncode == 8
    assert "reward 'scoring:broken' raised ZeroDivisionError: division by zero" in done.stderr


def test_samples_are_compared_as_a_group(rewarded: Path) -> None:
    with (rewarded / "scored.toml").open("a") as file:
        file.write("group_reward_function = {own = 2.0, rank = 1.0, distinct = 0.0}\n")
    said = "<answer>4</answer>\n\nAnswer: 5\n\n<answer>4</answer>\nAnswer: 4"
    done = env("try", "--config", "scored.toml", said=said, cwd=rewarded)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.count("done after 1 turn") == 3
    values = [(0.8, 0.4, 0.0), (-1.2, -0.1, -1.0), (2.2, 0.6, 1.0)]
    shown = [
        f"sample {number} of 3: reward {reward:g}\n  own {own:g}\n  rank {rank:g}\n  distinct 1\n"
        for number, (reward, own, rank) in enumerate(values, 1)
    ]
    assert done.stdout.endswith("\n" + "\n".join(shown))
    assert env("try", "--config", "scored.toml", cwd=rewarded).returncode == 1
    refused = env("try", "rank", "--config", "scored.toml", cwd=rewarded)
    assert "rank compares the samples of a group; leave NAME out" in refused.stderr


def test_a_sample_that_a_judge_does_not_grade_is_shown_as_failed(rewarded: Path) -> None:
    def judge(asked: Asked) -> tuple[int, Any]:
        return 200, chat("Final grade: 0.5" if "good" in asked.json["messages"][1]["content"] else "I cannot say.")

    with serving(judge) as server, (rewarded / "scored.toml").open("a") as file:
        file.write(
            "group_reward_function = {own = 1.0, rubric_judge = 1.0}\n"
            f"[environment.skyrl_gym.llm_as_a_judge]\nmodel = 'j'\nbase_url = '{server.url}'\n"
        )
        file.flush()
        done = env("try", "--config", "scored.toml", said="good\nAnswer: 4\n\nbad", cwd=rewarded)
    assert (done.returncode, done.stderr) == (0, "")
    assert "sample 1 of 2: reward 0.6\n  own 0.1\n  rubric_judge 0.5\n" in done.stdout
    assert "sample 2 of 2 has failed: group reward 'rubric_judge': judge" in done.stdout


def test_without_a_name_the_environment_of_the_configuration_is_tried(own: Path) -> None:
    with (own / "my.toml").open("a") as file:
        file.write("[environment]\nenv_class = 'echoing:Echo'\n")
    (own / "rows.jsonl").write_text('{"question": "row 0"}\n')
    done = env("try", "--config", "my.toml", said="hey", cwd=own)
    assert (done.returncode, done.stderr) == (0, "")
    assert "[user]\nrow 0\n" in done.stdout
    (own / "service.toml").write_text("[environment.remote_reward]\nenable = true\n")
    for words, told in (((), "expected NAME, or --config FILE"), (("--config", "service.toml"), "none is asked here")):
        refused = env("try", *words, cwd=own)
        assert refused.returncode == 2
        assert told in refused.stderr


@pytest.mark.parametrize(
    ("words", "code", "told"),
    [
        (("boxed_math",), 4, "boxed_math has no example rows; name a dataset: --data FILE"),
        (("guess_numbers",), 2, "unknown environment 'guess_numbers'; did you mean guess_number"),
        (("nowhere:Env", "--data", "rows.jsonl"), 2, "cannot import 'nowhere'"),
        (("hpcrl.envs.tasks.rewarded:GSM8K",), 4, "GSM8K has no example rows; name a dataset: --data FILE"),
        (("agent",), 2, "agent asks the policy itself"),
        (("gsm8k", "--sample", "99"), 4, "--sample 99: "),
        (("gsm8k", "--sample", "99"), 4, "has rows 0 to 5"),
        (("gsm8k", "--sample", "-1"), 4, "has rows from 0 on"),
        (("gsm8k", "--sample", "one"), 2, "invalid int value: 'one'"),
        (("gsm8k", "--data", "nowhere.jsonl"), 4, "nowhere.jsonl: no such file"),
        (("gsm8k", "--data", "rows.jsonl"), 4, "no column `prompt`"),
        (("gsm8k", "--config", "my.toml"), 4, "the row needs a ground truth"),
        (("gsm8k", "--config", "nowhere.toml"), 2, "nowhere.toml"),
    ],
)
def test_what_cannot_be_played_is_told(
    own: Path,
    words: tuple[str, ...],
    code: int,
    told: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(own)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"1\n")))
    try:
        found = main(["env", "try", *words])
    except SystemExit as ended:  # argparse's
        found = ended.code
    assert found == code
    assert told in capsys.readouterr().err


def test_input_that_is_no_text() -> None:
    done = env("try", "gsm8k", said=b"#### 4\xff\n")
    assert done.returncode == 4
    assert "hpcrl: an action is UTF-8 text; the input has 0xff in it" in done.stderr


def test_in_a_terminal(tmp_path: Path) -> None:
    outside, inside = pty.openpty()
    command = [sys.executable, "-m", "hpcrl.cli.main", "env", "try", "reverse_word"]
    variables = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, stdin=inside, stdout=subprocess.PIPE, cwd=tmp_path, env=variables) as process:
        os.write(outside, b"ab\ncd\n\n")
        out, _ = process.communicate(timeout=60)
    os.close(inside)
    os.close(outside)
    assert process.returncode == 0
    assert b"\n> reward 0\n\ndone after 1 turn, total reward 0\n" in out


def test_a_configuration_needs_no_more_than_the_tables_that_are_read(own: Path) -> None:
    (own / "part.toml").write_text(
        "python_path = ['.']\n[generator]\nmax_turns = 1\n[trainer]\nmode = 'of another day'\n"
    )
    done = env("try", "gsm8k", "--config", "part.toml", said="#### 1", cwd=own)
    assert done.returncode == 0, done.stderr
    assert "done after 1 turn" in done.stdout
    (own / "wrong.toml").write_text("[generator]\nmax_turn = 1\n")
    done = env("try", "gsm8k", "--config", "wrong.toml", said="#### 1", cwd=own)
    assert (done.returncode, "wrong.toml:2: generator.max_turn: unknown setting" in done.stderr) == (2, True), (
        done.stderr
    )


def test_an_environment_of_the_working_directory_needs_no_configuration(own: Path) -> None:
    (own / "prompts.jsonl").write_text('{"prompt": "say"}\n')
    command = [str(Path(sys.executable).with_name("hpcrl")), "env", "try", "echoing:Echo", "--data", "prompts.jsonl"]
    done = subprocess.run(command, input="end\n\n", capture_output=True, text=True, check=False, cwd=own, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "total reward 0.25" in done.stdout


def test_an_environment_of_skyrl_gym_by_the_name_that_its_rows_have(tmp_path: Path) -> None:
    row = {"prompt": [{"role": "user", "content": "2+3?"}], "env_class": "calc", "reward_spec": {"ground_truth": "5"}}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row))
    (tmp_path / "calc.toml").write_text(
        "data.train_data = ['./rows.jsonl']\ngenerator.max_turns = 3\n[environment]\ncustom.hint = ' Use <calc>.'\n"
        "names.calc = 'tests.envs.skyrl_calc:Calc'\n"
    )
    said = "<calc>2+3</calc> then\n\n<answer>5</answer>\n"
    done = env("try", "calc", "--config", "calc.toml", said=said, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert env("try", "--config", "calc.toml", said=said, cwd=tmp_path).stdout == done.stdout, "the row names it"
    assert done.stdout == (
        "[user]\n2+3? Use <calc>.\n\n[replaced by]\n<calc>2+3</calc>\n\nreward 0.25\n  turns 1\n  used 0\n\n"
        "[user]\n<result>5</result>\n\nreward 1\n  turns 2\n  used 1\n\ndone after 2 turns, total reward 1.25\n"
    )
    unknown = env("try", "clac", "--config", "calc.toml", cwd=tmp_path)
    assert unknown.returncode != 0
    assert "unknown environment 'clac'" in unknown.stderr
    assert "environment.names" in unknown.stderr


ROLES = """
from hpcrl.envs.base import Turn


class Debate:
    def __init__(self, extras):
        self.turns = 0

    def init(self, messages):
        return messages

    def step(self, action):
        self.turns += 1
        if self.turns == 1:
            return Turn([], 0.5, False, role="solver", rewards={"judge": 8.0})
        return Turn([], 1.0, True, role="verifier", rewards={"solver": -0.25}, trained=False)

    def close(self):
        pass
"""


def test_each_turn_has_its_role_and_pays_the_other_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A role that has not acted gets nothing, as in training."""
    (tmp_path / "debating.py").write_text(ROLES)
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": "2 + 2?"}))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"it is 4\n\nright\n")))
    assert main(["env", "try", "debating:Debate", "--data", "rows.jsonl"]) == 0
    told = capsys.readouterr().out
    assert "role solver\nreward 0.5\n  reward of judge 8\n" in told
    assert "role verifier, not trained\nreward 1\n  reward of solver -0.25\n" in told
    assert "done after 2 turns, total reward 1.25" in told
