"""Programs of agents in containers: how they are started, what they see, and that no key is among the arguments.

A program stands in for apptainer and for enroot. It notes its arguments, reads them as those do, and runs the command where it sees, of this
machine, only what is mounted and the directories of the operating system, with the variables that are handed on and no others.

The real ones run the same tests where they are installed (`-m containers`).
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from hpcrl.config import EnvironmentConfig
from hpcrl.config.sections.environment import AgentConfig, AgentContainerConfig, SkyRLGymConfig
from hpcrl.envs.base import Turn
from hpcrl.envs.registry import common_extras, make_environment
from hpcrl.envs.tasks.agent import Agent
from hpcrl.errors import ConfigError, UserCodeError
from hpcrl.rundir.commit import write_text
from tests.containers import SYSTEM, make_image, missing
from tests.envs.tasks.test_agent import KEY, MESSAGES, ORPHANS, PAYS, endpoint, homes, running

STAND_IN = """#!{python} -IS
import json, os, sys

name, arguments = os.path.basename(sys.argv[0]), sys.argv[1:]
assert arguments.pop(0) == {{"apptainer": "exec", "enroot": "start"}}[name], sys.argv
with open({log!r}, "a") as file:
    file.write(json.dumps(sys.argv) + "\\n")
options = []
while arguments[0].startswith("--"):
    option, _, value = arguments.pop(0).partition("=")
    if name == "enroot" and option not in ("--mount", "--env", "--rw"):
        sys.exit(print("Usage: enroot start"))  # with 0, as the real one
    if name == "enroot" and option != "--rw":
        value = arguments.pop(0)
    options.append((option, value))
image, *command = arguments
if image != "/images/agent":
    sys.exit(255)
given = {{option: [value for one, value in options if one == option] for option, _ in options}}
if name == "apptainer":
    assert "--containall" in given and "--cleanenv" in given, given
    told = {{key: value for key, value in os.environ.items() if key.lower().endswith("_proxy")}}  # whatever --cleanenv
    for before in ("SINGULARITYENV_", "APPTAINERENV_"):
        told |= {{key[len(before):]: value for key, value in os.environ.items() if key.startswith(before)}}
    binds = [one.split(":") for one in given["--bind"]]
    directory = given["--pwd"][0]
else:
    told = {{key: os.environ[key] for key in given["--env"]}}
    changed = [key for key, value in told.items() if "\\n" in value or value[:1] in ("'", '"')]
    assert not changed, changed
    binds = []
    for one in given["--mount"]:
        source, target, kind, flags = one.split(":")
        assert (kind, flags.split(",")[:2]) == ("none", ["x-create=auto", "rbind"]), one
        binds.append([source, target, flags.split(",")[2]])
    directory = "/"
root = "/mnt"  # of a mount namespace of its own
lines = ["set -e", "mount --make-rprivate /", f"mount -t tmpfs none {{root}}", f"mkdir {{root}}/tmp"]
for path in ("/usr", "/bin", "/lib", "/lib64", "/etc"):
    lines += [f"mkdir -p {{root}}{{path}}", f"mount --rbind {{path}} {{root}}{{path}}"]
for source, target, mode in binds:
    lines += [f"mkdir -p {{root}}{{target}}", f"mount --bind {{source}} {{root}}{{target}}"]
    lines += [f"mount -o remount,bind,ro {{root}}{{target}}"] * (mode == "ro")
lines.append(f'exec chroot {{root}} sh -c \\'cd "$0" && exec "$@"\\' {{directory}} "$@"')
as_root = ["--map-root-user"] if os.geteuid() else []
os.execvpe("unshare", ["unshare", *as_root, "--mount", "bash", "-c", "\\n".join(lines), name, *command], {{**told, "PATH": "/usr/sbin:/usr/bin:/bin"}})
"""


@dataclass(frozen=True)
class Program:
    """What starts containers in a test, an image for it, and what has to be mounted in that."""

    kind: Any
    image: str = "/images/agent"
    mounts: Sequence[str] = ()


REAL = {
    "apptainer": ["apptainer", "mksquashfs"],
    "enroot": ["enroot", "mksquashfs", "unsquashfs", "squashfuse", "fuse-overlayfs"],
}


@pytest.fixture(params=[*REAL, *(pytest.param(f"real {kind}", marks=pytest.mark.containers) for kind in REAL)])
def program(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Program:
    log, kind = tmp_path / "calls", request.param.split()[-1]
    if kind == request.param:
        found, script = Program(kind), STAND_IN.format(python=sys.executable, log=str(log))
    else:
        if reason := missing(*REAL[kind]):
            pytest.skip(reason)
        found = Program(kind, str(make_image(tmp_path / "image.sqsh")), SYSTEM)
        script = f'#!/bin/sh\necho "$*" >> {log}\nexec {shutil.which(kind)} "$@"\n'
    write_text(tmp_path / "bin" / kind, script, mode=0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:{os.environ['PATH']}")
    return found


def played(
    program: Program,
    script: str,
    reward: Any = "file",
    image: str = "",
    mounts: Sequence[str] = (),
    ended: threading.Event | None = None,
    **settings: Any,
) -> Turn:
    container = AgentContainerConfig(
        kind=program.kind, image=image or program.image, mounts=[*program.mounts, *mounts], **settings
    )
    gym = SkyRLGymConfig(agent=AgentConfig(command=["sh", "-c", script], reward=reward, container=container))
    made = make_environment("agent", common_extras(EnvironmentConfig(skyrl_gym=gym), 4))
    assert isinstance(made, Agent)
    return made.play(MESSAGES, endpoint(ended))


def test_what_a_program_sees_in_a_container(program: Program, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("data", "out"):
        (tmp_path / name).mkdir()
    (tmp_path / "data" / "a").write_text("seen")
    monkeypatch.setenv("SECRET", "of the account")
    monkeypatch.setenv("WANTED", "kept")
    monkeypatch.setenv("http_proxy", "http://proxy:3128")
    monkeypatch.setenv("SINGULARITYENV_SECRET", "of the account")
    mounts = [f"{tmp_path}/data:/data:ro", f"{tmp_path}/out"]
    out = tmp_path / "out"
    script = f"env > {out}/env; pwd > {out}/pwd; cat $HPCRL_ROW > {out}/row; cat /data/a > {out}/a; ls {tmp_path} > {out}/ls; "
    script += f"! touch /data/b && {PAYS}"
    assert played(program, script, mounts=mounts, env=["WANTED", "NOT_THERE"]) == Turn([], 0.5, True)
    variables = dict(line.partition("=")[::2] for line in (out / "env").read_text().splitlines())
    assert variables["OPENAI_API_KEY"] == KEY
    assert variables["OPENAI_BASE_URL"] == "http://127.0.0.1:9/v1"
    assert variables["no_proxy"] == "127.0.0.1"
    assert variables["WANTED"] == "kept"
    assert not {"SECRET", "NOT_THERE"} & set(variables)
    assert not variables.get("http_proxy")
    assert json.loads((out / "row").read_text())["prompt"] == MESSAGES
    assert (out / "pwd").read_text().strip().endswith("/work")
    assert (out / "a").read_text() == "seen"
    assert (out / "ls").read_text().split() == ["out"]
    assert homes() == []
    (call,) = (tmp_path / "calls").read_text().splitlines()
    assert KEY not in call


def test_a_program_that_fails_in_a_container_says_so(program: Program) -> None:
    with pytest.raises(UserCodeError, match="exit code 7: no such tool"):
        played(program, "echo no such tool; exit 7", arguments=["--nv"] if program.kind == "apptainer" else ["--rw"])
    assert homes() == []


def test_a_container_is_ended_with_all_it_started_when_its_sample_is_over(program: Program, tmp_path: Path) -> None:
    mark, ended, begun = f"95{os.getpid()}", threading.Event(), tmp_path / "begun"
    begun.mkdir()
    script = f"{ORPHANS.format(mark=mark)} touch {begun}/it; sleep {mark}"
    with ThreadPoolExecutor(1) as thread:
        playing = thread.submit(played, program, script, mounts=[str(begun)], ended=ended)
        while not list(begun.iterdir()) and not playing.done():
            time.sleep(0.02)
        ended.set()
        with pytest.raises(UserCodeError, match="its program was ended"):
            playing.result()
    assert running(mark) == []
    assert homes() == []


def test_no_reward_is_made_of_a_container_that_did_not_start(program: Program) -> None:
    """Enroot ends with 0 where it does not know an option, Apptainer with 255: neither is the program's exit code."""
    wrong: dict[str, Any] = {"image": "/nowhere"} if program.kind == "apptainer" else {"arguments": ["--nv"]}
    code = 255 if program.kind == "apptainer" else 0
    with pytest.raises(UserCodeError, match=rf"its container did not start \(exit code {code}\)"):
        played(program, "true", "exit_code", **wrong)
    assert played(program, "exit 3", "exit_code").reward == 0.0
    assert played(program, 'rm -r "${HPCRL_ROW%/*}"/[!w]*', "exit_code").reward == 1.0, "whatever it removes"
    assert homes() == []


@pytest.mark.parametrize(("value", "found"), [("a\nb", "a line break"), ('"a"', "quotes around it")])
def test_a_variable_that_enroot_would_change_is_refused(
    program: Program, value: str, found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANTED", value)
    if program.kind == "enroot":
        with pytest.raises(ConfigError, match=rf"container\.env: the value of WANTED has {found}"):
            played(program, "true", env=["WANTED"])
    else:
        assert played(program, "[ ${#WANTED} = 3 ]", "exit_code", env=["WANTED"]).reward == 1.0
