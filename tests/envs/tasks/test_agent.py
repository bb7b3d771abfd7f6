"""A program of the user's as an environment: what it is given, what is taken from it, and that nothing of it stays."""

from __future__ import annotations

import json
import os
import tempfile
import threading
import time
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from hpcrl.config import EnvironmentConfig
from hpcrl.config.sections.environment import AgentConfig, SkyRLGymConfig
from hpcrl.envs.agents.score import LONGEST_SCORE
from hpcrl.envs.base import Endpoint, Turn
from hpcrl.envs.registry import common_extras, make_environment
from hpcrl.envs.tasks.agent import Agent
from hpcrl.errors import DataError, UserCodeError

MESSAGES = [{"role": "user", "content": "sort: cba — é"}]
KEY = "the-key-of-this-sample"
PAYS = "echo '{\"reward\": 0.5}' > $HPCRL_REWARD"


def endpoint(ended: threading.Event | None = None, said: str = "") -> Endpoint:
    return Endpoint("http://127.0.0.1:9/v1", KEY, "policy", ended or threading.Event(), lambda: said, Future)


def agent(script: str, **settings: Any) -> Agent:
    gym = SkyRLGymConfig(agent=AgentConfig(command=["sh", "-c", script], **settings))
    row = {"level": 3, "reward_spec": {"ground_truth": "abc"}}
    made = make_environment("agent", {**common_extras(EnvironmentConfig(skyrl_gym=gym, custom={"a": 1}), 4), **row})
    assert isinstance(made, Agent)
    return made


def played(script: str, said: str = "", **settings: Any) -> Turn:
    return agent(script, **settings).play(MESSAGES, endpoint(said=said))


def homes() -> list[Path]:
    return sorted(Path(tempfile.gettempdir()).glob("hpcrl-program-*"))


def running(mark: str) -> list[int]:
    """Return the processes that have a word among their arguments."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().split(b"\0")
        except OSError:
            continue
        found += [int(path.parent.name)] * (mark.encode() in words)
    return found


def test_what_a_program_is_given(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HPCRL_ATTEMPT", "1")
    monkeypatch.setenv("REMOTE_REWARD_TOKEN", "secret")
    monkeypatch.setenv("http_proxy", "http://proxy:3128")
    monkeypatch.setenv("no_proxy", "intern")
    script = f"env > {tmp_path}/env; cat $HPCRL_ROW > {tmp_path}/row; pwd > {tmp_path}/pwd; ls -A > {tmp_path}/ls; "
    script += f"tr '\\0' ' ' < /proc/$PPID/cmdline > {tmp_path}/supervisor; stat -c %a $(dirname $HPCRL_ROW) > {tmp_path}/mode; {PAYS}"
    assert played(script) == Turn([], 0.5, True)
    variables = dict(line.partition("=")[::2] for line in (tmp_path / "env").read_text().splitlines())
    assert variables["OPENAI_BASE_URL"] == "http://127.0.0.1:9/v1"
    assert variables["ANTHROPIC_BASE_URL"] == "http://127.0.0.1:9"
    assert variables["ANTHROPIC_API_KEY"] == variables["OPENAI_API_KEY"]
    assert variables["OPENAI_API_KEY"] == KEY
    assert variables["HPCRL_MODEL"] == "policy"
    assert variables["no_proxy"] == variables["NO_PROXY"] == "intern,127.0.0.1"
    assert "secret" not in variables.values()
    assert sorted(name for name in variables if name.startswith("HPCRL")) == [
        "HPCRL_MODEL",
        "HPCRL_REWARD",
        "HPCRL_ROW",
    ]
    row = {"level": 3, "reward_spec": {"ground_truth": "abc"}, "max_turns": 4, "custom": {"a": 1}, "prompt": MESSAGES}
    assert json.loads((tmp_path / "row").read_text()) == row
    assert ((tmp_path / "ls").read_text(), (tmp_path / "mode").read_text().strip()) == ("", "700")
    assert (tmp_path / "pwd").read_text().strip().endswith("/work")
    supervisor = (tmp_path / "supervisor").read_text()
    assert "supervisor.py" in supervisor
    assert KEY not in supervisor
    assert KEY not in repr(endpoint())
    assert homes() == []


def test_python_is_that_of_the_run() -> None:
    assert played(f"python -c 'import hpcrl, sys' && {PAYS}").reward == 0.5


def test_rewards_of_a_program() -> None:
    assert played('echo \'{"reward": -1, "metrics": {"turns": 3}}\' > $HPCRL_REWARD') == Turn(
        [], -1.0, True, {"turns": 3}
    )
    assert [played(f"exit {code}", reward="exit_code").reward for code in (0, 1)] == [1.0, 0.0]
    judged = {"reward_function": {"single_choice": 2.0}}
    assert played("true", "<answer>abc</answer>", **judged) == Turn([], 2.0, True, {"single_choice": 1.0})
    assert played("true", "<answer>b</answer>", **judged).reward == 0.0
    with pytest.raises(UserCodeError, match="exit code 3: so what"):
        played("echo so what; exit 3", **judged)


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("true", "wrote no reward"),
        ("mkdir $HPCRL_REWARD", "expected JSON such as"),
        ("mkfifo $HPCRL_REWARD", "expected JSON such as"),
        ("ln -s /etc/hostname $HPCRL_REWARD", "wrote no reward"),
        ("echo half > $HPCRL_REWARD", "found 'half"),
        ("echo '[1]' > $HPCRL_REWARD", "expected JSON"),
        ("echo '{}' > $HPCRL_REWARD", "expected JSON"),
        ("echo '{\"reward\": true}' > $HPCRL_REWARD", "expected JSON"),
        ("echo '{\"reward\": NaN}' > $HPCRL_REWARD", "expected JSON"),
        ('echo \'{"reward": 1, "metrics": {"": 2}}\' > $HPCRL_REWARD', "expected JSON"),
        ('echo \'{"reward": 1, "metrics": {"a": "b"}}\' > $HPCRL_REWARD', "expected JSON"),
        (f"head -c {LONGEST_SCORE + 1} /dev/zero > $HPCRL_REWARD", "expected JSON"),
        (f"{PAYS}; echo what went wrong; exit 7", "ended with exit code 7: what went wrong"),
        ("kill -9 $$", "ended with exit code 137: it printed nothing"),
    ],
)
def test_a_program_without_a_reward_has_failed(script: str, words: str) -> None:
    with pytest.raises(UserCodeError, match=words):
        played(script)
    assert homes() == []


def test_a_key_that_a_program_prints_is_not_repeated() -> None:
    with pytest.raises(UserCodeError, match=r"exit code 3: my key is …$"):
        played("echo my key is $OPENAI_API_KEY; exit 3")


def test_a_program_that_is_not_there() -> None:
    gym = SkyRLGymConfig(agent=AgentConfig(command=["no-such-program"]))
    made = make_environment("agent", common_extras(EnvironmentConfig(skyrl_gym=gym), 4))
    assert isinstance(made, Agent)
    with pytest.raises(UserCodeError, match="exit code 127: no-such-program: No such file"):
        made.play(MESSAGES, endpoint())


def test_rows_without_what_a_reward_compares_with_are_refused() -> None:
    gym = SkyRLGymConfig(agent=AgentConfig(command=["true"], reward_function={"gsm8k": 1.0}))
    with pytest.raises(DataError):
        make_environment("agent", common_extras(EnvironmentConfig(skyrl_gym=gym), 4))


ORPHANS = "(setsid sleep {mark} &) ; setsid sh -c 'trap \"\" TERM HUP; sleep {mark}' & sleep {mark} &"


def test_what_a_program_leaves_behind_is_ended() -> None:
    """Children in its group, orphans in sessions of their own, and such as ignore signals."""
    mark = f"98{os.getpid()}"
    assert played(f"{ORPHANS.format(mark=mark)} sleep 0.1; {PAYS}").reward == 0.5
    assert running(mark) == []


def test_a_program_that_kills_its_supervisor_is_ended_with_its_group() -> None:
    mark, ended = f"96{os.getpid()}", threading.Event()
    threading.Timer(0.5, ended.set).start()
    with pytest.raises(UserCodeError, match="its program was ended"):
        agent(f"kill -9 $PPID; sleep {mark} & sleep {mark}").play(MESSAGES, endpoint(ended))
    deadline = time.monotonic() + 10  # nobody waits for them, and a process that is killed ends a moment later
    while running(mark) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert running(mark) == []


def test_a_program_is_ended_with_all_it_started_when_its_sample_is_over() -> None:
    mark, ended = f"97{os.getpid()}", threading.Event()
    timer = threading.Timer(0.5, ended.set)
    timer.start()
    begun = time.monotonic()
    with pytest.raises(UserCodeError, match="its program was ended"):
        agent(f"trap '' TERM; {ORPHANS.format(mark=mark)} cd ..; chmod 000 work; sleep {mark}").play(
            MESSAGES, endpoint(ended)
        )
    assert 0.4 < time.monotonic() - begun < 5
    assert running(mark) == []
    assert homes() == []


def test_a_program_that_prints_without_end_is_heard_to_its_end() -> None:
    with pytest.raises(UserCodeError, match=r"(?s)exit code 1: .{300,400}the end$"):
        played("yes | head -c 3000000; echo the end; exit 1")
