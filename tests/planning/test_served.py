"""Memory of what only computes: the reward model that a run serves, teachers, and a reference on nodes of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from hpcrl.cli.plan import checked_plan, plan_lines
from hpcrl.config import Config
from hpcrl.config.load import nested
from hpcrl.config.validate import build
from hpcrl.errors import DataError
from hpcrl.launch.submit.models import folder_of
from hpcrl.planning.memory import Need
from hpcrl.planning.served import Served, forward_need, served, served_shapes
from tests.paths import CONFIGS
from tests.trainer.ranks import Ranks

MODEL, TEACHER = CONFIGS / "quickstart" / "model", CONFIGS / "quickstart" / "teacher"
BASE: dict[str, Any] = {
    "data.train_data": ["t"],
    "data.val_data": ["v"],
    "trainer.policy.model.path": str(MODEL),
    "trainer.algorithm.use_kl_loss": False,
}
SERVICE, OWN = "environment.remote_reward", "trainer.distillation"


def config(settings: dict[str, Any]) -> Config:
    return build(Config, nested({**BASE, **settings}))


def needs(config: Config, memory: float | None = None) -> list[tuple[Served, Need]]:
    return [
        (each, forward_need(config, each, served_shapes(config, each, folder_of), memory)) for each in served(config)
    ]


@pytest.fixture
def reward_model(tmp_path: Path) -> str:
    AutoModelForSequenceClassification.from_pretrained(MODEL, num_labels=1).save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(MODEL).save_pretrained(tmp_path)
    return str(tmp_path)


def test_a_reward_model_is_whole_in_each_service(reward_model: str) -> None:
    settings = {
        f"{SERVICE}.enable": True,
        f"{SERVICE}.service.model": reward_model,
        f"{SERVICE}.service.num_services": 2,
    }
    held = sum(each.nbytes for each in AutoModelForSequenceClassification.from_pretrained(reward_model).parameters())
    found = {
        dtype: needs(config({**settings, f"{SERVICE}.service.model_dtype": dtype})) for dtype in ("float32", "bfloat16")
    }
    ((one, need),), ((_, half),) = found["float32"], found["bfloat16"]
    assert (one.processes, one.ranks, one.tokens) == (2, 1, 16384)
    assert (need.weights, half.weights) == (held, held // 2)
    assert need.gradients == need.optimizer == need.logprobs == 0
    ((_, less),) = needs(
        config({**settings, f"{SERVICE}.service.max_batch_tokens": 4096, f"{SERVICE}.service.model_dtype": "float32"})
    )
    assert need.activations == 4 * less.activations > 0
    said = "\n".join(plan_lines(checked_plan(config({**settings, "slurm.mem_gb": 1}))))
    assert (
        f"reward model: Qwen2ForSequenceClassification of {reward_model}, 83,840 parameters, on 2 process(es)" in said
    )
    assert "without gradients" in said
    assert "memory of the device: 1,024.00 (slurm.mem_gb, shared by 1 rank(s))" in said


def test_what_is_no_reward_model_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "vit"}')
    wrong = config({f"{SERVICE}.enable": True, f"{SERVICE}.service.model": str(tmp_path)})
    with pytest.raises(DataError, match=f"{SERVICE}.service.model: .* is no sequence classifier"):
        needs(wrong)


def test_teachers_and_a_reference_of_their_own_are_counted_by_rank(two: Ranks, tmp_path: Path) -> None:
    fp32 = "fsdp_config.mixed_precision.param_dtype"
    settings = {
        f"{OWN}.enable": True,
        f"{OWN}.model_path": str(TEACHER),
        f"{OWN}.placement.fsdp_size": 2,
        f"{OWN}.placement.num_replicas": 3,
        f"{OWN}.{fp32}": "fp32",
        f"{OWN}.max_tokens_per_micro_batch": 4096,
        "trainer.algorithm.use_kl_loss": True,
        "trainer.placement.colocate_policy_ref": False,
        "trainer.placement.ref_num_gpus_per_node": 1,
        f"trainer.policy.{fp32}": "fp32",
    }
    (teacher, of_teacher), (reference, of_reference) = needs(config(settings))
    assert (teacher.what, teacher.processes, teacher.ranks) == ("teacher", 6, 2)
    assert (reference.what, reference.processes, reference.ranks) == ("reference", 1, 1)
    whole = sum(each.nbytes for each in AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).parameters())
    assert of_reference.weights == whole
    out = tmp_path / "held"
    two.play([("scoring.scenarios:held", {"config": nested({**BASE, **settings}), "out": str(out)})])
    assert of_teacher.weights == int(out.read_text())
    assert of_teacher.gathered > 0 == of_reference.gathered
    assert of_teacher.gradients == of_teacher.optimizer == 0
    assert of_teacher.logprobs > 0 < of_teacher.activations


def test_a_reward_model_that_is_a_scorer_has_no_logits(reward_model: str) -> None:
    section = "environment.reward_model"
    settings = {
        f"{section}.model": reward_model,
        f"{section}.num_replicas": 2,
        f"{section}.max_tokens_per_micro_batch": 512,
    }
    ((one, need),) = needs(config({**settings, f"{section}.fsdp_config.mixed_precision.param_dtype": "fp32"}))
    held = sum(each.nbytes for each in AutoModelForSequenceClassification.from_pretrained(reward_model).parameters())
    assert (one.what, one.processes, one.ranks) == ("reward model", 2, 1)
    assert need.weights == held
    assert need.logprobs == need.gathered == need.gradients == need.optimizer == 0
    assert need.activations > 0
    assert f"reward model: Qwen2ForSequenceClassification of {reward_model}" in "\n".join(
        plan_lines(checked_plan(config(settings)))
    )


def test_engines_and_ranks_of_megatron_share_a_teacher() -> None:
    """An engine computes the logits of all tokens of a pass together; Megatron-core's ranks have parts of layers, and of the vocabulary."""
    teacher = {f"{OWN}.enable": True, f"{OWN}.model_path": str(TEACHER)}
    whole = sum(each.nbytes for each in AutoModelForCausalLM.from_pretrained(TEACHER, dtype=torch.float32).parameters())
    engine = {f"{OWN}.backend": "vllm", f"{OWN}.engine.model_dtype": "float32", f"{OWN}.engine.tensor_parallel_size": 2}
    ((served_one, need),) = needs(config({**teacher, **engine, f"{OWN}.engine.max_num_batched_tokens": 6000}))
    assert (served_one.processes, served_one.ranks, served_one.tokens) == (2, 2, 6000)
    assert need.weights == pytest.approx(whole / 2, rel=0.01)
    ((_, more),) = needs(config({**teacher, **engine, f"{OWN}.engine.max_num_batched_tokens": 12000}))
    assert more.logprobs == 2 * need.logprobs > 0
    fp32 = {f"{OWN}.fsdp_config.mixed_precision.param_dtype": "fp32", f"{OWN}.backend": "megatron"}
    sizes = {f"{OWN}.placement.tensor_parallel_size": 2, f"{OWN}.placement.pipeline_parallel_size": 2}
    ((ranks, part),) = needs(config({**teacher, **fp32, **sizes}))
    assert (ranks.processes, ranks.ranks) == (4, 4)
    assert whole / 4 < part.weights < whole / 2, "the largest stage, with norms that are on all ranks"
    assert part.gradients == part.optimizer == 0
    with pytest.raises(DataError, match="3 stages cannot have equally many of the teacher's"):
        needs(config({**teacher, **fp32, f"{OWN}.placement.pipeline_parallel_size": 3}))
