"""The comparison with TRL (benchmarks/peers), as far as it can be checked without TRL."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import tomli
from packaging.requirements import Requirement

from benchmarks.peers.report import Record, largest_difference, table
from benchmarks.peers.run import LOCK
from benchmarks.peers.settings import grpo_settings
from benchmarks.peers.trainer import GROUPS, SAMPLES, draw_batches, packed
from benchmarks.peers.work import Work
from benchmarks.process_tree import measured
from hpcrl.config import Config
from tests.paths import QUICKSTART, ROOT

WRITTEN = tomli.loads(QUICKSTART.read_text())
TRAINER, SAMPLING = WRITTEN["trainer"], WRITTEN["generator"]["sampling_params"]
N_SAMPLES = WRITTEN["generator"]["n_samples_per_prompt"]


def settings(*overrides: str, engine: str = "transformers") -> dict[str, Any]:
    config = Config.from_toml(QUICKSTART, overrides)
    return grpo_settings(config, engine, config.trainer.max_steps or 0, Path("out"))


def test_trl_trains_the_batches_of_the_quickstart() -> None:
    found = settings()
    micro = found["per_device_train_batch_size"]
    assert micro * found["steps_per_generation"] == TRAINER["train_batch_size"] * N_SAMPLES == 512
    assert micro * found["gradient_accumulation_steps"] == TRAINER["policy_mini_batch_size"] * N_SAMPLES == 256
    assert found["num_generations"] == N_SAMPLES
    assert found["max_steps"] == 2 * TRAINER["max_steps"]
    assert found["logging_steps"] == 2
    assert found["save_steps"] == 2 * TRAINER["ckpt_interval"]
    assert found["max_completion_length"] == SAMPLING["max_generate_length"]
    assert found["vllm_max_model_length"] == TRAINER["max_prompt_length"] + SAMPLING["max_generate_length"]
    assert not found["shuffle_dataset"]  # work.py gives the prompts in hpcrl's order


def test_trl_has_the_loss_and_the_optimizer_of_the_quickstart() -> None:
    found = settings()
    optimizer = TRAINER["policy"]["optimizer_config"]
    assert (found["learning_rate"], found["warmup_steps"]) == (optimizer["lr"], optimizer["num_warmup_steps"])
    assert found["lr_scheduler_type"] == "constant_with_warmup"
    assert (found["adam_beta1"], found["adam_beta2"], found["max_grad_norm"]) == (0.9, 0.999, 1.0)
    assert found["beta"] == TRAINER["algorithm"]["kl_loss_coef"]
    assert (found["epsilon"], found["epsilon_high"], found["temperature"]) == (0.2, 0.2, 1.0)
    assert (found["top_k"], found["top_p"], found["min_p"]) == (0, 1.0, None)
    assert not found["bf16"]
    assert not found["vllm_importance_sampling_correction"]
    assert not found["use_vllm"]
    assert settings(engine="vllm")["use_vllm"]


def test_settings_follow_the_configuration() -> None:
    found = settings(
        "trainer.policy_mini_batch_size=16",
        "trainer.policy.optimizer_config.lr=1e-5",
        "trainer.algorithm.eps_clip_high=0.28",
        "trainer.algorithm.use_kl_loss=false",
        "generator.sampling_params.max_generate_length=20",
    )
    assert found["gradient_accumulation_steps"] * found["per_device_train_batch_size"] == 16 * N_SAMPLES
    assert found["max_steps"] == 4 * TRAINER["max_steps"]
    assert (found["learning_rate"], found["epsilon_high"], found["beta"]) == (1e-5, 0.28, 0.0)
    assert found["max_completion_length"] == 20


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("trainer.algorithm.policy_loss_type=gpg", "policy_loss_type"),
        ("trainer.algorithm.loss_reduction=sequence_mean", "loss_reduction"),
        ("trainer.algorithm.off_policy_correction.tis_ratio_type=token", "tis_ratio_type"),
        ("trainer.micro_train_batch_size_per_gpu=100", "divisor of a mini-batch's 256 samples, found 100"),
    ],
)
def test_what_has_no_counterpart_is_refused(override: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        settings(override)


def test_the_work_is_the_prompts_that_hpcrl_trains_and_its_reward() -> None:
    work = Work.of(Config.from_toml(QUICKSTART, ["trainer.max_steps=3"]))
    assert (work.steps, len(work.train), len(work.validation)) == (3, 3 * TRAINER["train_batch_size"], 256)
    uids = [prompt.uid for prompt in work.train]
    assert len(set(uids)) == len(uids)
    assert uids != sorted(uids, key=int)  # hpcrl shuffles
    prompt = work.validation[0]
    answer = prompt.extras["reward_spec"]["ground_truth"]
    assert (work.reward(prompt, answer), work.reward(prompt, answer[::-1] + "x")) == (1.0, 0.0)


def test_given_samples_are_packed_so_that_the_loss_is_the_mean_over_tokens() -> None:
    (batch,) = draw_batches(1, 16)
    assert draw_batches(1, 16) == [batch]
    assert len({len(one.answer) for one in batch}) > SAMPLES  # uneven
    mini = packed(batch)
    parts = list(mini.micro_batches())
    assert [len(part.lengths) for part in parts] == [SAMPLES] * GROUPS
    assert sum(part.weights.sum().item() for part in parts) == pytest.approx(1)
    tokens = sum(len(one.answer) for one in batch)
    assert sum(part.loss_mask.sum().item() for part in parts) == tokens
    expected = sum(one.advantage * len(one.answer) for one in batch) / tokens
    found = sum((part.weights * part.advantages).sum().item() for part in parts if part.advantages is not None)
    assert found == pytest.approx(expected, abs=1e-6)
    for group in range(GROUPS):
        assert fmean(one.advantage for one in batch[group * SAMPLES : (group + 1) * SAMPLES]) == pytest.approx(0)


def test_a_command_is_measured_with_its_children(tmp_path: Path) -> None:
    child = "held = bytearray(b'x') * (150 << 20); import time; end = time.process_time() + 0.7\nwhile time.process_time() < end: pass"
    parent = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}]); print('said'); sys.exit(3)"
    found = measured([sys.executable, "-c", parent], tmp_path / "log")
    assert (tmp_path / "log").read_text() == "said\n"
    assert found.returncode == 3
    assert 150 < found.peak_mib < 250
    assert 0.3 < found.cpu_s < found.wall_s + 1


def test_what_processes_share_counts_once_for_all_together(tmp_path: Path) -> None:
    parent = (
        "import os, time; held = bytearray(b'x') * (150 << 20); children = [os.fork() for _ in 'ab']; time.sleep(2.5)"
    )
    found = measured([sys.executable, "-c", parent], tmp_path / "log")
    assert 150 < found.together_mib < 250 < 450 < found.peak_mib


def record(tool: str, **figures: Any) -> Record:
    return Record("quickstart", tool, "command", "2026-11-23 02:31", "a673429", "AMD EPYC, 2 cores", 5.0, **figures)


RUNS = [
    record("hpcrl, vllm", wall_s=74.8, cpu_s=45.4, peak_mib=2949, together_mib=1474, step_s=[31.3, 3.0, 4.0, 5.0], tokens=[7680] * 4, scores=[0.367, 0.793]),
    record("TRL, vllm", wall_s=114.1, cpu_s=44.5, peak_mib=2217, together_mib=1108, step_s=[14.1, 11.0, 12.0, 13.0], tokens=[7680] * 4, scores=[0.367, 0.75]),
    record("hpcrl, transformers", error='expected "vllm", found "transformers"'),
    record("TRL, transformers", wall_s=20.3, cpu_s=14.9, peak_mib=543, together_mib=271, step_s=[2.1, 1.5, 1.6, 1.7], tokens=[7680] * 4, scores=[0.367, 0.742]),
    record("hpcrl, vllm", wall_s=70.8, cpu_s=41.4, peak_mib=2951, together_mib=1475, step_s=[29.3, 3.2, 4.4, 5.4], tokens=[7680] * 4, scores=[0.367, 0.801]),
]  # fmt: skip


def test_the_table_has_medians_failures_and_says_where_hpcrl_is_worse() -> None:
    rows = [[cell.strip() for cell in row.split("|")[1:-1]] for row in table(RUNS).splitlines()[2:]]
    assert rows[0] == [
        "hpcrl, vllm",
        "2",
        "72.8",
        "43.4",
        "30.30",
        "4.20",
        "1833",
        "2950",
        "1474",
        "score 0.367 → 0.797",
    ]
    assert rows[2][:3] == ["hpcrl, transformers", "0", "-"]
    assert "found" in rows[2][-1]
    slow, fast = rows[4:]
    assert (slow[0], fast[0]) == ("hpcrl, vllm / TRL, vllm", "hpcrl, vllm / TRL, transformers")
    assert (slow[5], slow[6], slow[7]) == ("0.35", "2.86", "1.33 (worse)")
    assert (fast[5], fast[6]) == ("2.62 (worse)", "0.38 (worse)")


def test_records_are_lines_of_json() -> None:
    assert Record(**json.loads(json.dumps(asdict(RUNS[0])))) == RUNS[0]


def test_losses_of_the_same_samples_are_compared() -> None:
    own = record("hpcrl", losses=[-0.02047943, 0.11686961], grad_norms=[1.1981807, 3.4108551])
    other = record("TRL", losses=[-0.02047944, 0.11686964], grad_norms=[1.1981806, 3.4108555])
    assert "3.0e-08" in largest_difference([own, other])
    assert largest_difference([own]) == ""
    assert largest_difference([own, record("TRL, packed"), other]).startswith("hpcrl and TRL: ")


def test_trl_lock_adds_to_the_lock_of_hpcrl() -> None:
    def names(path: Path) -> list[str]:
        lines = [line for line in path.read_text().splitlines() if line and not line.startswith("#")]
        assert all("==" in line for line in lines)
        return [Requirement(line).name for line in lines]

    assert "trl" in names(LOCK)
    assert not {*names(LOCK)} & {*names(ROOT / "requirements-cpu.lock")}
