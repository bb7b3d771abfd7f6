"""Where this agent runs: which node of which start. Read once from the executor's environment."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass

import submitit


@dataclass(frozen=True)
class Place:
    """The executor's view of this agent.

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

    @classmethod
    def here(cls) -> Place:
        """Return the place of the calling process, which submitit started."""
        environment = submitit.JobEnvironment()
        if environment.cluster != "slurm":
            hosts = [socket.gethostname()] * environment.num_tasks
            return cls(environment.global_rank, hosts, f"local-{environment.job_id}", 0, True)
        restarts = int(os.environ.get("SLURM_RESTART_COUNT", "0"))
        job = f"{environment.job_id}.{restarts}"
        return cls(environment.global_rank, list(environment.hostnames), job, restarts, False)
