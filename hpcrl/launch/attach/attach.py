"""`hpcrl attach`: runs a shell, or a command, beside the processes of a run."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Sequence
from typing import NoReturn

from hpcrl.errors import RunError
from hpcrl.launch.manage.registry import states_of
from hpcrl.launch.manage.state import RunState
from hpcrl.launch.nodes import Node, make_plan
from hpcrl.launch.scheduler import PATIENCE_S, not_here, run_slurm
from hpcrl.rundir.attempt_config import attempt_config
from hpcrl.rundir.layout import Run
from hpcrl.rundir.ledger import read_attempts

_NO_JOB = ("SLURM_", "SLURMD_", "SBATCH_", "SRUN_")


def attach(run: Run, node: str | None, role: str | None, command: Sequence[str]) -> NoReturn:
    """Become a shell, or `command`, on a node of a running run, with the environment of the run's processes there.

    Args:
        node: its name, or its number in the run; None: the first one of that role.
        role: of `Role`; None: trainer, or what the node is.
    """
    state = running(run)
    config = attempt_config(run, state.attempt)
    plan, hosts = make_plan(config), read_attempts(run)[-1].hosts
    chosen = choose(plan, hosts, node, role)
    inside = [
        config.slurm.python or sys.executable, "-m", "hpcrl.launch.attach.remote", str(run.path), str(state.attempt), str(chosen.index), role or chosen.role, *command,
    ]  # fmt: skip
    sys.stdout.flush()
    terminal = ["--pty"] if os.isatty(0) and os.isatty(1) else []
    command, environment = on_node(state, hosts[chosen.index], *terminal)
    os.execvpe([*command, *inside][0], [*command, *inside], environment)


def running(run: Run) -> RunState:
    """Return the state of a run that has processes now. Raises RunError where it has none."""
    state = states_of([run])[0]
    if state.over or state.attempt == 0 or state.kind == "starting" or state.job.waiting or state.outcome is not None:
        raise RunError(f"{run.name} is {state.kind}: it has no processes now ({state.detail})")
    return state


def on_node(state: RunState, host: str, *options: str) -> tuple[list[str], dict[str, str]]:
    """Return the prefix of a command that runs on a node of a running run, and its environment.

    Args:
        options: of srun, where the run is a job of Slurm.
    """
    if state.submission["executor"] == "local":
        return [], dict(os.environ)
    if shutil.which("srun") is None:
        raise not_here("srun")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(_NO_JOB)}
    place = [f"--jobid={_raw_id(state)}", "--overlap", "--nodes=1", "--ntasks=1", f"--nodelist={host}"]
    return ["srun", *place, "--mem=0", *options], environment


def choose(plan: Sequence[Node], hosts: Sequence[str], node: str | None, role: str | None) -> Node:
    """Return the node of a plan that a user means. Raises RunError where there is none."""
    fitting = [
        one
        for one in plan
        if (role in (None, one.role) or (role == "rollout" and one.replicas) or (role == "sandbox" and one.sandboxes))
        and (node is None or node in (str(one.index), hosts[one.index]))
    ]
    if not fitting:
        listed = ", ".join(f"{one.index} {hosts[one.index]} ({one.role})" for one in plan)
        wanted = " ".join(filter(None, [role, "node", node]))
        raise RunError(f"the run has no {wanted}; it has {listed}")
    return fitting[0]


def _raw_id(state: RunState) -> str:
    """Return the job's own id: srun takes none of the form 12_0."""
    job = state.submission["job_id"]
    return run_slurm(["squeue", "-h", "-j", job, "-o", "%A"], PATIENCE_S).split()[0]
