"""Names of a run's rollout workers, scorers, sandbox servers and elements of the evaluation job, which begin names of files, statuses and
timelines; and the programs that processes run."""

from typing import Literal

Role = Literal["trainer", "rollout", "reward", "scorer", "sandbox"]
"""Of a node."""
PROGRAMS: dict[Role, dict[str, str]] = {
    "trainer": {"trainer": "train"},
    "rollout": {"rollout": "rollout", "part": "engine_node"},
    "reward": {"reward": "reward"},
    "scorer": {"scorer": "scorer"},
    "sandbox": {"sandbox": "sandbox"},
}
"""Programs of jobs/ on the nodes of each role, by the first word of the names of their processes."""
JOBS = {process: program for own in PROGRAMS.values() for process, program in own.items()}
"""The same of all roles."""

WORKER, SCORER, EVALUATION, SANDBOX = "rollout-", "scorer-", "evaluation-", "sandbox-"


def worker_name(replica: int) -> str:
    return f"{WORKER}{replica}"


def scorer_name(number: int) -> str:
    return f"{SCORER}{number}"


def evaluation_name(element: int) -> str:
    return f"{EVALUATION}{element}"


def sandbox_name(server: int) -> str:
    return f"{SANDBOX}{server}"
