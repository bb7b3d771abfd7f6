"""One run of each shape, whose processes are killed again and again: `make soak`, a tenth of it in `make faults`.

HPCRL_SOAK is the number of kills, over all shapes; HPCRL_SOAK_SEED chooses which, as far as a cluster does the same twice.
The figures are in benchmarks/RESULTS.md.
"""

from __future__ import annotations

import json
import os
import random
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from signal import SIGCONT, SIGKILL, SIGSTOP, SIGUSR2
from typing import Any

import pytest

from hpcrl.data.batch_file import batch_steps
from hpcrl.rundir.layout import Run
from hpcrl.rundir.ledger import find_attempt, read_attempts, read_outcomes
from tests.faults.history import assert_nothing_lost, checkpoints_of, curves_of
from tests.faults.scenario import BATCH, SAMPLES, Scenario
from tests.faults.test_megatron import TWO_NODES
from tests.jobs.small_run import curve, trained_groups
from tests.processes import child_of, command_of, is_srun, is_stopped, parent_of, processes_of, send, variable

SEED = int(os.environ.get("HPCRL_SOAK_SEED", "5"))
KILLS = int(os.environ.get("HPCRL_SOAK", "100"))
NODES = 3
GAP_S, AT_ONCE = (0.3, 5.5), (1, 1, 2, 3)
TRAINS_S = (0.0, 10.0)
NOTICED_S = 10.0
RECONNECTED_S = 60.0  # until slurmctld has heard of what happened while a node was cut off
LOOK_S = 0.4
QUICK_S, SLOW_S, NEVER_S = 0.3, 12.0, 600.0
LET_TRAIN, LET_TRAIN_S = 0.7, 120.0
REQUEUED_S, RECONFIGURE_S, LONELY_S = (
    20.0,
    100.0,
    300.0,
)  # a run that nobody requeues has no process; one that waits for a node that was cut off neither
OTHERS = 0.12
HELD = "requeued held"
END_S = 900.0
_COMMANDS = {
    "hpcrl.launch.requeue.": "finish",
    "slurm_script": "batch shell",
    "submitit.core._submit": "agent",
    "torch.distributed.run": "torchrun",
    "/jobs/train.py": "rank",
    "/jobs/controller.py": "controller",
    "/jobs/rollout.py": "rollout worker",
    "engines.vllm.main": "engine",
    "spawn_main": "engine core",
}


def _pool(nodes: list[str], others: list[str]) -> dict[str, Any]:
    return {
        "slurm.extra.nodelist": nodes[0],
        "generator.inference_engine.num_engines": 0,
        "slurm.elastic.replicas": 2,
        "slurm.elastic.cpus_per_task": 1,
        "slurm.elastic.extra": {"exclude": ",".join([nodes[0], *others]), "exclusive": True},
    }


SHAPES: dict[str, Callable[[list[str], list[str]], dict[str, Any]]] = {
    "two ranks": lambda nodes, _others: {
        "slurm.extra.nodelist": ",".join(nodes),
        "trainer.placement.policy_num_nodes": 2,
    },
    "megatron": lambda nodes, _others: {"slurm.extra.nodelist": ",".join(nodes), **TWO_NODES},
    "elastic pool": _pool,
}


@dataclass(frozen=True)
class Process:
    """A process of a run, of its pool too."""

    pid: int
    role: str
    job: str
    of_pool: bool = False


@dataclass
class Soak:
    """What happens to one run, and what is still to be undone."""

    scenario: Scenario
    run: Run
    steps: int
    wanted: int
    chance: random.Random
    kills: Counter[str] = field(default_factory=Counter)
    others: Counter[str] = field(default_factory=Counter)
    due: list[tuple[float, Callable[[], object]]] = field(default_factory=list)
    finishing: dict[int, float] = field(default_factory=dict)
    orphans: dict[str, float] = field(default_factory=dict)
    cut_until: float = 0.0
    latency_s: float = QUICK_S
    shell: int = 0
    start: str = ""
    began: float = 0.0
    spared: bool = False
    lonely: float | None = None
    reconfigured: float = 0.0

    @property
    def log(self) -> Path:
        return self.scenario.path / "soak.log"

    def storm(self) -> None:
        next_at = time.monotonic()
        while self.kills.total() < self.wanted:
            self.scenario.pause(LOOK_S)
            self._undo()
            self._pace()
            found = self.processes()
            self._require_somebody(found)
            self._finish(found)
            if self._trains_first(found):
                next_at = time.monotonic() + self.chance.uniform(*TRAINS_S)
            if time.monotonic() < next_at:
                continue
            if self.chance.random() < OTHERS:
                self._disturb(found)
            else:
                self._kill(found)
            next_at = time.monotonic() + self.chance.uniform(*GAP_S)
        while self.due:
            self.scenario.pause(LOOK_S)
            self._undo()

    def comes_to_its_end(self) -> bool:
        """Return whether the run has left the queue; what Slurm holds until then is let go."""
        queued = self.scenario.queued(self.run)
        if queued:
            self._require_somebody(self.processes(), queued)
        return not queued

    def _release(self) -> None:
        """Do what `hpcrl status` tells a person to: after a cut a node may come back with a batch script that slurmctld has started anew meanwhile."""
        told = self.scenario.told("status", self.run.name)
        assert "scontrol release" in told, told
        self._resume_nodes()
        self.scenario.slurm("scontrol", "release", self.scenario.job_of(self.run))
        self._count("release")

    def _resume_nodes(self) -> None:
        """Do what an administrator does with nodes that Slurm has drained because it could not start, or end, what was killed."""
        drained = self.scenario.slurm("sinfo", "-h", "-N", "-t", "drain", "-o", "%N").split()
        for node in sorted(set(drained) & set(self.scenario.nodes)):
            self.scenario.slurm("scontrol", "update", f"nodename={node}", "state=resume")
            self._count("resume")

    def _count(self, what: str) -> None:
        self.others[what] += 1
        self._note(what)

    def processes(self) -> list[Process]:
        """Return all processes of the run, the shells of its batch scripts among them."""
        pool = json.loads(self.run.submission.read_text()).get("pool")
        found = {pid: _role(pid) for pid in processes_of(self.run)}
        for pid in [pid for pid, role in found.items() if role in ("srun", "finish")]:
            with suppress(OSError):  # it has just ended
                found[parent_of(pid)] = _role(parent_of(pid))
        every = []
        for pid, role in found.items():
            of_pool = pool and variable(pid, "SLURM_ARRAY_JOB_ID") == pool
            name = f"pool's {role}" if of_pool and role in ("srun", "finish", "batch shell", "agent") else role
            every += [Process(pid, name, variable(pid, "SLURM_JOB_ID") or "", bool(of_pool))] if role else []
        return every

    def _kill(self, found: list[Process]) -> None:
        """Kill one to three processes, whatever they do just now; each role is as likely as any other."""
        for _ in range(min(self.chance.choice(AT_ONCE), self.wanted - self.kills.total())):
            victims = [process for process in found if self._may_be_hit(process, found)]
            if not victims:
                return
            role = self.chance.choice(sorted({process.role for process in victims}))
            victim = self.chance.choice([process for process in victims if process.role == role])
            found.remove(victim)
            self._send(victim)

    def _may_be_hit(self, process: Process, found: list[Process]) -> bool:
        """Return False of a batch shell that no agent watches, or whose srun is gone or stopped, after which the agents are killed at once; and of agents and
        srun when the batch shell was killed, which an agent has to notice and to tell slurmctld, as soon as its node is not cut off.

        Who requeues the job is then gone, both halves of it: docs/reliability.md says so.
        """
        of_job = [one for one in found if one.job == process.job]
        if process.role.endswith("batch shell"):
            watched = any(one.role.endswith("agent") and _watches(one.pid) for one in of_job)
            steps = [one.pid for one in of_job if one.role.endswith("srun")]
            return watched and bool(steps) and not any(is_stopped(step) for step in steps)
        if not process.role.endswith(("agent", "srun")) or any(one.role.endswith("batch shell") for one in of_job):
            return True
        killed = self.orphans.get(process.job, 0.0)
        return time.monotonic() > max(
            killed + NOTICED_S, self.cut_until + RECONNECTED_S if self.cut_until > killed else 0.0
        )

    def _finish(self, found: list[Process]) -> None:
        """The end of a batch script is there for a second or two: every other one is killed in it."""
        for process in list(found):
            if process.role.endswith("finish"):
                soon = self.chance.uniform(0, 1.5) if self.chance.random() < 0.5 else float("inf")
                if time.monotonic() > self.finishing.setdefault(process.pid, time.monotonic() + soon):
                    self.finishing[process.pid] = float("inf")
                    found.remove(process)
                    self._send(process)

    def _send(self, process: Process) -> None:
        send([process.pid], SIGKILL)
        self.kills[process.role] += 1
        if process.role.endswith("batch shell"):
            self.orphans[process.job] = time.monotonic()
        self._note(f"SIGKILL of {process.role} {process.pid}")

    def _note(self, what: str) -> None:
        """Write down what was done when, beside the run, for whoever looks into a soak that failed."""
        with self.log.open("a") as file:
            file.write(f"{time.time():.1f} {self.kills.total()} {what}\n")

    def _disturb(self, found: list[Process]) -> None:
        what = self.chance.choice(["stop", "cut", "TERM", "USR2", "requeue", "preemption"])
        job, nodes = self.scenario.job_of(self.run), self.scenario.nodes[:NODES]
        hit = [process for process in found if self._may_be_hit(process, found)]
        if what == "stop" and hit:
            stopped = self.chance.choice(hit)
            send([stopped.pid], SIGSTOP)
            self._note(f"SIGSTOP of {stopped.role} {stopped.pid}")
            self._later(self.chance.uniform(2, 40), lambda: send([stopped.pid], SIGCONT))
        elif what == "cut" and not self.due:
            node = self.chance.choice(nodes)
            self.scenario.cut(node)
            seconds = self.chance.choice([3.0, 10.0, 25.0, 60.0])
            self.cut_until = time.monotonic() + seconds
            self._later(seconds, lambda: self.scenario.join(node))
        elif what == "TERM":
            # it may wait in the queue, where scancel tries for a minute
            self.scenario.cluster.run(["timeout", "10", "scancel", "--signal=TERM", job])
        elif what == "USR2":
            send([process.pid for process in found if process.role == "agent"], SIGUSR2)
        elif what == "requeue":
            self.scenario.cluster.run(["scontrol", "requeue", job])
        elif what == "preemption":
            self.scenario.preempt(1, nodes[:1])
        else:
            return
        self._count(what)

    def _later(self, seconds: float, undo: Callable[[], object]) -> None:
        self.due.append((time.monotonic() + seconds, undo))

    def _undo(self) -> None:
        for one in [one for one in self.due if one[0] < time.monotonic()]:
            self.due.remove(one)
            one[1]()

    def _pace(self) -> None:
        """Keep the run as far as the soak is, so that it does not end before."""
        newest = max(batch_steps(self.run), default=0)
        ahead = newest > self.steps * self.kills.total() / self.wanted
        wanted = NEVER_S if newest >= self.steps - 3 else SLOW_S if ahead else QUICK_S
        if wanted != self.latency_s:
            self.latency_s = wanted
            self.scenario.knobs(latency_s=wanted)

    def _trains_first(self, found: list[Process]) -> bool:
        """Return whether this start of the job is left alone until it trains, as some are that have to catch up: nothing would ever be committed."""
        shell = next((process.pid for process in found if process.role == "batch shell"), None)
        if shell is not None and shell != self.shell:
            self.shell, self.began = shell, time.monotonic()
            self.start = f"{self.scenario.job_of(self.run)}.{variable(shell, 'SLURM_RESTART_COUNT') or 0}"
            self.spared = self.latency_s == QUICK_S and self.chance.random() < LET_TRAIN
        if self.spared:
            path, attempt = self.run.metrics_of("trainer"), find_attempt(self.run, self.start)
            lines = path.read_text().splitlines() if attempt and path.exists() else []
            trains = any(f'"attempt": {attempt.number}, "step"' in line for line in lines[-2:] if attempt)
            self.spared = not trains and time.monotonic() - self.began < LET_TRAIN_S
        return self.spared

    def _require_somebody(self, found: list[Process], queued: str = "") -> None:
        """Fail where nobody goes on with the run: it would have to be resumed by hand. Elements of its pool alone cannot."""
        alone = time.monotonic() - self.lonely if self.lonely else 0.0
        if not all(process.of_pool for process in found):
            self.lonely, self.reconfigured = None, 0.0
        elif self.lonely is None:
            self.lonely = time.monotonic()
        elif alone > REQUEUED_S:
            queued = queued or self.scenario.queued(self.run)
            assert queued, f"nobody has requeued it\n{self.scenario.report(self.run)}"
            if HELD in queued:
                self._release()
            assert alone < LONELY_S, f"it is not started\n{self.scenario.report(self.run)}"
            if not self.due and alone - self.reconfigured > RECONFIGURE_S:
                # after a node went down with a job that was completing, slurmctld 22.05 may take idle nodes for busy
                self.reconfigured = alone
                self._resume_nodes()
                self.scenario.slurm("scontrol", "reconfigure")
                self._count("reconfigure")


def _role(pid: int) -> str:
    command = command_of(pid)
    if is_srun(pid):
        return "srun"
    return next((role for words, role in _COMMANDS.items() if words in command), "")


def _watches(agent: int) -> bool:
    """Return whether an agent has begun its work, and is on the node of the batch shell."""
    return variable(agent, "SLURM_PROCID") == "0" and child_of(agent) is not None and not is_stopped(agent)


@pytest.mark.faults_slow
@pytest.mark.nodes(2 * NODES)
@pytest.mark.parametrize("shape", list(SHAPES))
def test_soak(scenario: Scenario, shape: str) -> None:
    """Nothing is lost or doubled, all values are those of a run that nothing happened to, and nobody resumes it."""
    nodes = scenario.nodes[:NODES]
    place = list(SHAPES)
    wanted = KILLS * (place.index(shape) + 1) // len(place) - KILLS * place.index(shape) // len(place)
    steps = max(12, wanted)
    settings = {
        "trainer.max_steps": steps,
        "trainer.epochs": steps,  # one has fewer steps than a long soak
        "trainer.ckpt_interval": 2,
        "slurm.crash_budget": 1000,  # crashes come faster here than checkpoints
        "slurm.replica_restarts": 1000,
        "slurm.time_minutes": 600,
        **SHAPES[shape](nodes, [*scenario.others, *scenario.nodes[NODES:]]),
    }
    scenario.knobs(latency_s=QUICK_S)
    run, began = scenario.submit(settings, name="soak"), time.monotonic()
    soak = Soak(scenario, run, steps, wanted, random.Random(f"{SEED} {shape}"))
    try:
        soak.storm()
    except AssertionError:
        print(soak.log.read_text())
        raise
    finally:
        for _, undo in soak.due:
            undo()
    lasted = time.monotonic() - began
    scenario.knobs()
    scenario.wait(soak.comes_to_its_end, "it comes to its end", END_S, run)
    assert_nothing_lost(scenario, run, steps=steps, same_values=False)
    assert len({attempt.job_id for attempt in read_attempts(run)}) == 1, "somebody has resumed it"
    generated = [scenario.noted(what) for what in ("asked", "answered")]
    calm = scenario.submit(settings, name="calm")
    scenario.wait(lambda: not scenario.queued(calm), "the calm run", END_S, calm)
    for name, expected in curves_of(calm).items():
        assert curve(run, name) == pytest.approx(expected, rel=1e-6, abs=1e-6), f"{name} differs"
    print("\n" + "\n".join(figures(shape, soak, lasted, *generated)))


def figures(shape: str, soak: Soak, seconds: float, asked: int, answered: int) -> list[str]:
    """Return a table for benchmarks/RESULTS.md."""
    run, kills = soak.run, soak.kills.total()
    trained = soak.steps * BATCH * SAMPLES
    commits = [path.name for path in checkpoints_of(run)]
    groups = Counter(group for step in trained_groups(run) for group in step)
    outcomes = Counter(outcome.kind for outcome in read_outcomes(run))
    rows = [
        ("shape", shape),
        ("SIGKILL of", ", ".join(f"{role} {n}" for role, n in sorted(soak.kills.items()))),
        (
            "kills in all; beside them",
            f"{kills}; {', '.join(f'{what} {n}' for what, n in sorted(soak.others.items()))}",
        ),
        ("seconds; for each kill", f"{seconds:.0f}; {seconds / kills:.1f}"),
        ("attempts", f"{len(read_attempts(run))}: {', '.join(f'{n} {kind}' for kind, n in outcomes.items())}"),
        (
            "steps; commits",
            f"{soak.steps}; {len(commits)}, of them {sum('u' in name for name in commits)} inside a step",
        ),
        ("groups lost; trained twice", f"{soak.steps * BATCH - len(groups)}; {sum(n > 1 for n in groups.values())}"),
        ("samples trained", f"{trained}"),
        ("finished and not trained, for each kill", f"{(answered - trained) / kills:.2f}"),
        ("begun and not finished, for each kill", f"{(asked - answered) / kills:.2f}"),
    ]
    return [f"| {name} | {value} |" for name, value in rows]
