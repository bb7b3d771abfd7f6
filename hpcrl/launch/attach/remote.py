"""Runs on the node for `hpcrl attach`: takes over the environment of a process of the run, and becomes the command.

python -m hpcrl.launch.attach.remote RUN_DIRECTORY ATTEMPT NODE_INDEX ROLE [COMMAND ...]
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import cast

from hpcrl.rundir.layout import Run
from hpcrl.rundir.process_names import PROGRAMS, Role

_KEPT = ("TERM", "SSH_", "DISPLAY", "COLORTERM", "LINES", "COLUMNS")  # of the terminal, not of the run


def processes(run: Run, attempt: int) -> dict[int, tuple[str, dict[str, str]]]:
    """Return the processes of an attempt on this machine: by process id, the script that each runs and its environment."""
    found = {}
    for directory in Path("/proc").iterdir():
        if not directory.name.isdigit():
            continue
        try:
            words = os.fsdecode((directory / "cmdline").read_bytes()).split("\0")
            if str(run.path) not in words:
                continue
            pairs = os.fsdecode((directory / "environ").read_bytes()).split("\0")
        except OSError:  # it has ended, or is somebody else's
            continue
        environment = dict(pair.split("=", 1) for pair in pairs if "=" in pair)
        script = next((Path(word).name for word in words if word.endswith(".py")), "")
        if script and environment.get("HPCRL_ATTEMPT") == str(attempt):
            found[int(directory.name)] = script, environment
    return found


def main(path: str, attempt: str, index: str, role: str, *command: str) -> None:
    run = Run(Path(path))
    found = processes(run, int(attempt))
    programs = PROGRAMS[cast(Role, role)].values()
    environment = next((own for script, own in found.values() if Path(script).stem in programs), None)
    if environment is None:
        print(f"hpcrl: no {role} process of {run.name} runs on {socket.gethostname()}", file=sys.stderr)
        environment = {**os.environ, "PYTHONPATH": str(run.code), "PYTHONSAFEPATH": "1", "HPCRL_ATTEMPT": attempt}
    mine = {name: value for name, value in os.environ.items() if name.startswith(_KEPT)}
    environment = {**environment, **mine, "PATH": _path(environment)}
    os.chdir(run.path)
    if not command:
        _explain(run, int(attempt), index, role, found)
        command = (os.environ.get("SHELL") or "/bin/bash",)
    try:
        os.execvpe(command[0], list(command), environment)
    except OSError as error:
        sys.exit(f"hpcrl: {command[0]}: {error.strerror}")


def _path(environment: Mapping[str, str]) -> str:
    programs = str(Path(sys.executable).parent)
    others = [place for place in environment.get("PATH", os.defpath).split(":") if place != programs]
    return ":".join([programs, *others])


def _explain(run: Run, attempt: int, index: str, role: str, found: Mapping[int, tuple[str, Mapping[str, str]]]) -> None:
    print(f"{socket.gethostname()}: {role} node {index} of {run.name}, attempt {attempt}, in {run.path}")
    for pid, (script, _) in sorted(found.items()):
        print(f"  {pid:<8} {script}")
    print(f"  logs/{attempt}/            logs of this attempt (hpcrl logs -f {run.name})")
    print(f"  hpcrl stacks {run.path}    what every thread does; kill -USR1 PID writes to logs/{attempt}/stacks/")
    print("  Leaving this shell leaves the run alone.", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
