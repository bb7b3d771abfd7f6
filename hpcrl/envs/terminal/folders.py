"""Reads task folders as they are published, of Harbor (https://harborframework.com/docs/tasks) and of Terminal-Bench 1.

    Harbor           task.toml  instruction.md  tests/test.sh         solution/solve.sh  reward in /logs/verifier
    Terminal-Bench   task.yaml                  run-tests.sh, tests/  solution.sh        all cases of the output pass

No image is built of their Dockerfiles: an image of `hpcrl image` takes its place.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import tomli
import yaml

from hpcrl.envs.terminal.task import MOST_BYTES, MOST_FILES, TaskScript, TaskTests, TerminalTask, is_absolute, task_of
from hpcrl.errors import DataError

_ARTIFACTS = "/logs/artifacts"
HARBOR, TERMINAL_BENCH = "task.toml", "task.yaml"
_LARGEST_TEXT = 1 << 20
_HARBOR_SECONDS = 600.0
_TERMINAL_BENCH_SECONDS = {"max_test_timeout_sec": 60.0, "max_agent_timeout_sec": 360.0}
_NO_NAME = re.compile(r"[^A-Za-z0-9._-]+")


@dataclass(frozen=True)
class ImageNames:
    """Chooses the image of a task.

    Attributes:
        chosen: pairs of a pattern and a name; the first pattern that matches the task's name or its Docker image decides.
    """

    chosen: Sequence[tuple[str, str]] = ()

    def of(self, task: str, docker_image: str | None) -> str:
        """Return the name of an image: the chosen one, else the Docker image's with dashes, else that of the task."""
        return self.chosen_for(task, docker_image) or _NO_NAME.sub("-", docker_image or task).strip("-.")

    def chosen_for(self, task: str, image: str | None) -> str | None:
        """Return the name that is chosen for a task, or for its image; None: there is none."""
        named = [one for one in (task, image) if one]
        return next((name for pattern, name in self.chosen if any(fnmatchcase(one, pattern) for one in named)), None)


def task_folders(path: Path) -> list[Path]:
    """Return the folders of tasks: the path itself, or those directly in it, by name.

    Raises:
        DataError: there are none.
    """
    if _is_task(path):
        return [path]
    try:
        found = sorted(one for one in path.iterdir() if _is_task(one))
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}") from error
    if not found:
        raise DataError(f"{path}: expected a folder with {HARBOR} or {TERMINAL_BENCH}, or one of such folders")
    return found


def read_folder(folder: Path, images: ImageNames) -> TerminalTask:
    """Return the task of a folder.

    Raises:
        DataError: it is not laid out as expected, or has too many files or bytes.
    """
    return (_harbor if (folder / HARBOR).is_file() else _terminal_bench)(folder, images)


def _is_task(path: Path) -> bool:
    return any((path / name).is_file() for name in (HARBOR, TERMINAL_BENCH))


def _harbor(folder: Path, images: ImageNames) -> TerminalTask:
    path = folder / HARBOR
    try:
        config = tomli.loads(_text(folder, HARBOR))
    except tomli.TOMLDecodeError as error:
        raise DataError(f"{path}: {error}") from error
    tests, solution = _tree(folder, "tests", "/tests"), _tree(folder, "solution", "/solution")
    verifier, agent = _table(path, config, "verifier"), _table(path, config, "agent")
    seconds, patience = verifier.get("timeout_sec", _HARBOR_SECONDS), agent.get("timeout_sec", _HARBOR_SECONDS)
    environment, docker = _table(path, _table(path, config, "solution"), "env"), _table(path, config, "environment")
    docker_image = docker.get("docker_image")
    if not isinstance(docker_image, str | None):
        raise DataError(f"{path}: expected a text as docker_image, found {docker_image!r:.80}")
    return _checked(
        path,
        TerminalTask(
            name=folder.name,
            prompt=_text(folder, "instruction.md").strip(),
            image=images.of(folder.name, docker_image),
            tests=TaskTests(
                "bash /tests/test.sh",
                tests,
                seconds,
                _table(path, verifier, "env"),
                scoring="file",
                keep=_artifacts(path, config) if verifier.get("environment_mode") == "separate" else (),
            )
            if "/tests/test.sh" in tests
            else None,
            solution=TaskScript("bash /solution/solve.sh", solution, patience, environment)
            if "/solution/solve.sh" in solution
            else None,
        ),
    )


def _artifacts(path: Path, config: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the paths that a verifier gets which runs in a container of its own: https://harborframework.com/docs/datasets/artifact-collection."""
    listed = config.get("artifacts", [])
    found = [one.get("source") if isinstance(one, dict) else one for one in listed] if isinstance(listed, list) else []
    sources = [source for source in found if isinstance(source, str) and is_absolute(source)]
    if not isinstance(listed, list) or len(sources) < len(found):
        raise DataError(f"{path}: expected absolute paths as `artifacts`, found {listed!r:.80}")
    return (_ARTIFACTS, *sources)


def _terminal_bench(folder: Path, images: ImageNames) -> TerminalTask:
    path = folder / TERMINAL_BENCH
    try:
        config = yaml.safe_load(_text(folder, TERMINAL_BENCH))
    except (yaml.YAMLError, RecursionError) as error:
        raise DataError(f"{path}: {error}") from error
    if not isinstance(config, dict) or not isinstance(config.get("instruction"), str):
        raise DataError(f"{path}: expected a text as `instruction`")
    seconds, patience = (config.get(name) or default for name, default in _TERMINAL_BENCH_SECONDS.items())
    runner, files = _file(folder, "run-tests.sh", "/tests"), _file(folder, "solution.sh", "/solution")
    tests = {**_tree(folder, "tests", "/tests"), **runner}
    where = {"TEST_DIR": "/tests"}
    return _checked(
        path,
        TerminalTask(
            name=folder.name,
            prompt=config["instruction"].strip(),
            image=images.of(folder.name, None),
            tests=TaskTests("bash /tests/run-tests.sh", tests, seconds, where, scoring="cases") if runner else None,
            solution=TaskScript("bash /solution/solution.sh", files, patience) if files else None,
        ),
    )


def _checked(path: Path, task: TerminalTask) -> TerminalTask:
    """Return a task as its row has it, so that what a file says is checked once."""
    try:
        return task_of(task.row())
    except (DataError, TypeError, AttributeError, ValueError) as error:
        raise DataError(f"{path}: {error}") from error


def _table(path: Path, config: Mapping[str, Any], name: str) -> dict[str, Any]:
    found = config.get(name, {})
    if not isinstance(found, dict):
        raise DataError(f"{path}: expected a table [{name}], found {found!r:.80}")
    return found


def _file(folder: Path, name: str, at: str) -> dict[str, bytes]:
    return {f"{at}/{name}": _bytes(folder, name, MOST_BYTES)} if (folder / name).is_file() else {}


def _text(folder: Path, name: str) -> str:
    try:
        return _bytes(folder, name, _LARGEST_TEXT).decode()
    except UnicodeDecodeError as error:
        raise DataError(f"{folder / name}: expected text in UTF-8") from error


def _bytes(folder: Path, name: str, most: int) -> bytes:
    """Return the content of a regular file of a task's folder. Raises DataError where it is none, longer, or leads out of the folder."""
    path = folder / name
    if not Path(os.path.realpath(path)).is_relative_to(os.path.realpath(folder)):  # to a file of who reads it
        raise DataError(f"{path} is a link out of {folder}; put the file itself there")
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        with os.fdopen(descriptor, "rb") as file:
            content = file.read(most + 1) if stat.S_ISREG(os.fstat(descriptor).st_mode) else None
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}") from error
    if content is None or len(content) > most:
        raise DataError(f"{path}: expected a file of at most {most} bytes")
    return content


def _tree(folder: Path, name: str, at: str) -> dict[str, bytes]:
    """Return the files below a folder of a task's folder by their paths in the sandbox; none where there is no such folder."""
    found, size, top = dict[str, bytes](), 0, folder / name
    for path in _walk(top):
        content = _bytes(folder, str(path.relative_to(folder)), MOST_BYTES)
        found[f"{at}/{path.relative_to(top).as_posix()}"] = content
        size += len(content)
        if size > MOST_BYTES or len(found) > MOST_FILES:
            raise DataError(
                f"{top}: expected at most {MOST_FILES} files of {MOST_BYTES} bytes; put large ones into the image"
            )
    return found


def _walk(folder: Path) -> Iterator[Path]:
    for path, folders, names in os.walk(folder):
        folders.sort()
        yield from (Path(path) / name for name in sorted(names))
