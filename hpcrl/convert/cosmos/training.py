"""Settings of training that follow from several fields of Cosmos-RL. Each rule sets values and yields entries of the report."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

from hpcrl.convert.conversion import Entry
from hpcrl.convert.cosmos.conditions import (
    CUSTOM_OF_DPO,
    POLICY,
    has_pipeline,
    is_diffusion,
    is_grpo,
    is_language,
    is_preference,
    is_robot,
    moves_by_flow,
    needs_megatron,
)
from hpcrl.convert.cosmos.resolve import Resolved

Rule = Callable[[Resolved, dict[str, Any]], Iterator[Entry]]

_ALGORITHM = "trainer.algorithm"
_OPTIMIZER = "trainer.policy.optimizer_config"
_MEGATRON = "trainer.policy.megatron_config"
_PARALLELISM = "policy.parallelism"
_NODE = 8
_NEVER_REACHED = 1e9
_MEANS = {
    "seq-mean-token-sum": "seq_mean_token_sum",
    "seq-mean-token-mean": "seq_mean_token_mean",
    "token-sum": "token_sum",
}
_SCHEDULERS = {None: "constant_with_warmup", "none": "constant_with_warmup", "None": "constant_with_warmup"}


def _ranks(source: Resolved) -> int:
    """Return the GPUs of all policy replicas."""
    return _copies(source) * math.prod(source[f"{_PARALLELISM}.{name}"] for name in ("tp_size", "pp_size", "cp_size"))


def _copies(source: Resolved) -> int:
    """Return how many ranks or groups of ranks of all policy replicas take samples of their own."""
    return math.prod(source[f"{_PARALLELISM}.{name}"] for name in ("n_init_replicas", "dp_replicate_size")) * _shards(
        source
    )


def _shards(source: Resolved) -> int:
    """Return the ranks that share one copy of the parameters; -1 counts as the least that holds the experts."""
    size = source[f"{_PARALLELISM}.dp_shard_size"]
    return source[f"{_PARALLELISM}.ep_size"] if size == -1 else size


def batches(source: Resolved, values: dict[str, Any]) -> Iterator[Entry]:
    path, copies = "train.train_batch_per_replica", _copies(source)
    if is_grpo(source):
        samples, group = source[path] * source[f"{_PARALLELISM}.n_init_replicas"], source["rollout.n_generation"]
    else:
        samples, group = source[path] * copies, 1  # each rank of a replica loads so many
    prompts = max(1, math.ceil(samples / group))
    if prompts * group != samples:
        message = f"{samples} samples are no whole number of groups of {group}; rounded up to {prompts * group}, {prompts} x {group}"
        yield Entry("conflict", path, "trainer.train_batch_size", message)
    per_step = source[f"{POLICY}.batch_size_per_optimize"] if is_grpo(source) else None
    wanted = max(1, math.ceil(samples / copies / per_step)) if per_step and per_step > 0 else 1
    slices = next(n for n in range(min(wanted, prompts), prompts + 1) if prompts % n == 0)
    if slices != wanted:
        message = f"{wanted} optimizer steps do not divide {prompts} prompts equally; {slices} do"
        yield Entry("conflict", f"{POLICY}.batch_size_per_optimize", "trainer.policy_mini_batch_size", message)
    values["trainer.train_batch_size"] = prompts
    values["trainer.policy_mini_batch_size"] = prompts // slices
    if is_robot(source):
        return  # their trainers have one pass per chunk of actions
    micro = source[f"{POLICY}.mini_batch"]
    values["trainer.micro_forward_batch_size_per_gpu"] = micro
    values["trainer.micro_train_batch_size_per_gpu"] = (
        source[f"{_PARALLELISM}.pp_micro_batch_size"] if has_pipeline(source) else micro
    )


def lengths(source: Resolved, values: dict[str, Any]) -> Iterator[Entry]:
    path, longest = "policy.model_max_length", source["policy.model_max_length"]
    if not is_grpo(source):
        values["trainer.max_length"] = None if is_diffusion(source) else longest
        return
    response = source["rollout.max_response_length"]
    room = longest - response
    if source["rollout.multi_turn_config.enable"]:
        room = min(room, response)
    values["generator.inference_engine.max_num_batched_tokens"] = max(2048, longest)
    if room > 0:
        values["trainer.max_prompt_length"] = room
        return
    message = (
        f"rollout.max_response_length ({response}) leaves no token of {longest} for the prompt, so that the source cuts responses; "
        "here both have bounds of their own: lower generator.sampling_params.max_generate_length and set trainer.max_prompt_length"
    )
    yield Entry("conflict", path, "trainer.max_prompt_length", message)


def loss(source: Resolved, values: dict[str, Any]) -> Iterator[Entry]:
    if not is_grpo(source) or is_diffusion(source):
        return
    clip = source[f"{POLICY}.aipo_rho"]
    kind = "regular" if is_robot(source) else "gspo" if source[f"{POLICY}.variant"] == "gspo" else "dual_clip"
    if clip is not None and not is_robot(source):
        kind = "aipo"
        values[f"{_ALGORITHM}.aipo_rho"] = clip
    else:
        for side, none in (("low", 1.0), ("high", _NEVER_REACHED)):
            width = source[f"{POLICY}.epsilon_{side}"]
            unbounded = width < 0 or (side == "low" and width > 1)
            values[f"{_ALGORITHM}.eps_clip_{side}"] = none if unbounded else width
    values[f"{_ALGORITHM}.policy_loss_type"] = kind
    yield from _reduction(source, values)


def preferences(source: Resolved, values: dict[str, Any]) -> Iterator[Entry]:
    if not is_preference(source):
        return
    values["trainer.mode"], values["trainer.dpo.reference_free"] = "dpo", True
    found = {here: source["custom"][there] for there, here in CUSTOM_OF_DPO.items() if there in source["custom"]}
    losses, weights = found.get("loss_type", ["sigmoid"]), found.get("loss_weights", [])
    if isinstance(losses, list) and isinstance(weights, list) and len(losses) != len(weights):
        found["loss_weights"] = []  # the source takes 1 each then
    values.update({f"trainer.dpo.{name}": value for name, value in found.items()})
    message = f"{', '.join(CUSTOM_OF_DPO)} are beta, loss_type and loss_weights; without a reference, as there (reference_free)"
    if "sft" in losses:
        message += "; the likelihood of chosen answers is a mean over the tokens of all ranks, there of each rank"
    yield Entry("translated", "custom", "trainer.dpo", message)


def _reduction(source: Resolved, values: dict[str, Any]) -> Iterator[Entry]:
    kind, path = source[f"{POLICY}.loss_type"], f"{_ALGORITHM}.loss_reduction"
    if is_robot(source):
        values[path] = "seq_mean_token_mean"  # the only one of those trainers
    elif kind == "token-mean":
        values[path] = "token_mean" if source[f"{POLICY}.balance_dp_token"] else "token_mean_legacy"
    elif kind in _MEANS:
        values[path] = _MEANS[kind]
        if kind == "token-sum":
            message = (
                '"token_sum", the sum over a mini-batch; the source takes the mean of the sums of its micro-batches and ranks, so that '
                "its gradients are smaller by their number: mind trainer.policy.optimizer_config.max_grad_norm"
            )
            yield Entry("translated", f"{POLICY}.loss_type", path, message)
    else:
        yield Entry(
            "conflict", f"{POLICY}.loss_type", path, f'expected one of token-mean, {", ".join(_MEANS)}, found "{kind}"'
        )


def regularization(source: Resolved, values: dict[str, Any]) -> Iterator[Entry]:
    if not is_grpo(source):
        return
    weight, entropy = source[f"{POLICY}.kl_beta"], source[f"{POLICY}.entropy_coeff"]
    values[f"{_ALGORITHM}.use_kl_loss"] = bool(weight) and not is_robot(source)
    if values[f"{_ALGORITHM}.use_kl_loss"]:
        values[f"{_ALGORITHM}.kl_loss_coef"] = weight
    if entropy and is_language(source):
        values[f"{_ALGORITHM}.use_entropy_loss"] = True
        values[f"{_ALGORITHM}.entropy_loss_coef"] = entropy
    if source[f"{POLICY}.use_decoupled_loss"]:
        correction = f"{_ALGORITHM}.off_policy_correction"
        values[f"{correction}.tis_ratio_type"] = "token"
        values[f"{correction}.token_tis_ratio_clip_high"] = _NEVER_REACHED
    old_beta = "policy.diffusers.nft_beta" not in source.given and f"{POLICY}.remote_reward.reward_fn" in source.given
    if is_diffusion(source) and old_beta and weight > 0:
        values["trainer.policy.diffusers.nft_beta"] = weight
        message = f"{weight:g}; where reward_fn was a setting, it was also the beta of DiffusionNFT (trainer.policy.diffusers.nft_beta)"
        yield Entry("translated", f"{POLICY}.kl_beta", f"{_ALGORITHM}.kl_loss_coef", message)


def temperatures(source: Resolved, values: dict[str, Any]) -> Iterator[Entry]:
    if not is_grpo(source) or moves_by_flow(source):
        return
    path, own = f"{POLICY}.temperature", source[f"{POLICY}.temperature"]
    own, sampled = own if own > 1e-6 else 1.0, source["rollout.sampling_config.temperature"]
    values[f"{_ALGORITHM}.temperature"] = None
    if own != sampled:
        message = (
            f"training divides logits by {own:g}, sampling by {sampled:g} (rollout.sampling_config.temperature), so that the policy is "
            f"not the one that was sampled from; here both divide by {sampled:g}"
        )
        yield Entry("translated", path, f"{_ALGORITHM}.temperature", message)


def optimizer(source: Resolved, values: dict[str, Any]) -> Iterator[Entry]:
    rates, kinds = source["train.optm_lr"], source["train.optm_impl"]
    several = list(rates.values()) if isinstance(rates, dict) else rates if isinstance(rates, list) else [rates]
    values[f"{_OPTIMIZER}.lr"] = rates["global"] if isinstance(rates, dict) else several[0]
    if len(set(several)) > 1:
        message = f"{rates!r}: all parameters have one rate here; {values[f'{_OPTIMIZER}.lr']:g} is kept"
        yield Entry("conflict", "train.optm_lr", f"{_OPTIMIZER}.lr", message)
    names = kinds if isinstance(kinds, list) else [kinds]
    values[f"{_OPTIMIZER}.implementation"] = names[0] if names else "fused"
    if len(set(names)) > 1:
        message = f"{kinds!r}: all parameters have one here; {names[0]} is kept"
        yield Entry("conflict", "train.optm_impl", f"{_OPTIMIZER}.implementation", message)
    yield from _warm_up(source, values)
    kind = source["train.optm_decay_type"]
    values[f"{_OPTIMIZER}.scheduler"] = _SCHEDULERS.get(kind, kind)


def _warm_up(source: Resolved, values: dict[str, Any]) -> Iterator[Entry]:
    """The versions of Cosmos-RL rise differently; the setting optm_warmup_start_factor came with the later shape."""
    path, warm_up = "train.optm_warmup_steps", source["train.optm_warmup_steps"]
    is_share = isinstance(warm_up, float) and warm_up <= 1
    target = f"{_OPTIMIZER}.{'warmup_ratio' if is_share else 'num_warmup_steps'}"
    per_step = values["trainer.train_batch_size"] // values["trainer.policy_mini_batch_size"]
    per_step *= values.get("trainer.update_epochs_per_batch", 1)
    values[target] = warm_up if is_share else int(warm_up) * per_step
    later = "train.optm_warmup_start_factor" in source.given
    if not warm_up:
        return
    values[f"{_OPTIMIZER}.warmup_shape"] = "from_start" if later else "to_lr"
    shape = f'warmup_shape = "{"from_start" if later else "to_lr"}", as in Cosmos-RL '
    shape += "since optm_warmup_start_factor" if later else 'of January 2026; "from_start" for later versions'
    if per_step > 1:
        shape += f"; the rate rises with each of the {per_step} optimizer steps per step, in the source once a step"
    yield Entry("translated", path, target, f"{values[target]:g} ({shape})")


def placement(source: Resolved, values: dict[str, Any]) -> Iterator[Entry]:
    total, path = _ranks(source), f"{_PARALLELISM}.dp_shard_size"
    on_node = next(n for n in range(min(_NODE, total), 0, -1) if total % n == 0)
    values["trainer.placement.policy_num_nodes"] = total // on_node
    values["trainer.placement.policy_num_gpus_per_node"] = on_node
    engine = source["rollout.parallelism.tp_size"] * source["rollout.parallelism.pp_size"] if is_grpo(source) else 1
    values["slurm.gpus_per_node"] = max(on_node, min(_NODE, engine))
    if source[path] == -1:
        message = (
            f"the source takes as many GPUs as it is given; here trainer.placement sets the number, now {total}, the least that works: "
            "set trainer.placement.policy_num_nodes and policy_num_gpus_per_node"
        )
        yield Entry("conflict", path, "trainer.placement.policy_num_gpus_per_node", message)
    yield from _limit(source, values)
    for name, target in {"tp_size": "tensor_model", "pp_size": "pipeline_model", "ep_size": "expert_model"}.items():
        values[f"{_MEGATRON}.{target}_parallel_size"] = source[f"{_PARALLELISM}.{name}"]
    if needs_megatron(source):
        yield from _megatron(source, values)
        return
    size = source[f"{_PARALLELISM}.cp_size"]
    values["trainer.policy.sequence_parallel_size"] = size
    together = _shards(source) * size
    values["trainer.policy.fsdp_config.fsdp_size"] = -1 if source[path] == -1 or together == total else together
    values["trainer.use_sample_packing"] = source["train.sequence_packing"]


def _limit(source: Resolved, values: dict[str, Any]) -> Iterator[Entry]:
    path, target = f"{POLICY}.max_token_len_per_mini_batch", "trainer.max_tokens_per_micro_batch"
    size = source[f"{_PARALLELISM}.cp_size"]
    if is_grpo(source) and size > 1 and values.get(target):
        values[target] *= size
        message = f"{values[target]}: those of all {size} ranks that share the tokens of a sample; the source counts those of one"
        yield Entry("translated", path, target, message)


def _megatron(source: Resolved, values: dict[str, Any]) -> Iterator[Entry]:
    values["trainer.strategy"] = "megatron"
    values[f"{_MEGATRON}.context_parallel_size"] = source[f"{_PARALLELISM}.cp_size"]
    yield from _megatron_types(values)
    if values.pop("trainer.policy.compile_model", False):
        yield Entry("dropped", "train.compile", "", "Megatron-core fuses its layers' operations itself")
    schedule = f"{_MEGATRON}.pipeline_schedule"
    if values.get(schedule) == "GPipe":
        values[schedule] = "1F1B"
        yield Entry(
            "translated",
            f"{_PARALLELISM}.pp_schedule",
            schedule,
            '"1F1B" (Megatron-core has no GPipe; the gradients are the same)',
        )
    if source["train.fsdp_offload"]:
        message = (
            "parallelism within layers is Megatron's work here, which offloads the optimizer only: "
            f"{_MEGATRON}.optimizer_config_kwargs.optimizer_cpu_offload"
        )
        yield Entry("conflict", "train.fsdp_offload", "trainer.policy.fsdp_config.cpu_offload", message)


def _megatron_types(values: dict[str, Any]) -> Iterator[Entry]:
    fsdp = "trainer.policy.fsdp_config."
    dtype = values[f"{fsdp}mixed_precision.param_dtype"]
    for path in [path for path in values if path.startswith(fsdp)]:
        del values[path]
    if dtype == "fp16":
        yield Entry("conflict", "train.param_dtype", f"{_MEGATRON}.dtype", "Megatron computes in bf16 or fp32 here")
    else:
        values[f"{_MEGATRON}.dtype"] = values["trainer.ref.megatron_config.dtype"] = dtype
        yield Entry("translated", "train.param_dtype", f"{_MEGATRON}.dtype", f'"{dtype}"')
    reason = "Megatron spreads the optimizer, not the parameters, and keeps fp32 copies of what it trains in bf16"
    for name in ("master_dtype", "fsdp_reduce_dtype", "fsdp_reshard_after_forward"):
        yield Entry("dropped", f"train.{name}", "", reason)


def parameters(source: Resolved, values: dict[str, Any]) -> Iterator[Entry]:
    trained = source["policy.trainable_pattern"]
    if trained:
        values["trainer.policy.freeze_pattern"] = [f"^(?!.*(?:{'|'.join(trained)}))"]
    named = source["policy.trainable_map"] or {}
    if trained and any(named.values()):
        message = "policy.trainable_map trains more than these patterns; here what is frozen by a pattern stays frozen"
        yield Entry("conflict", "policy.trainable_pattern", "trainer.policy.freeze_pattern", message)


def checkpoints(source: Resolved, values: dict[str, Any]) -> Iterator[Entry]:
    ckpt, interval, exports = "train.ckpt", "trainer.ckpt_interval", "trainer.hf_save_interval"
    epochs = source[f"{ckpt}.save_freq_in_epoch"]
    if not source[f"{ckpt}.enable_checkpoint"]:
        values[interval] = values[exports] = -1
    elif epochs > 0:
        values["trainer.ckpt_interval_epochs"] = epochs
        if source[f"{ckpt}.export_safetensors"]:
            message = "exports by epochs have no setting here; set steps: trainer.hf_save_interval"
            yield Entry("conflict", f"{ckpt}.export_safetensors", exports, message)
    else:
        values[interval] = source[f"{ckpt}.save_freq"]
        # its last export is made in any case
        exported = source[f"{ckpt}.export_safetensors"] or source[f"{ckpt}.upload_hf"]
        values[exports] = source[f"{ckpt}.save_freq"] if exported else -1
    resume = source["train.resume"]
    values["trainer.resume_mode"] = "latest"
    if isinstance(resume, str) and resume:
        message = (
            f'"{resume}" is a checkpoint of Cosmos-RL, which cannot be read here; export its weights in Hugging Face format and name '
            "them in trainer.policy.model.path"
        )
        yield Entry("conflict", "train.resume", "trainer.resume_mode", message)
    elif resume:
        message = "an attempt continues its own run; to continue an earlier one, submit the run of that trainer.run_name again"
        yield Entry("translated", "train.resume", "trainer.resume_mode", message)


RULES: tuple[Rule, ...] = (
    batches,
    lengths,
    loss,
    preferences,
    regularization,
    temperatures,
    optimizer,
    placement,
    parameters,
    checkpoints,
)
