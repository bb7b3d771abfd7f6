"""The first node's agent that looks for more nodes: two looks, what Slurm answers, and the request to stop."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from hpcrl.config import Config
from hpcrl.config.sizes import GPUS
from hpcrl.launch.agent.growth import GrowthWatch
from hpcrl.launch.agent.start import NodeContext
from hpcrl.launch.layouts import AttemptLayout
from hpcrl.launch.requeue.restart import layout_of_attempt, measure_attempt
from hpcrl.observe.summary import STEP_SECONDS, Pace, pace_by_layout
from hpcrl.rundir.commit import write_json, write_text
from hpcrl.rundir.growth import GrowthRecord, read_growth, write_growth
from hpcrl.rundir.layout import Run
from hpcrl.rundir.ledger import open_attempt, read_attempts
from hpcrl.runtime.process_status import StatusWriter
from hpcrl.runtime.signals import Reason, ask_to_stop, stop_asked, stop_cause
from tests.observe.test_waiting import Phases, write
from tests.paths import QUICKSTART

NODES, ENGINES = "trainer.placement.policy_num_nodes", "generator.inference_engine.num_engines"
LAYOUTS = [AttemptLayout(2, {NODES: 1}), AttemptLayout(3, {NODES: 2}), AttemptLayout(5, {NODES: 4})]
PROGRAMS = {
    "sinfo": "echo main",
    "squeue": "echo x >> {place}/queued; case $* in *%e*) date -d '+8 hours' +%FT%T;; *PENDING*) cat {place}/pending;; "
    "*) echo '7_0|RUNNING|N/A|None|/runs/script.sh';; esac",
    "sbatch": 'echo "$@" >> {place}/asked; grep -qx -- "$2" {place}/idle || exit 1\n'
    'echo "sbatch: Job 9 to start at $(date +%FT%T) using 8 processors on nodes n4 in partition main" >&2',
}


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """A run whose attempt has trained twelve steps of a minute each, after a start of two minutes, on two nodes."""
    for name, line in PROGRAMS.items():
        (tmp_path / name).write_text("#!/bin/sh\n" + line.replace("{place}", str(tmp_path)) + "\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    (tmp_path / "pending").write_text("")
    (tmp_path / "asked").write_text("")
    run = Run(tmp_path / "project" / "run")
    run.metrics.mkdir(parents=True)
    attempt, lines = open_attempt(run, "7_0.0", ["n1", "n2"], {NODES: 1}), list[str]()
    for step in range(1, 13):
        times = {"step": step, "time": attempt.started + 120 + 60 * step, "metrics": {STEP_SECONDS: 60.0}}
        lines.append(json.dumps({"attempt": 1, **times}))
    run.metrics_of("trainer").write_text("\n".join(lines) + "\n")
    StatusWriter(run, "trainer", 1).write("step 13", step=13, total=2000)
    write_json(run.submission, {"job_id": "7_0"})
    return run


def watch(run: Run, *settings: str, layouts: Sequence[AttemptLayout] = LAYOUTS) -> GrowthWatch:
    config = Config.from_toml([QUICKSTART], [f'{NODES}="1-4"', "slurm.grow_minutes=60", *settings])
    (attempt,) = read_attempts(run)
    return GrowthWatch(run, config, NodeContext(0, attempt.hosts, "7_0.0", 0, False), attempt, layouts)


def idle(run: Run, *nodes: int) -> None:
    """Let Slurm start jobs of these numbers of nodes at once."""
    (run.path.parents[1] / "idle").write_text("".join(f"--nodes={count}\n" for count in nodes))


def asked(run: Run) -> list[str]:
    return (run.path.parents[1] / "asked").read_text().splitlines()


def test_the_attempt_stops_when_two_looks_find_the_same_nodes(run: Run) -> None:
    """It asks for the nodes that it has not: its own are idle once it has given them back."""
    growth = watch(run)
    idle(run, 1)
    assert not growth.look()
    assert asked(run) == ["--test-only --nodes=1 /runs/script.sh", "--test-only --nodes=3 /runs/script.sh"]
    idle(run, 1, 3)
    assert not growth.look(), "more than at the look before"
    assert stop_asked(run, 1) is None
    assert growth.look()
    assert stop_asked(run, 1) == "interrupted"
    assert stop_cause(run, 1).startswith("to go on with 5 nodes, ")
    found = read_growth(run)
    assert found
    assert (found.attempt, found.nodes, found.job) == (1, 5, "7_0")


@pytest.mark.parametrize("reason", ["cancelled", "interrupted"])
def test_a_stop_request_during_a_look_stays(run: Run, reason: Reason) -> None:
    """Slurm may take a while to answer, and a cancelled run must not go on with more nodes."""
    growth = watch(run)
    idle(run, 1)
    assert not growth.look()
    ask_to_stop(run, 1, reason, "by a person")
    assert not growth.look()
    assert (stop_asked(run, 1), stop_cause(run, 1), read_growth(run)) == (reason, "by a person", None)


def test_a_cancelled_attempt_stays_cancelled(run: Run) -> None:
    ask_to_stop(run, 1, "cancelled", "by a person")
    ask_to_stop(run, 1, "interrupted")
    assert (stop_asked(run, 1), stop_cause(run, 1)) == ("cancelled", "by a person")
    ask_to_stop(run, 2, "interrupted")
    assert (stop_asked(run, 1), stop_asked(run, 2)) == (None, "interrupted")


def test_slurm_is_asked_for_no_size_above_one_without_room(run: Run) -> None:
    growth = watch(run)
    idle(run, 3)
    assert not growth.look()
    assert asked(run) == ["--test-only --nodes=1 /runs/script.sh"]


def test_nodes_are_not_given_back_while_others_wait_for_some(run: Run) -> None:
    growth = watch(run)
    idle(run, 1, 3)
    (run.path.parents[1] / "pending").write_text(f"12|{os.getuid()}|Resources\n")
    assert not growth.look()
    assert not growth.look()
    assert asked(run) == []
    (run.path.parents[1] / "pending").write_text("")
    assert not growth.look(), "the first look that finds room"


@pytest.mark.parametrize("why", ["recently", "few steps", "no step", "no room"])
def test_what_keeps_the_nodes(run: Run, why: str) -> None:
    idle(run, *(() if why == "no room" else (1, 3)))
    if why == "recently":
        write_growth(run, GrowthRecord(1, time.time() - 3000, 3, "7_0"))
    elif why == "few steps":
        StatusWriter(run, "trainer", 1).write("step 13", step=13, total=20)
    elif why == "no step":
        run.metrics_of("trainer").unlink()
    growth = watch(run)
    assert not growth.look()
    assert not growth.look()
    assert why != "recently" or not (run.path.parents[1] / "queued").exists(), "no program of Slurm is called"
    assert (asked(run) == []) == (why != "no room"), "Slurm is asked only where growth would gain something"
    assert stop_asked(run, 1) is None


def test_no_more_nodes_are_looked_for_than_the_request_asks_for(run: Run) -> None:
    """A larger request waits in the queue itself."""
    write_json(run.submission, {"job_id": "7_0", "requests": {"small": "7_0", "large": "8_0"}})
    growth = watch(run, "slurm.requests.small.nodes=2-3", "slurm.requests.large.nodes=5")
    idle(run, 1, 3)
    assert not growth.look()
    assert asked(run) == ["--test-only --nodes=1 /runs/script.sh"]
    assert growth.look()
    assert (found := read_growth(run))
    assert (found.nodes, found.job) == (3, "7_0")


def test_seconds_per_step_by_layout(run: Run) -> None:
    """Of other nodes those of the fastest layout count for growth, and of its own nodes those of the attempt's."""
    assert pace_by_layout(run) == [Pace(2, {NODES: 1}, 60.0)]
    others = [(2, {NODES: 2}, 30.0), (3, {NODES: 1}, 50.0), (3, {NODES: 2}, 40.0), (3, {NODES: 2, GPUS: 8}, 20.0)]
    for number, (nodes, sizes, pace) in enumerate(others, 2):
        open_attempt(run, f"7_0.{number}", ["n1", "n2", "n3"][:nodes], sizes)
        train(run, number, 6 * number + 1, pace)
    assert pace_by_layout(run) == [Pace(2, {NODES: 1}, 60.0), *(Pace(*other) for other in others)]
    measures = measure_attempt(run, read_attempts(run)[0])
    assert measures
    assert measures.step_s == {2: 60.0, 3: 40.0}, "without the nodes that have another number of GPUs"


def test_steps_from_before_a_change_of_settings_measure_nothing(waiting: Run) -> None:
    """Neither how long a step takes, nor which role waits."""
    write_waits(waiting)
    assert layout_of_attempt(waiting, ROLES, 4).why
    write_text(waiting.config_of(1), waiting.config.read_text())
    assert pace_by_layout(waiting) == []
    hosts = read_attempts(waiting)[0].hosts
    attempt = open_attempt(waiting, "7_0.1", hosts, ROLES[-1].sizes)
    train(waiting, 2, 13, 20.0)
    assert pace_by_layout(waiting) == [Pace(4, ROLES[-1].sizes, 20.0)]
    assert layout_of_attempt(waiting, ROLES, 4).why == "", "the waits of the first attempt are those of other settings"
    StatusWriter(waiting, "trainer", 2).write("step 19", step=19, total=2000)
    measures = measure_attempt(waiting, attempt)
    assert measures
    assert measures.step_s == {4: 20.0}


def train(run: Run, attempt: int, first: int, pace: float) -> None:
    with run.metrics_of("trainer").open("a") as file:
        for step in range(first, first + 6):
            times = {"step": step, "time": 1e9 + pace * step, "metrics": {STEP_SECONDS: pace}}
            file.write(json.dumps({"attempt": attempt, **times}) + "\n")


ROLES = [AttemptLayout(4, {NODES: t, ENGINES: 4 - t}) for t in (1, 3, 2)]
WAITING: Phases = [("wait_for_generation_buffer", 8.0), ("policy_train", 2.0)]
GENERATING: Phases = [("generate", 8.0), ("idle", 2.0)]


@pytest.fixture
def waiting(run: Run) -> Run:
    """The same run on two nodes that train and two that generate. The first ones wait for samples four fifths of the time, the others train."""
    run.attempts.unlink()
    open_attempt(run, "7_0.0", ["n1", "n2", "n3", "n4"], ROLES[-1].sizes)
    run.config.write_text(
        Config.from_toml([QUICKSTART], [f'{NODES}="1-3"', f'{ENGINES}="1-3"', "slurm.grow_minutes=60"]).to_toml()
    )
    write(run, "rank-0", WAITING)
    for replica in range(2):
        write(run, f"rollout-{replica}", GENERATING)
    return run


def write_waits(run: Run, train_s: float = 0.2) -> None:
    """Let the trainer wait for samples nearly all of the time: it trains `train_s` of 10 s."""
    for process, phases in {"rank-0": [("wait_for_generation_buffer", 10 - train_s), ("policy_train", train_s)],
                            "rollout-0": [("generate", 10 - train_s), ("idle", train_s)]}.items():  # fmt: skip
        run.timeline_of(1, process).unlink()
        write(run, process, phases)
    run.timeline_of(1, "rollout-1").unlink()


def test_a_waiting_trainer_gives_a_node_to_generation(waiting: Run) -> None:
    """60 s * (0.2 * 2 / 1 + 0.8 * 2 / 3) = 56 s gain too little; with a longer wait it is worth a restart, on the nodes in hand."""
    assert layout_of_attempt(waiting, ROLES, 4).layout == ROLES[-1]
    growth = watch(waiting, f'{ENGINES}="1-3"', layouts=ROLES)
    assert not growth.look()
    assert not growth.look()
    write_waits(waiting)
    choice = layout_of_attempt(waiting, ROLES, 4)
    assert choice.layout.sizes == {NODES: 1, ENGINES: 3}
    assert choice.step_s == pytest.approx(60 * (0.02 * 2 + 0.98 * 2 / 3))
    assert "the trainer waited 98% for samples, engines 2% for training; 41.6 s per step expected, 60 s" in choice.why
    assert not growth.look()
    assert stop_asked(waiting, 1) is None
    assert growth.look()
    assert stop_cause(waiting, 1).startswith("to go on with policy_num_nodes 1, num_engines 3, ")
    found = read_growth(waiting)
    assert found
    assert (found.attempt, found.nodes, found.job) == (1, 4, "7_0")
    assert asked(waiting) == [], "Slurm has not to start anything"


def test_nodes_that_gained_nothing_are_not_asked_for_again(waiting: Run) -> None:
    """Of three nodes it uses two, since its steps would be as long; then neither growth nor another request aims at three again."""
    write_waits(waiting, 0.1)
    small = [AttemptLayout(2, {NODES: 1, ENGINES: 2}), AttemptLayout(3, {NODES: 2, ENGINES: 2})]
    choice = layout_of_attempt(waiting, small, 3)
    assert (choice.layout, choice.why[:12]) == (small[0], "1 more node(")
    waiting.attempts.unlink()
    open_attempt(waiting, "7_0.1", ["n1", "n2"], small[0].sizes, returned=["n3"])
    growth = watch(waiting, layouts=[*small, AttemptLayout(5, {NODES: 4, ENGINES: 2})])
    assert growth._larger() == [5]


@pytest.mark.parametrize("damage", ["timelines", "configuration", "attempts of a fixed size"])
def test_without_measures_the_attempt_takes_the_usual_layout(waiting: Run, damage: str) -> None:
    if damage == "timelines":
        waiting.timeline_of(1, "rank-0").unlink()
    elif damage == "configuration":
        waiting.config.write_text("trainer = 1")
    else:
        waiting.attempts.unlink()
        open_attempt(waiting, "7_0.0", ["n1", "n2", "n3", "n4"])
    choice = layout_of_attempt(waiting, ROLES, 4)
    assert (choice.layout, choice.why, choice.step_s) == (ROLES[-1], "", None)
