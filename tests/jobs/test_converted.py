"""Cosmos-RL's files of supervised fine-tuning and distillation and SkyRL's commands with adapters and of fine-tuning: converted, they are valid, planned, and train, with a tiny model in the
place of theirs, and fewer ranks where theirs are hundreds."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from hpcrl.cli.main import main
from hpcrl.config import Config
from hpcrl.config.validate import UNCONVERTED
from hpcrl.rundir.layout import Run
from tests.jobs.small_run import curve, finish, hpcrl, logs_of
from tests.paths import CONFIGS, ROOT

COSMOS, DATA, MODEL = (
    ROOT / "tests" / "spec" / "cosmos" / "configs",
    CONFIGS / "quickstart" / "data",
    CONFIGS / "quickstart" / "model",
)
SKYRL = """
DATA_DIR="$HOME/data/gsm8k"
NUM_GPUS=4
uv run --isolated -m skyrl.train.entrypoints.main_base \\
  data.train_data="['$DATA_DIR/train.parquet']" data.val_data="['$DATA_DIR/validation.parquet']" \\
  trainer.placement.colocate_all=true trainer.placement.policy_num_gpus_per_node=$NUM_GPUS trainer.placement.ref_num_gpus_per_node=$NUM_GPUS \\
  trainer.epochs=20 trainer.eval_batch_size=1024 trainer.eval_before_train=false trainer.eval_interval=5 trainer.update_epochs_per_batch=1 \\
  trainer.train_batch_size=1024 trainer.policy_mini_batch_size=256 trainer.micro_forward_batch_size_per_gpu=64 trainer.micro_train_batch_size_per_gpu=64 \\
  trainer.ckpt_interval=10 trainer.max_prompt_length=512 generator.sampling_params.max_generate_length=1024 trainer.algorithm.use_kl_loss=true \\
  generator.inference_engine.backend=vllm generator.inference_engine.run_engines_locally=true generator.inference_engine.weight_sync_backend=nccl \\
  generator.inference_engine.async_engine=true generator.batched=true environment.env_class=gsm8k generator.n_samples_per_prompt=5 \\
  trainer.logger="wandb" trainer.project_name="gsm8k" trainer.run_name="converted" trainer.resume_mode=null trainer.ckpt_path="$HOME/ckpts/gsm8k" \\
"""
PPO = """  trainer.algorithm.advantage_estimator="gae" trainer.strategy=fsdp2 trainer.policy.model.path="Qwen/Qwen2.5-0.5B-Instruct" \\
  trainer.critic.model.path="Qwen/Qwen2.5-0.5B-Instruct" trainer.policy.model.lora.rank=32 trainer.policy.model.lora.alpha=32 \\
  trainer.critic.model.lora.rank=32 trainer.critic.model.lora.alpha=32 trainer.placement.critic_num_gpus_per_node=$NUM_GPUS \\
  trainer.critic_mini_batch_size=256 trainer.policy.optimizer_config.lr=3.0e-5 trainer.critic.optimizer_config.lr=3.0e-5 \\
  generator.inference_engine.num_engines=$NUM_GPUS generator.inference_engine.tensor_parallel_size=1 $@
"""
MEGATRON = """  trainer.algorithm.advantage_estimator="grpo" trainer.strategy=megatron trainer.policy.model.path=Qwen/Qwen3-30B-A3B \\
  trainer.policy.megatron_config.tensor_model_parallel_size=4 trainer.policy.megatron_config.expert_model_parallel_size=4 \\
  trainer.policy.megatron_config.expert_tensor_parallel_size=1 trainer.ref.megatron_config.tensor_model_parallel_size=4 \\
  trainer.ref.megatron_config.expert_model_parallel_size=4 trainer.ref.megatron_config.expert_tensor_parallel_size=1 \\
  trainer.policy.model.lora.rank=64 trainer.policy.model.lora.alpha=64 trainer.policy.model.lora.init_method=kaiming \\
  trainer.policy.megatron_config.transformer_config_kwargs.recompute_granularity=full \\
  trainer.policy.megatron_config.transformer_config_kwargs.recompute_method=uniform \\
  trainer.policy.megatron_config.transformer_config_kwargs.recompute_num_layers=1 \\
  trainer.algorithm.off_policy_correction.tis_ratio_type=token trainer.algorithm.off_policy_correction.token_tis_ratio_clip_high=2.0 \\
  generator.inference_engine.num_engines=1 generator.inference_engine.tensor_parallel_size=4 trainer.policy.optimizer_config.lr=1.0e-5 $@
"""
SFT = """
python -m skyrl.train.main_sft strategy=fsdp model.path=Qwen/Qwen2.5-0.5B-Instruct "train_datasets=[org/rows]" "train_dataset_splits=[train[:32]]" \\
  messages_key=conversation max_length=512 num_steps=2 batch_size=8 micro_train_batch_size_per_gpu=2 remove_microbatch_padding=true \\
  optimizer_config.lr=1e-6 placement.num_gpus_per_node=4 train_on_what=all_assistant_messages logger=wandb project_name=skyrl_sft \\
  ckpt_path="$HOME/ckpts" ckpt_interval=2 hf_save_interval=2 resume_from="" "$@"
"""
TWO_RANKS = ["trainer.placement.policy_num_nodes=1", "trainer.placement.policy_num_gpus_per_node=2"]
ROWS = [
    "trainer.train_batch_size=8", "trainer.policy_mini_batch_size=8", "trainer.ckpt_interval=2", "trainer.hf_save_interval=2", "slurm.gpus_per_node=0",
    "trainer.max_steps=2", "trainer.policy.megatron_config.dtype=fp32",
]  # fmt: skip
LETTERS = [
    f"data.train_data=['{DATA / 'train.parquet'}']", f"data.val_data=['{DATA / 'validation.parquet'}']", "environment.env_class=sort_letters",
    "trainer.train_batch_size=8", "trainer.policy_mini_batch_size=8", "trainer.max_steps=2", "slurm.gpus_per_node=0",
    "generator.sampling_params.max_generate_length=8", "trainer.max_prompt_length=16", "generator.inference_engine.backend=transformers",
    "generator.inference_engine.num_engines=1", "generator.inference_engine.tensor_parallel_size=1", "generator.inference_engine.model_dtype=float32",
]  # fmt: skip


@dataclass(frozen=True)
class Source:
    """What is converted.

    Attributes:
        text: of a script; None: Cosmos-RL's file of this name.
        tiny: settings that put small data and few ranks in the place of theirs.
        kind: of the tiny model.
        mode: trainer.mode.
    """

    name: str
    tiny: Sequence[str]
    kind: str
    text: str | None = None
    mode: str = "sft"

    def converted(self, place: Path) -> Path:
        """Write what it becomes; what the conversion leaves open is settled by `tiny`."""
        source = place / "script.sh" if self.text else COSMOS / f"{self.name}.toml"
        if self.text:
            source.write_text(self.text)
        target = place / "converted.toml"
        main(["config", "convert", str(source), "-o", str(target)])
        before, _, rest = target.read_text().partition(f"[{UNCONVERTED}]")
        target.write_text(before + (f"\n[{rest.partition(chr(10) + '[')[2]}" if rest else ""))
        return target


SOURCES = [
    Source("03_sft_pp2_cp2_qwen2.5-7b", [*ROWS, "trainer.placement.policy_num_gpus_per_node=4"], "dense"),
    Source("12_sft_moe_deepseek-v3_pp4_ep64", [*ROWS, *TWO_RANKS, *(
        f"trainer.{role}.megatron_config.{size}" for role in ("policy", "ref") for size in ("pipeline_model_parallel_size=1", "expert_model_parallel_size=2")
    )], "experts"),
    Source("04_distill_deepmath_qwen3-8b", [
        *LETTERS, "data.prompt_column=prompt", "trainer.logger=['console']", "trainer.placement.policy_num_gpus_per_node=1", "trainer.eval_interval=-1",
        "trainer.policy.fsdp_config.mixed_precision.param_dtype=fp32", "trainer.distillation.fsdp_config.mixed_precision.param_dtype=fp32",
        "trainer.distillation.placement.fsdp_size=1", "trainer.distillation.compile_model=false",
        "generator.inference_engine.enable_chunked_prefill=true", "generator.inference_engine.enforce_eager=null",
        "generator.eval_sampling_params.max_generate_length=8", "trainer.eval_before_train=false",
    ], "dense", mode="rl"),
    Source("ppo_lora", [*LETTERS, "trainer.critic_mini_batch_size=8", "trainer.policy.fsdp_config.mixed_precision.param_dtype=fp32",
                        "trainer.critic.fsdp_config.mixed_precision.param_dtype=fp32", "trainer.placement.policy_num_gpus_per_node=1"], "dense", SKYRL + PPO, "rl"),
    Source("megatron_lora", [*LETTERS, *TWO_RANKS, "generator.inference_engine.num_engines=2", "trainer.policy.megatron_config.dtype=fp32", "trainer.ref.megatron_config.dtype=fp32", *(
        f"trainer.{role}.megatron_config.{size}" for role in ("policy", "ref") for size in ("tensor_model_parallel_size=2", "expert_model_parallel_size=2")
    )], "experts", SKYRL + MEGATRON, "rl"),
    Source("skyrl_sft", [
        "trainer.policy.fsdp_config.mixed_precision.param_dtype=fp32", "trainer.placement.policy_num_gpus_per_node=1", "slurm.gpus_per_node=0"
    ], "dense", SFT),
]  # fmt: skip


def tiny(source: Source, place: Path) -> list[str]:
    """Return what a run takes instead of the source's model and data."""
    from transformers import AutoModelForCausalLM, Qwen2Config, Qwen3MoeConfig

    sizes = {
        "vocab_size": 18, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 8, "num_attention_heads": 4, "num_key_value_heads": 4,
        "max_position_embeddings": 2048, "eos_token_id": 1, "pad_token_id": 0, "bos_token_id": None,
    }  # fmt: skip
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 8}
    config = Qwen2Config(**sizes) if source.kind == "dense" else Qwen3MoeConfig(**sizes, **experts)
    AutoModelForCausalLM.from_config(config).save_pretrained(place / "model")
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(MODEL / name, place / "model" / name)
    model = [f"trainer.policy.model.path={place / 'model'}"]
    if source.name == "ppo_lora":
        model.append(f"trainer.critic.model.path={place / 'model'}")
    if source.name.startswith("04_distill"):
        model.append(f"trainer.distillation.model_path={place / 'model'}")
    if source.mode == "rl":
        return [*model, *source.tiny]
    said = [("user", "sort: cba"), ("assistant", "abc")]
    row = {"conversation": [{"role": role, "content": text} for role, text in said]}
    (place / "rows.jsonl").write_text(f"{json.dumps(row)}\n" * 32)
    return [*model, f"data.train_data=['{place / 'rows.jsonl'}']", *source.tiny]


@pytest.mark.parametrize("source", SOURCES, ids=lambda source: source.name)
def test_what_is_converted_is_valid_and_planned(
    source: Source, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = source.converted(tmp_path)
    config = Config.from_toml([file])
    assert config.trainer.mode == source.mode
    assert main(["config", "validate", str(file)]) == 0
    capsys.readouterr()
    assert main(["plan", str(file), *tiny(source, tmp_path)]) == 0
    said = capsys.readouterr().out
    assert f"of {tmp_path / 'model'}, " in said
    assert "memory of" in said


@pytest.mark.slow
@pytest.mark.parametrize("source", SOURCES, ids=lambda source: source.name)
def test_what_is_converted_trains(source: Source, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(place))  # some have their checkpoints there
    file = source.converted(place)
    done = hpcrl("submit", str(file), "--local", "trainer.run_name=tiny", *tiny(source, place), cwd=place)
    assert done.returncode == 0, done.stderr
    run = Run.open(place / "runs" / Config.from_toml([file]).trainer.project_name / "tiny")
    assert finish(run, 1) == "done", logs_of(run)
    losses = curve(run, "policy/final_loss")
    assert sorted(losses) == [1, 2]
    assert all(map(math.isfinite, losses.values()))
