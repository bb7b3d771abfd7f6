"""Which fields of Cosmos-RL have no effect in a run, because of how others are set."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from hpcrl.convert.cosmos.resolve import Resolved

POLICY = "train.train_policy"
_SAMPLING = ("temperature", "top_p", "top_k", "repetition_penalty", "n_generation", "max_response_length")
CUSTOM_OF_DPO = {"dpo_beta": "beta", "dpo_loss_type": "loss_type", "dpo_loss_weights": "loss_weights"}
"""Settings of the trainer "dpo" in the table custom, and what they are called in trainer.dpo."""
ROBOT_TRAINERS = ("grpo_vla", "grpo_pi05", "pi_sft", "cosmos_policy")


@dataclass(frozen=True)
class Condition:
    """Under which condition some fields have an effect.

    Attributes:
        paths: fields, or tables of fields.
        needs: the condition, for the report.
        holds: whether it holds in a configuration.
        but: fields in those tables that always have an effect.
    """

    paths: tuple[str, ...]
    needs: str
    holds: Callable[[Resolved], bool]
    but: tuple[str, ...] = ()

    def covers(self, path: str) -> bool:
        return path not in self.but and any(path == own or path.startswith(own + ".") for own in self.paths)


def without_effect(source: Resolved) -> dict[str, str]:
    """Return the paths of fields without effect, each with what they need."""
    unmet = [condition for condition in _CONDITIONS if not condition.holds(source)]
    return {path: condition.needs for condition in reversed(unmet) for path in source.values if condition.covers(path)}


def is_grpo(source: Resolved) -> bool:
    return source[f"{POLICY}.type"] == "grpo"


def is_robot(source: Resolved) -> bool:
    """Return whether the model moves robots: its trainer or its rollouts are of that kind."""
    return source[f"{POLICY}.trainer_type"] in ROBOT_TRAINERS or source["rollout.backend"] == "vla"


def moves_by_flow(source: Resolved) -> bool:
    """Return whether the model moves robots by numbers that a flow makes, and not by tokens."""
    return is_robot(source) and source["vla.vla_type"] == "pi05"


def is_preference(source: Resolved) -> bool:
    """Return whether pairs are trained, by the trainer whose settings stand in the table custom."""
    return source[f"{POLICY}.trainer_type"] == "dpo"


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


_CONDITIONS = (
    Condition(("rollout", "distillation", "mode", "train.sync_weight_interval", "train.logprob_dtype"), 'type = "grpo"', is_grpo),
    Condition(
        tuple(f"validation.{name}" for name in _SAMPLING),
        'type = "grpo"',
        is_grpo,
    ),
    Condition(("validation",), "validation.enable", lambda source: source["validation.enable"], ("validation.enable",)),
    Condition(("distillation",), "distillation.enable", lambda source: source["distillation.enable"], ("distillation.enable",)),
    Condition(
        tuple(f"distillation.{name}" for name in ("jsd_beta", "trainer_token_ids_from_teacher", "rollout_top_k_recompute")),
        "distillation.top_k",
        lambda source: source["distillation.top_k"] > 0,
    ),
    Condition(("policy.diffusers",), "policy.is_diffusers", is_diffusion),
    Condition(("train.ema_enable", "train.ema_decay", "train.ema_update_step_interval"), "policy.is_diffusers", is_diffusion),
    Condition(_of_policy("advantage_low", "advantage_high"), "policy.is_diffusers", is_diffusion),
    Condition(("logging.multi_modal_log_interval",), "policy.is_diffusers", is_diffusion),
    Condition(("vla",), "a trainer of robots", is_robot),
    Condition(
        (f"{POLICY}.temperature", "rollout.sampling_config", "rollout.max_response_length", "train.compile", *(f"validation.{name}" for name in _SAMPLING if name != "n_generation")),
        "a policy that chooses among tokens",
        lambda source: not moves_by_flow(source),
    ),
    Condition(_of_policy("balance_dp_token"), 'type = "grpo"', is_grpo),
    Condition(
        _of_policy("remote_reward"),
        f"{POLICY}.use_remote_reward",
        lambda source: is_grpo(source) and source[f"{POLICY}.use_remote_reward"],
    ),
    Condition(_of_policy("reward_function"), "rewards that the run computes itself", scores_itself),
    Condition(("validation.reward_function",), "rewards that the run computes itself", scores_itself),
    Condition(
        _of_policy("overlong_reward"),
        f"overlong in {POLICY}.reward_function",
        lambda source: scores_itself(source) and "overlong" in source[f"{POLICY}.reward_function"],
    ),
    Condition(
        ("rollout.multi_turn_config",),
        "rollout.multi_turn_config.enable",
        lambda source: source["rollout.multi_turn_config.enable"],
        ("rollout.multi_turn_config.enable",),
    ),
    Condition(
        tuple(f"policy.parallelism.{name}" for name in ("pp_dynamic_shape", "pp_micro_batch_size", "pp_schedule")),
        "a pipeline (policy.parallelism.pp_size)",
        has_pipeline,
    ),
    Condition(
        ("policy.parallelism.pp_layers_per_stage",),
        'a pipeline with pp_schedule = "Interleaved1F1B"',
        lambda source: has_pipeline(source) and source["policy.parallelism.pp_schedule"] == "Interleaved1F1B",
    ),
    Condition(_of_policy("kl_beta", "mini_batch", "mu_iterations"), "a trainer of other models than robots'", lambda source: not is_robot(source)),
    Condition(
        _of_policy("entropy_coeff", "loss_type", "min_filter_prefix_tokens", "positive_nll_coef", "aipo_rho", "balance_dp_token"),
        "a trainer of language models",
        is_language,
    ),
    Condition(
        _of_policy("unbiased_kl_estimate", "reference_reset_interval", "reset_optimizer_with_reference"),
        f"{POLICY}.kl_beta",
        _compares,
    ),
    Condition(
        _of_policy("lower_bound_ratio"),
        "the loss of the variants grpo and dapo",
        lambda source: is_grpo(source)
        and is_language(source)
        and source[f"{POLICY}.variant"] != "gspo"
        and source[f"{POLICY}.aipo_rho"] is None,
    ),
    Condition(
        _of_policy("epsilon_low", "epsilon_high"),
        "a loss that clips: neither aipo nor one of diffusion models",
        lambda source: is_grpo(source)
        and not is_diffusion(source)
        and (is_robot(source) or source[f"{POLICY}.aipo_rho"] is None),
    ),
    Condition(
        _of_policy("unbiased_loss_max_tokens"),
        'loss_type = "seq-mean-token-mean" and a number above 0',
        lambda source: is_grpo(source)
        and source[f"{POLICY}.loss_type"] == "seq-mean-token-mean"
        and (source[f"{POLICY}.unbiased_loss_max_tokens"] or 0) > 0,
    ),
    Condition(
        _of_policy("behav_imp_weight_cap"),
        f"{POLICY}.use_decoupled_loss",
        lambda source: is_grpo(source) and source[f"{POLICY}.use_decoupled_loss"],
    ),
    Condition(
        _of_policy("max_retry_for_on_policy"),
        'variant = "dapo"',
        lambda source: is_grpo(source) and source[f"{POLICY}.variant"] == "dapo",
    ),
    Condition(_of_policy("dataloader_seed"), "dataloader_shuffle", lambda source: source[f"{POLICY}.dataloader_shuffle"]),
    Condition(
        _of_policy("dataset.test_size"),
        "evaluation on a share of the training data (validation.enable, and no dataset there)",
        lambda source: source["validation.enable"] and not source["validation.dataset.name"],
    ),
    Condition(
        _of_policy("load_balanced_max_tokens_for_batch", "load_balanced_batches_per_optimizer_step"),
        f"{POLICY}.enable_dp_load_balancing",
        lambda source: not is_grpo(source) and source[f"{POLICY}.enable_dp_load_balancing"],
    ),
    Condition(("train.optm_decay_ratio", "train.optm_min_lr_factor"), "train.optm_decay_type", _decays),
    Condition(("train.ckpt",), "enable_checkpoint", lambda source: source["train.ckpt.enable_checkpoint"], ("train.ckpt.enable_checkpoint",)),
    Condition(("train.ckpt.hf_repo_name",), "upload_hf", lambda source: source["train.ckpt.upload_hf"]),
    Condition(("train.ckpt.s3_bucket", "train.ckpt.s3_prefix"), "upload_s3", lambda source: bool(source["train.ckpt.upload_s3"])),
    Condition(("train.fp8.fp8_recipe", "train.fp8.quant_recipe"), "enable_fp8", lambda source: source["train.fp8.enable_fp8"]),
    Condition(("train.fp4.fp4_recipe", "train.fp4.quant_recipe"), "enable_fp4", lambda source: source["train.fp4.enable_fp4"]),
)  # fmt: skip
