"""Combinations of trainer.mode with settings of other modes, and of algorithms that want something of other settings."""

from __future__ import annotations

from tests.config.rules.skyrl_cases import (
    ALGORITHM,
    CORRECTION,
    DISTILLATION,
    DPO,
    ENGINE,
    FOUR_GPUS,
    LORA,
    MEGATRON,
    NO_KL,
    REWARD_MODEL,
    SFT,
    STEP_WISE,
    Case,
)

ESTIMATED = {f"{ALGORITHM}.approximate_old_logprobs": True}
OBSERVED = {f"{ALGORITHM}.observation_nll_coef": 0.05}
TAUGHT = {f"{DISTILLATION}.enable": True, f"{DISTILLATION}.model_path": "t"}
MADE = {"data.train_data": [], "data.train_function": "a:b", "trainer.max_steps": 3}
GDPO = {f"{ALGORITHM}.advantage_estimator": "gdpo", f"{ALGORITHM}.gdpo.rewards": {"correct": 1.0, "format": 0.3}}

BALANCED, REPLAYED = {"trainer.policy.experts.aux_loss_coef": 0.01}, {"trainer.policy.experts.router_replay": "R3"}

OF_MODES = [
    Case(
        "one loss keeps experts busy",
        {**BALANCED, **FOUR_GPUS, **NO_KL, "trainer.strategy": "megatron", f"{MEGATRON}.moe_router_load_balancing_type": "aux_loss"},
        "trainer.policy.experts.aux_loss_coef", "is another loss for the same; set it to none, or this to 0",
        {**BALANCED, **FOUR_GPUS, **NO_KL, "trainer.strategy": "megatron"},
    ),
    Case(
        "tokens of a dataset went to no experts",
        {**SFT, **REPLAYED}, "trainer.policy.experts.router_replay", "no engine takes the tokens of a dataset to experts", {**SFT, **BALANCED},
    ),
    Case(
        "vLLM tells of experts on GPUs",
        {**REPLAYED, "slurm.gpus_per_node": 0, f"{ENGINE}.backend": "vllm"},
        "trainer.policy.experts.router_replay", 'set generator.inference_engine.backend to "transformers"',
        {**REPLAYED, "slurm.gpus_per_node": 0, f"{ENGINE}.backend": "transformers"},
    ),
    Case(
        "vLLM tells of experts by its prefix cache",
        {**REPLAYED, "slurm.gpus_per_node": 4, f"{ENGINE}.enable_prefix_caching": False},
        "trainer.policy.experts.router_replay", "enable_prefix_caching=true only",
        {**REPLAYED, "slurm.gpus_per_node": 4},
    ),
    Case(
        "rows of supervised fine-tuning have a longest one",
        {"trainer.mode": "sft"},
        "trainer.max_length", 'required with trainer.mode="sft"',
        {"trainer.mode": "sft", "trainer.max_length": 64},
    ),
    Case(
        "prompts without end end with max_steps",
        {**MADE, "trainer.max_steps": None},
        "trainer.max_steps", "required with data.train_function, whose prompts have no end", MADE,
    ),
    Case(
        "prompts that a function makes are all new",
        {**MADE, "data.curriculum.easy": 0.5},
        "data.curriculum", "has no effect on the prompts of data.train_function", MADE,
    ),
    Case(
        "a function is named by import path",
        {**MADE, "data.train_function": "rows"},
        "data.train_function", 'expected "package.module:function", found "rows"', MADE,
    ),
    Case(
        "no prompt is easy and hard",
        {"data.curriculum.easy": 0.25, "data.curriculum.easy_from": 0.5, "data.curriculum.hard_to": 0.5},
        "data.curriculum.hard_to", "expected less than data.curriculum.easy_from (0.5), found 0.5",
        {"data.curriculum.easy": 0.25, "data.curriculum.easy_from": 0.5, "data.curriculum.hard_to": 0.4},
    ),
    Case(
        "each dataset has a weight, or none",
        {**SFT, "data.weights": [1.0, 2.0]},
        "data.weights", "expected one per dataset of data.train_data (1), found 2",
        {**SFT, "data.weights": [2.0]},
    ),
    Case(
        "what rows of supervised fine-tuning are is of no concern to prompts",
        {"data.train_on_what": "all"},
        "data.train_on_what", 'has no effect without trainer.mode="sft"',
        {**SFT, "data.train_on_what": "all"},
    ),
    Case(
        "pairs have no format",
        {**DPO, "data.format": "text"},
        "data.format", 'has no effect without trainer.mode="sft"',
        {**DPO, "data.too_long": "drop"},
    ),
    Case(
        "pairs have no response",
        {**DPO, "data.response_column": "answer"},
        "data.response_column", 'has no effect without trainer.mode="rl" or "sft", data.val_prompts or data.label_column',
        {**DPO, "data.response_column": "answer", "data.val_prompts": ["p"]},
    ),
    Case(
        "only pairs have a chosen answer",
        {**SFT, "data.chosen_column": "good"},
        "data.chosen_column", 'has no effect without trainer.mode="dpo"',
        {**DPO, "data.chosen_column": "good"},
    ),
    Case(
        "the answers of a pair have columns of their own",
        {**DPO, "data.chosen_column": "rejected"},
        "data.rejected_column", "expected three columns of a pair",
        {**DPO, "data.chosen_column": "good", "data.rejected_column": "chosen"},
    ),
    Case(
        "the loss of pairs is a mean over pairs",
        {**DPO, f"{ALGORITHM}.loss_reduction": "sequence_mean"},
        f"{ALGORITHM}.loss_reduction", 'has no effect without trainer.mode="rl" or "sft"',
        {**SFT, f"{ALGORITHM}.loss_reduction": "sequence_mean"},
    ),
    Case(
        "settings of DPO want it",
        {**SFT, "trainer.dpo.beta": 0.2},
        "trainer.dpo.beta", 'has no effect without trainer.mode="dpo"',
        {**DPO, "trainer.dpo.beta": 0.2},
    ),
    Case(
        "only robust DPO knows of wrong pairs",
        {**DPO, "trainer.dpo.label_smoothing": 0.1},
        "trainer.dpo.label_smoothing", "has no effect without robust in trainer.dpo.loss_type",
        {**DPO, "trainer.dpo.label_smoothing": 0.1, "trainer.dpo.loss_type": ["robust"]},
    ),
    Case(
        "pairs have a loss",
        {**DPO, "trainer.dpo.loss_type": []},
        "trainer.dpo.loss_type", "expected at least one loss",
        {**DPO, "trainer.dpo.loss_type": ["bco_pair"]},
    ),
    Case(
        "losses of pairs have names",
        {**DPO, "trainer.dpo.loss_type": ["sigmoid", "bco"]},
        "trainer.dpo.loss_type", 'found "bco"',
        {**DPO, "trainer.dpo.loss_type": ["sigmoid", "bco_pair"]},
    ),
    Case(
        "drift is weighed by the sampled tokens",
        {**TAUGHT, f"{DISTILLATION}.iw_opd_gamma": 0.5, f"{DISTILLATION}.top_k": 4},
        f"{DISTILLATION}.iw_opd_gamma", f"has no effect without {DISTILLATION}.top_k=0",
        {**TAUGHT, f"{DISTILLATION}.iw_opd_gamma": 0.5},
    ),
    Case(
        "single answers have a loss alone",
        {**DPO, "trainer.dpo.loss_type": ["kto", "sft"]},
        "trainer.dpo.loss_type", "kto trains single answers, and stands alone",
        {**DPO, "trainer.dpo.loss_type": ["kto"]},
    ),
    Case(
        "single answers are compared with a reference",
        {**DPO, "trainer.dpo.loss_type": ["kto"], "trainer.dpo.reference_free": True},
        "trainer.dpo.reference_free", "kto compares with a reference",
        {**DPO, "trainer.dpo.loss_type": ["sigmoid"], "trainer.dpo.reference_free": True},
    ),
    Case(
        "only single answers have labels",
        {**DPO, "data.label_column": "label"},
        "data.label_column", "has no effect without kto or apo_zero_unpaired in trainer.dpo.loss_type",
        {**DPO, "data.label_column": "label", "data.response_column": "answer", "trainer.dpo.loss_type": ["apo_zero_unpaired"]},
    ),
    Case(
        "pairs that become single answers have columns of their own",
        {**DPO, "data.chosen_column": "rejected", "trainer.dpo.loss_type": ["kto"]},
        "data.rejected_column", "expected three columns of a pair",
        {**DPO, "data.chosen_column": "rejected", "data.label_column": "label", "trainer.dpo.loss_type": ["kto"]},
    ),
    Case(
        "each loss of pairs has a weight, or none",
        {**DPO, "trainer.dpo.loss_weights": [1.0, 2.0]},
        "trainer.dpo.loss_weights", "expected one per loss of loss_type (1), found 2",
        {**DPO, "trainer.dpo.loss_weights": [2.0]},
    ),
    Case(
        "a loss of single answers weighs desirable and undesirable ones alone",
        {**DPO, "trainer.dpo.loss_type": ["kto"], "trainer.dpo.loss_weights": [2.0]},
        "trainer.dpo.loss_weights", "kto stands alone; leave them out, and use desirable_weight and undesirable_weight",
        {**DPO, "trainer.dpo.loss_type": ["kto"], "trainer.dpo.desirable_weight": 2.0},
    ),
    Case(
        "no reference follows the policy where there is none",
        {**DPO, "trainer.update_ref_every_epoch": True, "trainer.dpo.reference_free": True},
        "trainer.update_ref_every_epoch", "there is no reference model with trainer.dpo.reference_free, or with simpo and orpo alone",
        {**DPO, "trainer.update_ref_every_epoch": True},
    ),
    Case(
        "the best of no more samples than there are is trained",
        {"trainer.algorithm.advantage_estimator": "pass_at_k", "trainer.algorithm.pass_at_k.k": 8, "generator.n_samples_per_prompt": 4},
        "trainer.algorithm.pass_at_k.k", "expected at most generator.n_samples_per_prompt=4",
        {"trainer.algorithm.advantage_estimator": "pass_at_k", "trainer.algorithm.pass_at_k.k": 4, "generator.n_samples_per_prompt": 4},
    ),
    Case(
        "losses that compare with no reference have none that follows the policy",
        {**DPO, "trainer.update_ref_every_epoch": True, "trainer.dpo.loss_type": ["sft", "simpo"]},
        "trainer.update_ref_every_epoch", "or with simpo and orpo alone",
        {**DPO, "trainer.update_ref_every_epoch": True, "trainer.dpo.loss_type": ["sigmoid", "simpo"]},
    ),
    Case(
        "supervised fine-tuning compares with no reference",
        {**SFT, "trainer.update_ref_every_epoch": True},
        "trainer.update_ref_every_epoch", 'there is no reference model with trainer.mode="sft"',
        {**DPO, "trainer.update_ref_every_epoch": True},
    ),
    Case(
        "a reward model begins with no adapters",
        {**REWARD_MODEL, f"{LORA}.rank": 8, f"{LORA}.adapter_path": "a"},
        f"{LORA}.adapter_path", "cannot begin with adapters; merge them",
        {**REWARD_MODEL, f"{LORA}.rank": 8},
    ),
    Case(
        "a reward model answers no prompts",
        {**REWARD_MODEL, "data.val_prompts": ["p"]},
        "data.val_prompts", 'has no effect without trainer.mode="sft" or "dpo"',
        {**DPO, "data.val_prompts": ["p"]},
    ),
    Case(
        "margins are of reward models",
        {**DPO, "data.margin_column": "margin"},
        "data.margin_column", 'has no effect without trainer.mode="reward_model"',
        {**REWARD_MODEL, "data.margin_column": "margin"},
    ),
    Case(
        "scores are centred of reward models",
        {"trainer.reward_model.center_rewards_coefficient": 0.1},
        "trainer.reward_model.center_rewards_coefficient", 'has no effect without trainer.mode="reward_model"',
        {**REWARD_MODEL, "trainer.reward_model.center_rewards_coefficient": 0.1},
    ),
    Case(
        "ranks share pairs equally",
        {**DPO, **FOUR_GPUS, "trainer.policy_mini_batch_size": 2, "trainer.train_batch_size": 8},
        "trainer.policy_mini_batch_size", "2 pairs cannot be shared equally by 4 trainer ranks (trainer.placement); make it a multiple of 4",
        {**DPO, **FOUR_GPUS, "trainer.policy_mini_batch_size": 4, "trainer.train_batch_size": 8},
    ),
    Case(
        "no critic is trained where nothing is rewarded",
        {**SFT, "trainer.critic.model.path": "critic"},
        "trainer.critic.model.path", 'has no effect without trainer.mode="rl"',
        {"trainer.critic.model.path": "critic"},
    ),
    Case(
        "supervised fine-tuning samples nothing but where it evaluates prompts",
        {**SFT, "generator.sampling_params.temperature": 0.5},
        "generator.sampling_params.temperature", 'has no effect without data.val_prompts, or trainer.mode="rl"',
        {**SFT, "generator.sampling_params.temperature": 0.5, "data.val_prompts": ["p"]},
    ),
    Case(
        "supervised fine-tuning has no advantages",
        {**SFT, f"{ALGORITHM}.eps_clip_low": 0.1},
        f"{ALGORITHM}.eps_clip_low", 'has no effect without trainer.mode="rl"',
        {**SFT, f"{ALGORITHM}.loss_reduction": "sequence_mean"},
    ),
    Case(
        "supervised fine-tuning has no replicas",
        {**SFT, "slurm.elastic.replicas": 2},
        "slurm.elastic.replicas", 'has no effect without data.val_prompts, or trainer.mode="rl"',
        {"slurm.elastic.replicas": 2},
    ),
]  # fmt: skip

OF_ALGORITHMS = [
    Case(
        "vespo has its own importance ratio",
        {f"{CORRECTION}.tis_ratio_type": "sequence", f"{ALGORITHM}.policy_loss_type": "vespo"},
        f"{CORRECTION}.tis_ratio_type", "the loss vespo has the ratio to the rollout already",
        {f"{CORRECTION}.token_mask_kl_threshold": 0.1, f"{ALGORITHM}.policy_loss_type": "vespo"},
    ),
    Case(
        "ipa has its own importance ratio",
        {f"{CORRECTION}.tis_ratio_type": "token", f"{ALGORITHM}.policy_loss_type": "ipa"},
        f"{CORRECTION}.tis_ratio_type", "the loss ipa has the ratio to the rollout already",
        {f"{CORRECTION}.tis_ratio_type": "token", f"{ALGORITHM}.policy_loss_type": "turn_gspo"},
    ),
    Case(
        "a mask by divergence wants two distributions",
        {f"{CORRECTION}.token_mask_kl_threshold": 0.1, f"{ALGORITHM}.use_rollout_logprobs_for_loss": True},
        f"{CORRECTION}.token_mask_kl_threshold", "old and rollout log-probabilities are the same",
        {f"{CORRECTION}.token_mask_kl_threshold": 0.1},
    ),
    Case(
        "a section of a loss wants that loss, a new one too",
        {f"{ALGORITHM}.dro.beta": 0.1},
        f"{ALGORITHM}.dro.beta", "policy_loss_type=dro",
        {f"{ALGORITHM}.dro.beta": 0.1, f"{ALGORITHM}.policy_loss_type": "dro"},
    ),
    Case(
        "gdpo wants rewards",
        {f"{ALGORITHM}.advantage_estimator": "gdpo"},
        f"{ALGORITHM}.gdpo.rewards", "such as {correct = 1.0, format = 0.3}",
        GDPO,
    ),
    Case(
        "rewards of gdpo want gdpo, or an estimator of the user's own",
        {f"{ALGORITHM}.gdpo.rewards": {"correct": 1.0}},
        f"{ALGORITHM}.gdpo.rewards", "has no effect without trainer.algorithm.advantage_estimator=gdpo",
        {f"{ALGORITHM}.gdpo.rewards": {"correct": 1.0}, f"{ALGORITHM}.advantage_estimator": "mine:estimator"},
    ),
    Case(
        "rewards of gdpo are among those that are given",
        {**GDPO, "environment.reward_function": {"gsm8k": 1.0, "format": 0.3}},
        f"{ALGORITHM}.gdpo.rewards", '"correct" is not in environment.reward_function, whose rewards are gsm8k, format',
        {**GDPO, "environment.reward_function": {"gsm8k": 1.0, "format": 0.3}, f"{ALGORITHM}.gdpo.rewards": {"reward": 1.0, "format": 0.3}},
    ),
    Case(
        "gdpo does not look at the reward of a sample",
        {**GDPO, "generator.zero_reward_on_non_stop": True},
        "generator.zero_reward_on_non_stop", "gdpo looks at all of trainer.algorithm.gdpo.rewards",
        GDPO,
    ),
    Case(
        "there are several turns where observations are learned",
        OBSERVED,
        f"{ALGORITHM}.observation_nll_coef", "has no effect with generator.max_turns=1",
        {**OBSERVED, "generator.max_turns": 3},
    ),
    Case(
        "agents are answered too",
        {**OBSERVED, **STEP_WISE},
        f"{ALGORITHM}.observation_nll_coef", "has no effect with generator.step_wise_trajectories",
        {**OBSERVED, f"{ENGINE}.enable_http_endpoint": True},
    ),
    Case(
        "old log-probabilities are estimated where they would be computed",
        {**ESTIMATED, "trainer.train_batch_size": 256},
        f"{ALGORITHM}.approximate_old_logprobs", "lower trainer.policy_mini_batch_size (256)",
        {**ESTIMATED, "trainer.train_batch_size": 256, "trainer.update_epochs_per_batch": 2},
    ),
    Case(
        "old log-probabilities are estimated or the rollout's",
        {**ESTIMATED, f"{ALGORITHM}.use_rollout_logprobs_for_loss": True},
        f"{ALGORITHM}.approximate_old_logprobs", "where the rollout's take their place",
        ESTIMATED,
    ),
    Case(
        "a penalty on rewards wants old log-probabilities before the update",
        {**ESTIMATED, **NO_KL, f"{ALGORITHM}.use_kl_in_reward": True},
        f"{ALGORITHM}.approximate_old_logprobs", "trainer.algorithm.use_kl_in_reward needs them before the policy is updated",
        {**ESTIMATED, f"{CORRECTION}.tis_ratio_type": "token"},
    ),
    Case(
        "layers of a teacher are not compiled for each micro-batch",
        {"trainer.shared_prefixes": True, "trainer.max_tokens_per_micro_batch": 4096, **TAUGHT, f"{DISTILLATION}.compile_model": True},
        "trainer.shared_prefixes", "would be compiled again for each micro-batch; set trainer.distillation.compile_model to false",
        {"trainer.shared_prefixes": True, "trainer.max_tokens_per_micro_batch": 4096, **TAUGHT},
    ),
]  # fmt: skip
