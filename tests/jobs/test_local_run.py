"""Whole runs on this machine: real engines, real torchrun, as a user types it."""

from __future__ import annotations

import grp
import json
import os
import signal
import socket
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from hpcrl.launch.manage.registry import states_of
from hpcrl.observe.goodput import account_of
from hpcrl.rundir.alerts import read_alerts
from hpcrl.rundir.allocations import read_allocations
from hpcrl.rundir.commit import committed, read_json, write_text
from hpcrl.rundir.layout import Run, step_of
from hpcrl.rundir.ledger import read_attempts, read_outcome
from tests.environments import dependencies, make_environment
from tests.jobs.small_run import (
    HPCRL,
    SMALL,
    curve,
    finish,
    hpcrl,
    kill,
    logs_of,
    pid_of,
    roles_of_steps,
    trained_groups,
    wait_for,
)
from tests.paths import QUICKSTART
from tests.processes import processes_of


def submit(cwd: Path, name: str, *settings: str, program: str = HPCRL) -> Run:
    words = ("submit", str(QUICKSTART), "--local", f"trainer.run_name={name}", *SMALL, *settings)
    done = hpcrl(*words, cwd=cwd, program=program)
    assert done.returncode == 0, done.stderr
    return Run.open(cwd / "runs" / "quickstart" / name)


STEPS = 20  # enough that a kill during the first few meets a run that is still training


def tensorboard_points(run: Run, tag: str) -> list[int]:
    events = EventAccumulator(str(run.events), size_guidance={"scalars": 0})
    events.Reload()
    return [event.step for event in events.Scalars(tag)]


def require_readable_by(number: int, run: Run, *hidden: str) -> None:
    """Look at each file of a run: the group may read it, and it holds none of the hidden texts; only the owner may read secrets/."""
    folders = [run.path, run.slurm.resolve()]
    paths = [path for folder in folders for path in (folder, *folder.rglob("*")) if not path.is_symlink()]
    files = [path for path in paths if path.is_file() and run.token.parent not in path.parents]
    assert len(files) > 100
    for path in paths:
        found, secret = path.stat(), run.token.parent in (path, *path.parents)
        wanted = 0 if secret else 0o050 if path.is_dir() else 0o040
        assert found.st_mode & 0o050 & wanted == wanted, f"{path}: {found.st_mode:o}"
        assert found.st_mode & (0o077 if secret else 0o027) == 0, f"{path}: {found.st_mode:o}"
        assert secret or found.st_gid == number, path
    assert run.token.stat().st_mode & 0o777 == 0o600
    for text in (run.token.read_text().strip(), *hidden):
        assert [path for path in files if text.encode() in path.read_bytes()] == []


def test_killed_run_goes_on_from_its_last_commit(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SIGKILL of a trainer rank in the middle: the attempt ends within seconds, with its error, and resumes as if nothing had been.

    A group may read all of it but its secrets.
    """
    monkeypatch.setenv("WANDB_API_KEY", "key-of-the-environment")
    group = grp.getgrgid(1 if os.geteuid() == 0 else os.getegid())
    readable = f"slurm.readable_by={group.gr_name}"
    setup = 'slurm.setup=["export OF_SETUP=loaded", "false"]'
    run = submit(place, "killed", f"trainer.max_steps={STEPS - 2}", "trainer.eval_interval=10", readable, setup)
    wait_for(lambda: committed(run.checkpoints, step_of), lambda: logs_of(run), 240)
    beside = hpcrl(
        "attach",
        "killed",
        "--role",
        "rollout",
        "--",
        "sh",
        "-c",
        "echo $HPCRL_ATTEMPT $HPCRL_REPLICA $OF_SETUP",
        cwd=place,
    )
    assert (beside.stdout, beside.stderr) == ("1 0 loaded\n", "")
    assert "slurm.setup: line 2 (1) failed on " in logs_of(run)
    wait_for(lambda: run.batch(4).exists() or read_outcome(run), lambda: logs_of(run), 60)
    began = time.monotonic()
    kill(pid_of(run, "train"))
    assert finish(run, 1) == "failed", logs_of(run)
    assert time.monotonic() - began < 25
    status = hpcrl("status", "killed", cwd=place)
    assert "failed: trainer-0:" in status.stdout
    assert "SIGKILL" in status.stdout or "-9" in status.stdout
    before = trained_groups(run)

    refused = hpcrl("resume", "killed", "trainer.seed=1", cwd=place)
    assert refused.returncode == 2
    assert "refused: trainer.seed: 42 -> 1" in refused.stderr
    lr = "trainer.policy.optimizer_config.lr"
    changes = [f"{lr}=1e-4", "trainer.ckpt_interval=5", f"trainer.max_steps={STEPS}", "trainer.keep_when_done=last"]
    resumed = hpcrl("resume", "killed", *changes, cwd=place)
    assert resumed.returncode == 0, resumed.stderr
    assert f"warning: {lr}: 0.0002 -> 0.0001 (" in resumed.stdout
    assert f"warning: trainer.max_steps: {STEPS - 2} -> {STEPS}" in resumed.stdout
    assert "harmless: trainer.ckpt_interval: 2 -> 5 (" in resumed.stdout
    assert finish(run, 2) == "done", logs_of(run)
    groups = trained_groups(run)
    assert groups[: len(before)] == before, "finished batches were not used"
    assert len(groups) == STEPS
    assert len({group for batch in groups for group in batch}) == STEPS * 8, "a group trained twice"
    assert len(read_attempts(run)) == 2
    for name in ("reward/avg_raw_reward", "policy/grad_norm", "policy/policy_kl", "policy/policy_lr", "timing/step"):
        assert list(curve(run, name)) == list(range(1, STEPS + 1)), name
        assert tensorboard_points(run, name) == list(range(1, STEPS + 1)), name
    assert tensorboard_points(run, "eval/all/avg_score") == [0, 10, STEPS]
    rates = curve(run, "policy/policy_lr")
    assert (rates[1], rates[STEPS]) == pytest.approx((2e-4 / 5, 1e-4)), "the learning rate changed with the attempt"
    assert committed(run.checkpoints, step_of) == [STEPS]
    assert not run.weights.exists()
    require_readable_by(group.gr_gid, run, "key-of-the-environment")
    assert "trainer.keep_when_done: deleted weights" in run.log(2, "agent-0").read_text()
    assert hpcrl("verify", "killed", cwd=place).returncode == 0
    assert "lr = 0.0002" in run.config_of(1).read_text()
    account = account_of(run)
    assert account
    assert {(row.attempt, row.role) for row in account.rows} == {
        (at, role) for at in (1, 2) for role in ("trainer", "rollout")
    }
    held = [one.until - one.start for one in read_allocations(run)]
    assert account.total == pytest.approx(2 * sum(held))
    assert all(
        account.share(use) > 0 for use in ("training", "generation", "evaluation", "saving", "starting", "waiting")
    )
    assert "until its end" in dict(account.parts("lost")), "the killed rank's node was lost until the attempt had ended"
    assert f"goodput     {account}" in hpcrl("status", "killed", cwd=place).stdout
    assert "to train on, give it a later end: hpcrl resume killed" in hpcrl("resume", "killed", cwd=place).stderr


@pytest.mark.faults_slow
def test_folders_below_other_roots_outlive_a_kill_and_are_missed(place: Path) -> None:
    """Checkpoints and events on another filesystem, exports in a third place; an attempt without them ends, and the next one goes on."""
    with TemporaryDirectory(dir="/dev/shm") as shm:
        scratch, project = Path(shm) / "scratch", place / "project"
        roots = {"checkpoint_root": scratch, "tensorboard_root": scratch, "export_root": project}
        settings = [f"slurm.{name}={root}" for name, root in roots.items()]
        run = submit(
            place, "apart", *settings, "trainer.max_steps=200", "trainer.hf_save_interval=2", "trainer.eval_interval=0"
        )
        wait_for(lambda: len(committed(run.checkpoints, step_of)) >= 2, lambda: logs_of(run), 240)
        kill(pid_of(run, "train"))
        assert finish(run, 1) == "failed", logs_of(run)
        scratch.rename(scratch.with_name("away"))
        refused = hpcrl("resume", "apart", cwd=place)
        assert refused.returncode == 4
        assert (
            f"{run.checkpoints} leads to {scratch}/quickstart/apart/checkpoints, which is not there" in refused.stderr
        )
        verified = hpcrl("verify", "apart", cwd=place)
        assert "apart had a checkpoint of step " in verified.stdout
        assert "samples: ok" in verified.stdout
        assert "which is not there" in hpcrl("checkpoint", "ls", "apart", cwd=place).stderr
        assert "hpcrl tensorboard --rebuild" in hpcrl("tensorboard", "apart", cwd=place).stderr
        scratch.with_name("away").rename(scratch)
        moved = hpcrl("resume", "apart", f"slurm.checkpoint_root={project}", cwd=place)
        assert moved.returncode == 2
        assert "to move it, copy it while the run is stopped" in moved.stderr
        last = max(committed(run.checkpoints, step_of)) + 2
        resumed = hpcrl("resume", "apart", f"trainer.max_steps={last}", cwd=place)
        assert resumed.returncode == 0, resumed.stderr
        assert finish(run, 2) == "done", logs_of(run)
        assert "continuing after step " in run.log(2, "trainer-0").read_text()
        verified = hpcrl("verify", "apart", cwd=place)
        assert verified.returncode == 0, verified.stdout
        there = [path.name for path in (scratch / "quickstart" / "apart" / "checkpoints").glob("s*")]
        assert (len([name for name in there if name != "starts.jsonl"]), f"s{last:06d}" in there) == (3, True), (
            "retention"
        )
        assert (project / "quickstart" / "apart" / "exports" / f"s{last:06d}" / "COMMIT").is_file()
        assert tensorboard_points(run, "policy/grad_norm") == list(range(1, last + 1))
        longer = hpcrl("resume", "apart", f"trainer.max_steps={last + 2}", cwd=place)
        assert longer.returncode == 0, longer.stderr
        assert finish(run, 3) == "done", logs_of(run)
        assert list(curve(run, "timing/step")) == list(range(1, last + 3)), "curves of one run"
        assert committed(run.checkpoints, step_of)[-1] == last + 2
        again = hpcrl(
            "submit", str(QUICKSTART), "--local", "trainer.run_name=apart", *settings, "slurm.root=other", cwd=place
        )
        assert (again.returncode, f"of the run {run.path}" in again.stderr, (place / "other").exists()) == (
            5,
            True,
            False,
        )


@pytest.mark.faults_slow
def test_the_controller_stays_until_the_last_checkpoint_is_written(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Checkpoints are written behind training, the last one too, and it may take longer than all else has to end."""
    monkeypatch.setenv("HPCRL_FAULT", "commit.shard:sleep=8")
    run = submit(place, "slow-disk", "trainer.max_steps=2", "trainer.eval_interval=0")
    assert finish(run, 1, 100) == "done", logs_of(run)
    assert committed(run.checkpoints, step_of) == [2]
    assert "fault point commit.shard" in run.log(1, "trainer-0").read_text()


@pytest.mark.faults_slow
@pytest.mark.parametrize("engine", ["vllm", "transformers"])
def test_turns_that_are_trained_on_their_own(place: Path, engine: str) -> None:
    """Samples of one to three turns: rows that two ranks cannot share equally, from engine to optimizer steps, and as a person sees them."""
    settings = [
        "generator.step_wise_trajectories=true",
        "trainer.placement.policy_num_gpus_per_node=2",
        "trainer.max_steps=2",
        f"generator.inference_engine.backend={engine}",
    ]
    config = str(QUICKSTART.with_name("guess_number.toml"))
    done = hpcrl("submit", config, "--local", "--follow", "trainer.run_name=turns", *SMALL, *settings, cwd=place)
    run = Run.open(place / "runs" / "guess_number" / "turns")
    assert done.returncode == 0, done.stdout + done.stderr + logs_of(run)
    for step in (1, 2):
        batch = read_json(run.batch(step))
        assert batch is not None
        rows = [count for group in batch["groups"] for count in group["rows"]]
        assert (len(rows), curve(run, "generate/samples")[step]) == (32, 32)
        assert sum(rows) == curve(run, "generate/rows")[step] > 32
        assert curve(run, "policy/grad_norm")[step] > 0
    assert set(curve(run, "eval/all/avg_score")) == {0, 2}
    assert roles_of_steps(run, 2) == {"controller", "rank-0", "rank-1", "rollout-0"}
    shown = hpcrl("samples", "turns", "-n", "32", "--json", cwd=place)
    samples = json.loads(shown.stdout)
    turns = [["prompt", "policy"] * count for count in rows]
    assert sorted([part["by"] for part in sample["parts"]] for sample in samples) == sorted(turns)
    assert any(
        sample["parts"][2]["text"].startswith(sample["parts"][0]["text"])
        for sample in samples
        if len(sample["parts"]) > 2
    )


@pytest.mark.faults_slow
def test_from_another_runs_checkpoint_and_cancel(place: Path) -> None:
    """A run to its end with `--follow`; a second one that starts from its checkpoint and is cancelled: it saves first."""
    name = "first"
    done = hpcrl(
        "submit", str(QUICKSTART), "--local", "--follow", f"trainer.run_name={name}", *SMALL, "trainer.max_steps=2",
        "trainer.hf_save_interval=2", cwd=place,
    )  # fmt: skip
    run = Run.open(place / "runs" / "quickstart" / name)
    assert done.returncode == 0, done.stdout + done.stderr + logs_of(run)
    for part in ("eval score", "tokens/s", "hpcrl tensorboard ", "rollout-0"):
        assert part in done.stdout
    assert oct(run.path.stat().st_mode & 0o777) == "0o700"
    token = run.token.read_text().strip()
    assert oct(run.token.stat().st_mode & 0o777) == "0o600"
    assert token not in logs_of(run)
    assert (run.export(2) / "model.safetensors").exists() or list(run.export(2).glob("*.safetensors"))
    assert [os.path.basename(path) for path in sorted(run.evals.iterdir())] == ["v000000", "v000002"]
    dump = (run.eval_dump(2, 0)).read_text().splitlines()
    assert len(dump) == 256
    data = str(QUICKSTART.parent / "quickstart" / "data" / "validation.parquet")
    evaluated = hpcrl("eval", "first", "--data", data, "--json", cwd=place)
    assert evaluated.returncode == 0, evaluated.stderr
    results = json.loads(evaluated.stdout)
    assert results["metrics"] == read_json(run.evals_of(2) / "summary.json"), (
        "as the run has evaluated the same weights"
    )
    assert results["prompts"] == {"all": 256, "sort_letters": 256}
    (where,) = run.evaluations.iterdir()
    assert hpcrl("samples", str(where), "--eval", "--best", "-n", "2", cwd=place).stdout.count("--- turn 1") == 2
    rescored = hpcrl("rescore", str(where), "-o", "rescored", "--json", cwd=place)
    assert rescored.returncode == 0, rescored.stderr
    assert json.loads(rescored.stdout)["metrics"] == results["metrics"], "the same rewards"
    compared = json.loads(hpcrl("compare", "first@0", "rescored", "--json", cwd=place).stdout)
    assert compared["metrics"]["eval/all/avg_score"]["after"] == results["metrics"]["eval/all/avg_score"]

    second = submit(
        place,
        "second",
        "trainer.resume_mode=from_path",
        f"trainer.resume_path={run.checkpoint(2)}",
        f"trainer.policy.model.path={run.export(2)}",  # so vLLM and the trainer load the export
        "trainer.max_steps=500",
    )
    wait_for(lambda: second.batch(4).exists(), lambda: logs_of(second), 240)
    cancelled = hpcrl("cancel", "second", cwd=place)
    assert cancelled.returncode == 0, cancelled.stderr
    assert "second: cancelled" in cancelled.stdout
    wait_for(lambda: not processes_of(second), lambda: f"left over: {processes_of(second)}", 30)
    assert not second.batch(1).exists(), "training continued after step 2"
    saved = committed(second.checkpoints, step_of)
    trained = list(curve(second, "policy/grad_norm"))
    assert trained[0] == 3
    assert saved[-1] == trained[-1], "what was trained was saved before the end"
    assert finish(second, 1) == "cancelled"


@pytest.mark.faults_slow
def test_run_that_is_never_requeued_goes_on_only_when_told_so(place: Path) -> None:
    """A preempted run of resume_mode none: it saves, says that it is not requeued, and resumes with resume_mode latest."""
    run = submit(place, "once", "trainer.resume_mode=none", f"trainer.max_steps={STEPS}", "trainer.eval_interval=0")
    wait_for(lambda: run.batch(3).exists(), lambda: logs_of(run), 240)
    job = states_of([run])[0].submission["job_id"]
    for child in Path(f"/proc/{job}/task/{job}/children").read_text().split():
        os.kill(int(child), signal.SIGTERM)
    assert finish(run, 1) == "interrupted", logs_of(run)
    assert "not requeued, because trainer.resume_mode is none" in hpcrl("status", "once", cwd=place).stdout
    (*_, saved) = committed(run.checkpoints, step_of)
    refused = hpcrl("resume", "once", cwd=place)
    assert refused.returncode == 5
    assert "resume this one with trainer.resume_mode=latest" in refused.stderr

    resumed = hpcrl("resume", "once", "trainer.resume_mode=latest", f"trainer.max_steps={saved + 2}", cwd=place)
    assert resumed.returncode == 0, resumed.stderr
    assert finish(run, 2) == "done", logs_of(run)
    assert f"continuing after step {saved}, from " in run.log(2, "trainer-0").read_text()
    assert list(curve(run, "policy/grad_norm")) == list(range(1, saved + 3))


@pytest.mark.faults_slow
def test_trainer_of_two_nodes_meets_elsewhere_when_its_port_is_taken(place: Path) -> None:
    """Somebody binds the port of the rendezvous between its choice and torchrun's use of it: both nodes meet on another one."""
    two_nodes = ["trainer.placement.policy_num_nodes=2", "trainer.max_steps=1", "trainer.eval_interval=0"]
    run = submit(place, "two", *two_nodes)
    meeting = run.rendezvous(1)
    wait_for(meeting.exists, lambda: logs_of(run), 30)
    first = read_json(meeting)
    assert first is not None
    with socket.create_server((first["address"], first["port"])):
        wait_for(lambda: read_json(meeting) != first, lambda: logs_of(run), 60)
    assert finish(run, 1) == "done", logs_of(run)
    assert list(curve(run, "policy/grad_norm")) == [1]


@pytest.mark.slow
def test_each_role_is_sampled_while_the_run_goes_on(place: Path) -> None:
    done = hpcrl("submit", str(QUICKSTART), "--local", "trainer.run_name=mine", "trainer.max_steps=30", cwd=place)
    assert done.returncode == 0, done.stderr
    run = Run.open(place / "runs" / "quickstart" / "mine")
    wait_for(lambda: run.batch(2).exists() or read_outcome(run), lambda: logs_of(run), 240)
    for role, expected in (("trainer", "hpcrl/trainer/"), ("rollout", "hpcrl/rollout/"), ("controller", "hpcrl/")):
        found = hpcrl("profile", "mine", "--role", role, "--seconds", "2", "--format", "top", "--idle", cwd=place)
        assert found.returncode == 0, found.stderr
        assert "share of samples" in found.stdout
        assert expected in found.stdout
    assert hpcrl("profile", "mine", "--seconds", "1", cwd=place).stderr == "mine-rank-0.svg\n"
    assert (place / "mine-rank-0.svg").read_text().startswith("<?xml")
    assert finish(run, 1) == "done", logs_of(run)
    over = hpcrl("profile", "mine", "--seconds", "1", cwd=place)
    assert over.returncode == 5
    assert "is done: it has no processes now" in over.stderr


@pytest.mark.slow
def test_an_alert_stops_a_run_that_has_saved(place: Path, tmp_path: Path) -> None:
    """It is raised, its command runs, and what was trained is saved."""
    program = tmp_path / "told.sh"
    write_text(program, '#!/bin/sh\necho "$HPCRL_ALERT_NAME $HPCRL_ALERT_STEP $1" >> told\n', mode=0o700)
    always = "{kind='above', metric='policy/policy_entropy', value=0, steps=2, stop=true}"
    run = submit(
        place,
        "told",
        f"trainer.alerts.rules.always={always}",
        f"trainer.alerts.command=['{program}', 'run $HOME']",
        "trainer.max_steps=500",
        "trainer.ckpt_interval=400",
        "trainer.eval_interval=0",
    )
    assert finish(run, 1, 120) == "cancelled", logs_of(run)
    (alert,) = read_alerts(run)
    assert (alert.name, alert.begin.step, alert.notified) == ("always", 2, True)
    assert (run.path / "told").read_text() == "always 2 run $HOME\n"
    outcome = read_outcome(run)
    assert outcome is not None
    assert outcome.message.startswith("saved and stopped (alert always: policy/policy_entropy is ")
    steps = list(curve(run, "timing/step"))
    assert 2 <= len(steps) < 400
    assert committed(run.checkpoints, step_of) == [outcome.step] == steps[-1:]
    status = hpcrl("status", "told", cwd=place).stdout
    assert status.startswith("told: cancelled: saved and stopped (alert always: ")
    assert "always at step 2: policy/policy_entropy is " in status
    assert "! always at step 2" in hpcrl("status", cwd=place).stdout


@pytest.mark.faults_slow
def test_a_run_whose_rewards_are_all_alike_says_so(place: Path) -> None:
    """A reward function that pays every response the same: a line, a mark, a verdict, and the run goes on to its end.

    The run is submitted from an environment without torch; its jobs run in another one, behind a script that notes its calls.
    """
    python, noted = place / "fat" / "python", place / "noted"
    script = f'#!/bin/sh\necho "$OF_SETUP $*" >> {noted}\nexec {sys.executable} "$@"\n'
    write_text(python, script, mode=0o755)
    of_jobs = [f"slurm.python={python}", 'slurm.setup=["export OF_SETUP=loaded"]']
    write_text(place / "flat_rewards.py", "def half(response, environment):\n    return 0.5\n")
    rewards = ['environment.reward_function={"flat_rewards:half" = 1.0}', "environment.env_class=", 'python_path=["."]']
    light = str(make_environment(place / "light", dependencies()) / "hpcrl")
    run = submit(place, "flat", *rewards, "trainer.eval_interval=0", *of_jobs, program=light)
    assert finish(run, 1) == "done", logs_of(run)
    assert noted.read_text().startswith("loaded -u -m submitit.core._submit ")
    why = "all samples of each group have the same reward; hpcrl samples flat shows them"
    status = hpcrl("status", "flat", cwd=place).stdout
    assert f"learning    nothing in step 4: {why}" in status
    assert "reward/groups_without_spread is 1, above 0.99, 3 times in a row" in status
    followed = hpcrl("follow", "flat", cwd=place)
    assert "nothing in step 4" in followed.stdout, "in the table at the end"
    found = hpcrl("report", "flat", cwd=place).stdout
    for verdict in ("alert: learning at step 3", "learning: nothing: all samples", "reward: 0.500 in every step"):
        assert f"bad   {verdict}" in found
