"""An agent program whose tools run in a sandbox: the command that it finds, what it sees, and the tests that decide; over a real server."""

from __future__ import annotations

import json
import os
import re
import shlex
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import yaml

from hpcrl.config import EnvironmentConfig
from hpcrl.config.sections.environment import AgentConfig, AgentServiceConfig, SkyRLGymConfig
from hpcrl.envs.agents import sandbox_command
from hpcrl.envs.base import Endpoint, Turn
from hpcrl.envs.registry import common_extras
from hpcrl.envs.tasks.agent import Agent
from hpcrl.envs.tools.sandboxes import Sandboxes, SandboxLost
from hpcrl.errors import ConfigError, DataError, UserCodeError
from hpcrl.sandboxes import sandbox as module
from tests.paths import ROOT
from tests.sandboxes.material import PATIENCE_S

TESTS = {"command": "cat fixed && echo 0.25 > /logs/verifier/reward.txt", "scoring": "file", "seconds": 60}
ROW = {"image": "python", "directory": "/repo", "files": {"/repo/broken": "x\n"}, "tests": TESTS}


@pytest.fixture(autouse=True)
def python(monkeypatch: pytest.MonkeyPatch) -> None:
    """Start programs with a Python that ordinary users have."""
    monkeypatch.setattr(sys, "executable", module._COMMAND[0])


@pytest.fixture
def play(sandboxes: Sandboxes) -> Iterator[Callable[..., Turn]]:
    """Plays a shell script as an agent program."""
    made = list[Agent]()

    def one(script: str, row: dict[str, Any] = ROW, **settings: Any) -> Turn:
        made.append(agent(script, row, sandboxes, **settings))
        made[-1].init([])
        return made[-1].play([], endpoint())

    yield one
    for each in made:
        each.close()


def agent(script: str, row: dict[str, Any], sandboxes: Sandboxes | None, **settings: Any) -> Agent:
    gym = SkyRLGymConfig(agent=AgentConfig(command=["sh", "-c", script], **settings))
    return Agent({**common_extras(EnvironmentConfig(skyrl_gym=gym), 4, sandboxes), **row})


def endpoint() -> Endpoint:
    return Endpoint("http://127.0.0.1:9/v1", "its key", "policy", threading.Event(), str, Future)


def test_tests_decide_over_what_a_program_has_done_in_its_sandbox(play: Callable[..., Turn], user: Path) -> None:
    script = f"""
        test ! -e /repo/broken && test "$(sandbox exec sh -c pwd)" = /repo && sandbox exec sh -c 'cat broken > fixed'
        env > {user}/env; cat $HPCRL_ROW > {user}/row; ls -A > {user}/ls
    """
    turn = play(script)
    assert (turn.reward, turn.done, turn.metrics) == (0.25, True, {"solved": 0.0, "tests_ended": 0.0})
    variables = dict(line.partition("=")[::2] for line in (user / "env").read_text().splitlines())
    assert sorted(name for name in variables if name.startswith("HPCRL")) == [
        *("HPCRL_MODEL", "HPCRL_REWARD", "HPCRL_ROW", "HPCRL_SANDBOX"),
    ]
    assert re.fullmatch(r"http://[\w-]{43}@127\.0\.0\.1:\d+/repo", variables["HPCRL_SANDBOX"])
    row = json.loads((user / "row").read_text())
    assert set(row) == {"image", "directory", "files", "custom", "max_turns", "prompt"}, "neither tests nor a solution"
    assert (user / "ls").read_text() == ""
    assert play("true").reward == 0.0, "nothing is fixed"


PAGE = (ROOT / "docs" / "agents.md").read_text(encoding="utf-8")
BOX = yaml.safe_load(re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)[0])["environment"]
BUBBLEWRAP = ["--bind", "/a", "/a", "--chdir", "/a", "--setenv", "A", "b", "bash", "-c", "pwd; echo 'a  b'"]
"""What mini-swe-agent starts bubblewrap with."""

COMMANDS = [
    (shlex.join([BOX["executable"], *BOX["wrapper_args"], *BUBBLEWRAP]), 0, "/repo\na  b\n", ""),
    ("sandbox exec sh -c 'echo out; echo err >&2; exit 7'", 7, "out\n", "err\n"),
    ("echo in | sandbox exec -i cat", 0, "in\n", ""),
    ("echo in | sandbox exec cat", 0, "", ""),
    ("sandbox exec -w / -e A=b=c -e D=é sh -c 'pwd; echo $A $D'", 0, "/\nb=c é\n", ""),
    ("sandbox exec -- sh -c 'echo $0 -w' x -w", 0, "x -w\n", ""),
    ("sandbox exec --seconds 0.3 sleep 600", 124, "", "sandbox: the command was ended (time)\n"),
    ("printf '\\377\\000x' | sandbox write /a/b && sandbox read /a/b | od -An -tx1", 0, " ff 00 78\n", ""),
    ("sandbox read /nothing", 125, "", "sandbox: SandboxError: "),
    ("sandbox exec", 125, "", "sandbox: expected a command"),
    ("HPCRL_SANDBOX=${HPCRL_SANDBOX%@*}1@${HPCRL_SANDBOX#*@} sandbox exec true", 125, "", "sandbox: no sandbox of this node has this key"),
    ("HPCRL_SANDBOX=http://key@127.0.0.1:9/ sandbox exec true", 125, "", "sandbox: it is gone: "),
    ("(sandbox exec cat /dev/zero; echo $? >&2) | head -c 1 | od -An -tx1", 0, " 00\n", "141\n"),
    ("(sandbox read /bin/bash; echo $? >&2) | head -c 1 | wc -c", 0, "1\n", "141\n"),
    ("sandbox exec sh -c : >&-", 0, "", ""),
    ("sandbox exec tar --version >&-", 125, "", "sandbox: the output cannot be written: Bad file descriptor\n"),
    ("sandbox exec tar --version > /dev/full", 125, "", "sandbox: the output cannot be written: No space left on device\n"),
    ("sandbox exec -i cat <&-", 0, "", ""),
    ("head -c 11534337 /dev/zero | sandbox exec -i cat", 125, "", "sandbox: standard input has more than 11 MiB; give it in parts"),
    ("head -c 11534337 /dev/zero | sandbox write /x", 125, "", "sandbox: standard input has more than 11 MiB; give it in parts"),
    ("HPCRL_SANDBOX= sandbox exec true", 125, "", "sandbox: HPCRL_SANDBOX names none"),
]  # fmt: skip


def test_the_command_of_a_program(play: Callable[..., Turn], user: Path) -> None:
    row = {name: value for name, value in ROW.items() if name != "tests"}
    lines = [f"({line}) > {user}/{at}.out 2> {user}/{at}.err; echo $? > {user}/{at}.code" for at, (line, *_) in enumerate(COMMANDS)]  # fmt: skip
    assert play("\n".join(lines), row, reward="exit_code").reward == 1.0
    for at, (line, code, out, err) in enumerate(COMMANDS):
        assert (user / f"{at}.code").read_text() == f"{code}\n", (line, (user / f"{at}.err").read_text())
        assert (user / f"{at}.out").read_text() == out, line
        found = (user / f"{at}.err").read_text()
        assert found.startswith(err), line
        assert bool(found) == bool(err), line


def test_output_comes_while_a_command_runs_and_ends_with_its_reader(sandboxes: Sandboxes) -> None:
    one = sandboxes.start("python")
    environment = os.environ | {sandbox_command.VARIABLE: one.url.replace("://", f"://{one.key}@")}
    words = [sys.executable, "-I", "-S", sandbox_command.__file__, "exec", "sh", "-c", "echo begun; exec sleep 987"]
    with subprocess.Popen(words, env=environment, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"begun\n"
        process.kill()
    seen = "import os, sys; sys.exit(any(b'98' + b'7' in open(f'/proc/{one}/cmdline', 'rb').read() for one in os.listdir('/proc') if one.isdigit()))"
    deadline = time.monotonic() + PATIENCE_S
    while one.run(["python3", "-c", seen], PATIENCE_S).code:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    one.end()


def test_a_command_on_a_node_that_falls_silent_ends(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It ended with its sample, or never where that has no limit."""
    monkeypatch.setattr(sandbox_command, "_SILENT_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        for begun in (b"", b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n3\r\n{}\n\r\n"):
            answering = threading.Thread(target=answer, args=(silent, begun))
            answering.start()
            monkeypatch.setenv(sandbox_command.VARIABLE, f"http://key@127.0.0.1:{silent.getsockname()[1]}/")
            assert sandbox_command.main(["exec", "true"]) == 125
            answering.join()
            assert "nothing was heard of its node for 0.2 s" in capsys.readouterr().err
    monkeypatch.setattr(sandbox_command, "_CONNECT_S", 0.1)
    with socket.create_server(("127.0.0.1", 0), backlog=0) as full, socket.create_connection(full.getsockname()):
        monkeypatch.setenv(sandbox_command.VARIABLE, f"http://key@127.0.0.1:{full.getsockname()[1]}/")
        assert sandbox_command.main(["exec", "true"]) == 125
        assert "its node took no connection within 0.1 s" in capsys.readouterr().err


def answer(listener: socket.socket, begun: bytes) -> None:
    """Begin an answer, and wait until the client is gone."""
    with listener.accept()[0] as connection:
        connection.sendall(begun)
        while connection.recv(1 << 16):
            pass


CALLS = """
import asyncio, sys
sys.path.insert(0, {folder!r})
import sandbox_calls
from sandbox_calls import ENDED, SandboxRefusal, read, run, write

async def main():
    ran = await run(["sh", "-c", 'pwd; echo "$A" "$1"; cat; echo é >&2; exit 125', "sh", "it's\\n"], {{"A": "'b'\\n;c"}}, "/tmp")
    assert (ran.code, ran.stdout, ran.stderr) == (125, b"/tmp\\n'b'\\n;c it's\\n\\n", "é\\n".encode()), ran
    await write("/repo/a b/c", b"\\0x")
    assert await read("/repo/a b/c") == b"\\0x"
    sandbox_calls.MOST_BYTES = 70_000
    ran = await run(["cat", "/dev/zero"], {{}}, "/")
    assert (ran.code, len(ran.stdout)) == (ENDED, 70_000)
    cut = asyncio.create_task(run(["sh", "-c", "sleep 3; echo x > /repo/cut"], {{}}, "/"))
    await asyncio.sleep(0.5)
    cut.cancel()
    await run(["sh", "-c", "(sleep 3; echo late > /repo/late) > /dev/null &"], {{}}, "/")
    for name, refused in (("/nothing", read("/nothing")), ("a=b", run(["true"], {{"a=b": ""}}, "/"))):
        try:
            await refused
            raise AssertionError(name)
        except (SandboxRefusal, ValueError) as error:
            assert name in str(error)
    while b"late" not in (ran := await run(["ls", "/repo"], {{}}, "/")).stdout:
        await asyncio.sleep(0.5)
    assert ran.stdout == b"a b\\nbroken\\nlate\\n", ran

asyncio.run(main())
"""


def test_agents_in_python_call_it(play: Callable[..., Turn], user: Path) -> None:
    """What configs/agents/sandbox_calls.py promises; hpcrl_sandbox.py beside it brings these calls to verifiers."""
    (user / "calls.py").write_text(CALLS.format(folder=str(ROOT / "configs" / "agents")))
    assert play(f"python3 {user}/calls.py && sandbox exec sh -c 'cat broken > fixed'").reward == 0.25


def test_a_lost_sandbox_is_no_reward(play: Callable[..., Turn]) -> None:
    """Neither where tests decide nor where the program's exit code does, which only says that its command failed."""
    end = """python3 -c "
import os, urllib.parse, urllib.request
address = urllib.parse.urlsplit(os.environ['HPCRL_SANDBOX'])
url = f'http://127.0.0.1:{address.port}/end'
urllib.request.urlopen(urllib.request.Request(url, b'{}', {'authorization': f'Bearer {address.username}'}))
"
"""
    for row in (ROW, {"image": "python"}):
        with pytest.raises(SandboxLost):
            play(f"{end} sandbox exec true", row, reward="exit_code")


def test_a_program_that_fails_is_no_work_of_the_policy(play: Callable[..., Turn]) -> None:
    with pytest.raises(UserCodeError, match=r"exit code 3: my key is http://…@127"):
        play("echo my key is $HPCRL_SANDBOX; exit 3")
    assert play("sandbox exec cp broken fixed; sandbox exec sh -c 'cat broken > fixed'; exit 3", reward="exit_code").reward == 0.25  # fmt: skip


def test_what_does_not_begin() -> None:
    with pytest.raises(ConfigError, match=re.escape("[slurm.sandboxes]")):
        agent("true", ROW, None).init([])
    with pytest.raises(DataError, match=r"environment.timeout_seconds is 300"):
        agent("true", {**ROW, "tests": {**TESTS, "seconds": 300}}, None)
    service = AgentServiceConfig(url="http://127.0.0.1:9")
    assert agent("true", ROW, None, service=service).init([]) == [], "a service has sandboxes of its own"
