"""Learning from pairs as a user starts it: pairs in the order of their seed, each once, whatever ends an attempt."""

from __future__ import annotations

import json
from math import log
from pathlib import Path

import pytest

from hpcrl.rundir.commit import committed
from hpcrl.rundir.layout import Run, step_of
from tests.jobs.small_run import curve, finish, hpcrl, kill, logs_of, pid_of, wait_for
from tests.jobs.test_supervised import BATCH, in_order, rows_of, submit
from tests.paths import CONFIGS

DPO_TINY = CONFIGS / "dpo_tiny.toml"
PAIRS = 8046  # three steps are an epoch
TOKENS = 6  # of an answer, with the one that ends it


@pytest.mark.faults_slow
def test_a_run_reports_what_trl_does_and_keeps_the_checkpoint_that_tells_answers_apart_best(place: Path) -> None:
    run = submit(
        place,
        "plain",
        "trainer.max_steps=2",
        "trainer.eval_interval=2",
        "trainer.ckpt_interval=1",
        "trainer.ckpt_keep_best=eval/all/rewards/accuracies",
        "trainer.ckpt_keep_best_mode=max",
        "trainer.hf_save_interval=2",
        "trainer.dpo.loss_type=['sigmoid']",
        "trainer.policy.optimizer_config.num_warmup_steps=0",
        config=DPO_TINY,
    )
    assert finish(run, 1) == "done", logs_of(run)
    assert rows_of(run) == in_order(run, 2 * BATCH, PAIRS)
    assert not run.weights.exists(), "nobody loads them"
    for name in ("policy/final_loss", "eval/all/loss"):
        values = curve(run, name)
        assert values[min(values)] == pytest.approx(log(2), abs=1e-5), "the policy is still the reference"
        assert values[2] < log(2), name
    assert curve(run, "data/trained_tokens") == dict.fromkeys((1, 2), BATCH * 2 * TOKENS)
    for name in ("rewards/margins", "eval/dpo_validation/rewards/margins"):
        chosen, rejected = (curve(run, name.replace("margins", answer)) for answer in ("chosen", "rejected"))
        margins = {step: chosen[step] - rejected[step] for step in chosen}
        assert curve(run, name) == pytest.approx(margins, abs=1e-5)
        assert margins[2] > 0.1
    accuracies = curve(run, "eval/all/rewards/accuracies")
    assert accuracies[2] > 0.8
    listed = hpcrl("checkpoint", "ls", "plain", cwd=place).stdout
    assert f"best eval/all/rewards/accuracies: {accuracies[2]:.4g}" in listed
    assert hpcrl("verify", "plain", cwd=place).returncode == 0
    samples = json.loads(hpcrl("samples", "plain", "--step", "2", "-n", "2", "--json", cwd=place).stdout)
    assert [(sample["row"], sample["answer"]) for sample in samples] == [
        (rows_of(run)[BATCH], "chosen"),
        (rows_of(run)[BATCH], "rejected"),
    ]
    assert [part["trained"] for sample in samples for part in sample["parts"]] == [0, TOKENS] * 2


def whole_and_killed(place: Path, settings: list[str], *changed: str) -> tuple[Run, Run]:
    """Return a run that nothing happened to, and one whose trainer was killed, resumed with what was changed."""
    whole = submit(place, "whole", *settings, config=DPO_TINY)
    assert finish(whole, 1) == "done", logs_of(whole)
    run = submit(place, "killed", *settings, config=DPO_TINY)
    wait_for(lambda: 4 in committed(run.checkpoints, step_of), lambda: logs_of(run), 120)
    kill(pid_of(run, "train"))
    assert finish(run, 1) == "failed"
    assert 0 < max(committed(run.checkpoints, step_of)) < 9
    resumed = hpcrl("resume", "killed", *changed, cwd=place)
    assert resumed.returncode == 0, resumed.stderr
    assert finish(run, 2) == "done", logs_of(run)
    return whole, run


@pytest.mark.faults_slow
@pytest.mark.parametrize("follows", [False, True], ids=["base", "follows"])
def test_killed_inside_an_epoch_and_resumed_on_two_ranks_it_trains_the_same_pairs(place: Path, follows: bool) -> None:
    """Also where the reference is the policy of the epoch's beginning, which checkpoints hold."""
    settings = ["trainer.ckpt_interval=2", "trainer.eval_interval=3", "trainer.policy.optimizer_config.lr=1e-4"]
    settings.append(f"trainer.update_ref_every_epoch={str(follows).lower()}")
    whole, run = whole_and_killed(place, settings, "trainer.placement.policy_num_gpus_per_node=2")
    assert rows_of(run) == rows_of(whole) == in_order(whole, 9 * BATCH, PAIRS)
    for epoch in range(3):
        rows = in_order(run, 9 * BATCH, PAIRS)[epoch * 3 * BATCH : (epoch + 1) * 3 * BATCH]
        assert len(set(rows)) == len(rows), "each pair once"
    for name in ("policy/final_loss", "eval/all/loss", "rewards/margins"):
        assert curve(run, name) == pytest.approx(curve(whole, name), rel=1e-4, abs=1e-6), name
    first = curve(whole, "rewards/margins")[4]
    assert (abs(first) < 1e-4) == follows, "after an epoch the policy is the reference, or not"
