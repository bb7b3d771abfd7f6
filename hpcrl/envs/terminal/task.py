"""A task in a sandbox: an instruction, an image, tests that decide, and the row of a dataset that holds them."""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from hpcrl.envs.tools.columns import lacking
from hpcrl.errors import DataError

Scoring = Literal["exit_code", "file", "cases"]

MOST_BYTES, MOST_FILES = 8 << 20, 1000
"""Of the files of a task at most."""

SECONDS, MOST_SECONDS = 240.0, 24 * 3600.0
"""Of tests whose row gives no time limit, less than environment.timeout_seconds; of those that do, at most."""

_LONGEST_KEEP = 8192  # all are in one message to the sandbox
_ENVIRONMENT = "sandbox"
_COLUMNS = {"image", "directory", "files", "setup", "tests", "solution"}
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_EXECUTABLE = b"#!", b"\x7fELF"

Files = Mapping[str, bytes]
"""Content by absolute path in the sandbox."""


@dataclass(frozen=True)
class TaskScript:
    """A command of the shell with the files that it needs.

    Attributes:
        command: begins in the directory of the task.
        seconds: after which it is ended.
        environment: variables that it has beside those of the image.
    """

    command: str
    files: Files = field(default_factory=dict)
    seconds: float = SECONDS
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class TaskTests(TaskScript):
    """The tests of a task.

    Attributes:
        scoring: where the reward is. exit_code: 1 for exit code 0, else 0. file: in /logs/verifier/reward.txt or reward.json.
            cases: 1 where all named cases pass in the output, or all that are found where none is named, else 0.
        keep: absolute paths of which the tests see what the policy has changed at and below them; all else is as in the image. Empty: they
            see all that it has changed.
        fail_to_pass, pass_to_pass: names of cases that a solution has to make pass, and to keep passing.
    """

    scoring: Scoring = "exit_code"
    keep: tuple[str, ...] = ()
    fail_to_pass: tuple[str, ...] = ()
    pass_to_pass: tuple[str, ...] = ()


@dataclass(frozen=True)
class TerminalTask:
    """A task.

    Attributes:
        name: for messages.
        prompt: the instruction, chat messages or a text.
        image: a name that `hpcrl image ls` shows.
        directory: where commands begin; None: that of the image.
        files: what the policy finds beside the image.
        setup: a command that makes the beginning state; None: none is needed.
        tests: None: there are none.
        solution: makes the tests pass; None: none is known.
    """

    name: str
    prompt: Any
    image: str
    directory: str | None = None
    files: Files = field(default_factory=dict)
    setup: str | None = None
    tests: TaskTests | None = None
    solution: TaskScript | None = None

    def row(self) -> dict[str, Any]:
        """Return the row of a dataset for the environment sandbox."""
        prompt = [{"role": "user", "content": self.prompt}] if isinstance(self.prompt, str) else self.prompt
        columns = {
            "directory": self.directory,
            "files": _written(self.files),
            "setup": self.setup,
            "tests": self.tests and _of_tests(self.tests),
            "solution": self.solution and _of_script(self.solution),
        }
        beginning = {"prompt": prompt, "env_class": _ENVIRONMENT, "task": self.name, "image": self.image}
        return beginning | {name: value for name, value in columns.items() if value}


def task_of(row: Mapping[str, Any]) -> TerminalTask:
    """Return the task of a row.

    Raises:
        DataError: the row has no image, or a column that is not as expected.
    """
    image = row.get("image")
    if not isinstance(image, str) or not image:
        raise lacking(_ENVIRONMENT, "image", "the name of an image", image)
    values = {name: row.get(name) for name in _COLUMNS}
    return TerminalTask(
        name=str(row.get("task") or image),
        prompt=row.get("prompt"),
        image=image,
        directory=_text(values, "directory"),
        files=_files(values, "files"),
        setup=_text(values, "setup"),
        tests=_tests(values["tests"]) if values["tests"] else None,
        solution=TaskScript(**_script("solution", values["solution"])) if values["solution"] else None,
    )


def expect_time(task: TerminalTask, limit: float) -> None:
    """Refuse tests that may take as long as a call of an environment.

    Args:
        limit: environment.timeout_seconds; 0: there is none.

    Raises:
        DataError: they may.
    """
    if limit and task.tests and task.tests.seconds >= limit:
        raise DataError(
            f"{_ENVIRONMENT}: the tests of {task.name} may take {task.tests.seconds:g} s, and environment.timeout_seconds is {limit:g}; "
            "raise it, or lower `seconds` of the column `tests`"
        )


def mode_of(content: bytes) -> int:
    """Return the mode of a file of a task: programs can be executed."""
    return 0o755 if content.startswith(_EXECUTABLE) else 0o644


def _of_script(script: TaskScript) -> dict[str, Any]:
    environment = {"environment": dict(script.environment)} if script.environment else {}
    return {"command": script.command, "files": _written(script.files), "seconds": script.seconds, **environment}


def _of_tests(tests: TaskTests) -> dict[str, Any]:
    lists = {name: list(getattr(tests, name)) for name in ("keep", "fail_to_pass", "pass_to_pass")}
    return {**_of_script(tests), "scoring": tests.scoring, **{name: value for name, value in lists.items() if value}}


def _written(files: Files) -> dict[str, Any]:
    def written(content: bytes) -> str | dict[str, str]:
        try:
            return content.decode()
        except UnicodeDecodeError:
            return {"base64": base64.b64encode(content).decode()}

    return {path: written(content) for path, content in files.items()}


def _tests(value: Any) -> TaskTests:
    found = _script("tests", value)
    scoring = value.get("scoring", "exit_code")
    if scoring not in get_args(Scoring):
        raise lacking(_ENVIRONMENT, "tests.scoring", f"one of {', '.join(get_args(Scoring))}", scoring)
    fail_to_pass, pass_to_pass = (_names(f"tests.{name}", value.get(name)) for name in ("fail_to_pass", "pass_to_pass"))
    keep = _names("tests.keep", value.get("keep"))
    if wrong := [path for path in keep if not is_absolute(path) or ".." in path.split("/")]:
        raise lacking(_ENVIRONMENT, "tests.keep", "absolute paths without ..", wrong[0])
    if sum(map(len, keep)) > _LONGEST_KEEP:
        raise lacking(_ENVIRONMENT, "tests.keep", f"paths of at most {_LONGEST_KEEP} letters together", keep)
    return TaskTests(**found, scoring=scoring, keep=keep, fail_to_pass=fail_to_pass, pass_to_pass=pass_to_pass)


def _script(column: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, Mapping) or not isinstance(value.get("command"), str) or not value["command"].strip():
        raise lacking(_ENVIRONMENT, column, "an object with a `command`", value)
    seconds, environment = value.get("seconds", SECONDS), value.get("environment") or {}
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 < seconds <= MOST_SECONDS:
        expected = f"a number of more than 0 and at most {MOST_SECONDS:g}"
        raise lacking(_ENVIRONMENT, f"{column}.seconds", expected, seconds)
    if not isinstance(environment, Mapping) or not all(
        isinstance(text, str) and "\0" not in text and _VARIABLE.fullmatch(name) for name, text in environment.items()
    ):
        raise lacking(_ENVIRONMENT, f"{column}.environment", "texts by the names of variables", environment)
    files = _files(value, "files", f"{column}.files")
    return {"command": value["command"], "files": files, "seconds": float(seconds), "environment": dict(environment)}


def _files(row: Mapping[str, Any], column: str, name: str = "") -> dict[str, bytes]:
    value = row.get(column) or {}
    if not isinstance(value, Mapping) or len(value) > MOST_FILES:
        raise lacking(_ENVIRONMENT, name or column, f"at most {MOST_FILES} texts by absolute path", value)
    found = {path: _content(content) for path, content in value.items() if content is not None}
    wrong = [path for path, content in found.items() if content is None or not is_absolute(path)]
    if wrong:
        expected = 'texts, or objects with the bytes as "base64", by absolute path'
        raise lacking(_ENVIRONMENT, name or column, expected, wrong[0])
    if sum(map(len, filter(None, found.values()))) > MOST_BYTES:
        raise DataError(f"{_ENVIRONMENT}: `{name or column}` has more than {MOST_BYTES} bytes; put them into the image")
    return {path: content for path, content in found.items() if content is not None}


def is_absolute(path: str) -> bool:
    """Return whether a path is an absolute one of a sandbox, of at most 4096 bytes."""
    return path.startswith("/") and "\0" not in path and len(path.encode(errors="replace")) < 4096


def _content(value: Any) -> bytes | None:
    if isinstance(value, str):
        return value.encode(errors="replace")
    text = value.get("base64") if isinstance(value, Mapping) else None
    try:
        return base64.b64decode(text, validate=True) if isinstance(text, str) else None
    except (binascii.Error, ValueError):
        return None


def _text(row: Mapping[str, Any], column: str) -> str | None:
    value = row.get(column)
    if value is not None and (not isinstance(value, str) or "\0" in value):
        raise lacking(_ENVIRONMENT, column, "a text, or nothing", value)
    return value or None


def _names(column: str, value: Any) -> tuple[str, ...]:
    found = value or []
    if not isinstance(found, list | tuple) or not all(isinstance(name, str) for name in found):
        raise lacking(_ENVIRONMENT, column, "a list of names", value)
    return tuple(found)
