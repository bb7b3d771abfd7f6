"""An agent program of the user's, which knows nothing of training: it asks the policy as it would ask OpenAI."""

from __future__ import annotations

import json
import os
import stat
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from hpcrl.config.sections.environment import AgentConfig
from hpcrl.envs.base import AgentEnvironment, Endpoint, Messages, Turn
from hpcrl.envs.rewards.response import Response, truth_of
from hpcrl.envs.rewards.weighted import GROUND_TRUTHS, WeightedRewards
from hpcrl.envs.tools.python import discard_tree
from hpcrl.envs.tools.supervised import run_supervised
from hpcrl.errors import UserCodeError
from hpcrl.types import LARGEST, is_name

LONGEST_FILE = 1 << 16
"""Bytes of a reward file."""

_SETTING = "environment.skyrl_gym.agent"
_KEPT_BACK = ("HPCRL_", "REMOTE_REWARD_")


class Agent(AgentEnvironment):
    """Let a program of your own play: it asks the policy as an OpenAI client does.

    The program is started for each sample in an empty directory of its own, and finds in its environment

        OPENAI_BASE_URL, OPENAI_API_KEY   where the policy answers, and the key of this sample
        HPCRL_MODEL                       the policy's name in requests
        HPCRL_ROW                         a JSON file: the columns of the row, with its messages as `prompt`
        HPCRL_REWARD                      the JSON file that it is to write: `reward`, and if it likes `metrics`, an object of numbers

    Args:
        extras: the row; `reward_spec.ground_truth` where `agent.reward_function` compares with it.

    Raises:
        DataError: the row lacks a ground truth.
    """

    def __init__(self, extras: Mapping[str, Any]) -> None:
        self._config: AgentConfig = extras["skyrl_gym"].agent
        self._environment = extras["environment"]
        self._row = {name: value for name, value in extras.items() if not is_dataclass(value)}
        for name in self._config.reward_function:
            if name in GROUND_TRUTHS:
                GROUND_TRUTHS[name](truth_of(extras))

    def play(self, messages: Messages, endpoint: Endpoint) -> Turn:
        """Run the program to its end.

        Raises:
            UserCodeError: it failed, or left no reward.
        """
        home = Path(tempfile.mkdtemp(prefix="hpcrl-program-"))
        try:
            work, row, reward = home / "work", home / "row.json", home / "reward.json"
            work.mkdir()
            row.write_text(json.dumps({**self._row, "prompt": messages}, ensure_ascii=False), encoding="utf-8")
            files = {"HPCRL_ROW": str(row), "HPCRL_REWARD": str(reward)}
            ran = run_supervised(self._config.command, variables(endpoint) | files, work, endpoint.ended)
            if ran.code is None:
                raise UserCodeError("its program was ended")
            if self._config.reward == "exit_code" and not self._config.reward_function:
                return Turn([], float(ran.code == 0), done=True)
            if ran.code != 0:
                raise UserCodeError(
                    f"its program ended with exit code {ran.code}: {ran.output or 'it printed nothing'}"
                )
            return self._judged(messages, endpoint) if self._config.reward_function else _reward(reward)
        finally:
            discard_tree(home)

    def _judged(self, messages: Messages, endpoint: Endpoint) -> Turn:
        weights = self._config.reward_function
        response = Response(
            text=endpoint.last_text(), ground_truth=truth_of(self._row), messages=messages, extras=self._row
        )
        return WeightedRewards(f"{_SETTING}.reward_function", weights, self._environment)(response)


def variables(endpoint: Endpoint) -> dict[str, str]:
    """Return the environment of a program that asks at an endpoint: this process's own, without what concerns the run.

    `python` is the Python of the run, and no proxy stands between the program and the policy.
    """
    own = {name: value for name, value in os.environ.items() if not name.startswith(_KEPT_BACK)}
    direct = ",".join(filter(None, [own.get("no_proxy") or own.get("NO_PROXY"), urlsplit(endpoint.base_url).hostname]))
    path = os.pathsep.join([os.path.dirname(sys.executable), own.get("PATH", os.defpath)])
    asked = {"OPENAI_BASE_URL": endpoint.base_url, "OPENAI_API_KEY": endpoint.key, "HPCRL_MODEL": endpoint.model}
    return {**own, "PATH": path, "no_proxy": direct, "NO_PROXY": direct, **asked}


def _reward(path: Path) -> Turn:
    """Return what a program wrote.

    Raises:
        UserCodeError: there is no such file, or it is not as expected.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        raise UserCodeError(f"its program wrote no reward into the file of HPCRL_REWARD ({error.strerror})") from error
    try:
        regular = stat.S_ISREG(os.fstat(descriptor).st_mode)
        content = os.read(descriptor, LONGEST_FILE + 1) if regular else b""
    finally:
        os.close(descriptor)
    try:
        found = json.loads(content) if len(content) <= LONGEST_FILE else None
    except (ValueError, RecursionError):
        found = None
    if isinstance(found, dict) and _is_number(found.get("reward")) and _are_metrics(found.get("metrics", {})):
        return Turn([], float(found["reward"]), done=True, metrics=found.get("metrics", {}))
    raise UserCodeError(
        'the file of HPCRL_REWARD: expected JSON such as {"reward": 1.0, "metrics": {"turns": 3}}, found '
        f"{content[:80].decode(errors='replace')!r}"
    )


def _are_metrics(value: Any) -> bool:
    return isinstance(value, dict) and all(is_name(name) and _is_number(one) for name, one in value.items())


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and -LARGEST <= value <= LARGEST
