"""Tools with which a policy works in a sandbox: commands of the shell, and looking at and changing files."""

from __future__ import annotations

import posixpath
import secrets
from collections.abc import Callable
from typing import Any

from hpcrl.envs.terminal.calls import CallError, read_call
from hpcrl.envs.tools.sandboxes import RunResult, SandboxClient
from hpcrl.errors import SandboxError

CHARACTERS = 8000
"""What an answer shows at most: of a longer one its beginning and its end."""

LONGEST_CALL = 100_000
"""Characters of JSON."""

LONGEST_LINE = 500
"""Characters of a line that `view` shows."""

_MOST_OUTPUT, _LARGEST_FILE = 4 << 20, 1 << 20
_LOOK_SECONDS = 30.0
_LONGEST_PATH = 4096
_LINES = 200
# descriptor 3 is the sandbox's standard error, where the working directory is written when the shell ends
_SHELL = 'exec 3>&2 2>&1; cd -- "$2" || cd /; trap "printf %s%s $3 \\"\\$PWD\\" >&3" EXIT; eval "set --; $1"'
_SUBMIT = "submit"


def _tool(
    name: str, description: str, required: dict[str, str], optional: dict[str, str] | None = None
) -> dict[str, Any]:
    kinds = {**required, **(optional or {})}
    properties = {one: {"type": kind} for one, kind in kinds.items()}
    parameters = {"type": "object", "properties": properties, "required": list(required)}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


TOOLS = [
    _tool(
        "shell",
        "Run a command in a shell. Its working directory is kept for the next command, variables are not.",
        {"command": "string"},
        {"seconds": "number"},
    ),
    _tool(
        "view", "Show lines of a file, with their numbers.", {"path": "string"}, {"first": "integer", "last": "integer"}
    ),
    _tool(
        "edit",
        "Replace a text of a file by another one. The old text has to be there exactly once; an empty one makes a new file.",
        {"path": "string", "old": "string", "new": "string"},
    ),
    _tool(_SUBMIT, "End the work. Tests decide then what it is worth.", {}),
]
"""What a chat template that knows tools is given, in the column `tools` of a row."""

_KINDS = {"string": str, "number": (int, float), "integer": int}
_PARAMETERS = {one["function"]["name"]: one["function"]["parameters"] for one in TOOLS}


class Workplace:
    """A sandbox and the tools of the policy in it.

    Args:
        directory: where commands begin; None: that of the image.
        seconds: that a command may take at most.

    Attributes:
        changed: whether something may have changed files since it was set to False.
    """

    def __init__(self, sandbox: SandboxClient, directory: str | None, seconds: float) -> None:
        self.sandbox, self.directory, self._seconds, self.changed = sandbox, directory, seconds, False
        self._tools: dict[str, Callable[..., str]] = {"shell": self._command, "view": self._view, "edit": self._edit}

    def answer(self, name: str, arguments: dict[str, Any]) -> str:
        """Return the answer to a tool call.

        Raises:
            CallError: the call asks for what cannot be done.
            SandboxLost: the sandbox is gone.
        """
        try:
            return self._tools[name](**arguments)
        except SandboxError as error:
            raise CallError("the sandbox refuses it; is it too long?") from error

    def _command(self, command: str, seconds: float | None = None) -> str:
        if "\0" in command:
            raise CallError("a command has no null characters")
        limit = self._seconds if seconds is None else min(seconds, self._seconds)
        if limit <= 0:
            raise CallError("expected more than 0 seconds")
        mark, self.changed = secrets.token_hex(8), True
        ran = self._ran(["sh", "-c", _SHELL, "sh", command, self._place(), mark], limit)
        rest, ended, directory = ran.stderr.decode(errors="replace").rpartition(mark)
        if not ended:  # the shell was killed, or replaced
            rest, directory = directory, ""
        if directory.startswith("/") and len(directory) <= _LONGEST_PATH and "\0" not in directory:
            self.directory = directory
        lines = [clipped((ran.stdout.decode(errors="replace") + rest).rstrip("\n")), _note(ran, limit)]
        return "\n".join(line for line in lines if line) or "(no output)"

    def _view(self, path: str, first: int = 1, last: int | None = None) -> str:
        lines = self._content(path).splitlines()
        begin = max(first, 1)
        end = min(len(lines), begin + _LINES - 1 if last is None else last)
        if begin > end:
            raise CallError(f"{path} has {len(lines)} lines")
        width = len(str(end))
        numbered = [f"{number:{width}}  {lines[number - 1][:LONGEST_LINE]}" for number in range(begin, end + 1)]
        rest = f"\n({len(lines) - end} more lines)" if end < len(lines) else ""
        return clipped("\n".join(numbered)) + rest

    def _edit(self, path: str, old: str, new: str) -> str:
        place = self._absolute(path)
        if not old:
            if self._ran(["sh", "-c", 'test -e "$0"', place], _LOOK_SECONDS).code == 0:
                raise CallError(f"{path} exists; expected an old text that is in it")
            self._write(place, new, 0o644)
            return f"{path} is written"
        content = self._content(path)
        if (count := content.count(old)) != 1:
            raise CallError(f"the old text is in {path} {count} times; expected it exactly once")
        self._write(place, content.replace(old, new), self._mode(place))
        return f"{path} is changed in line {content[: content.index(old)].count(chr(10)) + 1}"

    def _write(self, place: str, content: str, mode: int) -> None:
        self.changed = True
        try:
            self.sandbox.write(place, content.encode(errors="replace"), mode)
        except SandboxError as error:
            raise CallError(f"{place} cannot be written") from error

    def _mode(self, place: str) -> int:
        return 0o755 if self._ran(["sh", "-c", 'test -x "$0"', place], _LOOK_SECONDS).code == 0 else 0o644

    def _content(self, path: str) -> str:
        place = self._absolute(path)
        try:
            content = self.sandbox.read(place)
        except SandboxError as error:
            there = self._ran(["sh", "-c", 'test -e "$0"', place], _LOOK_SECONDS).code == 0
            wrong = "is no regular file, or too large" if there else "does not exist"
            raise CallError(f"{path} {wrong}") from error
        if len(content) > _LARGEST_FILE:
            raise CallError(f"{path} has more than {_LARGEST_FILE} bytes; use the shell")
        try:
            return content.decode()
        except UnicodeDecodeError as error:
            raise CallError(f"{path} is no text in UTF-8") from error

    def _absolute(self, path: str) -> str:
        if not path or "\0" in path or len(path) > _LONGEST_PATH:
            raise CallError("expected the path of a file")
        return posixpath.join(self._place(), path)

    def _place(self) -> str:
        """Return the working directory, of the image where nothing else has been chosen."""
        if self.directory is None:
            ran = self._ran(["sh", "-c", "pwd"], _LOOK_SECONDS, None)
            self.directory = ran.stdout.decode(errors="replace").strip() or "/"
        return self.directory

    def _ran(self, command: list[str], seconds: float, directory: str | None = "/") -> RunResult:
        """Run a program; it begins in the root of files, as the policy may have removed any other directory, or in that of the image for None."""
        return self.sandbox.run(command, seconds, directory=directory, most=_MOST_OUTPUT)


def asked(call: str) -> tuple[str, dict[str, Any]]:
    """Return which tool a call asks for, and its arguments, which are those that the tool takes.

    Raises:
        CallError: there is no such tool, or it takes other arguments.
    """
    name, given = read_call(call, LONGEST_CALL)
    if name not in _PARAMETERS:
        raise CallError(f"there is no tool {name!r:.80}; expected one of {', '.join(_PARAMETERS)}")
    properties, required = _PARAMETERS[name]["properties"], _PARAMETERS[name]["required"]
    arguments = {key: value for key, value in given.items() if value is not None or key in required}
    lacking = [key for key in required if key not in arguments]
    wrong = [key for key, value in arguments.items() if not _is_of(value, properties.get(key, {}).get("type"))]
    if lacking or wrong:
        takes = ", ".join(f"{key} ({kind['type']})" for key, kind in properties.items()) or "no arguments"
        raise CallError(
            f"{name} takes {takes}; {'missing' if lacking else 'wrong'}: {', '.join(lacking or wrong)[:200]}"
        )
    return name, arguments


def is_submit(name: str) -> bool:
    return name == _SUBMIT


def clipped(text: str) -> str:
    """Return a text of at most `CHARACTERS`: the beginning and the end of a longer one."""
    if len(text) <= CHARACTERS:
        return text
    half = CHARACTERS // 2
    return f"{text[:half]}\n({len(text) - 2 * half} characters are left out)\n{text[-half:]}"


def _is_of(value: Any, kind: str | None) -> bool:
    if kind is None or isinstance(value, bool):
        return False
    # as Python's int takes it; NaN and infinity are no JSON, and no time
    return isinstance(value, _KINDS[kind]) and (kind == "string" or -1e9 < value < 1e9)


def _note(ran: RunResult, limit: float) -> str:
    if ran.ended == "time":
        return f"(ended: it took more than {limit:g} s)"
    if ran.ended:
        return f"(ended: {ran.ended})"
    return f"(exit code {ran.code})" if ran.code else ""
