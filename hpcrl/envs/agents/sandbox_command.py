"""Runs commands in the sandbox of a sample, and reads and writes its files: the program `sandbox` that an agent program finds on its path.

    sandbox exec [-i] [-w DIRECTORY] [-e NAME=VALUE …] [--seconds N] COMMAND …   prints what the command prints, and exits as it does
    sandbox read PATH       prints the content of a file
    sandbox write PATH      writes standard input into a file

HPCRL_SANDBOX is http://KEY@HOST:PORT/DIRECTORY: the server of the sandbox, its key, and where commands begin, if not in the directory of the
image. It exits with 124 where the command was ended, and with 125 where the sandbox is gone, or refuses what is asked. The server sends
something at least every BEAT_S seconds, so that a node which is silent for longer counts as gone. Where the reader of its output is gone, it
ends by SIGPIPE, and the command in the sandbox with it.

It imports nothing but the standard library and is started without site: an agent starts it for each command, also in a container.
"""

from __future__ import annotations

import argparse
import base64
import errno
import http.client
import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from typing import Any, TextIO
from urllib.parse import SplitResult, unquote, urlsplit

VARIABLE = "HPCRL_SANDBOX"
ENDED, REFUSED = 124, 125
_LONGEST_S = 24 * 3600.0
_MOST_INPUT = 11 << 20  # a request has 16 MiB, in base64
_BUSY, _WAIT_S = 429, 0.2
_CONNECT_S, _SILENT_S = 20.0, 150.0  # a server gives up a transfer after 120

BEAT_S = 10.0
"""Between two lines of a server whose command writes nothing."""


class Refusal(Exception):
    """The sandbox is gone, or refuses what is asked."""


def main(words: list[str]) -> int:
    asked = _arguments(words)
    try:
        return asked.action(asked)
    except Refusal as refusal:
        print(f"sandbox: {refusal}", file=sys.stderr)
    except TimeoutError:
        print(f"sandbox: it is gone: nothing was heard of its node for {_SILENT_S:g} s", file=sys.stderr)
    except (OSError, http.client.HTTPException, ValueError, KeyError) as error:
        print(f"sandbox: it is gone: its server has ended, or ends its answer too early ({error!r})", file=sys.stderr)
    return REFUSED


def _arguments(words: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="sandbox", description="Use the sandbox of this sample.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    execute = commands.add_parser("exec", help="run a command")
    execute.add_argument("-i", "--interactive", action="store_true", help="give it standard input, read to its end")
    execute.add_argument("-w", "--workdir", default="", metavar="DIRECTORY", help="default: that of the task")
    execute.add_argument("-e", "--env", action="append", default=[], metavar="NAME=VALUE")
    execute.add_argument("--seconds", type=float, default=_LONGEST_S, metavar="N", help="end it then")
    execute.add_argument("command", nargs=argparse.REMAINDER)
    execute.set_defaults(action=_execute)
    for name, action, text in (("read", _read, "print a file"), ("write", _write, "write standard input into a file")):
        one = commands.add_parser(name, help=text)
        one.add_argument("path")
        one.set_defaults(action=action)
    return parser.parse_args(words)


def _execute(asked: argparse.Namespace) -> int:
    command = asked.command[1:] if asked.command[:1] == ["--"] else asked.command
    if not command:
        raise Refusal("expected a command, as in: sandbox exec ls /")
    body = {
        "command": command,
        "seconds": asked.seconds,
        "input": base64.b64encode(_given() if asked.interactive else b"").decode(),
        "environment": dict(one.partition("=")[::2] for one in asked.env),
        "directory": asked.workdir or unquote(_address().path),
    }
    streams: dict[str, TextIO | None] = {"stdout": sys.stdout, "stderr": sys.stderr}
    last: dict[str, Any] = {}
    for line in _lines("/exec", body):
        last = json.loads(line)
        for name in streams.keys() & last.keys():
            _put(streams[name], base64.b64decode(last[name]))
    if "error" in last:
        raise Refusal(str(last["error"]))
    if last["code"] is None:
        print(f"sandbox: the command was ended ({last['ended']})", file=sys.stderr)
        return ENDED
    return last["code"]


def _read(asked: argparse.Namespace) -> int:
    _put(sys.stdout, base64.b64decode(_object("/read", {"path": asked.path})["content"]))
    return 0


def _write(asked: argparse.Namespace) -> int:
    content = base64.b64encode(_given()).decode()
    _object("/write", {"path": asked.path, "content": content})
    return 0


def _given() -> bytes:
    given = sys.stdin.buffer.read(_MOST_INPUT + 1) if sys.stdin else b""  # None: it is closed
    if len(given) > _MOST_INPUT:
        raise Refusal(
            f"standard input has more than {_MOST_INPUT >> 20} MiB; give it in parts, as by: sandbox exec -i sh -c 'cat >> FILE'"
        )
    return given


def _put(stream: TextIO | None, content: bytes) -> None:
    """Write to an own stream. Raises Refusal where that cannot be done."""
    try:
        if stream is None:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        left = memoryview(content)
        while left:
            left = left[os.write(stream.fileno(), left) :]
    except BrokenPipeError:  # its reader, such as head, has seen enough
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGPIPE)
    except OSError as error:
        raise Refusal(f"the output cannot be written: {error.strerror}") from error


def _object(path: str, body: dict[str, Any]) -> dict[str, Any]:
    return json.loads(b"".join(_lines(path, body)))


def _lines(path: str, body: dict[str, Any]) -> Iterator[bytes]:
    """Yield the lines of an answer as they come. Raises Refusal where there is none."""
    address = _address()
    headers = {"authorization": f"Bearer {address.username}"}
    while True:
        connection = http.client.HTTPConnection(address.hostname or "", address.port, _CONNECT_S)
        try:
            connection.connect()
        except TimeoutError as error:
            raise Refusal(f"it is gone: its node took no connection within {_CONNECT_S:g} s") from error
        connection.sock.settimeout(_SILENT_S)
        connection.request("POST", path, json.dumps(body).encode(), headers)
        answer = connection.getresponse()
        if answer.status == 200:
            yield from answer
            return
        content = answer.read()
        if answer.status != _BUSY:
            raise Refusal(_reason(content, answer.status))
        connection.close()
        time.sleep(_WAIT_S)


def _address() -> SplitResult:
    address = urlsplit(os.environ.get(VARIABLE, ""))
    if not address.hostname:
        raise Refusal(f"{VARIABLE} names none; expected a program of the environment agent whose row has an image")
    return address


def _reason(content: bytes, status: int) -> str:
    try:
        return str(json.loads(content)["error"])
    except (ValueError, KeyError, TypeError):
        return f"its server answered {status}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
