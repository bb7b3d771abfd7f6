"""Rules about how models are sharded, scheduled, adapted and profiled."""

from __future__ import annotations

import re
from collections.abc import Iterator
from math import gcd
from typing import Any

from hpcrl.config.backend import backend_of, backends
from hpcrl.config.errors import Problem, shown
from hpcrl.config.sections.dpo import PREFERENCE_LOSSES, UNPAIRED_LOSSES
from hpcrl.config.sections.model import PolicyConfig, ShardingConfig
from hpcrl.config.sections.trainer import TrainerConfig
from hpcrl.config.sections.tree import ConfigTree
from hpcrl.config.token_limits import micro_batch_tokens
from hpcrl.errors import did_you_mean

_BF16 = 1 / 256  # spacing of its numbers
# of the average of schedule-free AdamW, below which rounding of the weights is ten times as large in it
_LEAST_SHARE = 0.1
_UNITS = {
    "transformer_layer_cls_to_wrap": (list, "a list of class names"),
    "min_num_params": (int, "a number of parameters"),
    "disable": (bool, "true or false"),
}


def sharding(config: ConfigTree) -> Iterator[Problem]:
    trainer = config.trainer
    models = {
        "policy": trainer.placement.policy_ranks,
        "ref": trainer.placement.ref_ranks,
        "critic": trainer.placement.critic_ranks,
    }
    for role, ranks in models.items():
        on_node = trainer.placement.critic_nodes[1] if role == "critic" else trainer.placement.policy_num_gpus_per_node
        yield from _shards(f"trainer.{role}.fsdp_config", getattr(trainer, role).fsdp_config, ranks, on_node)


def _shards(path: str, fsdp: ShardingConfig, ranks: int, on_node: int) -> Iterator[Problem]:
    kept = fsdp.reshard_after_forward
    # unset, it may become the ranks of a node
    copy = gcd(on_node, ranks) if fsdp.fsdp_size is None else fsdp.copy_ranks(ranks, on_node)
    if ranks % copy:
        yield Problem(
            f"{path}.fsdp_size",
            f"{copy} ranks share each copy of the parameters, which does not divide the {ranks} ranks (trainer.placement); "
            "-1: all ranks share one",
        )
    experts = fsdp.expert_parallel_size
    together = ranks if fsdp.fsdp_size is None else copy
    if together % experts:
        yield Problem(
            f"{path}.expert_parallel_size",
            f"expected a divisor of the {together} ranks that share a copy of the parameters ({path}.fsdp_size, trainer.placement), found "
            f"{experts}",
        )
    if not isinstance(kept, bool) and copy % kept:
        yield Problem(
            f"{path}.reshard_after_forward",
            f"expected true, false or a divisor of the {copy} ranks that share a copy ({path}.fsdp_size), found {kept}",
        )


def adapted_experts(config: ConfigTree) -> Iterator[Problem]:
    for role, section in {"policy": config.trainer.policy, "critic": config.trainer.critic}.items():
        lora = section.model.lora
        if section.fsdp_config.expert_parallel_size > 1 and lora.rank and lora.target_parameters:
            yield Problem(
                f"trainer.{role}.fsdp_config.expert_parallel_size",
                f"expected 1 with trainer.{role}.model.lora.target_parameters: PEFT merges adapters into the experts of all ranks; leave one of "
                "them out",
            )


def units(config: ConfigTree) -> Iterator[Problem]:
    for role in ("policy", "ref", "critic"):
        path = f"trainer.{role}.fsdp_config.wrap_policy"
        policy: dict[str, Any] = getattr(config.trainer, role).fsdp_config.wrap_policy
        for name, value in policy.items():
            if name not in _UNITS:
                yield Problem(f"{path}.{name}", f"unknown setting; expected one of {', '.join(_UNITS)}")
            elif type(value) is not _UNITS[name][0]:
                yield Problem(f"{path}.{name}", f"expected {_UNITS[name][1]}, found {shown(value)}")
        if len(policy) > 1 and policy.keys() <= _UNITS.keys():
            yield Problem(path, f"expected one of {', '.join(policy)}; leave the others out")


def rotary_positions(config: ConfigTree) -> Iterator[Problem]:
    for section in ("trainer", "generator"):
        scaling = getattr(config, section).rope_scaling
        if scaling and not {"rope_type", "type"} & scaling.keys():
            yield Problem(
                f"{section}.rope_scaling", 'expected an entry rope_type, such as "linear", "yarn" or "llama3"'
            )


def frozen(config: ConfigTree) -> Iterator[Problem]:
    for pattern in config.trainer.policy.freeze_pattern:
        try:
            re.compile(pattern)
        except re.error as error:
            yield Problem("trainer.policy.freeze_pattern", f'"{pattern}" is not a regular expression: {error}')


def parameter_groups(config: ConfigTree) -> Iterator[Problem]:
    for role, section in (("policy", config.trainer.policy), ("critic", config.trainer.critic)):
        for name, group in section.optimizer_config.groups.items():
            try:
                re.compile(group.match)
            except re.error as error:
                yield Problem(
                    f"trainer.{role}.optimizer_config.groups.{name}.match",
                    f'"{group.match}" is not a regular expression: {error}',
                )


def profiles(config: ConfigTree) -> Iterator[Problem]:
    path, profiler, ranks = "trainer.profiler", config.trainer.profiler, config.trainer.placement.policy_ranks
    ranks += config.trainer.placement.critic_ranks if config.trainer.has_own_critic else 0
    wrong = [rank for rank in profiler.ranks if not 0 <= rank < ranks]
    if (profiler.enable or profiler.enable_nsys) and (wrong or not profiler.ranks):
        yield Problem(f"{path}.ranks", f"expected trainer ranks from 0 to {ranks - 1}, found {profiler.ranks}")
    if profiler.enable and profiler.enable_nsys:
        yield Problem(
            f"{path}.enable_nsys", f"a GPU reports its kernels to one profiler at a time; leave {path}.enable out"
        )
    if profiler.nsys_engine_iterations and not profiler.enable_nsys:
        yield Problem(f"{path}.nsys_engine_iterations", f"has no effect without {path}.enable_nsys=true")
    if profiler.nsys_engine_iterations and not backend_of(config.generator.inference_engine).records_iterations:
        titles = " and ".join(backend.title for backend in backends().values() if backend.records_iterations)
        yield Problem(
            f"{path}.nsys_engine_iterations",
            f"{titles} alone records itself; generator.inference_engine.backend is another",
        )
    for name, asked in {
        f"{path}.enable_nsys": profiler.enable_nsys,
        "trainer.policy.record_memory": config.trainer.policy.record_memory,
    }.items():
        if asked and config.slurm.gpus == 0:
            yield Problem(name, "records GPUs, which a run on CPUs (slurm.gpus_per_node=0) has not; leave it out")


def preference_losses(config: ConfigTree) -> Iterator[Problem]:
    path, dpo = "trainer.dpo", config.trainer.dpo
    if not dpo.loss_type:
        yield Problem(f"{path}.loss_type", "expected at least one loss, found an empty list")
    for name in dpo.loss_type:
        if name not in PREFERENCE_LOSSES:
            hint = did_you_mean(name, PREFERENCE_LOSSES)
            yield Problem(f"{path}.loss_type", f'expected {", ".join(PREFERENCE_LOSSES)}, found "{name}"{hint}')
    if config.trainer.unpaired and len(dpo.loss_type) > 1:
        alone = next(name for name in dpo.loss_type if name in UNPAIRED_LOSSES)
        yield Problem(
            f"{path}.loss_type", f"{alone} trains single answers, and stands alone; leave the other losses out"
        )
    if config.trainer.unpaired and dpo.reference_free:
        yield Problem(f"{path}.reference_free", f"{dpo.loss_type[0]} compares with a reference; set it to false")
    if config.trainer.unpaired and dpo.loss_weights:
        yield Problem(
            f"{path}.loss_weights",
            f"{dpo.loss_type[0]} stands alone; leave them out, and use desirable_weight and undesirable_weight",
        )
    elif dpo.loss_weights and len(dpo.loss_weights) != len(dpo.loss_type):
        yield Problem(
            f"{path}.loss_weights",
            f"expected one per loss of loss_type ({len(dpo.loss_type)}), found {len(dpo.loss_weights)}",
        )


def reward_models(config: ConfigTree) -> Iterator[Problem]:
    trainer = config.trainer
    if not trainer.trains_reward_model:
        return
    if trainer.policy.model.lora.adapter_path is not None:
        yield Problem(
            "trainer.policy.model.lora.adapter_path",
            "a reward model cannot begin with adapters; merge them, and set trainer.policy.model.path to the merged model",
        )


def estimated_old_logprobs(config: ConfigTree) -> Iterator[Problem]:
    path, trainer = "trainer.algorithm.approximate_old_logprobs", config.trainer
    algorithm = trainer.algorithm
    if not algorithm.approximate_old_logprobs:
        return
    if algorithm.use_rollout_logprobs_for_loss:
        yield Problem(
            path,
            "has no effect with trainer.algorithm.use_rollout_logprobs_for_loss, where the rollout's take their place; leave one of them out",
        )
    elif trainer.policy_mini_batch_size >= trainer.train_batch_size and trainer.update_epochs_per_batch == 1:
        yield Problem(
            path,
            "has no effect where a batch makes one optimizer step, which needs no old log-probabilities; leave it out, or lower "
            f"trainer.policy_mini_batch_size ({trainer.policy_mini_batch_size})",
        )
    needing = {"trainer.algorithm.use_kl_in_reward": algorithm.use_kl_in_reward}
    needing["trainer.distillation.enable"] = trainer.distillation.enable
    for setting in (name for name, used in needing.items() if used):
        yield Problem(path, f"{setting} needs them before the policy is updated; leave one of them out")


_KWARGS = ", and see trainer.policy.megatron_config.transformer_config_kwargs"
_MOMENTS = ", and see trainer.policy.megatron_config.optimizer_config_kwargs (use_precision_aware_optimizer)"
_OF_FSDP = {
    "policy.fsdp_config": ", and see trainer.policy.megatron_config, whose dtype is the type of computation",
    "ref.fsdp_config": ", and see trainer.ref.megatron_config",
    "critic.fsdp_config": ": a critic is split as trainer.policy.megatron_config",
    "policy.sequence_parallel_size": ", and see trainer.policy.megatron_config.context_parallel_size",
    "ref.sequence_parallel_size": ", and see trainer.ref.megatron_config.context_parallel_size",
    "critic.sequence_parallel_size": ": a critic is split as trainer.policy.megatron_config",
    "policy.use_torch_compile": "",
    "policy.compile_model": "",
    "policy.enable_liger_kernel": "",
    "flash_attn_version": ": attention is TransformerEngine's, or torch's",
    "policy.optimizer_config.implementation": ": the optimizer is Megatron-core's",
    "critic.optimizer_config.implementation": ": the optimizer is Megatron-core's",
    "policy.optimizer_config.moments": _MOMENTS,
    "critic.optimizer_config.moments": _MOMENTS,
    "policy.low_precision": "",
    "use_sample_packing": ": samples are always packed",
    "flash_attn": ": attention is TransformerEngine's, or torch's",
    "gradient_checkpointing_use_reentrant": _KWARGS,
    "gradient_checkpointing_every": f"{_KWARGS} (recompute_num_layers)",
    "gradient_checkpointing_keep": f"{_KWARGS} (recompute_modules)",
    "policy.activation_offload": f"{_KWARGS} (cpu_offloading)",
}
_OF_MEGATRON = {"policy.megatron_config": "", "ref.megatron_config": ""}


def shared_prefixes(config: ConfigTree) -> Iterator[Problem]:
    path, trainer = "trainer.shared_prefixes", config.trainer
    if not trainer.shared_prefixes:
        return
    if trainer.strategy == "megatron":
        yield Problem(path, "Megatron-core computes each sample whole; set it to false, or use trainer.strategy=fsdp2")
    if not trainer.use_sample_packing:
        yield Problem(path, "padded rows have no tokens in common; set trainer.use_sample_packing to true")
    if micro_batch_tokens(config) is None and not trainer.pairwise:
        yield Problem(
            path,
            "keeps the samples of a group together in micro-batches that are limited by tokens; set trainer.max_tokens_per_micro_batch",
        )
    compiled = {"policy": trainer.policy.compile_model, "distillation": trainer.distillation.compile_model}
    for name in (name for name, chosen in compiled.items() if chosen):
        yield Problem(
            path, f"layers would be compiled again for each micro-batch; set trainer.{name}.compile_model to false"
        )


def recomputation(config: ConfigTree) -> Iterator[Problem]:
    trainer = config.trainer
    if trainer.gradient_checkpointing_keep != "nothing" and trainer.gradient_checkpointing_use_reentrant:
        yield Problem(
            "trainer.gradient_checkpointing_keep",
            "the reentrant implementation keeps nothing but inputs; set trainer.gradient_checkpointing_use_reentrant to false",
        )
    if trainer.policy.activation_offload and not config.slurm.gpus:
        yield Problem(
            "trainer.policy.activation_offload",
            "without GPUs activations are in host memory already; leave it out, or set slurm.gpus_per_node",
        )


def kernels(config: ConfigTree) -> Iterator[Problem]:
    trainer, on_gpu = config.trainer, config.slurm.gpus > 0
    if trainer.flash_attn_version is not None and not (trainer.flash_attn and on_gpu):
        yield Problem(
            "trainer.flash_attn_version",
            "flash attention is for GPUs, and used with trainer.flash_attn; leave it out, or set that and slurm.gpus_per_node",
        )
    liger = "trainer.policy.enable_liger_kernel"
    if trainer.policy.enable_liger_kernel and not on_gpu:
        yield Problem(liger, "Liger's kernels are for GPUs; set it to false, or set slurm.gpus_per_node")
    if trainer.policy.enable_liger_kernel and trainer.policy.compile_model:
        yield Problem(
            liger, "trainer.policy.compile_model makes kernels of the same operations; set one of them to false"
        )


def low_precision(config: ConfigTree) -> Iterator[Problem]:
    path, chosen = "trainer.policy.low_precision", config.trainer.policy.low_precision
    if chosen.fp8 and chosen.fp4:
        yield Problem(f"{path}.fp4", "given beside fp8; set one of them to false")
    if chosen.fp8_granularity != "rowwise" and not chosen.fp8:
        yield Problem(f"{path}.fp8_granularity", "has no effect without fp8; leave it out, or set that")
    if chosen.fp8 and config.trainer.policy.model.lora.rank:
        yield Problem(
            f"{path}.fp8",
            "with adapters torchao would compute gradients of the frozen weights too, which costs more than FP8 saves; set it to false",
        )
    for role in ("policy", "ref"):
        megatron = config.trainer.policy.megatron_config if role == "policy" else config.trainer.ref.megatron_config
        for name in (name for name in ("fp8", "fp4") if megatron.transformer_config_kwargs.get(name)):
            yield Problem(
                f"trainer.{role}.megatron_config.transformer_config_kwargs.{name}",
                "TransformerEngine wants numbers of tokens in multiples of 8 at least, to which hpcrl pads no micro-batch; leave it out, or "
                "use trainer.strategy=fsdp2 with trainer.policy.low_precision.fp8",
            )


def muon(config: ConfigTree) -> Iterator[Problem]:
    """Check what Muon goes together with."""
    sections = {"policy": config.trainer.policy, "critic": config.trainer.critic}
    for name, section in ((name, one) for name, one in sections.items() if one.optimizer_config.name == "Muon"):
        path, kept = f"trainer.{name}.optimizer_config", section.optimizer_config.moments
        if config.trainer.strategy == "megatron":
            yield from _muon_with_megatron(config, path)
        if kept is not None:
            yield Problem(
                f"{path}.moments", f"{kept} moments are Adam's, and matrices have a momentum with Muon; leave it out"
            )
        if section.model.lora.rank:
            yield Problem(
                f"{path}.name", "Muon is for whole matrices, not for the factors of adapters; expected AdamW or Adam"
            )
        if section.fsdp_config.cpu_offload:
            yield Problem(
                f"{path}.name",
                "with fsdp_config.cpu_offload the products of matrices would be computed on CPUs; leave one of them out",
            )


_WITH_MUON = {
    "use_distributed_optimizer": True,
    "use_precision_aware_optimizer": False,
    "optimizer_cpu_offload": False,
}
"""Fields of Megatron-core's optimizer, and what Muon needs of them."""


def _muon_with_megatron(config: ConfigTree, path: str) -> Iterator[Problem]:
    given = config.trainer.policy.megatron_config.optimizer_config_kwargs
    for name in (name for name, needed in _WITH_MUON.items() if given.get(name, needed) != needed):
        yield Problem(
            f"trainer.policy.megatron_config.optimizer_config_kwargs.{name}",
            f"{path}.name=Muon steps fp32 weights and gradients that the distributed optimizer has on the device; leave it out, or use AdamW",
        )


def schedule_free(config: ConfigTree) -> Iterator[Problem]:
    """Check what schedule-free AdamW goes together with."""
    trainer, free = config.trainer, "ScheduleFreeAdamW"
    names = {
        "trainer.policy.optimizer_config": trainer.policy.optimizer_config.name,
        "trainer.critic.optimizer_config": trainer.critic.optimizer_config.name,
    }
    if trainer.mode == "rl":
        for path in (path for path, name in names.items() if name == free):
            yield Problem(
                f"{path}.name",
                "engines generate and evaluate with the weights in training, and nothing would use the average that is exported; expected AdamW, "
                'Adam or Muon with trainer.mode="rl"',
            )
        return
    path, section = "trainer.policy.optimizer_config", trainer.policy
    own = section.optimizer_config
    if own.name != free:
        return
    if trainer.strategy == "megatron":
        yield Problem(
            f"{path}.name", "Megatron-core has no such optimizer; expected AdamW or Adam, or trainer.strategy=fsdp2"
        )
    if own.scheduler != "constant_with_warmup":
        yield Problem(f"{path}.scheduler", f"the average of {free} takes its place; leave it out")
    if own.moments is not None:
        yield Problem(
            f"{path}.moments", f"{own.moments} moments are Adam's, and {free} keeps weights beside one; leave it out"
        )
    if own.implementation != "fused":
        yield Problem(f"{path}.implementation", f"the step of {free} is hpcrl's; leave it out")
    if own.adam_betas and own.adam_betas[0] < _LEAST_SHARE:
        yield Problem(
            f"{path}.adam_betas",
            f"expected a first number of at least {_LEAST_SHARE} with {free}, found {own.adam_betas[0]:g}; its authors use 0.9. It is the share of "
            "the average in the trained weights: the average is computed from these, and rounding is divided by it",
        )
    if section.fsdp_config.mixed_precision.master_dtype != "fp32":
        yield Problem(
            "trainer.policy.fsdp_config.mixed_precision.master_dtype",
            f"expected fp32 with {free}: an average moves by less than bf16 keeps",
        )


def moments(config: ConfigTree) -> Iterator[Problem]:
    for name in ("policy", "critic"):
        path = f"trainer.{name}.optimizer_config"
        section = config.trainer.policy if name == "policy" else config.trainer.critic
        optimizer = section.optimizer_config
        if optimizer.moments is None:
            continue
        if optimizer.implementation != "fused":
            yield Problem(f"{path}.implementation", "with moments the step is torchao's; leave it out")
        if optimizer.moments == "bf16" and 1 - optimizer.adam_betas[1] < _BF16:
            yield Problem(
                f"{path}.moments",
                f"in bf16 a second moment never falls with adam_betas[1] = {optimizer.adam_betas[1]:g}, since changes below 1/256 are lost; "
                "set adam_betas to [0.9, 0.99] or lower, or moments to 8bit",
            )
        if section.fsdp_config.cpu_offload:
            yield Problem(
                f"{path}.moments", "fsdp_config.cpu_offload has moments in host memory; leave one of them out"
            )


def routers(config: ConfigTree) -> Iterator[Problem]:
    """Check the settings of routers of a mixture of experts."""
    path, trainer, engine = "trainer.policy.experts", config.trainer, config.generator.inference_engine
    balancing = "trainer.policy.megatron_config.moe_router_load_balancing_type"
    if trainer.policy.experts.aux_loss_coef and trainer.policy.megatron_config.moe_router_load_balancing_type != "none":
        yield Problem(
            f"{path}.aux_loss_coef", f"{balancing} is another loss for the same; set it to none, or this to 0"
        )
    if trainer.policy.experts.router_replay == "none":
        return
    path = f"{path}.router_replay"
    if trainer.offline:
        why = f'no engine takes the tokens of a dataset to experts (trainer.mode="{trainer.mode}")'
    elif not backend_of(engine).records_experts:
        why = f'generator.inference_engine.backend="{engine.backend}" does not record the experts of tokens'
    else:
        return
    yield Problem(path, f"{why}; leave it out")


def without_effect(config: ConfigTree) -> Iterator[Problem]:
    """Settings of the other backend."""
    trainer = config.trainer
    fresh = TrainerConfig(policy=PolicyConfig(model=trainer.policy.model))
    idle = _OF_FSDP if trainer.strategy == "megatron" else _OF_MEGATRON
    for path, instead in idle.items():
        one = path.endswith("sequence_parallel_size") and _at(trainer, path) == 1  # which says the same
        if _at(trainer, path) != _at(fresh, path) and not one:
            given = f"trainer.{path}"
            remedy = f"leave it out ({given}= where it was set before){instead}"
            yield Problem(given, f"has no effect with trainer.strategy={trainer.strategy}; {remedy}")


def _at(value: Any, path: str) -> Any:
    for name in path.split("."):
        value = getattr(value, name)
    return value
