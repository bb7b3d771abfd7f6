"""Calls of the program `sandbox` for agents in Python: they run commands in the sandbox of their sample, and read and write its files.

It imports nothing but the standard library. What a command gets travels by standard input, since others on the node see the arguments of a
process.
"""

from __future__ import annotations

import asyncio
import re
import shlex
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

MOST_BYTES = 16 << 20
"""Of each stream; a command that writes more is ended."""

ENDED, REFUSED = 124, 125
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


class SandboxRefusal(Exception):
    """The sandbox is gone, or refuses what is asked."""


@dataclass(frozen=True)
class Ran:
    """What a command wrote, and its exit code: ENDED where it was ended."""

    code: int
    stdout: bytes
    stderr: bytes


async def run(command: Sequence[str], environment: Mapping[str, str], directory: str) -> Ran:
    """Run a command in the sandbox, without input. It ends where this call is cancelled.

    Args:
        environment: variables beside those of the image.
        directory: absolute; where it begins.

    Raises:
        SandboxRefusal: the sandbox is gone.
        ValueError: a shell cannot export a variable of this name.
    """
    for name in environment:
        if not _NAME.fullmatch(name):
            raise ValueError(f"{name!r:.80}: expected a name of a variable, of letters, digits and _")
    exports = [f"export {name}={shlex.quote(value)}\n" for name, value in environment.items()]
    script = "".join([*exports, f"exec {shlex.join(command)} < /dev/null\n"])
    ran = await _called(["exec", "-i", "-w", directory, "--", "sh"], script.encode(errors="surrogateescape"))
    if ran.code == REFUSED:  # which the command may have said itself
        probe = await _called(["exec", "-w", "/", "--", "sh", "-c", ":"])
        if probe.code == REFUSED:
            raise SandboxRefusal(_said(probe))
    return ran


async def read(path: str) -> bytes:
    """Return the content of a file by its absolute path. Raises SandboxRefusal."""
    return _expect(await _called(["read", path]), path).stdout


async def write(path: str, content: bytes) -> None:
    """Write a file by its absolute path, with the directories above it. Raises SandboxRefusal."""
    _expect(await _called(["write", path], content), path)


def _expect(ran: Ran, path: str) -> Ran:
    if ran.code != 0:
        raise SandboxRefusal(f"{path}: {_said(ran)}")
    return ran


def _said(ran: Ran) -> str:
    return ran.stderr.decode(errors="replace").strip()[-500:]


async def _called(words: Sequence[str], given: bytes = b"") -> Ran:
    try:
        process = await asyncio.create_subprocess_exec(
            "sandbox",
            *words,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
    except FileNotFoundError as error:
        raise SandboxRefusal(
            "no program `sandbox`; expected a program of the environment agent whose row has an image"
        ) from error
    assert process.stdin
    assert process.stdout
    assert process.stderr

    async def give(stream: asyncio.StreamWriter) -> None:
        with suppress(BrokenPipeError, ConnectionResetError):  # it has refused already
            stream.write(given)
            await stream.drain()
            stream.close()

    async def take(stream: asyncio.StreamReader) -> bytes:
        content = bytearray()
        while len(content) <= MOST_BYTES and (piece := await stream.read(1 << 16)):
            content += piece
        if len(content) > MOST_BYTES:
            process.kill()
        return bytes(content[:MOST_BYTES])

    try:
        stdout, stderr, _ = await asyncio.gather(take(process.stdout), take(process.stderr), give(process.stdin))
        code = await process.wait()
    finally:
        if process.returncode is None:
            with suppress(ProcessLookupError):
                process.kill()
            await process.wait()
    return Ran(code if code >= 0 else ENDED, stdout, stderr)
