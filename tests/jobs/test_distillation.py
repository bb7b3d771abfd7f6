"""Scorers in whole runs: the reference on a node of its own changes nothing, a teacher is learned from, and scorers may die."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from hpcrl.data.batch_file import read_batch
from hpcrl.rundir.commit import committed
from hpcrl.rundir.layout import Run, step_of
from hpcrl.runtime.process_status import read_process_status
from tests.jobs.small_run import (
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
from tests.other_tokens import write_other_tokens
from tests.paths import CONFIGS, QUICKSTART
from tests.processes import command_of, processes_of, variable

DISTILLED = CONFIGS / "distillation_tiny.toml"
CURVES = ("policy/final_loss", "policy/policy_kl", "policy/grad_norm", "reward/avg_raw_reward")


def submit(place: Path, name: str, *settings: str, config: Path = QUICKSTART) -> Run:
    done = hpcrl("submit", str(config), "--local", *settings, f"trainer.run_name={name}", cwd=place)
    assert done.returncode == 0, done.stderr
    (path,) = place.glob(f"runs/*/{name}")
    return Run.open(path)


@pytest.mark.faults_slow
def test_a_reference_on_a_node_of_its_own_changes_nothing(place: Path) -> None:
    beside = submit(place, "beside", *SMALL)
    assert finish(beside, 1) == "done", logs_of(beside)
    apart = submit(place, "apart", *SMALL, "trainer.placement.colocate_policy_ref=false")
    assert finish(apart, 1) == "done", logs_of(apart)
    assert trained_groups(apart) == trained_groups(beside)
    for name in CURVES:
        assert curve(apart, name) == pytest.approx(curve(beside, name), rel=1e-4, abs=1e-6), name
    scorer = read_process_status(apart, "scorer-0", 1)
    assert scorer
    assert scorer.state == "finished"
    assert roles_of_steps(apart, 4) == {"controller", "rank-0", "rollout-0", "scorer-0"}
    verified = hpcrl("verify", "apart", cwd=place)
    assert verified.returncode == 0, verified.stdout
    file = read_batch(apart.batch(4))
    assert file is not None
    (name, digest), *_ = file.batch.groups[0].scores.items()
    path = apart.scores_of(name) / f"{file.batch.groups[0].group_id}-{digest}.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    refused = hpcrl("verify", "apart", cwd=place)
    assert refused.returncode == 4
    assert path.name in refused.stdout


@pytest.mark.faults_slow
def test_scorers_are_killed_and_the_run_goes_on(place: Path) -> None:
    """Two copies of two ranks each; one is killed, then the trainer: every group is trained once, and the curve is the same."""
    settings = [
        *SMALL,
        "trainer.max_steps=8",
        "trainer.distillation.placement.num_replicas=2",
        "trainer.distillation.placement.fsdp_size=2",
    ]
    whole = submit(place, "whole", *settings, config=DISTILLED)
    assert finish(whole, 1) == "done", logs_of(whole)
    run = submit(place, "killed", *settings, config=DISTILLED)
    wait_for(lambda: 2 in committed(run.checkpoints, step_of), lambda: logs_of(run), 120)
    kill(pid_of(run, "scorer"))
    wait_for(lambda: 4 in committed(run.checkpoints, step_of), lambda: logs_of(run), 120)
    kill(pid_of(run, "train"))
    assert finish(run, 1) == "failed"
    resumed = hpcrl("resume", "killed", cwd=place)
    assert resumed.returncode == 0, resumed.stderr
    assert finish(run, 2) == "done", logs_of(run)
    assert trained_groups(run) == trained_groups(whole)
    for name in ("policy/final_loss", "distillation/reverse_kl"):
        assert curve(run, name) == pytest.approx(curve(whole, name), rel=1e-3, abs=1e-4), name
    told = hpcrl("logs", "killed", "--role", "agent", "--attempt", "1", cwd=place).stdout
    assert "to be started again (1)" in told


def saved(run: Run, step: int) -> bool:
    return step in committed(run.checkpoints, step_of)


def rank_of(run: Run, rank: str) -> int:
    return next(pid for pid in parts_of(run) if variable(pid, "RANK") == rank)


def parts_of(run: Run) -> list[int]:
    """Return the ranks of scorers."""
    words = [(pid, command_of(pid).split()) for pid in processes_of(run)]
    return [
        pid for pid, said in words if f"{run.path}/code/jobs/scorer.py" in said and "torch.distributed.run" not in said
    ]


@pytest.mark.faults_slow
@pytest.mark.parametrize("backend", ["fsdp2", "megatron"])
def test_a_copy_of_a_teacher_on_two_nodes_teaches_the_same(backend: str, place: Path) -> None:
    """Two agents, each with a torchrun and a rank. Whichever rank is killed, both are started again, together."""
    own = "trainer.distillation"
    settings = [
        *(*SMALL, "trainer.max_steps=8", "trainer.eval_interval=0", "trainer.algorithm.use_kl_loss=false"),
        *(f"{own}.enable=true", f"{own}.model_path={CONFIGS / 'quickstart' / 'teacher'}", f"{own}.top_k=4"),
        f"{own}.fsdp_config.mixed_precision.param_dtype=fp32",
    ]
    size = {"fsdp2": f"{own}.placement.fsdp_size=2", "megatron": f"{own}.placement.tensor_parallel_size=2"}[backend]
    over = [f"{own}.backend={backend}", size, f"{own}.placement.nodes_per_replica=2"]
    alone = submit(place, f"alone-{backend}", *settings)
    assert finish(alone, 1) == "done", logs_of(alone)
    run = submit(place, f"over-{backend}", *settings, *over)
    for victim, step in (("1", 2), ("0", 4)):
        wait_for(partial(saved, run, step), lambda: logs_of(run), 200)
        wait_for(lambda: len(parts_of(run)) == 2, lambda: logs_of(run), 120)
        assert "with scorer-0" in hpcrl("status", run.name, cwd=place).stdout
        kill(rank_of(run, victim))
    assert finish(run, 1, 400) == "done", logs_of(run)
    assert trained_groups(run) == trained_groups(alone)
    for name in ("policy/final_loss", "distillation/reverse_kl", "distillation/divergence"):
        expected = curve(alone, name)
        assert sorted(expected) == list(range(1, 9))
        assert curve(run, name) == pytest.approx(expected, rel=1e-3, abs=1e-4), name
    told = hpcrl("logs", run.name, "--role", "agent", cwd=place).stdout
    assert told.count("starting scorer-0-part-1") >= 3
    assert curve(run, "scorers/total") == dict.fromkeys(range(1, 9), 1)


@pytest.mark.slow
def test_a_teacher_in_an_engine_teaches_the_same(place: Path) -> None:
    """With several tokens too; the engine is killed on the way, and comes back with its scorer."""
    own = "trainer.distillation"
    settings = [
        *(
            *SMALL,
            "trainer.max_steps=10",
            "trainer.algorithm.use_kl_loss=false",
            "trainer.eval_interval=0",
            f"{own}.top_k=4",
        ),
        *(f"{own}.enable=true", f"{own}.model_path={CONFIGS / 'quickstart' / 'teacher'}"),
    ]
    ways = {
        "ranks": [f"{own}.fsdp_config.mixed_precision.param_dtype=fp32"],
        "engine": [f"{own}.backend=vllm", f"{own}.engine.model_dtype=float32"],
    }
    runs = {name: submit(place, name, *settings, *more) for name, more in ways.items()}
    wait_for(lambda: 2 in committed(runs["engine"].checkpoints, step_of), lambda: logs_of(runs["engine"]), 300)
    kill(next(pid for pid in processes_of(runs["engine"]) if "hpcrl.engines.vllm.main" in str(command_of(pid))))
    for name, run in runs.items():
        assert finish(run, 1, 400) == "done", f"{name}: {logs_of(run)}"
    assert trained_groups(runs["engine"]) == trained_groups(runs["ranks"])
    for name in ("policy/final_loss", "policy/grad_norm", "distillation/reverse_kl", "distillation/divergence"):
        expected = curve(runs["ranks"], name)
        assert sorted(expected) == list(range(1, 11))
        assert curve(runs["engine"], name) == pytest.approx(expected, rel=1e-2, abs=1e-4), name


@pytest.mark.slow
def test_a_teacher_with_other_tokens_in_an_engine_teaches_the_same(place: Path) -> None:
    own, teacher = "trainer.distillation", place / "other_tokens"
    write_other_tokens(teacher)
    settings = [
        *(*SMALL, "trainer.algorithm.use_kl_loss=false", "trainer.eval_interval=0"),
        *(f"{own}.enable=true", f"{own}.model_path={teacher}", f"{own}.cross_tokenizer=true"),
    ]
    ways = {
        "ranks": [f"{own}.fsdp_config.mixed_precision.param_dtype=fp32"],
        "engine": [f"{own}.backend=vllm", f"{own}.engine.model_dtype=float32"],
    }
    runs = {name: submit(place, f"other-{name}", *settings, *more) for name, more in ways.items()}
    for name, run in runs.items():
        assert finish(run, 1, 900) == "done", f"{name}: {logs_of(run)}"
    assert trained_groups(runs["engine"]) == trained_groups(runs["ranks"])
    for name in ("policy/final_loss", "policy/grad_norm", "distillation/reverse_kl"):
        expected = curve(runs["ranks"], name)
        assert sorted(expected) == [1, 2, 3, 4]
        assert curve(runs["engine"], name) == pytest.approx(expected, rel=1e-2, abs=1e-4), name


@pytest.mark.slow
def test_a_teacher_on_megatron_teaches_the_same(place: Path) -> None:
    """Two copies, each on two ranks that share its matrices."""
    own = "trainer.distillation"
    settings = [
        *(*SMALL, "trainer.algorithm.use_kl_loss=false", f"{own}.enable=true"),
        *(f"{own}.model_path={CONFIGS / 'quickstart' / 'teacher'}", f"{own}.placement.num_replicas=2"),
        f"{own}.fsdp_config.mixed_precision.param_dtype=fp32",
    ]
    ways = {"fsdp2": [], "megatron": [f"{own}.backend=megatron", f"{own}.placement.tensor_parallel_size=2"]}
    runs = {name: submit(place, name, *settings, *more) for name, more in ways.items()}
    for name, run in runs.items():
        assert finish(run, 1, 400) == "done", f"{name}: {logs_of(run)}"
    assert trained_groups(runs["megatron"]) == trained_groups(runs["fsdp2"])
    for name in ("policy/final_loss", "policy/grad_norm", "distillation/reverse_kl"):
        expected = curve(runs["fsdp2"], name)
        assert sorted(expected) == [1, 2, 3, 4]
        assert curve(runs["megatron"], name) == pytest.approx(expected, rel=1e-2, abs=1e-4), name
