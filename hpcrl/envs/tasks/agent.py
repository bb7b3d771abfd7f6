"""An agent of the user's, which knows nothing of training: it asks the policy as it would ask OpenAI."""

from __future__ import annotations

import json
import os
import stat
import tempfile
from collections.abc import Mapping
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any

from hpcrl.config.sections.environment import AgentConfig
from hpcrl.envs.agents.program import contained, started, variables
from hpcrl.envs.agents.sandboxed import AgentSandbox
from hpcrl.envs.agents.score import EXPECTED, LONGEST_SCORE, read_score
from hpcrl.envs.agents.service import AgentService
from hpcrl.envs.base import AgentEnvironment, Endpoint, Messages, Turn
from hpcrl.envs.rewards.response import Response, truth_of
from hpcrl.envs.rewards.weighted import GROUND_TRUTHS, WeightedRewards
from hpcrl.envs.tools.python import discard_tree
from hpcrl.envs.tools.supervised import run_supervised
from hpcrl.errors import UserCodeError

_HIDDEN = "tests", "solution"  # what a policy that reaches the program's files is not to see
_SETTING = "environment.skyrl_gym.agent"


class Agent(AgentEnvironment):
    """Let an agent of your own play: it asks the policy as an OpenAI client does.

    A program is started for each sample in an empty directory of its own, and finds in its environment

        OPENAI_BASE_URL, OPENAI_API_KEY         where the policy answers, and the key of this sample
        ANTHROPIC_BASE_URL, ANTHROPIC_API_KEY   the same for Anthropic's clients
        HPCRL_MODEL                             the policy's name in requests
        HPCRL_ROW                               a JSON file: the columns of the row, with its messages as `prompt`
        HPCRL_REWARD                            the JSON file that it is to write: `reward`, and if it likes `metrics`, an object of numbers

    Where the row has an `image`, the sample has a sandbox: the program finds the command `sandbox` on its PATH, and HPCRL_SANDBOX. Tests of
    the row decide then, in a fresh sandbox with what was changed.

    A service that keeps agents running gets the same, and answers with the reward or posts it to the endpoint.

    Args:
        extras: the row; `reward_spec.ground_truth` where `agent.reward_function` compares with it.

    Raises:
        DataError: the row lacks a ground truth, or has a task that cannot be read.
    """

    def __init__(self, extras: Mapping[str, Any]) -> None:
        self._config: AgentConfig = extras["skyrl_gym"].agent
        self._environment = extras["environment"]
        self._row = {name: value for name, value in extras.items() if not is_dataclass(value) and name != "sandboxes"}
        given = not self._config.service.url and extras.get("image")
        self._sandbox = AgentSandbox(extras) if given else None
        self._prompt: Messages = []
        if self._sandbox:
            self._row = {name: value for name, value in self._row.items() if name not in _HIDDEN}
        for name in self._config.reward_function:
            if name in GROUND_TRUTHS:
                GROUND_TRUTHS[name](truth_of(extras))

    def init(self, messages: Messages) -> Messages:
        """Start the sandbox of the sample, if it has one.

        Raises:
            ConfigError: the run has no sandboxes.
        """
        if self._sandbox:
            self._sandbox.start()
        self._prompt = messages
        return messages

    def play(self, messages: Messages, endpoint: Endpoint) -> Turn:
        """Have the agent play to its end.

        Raises:
            UserCodeError: it failed, or left no reward.
            ServiceError: the service did, or the sandbox is lost.
            ConfigError: the file with the service's token cannot be used, or Enroot would change the value of a variable.
        """
        row = {**self._row, "prompt": messages}
        if self._config.service.url:
            return AgentService(self._config.service, self._environment.timeout_seconds).play(row, endpoint)
        home = Path(tempfile.mkdtemp(prefix="hpcrl-program-"))
        try:
            return self._run(home, row, endpoint)
        finally:
            discard_tree(home)

    def close(self) -> None:
        if self._sandbox:
            self._sandbox.end()

    def _run(self, home: Path, row: dict[str, Any], endpoint: Endpoint) -> Turn:
        work, asked, reward = home / "work", home / "row.json", home / "reward.json"
        work.mkdir()
        asked.write_text(json.dumps(row, ensure_ascii=False), encoding="utf-8")
        files = {"HPCRL_ROW": str(asked), "HPCRL_REWARD": str(reward)}
        if self._sandbox:
            files |= self._sandbox.offer(home)
        command, environment = self._config.command, variables(endpoint, str(home / "bin")) | files
        inside = self._config.container.kind != "none"
        if inside:
            command, environment = contained(self._config.container, command, home, endpoint, files)
        with open(started(home), "wb") as note:  # the program may remove it
            ran = run_supervised(command, environment, work, endpoint.ended)
            begun = os.fstat(note.fileno()).st_size > 0
        if ran.code is None:
            raise UserCodeError("its program was ended")
        if inside and not begun:
            # Enroot ends with 0 where it does not know an option: no reward is made of that
            printed = self._shown(ran.output, endpoint)
            raise UserCodeError(f"its container did not start (exit code {ran.code}): {printed}")
        if self._sandbox:
            self._sandbox.expect()
        exit_code = self._config.reward == "exit_code" and not self._config.reward_function
        if ran.code != 0 and not exit_code:
            raise UserCodeError(f"its program ended with exit code {ran.code}: {self._shown(ran.output, endpoint)}")
        if self._sandbox and self._sandbox.decides:
            return self._sandbox.judged()
        if exit_code:
            return Turn([], float(ran.code == 0), done=True)
        return self._judged(endpoint) if self._config.reward_function else _reward(reward)

    def _shown(self, output: str, endpoint: Endpoint) -> str:
        """Return what a program printed, without the keys of its sample."""
        for key in (endpoint.key, *([self._sandbox.key] if self._sandbox else [])):
            output = output.replace(key, "…")
        return output or "it printed nothing"

    def _judged(self, endpoint: Endpoint) -> Turn:
        weights = self._config.reward_function
        response = Response(
            text=endpoint.last_text(), ground_truth=truth_of(self._row), messages=self._prompt, extras=self._row
        )
        return WeightedRewards(f"{_SETTING}.reward_function", weights, self._environment)(response)


def _reward(path: Path) -> Turn:
    """Return what a program wrote. Raises UserCodeError where there is no such file, or it is not as expected."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        raise UserCodeError(f"its program wrote no reward into the file of HPCRL_REWARD ({error.strerror})") from error
    try:
        regular = stat.S_ISREG(os.fstat(descriptor).st_mode)
        content = os.read(descriptor, LONGEST_SCORE + 1) if regular else b""
    finally:
        os.close(descriptor)
    if (turn := read_score(content)) is not None:
        return turn
    raise UserCodeError(
        f"the file of HPCRL_REWARD: expected {EXPECTED}, found {content[:80].decode(errors='replace')!r}"
    )
