"""Starts an agent: its node and start number, its signals, its attempt and its log."""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import NoReturn

import submitit

from hpcrl.errors import HpcrlError, RunError
from hpcrl.launch.layouts import AttemptLayout, layouts_for
from hpcrl.launch.requeue.requeue import BATCH_SHELL, requeue_if_its_script_was_killed, start_name
from hpcrl.launch.requeue.restart import layout_of_attempt
from hpcrl.launch.requeue.roles import LayoutChoice
from hpcrl.launch.requeue.room import keep_nodes
from hpcrl.rundir.commit import make_directory
from hpcrl.rundir.layout import Run
from hpcrl.rundir.ledger import Attempt, find_attempt, open_attempt

_SHARED_S = 90.0
_KNOWN_S = 150.0  # slurmctld may be restarting
_POLL_S = 0.2


@dataclass(frozen=True)
class NodeContext:
    """Node and start of the run of this agent, by the executor's environment.

    Attributes:
        index: node id of the run, 0 first.
        hosts: names of all nodes, by index.
        job: key of this start, the same on all its nodes and different after a requeue.
        restarts: how often Slurm has restarted this job.
        local: whether all nodes share this machine.
    """

    index: int
    hosts: list[str]
    job: str
    restarts: int
    local: bool

    @property
    def job_id(self) -> str:
        return self.job.rpartition(".")[0]

    @classmethod
    def here(cls) -> NodeContext:
        """Return the context of the calling process, which submitit started."""
        environment = submitit.JobEnvironment()
        if environment.cluster != "slurm":
            hosts = [socket.gethostname()] * environment.num_tasks
            return cls(environment.global_rank, hosts, f"local-{environment.job_id}", 0, True)
        restarts = int(os.environ.get("SLURM_RESTART_COUNT") or "0")
        return cls(environment.global_rank, list(environment.hostnames), start_name(), restarts, False)


def listen() -> list[int]:
    """Return a list that gets each SIGTERM and SIGUSR2 from now on, in place of what submitit does with them."""
    signals = list[int]()
    for number in (signal.SIGTERM, signal.SIGUSR2):
        signal.signal(number, lambda got, _frame: signals.append(got))
    signal.signal(signal.SIGCONT, lambda _got, _frame: None)  # submitit would count it
    return signals


class BatchScript:
    """Batch script that requeues the job, for the agent of its node, which checks at each SIGTERM whether the script was killed.

    Args:
        signals: where the signals are noted, with which the agent does something beside that.
    """

    def __init__(self, signals: list[int]) -> None:
        self._signals, self._shell = signals, Path("/proc", os.environ.get(BATCH_SHELL) or "none")
        self._seen = self._shell.exists()  # a container may have numbers of processes of its own
        signal.signal(signal.SIGTERM, self._on_sigterm)
        if signal.SIGTERM in signals:
            requeue_if_its_script_was_killed()

    def _on_sigterm(self, number: int, _frame: FrameType | None) -> None:
        self._signals.append(number)
        threading.Thread(target=requeue_if_its_script_was_killed).start()

    def require_its_end(self) -> None:
        """Wait for Slurm's SIGTERM after the batch script was killed; called by an agent that ends.

        Before that Slurm grants no requeue, and after that no process is left to ask for one. Where slurmctld cannot be reached for a while,
        the attempt may fail, and its agents end, before Slurm knows the end of the script.
        """
        deadline = time.monotonic() + _KNOWN_S
        while self._seen and not self._shell.exists() and signal.SIGTERM not in self._signals:
            if time.monotonic() > deadline:
                print(f"the batch script was killed, and Slurm sent no SIGTERM for {_KNOWN_S:.0f} s", flush=True)
                return
            time.sleep(_POLL_S)


def serve_element(serve: Callable[[NodeContext, list[int]], int]) -> NoReturn:
    """Serve as the agent of one element of a job array beside the run's own; end the process with the exit status, or that of an error.

    Args:
        serve: gets the context of this node and the list in which signals are noted; returns the exit status.
    """
    signals, context = listen(), NodeContext.here()
    script = None if context.local else BatchScript(signals)
    try:
        status = serve(context, signals)
    except HpcrlError as error:
        print(f"{type(error).__name__}: {error}", flush=True)
        status = error.exit_code
    if script:
        script.require_its_end()
    sys.exit(status)


def await_attempt(run: Run, context: NodeContext, layouts: Sequence[AttemptLayout] = ()) -> Attempt:
    """Return the attempt of this start; node 0 opens it, the others see it through the shared filesystem.

    Args:
        layouts: from which node 0 chooses by the nodes that there are and what the run measured; none: one for all of them.
    """
    if context.index == 0:
        nodes = len(context.hosts)
        if not layouts or context.local:  # of a machine's devices each has those of the plan
            choice = LayoutChoice(layouts_for(layouts, nodes)[-1] if layouts else AttemptLayout(nodes))
        else:
            choice = layout_of_attempt(run, layouts, nodes)
        used, idle = context.hosts[: choice.layout.nodes], context.hosts[choice.layout.nodes :]
        returned = idle if idle and not context.local and keep_nodes(context.job_id, used) else []
        idle = idle[len(returned) :]
        return open_attempt(run, context.job, used, choice.layout.sizes, idle, choice.why, returned)
    deadline = time.monotonic() + _SHARED_S
    while time.monotonic() < deadline:
        if attempt := find_attempt(run, context.job):
            return attempt
        time.sleep(_POLL_S)
    raise RunError(
        f"{context.hosts[context.index]} does not see in {run.attempts} what {context.hosts[0]} wrote {_SHARED_S:.0f} s ago: "
        "slurm.root must lie on a filesystem that all nodes share"
    )


def log_to(path: Path) -> None:
    """Append what this process prints to the file at `path`."""
    make_directory(path.parent)
    with path.open("ab") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
