"""Runs the tests of a task in a fresh sandbox, which has the files of the image and what the policy has changed, and reads their reward."""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from posixpath import normpath
from typing import Any, TypeVar

from hpcrl.envs.base import Turn
from hpcrl.envs.terminal.outcomes import outcomes, share_passed
from hpcrl.envs.terminal.task import Files, TaskScript, TaskTests, TerminalTask, mode_of
from hpcrl.envs.tools.sandboxes import RunResult, SandboxClient, Sandboxes, SandboxLost
from hpcrl.errors import SandboxError, UserCodeError
from hpcrl.types import LARGEST, is_name

R = TypeVar("R")

LOGS = "/logs/verifier"
"""Directory of Harbor's reward files: https://harborframework.com/docs/tasks."""

EXPECTED = f"a number in {LOGS}/reward.txt, or in reward.json as `reward` or alone"
"""What tests leave whose scoring is `file`."""

SETUP_SECONDS = 120.0
_OWN = "/tests", "/solution", LOGS
_TRIES = 3
_SHELL = 'exec 2>&1; eval "set --; $1"'
_PREPARE_SECONDS = 60.0
_MOST_OUTPUT, _LONGEST_REWARD = 16 << 20, 1 << 16
_SHOWN = 400


@dataclass(frozen=True)
class TaskVerdict:
    """What the tests of a task say.

    Attributes:
        reward: None: they ended without one.
        metrics: shares of the named cases that passed, and further numbers of a reward file.
        output: what the tests printed.
        ended: why they were ended; else empty.
    """

    reward: float | None
    metrics: dict[str, float] = field(default_factory=dict)
    output: str = ""
    ended: str = ""

    def turn(self, metrics: Mapping[str, float]) -> Turn:
        """Return the end of a sample, with the metrics of its environment beside those of the tests."""
        reward = self.reward or 0.0
        own = {"solved": float(reward >= 1), "tests_ended": float(bool(self.ended))}
        return Turn([], reward, done=True, metrics={**self.metrics, **metrics, **own})


def with_sandbox(start: Callable[[], SandboxClient], act: Callable[[SandboxClient], R]) -> R:
    """Return what an action on a sandbox of its own returns; where the sandbox is lost, the action begins again in another one.

    Raises:
        SandboxLost: it was lost as often as `_TRIES`.
        SandboxError: none can be started.
    """
    for left in reversed(range(_TRIES)):
        try:
            sandbox = start()
            try:
                return act(sandbox)
            finally:
                sandbox.end()
        except SandboxLost:
            if not left:
                raise
    raise AssertionError("there is at least one try")


def start_task(sandboxes: Sandboxes, task: TerminalTask, network: bool) -> SandboxClient:
    """Start a sandbox with the beginning state of a task.

    Raises:
        UserCodeError: its setup fails.
        SandboxError: there is no such image, or none can be started.
    """
    sandbox = sandboxes.start(task.image, network=network)
    try:
        _write(sandbox, task.files)
        if task.setup is not None:
            ran = _run(sandbox, task, TaskScript(task.setup, seconds=SETUP_SECONDS))
            if ran.code != 0:
                raise UserCodeError(f"the setup of task {task.name} {ending(ran)}: {shown(ran)}")
    except BaseException:
        sandbox.end()
        raise
    return sandbox


def start_again(sandboxes: Sandboxes, task: TerminalTask, network: bool, snapshot: str) -> SandboxClient:
    """Start a sandbox with what has been changed.

    Raises:
        UserCodeError: there is no such snapshot any more, or no such image.
    """
    try:
        return sandboxes.start(task.image, network=network, snapshot=snapshot)
    except SandboxError as error:
        raise UserCodeError(f"no sandbox of task {task.name} begins with its snapshot: {error}") from error


def solve(sandbox: SandboxClient, task: TerminalTask, solution: TaskScript) -> RunResult:
    """Run the reference solution of a task in a sandbox with its beginning state; return what became of it."""
    _clean(sandbox)
    return _run(sandbox, task, solution)


def judge(sandboxes: Sandboxes, task: TerminalTask, tests: TaskTests, snapshot: str, network: bool) -> TaskVerdict:
    """Run the tests of a task in a fresh sandbox.

    With `tests.keep`, programs outside of these paths are those of the image.

    Args:
        snapshot: what the policy has changed. None of its processes is there, and neither are files of its own where the tests belong.
    """

    def act(sandbox: SandboxClient) -> TaskVerdict:
        try:
            _write(sandbox, {path: content for path, content in task.files.items() if not _is_kept(path, tests)})
            _clean(sandbox)
            ran = _run(sandbox, task, tests)
        except SandboxError as error:  # what the policy has changed leaves no room
            return TaskVerdict(0.0, output=str(error), ended="refused")
        output = _printed(ran)
        if ran.ended:
            return TaskVerdict(0.0, output=output, ended=ran.ended)
        if tests.scoring == "exit_code":
            return TaskVerdict(float(ran.code == 0), output=output)
        if tests.scoring == "cases":
            return _of_cases(tests, output)
        reward, metrics = _of_files(sandbox)
        return TaskVerdict(reward, metrics, output)

    kept = "" if tests.keep else snapshot

    def start() -> SandboxClient:
        nonlocal kept
        # where the tests begin again, `snapshot` may be removed: no sandbox held it while they ran
        if not kept:
            sandbox = start_again(sandboxes, task, network, snapshot)
            try:
                kept = sandbox.snapshot(tests.keep)
            finally:
                sandbox.end()
        return start_again(sandboxes, task, network, kept)

    return with_sandbox(start, act)


def _is_kept(path: str, tests: TaskTests) -> bool:
    """Return whether a file is as the policy has left it."""
    place = _plain_path(path)
    return not tests.keep or any(place.is_relative_to(_plain_path(kept)) for kept in tests.keep)


def _plain_path(path: str) -> PurePosixPath:
    """Return an absolute path as the sandbox resolves it: two slashes at the beginning are one, and .. is the directory above."""
    return PurePosixPath(normpath(f"/{path.lstrip('/')}"))


def ending(ran: RunResult) -> str:
    """Return how a program ended, for messages."""
    return f"was ended ({ran.ended})" if ran.ended else f"ended with exit code {ran.code}"


def shown(ran: RunResult) -> str:
    """Return the end of what a program printed, for messages."""
    return _printed(ran).strip()[-_SHOWN:] or "it printed nothing"


def _printed(ran: RunResult) -> str:
    """Return what a script wrote; to its error stream there is only why its shell did not start."""
    return (ran.stdout + ran.stderr).decode(errors="replace")


def _run(sandbox: SandboxClient, task: TerminalTask, script: TaskScript) -> RunResult:
    _write(sandbox, script.files)
    command = ["sh", "-c", _SHELL, "sh", script.command]
    return sandbox.run(
        command, script.seconds, environment=script.environment, directory=task.directory, most=_MOST_OUTPUT
    )


def _write(sandbox: SandboxClient, files: Files) -> None:
    for path, content in files.items():
        sandbox.write(path, content, mode_of(content))


def _clean(sandbox: SandboxClient) -> None:
    """Remove what the policy may have put where tests, solution and reward belong."""
    command = f"rm -rf {shlex.join(_OWN)} && mkdir -p {LOGS}"
    ran = sandbox.run(["sh", "-c", command], _PREPARE_SECONDS, directory="/")
    if ran.code != 0:
        why = ran.stderr.decode(errors="replace").strip()
        raise SandboxError(f"{', '.join(_OWN)} cannot be emptied, for which an image has sh, rm and mkdir: {why[:200]}")


def _of_cases(tests: TaskTests, output: str) -> TaskVerdict:
    found = outcomes(output)
    if not tests.fail_to_pass and not tests.pass_to_pass:
        return TaskVerdict(float(bool(found) and all(found.values())), {"cases": share_passed(found, found)}, output)
    shares = {name: share_passed(getattr(tests, name), found) for name in ("fail_to_pass", "pass_to_pass")}
    return TaskVerdict(float(all(share == 1.0 for share in shares.values())), shares, output)


def _of_files(sandbox: SandboxClient) -> tuple[float | None, dict[str, float]]:
    """Return the reward of reward.txt, or else of reward.json, and further numbers of that; None where there is none."""
    for name, read in (("reward.txt", _plain), ("reward.json", _json)):
        try:
            content = sandbox.read(f"{LOGS}/{name}")
            if len(content) <= _LONGEST_REWARD:
                return read(content)
        except (SandboxError, ValueError, OverflowError, RecursionError):  # no such file, or no number in it
            continue
    return None, {}


def _plain(content: bytes) -> tuple[float, dict[str, float]]:
    return _number(float(content)), {}


def _json(content: bytes) -> tuple[float, dict[str, float]]:
    """Return `reward` of a table, or its only number, and the others. Raises ValueError where there is none."""
    table: Any = json.loads(content)
    if not isinstance(table, dict) or not all(isinstance(value, int | float) for value in table.values()):
        raise ValueError("expected an object of numbers")
    numbers = {name: _number(float(value)) for name, value in table.items() if is_name(name)}
    if "reward" in numbers:
        return numbers.pop("reward"), numbers
    (reward,) = numbers.values()
    return reward, {}


def _number(value: float) -> float:
    if not math.isfinite(value) or abs(value) > LARGEST:
        raise ValueError("expected a finite number")
    return value
