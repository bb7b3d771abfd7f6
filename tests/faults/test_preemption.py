"""Preemption, time limits, requeues and cancels: what a cluster does to runs that are well (scenarios 9 to 20, 44, 51 and 52)."""

from __future__ import annotations

import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from hpcrl.data.batch_file import batch_steps, read_batch
from hpcrl.rundir.layout import Run
from hpcrl.rundir.ledger import read_attempts
from hpcrl.runtime.process_status import read_process_statuses
from tests.faults.history import (
    assert_commits_load,
    assert_ended,
    assert_groups_once,
    assert_nothing_lost,
    assert_reported_once,
    last_saved,
    last_trained,
)
from tests.faults.scenario import START_S, Scenario, fault, in_first_attempt
from tests.jobs.small_run import curve
from tests.paths import CONFIGS
from tests.processes import processes_of, send

TERM, USR2, CONT, STOP = signal.SIGTERM, signal.SIGUSR2, signal.SIGCONT, signal.SIGSTOP
ADAPTERS = {"trainer.policy.model.lora.rank": 4, "generator.inference_engine.backend": "transformers"}
SHAPES = CONFIGS / "count_shapes"
IMAGES = {
    "data.train_data": [str(SHAPES / "data" / "train.parquet")],
    "data.val_data": [str(SHAPES / "data" / "validation.parquet")],
    "environment.env_class": "arithmetic",
    "trainer.max_prompt_length": 32,
    "trainer.multi_modal_log_interval": 1,
    "trainer.policy.model.path": str(SHAPES / "model"),
    "generator.inference_engine.backend": "transformers",
}
CRITIC_APART = {
    "trainer.algorithm.advantage_estimator": "gae",
    "trainer.critic.model.path": str(CONFIGS / "quickstart" / "model"),
    "trainer.critic.fsdp_config.mixed_precision.param_dtype": "fp32",
    "trainer.critic_mini_batch_size": 2,
    "trainer.placement.critic_num_nodes": 1,
}
STEPS_PER_ATTEMPT = {"trainer.ckpt_interval": 100}  # what is saved is saved because of the signal


def saved_when_told(scenario: Scenario, run: Run, attempt: int = 1, seconds: float = 30) -> None:
    """Assert that an attempt saves all that it has trained and ends as interrupted."""
    outcome = scenario.outcome(run, attempt, seconds)
    assert outcome.kind == "interrupted", scenario.report(run)
    assert last_saved(run)[0] == last_trained(run), "what was trained was saved"


@pytest.mark.faults_slow
@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({}, id="all_weights"),
        pytest.param(ADAPTERS, id="adapters"),
        pytest.param(IMAGES, id="images"),
        pytest.param(CRITIC_APART, id="critic_apart", marks=pytest.mark.nodes(3)),
    ],
)
def test_09_preemption_with_grace(scenario: Scenario, settings: dict[str, Any]) -> None:
    """Slurm sends CONT and TERM to every process of the steps; the run saves within the grace, requeues itself and comes back."""
    run = scenario.submit({**STEPS_PER_ATTEMPT, **settings})
    scenario.reach(run, 4)
    scenario.preempt()
    saved_when_told(scenario, run)
    assert_nothing_lost(scenario, run, same_values=not settings)
    assert len(read_attempts(run)) == 2


@pytest.mark.own_cluster("--conf", "SlurmctldParameters=preempt_send_user_signal")
@pytest.mark.faults_slow
def test_10_preemption_that_sends_the_users_signal(scenario: Scenario) -> None:
    """Where the site sends the user's signal it is USR2 that comes, and TERM only at the end of the grace."""
    run = scenario.submit(STEPS_PER_ATTEMPT)
    scenario.reach(run, 4)
    scenario.preempt()
    saved_when_told(scenario, run, seconds=18)
    assert_nothing_lost(scenario, run)
    assert len(read_attempts(run)) == 2


@pytest.mark.faults_slow
def test_11_killed_in_the_middle_of_a_save(scenario: Scenario) -> None:
    """Without grace, and with a save that takes longer than KillWait: the commit before it is used, its remains are removed."""
    slow = in_first_attempt(fault("checkpoints.written@2:sleep=30"))
    run = scenario.submit({"slurm.partition": "nograce"}, setup=[slow])
    scenario.wait(lambda: list(run.checkpoints.glob(".tmp-s000006*")), "the second save", START_S, run)
    scenario.preempt()
    scenario.wait(lambda: len(read_attempts(run)) == 2, "the second attempt", START_S, run)
    assert_nothing_lost(scenario, run)
    assert "continuing after step 3, " in run.log(2, "trainer-0").read_text()
    assert not list(run.checkpoints.glob(".tmp-*"))


@pytest.mark.faults_slow
def test_12_time_limit_three_times(scenario: Scenario) -> None:
    """Each attempt is told in time, saves, and the next one goes on; how often does not matter."""
    run = scenario.submit({"slurm.signal_seconds": 60, "trainer.max_steps": 40, **STEPS_PER_ATTEMPT})
    scenario.slurm(
        "scontrol", "update", f"JobId={scenario.job_of(run)}", "TimeLimit=2"
    )  # hpcrl itself wants five minutes
    scenario.knobs(latency_s=5.0)  # three attempts of a minute do not reach the last step, on a quick machine either
    for attempt in (1, 2, 3):
        saved_when_told(scenario, run, attempt, 240)
    scenario.knobs()
    assert_nothing_lost(scenario, run, steps=40)


IN_PHASES = {
    "import": (lambda run: run.attempts.exists(), {}, ()),
    "load": (lambda run: trainer_says(run, "loading model"), {}, ()),
    "wait": (lambda run: run.batch(3).exists(), {}, ()),
    "update": (lambda run: said(run, "fault point"), {}, ("update.micro_batch@9:sleep=3",)),
    "save": (lambda run: list(run.checkpoints.glob(".tmp-s000003*")), {}, ("checkpoints.written:sleep=3",)),
    "evaluation": (lambda run: (run.evals / "v000004").exists(), {"trainer.eval_interval": 4}, ()),
    "last_save": (lambda run: list(run.checkpoints.glob(".tmp-s000012*")), {}, ("checkpoints.written@4:sleep=3",)),
}


@pytest.mark.faults_slow
@pytest.mark.parametrize("phase", IN_PHASES)
def test_13_signal_in_each_phase(scenario: Scenario, phase: str) -> None:
    """USR2 to every process, at whatever it is: nothing is lost, and the run comes back by itself."""
    reached, settings, faults = IN_PHASES[phase]
    run = scenario.submit(settings, setup=[in_first_attempt(fault(" ".join(faults)))] if faults else [])
    scenario.wait(lambda: reached(run), phase, START_S, run)
    if phase == "wait":
        scenario.knobs(latency_s=600)  # nothing comes that could wake it
    scenario.slurm("scancel", "--signal=USR2", scenario.job_of(run))
    scenario.wait(lambda: scenario.outcome(run, 1), "the attempt ends", 60, run)
    scenario.knobs()
    if phase != "last_save":
        scenario.wait(lambda: len(read_attempts(run)) == 2, "the second attempt", 60, run)
    assert_nothing_lost(scenario, run, same_values=phase != "evaluation")


def trainer_says(run: Run, state: str) -> bool:
    return any(
        process_status.process == "trainer" and process_status.state == state
        for process_status in read_process_statuses(run)
    )


def said(run: Run, text: str) -> bool:
    return any(text in path.read_text(errors="replace") for path in run.path.glob("logs/1/trainer-*.log"))


@pytest.mark.faults_slow
def test_14_signals_of_all_kinds_again_and_again(scenario: Scenario) -> None:
    """TERM, USR2 and CONT storms to every process, also while it saves: one save, one requeue."""
    slow_save = in_first_attempt(fault("checkpoints.written:sleep=4"))
    run = scenario.submit(STEPS_PER_ATTEMPT, setup=[slow_save])
    scenario.reach(run, 3)
    batch_shell, deadline = scenario.batch_shell(run), time.monotonic() + 8
    while time.monotonic() < deadline and scenario.agents(run):
        spared = {batch_shell, *scenario.sruns(run)}
        send([pid for pid in processes_of(run) if pid not in spared], CONT, USR2, TERM, CONT)
        time.sleep(0.3)
    saved_when_told(scenario, run)
    assert_nothing_lost(scenario, run)
    assert len(read_attempts(run)) == 2


@pytest.mark.nodes(3)
@pytest.mark.parametrize(
    "second_node",
    [
        pytest.param({"trainer.placement.policy_num_nodes": 2}, id="policy"),
        pytest.param(CRITIC_APART, id="critic"),
    ],
)
@pytest.mark.faults_slow
def test_15_only_one_agent_gets_the_signal(scenario: Scenario, second_node: dict[str, Any]) -> None:
    """As under proctrack/cgroup, and only on the second node: all ranks stop at the same step."""
    run = scenario.submit({**second_node, **STEPS_PER_ATTEMPT})
    scenario.reach(run, 3)
    send([scenario.agent(run, 1)], TERM, CONT)
    saved_when_told(scenario, run)
    assert_nothing_lost(scenario, run, same_values=False)
    assert len(read_attempts(run)) == 2


@pytest.mark.faults_slow
def test_16_killed_before_it_could_requeue(scenario: Scenario) -> None:
    """Saved, but the end of the batch script is killed: Slurm thinks the job over, status says so, and resume goes on."""
    run = scenario.submit(STEPS_PER_ATTEMPT)
    scenario.reach(run, 3)
    send([scenario.batch_shell(run)], STOP)  # it will not come to its last lines
    send(scenario.agents(run), TERM)
    saved_when_told(scenario, run)
    scenario.wait(lambda: not scenario.agents(run), "the agents leave", 30, run)
    scenario.slurm("scancel", "--batch", "--signal=KILL", scenario.job_of(run))
    scenario.wait(lambda: not scenario.queued(run), "Slurm ends the job", 30, run)
    assert "run: interrupted" in scenario.told("status", "run")
    assert "slurm job" in scenario.told("resume", "run")
    assert_nothing_lost(scenario, run)


@pytest.mark.faults_slow
def test_17_requeue_by_an_operator_races_with_the_runs_own(scenario: Scenario) -> None:
    """Slurm requeues the job already when the run wants to: one restart, and no error."""
    run = scenario.submit(STEPS_PER_ATTEMPT)
    scenario.reach(run, 3)
    scenario.slurm("scontrol", "requeue", scenario.job_of(run))
    scenario.outcome(run, 2)
    assert_nothing_lost(scenario, run)
    assert "Restarts=1" in scenario.slurm("scontrol", "show", "job", "-o", scenario.job_of(run))


@pytest.mark.nodes(4)
@pytest.mark.faults_slow
def test_18_requeue_of_one_element_leaves_its_siblings_alone(scenario: Scenario) -> None:
    """One element of an array has the raw id of the whole array."""
    run = scenario.submit({**STEPS_PER_ATTEMPT, "slurm.array_parallelism": 2}, "--seeds", "0:2", pinned=False)
    runs = [scenario.run_of(f"run.{i}-seed-{i}") for i in range(2)]
    for run in runs:
        scenario.reach(run, 3)
    raw = {run.name: _raw_id(scenario, run) for run in runs}
    whole = next(run for run in runs if raw[run.name] == scenario.job_of(run).partition("_")[0])
    other = next(run for run in runs if run is not whole)
    send([pid for pid in scenario.agents(whole) if _is_of(pid, scenario.job_of(whole))], TERM)
    saved_when_told(scenario, whole)
    scenario.wait(lambda: not any(scenario.queued(run) for run in runs), "both leave the queue", 240, whole)
    for run in runs:
        assert_nothing_lost(scenario, run, same_values=False)
    assert (len(read_attempts(whole)), len(read_attempts(other))) == (2, 1)


def _is_of(pid: int, job: str) -> bool:
    """Elements of one array share their folder."""
    array, _, element = job.partition("_")
    environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    return {f"SLURM_ARRAY_JOB_ID={array}".encode(), f"SLURM_ARRAY_TASK_ID={element}".encode()} <= set(environment)


def _raw_id(scenario: Scenario, run: Run) -> str:
    shown = scenario.slurm("scontrol", "show", "job", "-o", scenario.job_of(run))
    return shown.partition("JobId=")[2].split()[0]


@pytest.mark.faults_slow
@pytest.mark.own_cluster("--conf", "MinJobAge=2")
def test_19_cancel_saves_and_does_not_requeue(scenario: Scenario) -> None:
    """Slurm forgets the job (scenario 36): the state comes from the run's own files."""
    run = scenario.submit({"trainer.max_steps": 500, **STEPS_PER_ATTEMPT})
    scenario.reach(run, 3)
    assert "run: cancelled" in scenario.told("cancel", "run")
    steps = last_trained(run)
    assert last_saved(run)[0] == steps
    assert_nothing_lost(scenario, run, "cancelled", steps)
    scenario.wait_until_forgotten(run)
    assert "run: cancelled" in scenario.told("status", "run")


@pytest.mark.faults_slow
def test_19_cancel_of_a_run_that_waits_to_start_again(scenario: Scenario) -> None:
    """A requeued job waits for its BeginTime: cancelled there, it is gone, and what was saved can be resumed."""
    run = scenario.submit(STEPS_PER_ATTEMPT)
    scenario.reach(run, 3)
    send(scenario.agents(run), TERM)
    scenario.wait(lambda: "PENDING" in scenario.queued(run), "it is queued again", 40, run)
    assert "run: cancelled" in scenario.told("cancel", "run")
    assert_ended(scenario, run, "cancelled")
    assert len(read_attempts(run)) == 1
    assert "slurm job" in scenario.told("resume", "run")
    assert_nothing_lost(scenario, run)


@pytest.mark.faults_slow
def test_19_scancel_while_saving(scenario: Scenario) -> None:
    """scancel is not hpcrl's: TERM, and KILL after KillWait. The commit under way may be lost, not the one before."""
    run = scenario.submit({"trainer.ckpt_interval": 3}, setup=[fault("checkpoints.written@2:sleep=30")])
    scenario.reach(run, 6)
    scenario.wait(lambda: list(run.checkpoints.glob(".tmp-s000006*")), "the second save", 30, run)
    scenario.slurm("scancel", scenario.job_of(run))
    scenario.wait(lambda: not scenario.queued(run), "the job is gone", 40, run)
    scenario.wait(lambda: not processes_of(run), "no process is left", 20, run)
    assert last_saved(run) == (3, 0)
    assert "slurm job" in scenario.told("resume", "run")
    assert_nothing_lost(scenario, run)


@pytest.mark.faults_slow
def test_20_suspended_for_a_minute(scenario: Scenario) -> None:
    """SIGSTOP of everything for a minute is neither a hang nor a death."""
    run = scenario.submit()
    scenario.reach(run, 3)
    scenario.slurm("scontrol", "suspend", scenario.job_of(run))
    time.sleep(65)
    scenario.slurm("scontrol", "resume", scenario.job_of(run))
    assert_nothing_lost(scenario, run)
    assert len(read_attempts(run)) == 1


@pytest.mark.nodes(1)
@pytest.mark.faults_slow
@pytest.mark.parametrize(("config", "rows"), [("sft_tiny.toml", 8192), ("dpo_tiny.toml", 8046)], ids=["sft", "dpo"])
def test_44_preempted_inside_an_epoch_of_a_dataset(scenario: Scenario, config: str, rows: int) -> None:
    """The run comes back inside the epoch and trains the rows that are left of it, in their order and with the losses of a run that nothing happens to."""
    assert_each_row_once(scenario, 1, config, rows)


@pytest.mark.nodes(2)
@pytest.mark.faults_slow
def test_44_preempted_on_two_nodes(scenario: Scenario) -> None:
    """The same with FSDP2 over two nodes, and tokens that the two runs share."""
    assert_each_row_once(scenario, 2, "sft_tiny.toml", 8192, "data.cache=true")
    kept = {path.stat().st_ino for path in (scenario.path / "runs" / ".tokens").glob("*/tokens.i32")}
    files = [
        scenario.run_of(name).dataset(f"{kind}-0") / "tokens.i32"
        for name in ("run", "whole")
        for kind in ("train", "validation")
    ]
    assert {path.stat().st_ino for path in files} == kept
    assert len(kept) == 2


def assert_each_row_once(scenario: Scenario, nodes: int, config: str, rows: int, *settings: str) -> None:
    """Let a run that trains a dataset's rows be preempted on so many nodes, and compare it with one that is not."""
    places = [f"slurm.extra.nodelist={','.join(scenario.nodes)}", f"slurm.root={scenario.path / 'runs'}"]
    slurm = ["slurm.partition=main", "slurm.time_minutes=10", "slurm.cpus_per_task=1", "slurm.exclusive=true"]
    sizes = [
        "trainer.train_batch_size=1024",
        "trainer.policy_mini_batch_size=512",
        "trainer.max_tokens_per_micro_batch=1024",
    ]
    rest = ["trainer.project_name=faults", "trainer.ckpt_interval=100", "trainer.eval_interval=4", "trainer.epochs=2"]
    runs, epoch = [], rows // 1024
    for name in ("run", "whole"):
        told = [
            f"trainer.run_name={name}",
            f"trainer.placement.policy_num_nodes={nodes}",
            *places,
            *slurm,
            *sizes,
            *rest,
            *settings,
        ]
        done = scenario.hpcrl("submit", str(CONFIGS / config), *told)
        assert done.returncode == 0, done.stdout + done.stderr
        runs.append(scenario.run_of(name))
        if name == "run":
            scenario.reach(runs[0], 6)
            scenario.preempt()
            saved_when_told(scenario, runs[0])
    for run in runs:
        assert_ended(scenario, run)
        assert_reported_once(run)
        assert list(curve(run, "policy/grad_norm")) == list(range(1, 2 * epoch + 1))
    run, whole = runs
    assert len(read_attempts(run)) > len(read_attempts(whole)) == 1
    assert trained_rows(run) == trained_rows(whole)
    for steps in (trained_rows(run)[:epoch], trained_rows(run)[epoch:]):
        once = {row for step in steps for row in step}
        assert (len(once), once <= set(range(rows))) == (1024 * epoch, True), "no row twice"
    for name in ("policy/final_loss", "policy/grad_norm", "eval/all/loss"):
        assert curve(run, name) == pytest.approx(curve(whole, name), rel=1e-6, abs=1e-6), name


def trained_rows(run: Run) -> list[list[int | None]]:
    """Return the rows of each batch, by step."""
    files = [read_batch(run.batch(step)) for step in batch_steps(run)]
    return [[group.row for group in file.batch.groups] for file in files if file]


FAMILY_STEPS, GROUPS = 8, 4
OF_FAMILIES = [
    *(f"trainer.{name}={GROUPS}" for name in ("train_batch_size", "policy_mini_batch_size")),
    *(f"trainer.{name}" for name in ("project_name=faults", f"max_steps={FAMILY_STEPS}", "ckpt_interval=100", "eval_interval=0")),
    *("generator.n_samples_per_prompt=4", "slurm.partition=main", "slurm.time_minutes=10", "slurm.cpus_per_task=1", "slurm.exclusive=true"),
]  # fmt: skip
PICTURES = ["trainer.policy.diffusers.ema.enable=true", "trainer.policy.diffusers.weight_copy_decay_type=1"]


def loses_its_worker_and_its_nodes(scenario: Scenario, config: str, settings: Sequence[str] = ()) -> None:
    """Kill the worker of a run, and take its nodes later: each group is trained once, and losses and rewards are those of a run that nothing
    happens to."""

    def submit(name: str) -> Run:
        places = [f"slurm.extra.nodelist={','.join(scenario.nodes)}", f"slurm.root={scenario.path / 'runs'}"]
        named = [f"trainer.run_name={name}", *OF_FAMILIES, *settings, *places]
        done = scenario.hpcrl("submit", str(CONFIGS / config), *named)
        assert done.returncode == 0, done.stdout + done.stderr
        return scenario.run_of(name)

    run = submit("run")
    scenario.reach(run, 2)
    send([scenario.worker(run)], signal.SIGKILL)
    scenario.reach(run, 5)
    scenario.preempt()
    assert scenario.outcome(run, 1, 60).kind == "interrupted", scenario.report(run)
    assert last_saved(run)[0] == last_trained(run), "what was trained was saved"
    scenario.wait(lambda: len(read_attempts(run)) == 2, "the second attempt", START_S, run)
    whole = submit("whole")
    for one in (run, whole):
        assert_ended(scenario, one)
        assert_reported_once(one)
        assert_commits_load(one, FAMILY_STEPS)
        assert_groups_once(one, FAMILY_STEPS * GROUPS)
    for name in ("policy/final_loss", "policy/grad_norm", "reward/avg_raw_reward"):
        assert curve(run, name) == pytest.approx(curve(whole, name), rel=1e-4, abs=1e-6), name


@pytest.mark.faults_slow
def test_51_a_diffusion_run_loses_its_worker_and_its_nodes(scenario: Scenario) -> None:
    pytest.importorskip("diffusers")
    loses_its_worker_and_its_nodes(scenario, "diffusion_tiny.toml", PICTURES)


@pytest.mark.faults_slow
@pytest.mark.parametrize("config", ["reach_vla.toml", "reach_pi05.toml"])
def test_52_a_run_of_robots_loses_its_worker_and_its_nodes(scenario: Scenario, config: str) -> None:
    pytest.importorskip("mujoco")
    loses_its_worker_and_its_nodes(scenario, config)
