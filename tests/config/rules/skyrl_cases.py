"""Combinations that SkyRL refuses, where they apply here; what the cases of rules are made of."""

from __future__ import annotations

from typing import Any, NamedTuple

BASE = {"data.train_data": ["t"], "data.val_data": ["v"], "trainer.policy.model.path": "m"}
ALGORITHM = "trainer.algorithm"
CORRECTION = "trainer.algorithm.off_policy_correction"
DIFFUSERS = "trainer.policy.diffusers"
DISTILLATION = "trainer.distillation"
ENGINE = "generator.inference_engine"
LORA = "trainer.policy.model.lora"
MEGATRON = "trainer.policy.megatron_config"
OPTIMIZER = "trainer.policy.optimizer_config"
PLACEMENT = "trainer.placement"
CRITIC = {"trainer.critic.model.path": "c"}
FOUR_GPUS = {f"{PLACEMENT}.policy_num_gpus_per_node": 4}
COLOCATED = {f"{PLACEMENT}.colocate_all": True}
LENDS = {f"{PLACEMENT}.lend": True}
GYM = "environment.skyrl_gym"
SERVICE = {"environment.remote_reward.enable": True, "environment.remote_reward.reward_function": {"ocr": 1.0}}
REWARD_MODEL = {"trainer.mode": "reward_model", "trainer.max_length": 64}
REWARD_SERVICE = {"environment.remote_reward.enable": True, "environment.remote_reward.service.model": "r"}
NO_KL = {f"{ALGORITHM}.use_kl_loss": False}
SFT = {"trainer.mode": "sft", "trainer.max_length": 64}
DPO = {"trainer.mode": "dpo", "trainer.max_length": 64}
STEP_WISE = {"generator.step_wise_trajectories": True, "generator.max_turns": 3}
MEGATRON_4 = {**FOUR_GPUS, **NO_KL, "trainer.strategy": "megatron"}

TAUGHT = {f"{DISTILLATION}.enable": True, f"{DISTILLATION}.model_path": "t"}
EXPERTS = "trainer.policy.fsdp_config.expert_parallel_size"
SHARING = f"{DISTILLATION}.placement.sequence_parallel_size"


class Case(NamedTuple):
    """A combination that a rule refuses, where, with which words, and one nearby that it does not refuse."""

    rule: str
    wrong: dict[str, Any]
    path: str
    words: str
    right: dict[str, Any]


# spec/skyrl, section 8: what construction and validation refuse, where it applies here.
SKYRL = [
    Case(
        "the train batch is a multiple of the policy's mini-batch",
        {"trainer.train_batch_size": 100, "trainer.policy_mini_batch_size": 16},
        "trainer.train_batch_size", "expected a multiple of trainer.policy_mini_batch_size (16), found 100",
        {"trainer.train_batch_size": 96, "trainer.policy_mini_batch_size": 16},
    ),
    Case(
        "the train batch is not smaller than the mini-batch",
        {"trainer.train_batch_size": 160, "trainer.policy_mini_batch_size": 320},
        "trainer.train_batch_size", "expected a multiple of trainer.policy_mini_batch_size (320), found 160",
        {"trainer.train_batch_size": 320, "trainer.policy_mini_batch_size": 320},
    ),
    Case(
        "the train batch is a multiple of the critic's mini-batch",
        {"trainer.critic_mini_batch_size": 7, **CRITIC},
        "trainer.train_batch_size", "expected a multiple of trainer.critic_mini_batch_size (7), found 1024",
        {"trainer.critic_mini_batch_size": 8, **CRITIC},
    ),
    Case(
        "mini-batch times samples is shared equally by the ranks, which SkyRL forgets",
        {**FOUR_GPUS, "trainer.policy_mini_batch_size": 2, "generator.n_samples_per_prompt": 3},
        "trainer.policy_mini_batch_size", "make the product a multiple of 4",
        {**FOUR_GPUS, "trainer.policy_mini_batch_size": 2, "generator.n_samples_per_prompt": 2},
    ),
    Case(
        "ranks that share a sample get one share",
        {**FOUR_GPUS, "trainer.policy.sequence_parallel_size": 2, "trainer.policy_mini_batch_size": 1},
        "trainer.policy_mini_batch_size", "make the product a multiple of 2",
        {**FOUR_GPUS, "trainer.policy.sequence_parallel_size": 4, "trainer.policy_mini_batch_size": 1},
    ),
    Case(
        "the critic's mini-batch is shared equally by the critic's ranks",
        {**CRITIC, f"{PLACEMENT}.critic_num_gpus_per_node": 3},
        "trainer.critic_mini_batch_size", "make the product a multiple of 3",
        {**CRITIC, f"{PLACEMENT}.critic_num_gpus_per_node": 5},
    ),
    Case(
        "each rank has a sample, also where nobody knows how many turns they have",
        {
            **FOUR_GPUS, "generator.step_wise_trajectories": True, "generator.max_turns": 2,
            "trainer.train_batch_size": 2, "trainer.policy_mini_batch_size": 2, "generator.n_samples_per_prompt": 1,
        },
        "trainer.train_batch_size", "fewer than 4",
        {
            **FOUR_GPUS, "generator.step_wise_trajectories": True, "generator.max_turns": 2,
            "trainer.train_batch_size": 4, "trainer.policy_mini_batch_size": 4, "generator.n_samples_per_prompt": 1,
        },
    ),
    Case(
        "Ulysses divides the ranks",
        {**FOUR_GPUS, "trainer.policy.sequence_parallel_size": 3},
        "trainer.policy.sequence_parallel_size", "make the ranks a multiple of it",
        {**FOUR_GPUS, "trainer.policy.sequence_parallel_size": 2},
    ),
    Case(
        "the reference's ranks share samples as the policy's do, whose they are",
        {"trainer.ref.sequence_parallel_size": 2},
        "trainer.ref.sequence_parallel_size", "expected 1, as trainer.policy.sequence_parallel_size",
        {"trainer.ref.sequence_parallel_size": 2, **NO_KL},
    ),
    Case(
        "and the critic's, where they are the policy's",
        {**CRITIC, **FOUR_GPUS, "trainer.policy.sequence_parallel_size": 2, "trainer.critic.sequence_parallel_size": 4},
        "trainer.critic.sequence_parallel_size", "has the policy's ranks and samples, found 4; leave it out",
        {
            **CRITIC, **FOUR_GPUS, f"{PLACEMENT}.critic_num_gpus_per_node": 4,
            "trainer.policy.sequence_parallel_size": 2, "trainer.critic.sequence_parallel_size": 4,
        },
    ),
    Case(
        "a critic on ranks of its own has a multiple of those that share its samples",
        {**CRITIC, f"{PLACEMENT}.critic_num_gpus_per_node": 4, "trainer.critic.sequence_parallel_size": 3},
        "trainer.critic.sequence_parallel_size", "does not divide the 4 ranks",
        {**CRITIC, f"{PLACEMENT}.critic_num_gpus_per_node": 4, "trainer.critic.sequence_parallel_size": 2},
    ),
    Case(
        "padded rows are not shared",
        {**FOUR_GPUS, "trainer.policy.sequence_parallel_size": 2, "trainer.use_sample_packing": False},
        "trainer.use_sample_packing", "share the tokens of packed samples",
        {**FOUR_GPUS, "trainer.use_sample_packing": False},
    ),
    Case(
        "a teacher's ranks share its tokens equally",
        {**TAUGHT, f"{DISTILLATION}.placement.fsdp_size": 2, SHARING: 4},
        SHARING, "expected a divisor of the ranks of a copy of the teacher, 2 (trainer.distillation.placement.fsdp_size), found 4",
        {**TAUGHT, f"{DISTILLATION}.placement.fsdp_size": 4, SHARING: 2},
    ),
    Case(
        "so do those of a reference on nodes of its own",
        {f"{PLACEMENT}.colocate_policy_ref": False, "trainer.ref.sequence_parallel_size": 3},
        "trainer.ref.sequence_parallel_size", "expected a divisor of the ranks of a copy of the reference, 1",
        {f"{PLACEMENT}.colocate_policy_ref": False, "trainer.ref.sequence_parallel_size": 2, f"{PLACEMENT}.ref_num_gpus_per_node": 4},
    ),
    Case(
        "a teacher's padded rows are not shared",
        {**TAUGHT, f"{DISTILLATION}.placement.fsdp_size": 2, SHARING: 2, f"{DISTILLATION}.use_sample_packing": False},
        f"{DISTILLATION}.use_sample_packing", "ranks of the teacher share the tokens of packed samples",
        {**TAUGHT, f"{DISTILLATION}.placement.fsdp_size": 2, f"{DISTILLATION}.use_sample_packing": False},
    ),
    Case(
        "ranks that share experts are in one copy of the parameters",
        {**FOUR_GPUS, EXPERTS: 3},
        EXPERTS, "expected a divisor of the 4 ranks that share a copy of the parameters",
        {**FOUR_GPUS, EXPERTS: 2},
    ),
    Case(
        "of which there may be several",
        {**FOUR_GPUS, EXPERTS: 4, "trainer.policy.fsdp_config.fsdp_size": 2},
        EXPERTS, "expected a divisor of the 2 ranks",
        {**FOUR_GPUS, EXPERTS: 4},
    ),
    Case(
        "a teacher's ranks share its experts",
        {**TAUGHT, f"{DISTILLATION}.placement.fsdp_size": 2, f"{DISTILLATION}.fsdp_config.expert_parallel_size": 4},
        f"{DISTILLATION}.fsdp_config.expert_parallel_size", "expected a divisor of the ranks of a copy of the teacher, 2, found 4",
        {**TAUGHT, f"{DISTILLATION}.placement.fsdp_size": 4, f"{DISTILLATION}.fsdp_config.expert_parallel_size": 4},
    ),
    Case(
        "experts that ranks share have no adapters",
        {**FOUR_GPUS, EXPERTS: 2, f"{LORA}.rank": 8, f"{LORA}.target_parameters": ["experts"]},
        EXPERTS, "expected 1 with trainer.policy.model.lora.target_parameters",
        {**FOUR_GPUS, EXPERTS: 2, f"{LORA}.rank": 8},
    ),
    Case(
        "tensor, pipeline and context parallel sizes divide the ranks",
        {**MEGATRON_4, f"{MEGATRON}.tensor_model_parallel_size": 2, f"{MEGATRON}.pipeline_model_parallel_size": 3},
        MEGATRON, "2 (tensor) x 3 (pipeline) x 1 (context) = 6 ranks share each sample, which does not divide the 4 ranks",
        {**MEGATRON_4, f"{MEGATRON}.tensor_model_parallel_size": 2, f"{MEGATRON}.pipeline_model_parallel_size": 2},
    ),
    Case(
        "gae needs a critic",
        {f"{ALGORITHM}.advantage_estimator": "gae"},
        "trainer.critic.model.path", "required with trainer.algorithm.advantage_estimator=gae",
        {f"{ALGORITHM}.advantage_estimator": "gae", **CRITIC},
    ),
    Case(
        "the critic's output layer has a name that a part of a model can have",
        {f"{ALGORITHM}.value_head_prefix": "value.head", **CRITIC},
        f"{ALGORITHM}.value_head_prefix", 'expected a name of letters, digits and underscores, found "value.head"',
        {f"{ALGORITHM}.value_head_prefix": "score_2", **CRITIC},
    ),
    Case(
        "KL in the loss and in the reward exclude each other",
        {f"{ALGORITHM}.use_kl_in_reward": True},
        f"{ALGORITHM}.use_kl_in_reward", "set trainer.algorithm.use_kl_loss=false",
        {f"{ALGORITHM}.use_kl_in_reward": True, **NO_KL},
    ),
    Case(
        "a loss without advantages takes no KL in the reward",
        {f"{ALGORITHM}.use_kl_in_reward": True, **NO_KL, f"{ALGORITHM}.policy_loss_type": "cross_entropy"},
        f"{ALGORITHM}.use_kl_in_reward", "has no effect with trainer.algorithm.policy_loss_type",
        {f"{ALGORITHM}.policy_loss_type": "cross_entropy"},
    ),
    Case(
        "pairs are compared by their log-ratios to the reference",
        {f"{ALGORITHM}.advantage_estimator": "online_dpo", f"{ALGORITHM}.use_kl_in_reward": True, **NO_KL},
        f"{ALGORITHM}.advantage_estimator", 'use_kl_in_reward=true, kl_estimator_type="k1" and kl_ctrl.type="fixed"',
        {
            f"{ALGORITHM}.advantage_estimator": "online_dpo", f"{ALGORITHM}.use_kl_in_reward": True,
            f"{ALGORITHM}.kl_estimator_type": "k1", **NO_KL,
        },
    ),
    Case(
        "only a divergence in the reward has an adaptive weight",
        {f"{ALGORITHM}.kl_ctrl.type": "adaptive"},
        f"{ALGORITHM}.kl_ctrl.type", "has no effect without trainer.algorithm.use_kl_in_reward",
        {f"{ALGORITHM}.kl_ctrl.type": "adaptive", f"{ALGORITHM}.use_kl_in_reward": True, **NO_KL},
    ),
    Case(
        "checkpoints are kept",
        {"trainer.max_ckpts_to_keep": 0}, "trainer.max_ckpts_to_keep", "trainer.ckpt_interval=0 writes none",
        {"trainer.max_ckpts_to_keep": -1},
    ),
    Case(
        "where all checkpoints are kept, some more cannot be",
        {"trainer.ckpt_keep_every": 100, "trainer.max_ckpts_to_keep": -1}, "trainer.ckpt_keep_every", "set trainer.max_ckpts_to_keep",
        {"trainer.ckpt_keep_every": 100, "trainer.max_ckpts_to_keep": 3},
    ),
    Case(
        "where all checkpoints are kept, the best one is",
        {"trainer.ckpt_keep_best": "reward", "trainer.max_ckpts_to_keep": -1}, "trainer.ckpt_keep_best", "set trainer.max_ckpts_to_keep",
        {"trainer.ckpt_keep_best": "reward", "trainer.max_ckpts_to_keep": 3},
    ),
    Case(
        "where no checkpoint is written, no last one is kept",
        {"trainer.keep_when_done": "last", "trainer.ckpt_interval": 0}, "trainer.keep_when_done", "no last checkpoint with trainer.ckpt_interval=0",
        {"trainer.keep_when_done": "last", "trainer.ckpt_interval": 5},
    ),
    Case(
        "exports that are kept are made",
        {"trainer.keep_when_done": "export"}, "trainer.keep_when_done", "set trainer.hf_save_interval",
        {"trainer.keep_when_done": "export", "trainer.hf_save_interval": 5},
    ),
    Case(
        "the best checkpoint has a score",
        {"trainer.ckpt_keep_best": "eval/all/avg_score", "trainer.max_ckpts_to_keep": 3, "trainer.eval_interval": 0},
        "trainer.ckpt_keep_best", "nothing is evaluated with trainer.eval_interval=0",
        {"trainer.ckpt_keep_best": "eval/all/avg_score", "trainer.max_ckpts_to_keep": 3, "trainer.eval_interval": 5},
    ),
    Case(
        "whether higher or lower values of a metric are better is known by its name, or told",
        {"trainer.ckpt_keep_best": "environment/tries", "trainer.max_ckpts_to_keep": 3},
        "trainer.ckpt_keep_best_mode", 'required with trainer.ckpt_keep_best="environment/tries"',
        {"trainer.ckpt_keep_best": "environment/tries", "trainer.ckpt_keep_best_mode": "min", "trainer.max_ckpts_to_keep": 3},
    ),
    Case(
        "which value is the best is asked of a metric",
        {"trainer.ckpt_keep_best_mode": "min"}, "trainer.ckpt_keep_best_mode", "no effect without trainer.ckpt_keep_best",
        {"trainer.ckpt_keep_best_mode": "min", "trainer.ckpt_keep_best": "loss", "trainer.max_ckpts_to_keep": 3},
    ),
    Case(
        "the advantage estimator is known",
        {f"{ALGORITHM}.advantage_estimator": "grop"}, f"{ALGORITHM}.advantage_estimator", "did you mean grpo?",
        {f"{ALGORITHM}.advantage_estimator": "mine.advantages:better"},
    ),
    Case(
        "the policy loss is known",
        {f"{ALGORITHM}.policy_loss_type": "nope"}, f"{ALGORITHM}.policy_loss_type", '"package.module:function"',
        {f"{ALGORITHM}.policy_loss_type": "mine:loss"},
    ),
    Case(
        "colocated engines use the trainer's GPUs, all of them",
        {**COLOCATED, f"{ENGINE}.num_engines": 2},
        f"{PLACEMENT}.colocate_all", "the engines use 2 GPUs",
        {**COLOCATED, **FOUR_GPUS, f"{ENGINE}.num_engines": 2, f"{ENGINE}.tensor_parallel_size": 2},
    ),
    Case(
        "a colocated replica is on one node",
        {**COLOCATED, f"{PLACEMENT}.policy_num_nodes": 2, f"{PLACEMENT}.policy_num_gpus_per_node": 3, f"{ENGINE}.num_engines": 3, f"{ENGINE}.tensor_parallel_size": 2,
         "trainer.train_batch_size": 768, "trainer.policy_mini_batch_size": 768},
        f"{ENGINE}.tensor_parallel_size", "must divide those that the trainer has on a node, 3",
        {**COLOCATED, f"{PLACEMENT}.policy_num_nodes": 2, f"{PLACEMENT}.policy_num_gpus_per_node": 2, f"{ENGINE}.num_engines": 2, f"{ENGINE}.tensor_parallel_size": 2},
    ),
    Case(
        "what learns from datasets waits for no engine",
        {**COLOCATED, **SFT}, f"{PLACEMENT}.colocate_all", 'no effect with trainer.mode="sft"',
        SFT,
    ),
    Case(
        "colocated engines have the trainer's GPUs already",
        {**LENDS, **COLOCATED}, f"{PLACEMENT}.lend", "trainer.placement.colocate_all), or set it to false",
        LENDS,
    ),
    Case(
        "a critic on nodes of its own leaves them to no engine",
        {**LENDS, **CRITIC, f"{PLACEMENT}.critic_num_nodes": 1}, f"{PLACEMENT}.lend", "a critic on nodes of its own",
        {**LENDS, **CRITIC},
    ),
    Case(
        "a lent replica has room on a node of the trainer",
        {**LENDS, f"{ENGINE}.tensor_parallel_size": 2}, f"{PLACEMENT}.lend", "a replica needs 2 GPUs",
        {**LENDS, **FOUR_GPUS, f"{ENGINE}.tensor_parallel_size": 2},
    ),
    Case(
        "no replicas come and go beside the trainer",
        {**COLOCATED, "slurm.elastic.replicas": 1}, "slurm.elastic.replicas", "engines are on the trainer's nodes",
        {"slurm.elastic.replicas": 1},
    ),
    Case(
        "an optimizer's state leaves the GPU for engines alone",
        {f"{OPTIMIZER}.offload_after_step": False}, f"{OPTIMIZER}.offload_after_step", "no effect without trainer.placement.colocate_all",
        {**COLOCATED, f"{OPTIMIZER}.offload_after_step": False},
    ),
    Case(
        "a colocated critic has the policy's GPUs",
        {**COLOCATED, **CRITIC, f"{PLACEMENT}.critic_num_gpus_per_node": 2},
        f"{PLACEMENT}.critic_num_gpus_per_node", "leave it out or set trainer.placement.colocate_all=false",
        {**CRITIC, f"{PLACEMENT}.critic_num_gpus_per_node": 2},
    ),
    Case(
        "Megatron-core's groups are made of all trainer ranks",
        {**MEGATRON_4, **CRITIC, f"{PLACEMENT}.critic_num_nodes": 1},
        f"{PLACEMENT}.critic_num_nodes", 'expected none with trainer.strategy="megatron"',
        {**FOUR_GPUS, **CRITIC, f"{PLACEMENT}.critic_num_nodes": 1},
    ),
    Case(
        "each rank of a critic has a GPU",
        {**CRITIC, f"{PLACEMENT}.critic_num_gpus_per_node": 4, "slurm.gpus_per_node": 2},
        f"{PLACEMENT}.critic_num_gpus_per_node", "4 ranks need a GPU each, but a node has 2 GPUs",
        {**CRITIC, f"{PLACEMENT}.critic_num_gpus_per_node": 4, "slurm.gpus_per_node": 4},
    ),
    Case(
        "ranks that share a copy of a critic divide its ranks",
        {**CRITIC, f"{PLACEMENT}.critic_num_gpus_per_node": 4, "trainer.critic.fsdp_config.fsdp_size": 3},
        "trainer.critic.fsdp_config.fsdp_size", "does not divide the 4 ranks",
        {**CRITIC, f"{PLACEMENT}.critic_num_gpus_per_node": 4, "trainer.critic.fsdp_config.fsdp_size": 2},
    ),
    Case(
        "a colocated reference has the policy's GPUs, though not by choice",
        {**COLOCATED, f"{PLACEMENT}.colocate_policy_ref": False, f"{PLACEMENT}.ref_num_nodes": 2},
        f"{PLACEMENT}.ref_num_nodes", "trainer.placement.colocate_all=false",
        {f"{PLACEMENT}.colocate_policy_ref": False, f"{PLACEMENT}.ref_num_nodes": 2},
    ),
    Case(
        "a reference that shares the policy's GPUs has as many",
        {f"{PLACEMENT}.ref_num_gpus_per_node": 2},
        f"{PLACEMENT}.ref_num_gpus_per_node", "set trainer.placement.colocate_policy_ref=false",
        {f"{PLACEMENT}.ref_num_gpus_per_node": 2, **NO_KL},
    ),
    Case(
        "with one turn the longest input is the longest prompt",
        {"generator.max_input_length": 1024}, "generator.max_input_length", "expected trainer.max_prompt_length (512)",
        {"generator.max_input_length": 1024, "generator.max_turns": 3},
    ),
    Case(
        "with several turns the longest input is no shorter than the longest prompt",
        {"generator.max_input_length": 77, "generator.max_turns": 3},
        "generator.max_input_length", "expected at least trainer.max_prompt_length (512), found 77",
        {"generator.max_input_length": 512, "generator.max_turns": 3},
    ),
    Case(
        "rewards by name pay after one turn",
        {"generator.max_turns": 3, "environment.reward_function.format": 1.0},
        "generator.max_turns", "no effect with environment.reward_function",
        {"generator.max_turns": 1, "environment.reward_function.format": 1.0},
    ),
    Case(
        "experts are shared by all ranks of a replica",
        {f"{ENGINE}.expert_parallel_size": 2}, f"{ENGINE}.expert_parallel_size", "expected 1 or data_parallel_size x tensor_parallel_size",
        {f"{ENGINE}.expert_parallel_size": 4, f"{ENGINE}.data_parallel_size": 2, f"{ENGINE}.tensor_parallel_size": 2, "slurm.gpus_per_node": 4},
    ),
    Case(
        "Megatron's types and shares are its own",
        {"trainer.strategy": "megatron", "trainer.policy.fsdp_config.mixed_precision.param_dtype": "fp32"},
        "trainer.policy.fsdp_config", "see trainer.policy.megatron_config, whose dtype",
        {"trainer.strategy": "megatron", f"{MEGATRON}.dtype": "fp32"},
    ),
    Case(
        "Megatron shares samples by context parallelism",
        {**MEGATRON_4, "trainer.policy.sequence_parallel_size": 2},
        "trainer.policy.sequence_parallel_size", "see trainer.policy.megatron_config.context_parallel_size",
        {**MEGATRON_4, f"{MEGATRON}.context_parallel_size": 2, "trainer.ref.sequence_parallel_size": 1},
    ),
    Case(
        "Megatron packs",
        {"trainer.strategy": "megatron", "trainer.use_sample_packing": False},
        "trainer.use_sample_packing", "samples are always packed",
        {"trainer.use_sample_packing": False},
    ),
    Case(
        "FSDP2 has no layouts",
        {**FOUR_GPUS, f"{MEGATRON}.tensor_model_parallel_size": 2},
        MEGATRON, "no effect with trainer.strategy=fsdp2",
        {**MEGATRON_4, f"{MEGATRON}.tensor_model_parallel_size": 2},
    ),
    Case(
        "engines have the trainer's GPUs after each step",
        {**COLOCATED, "trainer.fully_async.max_staleness_steps": 1, "trainer.fully_async.sync_weight_interval": 2},
        "trainer.fully_async.sync_weight_interval", "the trainer leaves its GPUs to the engines when it publishes weights",
        {**COLOCATED, "trainer.fully_async.max_staleness_steps": 1},
    ),
    Case(
        "no more groups are generated than staleness allows",
        {"trainer.fully_async.max_staleness_steps": 1, "trainer.fully_async.num_parallel_generation_workers": 2049},
        "trainer.fully_async.num_parallel_generation_workers", "expected from 1024 (trainer.train_batch_size) to 2048",
        {"trainer.fully_async.max_staleness_steps": 1, "trainer.fully_async.num_parallel_generation_workers": 2048},
    ),
    Case(
        "surplus groups are generated beside those that staleness allows",
        {"trainer.fully_async.oversampling_ratio": 1.25, "trainer.fully_async.num_parallel_generation_workers": 1281},
        "trainer.fully_async.num_parallel_generation_workers", "to 1280 (times max_staleness_steps + 1, and 256 of oversampling_ratio)",
        {"trainer.fully_async.oversampling_ratio": 1.25, "trainer.fully_async.num_parallel_generation_workers": 1280},
    ),
    Case(
        "resuming from a path needs the path",
        {"trainer.resume_mode": "from_path"}, "trainer.resume_path", 'required with trainer.resume_mode="from_path"',
        {"trainer.resume_mode": "from_path", "trainer.resume_path": "/c"},
    ),
    Case(
        "a template file needs a path",
        {"generator.chat_template.source": "file"}, "generator.chat_template.name_or_path", "a Jinja file",
        {"generator.chat_template.source": "file", "generator.chat_template.name_or_path": "t.jinja"},
    ),
    Case(
        "a template name is known",
        {"generator.chat_template.name_or_path": "qwen3"}, "generator.chat_template.name_or_path", "qwen3_with_thinking",
        {"generator.chat_template.name_or_path": "qwen3_with_thinking"},
    ),
    Case(
        "step-wise samples need the conversation format",
        {**STEP_WISE, "generator.use_conversation_multi_turn": False},
        "generator.step_wise_trajectories", "generator.use_conversation_multi_turn=true",
        {**STEP_WISE, "generator.chat_template.name_or_path": "qwen3_without_thinking"},
    ),
    Case(
        "step-wise samples have several turns, nobody knows how many",
        {"generator.step_wise_trajectories": True}, "generator.step_wise_trajectories", "no effect with generator.max_turns=1",
        {**STEP_WISE, **FOUR_GPUS, "trainer.policy_mini_batch_size": 2, "generator.n_samples_per_prompt": 3},
    ),
    Case(
        "step-wise samples have no critic",
        {**STEP_WISE, **CRITIC}, "generator.step_wise_trajectories", "does not work with trainer.critic.model.path", STEP_WISE,
    ),
    Case(
        "step-wise samples are trained from their first token on",
        {**STEP_WISE, f"{ALGORITHM}.min_filter_prefix_tokens": 4},
        "generator.step_wise_trajectories", "does not work with trainer.algorithm.min_filter_prefix_tokens", STEP_WISE,
    ),
    Case(
        "step-wise samples have one advantage",
        {**STEP_WISE, f"{ALGORITHM}.advantage_estimator": "reinforce++"},
        "generator.step_wise_trajectories", "does not work with trainer.algorithm.advantage_estimator=reinforce++",
        {**STEP_WISE, f"{ALGORITHM}.advantage_estimator": "rloo"},
    ),
    Case(
        "step-wise samples have no positions in a group",
        {**STEP_WISE, f"{ALGORITHM}.advantage_estimator": "optimal_token_baseline"},
        "generator.step_wise_trajectories", "advantage_estimator=optimal_token_baseline, which needs the whole sample",
        {**STEP_WISE, f"{ALGORITHM}.advantage_estimator": "opo"},
    ),
]  # fmt: skip
