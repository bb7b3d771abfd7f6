"""Which fields of Cosmos-RL have no effect in a run, because of how others are set."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from hpcrl.config.convert.cosmos_resolve import Resolved

POLICY = "train.train_policy"
_SAMPLING = ("temperature", "top_p", "top_k", "repetition_penalty", "n_generation", "max_response_length")
ROBOT_TRAINERS = ("grpo_vla", "grpo_pi05", "pi_sft", "cosmos_policy")


@dataclass(frozen=True)
class Idle:
    """Fields that only count under a condition.

    Attributes:
        paths: fields, or tables of fields.
        without: what is missing, when they do not count.
        counts: whether they do.
        but: fields in those tables that count in any case.
    """

    paths: tuple[str, ...]
    without: str
    counts: Callable[[Resolved], bool]
    but: tuple[str, ...] = ()

    def covers(self, path: str) -> bool:
        return path not in self.but and any(path == own or path.startswith(own + ".") for own in self.paths)


def idle(source: Resolved) -> dict[str, str]:
    """Return the paths of fields that do not count, each with what they lack."""
    asleep = [part for part in _IDLE if not part.counts(source)]
    return {path: part.without for part in reversed(asleep) for path in source.values if part.covers(path)}


def is_grpo(source: Resolved) -> bool:
    return source[f"{POLICY}.type"] == "grpo"


def is_robot(source: Resolved) -> bool:
    """Return whether the model moves robots: its trainer or its rollouts are of that kind."""
    return source[f"{POLICY}.trainer_type"] in ROBOT_TRAINERS or source["rollout.backend"] == "vla"


def is_diffusion(source: Resolved) -> bool:
    return source["policy.is_diffusers"]


def has_pipeline(source: Resolved) -> bool:
    return source["policy.parallelism.pp_size"] > 1


def needs_megatron(source: Resolved) -> bool:
    """Return whether layers, matrices or experts are split, which is Megatron's work here."""
    return any(source[f"policy.parallelism.{name}"] > 1 for name in ("tp_size", "pp_size", "ep_size"))


def scores_itself(source: Resolved) -> bool:
    """Return whether rewards are computed in the run, by the functions that are listed."""
    if not is_grpo(source) or is_robot(source) or is_diffusion(source):
        return False
    return not source[f"{POLICY}.use_remote_reward"] and not source[f"{POLICY}.bypass_reward"]


def _decays(source: Resolved) -> bool:
    return source["train.optm_decay_type"] not in (None, "none", "None")


def _compares(source: Resolved) -> bool:
    return bool(is_grpo(source) and source[f"{POLICY}.kl_beta"])


def is_language(source: Resolved) -> bool:
    return not is_robot(source) and not is_diffusion(source)


def _of_policy(*names: str) -> tuple[str, ...]:
    return tuple(f"{POLICY}.{name}" for name in names)


_IDLE = (
    Idle(("rollout", "distillation", "mode", "train.sync_weight_interval", "train.logprob_dtype"), 'type = "grpo"', is_grpo),
    Idle(
        tuple(f"validation.{name}" for name in _SAMPLING),
        'type = "grpo"',
        is_grpo,
    ),
    Idle(("validation",), "validation.enable", lambda source: source["validation.enable"], ("validation.enable",)),
    Idle(("distillation",), "distillation.enable", lambda source: source["distillation.enable"], ("distillation.enable",)),
    Idle(
        tuple(f"distillation.{name}" for name in ("jsd_beta", "trainer_token_ids_from_teacher", "rollout_top_k_recompute")),
        "distillation.top_k",
        lambda source: source["distillation.top_k"] > 0,
    ),
    Idle(("policy.diffusers",), "policy.is_diffusers", is_diffusion),
    Idle(("train.ema_enable", "train.ema_decay", "train.ema_update_step_interval"), "policy.is_diffusers", is_diffusion),
    Idle(_of_policy("advantage_low", "advantage_high"), "policy.is_diffusers", is_diffusion),
    Idle(("vla",), "a trainer of robots", is_robot),
    Idle(_of_policy("balance_dp_token"), 'type = "grpo"', is_grpo),
    Idle(
        _of_policy("remote_reward"),
        f"{POLICY}.use_remote_reward",
        lambda source: is_grpo(source) and source[f"{POLICY}.use_remote_reward"],
    ),
    Idle(_of_policy("reward_function"), "rewards that the run computes itself", scores_itself),
    Idle(("validation.reward_function",), "rewards that the run computes itself", scores_itself),
    Idle(
        _of_policy("overlong_reward"),
        f"overlong in {POLICY}.reward_function",
        lambda source: scores_itself(source) and "overlong" in source[f"{POLICY}.reward_function"],
    ),
    Idle(
        ("rollout.multi_turn_config",),
        "rollout.multi_turn_config.enable",
        lambda source: source["rollout.multi_turn_config.enable"],
        ("rollout.multi_turn_config.enable",),
    ),
    Idle(
        tuple(f"policy.parallelism.{name}" for name in ("pp_dynamic_shape", "pp_micro_batch_size", "pp_schedule")),
        "a pipeline (policy.parallelism.pp_size)",
        has_pipeline,
    ),
    Idle(
        ("policy.parallelism.pp_layers_per_stage",),
        'a pipeline with pp_schedule = "Interleaved1F1B"',
        lambda source: has_pipeline(source) and source["policy.parallelism.pp_schedule"] == "Interleaved1F1B",
    ),
    Idle(_of_policy("kl_beta", "mini_batch", "mu_iterations"), "a trainer of other models than robots'", lambda source: not is_robot(source)),
    Idle(
        _of_policy("entropy_coeff", "loss_type", "min_filter_prefix_tokens", "positive_nll_coef", "aipo_rho", "balance_dp_token"),
        "a trainer of language models",
        is_language,
    ),
    Idle(
        _of_policy("unbiased_kl_estimate", "reference_reset_interval", "reset_optimizer_with_reference"),
        f"{POLICY}.kl_beta",
        _compares,
    ),
    Idle(
        _of_policy("lower_bound_ratio"),
        "the loss of the variants grpo and dapo",
        lambda source: is_grpo(source)
        and is_language(source)
        and source[f"{POLICY}.variant"] != "gspo"
        and source[f"{POLICY}.aipo_rho"] is None,
    ),
    Idle(
        _of_policy("epsilon_low", "epsilon_high"),
        "a loss that clips: neither aipo nor one of diffusion models",
        lambda source: is_grpo(source)
        and not is_diffusion(source)
        and (is_robot(source) or source[f"{POLICY}.aipo_rho"] is None),
    ),
    Idle(
        _of_policy("unbiased_loss_max_tokens"),
        'loss_type = "seq-mean-token-mean" and a number above 0',
        lambda source: is_grpo(source)
        and source[f"{POLICY}.loss_type"] == "seq-mean-token-mean"
        and (source[f"{POLICY}.unbiased_loss_max_tokens"] or 0) > 0,
    ),
    Idle(
        _of_policy("behav_imp_weight_cap"),
        f"{POLICY}.use_decoupled_loss",
        lambda source: is_grpo(source) and source[f"{POLICY}.use_decoupled_loss"],
    ),
    Idle(
        _of_policy("max_retry_for_on_policy"),
        'variant = "dapo"',
        lambda source: is_grpo(source) and source[f"{POLICY}.variant"] == "dapo",
    ),
    Idle(_of_policy("dataloader_seed"), "dataloader_shuffle", lambda source: source[f"{POLICY}.dataloader_shuffle"]),
    Idle(
        _of_policy("dataset.test_size"),
        "evaluation on a share of the training data (validation.enable, and no dataset there)",
        lambda source: source["validation.enable"] and not source["validation.dataset.name"],
    ),
    Idle(
        _of_policy("load_balanced_max_tokens_for_batch", "load_balanced_batches_per_optimizer_step"),
        f"{POLICY}.enable_dp_load_balancing",
        lambda source: not is_grpo(source) and source[f"{POLICY}.enable_dp_load_balancing"],
    ),
    Idle(("train.optm_decay_ratio", "train.optm_min_lr_factor"), "train.optm_decay_type", _decays),
    Idle(("train.ckpt",), "enable_checkpoint", lambda source: source["train.ckpt.enable_checkpoint"], ("train.ckpt.enable_checkpoint",)),
    Idle(("train.ckpt.hf_repo_name",), "upload_hf", lambda source: source["train.ckpt.upload_hf"]),
    Idle(("train.ckpt.s3_bucket", "train.ckpt.s3_prefix"), "upload_s3", lambda source: bool(source["train.ckpt.upload_s3"])),
    Idle(("train.fp8.fp8_recipe", "train.fp8.quant_recipe"), "enable_fp8", lambda source: source["train.fp8.enable_fp8"]),
    Idle(("train.fp4.fp4_recipe", "train.fp4.quant_recipe"), "enable_fp4", lambda source: source["train.fp4.enable_fp4"]),
)  # fmt: skip
