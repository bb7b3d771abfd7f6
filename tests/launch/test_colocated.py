"""Trainer and engine on the same devices take turns: a run is what it is with nodes of their own, and a worker that dies waits for its turn."""

from __future__ import annotations

import importlib
from pathlib import Path

import numpy as np
import pytest

from hpcrl.data.batch_file import batch_steps, read_batch
from hpcrl.data.group_file import read_group
from hpcrl.observe.timeline import Span, read_spans
from hpcrl.rundir.layout import Run
from hpcrl.runtime.process_status import read_process_status
from hpcrl.types import Row
from tests.jobs.conftest import place as of_jobs
from tests.jobs.small_run import SMALL, curve, finish, hpcrl, kill, logs_of, pid_of, trained_groups, wait_for
from tests.jobs.test_distillation import submit
from tests.paths import ROOT

place = of_jobs

pytestmark = pytest.mark.slow

COLOCATED = "trainer.placement.colocate_all=true"
KEPT = [*SMALL, "trainer.ckpt_interval=4"]  # samples are kept, too
CURVES = ("policy/final_loss", "policy/policy_kl", "policy/grad_norm", "reward/avg_raw_reward", "eval/all/avg_score")
VLLM = ["generator.inference_engine.backend=vllm"]
TWO_RANKS = ["trainer.placement.policy_num_gpus_per_node=2"]
MEGATRON = [
    *TWO_RANKS,
    "trainer.strategy=megatron",
    "trainer.policy.fsdp_config=default",
    "trainer.policy.megatron_config.dtype=fp32",
    "trainer.policy.megatron_config.tensor_model_parallel_size=2",
    "trainer.ref.megatron_config.dtype=fp32",
]
TWO_ENGINES = "generator.inference_engine.num_engines=2"
AT_WORK = {"generate", "evaluate", "update_weights"}
TRAINING = {"load_rows", "fwd_logprobs_values_reward", "policy_train", "sync_weights", "onload", "offload"}


def samples_of(run: Run) -> list[Row]:
    """Return all that was trained, in its order."""
    files = [read_batch(run.batch(step)) for step in batch_steps(run)]
    return [
        sample
        for file in files
        if file
        for group in file.batch.groups
        for sample in read_group(run.inside(group.path), None, group)
    ]


def overlap(one: Span, other: Span) -> float:
    """Return for how many seconds two spans are at the same time."""
    return min(one.end, other.end) - max(one.start, other.start)


def assert_in_turns(run: Run) -> None:
    """No engine works between the first and the last thing that the trainer does with a batch."""
    spans = read_spans(run)
    training = [span for span in spans if span.process.startswith("rank-") and span.phase in TRAINING and span.step]
    working = [span for span in spans if span.process.startswith("rollout-") and span.phase in AT_WORK]
    assert {span.phase for span in working} == AT_WORK
    together = [(one, other) for one in training for other in working if overlap(one, other) > 0.05]
    # what follows the last offload of a step is told under the same name: that the version is there
    assert not [pair for pair in together if pair[0].phase != "sync_weights"]
    assert any(span.phase == "asleep" for span in spans)


@pytest.mark.parametrize(
    "settings",
    [[], VLLM, [*TWO_RANKS, TWO_ENGINES], [*MEGATRON, TWO_ENGINES]],
    ids=["embedded", "vllm", "two-of-both", "megatron"],
)
def test_it_is_the_run_with_nodes_apart(place: Path, settings: list[str]) -> None:
    together = submit(place, "together", *KEPT, *settings, COLOCATED)
    assert finish(together, 1) == "done", logs_of(together)
    apart = submit(place, "apart", *KEPT, *settings)
    assert finish(apart, 1) == "done", logs_of(apart)
    assert trained_groups(together) == trained_groups(apart)
    for one, other in zip(samples_of(together), samples_of(apart), strict=True):
        assert np.array_equal(one.token_ids, other.token_ids)
        assert np.array_equal(one.versions, other.versions)
    for name in CURVES:
        assert curve(together, name) == pytest.approx(curve(apart, name), rel=1e-4, abs=1e-6), name
    assert_in_turns(together)
    assert not (together.status_file("agent-1")).exists(), "one node"


@pytest.mark.parametrize("backend", ["transformers", "vllm"])
def test_unfinished_samples_go_on_in_the_next_turn(place: Path, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their tokens have the versions that chose them, and all are trained within the staleness bound, each group once."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    lengths = importlib.import_module("turns").uneven(place)
    settings = [
        f"generator.inference_engine.backend={backend}",
        "trainer.fully_async.max_staleness_steps=1",
        "trainer.ckpt_interval=6",
    ]
    run = submit(place, "asynchronous", *KEPT, COLOCATED, "trainer.max_steps=6", *lengths, *settings)
    assert finish(run, 1, 600) == "done", logs_of(run)
    assert_in_turns(run)
    groups = [group for step in trained_groups(run) for group in step]
    assert len(groups) == len(set(groups)) == 6 * 8
    assert max(curve(run, "async/staleness_max").values()) == 1
    mixed = [sample for sample in samples_of(run) if len({*sample.versions[sample.versions >= 0].tolist()}) > 1]
    assert mixed, "no sample was interrupted"
    verified = hpcrl("verify", "asynchronous", cwd=place)
    assert verified.returncode == 0, verified.stdout


@pytest.mark.parametrize("settings", [TWO_RANKS, MEGATRON, VLLM], ids=["two-ranks", "megatron", "vllm"])
def test_engines_generate_on_the_gpus_of_a_trainer_that_waits(
    place: Path, settings: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One engine of its own has room for one group at a time, and environments are slow: all others get leases. Each group trains once."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    steps, lengths = 12, importlib.import_module("turns").uneven(place)
    intervals = [f"trainer.{name}={steps}" for name in ("max_steps", "ckpt_interval")]
    none = ["trainer.eval_before_train=false", "trainer.eval_interval=0"]
    room = "generator.inference_engine.max_num_seqs=4"
    run = submit(place, "lending", *KEPT, *lengths, *intervals, *none, room, "trainer.placement.lend=true", *settings)
    assert finish(run, 1, 900) == "done", logs_of(run)
    files = [read_batch(run.batch(step)) for step in batch_steps(run)]
    groups = [group for file in files if file for group in file.batch.groups]
    assert len(groups) == len({group.group_id for group in groups}) == steps * 8
    assert {group.replica for group in groups} == {0, *([1, 2] if TWO_RANKS[0] in settings else [1])}
    assert max(curve(run, "replicas/leases").values()) > 0
    verified = hpcrl("verify", "lending", cwd=place)
    assert verified.returncode == 0, verified.stdout


def test_a_worker_that_is_killed_while_the_trainer_trains_waits_for_its_turn(place: Path) -> None:
    """So does the one in its place, which has yet to load its model; nothing is lost, and what is trained is the same."""
    longer = [*SMALL, COLOCATED, "trainer.max_steps=6", "trainer.update_epochs_per_batch=150"]
    whole = submit(place, "whole", *longer)
    assert finish(whole, 1) == "done", logs_of(whole)
    run = submit(place, "killed", *longer)

    def state(process: str) -> str:
        status = read_process_status(run, process, 1)
        return status.state if status else ""

    wait_for(lambda: state("trainer").startswith("step 2/"), lambda: logs_of(run), 120)
    assert state("rollout-0") == "asleep"
    kill(pid_of(run, "rollout"))
    wait_for(lambda: state("rollout-0") == "waiting for the GPU lease", lambda: logs_of(run), 60)
    assert finish(run, 1) == "done", logs_of(run)
    assert trained_groups(run) == trained_groups(whole)
    for name in CURVES:
        assert curve(run, name) == pytest.approx(curve(whole, name), rel=1e-4, abs=1e-6), name
    told = hpcrl("logs", "killed", "--role", "agent", "--attempt", "1", cwd=place).stdout
    assert "to be started again (1)" in told
