"""One run, interrupted thirty times at random moments: `make soak`. Its figures stand in docs/reliability.md."""

from __future__ import annotations

import json
import random
import statistics
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from signal import SIGCONT, SIGKILL, SIGUSR2

import pytest

from hpcrl.rundir.layout import Run
from hpcrl.rundir.ledger import outcome_of, read_attempts, read_outcome, read_outcomes
from tests.faults.history import assert_nothing_lost, checkpoints_of, curves_of
from tests.faults.scenario import START_S, Scenario
from tests.jobs.small_run import curve, trained_groups
from tests.processes import send

SEED, STEPS, LONGEST_S = 5, 150, 45 * 60
PACE_S, LATEST_S = 1.5, 9.0


@dataclass(frozen=True)
class Kind:
    """A kind of fault.

    Attributes:
        times: how many there are of it.
        saves: whether the attempt is given the time to save.
        ends: whether the attempt ends.
    """

    times: int
    saves: bool
    ends: bool
    inject: Callable[[Scenario, Run], object]


KINDS = {
    "TERM to every process": Kind(4, True, True, lambda scenario, run: _signal_all(scenario, run)),
    "USR2 to the agents only": Kind(4, True, True, lambda scenario, run: send(scenario.agents(run), SIGUSR2, SIGCONT)),
    "requeue by an operator": Kind(2, True, True, lambda scenario, run: _requeue(scenario, run)),
    "preemption by a higher partition": Kind(
        3, True, True, lambda scenario, _run: scenario.preempt(1, scenario.nodes[:2])
    ),
    "SIGKILL of a trainer rank": Kind(3, False, True, lambda scenario, run: send([scenario.rank(run)], SIGKILL)),
    "SIGKILL of torchrun": Kind(2, False, True, lambda scenario, run: send([scenario.torchrun(run)], SIGKILL)),
    "SIGKILL of the first agent": Kind(2, False, True, lambda scenario, run: send([scenario.agent(run)], SIGKILL)),
    "SIGKILL of the controller": Kind(2, False, True, lambda scenario, run: send([scenario.controller(run)], SIGKILL)),
    "SIGKILL of a rollout worker": Kind(4, False, False, lambda scenario, run: send([scenario.worker(run)], SIGKILL)),
    "SIGKILL of an engine": Kind(4, False, False, lambda scenario, run: send([scenario.engine(run)], SIGKILL)),
}


def _signal_all(scenario: Scenario, run: Run) -> None:
    scenario.slurm("scancel", "--signal=TERM", scenario.job_of(run))


def _requeue(scenario: Scenario, run: Run) -> None:
    scenario.slurm("scontrol", "requeue", scenario.job_of(run))


@dataclass(frozen=True)
class Fault:
    kind: str
    attempt: int
    at: float


@pytest.mark.soak
@pytest.mark.nodes(4)
def test_soak(scenario: Scenario) -> None:
    chance = random.Random(SEED)
    kinds = [name for name, kind in KINDS.items() for _ in range(kind.times)]
    chance.shuffle(kinds)
    often = {
        "trainer.max_steps": STEPS,
        "trainer.ckpt_interval": 4,
        "trainer.max_ckpts_to_keep": -1,  # all are counted
        "slurm.crash_budget": 10,  # crashes come faster here than checkpoints
        "slurm.replica_restarts": 20,
        "slurm.time_minutes": LONGEST_S // 60,
    }
    scenario.knobs(latency_s=PACE_S)
    calm = scenario.submit({**often, "slurm.extra.nodelist": ",".join(scenario.nodes[2:])}, name="calm")
    run = scenario.submit({**often, "slurm.extra.nodelist": ",".join(scenario.nodes[:2])}, name="soak")
    began = time.monotonic()
    faults = [_inject(scenario, run, kind, chance) for kind in kinds]
    scenario.knobs()
    for one in (run, calm):
        assert_nothing_lost(scenario, one, steps=STEPS, same_values=False)
    for name, expected in curves_of(calm).items():
        assert curve(run, name) == pytest.approx(expected, rel=1e-6, abs=1e-6), f"{name} differs"
    assert time.monotonic() - began < LONGEST_S
    print("\n" + "\n".join(figures(run, faults, time.monotonic() - began)))


def _inject(scenario: Scenario, run: Run, kind: str, chance: random.Random) -> Fault:
    """Wait for a living attempt and some seconds more, then do it; wait until an attempt that ends by it has ended."""
    before = read_outcome(run)
    scenario.wait(lambda: len(read_attempts(run)) > (before.attempt if before else 0), "an attempt", START_S, run)
    attempt = read_attempts(run)[-1].number
    scenario.wait(lambda: scenario.processes(run, "/jobs/train.py"), "its trainer", 60, run)
    if chance.random() < 0.7:  # otherwise it meets imports and loading
        scenario.wait(lambda: _trains(run, attempt), "its first step", START_S, run)
    time.sleep(chance.uniform(0, LATEST_S))
    fault = Fault(kind, attempt, time.time())
    _until_done(scenario, run, kind)
    assert outcome_of(run, attempt) is None or KINDS[kind].ends
    if KINDS[kind].ends:
        scenario.outcome(run, attempt, 90)
    return fault


def _until_done(scenario: Scenario, run: Run, kind: str) -> None:
    """Do it; a process that is not there yet, or not at this moment, is waited for."""

    def done() -> bool:
        try:
            KINDS[kind].inject(scenario, run)
        except AssertionError as error:
            if "expected one process" not in str(error):
                raise
            return False
        return True

    scenario.wait(done, f"the victim of {kind}", 60, run)


def _trains(run: Run, attempt: int) -> bool:
    return any(record["attempt"] == attempt for record in _records(run))


def _records(run: Run) -> list[dict[str, float]]:
    """Return all records of trainers, those of steps that were trained again too."""
    path = run.metrics_of("trainer")
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return [line for line in lines if "step" in line]


def figures(run: Run, faults: list[Fault], seconds: float) -> list[str]:
    """Return the table of docs/reliability.md."""
    groups = Counter(group for step in trained_groups(run) for group in step)
    wanted = {f"g{index:08d}" for index in range(STEPS * 4)}
    commits = {path.name: (path / "COMMIT").stat().st_mtime for path in checkpoints_of(run)}
    to_commit, to_step = _to_commit(run, faults, commits), _to_step(run)
    rows = [
        ("faults", str(len(faults))),
        *((f"- {kind}", str(count)) for kind, count in Counter(fault.kind for fault in faults).items()),
        ("attempts", str(len(read_attempts(run)))),
        ("outcomes", ", ".join(f"{n} {kind}" for kind, n in Counter(o.kind for o in read_outcomes(run)).items())),
        ("steps", str(STEPS)),
        ("commits", f"{len(commits)}, of them {sum('u' in name for name in commits)} inside a step"),
        ("groups lost", str(len(wanted - set(groups)))),
        ("groups trained twice", str(sum(count > 1 for count in groups.values()))),
        ("signal to commit", _spread(to_commit)),
        ("start of an attempt to its first step", _spread(to_step)),
        ("seconds in all", f"{seconds:.0f}"),
    ]
    return [f"| {name} | {value} |" for name, value in rows]


def _to_commit(run: Run, faults: list[Fault], commits: dict[str, float]) -> list[float]:
    """Return the seconds from each signal to the commit that followed it in the same attempt, where there was something to save."""
    ended = {outcome.attempt: outcome.ended for outcome in read_outcomes(run)}
    found = []
    for fault in faults:
        after = [at for at in commits.values() if fault.at <= at <= ended.get(fault.attempt, 0.0)]
        if KINDS[fault.kind].saves and after:
            found.append(max(after) - fault.at)
    return found


def _to_step(run: Run) -> list[float]:
    records = _records(run)
    firsts = {
        attempt.number: min((r["time"] for r in records if r["attempt"] == attempt.number), default=None)
        for attempt in read_attempts(run)
    }
    started = {attempt.number: attempt.started for attempt in read_attempts(run)}
    return [first - started[number] for number, first in firsts.items() if first is not None]


def _spread(values: list[float]) -> str:
    assert values, "nothing was measured"
    return f"median {statistics.median(values):.1f} s, worst {max(values):.1f} s (of {len(values)})"
