"""Watches the run of a bench: lets it train, kills one process of each role, and ends it."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from itertools import count

from hpcrl.config import Config
from hpcrl.errors import RunError
from hpcrl.launch.attach.attach import on_node, running
from hpcrl.launch.bench.experiment import SAVED_EVERY
from hpcrl.launch.bench.folder import Bench, Kill
from hpcrl.launch.manage.cancel import SAVING_S, cancel
from hpcrl.launch.manage.poll import LOOK_S, RunPoller
from hpcrl.launch.manage.registry import known_states
from hpcrl.launch.manage.resume import resume
from hpcrl.launch.nodes import Node, make_plan
from hpcrl.observe.metrics import Record, last_records
from hpcrl.observe.summary import STEP_SECONDS
from hpcrl.rundir.attempt_config import attempt_config
from hpcrl.rundir.commit import write_json
from hpcrl.rundir.layout import Run
from hpcrl.rundir.ledger import read_attempts

WARM_UP = 2
"""First steps of a run, in which kernels are compiled and connections are made."""
_MEASURED_STEPS, _MEASURED_S = 6, 20.0
_BETWEEN = 3  # steps from one kill to the next, and to the end
_RESUMES = 6
_KILL_S = 120.0  # a node that does not answer keeps its process; the bench tries again until its time is over


def survive(run: Run, bench: Bench, limit_s: float, report: Callable[[str], None]) -> None:
    """Watch the run until a process of each role was killed and training went on; then cancel it, or where the time is over.

    A run that a person cancels, or that is done before, is not resumed.

    Args:
        limit_s: seconds from its first allocation; waiting in the queue does not count.
        report: gets a line about each kill.

    Raises:
        RunError: the run ends for another reason than a kill, or does not go on after one.
    """
    kills, poller, began = list[Kill](), RunPoller([run], known_states), 0.0
    resumes, roles = count(1), roles_of(make_plan(Config.from_toml([bench.config]).largest()))
    while len(kills) < len(roles) or not _trained(run, kills[-1].step + _BETWEEN):
        if poller.over():
            (state,) = poller.states()
            if state.kind in ("cancelled", "done"):  # by a person, or by settings of an experiment of the user's own
                report(f"{run.name} is {state.kind} after {len(kills)} kills")
                return
            if not kills or next(resumes) > _RESUMES:
                raise RunError(f"{run.name} is {state.kind}: {state.complaint}; hpcrl logs {run.name} shows why")
            resume(run)
            poller = RunPoller([run], known_states)
        began = began or (time.monotonic() if read_attempts(run) else 0.0)
        if began and time.monotonic() - began > limit_s:
            report(f"the time is over after {len(kills)} kills")
            break
        if len(kills) < len(roles) and _is_ripe(run, kills):
            try:
                kills.append(_kill(run, roles[len(kills)]))
            except RunError as error:  # a process that starts again
                report(f"{error}; trying again")
            else:
                write_json(bench.kills, {"kills": [asdict(each) for each in kills]})
                report(f"killed {kills[-1].process} after step {kills[-1].step}")
        time.sleep(LOOK_S)
    if not poller.over():
        cancel(run, SAVING_S)


def newest(run: Run) -> Record | None:
    """Return what the trainer reported of the step that it trained last, also one that an attempt trained again."""
    return next(iter(last_records(run, "trainer", STEP_SECONDS, lambda _: True)), None)


def _trained(run: Run, step: int) -> bool:
    last = newest(run)
    return last is not None and last.step >= step


def _is_ripe(run: Run, kills: list[Kill]) -> bool:
    """Return whether enough was trained since the last kill, and the next kill costs steps that no checkpoint holds."""
    last = newest(run)
    if last is None:
        return False
    if not kills:
        records = last_records(run, "trainer", STEP_SECONDS, lambda record: record.step > WARM_UP, most=1 << 20)
        seconds = sum(record.metrics[STEP_SECONDS] for record in records)
        return len(records) >= _MEASURED_STEPS and seconds >= _MEASURED_S
    at_work = known_states([run])[0].at_work
    return last.step >= kills[-1].step + _BETWEEN and last.step % SAVED_EVERY in (1, 2) and at_work


def _kill(run: Run, role: str) -> Kill:
    """Kill a process by SIGKILL on its node. Raises RunError where it is not there."""
    state = running(run)
    config = attempt_config(run, state.attempt)
    plan, hosts = make_plan(config), read_attempts(run)[-1].hosts
    process, node = process_of(plan, role)
    command, environment = on_node(state, hosts[node.index])
    inside = [
        config.slurm.python or sys.executable,
        "-m",
        "hpcrl.launch.bench.kill",
        str(run.path),
        str(state.attempt),
        process,
    ]
    last = newest(run)
    killed_at = answer_of([*command, *inside], environment, process, _KILL_S)
    return Kill(role, process, state.attempt, killed_at, last.step if last else 0)


def answer_of(command: Sequence[str], environment: Mapping[str, str], process: str, limit_s: float) -> float:
    """Return the time that a kill prints. Raises RunError where it fails, or the node does not answer in `limit_s` seconds."""
    try:
        done = subprocess.run(
            command,
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=limit_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise RunError(f"{process} was not killed: its node gave no answer in {limit_s:g} s") from None
    if done.returncode:
        raise RunError(done.stderr.strip().removeprefix("hpcrl: ") or f"{process} could not be killed")
    return float(done.stdout.split()[-1])


def roles_of(plan: Sequence[Node]) -> list[str]:
    """Return the roles of which a process is killed, in this order."""
    further = [role for role in ("scorer", "reward") if any(_numbers(node, role) for node in plan)]
    return ["rollout", "trainer", *further, "controller"]


def _numbers(node: Node, role: str) -> tuple[int, ...]:
    return {"rollout": node.replicas, "scorer": () if node.part else node.scorers, "reward": node.services}[role]


def process_of(plan: Sequence[Node], role: str) -> tuple[str, Node]:
    """Return the first process of a role, and its node."""
    if role == "controller":
        return role, plan[0]
    if role == "trainer":
        return "rank-0", plan[0]
    node = next(node for node in plan if _numbers(node, role))
    return f"{role}-{_numbers(node, role)[0]}", node
