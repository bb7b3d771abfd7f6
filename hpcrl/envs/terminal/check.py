"""Checks a task: its tests have to fail without a solution, and to pass with the reference solution."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from hpcrl.envs.terminal.judge import EXPECTED, TaskVerdict, ending, judge, shown, solve, start_task, with_sandbox
from hpcrl.envs.terminal.outcomes import outcomes
from hpcrl.envs.terminal.task import TaskTests, TerminalTask
from hpcrl.envs.tools.sandboxes import SandboxClient, Sandboxes
from hpcrl.errors import DataError, SandboxError, UserCodeError

_SHOWN = 400


@dataclass(frozen=True)
class TaskCheck:
    """What was found of a task.

    Attributes:
        problem: why it is broken; empty where it is not.
        without, solved: reward of its tests without a solution and with the reference solution; None: they were not run, or left none.
    """

    problem: str = ""
    without: float | None = None
    solved: float | None = None


def check_task(sandboxes: Sandboxes, task: TerminalTask, network: bool) -> TaskCheck:
    """Run the tests of a task without a solution and with the reference solution, where it has one.

    Raises:
        ServiceError: there is no room for a sandbox, or it is lost again and again.
    """
    found = _checked(sandboxes, task, network)
    if found.problem and (path := _with_windows_line_ends(task)):
        return replace(found, problem=f"{found.problem}; {path} has Windows line ends: sed -i 's/\\r$//' removes them")
    return found


def _checked(sandboxes: Sandboxes, task: TerminalTask, network: bool) -> TaskCheck:
    tests, solution = task.tests, task.solution
    if tests is None:
        return TaskCheck(
            "it has no tests; expected tests/test.sh, run-tests.sh beside a task.yaml, or the column `tests` of a row"
        )

    def tested(act: Callable[[SandboxClient], str]) -> TaskVerdict:
        changed = with_sandbox(lambda: start_task(sandboxes, task, network), act)
        return judge(sandboxes, task, tests, changed, network)

    def solved(sandbox: SandboxClient) -> str:
        ran = solve(sandbox, task, solution) if solution else None
        if ran is not None and ran.code != 0:
            raise UserCodeError(f"its solution {ending(ran)}: {shown(ran)}")
        return sandbox.snapshot()

    before = None
    try:
        before = tested(lambda sandbox: sandbox.snapshot())
        if (before.reward or 0.0) >= 1:
            return TaskCheck("its tests pass without a solution", before.reward)
        if solution is None:
            return TaskCheck("", before.reward)
        after = tested(solved)
    except (UserCodeError, SandboxError, DataError) as error:
        return TaskCheck(str(error), before and before.reward)
    if after.reward is None:
        return TaskCheck(f"its tests leave no reward with its solution, {EXPECTED}: {_end(after)}", before.reward)
    if after.reward < 1:
        how = f"are ended ({after.ended})" if after.ended else f"give {after.reward:g}, not 1,"
        missed = _not_passed(tests, after.output)
        return TaskCheck(f"its tests {how} with its solution{missed}: {_end(after)}", before.reward, after.reward)
    return TaskCheck("", before.reward, after.reward)


def _not_passed(tests: TaskTests, output: str) -> str:
    """Return which of the named cases have not passed, as a part of a sentence; empty where cases do not decide."""
    if tests.scoring != "cases":
        return ""
    found = outcomes(output)
    if not found:
        return ", as their output names no case of pytest or unittest"
    missed = [name for name in (*tests.fail_to_pass, *tests.pass_to_pass) if not found.get(name)]
    more = f" and {len(missed) - 1} more" if len(missed) > 1 else ""
    return (
        f", as {missed[0]!r:.200}{more} {'fails' if missed[0] in found else 'is not among the cases that ran'}"
        if missed
        else ""
    )


def _with_windows_line_ends(task: TerminalTask) -> str:
    """Return a script or patch of a task whose lines end as those of Windows, which shells and `git apply` take as a part of the line."""
    scripts = [script.files for script in (task.tests, task.solution) if script]
    files = [one for files in scripts for one in files.items()]
    return next((path for path, content in files if path.endswith((".sh", ".patch")) and b"\r\n" in content), "")


def _end(verdict: TaskVerdict) -> str:
    return verdict.output.strip()[-_SHOWN:] or "they print nothing"
