"""Reward models as a user trains and uses them: the same pairs whatever ends an attempt, and a service that comes back with the run."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from hpcrl.observe.timeline import read_spans, steps_of
from hpcrl.rundir.commit import committed
from hpcrl.rundir.layout import Run, step_of
from hpcrl.runtime.process_status import SERVING, read_process_status
from tests.jobs.small_run import SMALL, curve, finish, hpcrl, kill, logs_of, pid_of, wait_for
from tests.jobs.test_supervised import BATCH, in_order, rows_of, submit
from tests.paths import CONFIGS, QUICKSTART
from tests.reward_service.material import write_reward_model

TRAINING, SERVED = CONFIGS / "reward_model_tiny.toml", CONFIGS / "reward_service_tiny.toml"
PAIRS = 28321  # thirteen steps are an epoch
NAMES = ("loss", "rewards/chosen", "rewards/rejected", "rewards/margins", "rewards/accuracies")


@pytest.mark.faults_slow
def test_killed_inside_an_epoch_and_resumed_on_two_ranks_it_trains_the_same_pairs(place: Path) -> None:
    settings = [
        "trainer.max_steps=9",
        "trainer.ckpt_interval=2",
        "trainer.eval_interval=3",
        "trainer.hf_save_interval=9",
    ]
    whole = submit(place, "whole", *settings, config=TRAINING)
    assert finish(whole, 1) == "done", logs_of(whole)
    run = submit(place, "killed", *settings, config=TRAINING)
    wait_for(lambda: 2 in committed(run.checkpoints, step_of), lambda: logs_of(run), 120)
    kill(pid_of(run, "train"))
    assert finish(run, 1) == "failed"
    assert 0 < max(committed(run.checkpoints, step_of)) < 9
    resumed = hpcrl("resume", "killed", "trainer.placement.policy_num_gpus_per_node=2", cwd=place)
    assert resumed.returncode == 0, resumed.stderr
    assert finish(run, 2) == "done", logs_of(run)
    assert rows_of(run) == rows_of(whole) == in_order(whole, 9 * BATCH, PAIRS)
    for name in ("policy/final_loss", *(f"eval/all/{name}" for name in NAMES)):
        assert curve(run, name) == pytest.approx(curve(whole, name), rel=1e-3, abs=1e-3), name
    losses = curve(whole, "eval/all/loss")
    assert losses[9] < 0.6 < losses[0]
    assert not whole.weights.exists(), "no engine loads them"
    assert json.loads((whole.export(9) / "config.json").read_text())["architectures"] == [
        "Qwen2ForSequenceClassification"
    ]
    accuracy = max(curve(whole, "eval/all/rewards/accuracies").values())
    assert f"best eval/all/rewards/accuracies: {accuracy:.4g}" in hpcrl("checkpoint", "ls", "whole", cwd=place).stdout
    exported = hpcrl("checkpoint", "export", "killed", "-o", str(place / "exported"), cwd=place)
    assert exported.returncode == 0, exported.stderr
    assert (place / "exported" / "chat_template.jinja").is_file()
    refused = hpcrl("eval", "whole", "--data", str(CONFIGS / "quickstart" / "data" / "validation.parquet"), cwd=place)
    assert "whole trains a reward model, which answers no prompts" in refused.stderr


@pytest.mark.faults_slow
def test_a_reward_model_that_is_killed_comes_back_and_so_it_does_with_the_next_attempt(place: Path) -> None:
    model = write_reward_model(place / "model")
    settings = [
        *SMALL,
        "trainer.run_name=served",
        "trainer.max_steps=8",
        f"environment.remote_reward.service.model={model}",
    ]
    done = hpcrl("submit", str(SERVED), "--local", *settings, cwd=place)
    assert done.returncode == 0, done.stderr
    run = Run.open(place / "runs" / "reward_service" / "served")
    wait_for(lambda: 2 in committed(run.checkpoints, step_of), lambda: logs_of(run), 120)
    before = read_process_status(run, "reward-0", 1)
    kill(pid_of(run, "reward"))
    assert before

    def is_back() -> bool:
        status = read_process_status(run, "reward-0", 1)
        return status is not None and status.state == SERVING and status.pid != before.pid

    wait_for(is_back, lambda: logs_of(run), 120)
    assert "reward-0    serving" in hpcrl("status", "served", cwd=place).stdout
    time.sleep(1)
    kill(pid_of(run, "train"))
    assert finish(run, 1) == "failed"
    resumed = hpcrl("resume", "served", cwd=place)
    assert resumed.returncode == 0, resumed.stderr
    assert finish(run, 2) == "done", logs_of(run)
    status = read_process_status(run, "reward-0", 2)
    assert status
    assert (status.state, status.facts.get("url", "")) == ("finished", "")
    told = hpcrl("logs", "served", "--role", "agent", "--attempt", "1", cwd=place).stdout
    assert "reward-0: killed by SIGKILL" in told
    assert "to be started again (1)" in told
    rewards = curve(run, "reward/avg_raw_reward")
    assert sorted(rewards) == list(range(1, 9))
    assert len(set(rewards.values())) > 1
    assert curve(run, "environment/reward_model")
    spans = read_spans(run)
    phases = {span.phase for span in spans if span.process == "reward-0" and span.attempt == 2}
    assert phases == {"import", "load", "idle", "score"}
    assert list(steps_of(spans))[-1] == 8


@pytest.mark.slow
def test_as_a_scorer_it_trains_what_it_trains_as_a_service(place: Path) -> None:
    """Two copies, one of which is killed: the same samples, rewards and losses as where rollout workers ask the service."""
    model = write_reward_model(place / "model")
    scorer, remote = "environment.reward_model", "environment.remote_reward"
    bounds = "clip_min=-20.0, clip_max=20.0"
    ways = {
        "service": [
            f"{remote}={{enable=true, batch_size=16, {bounds}}}",
            f"{remote}.service={{model='{model}', model_dtype='float32'}}",
        ],
        "scorer": [
            f"{scorer}={{model='{model}', num_replicas=2, {bounds}}}",
            f"{scorer}.fsdp_config.mixed_precision.param_dtype=fp32",
        ],
    }
    runs = dict[str, Run]()
    for name, settings in ways.items():
        own = [*SMALL, "trainer.max_steps=6", "trainer.eval_interval=0", "environment.env_class=", *settings]
        done = hpcrl("submit", str(QUICKSTART), "--local", f"trainer.run_name={name}", *own, cwd=place)
        assert done.returncode == 0, done.stderr
        (path,) = place.glob(f"runs/*/{name}")
        run = runs[name] = Run.open(path)
        if name == "scorer":
            wait_for(lambda: 2 in committed(runs["scorer"].checkpoints, step_of), lambda: logs_of(runs["scorer"]), 120)
            kill(pid_of(run, "scorer"))
        assert finish(run, 1) == "done", logs_of(run)
    for name in ("reward/avg_raw_reward", "environment/reward_model", "policy/final_loss", "policy/grad_norm"):
        expected = curve(runs["service"], name)
        assert sorted(expected) == list(range(1, 7))
        assert curve(runs["scorer"], name) == pytest.approx(expected, rel=1e-3, abs=1e-5), name
    assert len(set(curve(runs["scorer"], "reward/avg_raw_reward").values())) == 6
    assert ", reward_model " in hpcrl("samples", "scorer", cwd=place).stdout
    verified = hpcrl("verify", "scorer", cwd=place)
    assert verified.returncode == 0, verified.stdout
