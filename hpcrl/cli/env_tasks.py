"""`hpcrl env check` and `hpcrl env rows`: tasks in sandboxes, as they are published."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from hpcrl.cli._common import add_root, positive
from hpcrl.text import one_line

if TYPE_CHECKING:
    from hpcrl.envs.terminal.check import TaskCheck
    from hpcrl.envs.terminal.folders import ImageNames
    from hpcrl.envs.terminal.task import TerminalTask


@dataclass(frozen=True)
class _Read:
    """A task, or why it cannot be used."""

    name: str
    task: TerminalTask | None
    problem: str = ""


def add_tasks(command: Callable[..., argparse.ArgumentParser]) -> None:
    """Add the commands.

    Args:
        command: of Subcommands.
    """
    check = command(
        "check",
        "run the tests of tasks in sandboxes, without and with the reference solution, and name broken ones",
        _check,
    )
    rows = command("rows", "print tasks as rows of a dataset for the environment sandbox, as JSON lines", _rows)
    for each in (check, rows):
        each.add_argument(
            "tasks",
            metavar="TASKS",
            nargs="+",
            help="folder of a task of Harbor or Terminal-Bench, folder of such folders, or dataset with rows in the form of SWE-bench or of sandbox",
        )
        each.add_argument(
            "--image",
            action="append",
            default=[],
            type=_pair,
            metavar="PATTERN=NAME",
            help="image of the tasks whose name, or Docker image, matches; the first that matches counts. Default: the Docker image with dashes, else the task's name",
        )
        each.add_argument(
            "--test-command",
            metavar="TEXT",
            help="runs the tests of rows in the form of SWE-bench that have no command; {files} are those that their test_patch changes",
        )
        each.add_argument(
            "--directory",
            default="/testbed",
            metavar="DIR",
            help="repository in the image, where a row in the form of SWE-bench has no workdir (/testbed)",
        )
    add_root(check)
    check.add_argument("--network", action="store_true", help="let the programs use the network of this machine")
    check.add_argument("-j", "--jobs", type=positive, default=1, metavar="N", help="tasks at a time (1)")
    check.epilog = "The exit code is 1 if a task is broken."


def _pair(text: str) -> tuple[str, str]:
    pattern, equals, name = text.rpartition("=")
    if not equals or not pattern or not name:
        raise argparse.ArgumentTypeError(f"expected PATTERN=NAME, found {text!r}")
    return pattern, name


def _rows(arguments: argparse.Namespace) -> int:
    from hpcrl.envs.terminal.tools import TOOLS
    from hpcrl.errors import DataError

    for one in _tasks(arguments):
        if one.task is None:
            raise DataError(f"{one.name}: {one.problem}")
        print(json.dumps({**one.task.row(), "tools": TOOLS}, ensure_ascii=False))
    return 0


def _check(arguments: argparse.Namespace) -> int:
    from concurrent.futures import ThreadPoolExecutor

    from hpcrl.envs.terminal.check import TaskCheck, check_task
    from hpcrl.rundir.layout import default_root
    from hpcrl.sandboxes.local import local_sandboxes
    from hpcrl.sandboxes.probe import expect_sandboxes

    root, jobs, network = arguments.root or default_root(), arguments.jobs, arguments.network

    def checked(one: _Read) -> tuple[_Read, TaskCheck, float]:
        begun = time.monotonic()
        found = check_task(sandboxes, one.task, network) if one.task else TaskCheck(one.problem)
        return one, found, time.monotonic() - begun

    tasks = list(_tasks(arguments))
    expect_sandboxes()
    count = broken = unsolved = 0
    # an interrupt ends the sandboxes first, and with them what the threads wait for
    with ThreadPoolExecutor(jobs) as pool, local_sandboxes(root, jobs, network=network) as sandboxes:
        for one, found, seconds in pool.map(checked, tasks):
            count, broken = count + 1, broken + bool(found.problem)
            unsolved += found.solved is None and not found.problem
            print(one_line(f"{_line(one.name, found)}, {seconds:.1f} s"), flush=True)
    print(f"{count} tasks: {broken} broken, {unsolved} without a reference solution")
    return int(broken > 0)


def _line(name: str, found: TaskCheck) -> str:
    if found.problem:
        return f"broken    {name}: {found.problem}"
    without = "no reward" if found.without is None else f"{found.without:g}"
    if found.solved is None:
        return f"unsolved  {name}: it has no reference solution, {without} without one"
    return f"ok        {name}: {found.solved:g} with its solution, {without} without"


def _tasks(arguments: argparse.Namespace) -> Iterator[_Read]:
    """Yield the tasks that a command line names, or why one cannot be used."""
    from hpcrl.data.sources import Source
    from hpcrl.envs.terminal.folders import ImageNames, read_folder, task_folders
    from hpcrl.envs.terminal.swe import Repositories, is_of_swe, read_swe_row
    from hpcrl.envs.terminal.task import task_of

    images, repositories = ImageNames(arguments.image), Repositories(arguments.directory, arguments.test_command)
    for named in arguments.tasks:
        path = Path(named)
        if path.is_dir():
            for folder in task_folders(path):
                yield _read(folder.name, lambda folder=folder: read_folder(folder, images))
            continue
        for number, row in enumerate(Source(named).rows()):
            if is_of_swe(row):
                yield _read(f"{named}, row {number}", lambda row=row: read_swe_row(row, images, repositories))
            else:
                yield _read(f"{named}, row {number}", lambda row=row: _with_image(task_of(row), images))


def _with_image(task: TerminalTask, images: ImageNames) -> TerminalTask:
    return replace(task, image=images.chosen_for(task.name, task.image) or task.image)


def _read(name: str, read: Callable[[], TerminalTask]) -> _Read:
    from hpcrl.errors import DataError

    try:
        task = read()
    except DataError as error:
        return _Read(name, None, str(error))
    return _Read(task.name, task)
