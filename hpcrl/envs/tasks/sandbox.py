"""A task in a sandbox: the policy works with a shell and an editor, and tests that it never sees decide."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from hpcrl.config.sections.environment import SandboxToolsConfig
from hpcrl.envs.base import Environment, Messages, Turn
from hpcrl.envs.terminal.calls import CallError, first_call
from hpcrl.envs.terminal.judge import TaskVerdict, judge, start_again, start_task
from hpcrl.envs.terminal.task import expect_time, task_of
from hpcrl.envs.terminal.tools import Workplace, asked, is_submit
from hpcrl.envs.tools.columns import lacking
from hpcrl.envs.tools.sandboxes import Sandboxes, SandboxLost
from hpcrl.errors import ConfigError, DataError, SandboxError, UserCodeError

_NAME = "sandbox"
_TRIES = 3
_COUNTED: tuple[str, ...] = ("calls", "failed_calls")


class SandboxEnvironment(Environment):
    """Work in a sandbox with a shell and an editor; tests decide.

    Several turns. A text with <tool_call>{"name": "shell", "arguments": {"command": "ls"}}</tool_call> is answered by a message of the
    role `tool`. A call of submit, a text without a call, or the last turn ends the work. Reward: that of the task's tests, which are then run
    in a fresh sandbox with the image's files and what the policy has changed.

    Args:
        extras: the row: `image`, and `tests`; `directory`, `files`, `setup` and `solution` where it has them.

    Raises:
        DataError: the row lacks one of them, or its tests may take longer than environment.timeout_seconds.
    """

    def __init__(self, extras: Mapping[str, Any]) -> None:
        self._task, self._sandboxes = task_of(extras), extras.get("sandboxes")
        if self._task.tests is None:
            raise lacking(_NAME, "tests", "an object with a `command`", None)
        self._tests = self._task.tests
        expect_time(self._task, extras["environment"].timeout_seconds)
        self._config: SandboxToolsConfig = extras["skyrl_gym"].sandbox
        self._left: int = extras["max_turns"]
        self._metrics: dict[str, float] = dict.fromkeys(_COUNTED, 0.0)
        self._place: Workplace | None = None
        self._snapshot: str | None = None  # of the files as they are, or were before the last change

    def init(self, messages: Messages) -> Messages:
        """Start the sandbox with the beginning state of the task.

        Raises:
            ConfigError: the run has no sandboxes.
        """
        self._begin(self._task.directory)
        return messages

    def step(self, action: str) -> Turn:
        self._left -= 1
        call = first_call(action)
        name = ""
        if call is not None:
            self._metrics["calls"] += 1
            try:
                name, arguments = asked(call)
                said = "" if is_submit(name) else self._answer(name, arguments)
            except CallError as error:
                self._metrics["failed_calls"] += 1
                said = f"error: {error}"
            if self._left > 0 and not is_submit(name):
                observations: Messages = [{"role": "tool", "content": said}]
                return Turn(observations, 0.0, done=False, metrics={**self._metrics})
        return self._judged(submitted=call is None or is_submit(name))

    def state(self) -> str | None:
        """Keep the files that the policy has changed; return a text that `resume` begins with."""
        place = self._working()
        try:
            snapshot = self._kept()
        except SandboxError:  # more than a sandbox may have
            return None
        state = {"snapshot": snapshot, "directory": place.directory, "left": self._left, "metrics": self._metrics}
        return json.dumps(state)

    def resume(self, state: str) -> None:
        """Go on from a text of `state`, in the place of `init`.

        Raises:
            DataError: it is none.
        """
        try:
            kept = json.loads(state)
            self._snapshot, self._left = str(kept["snapshot"]), int(kept["left"])
            self._metrics = {name: float(kept["metrics"][name]) for name in _COUNTED}
            directory = kept["directory"]
        except (ValueError, KeyError, TypeError) as error:
            raise DataError(f"{_NAME}: expected the state of an episode, found {state!r:.200}") from error
        self._begin(directory)

    def close(self) -> None:
        if self._place is not None:
            self._place.sandbox.end()

    def _begin(self, directory: str | None) -> None:
        """Start a sandbox with the last snapshot, or with the beginning state of the task."""
        sandboxes, network = self._service(), self._config.network
        if self._snapshot is None:
            sandbox = start_task(sandboxes, self._task, network)
        else:
            sandbox = start_again(sandboxes, self._task, network, self._snapshot)
        self._place = Workplace(sandbox, directory, self._config.command_seconds)

    def _answer(self, name: str, arguments: dict[str, Any]) -> str:
        """Return the answer to a tool call, whose changes are then in a snapshot. Where the sandbox is lost, it is called in another one."""
        place = self._working()
        whole, directory = not place.changed, place.directory  # the last snapshot has all
        for left in reversed(range(_TRIES)):
            try:
                said = self._working().answer(name, arguments)
                if self._left > 0:
                    with suppress(SandboxError):  # more than a sandbox may have
                        self._kept()
                return said
            except SandboxLost as error:
                if not whole or not left:
                    raise UserCodeError(
                        f"the sandbox of {self._task.name} is lost with its changes: {error}"
                    ) from error
            self.close()
            self._begin(directory)
        raise AssertionError("there is at least one try")

    def _judged(self, *, submitted: bool) -> Turn:
        try:
            snapshot = self._last()
        except SandboxError as error:  # more than a sandbox may have
            verdict = TaskVerdict(0.0, output=str(error), ended="refused")
        else:
            self.close()  # its place may be the one that the tests need
            verdict = judge(self._service(), self._task, self._tests, snapshot, self._config.network)
        return verdict.turn({**self._metrics, "submitted": float(submitted)})

    def _kept(self) -> str:
        """Return the snapshot of the files as they are."""
        place = self._working()
        if self._snapshot is None or place.changed:
            self._snapshot, place.changed = place.sandbox.snapshot(), False
        return self._snapshot

    def _last(self) -> str:
        """Return the snapshot that tests get: programs in the background may have gone on since that of the last turn."""
        place = self._working()
        whole, place.changed = not place.changed and self._snapshot, True
        try:
            return self._kept()
        except SandboxLost:
            if not whole:
                raise
            return whole

    def _service(self) -> Sandboxes:
        if self._sandboxes is None:
            raise ConfigError(f"environment {_NAME}: the run has no sandboxes; expected [slurm.sandboxes]")
        return self._sandboxes

    def _working(self) -> Workplace:
        assert self._place is not None, "init or resume comes first"
        return self._place
