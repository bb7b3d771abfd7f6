"""Supervised fine-tuning as a user starts it: rows in the order of their seed, each once, whatever ends an attempt."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hpcrl.config import Config
from hpcrl.controller.prompt_stream import PromptStream
from hpcrl.data.batch_file import batch_steps, read_batch
from hpcrl.rundir.commit import committed, read_json
from hpcrl.rundir.layout import Run, step_of, version_of
from hpcrl.rundir.ledger import read_attempts
from tests.jobs.small_run import curve, finish, hpcrl, kill, logs_of, pid_of, wait_for
from tests.paths import CONFIGS

SFT_TINY = CONFIGS / "sft_tiny.toml"
SCORED = [
    f"data.val_prompts=['{CONFIGS / 'quickstart' / 'data' / 'validation.parquet'}']",
    "environment.env_class=sort_letters",
    "generator.inference_engine.backend=transformers",
    "generator.sampling_params.max_generate_length=8",
    "trainer.max_prompt_length=16",
]
FREE = [
    "trainer.policy.optimizer_config.name=ScheduleFreeAdamW",
    "trainer.policy.optimizer_config.scheduler=constant_with_warmup",
]
MEGATRON = [
    "trainer.strategy=megatron",
    "trainer.policy.fsdp_config=default",
    "trainer.policy.megatron_config={dtype='fp32', tensor_model_parallel_size=2}",
]
ROWS, BATCH = 8192, 2048  # four steps are an epoch
SMALL = 256


def submit(place: Path, name: str, *settings: str, config: Path = SFT_TINY, batch: int = BATCH) -> Run:
    sizes = [
        f"trainer.train_batch_size={batch}",
        f"trainer.policy_mini_batch_size={batch}",
        "trainer.max_tokens_per_micro_batch=8192",
    ]
    done = hpcrl("submit", str(config), "--local", f"trainer.run_name={name}", *sizes, *settings, cwd=place)
    assert done.returncode == 0, done.stderr
    return Run.open(place / "runs" / config.stem.removesuffix("_tiny") / name)


def rows_of(run: Run) -> list[int | None]:
    """Return the rows of all batches, in their order."""
    files = [read_batch(run.batch(step)) for step in batch_steps(run)]
    return [group.row for file in files if file for group in file.batch.groups]


def in_order(run: Run, count: int, rows: int = ROWS) -> list[int]:
    trainer = Config.from_toml([run.config]).trainer
    stream = PromptStream(rows, trainer.train_batch_size, trainer.seed, trainer.seed)
    return [stream.row(index) for index in range(count)]


@pytest.mark.faults_slow
def test_a_run_has_no_engines_evaluates_its_validation_sets_and_keeps_the_best_checkpoint(place: Path) -> None:
    run = submit(
        place,
        "plain",
        "trainer.max_steps=3",
        "trainer.eval_interval=2",
        "trainer.ckpt_interval=1",
        "trainer.hf_save_interval=3",
        batch=SMALL,
    )
    assert finish(run, 1) == "done", logs_of(run)
    assert rows_of(run) == in_order(run, 3 * SMALL)
    assert {path.stem for path in run.logs(1).glob("*.log")} == {"agent-0", "alerts", "controller", "trainer-0"}
    assert not run.weights.exists(), "nobody loads them"
    losses = curve(run, "eval/sft_validation/loss")
    assert sorted(losses) == [0, 2, 3]
    assert losses == curve(run, "eval/all/loss")
    assert losses[3] < losses[0]
    assert read_json(run.eval_losses(2)) == {"eval/sft_validation/loss": losses[2], "eval/all/loss": losses[2]}
    assert curve(run, "data/trained_tokens") == dict.fromkeys((1, 2, 3), SMALL * 6)
    assert (run.export(3) / "config.json").is_file()
    listed = hpcrl("checkpoint", "ls", "plain", cwd=place).stdout
    assert f"best eval/all/loss: {min(losses.values()):.4g}" in listed
    assert f"loss {losses[0]:.3f} → {losses[3]:.3f}" in hpcrl("status", "plain", cwd=place).stdout
    assert hpcrl("verify", "plain", cwd=place).returncode == 0
    shown = hpcrl("samples", "plain", "--step", "2", "-n", "1", "--json", cwd=place)
    (sample,) = json.loads(shown.stdout)
    assert [part["by"] for part in sample["parts"]] == ["context", "trained"]
    assert (sample["row"], sample["parts"][1]["trained"]) == (rows_of(run)[SMALL], 6)


@pytest.mark.faults_slow
def test_fewer_rows_than_a_batch_fill_it_with_those_of_the_next_epochs(place: Path) -> None:
    few = place / "few.jsonl"
    few.write_text("".join(json.dumps({"prompt": "sort: ba", "response": "ab"}) + "\n" for _ in range(125)))
    own = [f"data.train_data=[{few}]", f"data.val_data=[{few}]", "data.format=prompt_response"]
    settings = [*own, "data.drop_last=false", "trainer.epochs=5", "trainer.ckpt_interval=1"]
    run = submit(place, "few", *settings, batch=SMALL)
    assert finish(run, 1) == "done", logs_of(run)
    rows, seed = rows_of(run), Config.from_toml([run.config]).trainer.seed
    stream = PromptStream(125, SMALL, seed, seed, drop_last=False)
    assert rows == [stream.row(index) for index in range(2 * SMALL)]
    assert set(rows[:125]) == set(range(125)), "each once before one comes again"


@pytest.mark.faults_slow
def test_what_is_learned_is_evaluated_by_generating(place: Path) -> None:
    """Engines get the weights that are evaluated, and no others."""
    run = submit(place, "scored", "trainer.epochs=2", "trainer.eval_interval=4", *SCORED)
    assert finish(run, 1) == "done", logs_of(run)
    scores = curve(run, "eval/all/avg_score")
    assert sorted(scores) == sorted(curve(run, "eval/all/loss")) == [0, 4, 8]
    assert scores[0] < 0.5 < scores[8]
    assert committed(run.weights, version_of) == [4, 8]
    assert rows_of(run) == in_order(run, 8 * BATCH)


@pytest.mark.faults_slow
@pytest.mark.parametrize(
    ("own", "backend"), [([], []), ([], MEGATRON), (FREE, [])], ids=["fsdp2", "megatron", "schedule_free"]
)
def test_killed_inside_an_epoch_and_resumed_on_two_ranks_it_trains_the_same_rows(
    place: Path, own: list[str], backend: list[str]
) -> None:
    """With schedule-free AdamW the loss of validation sets is that of other weights than those in training."""
    settings = [
        *own,
        "trainer.epochs=3",
        "trainer.ckpt_interval=2",
        "trainer.eval_interval=3",
        "trainer.policy.optimizer_config.lr=1e-4",
    ]
    whole = submit(place, "whole", *settings)
    assert finish(whole, 1) == "done", logs_of(whole)
    run = submit(place, "killed", *settings)
    wait_for(lambda: 2 in committed(run.checkpoints, step_of), lambda: logs_of(run), 120)
    kill(pid_of(run, "train"))
    assert finish(run, 1) == "failed"
    before = max(committed(run.checkpoints, step_of))
    resumed = hpcrl("resume", "killed", "trainer.placement.policy_num_nodes=1-2", *backend, cwd=place)
    assert resumed.returncode == 0, resumed.stderr
    assert finish(run, 2) == "done", logs_of(run)
    assert read_attempts(run)[1].sizes == {"trainer.placement.policy_num_nodes": 2}, (
        "on this machine the largest layout"
    )
    assert 0 < before < 12
    assert rows_of(run) == rows_of(whole) == in_order(whole, 12 * BATCH)
    for epoch in range(3):
        assert sorted(in_order(run, 12 * BATCH)[epoch * ROWS : (epoch + 1) * ROWS]) == list(range(ROWS))
    for name in ("policy/final_loss", "eval/all/loss"):
        assert curve(run, name) == pytest.approx(curve(whole, name), rel=1e-4), name


@pytest.mark.slow
@pytest.mark.parametrize("backend", [[], MEGATRON])
def test_what_a_teacher_said_before_teaches_as_the_teacher_itself(backend: list[str], place: Path) -> None:
    """Written by two ranks with `hpcrl score`; the run that reads it loads no teacher, and may be killed."""
    own = "trainer.distillation"
    model = CONFIGS / "quickstart" / "teacher"
    settings = [
        *(f"{own}.enable=true", f"{own}.model_path={model}", f"{own}.top_k=4", f"{own}.loss_weight=0.5"),
        *("trainer.max_steps=4", "trainer.ckpt_interval=1", "trainer.eval_interval=4", *backend),
    ]
    if backend:
        settings += [
            "trainer.placement.policy_num_gpus_per_node=2",
            "trainer.ref.megatron_config={dtype='fp32', tensor_model_parallel_size=2}",
        ]
    done = hpcrl("score", str(SFT_TINY), *settings, "--ranks", "2", "-o", "written", cwd=place)
    assert done.returncode == 0, done.stderr
    live, read = submit(place, "live", *settings), f"{own}.precomputed_logprobs={place / 'written'}"
    assert finish(live, 1) == "done", logs_of(live)
    run = submit(place, "files", *settings, read)
    wait_for(lambda: 2 in committed(run.checkpoints, step_of), lambda: logs_of(run), 120)
    kill(pid_of(run, "train"))
    assert finish(run, 1) == "failed"
    assert hpcrl("resume", "files", cwd=place).returncode == 0
    assert finish(run, 2) == "done", logs_of(run)
    for name in ("policy/final_loss", "distillation/divergence", "policy/grad_norm", "eval/all/loss"):
        expected = curve(live, name)
        assert expected
        assert curve(run, name) == pytest.approx(expected, rel=1e-5), name
