"""Rules about how models are sharded, scheduled, adapted and profiled: each refuses what cannot work, and not what is next to it."""

from __future__ import annotations

from typing import Any

import pytest

from hpcrl.config import Config
from hpcrl.config.load import nested
from hpcrl.config.rules.combinations import check, impossible
from hpcrl.config.validate import build

BASE = {"data.train_data": ["t"], "data.val_data": ["v"], "trainer.policy.model.path": "m"}
DYNAMIC = "trainer.algorithm.dynamic_sampling"
FILTER = "trainer.algorithm.zero_variance_filter"
FSDP, REF, OPTIMIZER = "trainer.policy.fsdp_config", "trainer.ref.fsdp_config", "trainer.policy.optimizer_config"


FOUR = {"trainer.placement.policy_num_gpus_per_node": 4, "slurm.gpus_per_node": 4}
CRITIC, CRITIC_MODEL = "trainer.critic.fsdp_config", {"trainer.critic.model.path": "c"}
MEGATRON = {"trainer.strategy": "megatron", "trainer.algorithm.use_kl_loss": False}
FREE = {f"{OPTIMIZER}.name": "ScheduleFreeAdamW"}
OFFLINE = {**FREE, "trainer.mode": "sft", "trainer.max_length": 64}
MASTER = f"{FSDP}.mixed_precision.master_dtype"
KWARGS = "trainer.policy.megatron_config.transformer_config_kwargs"
_OF_OPTIMIZER = "trainer.policy.megatron_config.optimizer_config_kwargs"
DIVIDED, OFFLOADED = f"{_OF_OPTIMIZER}.use_distributed_optimizer", f"{_OF_OPTIMIZER}.optimizer_cpu_offload"
LIGER = "trainer.policy.enable_liger_kernel"
LOW, FP8 = "trainer.policy.low_precision", "trainer.policy.low_precision.fp8"
UNITS = f"{FSDP}.wrap_policy"

CASES: list[tuple[dict[str, Any], str, str, dict[str, Any]]] = [
    ({**FOUR, f"{FSDP}.fsdp_size": 3}, f"{FSDP}.fsdp_size", "does not divide the 4 ranks", {**FOUR, f"{FSDP}.fsdp_size": 2}),
    ({**FOUR, f"{REF}.fsdp_size": 3}, f"{REF}.fsdp_size", "does not divide the 4 ranks", {**FOUR, f"{REF}.fsdp_size": 8}),
    (
        {**FOUR, **CRITIC_MODEL, f"{CRITIC}.fsdp_size": 3}, f"{CRITIC}.fsdp_size", "does not divide the 4 ranks",
        {**FOUR, **CRITIC_MODEL, f"{CRITIC}.fsdp_size": 2},
    ),
    (
        {**FOUR, f"{FSDP}.reshard_after_forward": 3}, f"{FSDP}.reshard_after_forward", "a divisor of the 4 ranks",
        {**FOUR, f"{FSDP}.reshard_after_forward": 2},
    ),
    (
        {**FOUR, f"{FSDP}.reshard_after_forward": 4, f"{FSDP}.fsdp_size": 2}, f"{FSDP}.reshard_after_forward",
        "a divisor of the 2 ranks that share a copy", {**FOUR, f"{FSDP}.reshard_after_forward": 2, f"{FSDP}.fsdp_size": 2},
    ),
    ({UNITS: {"min_params": 1}}, f"{UNITS}.min_params", "expected one of", {UNITS: {"min_num_params": 1}}),
    ({UNITS: {"disable": 1}}, f"{UNITS}.disable", "true or false, found 1", {UNITS: {"disable": True}}),
    (
        {UNITS: {"transformer_layer_cls_to_wrap": "A"}}, f"{UNITS}.transformer_layer_cls_to_wrap", "a list of class names",
        {UNITS: {"transformer_layer_cls_to_wrap": ["A"]}},
    ),
    ({UNITS: {"min_num_params": 5, "disable": True}}, UNITS, "leave the others out", {UNITS: {"min_num_params": 5}}),
    (
        {f"{OPTIMIZER}.min_lr_factor": 0.1}, f"{OPTIMIZER}.min_lr_factor", "scheduler that falls",
        {f"{OPTIMIZER}.min_lr_factor": 0.1, f"{OPTIMIZER}.scheduler": "sqrt"},
    ),
    (
        {f"{OPTIMIZER}.decay_ratio": 0.1, f"{OPTIMIZER}.scheduler": "inverse_sqrt"}, f"{OPTIMIZER}.decay_ratio", '"linear", "cosine" or "sqrt"',
        {f"{OPTIMIZER}.decay_ratio": 0.1, f"{OPTIMIZER}.scheduler": "linear"},
    ),
    (
        {f"{OPTIMIZER}.decay_cycles": 2}, f"{OPTIMIZER}.decay_cycles", '"linear", "cosine" or "sqrt"',
        {f"{OPTIMIZER}.decay_cycles": 2, f"{OPTIMIZER}.decay_power": 2.0, f"{OPTIMIZER}.scheduler": "cosine"},
    ),
    (
        {f"{OPTIMIZER}.warmup_shape": "to_lr"}, f"{OPTIMIZER}.warmup_shape", "without a warm-up",
        {f"{OPTIMIZER}.warmup_shape": "to_lr", f"{OPTIMIZER}.num_warmup_steps": 1},
    ),
    (
        {f"{OPTIMIZER}.warmup_start_factor": 0.1}, f"{OPTIMIZER}.warmup_start_factor", "without a warm-up",
        {f"{OPTIMIZER}.warmup_start_factor": 0.1, f"{OPTIMIZER}.warmup_ratio": 0.1},
    ),
    (
        {"trainer.gradient_checkpointing_use_reentrant": True, "trainer.gradient_checkpointing": False},
        "trainer.gradient_checkpointing_use_reentrant", "no effect", {"trainer.gradient_checkpointing_use_reentrant": True},
    ),
    (
        {"trainer.gradient_checkpointing_every": 2, "trainer.gradient_checkpointing": False},
        "trainer.gradient_checkpointing_every", "no effect", {"trainer.gradient_checkpointing_every": 2},
    ),
    (
        {"trainer.gradient_checkpointing_keep": "attention", "trainer.gradient_checkpointing_use_reentrant": True},
        "trainer.gradient_checkpointing_keep", "set trainer.gradient_checkpointing_use_reentrant to false",
        {"trainer.gradient_checkpointing_keep": "attention"},
    ),
    (
        {"trainer.policy.activation_offload": True, "slurm.gpus_per_node": 0},
        "trainer.policy.activation_offload", "in host memory already; leave it out, or set slurm.gpus_per_node",
        {"trainer.policy.activation_offload": True, "slurm.gpus_per_node": 1},
    ),
    (
        {"trainer.policy.activation_offload": True, "slurm.gpus_per_node": 1, "trainer.gradient_checkpointing": False},
        "trainer.policy.activation_offload", "no effect without trainer.gradient_checkpointing=true",
        {"trainer.policy.activation_offload": True, "slurm.gpus_per_node": 1},
    ),
    (
        {"trainer.flash_attn_version": 2, "slurm.gpus_per_node": 0}, "trainer.flash_attn_version", "for GPUs",
        {"trainer.flash_attn_version": 2, "slurm.gpus_per_node": 1},
    ),
    (
        {"trainer.flash_attn_version": 3, "slurm.gpus_per_node": 1, "trainer.flash_attn": False},
        "trainer.flash_attn_version", "used with trainer.flash_attn", {"trainer.flash_attn_version": 3, "slurm.gpus_per_node": 1},
    ),
    ({LIGER: True, "slurm.gpus_per_node": 0}, LIGER, "for GPUs", {LIGER: True, "slurm.gpus_per_node": 1}),
    (
        {LIGER: True, "slurm.gpus_per_node": 1, "trainer.policy.compile_model": True}, LIGER, "set one of them to false",
        {LIGER: True, "slurm.gpus_per_node": 1},
    ),
    (
        {f"{LOW}.fp8_granularity": "tensorwise"}, f"{LOW}.fp8_granularity", "no effect without fp8",
        {FP8: True, f"{LOW}.fp8_granularity": "tensorwise"},
    ),
    (
        {FP8: True, "trainer.policy.model.lora.rank": 8}, FP8, "gradients of the frozen weights too",
        {FP8: True, "trainer.policy.model.lora.rank": 0},
    ),
    (
        {**MEGATRON, f"{KWARGS}": {"fp8": "hybrid"}}, f"{KWARGS}.fp8", "in multiples of 8 at least", MEGATRON,
    ),
    (
        {f"{OPTIMIZER}.moments": "8bit", f"{OPTIMIZER}.implementation": "foreach"}, f"{OPTIMIZER}.implementation",
        "the step is torchao's; leave it out", {f"{OPTIMIZER}.moments": "8bit"},
    ),
    (
        {f"{OPTIMIZER}.moments": "bf16"}, f"{OPTIMIZER}.moments", "set adam_betas to [0.9, 0.99] or lower, or moments to 8bit",
        {f"{OPTIMIZER}.moments": "bf16", f"{OPTIMIZER}.adam_betas": [0.9, 0.99]},
    ),
    (
        {f"{OPTIMIZER}.name": "Muon", **MEGATRON, DIVIDED: False}, DIVIDED, "that the distributed optimizer has on the device",
        {f"{OPTIMIZER}.name": "Muon", **MEGATRON, DIVIDED: True},
    ),
    (
        {f"{OPTIMIZER}.name": "Muon", **MEGATRON, OFFLOADED: True}, OFFLOADED, "leave it out, or use AdamW",
        {f"{OPTIMIZER}.name": "Muon", **MEGATRON},
    ),
    (
        {f"{OPTIMIZER}.name": "Muon", f"{OPTIMIZER}.moments": "8bit"}, f"{OPTIMIZER}.moments", "8bit moments are Adam's",
        {f"{OPTIMIZER}.name": "Muon"},
    ),
    (
        {f"{OPTIMIZER}.name": "Muon", "trainer.policy.model.lora.rank": 8}, f"{OPTIMIZER}.name", "not for the factors of adapters",
        {f"{OPTIMIZER}.name": "Muon"},
    ),
    (
        {f"{OPTIMIZER}.name": "Muon", f"{FSDP}.cpu_offload": True}, f"{OPTIMIZER}.name", "computed on CPUs",
        {f"{OPTIMIZER}.name": "Muon"},
    ),
    (FREE, f"{OPTIMIZER}.name", "nothing would use the average that is exported", OFFLINE),
    (
        {**CRITIC_MODEL, "trainer.critic.optimizer_config.name": "ScheduleFreeAdamW"}, "trainer.critic.optimizer_config.name",
        "expected AdamW, Adam or Muon", {**CRITIC_MODEL, "trainer.critic.optimizer_config.name": "Muon"},
    ),
    ({**OFFLINE, "trainer.strategy": "megatron"}, f"{OPTIMIZER}.name", "Megatron-core has no such optimizer", OFFLINE),
    (
        {**OFFLINE, f"{OPTIMIZER}.scheduler": "cosine"}, f"{OPTIMIZER}.scheduler", "the average of ScheduleFreeAdamW takes its place",
        {**OFFLINE, f"{OPTIMIZER}.num_warmup_steps": 3},
    ),
    ({**OFFLINE, f"{OPTIMIZER}.moments": "8bit"}, f"{OPTIMIZER}.moments", "keeps weights beside one", OFFLINE),
    (
        {**OFFLINE, f"{OPTIMIZER}.implementation": "foreach"}, f"{OPTIMIZER}.implementation", "the step of ScheduleFreeAdamW is hpcrl's",
        {**OFFLINE, f"{OPTIMIZER}.name": "AdamW", f"{OPTIMIZER}.implementation": "foreach"},
    ),
    (
        {**OFFLINE, f"{OPTIMIZER}.adam_betas": [0.05, 0.99]}, f"{OPTIMIZER}.adam_betas", "at least 0.1 with ScheduleFreeAdamW",
        {**OFFLINE, f"{OPTIMIZER}.adam_betas": [0.1, 0.99]},
    ),
    ({**OFFLINE, MASTER: "bf16"}, MASTER, "an average moves by less than bf16 keeps", {**OFFLINE, MASTER: "fp32"}),
    (
        {f"{OPTIMIZER}.moments": "8bit", f"{FSDP}.cpu_offload": True}, f"{OPTIMIZER}.moments", "leave one of them out",
        {f"{OPTIMIZER}.moments": "8bit"},
    ),
    (
        {"trainer.rope_scaling": {"factor": 2.0}}, "trainer.rope_scaling", "an entry rope_type",
        {"trainer.rope_scaling": {"factor": 2.0, "rope_type": "linear"}},
    ),
    (
        {"generator.rope_scaling": {"factor": 2.0}}, "generator.rope_scaling", "an entry rope_type",
        {"generator.rope_scaling": {"factor": 2.0, "type": "linear"}},
    ),
    (
        {"trainer.policy.freeze_pattern": ["(a"]}, "trainer.policy.freeze_pattern", '"(a" is not a regular expression',
        {"trainer.policy.freeze_pattern": ["(a)"]},
    ),
    (
        {"trainer.critic.model.path": "critic", "trainer.critic.optimizer_config.groups": {"mine": {"match": "(a"}}},
        "trainer.critic.optimizer_config.groups.mine.match", '"(a" is not a regular expression',
        {"trainer.critic.model.path": "critic", "trainer.critic.optimizer_config.groups": {"mine": {"match": "(a)"}}},
    ),
    (
        {"trainer.profiler.enable": True, "trainer.profiler.ranks": [0, 1]}, "trainer.profiler.ranks", "from 0 to 0",
        {"trainer.profiler.enable": True},
    ),
    (
        {"trainer.profiler.enable": True, "trainer.profiler.ranks": [2], **CRITIC_MODEL}, "trainer.profiler.ranks", "from 0 to 0",
        {
            "trainer.profiler.enable": True, "trainer.profiler.ranks": [2], **CRITIC_MODEL, "trainer.placement.critic_num_gpus_per_node": 2,
        },
    ),
    (
        {"trainer.profiler.enable": True, "trainer.profiler.ranks": []}, "trainer.profiler.ranks", "found []",
        {"trainer.profiler.enable": False, "trainer.profiler.ranks": []},
    ),
    (
        {"trainer.profiler.enable_nsys": True, "slurm.gpus_per_node": 1, "trainer.profiler.ranks": [1]},
        "trainer.profiler.ranks", "from 0 to 0", {"trainer.profiler.enable_nsys": True, "slurm.gpus_per_node": 1},
    ),
    (
        {"trainer.profiler.enable_nsys": True, "trainer.profiler.enable": True, "slurm.gpus_per_node": 1},
        "trainer.profiler.enable_nsys", "one profiler at a time",
        {"trainer.profiler.enable_nsys": True, "slurm.gpus_per_node": 1},
    ),
    (
        {"trainer.profiler.enable_nsys": True, "slurm.gpus_per_node": 0}, "trainer.profiler.enable_nsys", "records GPUs",
        {"trainer.profiler.enable": True, "slurm.gpus_per_node": 0},
    ),
    (
        {"trainer.policy.record_memory": True, "slurm.gpus_per_node": 0}, "trainer.policy.record_memory",
        "records GPUs", {"trainer.policy.record_memory": True, "slurm.gpus_per_node": 1},
    ),
    (
        {"trainer.profiler.nsys_engine_iterations": 50}, "trainer.profiler.nsys_engine_iterations",
        "no effect without trainer.profiler.enable_nsys",
        {"trainer.profiler.nsys_engine_iterations": 50, "trainer.profiler.enable_nsys": True, "slurm.gpus_per_node": 1},
    ),
    (
        {
            "trainer.profiler.nsys_engine_iterations": 50, "trainer.profiler.enable_nsys": True,
            "slurm.gpus_per_node": 1, "generator.inference_engine.backend": "transformers",
        },
        "trainer.profiler.nsys_engine_iterations", "vLLM alone records itself",
        {"trainer.profiler.nsys_engine_iterations": 50, "trainer.profiler.enable_nsys": True, "slurm.gpus_per_node": 1},
    ),
    (
        {f"{DYNAMIC}.max_sample_batches": 5}, f"{DYNAMIC}.max_sample_batches", "no effect without",
        {f"{DYNAMIC}.max_sample_batches": 5, f"{DYNAMIC}.type": "filter"},
    ),
    (
        {f"{DYNAMIC}.min_replace_ratio": 0.5, f"{DYNAMIC}.type": "filter"}, f"{DYNAMIC}.min_replace_ratio",
        'type="replace"', {f"{DYNAMIC}.min_replace_ratio": 0.5, f"{DYNAMIC}.type": "replace"},
    ),
    (
        {f"{DYNAMIC}.type": "filter", "generator.n_samples_per_prompt": 1}, f"{DYNAMIC}.type", "a single sample",
        {f"{DYNAMIC}.type": "filter", "generator.n_samples_per_prompt": 2},
    ),
    (
        {f"{DYNAMIC}.type": "replace", FILTER: True}, FILTER, "type=replace, which leaves no group of equal rewards",
        {FILTER: True},
    ),
]  # fmt: skip


@pytest.mark.parametrize(("wrong", "path", "words", "right"), CASES, ids=[case[1] for case in CASES])
def test_each_rule(wrong: dict[str, Any], path: str, words: str, right: dict[str, Any]) -> None:
    problems = impossible(build(Config, nested({**BASE, **wrong})))
    assert [problem.path for problem in problems] == [path]
    assert words in problems[0].message
    assert check(build(Config, nested({**BASE, **right}))) == []
