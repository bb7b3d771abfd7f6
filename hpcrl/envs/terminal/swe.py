"""Reads rows in the form of SWE-bench (arXiv:2310.06770): an issue of a repository, the patches of its solution and tests, and named cases."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hpcrl.envs.terminal.folders import ImageNames
from hpcrl.envs.terminal.task import TaskScript, TaskTests, TerminalTask, is_absolute, task_of
from hpcrl.errors import DataError

_IMAGES = "docker_image", "image_name", "image"
_COMMANDS = "test_cmd", "test_command", "test_commands"
_FAIL_TO_PASS = "FAIL_TO_PASS"
_COMMIT = re.compile(r"[0-9a-fA-F]{7,64}")
_CHANGED = re.compile(r"^diff --git a/(\S+) b/(\S+)$", re.MULTILINE)
_SECONDS = 1800.0  # of SWE-bench itself
_TESTS, _SOLUTION = "/tests/test.patch", "/solution/solution.patch"

FILES = "{files}"
"""What a test command has in the place of the files that the patch of the tests changes."""


@dataclass(frozen=True)
class Repositories:
    """What rows leave to others to know.

    Attributes:
        directory: of the repository in the image, where a row has no `workdir`.
        command: that runs the tests, where a row has none; None: each row needs one.
    """

    directory: str = "/testbed"
    command: str | None = None


def is_of_swe(row: Any) -> bool:
    """Return whether a row has the columns of SWE-bench's."""
    return isinstance(row, Mapping) and _FAIL_TO_PASS in row and isinstance(row.get("problem_statement"), str)


def read_swe_row(row: Mapping[str, Any], images: ImageNames, repositories: Repositories) -> TerminalTask:
    """Return the task of a row.

    Its repository begins at `base_commit`, where it has one. Its tests begin with `test_patch`, on files as they are at that commit, and see
    what was changed in the repository alone.

    Raises:
        DataError: it lacks a column, or one is not as expected.
    """
    name = str(row.get("instance_id") or "a row without instance_id")
    try:
        commit, patch, tested = (_text(row, column) for column in ("base_commit", "patch", "test_patch"))
        docker_image = next((row[column] for column in _IMAGES if isinstance(row.get(column), str)), None)
        solution = TaskScript(f"git apply {_SOLUTION}", {_SOLUTION: patch.encode()}) if patch else None
        if commit and not _COMMIT.fullmatch(commit):
            raise DataError(f"expected a commit as `base_commit`, found {commit!r:.80}")
        directory = _text(row, "workdir") or repositories.directory
        if not is_absolute(directory):
            raise DataError(f"expected an absolute path as `workdir`, or else of --directory, found {directory!r:.80}")
        return task_of(
            TerminalTask(
                name=name,
                prompt=row["problem_statement"],
                image=images.of(name, docker_image),
                directory=directory,
                setup=f"git reset --quiet --hard {commit}" if commit else None,
                tests=TaskTests(
                    _tests(row, repositories, commit, tested),
                    {_TESTS: tested.encode()} if tested else {},
                    _SECONDS,
                    scoring="cases",
                    keep=(
                        directory,
                    ),  # as SWE-bench's own harness, which applies a patch of the repository to a fresh container
                    fail_to_pass=_names(row, _FAIL_TO_PASS),
                    pass_to_pass=_names(row, "PASS_TO_PASS"),
                ),
                solution=solution,
            ).row()
        )
    except DataError as error:
        raise DataError(f"{name}: {error}") from error


def _tests(row: Mapping[str, Any], repositories: Repositories, commit: str, patch: str) -> str:
    """Return the command that puts the files of the tests where they belong, and runs the tests."""
    files = sorted({after for _, after in _CHANGED.findall(patch)})
    before = sorted({before for before, _ in _CHANGED.findall(patch)})
    lines = list[str]()
    if patch and commit:  # one that the commit does not have is new
        lines += [
            f"git checkout --quiet {commit} -- {shlex.quote(one)} 2>/dev/null || rm -f {shlex.quote(one)}"
            for one in before
        ]
    if patch:
        lines.append(f"git apply {_TESTS} || exit 1")
    return "\n".join([*lines, _command(row, repositories).replace(FILES, shlex.join(files))])


def _command(row: Mapping[str, Any], repositories: Repositories) -> str:
    """Return the command of the tests: the row's, that of SWE-rebench's install_config with the files behind it, or the one for all rows."""
    for column in _COMMANDS:
        found = row.get(column)
        if isinstance(found, list) and found and all(isinstance(one, str) for one in found):
            return "\n".join(found)
        if isinstance(found, str) and found.strip():
            return found
    config = row.get("install_config")
    own = config.get("test_cmd") if isinstance(config, Mapping) else None
    if isinstance(own, str) and own.strip():
        return f"{own} {FILES}"
    if repositories.command is None:
        raise DataError("expected a column `test_cmd`, or a command for all rows: --test-command")
    return repositories.command


def _text(row: Mapping[str, Any], column: str) -> str:
    value = row.get(column)
    if value is not None and not isinstance(value, str):
        raise DataError(f"expected a text as `{column}`, found {value!r:.80}")
    return value or ""


def _names(row: Mapping[str, Any], column: str) -> tuple[str, ...]:
    """Return the names of test cases in a column, a list or its JSON text."""
    value = row.get(column)
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise DataError(f"expected a list of names as `{column}`: {error}") from error
    found = value or []
    if not isinstance(found, list) or not all(isinstance(one, str) for one in found):
        raise DataError(f"expected a list of names as `{column}`, found {value!r:.80}")
    return tuple(found)
