"""What every process of a run is doing at this moment: the stacks of all their threads, written by themselves."""

from __future__ import annotations

import os
import time
from contextlib import suppress

from hpcrl.errors import RunError
from hpcrl.launch.manage.registry import states_of
from hpcrl.rundir.commit import write_json
from hpcrl.rundir.layout import Run

_POLL_S = 0.2
_SETTLED_S = 2.0


def stacks(run: Run, patience_s: float = 20.0) -> dict[str, str]:
    """Ask the agents of a running run for the stacks of its processes; return them by process.

    Args:
        patience_s: for how long the first answer is awaited.

    Raises:
        RunError: the run does not run, or no process answered.
    """
    state = states_of([run])[0]
    if state.over or state.attempt == 0 or state.kind == "starting" or state.outcome is not None:
        raise RunError(f"{run.name} is {state.kind}: it has no processes that could show their stacks")
    folder = run.stacks(state.attempt, "any").parent
    before = {path.name: path.stat().st_size for path in folder.glob("*.txt")}
    write_json(run.stacks_request, {"attempt": state.attempt, "by": "hpcrl stacks", "time": time.time()})
    deadline, grown, settled = time.monotonic() + patience_s, dict[str, int](), 0.0
    while time.monotonic() < (settled or deadline):
        time.sleep(_POLL_S)
        with suppress(FileNotFoundError):  # nobody has written there yet
            os.listdir(folder)
        sizes = {path.name: path.stat().st_size for path in folder.glob("*.txt")}
        now = {name: size for name, size in sizes.items() if size > before.get(name, 0)}
        if now != grown:
            grown, settled = now, time.monotonic() + _SETTLED_S
    if not grown:
        raise RunError(
            f"no process of {run.name} has shown its stacks within {patience_s:.0f} s; do its agents still run?"
        )
    answers = {}
    for name in sorted(grown):
        with (folder / name).open() as file:
            file.seek(before.get(name, 0))
            answers[name.removesuffix(".txt")] = file.read()
    return answers
