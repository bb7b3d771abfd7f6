"""Combinations that Cosmos-RL refuses."""

from __future__ import annotations

from tests.config.rules.skyrl_cases import (
    ALGORITHM,
    CORRECTION,
    DISTILLATION,
    LORA,
    NO_KL,
    OPTIMIZER,
    SFT,
    Case,
)

# spec/cosmos, section 14 and the rules of its schema, where they apply here.
COSMOS = [
    Case(
        "strictly on-policy training gets weights at each step",
        {"trainer.fully_async.sync_weight_interval": 2},
        "trainer.fully_async.max_staleness_steps", "expected at least 1, because engines get weights every 2 steps",
        {"trainer.fully_async.sync_weight_interval": 2, "trainer.fully_async.max_staleness_steps": 1},
    ),
    Case(
        "rollout log-probabilities as the old policy exclude a correction between the two",
        {f"{ALGORITHM}.use_rollout_logprobs_for_loss": True, f"{CORRECTION}.tis_ratio_type": "token"},
        f"{CORRECTION}.tis_ratio_type", "leave one of them out",
        {f"{CORRECTION}.tis_ratio_type": "token"},
    ),
    Case(
        "dropped tokens belong to weights of tokens",
        {f"{CORRECTION}.token_tis_ratio_drop_high": 2.0}, f"{CORRECTION}.token_tis_ratio_drop_high", 'without trainer.algorithm.off_policy_correction.tis_ratio_type="token"',
        {f"{CORRECTION}.token_tis_ratio_drop_high": 2.0, f"{CORRECTION}.tis_ratio_type": "token"},
    ),
    Case(
        "adapters that begin at 0 stay there",
        {f"{LORA}.rank": 8, f"{LORA}.init_method": "zero"}, f"{LORA}.init_method", "no gradient would reach either",
        {f"{LORA}.rank": 8, f"{LORA}.init_method": "xavier"},
    ),
    Case(
        "a reference of its own does not follow adapters",
        {f"{LORA}.rank": 8, "trainer.update_ref_every_epoch": True, "trainer.algorithm.use_kl_loss": True, "trainer.ref.model.path": "other"},
        "trainer.update_ref_every_epoch", "leave out the model, rope settings and number type of trainer.ref",
        {f"{LORA}.rank": 8, "trainer.update_ref_every_epoch": True, "trainer.algorithm.use_kl_loss": True},
    ),
    Case(
        "given adapters are trained alone",
        {f"{LORA}.rank": 8, f"{LORA}.modules_to_save": ["embed_tokens"], f"{LORA}.adapter_path": "a"},
        f"{LORA}.modules_to_save", "leave it or trainer.policy.model.lora.adapter_path out",
        {f"{LORA}.rank": 8, f"{LORA}.adapter_path": "a"},
    ),
    Case(
        "modules that are trained whole reach engines merged",
        {f"{LORA}.rank": 8, f"{LORA}.modules_to_save": ["embed_tokens"], "generator.inference_engine.fully_sharded_loras": True},
        "generator.inference_engine.fully_sharded_loras", "adapters that engines load",
        {f"{LORA}.rank": 8, "generator.inference_engine.fully_sharded_loras": True},
    ),
    Case(
        "beside adapters the map only freezes",
        {f"{LORA}.rank": 8, "trainer.policy.trainable_map": {"lm_head": True}},
        "trainer.policy.trainable_map.lm_head", "trainer.policy.model.lora.modules_to_save",
        {f"{LORA}.rank": 8, "trainer.policy.trainable_map": {"lm_head": False}},
    ),
    Case(
        "prefetching needs workers",
        {**SFT, "data.prefetch_factor": 4}, "data.prefetch_factor", "has no effect without data.num_workers",
        {**SFT, "data.prefetch_factor": 4, "data.num_workers": 1},
    ),
    Case(
        "one reset of the reference is enough",
        {f"{ALGORITHM}.reference_reset_interval": 5, "trainer.update_ref_every_epoch": True},
        "trainer.update_ref_every_epoch", "leave one of them out",
        {f"{ALGORITHM}.reference_reset_interval": 5},
    ),
    Case(
        "only a divergence in the loss has a gradient",
        {f"{ALGORITHM}.kl_importance_weighted": True, **NO_KL, f"{ALGORITHM}.use_kl_in_reward": True},
        f"{ALGORITHM}.kl_importance_weighted", "has no effect without trainer.algorithm.use_kl_loss",
        {f"{ALGORITHM}.kl_importance_weighted": True},
    ),
    Case(
        "an optimizer is only reset with the reference",
        {f"{ALGORITHM}.reset_optimizer_with_reference": False},
        f"{ALGORITHM}.reset_optimizer_with_reference", "has no effect without trainer.algorithm.reference_reset_interval",
        {f"{ALGORITHM}.reset_optimizer_with_reference": False, f"{ALGORITHM}.reference_reset_interval": 5},
    ),
    Case(
        "a reset needs a reference",
        {f"{ALGORITHM}.reference_reset_interval": 5, **NO_KL},
        f"{ALGORITHM}.reference_reset_interval", "set one of them, or leave this out",
        {f"{ALGORITHM}.reference_reset_interval": 5, **NO_KL, f"{ALGORITHM}.use_kl_in_reward": True},
    ),
    Case(
        "the constant divisor belongs to one reduction",
        {f"{ALGORITHM}.unbiased_loss_max_tokens": 99}, f"{ALGORITHM}.unbiased_loss_max_tokens", "without trainer.algorithm.loss_reduction=seq_mean_token_mean",
        {f"{ALGORITHM}.unbiased_loss_max_tokens": 99, f"{ALGORITHM}.loss_reduction": "seq_mean_token_mean"},
    ),
    Case(
        "distillation needs a teacher",
        {f"{DISTILLATION}.enable": True}, f"{DISTILLATION}.model_path", "required with trainer.distillation.enable",
        {f"{DISTILLATION}.enable": True, f"{DISTILLATION}.model_path": "t"},
    ),
    Case(
        "one low precision at a time",
        {"trainer.policy.low_precision.fp8": True, "trainer.policy.low_precision.fp4": True},
        "trainer.policy.low_precision.fp4", "set one of them to false",
        {"trainer.policy.low_precision.fp8": True},
    ),
    Case(
        "a reward service is asked for something",
        {"environment.remote_reward.enable": True}, "environment.remote_reward.reward_function", "with their weights",
        {"environment.remote_reward.enable": True, "environment.remote_reward.reward_function": {"ocr": 1.0}},
    ),
    Case(
        "warm-up is given once",
        {f"{OPTIMIZER}.warmup_ratio": 0.1, f"{OPTIMIZER}.num_warmup_steps": 5}, f"{OPTIMIZER}.warmup_ratio", "set num_warmup_steps=0",
        {f"{OPTIMIZER}.warmup_ratio": 0.1},
    ),
    Case(
        "warm-up and decay fit into the steps",
        {f"{OPTIMIZER}.scheduler": "linear", f"{OPTIMIZER}.warmup_ratio": 0.6, f"{OPTIMIZER}.decay_ratio": 0.5},
        f"{OPTIMIZER}.decay_ratio", "lower one of them",
        {f"{OPTIMIZER}.scheduler": "linear", f"{OPTIMIZER}.warmup_ratio": 0.5, f"{OPTIMIZER}.decay_ratio": 0.5},
    ),
    Case(
        "evaluation has one source",
        {"data.test_size": 0.1}, "data.test_size", "leave one of them out",
        {"data.test_size": 0.1, "data.val_data": []},
    ),
]  # fmt: skip
