"""`hpcrl profile`: samples a running process of a run by py-spy on its node."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from typing import Literal, get_args

from hpcrl.errors import RunError
from hpcrl.launch.attach.attach import on_node, running
from hpcrl.launch.nodes import Node, make_plan
from hpcrl.rundir.attempt_config import attempt_config
from hpcrl.rundir.layout import Run
from hpcrl.rundir.ledger import read_attempts

ProfiledRole = Literal["trainer", "rollout", "controller", "scorer", "reward"]
PROFILED_ROLES: tuple[ProfiledRole, ...] = get_args(ProfiledRole)
Format = Literal["flamegraph", "speedscope", "raw"]
"""Of py-spy: an SVG, JSON for https://www.speedscope.app, or a line per stack with the number of its samples."""


def sample(run: Run, role: ProfiledRole, number: int, seconds: int, form: Format, *, idle: bool) -> tuple[str, bytes]:
    """Sample a process of a running run; return its name and what py-spy wrote.

    The process is read while it runs on: it is neither stopped nor slowed down, and a sample that meets it in the middle of a change is left out.

    Args:
        number: of the trainer's rank, replica, scorer or reward service; there is one controller.
        idle: whether threads that wait are sampled too.

    Raises:
        RunError: the run has no such process now, or it cannot be read.
    """
    state = running(run)
    config = attempt_config(run, state.attempt)
    plan, hosts = make_plan(config), read_attempts(run)[-1].hosts
    process, node = process_of(plan, role, number)
    inside = [
        config.slurm.python or sys.executable, "-m", "hpcrl.launch.attach.profile_remote", str(run.path), str(state.attempt), process,
        str(seconds), form, str(int(idle)),
    ]  # fmt: skip
    command, environment = on_node(state, hosts[node.index])
    done = subprocess.run([*command, *inside], env=environment, stdin=subprocess.DEVNULL, capture_output=True)
    if done.returncode:
        lines = done.stderr.decode(errors="replace").strip().splitlines()
        ours = [line.removeprefix("hpcrl: ") for line in lines if line.startswith("hpcrl: ")]
        raise RunError((ours or lines or [f"{command[0] if command else inside[0]} failed without a word"])[-1])
    return process, done.stdout


def process_of(plan: Sequence[Node], role: ProfiledRole, number: int) -> tuple[str, Node]:
    """Return the name of a process, and its node. Raises RunError where the run has none of this number."""
    found = {"controller": plan[0]} if role == "controller" else dict[str, Node]()
    for node in plan:
        if role == "trainer":
            found |= {f"rank-{node.first_rank + rank}": node for rank in range(node.ranks)}
        else:  # engines that take turns with the trainer are on its nodes
            found |= {worker: node for worker in node.workers if worker.startswith(f"{role}-")}
    name = role if role == "controller" else f"{'rank' if role == 'trainer' else role}-{number}"
    if name not in found:
        pooled = role in ("rollout", "scorer")
        pool = "; what belongs to an elastic pool is in a job of its own, and is not reached" if pooled else ""
        raise RunError(f"the run has no {name}; of the role {role} it has {', '.join(found) or 'nothing'}{pool}")
    return name, found[name]


def busiest(raw: str, most: int) -> list[tuple[str, float, float]]:
    """Return the functions in which most samples were taken: each with its share of samples by itself, and with all that it called.

    Args:
        raw: stacks as `Format` raw has them: functions from the outermost on, joined by ";", and the number of samples.
    """
    own, whole, total = Counter[str](), Counter[str](), 0
    for line in raw.splitlines():
        stack, _, count = line.rpartition(" ")
        functions = stack.split(";")
        total += int(count)
        own[functions[-1]] += int(count)
        whole.update(dict.fromkeys(functions, int(count)))
    ordered = sorted(own, key=lambda name: (-own[name], name))[:most]
    return [(name, own[name] / total, whole[name] / total) for name in ordered]
