"""The sandbox of an agent program's sample: it is started with the task of the row, and the tests of the task decide afterwards."""

from __future__ import annotations

import shlex
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote

from hpcrl.envs.agents import sandbox_command
from hpcrl.envs.base import Turn
from hpcrl.envs.terminal.judge import TaskVerdict, judge, start_task
from hpcrl.envs.terminal.task import expect_time, task_of
from hpcrl.envs.tools.sandboxes import SandboxClient, Sandboxes
from hpcrl.errors import ConfigError, SandboxError

_PROGRAM = '#!/bin/sh\nexec python3 -I -S {} "$@"\n'


class AgentSandbox:
    """The sandbox of one sample. `end` it.

    Args:
        extras: the row, with an image.

    Raises:
        DataError: its task cannot be read, or its tests may take longer than environment.timeout_seconds.
    """

    def __init__(self, extras: Mapping[str, Any]) -> None:
        self._task = task_of(extras)
        self._sandboxes: Sandboxes | None = extras["sandboxes"]
        self._network: bool = extras["skyrl_gym"].sandbox.network
        self._sandbox: SandboxClient | None = None
        if self._task.tests:
            expect_time(self._task, extras["environment"].timeout_seconds)

    @property
    def decides(self) -> bool:
        """Whether the task has tests, which decide the reward."""
        return self._task.tests is not None

    @property
    def key(self) -> str:
        return self._started().key

    def start(self) -> None:
        """Start the sandbox with the beginning state of the task. Raises ConfigError where the run has none."""
        self._sandbox = start_task(self._service(), self._task, self._network)

    def offer(self, home: Path) -> dict[str, str]:
        """Write the program `sandbox` into `bin` of a sample's directory; return the variable that it reads."""
        own, program = home / "sandbox.py", home / "bin" / "sandbox"
        shutil.copyfile(sandbox_command.__file__, own)
        program.parent.mkdir()
        program.write_text(_PROGRAM.format(shlex.quote(str(own))), encoding="utf-8")
        program.chmod(0o755)
        scheme, _, address = self._started().url.partition("://")
        return {sandbox_command.VARIABLE: f"{scheme}://{self.key}@{address}{quote(self._task.directory or '')}"}

    def expect(self) -> None:
        """Raise SandboxLost where it is gone, and with it what was changed."""
        self._started().expect()

    def judged(self) -> Turn:
        """Return the end of the sample: what the tests say of the files as they are.

        Raises:
            SandboxLost: the sandbox is gone, and with it what was changed; or those of the tests, again and again.
        """
        tests = self._task.tests
        assert tests is not None, "decides"
        try:
            snapshot = self._started().snapshot()
        except SandboxError as error:  # more than a sandbox may have
            return TaskVerdict(0.0, output=str(error), ended="refused").turn({})
        self.end()  # its place may be the one that the tests need
        return judge(self._service(), self._task, tests, snapshot, self._network).turn({})

    def end(self) -> None:
        if self._sandbox is not None:
            self._sandbox.end()

    def _service(self) -> Sandboxes:
        if self._sandboxes is None:
            raise ConfigError(
                "environment agent: the row has an image, and the run has no sandboxes; expected [slurm.sandboxes]"
            )
        return self._sandboxes

    def _started(self) -> SandboxClient:
        assert self._sandbox is not None, "start comes first"
        return self._sandbox
