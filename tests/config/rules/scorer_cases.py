"""Combinations of teachers, and of a reference on nodes of its own, with other settings."""

from __future__ import annotations

from tests.config.rules.skyrl_cases import (
    ALGORITHM,
    CRITIC,
    DISTILLATION,
    DPO,
    MEGATRON_4,
    NO_KL,
    PLACEMENT,
    REWARD_SERVICE,
    SERVICE,
    SFT,
    STEP_WISE,
    Case,
)

TEACHER = {f"{DISTILLATION}.enable": True, f"{DISTILLATION}.model_path": "t"}
OF_POLICY = {**TEACHER, f"{DISTILLATION}.top_k": 4, f"{DISTILLATION}.top_k_from_teacher": False}
SELF = f"{DISTILLATION}.self_teacher"
OF_ROWS = {**SFT, **TEACHER, f"{DISTILLATION}.top_k": 4, f"{DISTILLATION}.loss_weight": 0.5}
OWN = {f"{DISTILLATION}.enable": True, f"{SELF}.model": "policy"}
CONTRAST = {**OWN, f"{DISTILLATION}.use_rewards": True, f"{SELF}.wrong_hints": 2}
AVERAGE = {**OWN, **NO_KL, f"{SELF}.model": "ema"}
APART = {f"{PLACEMENT}.colocate_policy_ref": False}
MODEL, FILTERS = "environment.reward_model", {f"{ALGORITHM}.zero_variance_filter": True}
ENGINE = {f"{DISTILLATION}.backend": "vllm"}
MEGATRON_CORE = {f"{DISTILLATION}.backend": "megatron", f"{DISTILLATION}.placement.tensor_parallel_size": 2}
GROUP, COMPARING = "environment.group_reward_function", "environment.skyrl_gym.llm_as_a_judge"
JUDGE = {f"{MODEL}.model": "rm"}
APART_WITHOUT_KL = {**APART, **NO_KL}
GPUS = {"slurm.gpus_per_node": 4}
POOLS = "slurm.elastic_scorers"
OVER = f"{DISTILLATION}.placement.nodes_per_replica"

OF_SCORERS = [
    Case(
        "a teacher has ranks",
        {**TEACHER, f"{DISTILLATION}.placement.fsdp_size": -1},
        f"{DISTILLATION}.placement.fsdp_size", "expected the number of ranks of one copy of the teacher, found -1",
        {**TEACHER, f"{DISTILLATION}.placement.fsdp_size": 2},
    ),
    Case(
        "a teacher's parameters are shared by no more ranks than a copy has",
        {**TEACHER, f"{DISTILLATION}.fsdp_config.fsdp_size": 2},
        f"{DISTILLATION}.fsdp_config.fsdp_size", "expected at most the 1 rank(s) of a copy of the teacher, found 2; more ranks: ",
        {**TEACHER, f"{DISTILLATION}.fsdp_config.fsdp_size": 2, f"{DISTILLATION}.placement.fsdp_size": 2},
    ),
    Case(
        "something is learned",
        {**TEACHER, f"{DISTILLATION}.kl_penalty_coef": 0.0},
        f"{DISTILLATION}.kl_penalty_coef", "would make every advantage 0",
        {**TEACHER, f"{DISTILLATION}.kl_penalty_coef": 0.0, f"{DISTILLATION}.use_rewards": True},
    ),
    Case(
        "a divergence in the loss teaches without advantages",
        {**TEACHER, f"{DISTILLATION}.kl_penalty_coef": 0.0, f"{DISTILLATION}.top_k": 4},
        f"{DISTILLATION}.kl_penalty_coef", "would make every advantage 0",
        {**TEACHER, f"{DISTILLATION}.kl_penalty_coef": 0.0, f"{DISTILLATION}.top_k": 4, f"{DISTILLATION}.loss_weight": 0.5},
    ),
    Case(
        "without a policy loss there are no advantages",
        {**TEACHER, f"{DISTILLATION}.use_rewards": True, f"{DISTILLATION}.top_k": 4, f"{DISTILLATION}.loss_weight": 1.0},
        f"{DISTILLATION}.use_rewards", "has no effect without trainer.distillation.loss_weight below 1",
        {**TEACHER, f"{DISTILLATION}.use_rewards": True, f"{DISTILLATION}.top_k": 4, f"{DISTILLATION}.loss_weight": 0.9},
    ),
    Case(
        "a critic learns from rewards",
        {**TEACHER, **CRITIC},
        "trainer.critic.model.path", "set trainer.distillation.use_rewards=true, or leave the critic out",
        {**TEACHER, **CRITIC, f"{DISTILLATION}.use_rewards": True},
    ),
    Case(
        "prompts are not sampled, and so not aligned",
        {**TEACHER, f"{DISTILLATION}.cross_tokenizer": True, f"{DISTILLATION}.include_prompt": True},
        f"{DISTILLATION}.cross_tokenizer", "which prompts have not (include_prompt); set it to false",
        {**TEACHER, f"{DISTILLATION}.cross_tokenizer": True},
    ),
    Case(
        "another tokenizer has no tokens that sampling leaves out",
        {**TEACHER, f"{DISTILLATION}.cross_tokenizer": True, "generator.sampling_params.top_k": 20},
        f"{DISTILLATION}.cross_tokenizer", "sampling leaves some of the policy's out (generator.sampling_params.top_k = 20)",
        {**TEACHER, f"{DISTILLATION}.cross_tokenizer": True, "generator.sampling_params.top_k": -1},
    ),
    Case(
        "a loss without advantages takes no penalty of a teacher",
        {**TEACHER, f"{ALGORITHM}.policy_loss_type": "cross_entropy"},
        f"{ALGORITHM}.policy_loss_type", "no advantages from which a divergence could be subtracted",
        {**TEACHER, f"{ALGORITHM}.policy_loss_type": "cross_entropy", f"{DISTILLATION}.kl_penalty_coef": 0.0, f"{DISTILLATION}.top_k": 4, f"{DISTILLATION}.loss_weight": 0.5},
    ),
    Case(
        "distributions of other tokens are not compared",
        {**TEACHER, f"{DISTILLATION}.cross_tokenizer": True, f"{DISTILLATION}.top_k": 4},
        f"{DISTILLATION}.cross_tokenizer", "has no effect",
        {**TEACHER, f"{DISTILLATION}.cross_tokenizer": True, f"{DISTILLATION}.iw_opd_gamma": 0.5},
    ),
    Case(
        "a reward says nothing of a prompt",
        {**TEACHER, f"{DISTILLATION}.include_prompt": True, f"{DISTILLATION}.use_rewards": True},
        f"{DISTILLATION}.include_prompt", "expected false with trainer.distillation.use_rewards",
        {**TEACHER, f"{DISTILLATION}.include_prompt": True},
    ),
    Case(
        "engines say nothing of a prompt",
        {**TEACHER, f"{DISTILLATION}.include_prompt": True, f"{ALGORITHM}.use_rollout_logprobs_for_loss": True},
        f"{DISTILLATION}.include_prompt", "expected false with trainer.algorithm.use_rollout_logprobs_for_loss",
        {**TEACHER, f"{ALGORITHM}.use_rollout_logprobs_for_loss": True},
    ),
    Case(
        "a copy of the teacher is on one node",
        {**TEACHER, **GPUS, f"{DISTILLATION}.placement.fsdp_size": 8},
        f"{DISTILLATION}.placement.fsdp_size", "8 ranks share a copy of the teacher on one node, which has 4 GPUs",
        {**TEACHER, **GPUS, f"{DISTILLATION}.placement.fsdp_size": 8, OVER: 2},
    ),
    Case(
        "a copy of the reference is on one node",
        {**APART, **GPUS, f"{PLACEMENT}.ref_num_gpus_per_node": 8},
        f"{PLACEMENT}.ref_num_gpus_per_node", "8 ranks share a copy of the reference on one node, which has 4 GPUs",
        {**APART, **GPUS, f"{PLACEMENT}.ref_num_gpus_per_node": 4, f"{PLACEMENT}.ref_num_nodes": 3},
    ),
    Case(
        "what is not there has no nodes",
        {**APART, **NO_KL},
        f"{PLACEMENT}.colocate_policy_ref", "there is no reference model to have nodes of its own",
        APART,
    ),
    Case(
        "the reference of pairs is beside the policy",
        {**APART, **DPO},
        f"{PLACEMENT}.colocate_policy_ref", 'expected true with trainer.mode="dpo"',
        APART,
    ),
    Case(
        "a reference that follows the policy is beside it",
        {**APART, f"{ALGORITHM}.reference_reset_interval": 4},
        f"{PLACEMENT}.colocate_policy_ref", "expected true with a reference that follows the policy",
        {f"{ALGORITHM}.reference_reset_interval": 4},
    ),
    Case(
        "scorers fail where there are some",
        {"trainer.max_unscored_ratio": 0.5},
        "trainer.max_unscored_ratio", "or environment.reward_model.model; leave it out",
        {**APART, "trainer.max_unscored_ratio": 0.5},
    ),
    Case(
        "a weight of the divergence wants a teacher",
        {f"{DISTILLATION}.kl_penalty_coef": 0.5},
        f"{DISTILLATION}.kl_penalty_coef", "has no effect without trainer.distillation.enable",
        {**TEACHER, f"{DISTILLATION}.kl_penalty_coef": 0.5},
    ),
    Case(
        "a mixture wants several tokens",
        {**TEACHER, f"{DISTILLATION}.jsd_beta": 0.1},
        f"{DISTILLATION}.jsd_beta", "has no effect without trainer.distillation.top_k",
        {**TEACHER, f"{DISTILLATION}.jsd_beta": 0.1, f"{DISTILLATION}.top_k": 4},
    ),
    Case(
        "one teacher is enough",
        {**OWN, f"{DISTILLATION}.model_path": "t"},
        f"{DISTILLATION}.model_path", "there is another teacher, the policy itself",
        OWN,
    ),
    Case(
        "a hint is another sample's",
        {**OWN, "generator.n_samples_per_prompt": 1},
        "generator.n_samples_per_prompt", "expected at least 2",
        {**OWN, "generator.n_samples_per_prompt": 2},
    ),
    Case(
        "a hint has an answer",
        {**OWN, f"{SELF}.template": "{prompt}"},
        f"{SELF}.template", "expected a text with {answer}",
        {**OWN, f"{SELF}.template": "{prompt} {answer}"},
    ),
    Case(
        "a turn has no hint",
        {**OWN, **STEP_WISE},
        "generator.step_wise_trajectories", "does not work with trainer.distillation.self_teacher.model",
        {**TEACHER, **STEP_WISE},
    ),
    Case(
        "a hinted prompt is another one",
        {**OWN, f"{DISTILLATION}.include_prompt": True},
        f"{DISTILLATION}.include_prompt", "expected false with trainer.distillation.self_teacher.model",
        OWN,
    ),
    Case(
        "the reference that teaches is beside the policy",
        {**OWN, **APART_WITHOUT_KL, f"{SELF}.model": "initial"},
        f"{PLACEMENT}.colocate_policy_ref", 'expected true with trainer.distillation.self_teacher.model="initial"',
        {**OWN, **NO_KL, f"{SELF}.model": "initial"},
    ),
    Case(
        "nothing is compared with an average",
        {**AVERAGE, f"{ALGORITHM}.use_kl_loss": True},
        f"{SELF}.model", 'the reference is the average with "ema"',
        AVERAGE,
    ),
    Case(
        "an average is kept in 32 bits",
        {**MEGATRON_4, **AVERAGE},
        f"{SELF}.model", 'an average wants trainer.ref.megatron_config.dtype="fp32"',
        {**MEGATRON_4, **AVERAGE, "trainer.ref.megatron_config.dtype": "fp32"},
    ),
    Case(
        "scorers are for others",
        {**OWN, f"{DISTILLATION}.batch_size_per_replica": 4},
        f"{DISTILLATION}.batch_size_per_replica", "has no effect without a teacher of its own",
        {**TEACHER, f"{DISTILLATION}.batch_size_per_replica": 4},
    ),
    Case(
        "hints are for oneself",
        {**TEACHER, f"{SELF}.success_reward": 0.5},
        f"{SELF}.success_reward", "has no effect without trainer.distillation.self_teacher.model",
        {**OWN, f"{SELF}.success_reward": 0.5},
    ),
    Case(
        "an average has a rate",
        {**OWN, f"{SELF}.ema_rate": 0.5},
        f"{SELF}.ema_rate", 'has no effect without trainer.distillation.self_teacher.model="ema"',
        {**AVERAGE, f"{SELF}.ema_rate": 0.5},
    ),
    Case(
        "wrong hints are of samples that are neither taught nor right",
        {**CONTRAST, f"{SELF}.wrong_hints": 4},
        f"{SELF}.wrong_hints", "expected at most 3, the samples of a group beside",
        {**CONTRAST, f"{SELF}.wrong_hints": 3},
    ),
    Case(
        "a contrast of hints needs rewards",
        {**CONTRAST, f"{DISTILLATION}.use_rewards": False},
        f"{DISTILLATION}.use_rewards", "expected true with trainer.distillation.self_teacher.wrong_hints",
        CONTRAST,
    ),
    Case(
        "a contrast of hints needs advantages",
        {**CONTRAST, f"{ALGORITHM}.policy_loss_type": "cross_entropy"},
        f"{ALGORITHM}.policy_loss_type", "it has no advantages that a contrast could modulate",
        {**CONTRAST, f"{ALGORITHM}.policy_loss_type": "gpg"},
    ),
    Case(
        "a threshold is not above all that is added",
        {**CONTRAST, f"{SELF}.contrast.threshold": 0.5},
        f"{SELF}.contrast.threshold", "expected below trainer.distillation.self_teacher.contrast.scale = 0.5",
        {**CONTRAST, f"{SELF}.contrast.threshold": 0.4},
    ),
    Case(
        "a contrast is of wrong hints",
        {**OWN, f"{SELF}.contrast.scale": 0.4},
        f"{SELF}.contrast.scale", "has no effect without trainer.distillation.self_teacher.wrong_hints",
        {**CONTRAST, f"{SELF}.contrast.scale": 0.4},
    ),
    Case(
        "a contrast takes the place of a penalty",
        {**CONTRAST, f"{DISTILLATION}.kl_penalty_coef": 0.5},
        f"{DISTILLATION}.kl_penalty_coef", "has no effect without trainer.distillation.self_teacher.wrong_hints=0",
        {**OWN, f"{DISTILLATION}.kl_penalty_coef": 0.5},
    ),
    Case(
        "a contrast is of the sampled token",
        {**CONTRAST, f"{DISTILLATION}.top_k": 4},
        f"{DISTILLATION}.top_k", "has no effect without trainer.distillation.self_teacher.wrong_hints=0",
        {**OWN, f"{DISTILLATION}.top_k": 4},
    ),
    Case(
        "engines tell of some tokens alone",
        {**OF_POLICY, f"{DISTILLATION}.top_k": 256},
        f"{DISTILLATION}.top_k", "expected at most 255 with top_k_from_teacher=false, found 256",
        {**OF_POLICY, f"{DISTILLATION}.top_k": 255},
    ),
    Case(
        "of a prompt nothing is sampled",
        {**OF_POLICY, f"{DISTILLATION}.include_prompt": True},
        f"{DISTILLATION}.rollout_top_k_recompute", "expected true with top_k_from_teacher=false and trainer.distillation.include_prompt",
        {**OF_POLICY, f"{DISTILLATION}.include_prompt": True, f"{DISTILLATION}.rollout_top_k_recompute": True},
    ),
    Case(
        "engines say nothing of what sampling leaves out",
        {**OF_POLICY, "generator.sampling_params.top_k": 8},
        f"{DISTILLATION}.rollout_top_k_recompute", "expected true with top_k_from_teacher=false and generator.sampling_params.top_k",
        {**OF_POLICY, "generator.sampling_params.top_k": 8, f"{DISTILLATION}.rollout_top_k_recompute": True},
    ),
    Case(
        "the teacher's tokens need no pass of the engines",
        {**TEACHER, f"{DISTILLATION}.top_k": 4, f"{DISTILLATION}.rollout_top_k_recompute": True},
        f"{DISTILLATION}.rollout_top_k_recompute", "has no effect without trainer.distillation.top_k_from_teacher=false",
        OF_POLICY,
    ),
    Case(
        "a divergence in the loss is over several tokens",
        {**TEACHER, f"{DISTILLATION}.loss_weight": 0.5},
        f"{DISTILLATION}.loss_weight", "has no effect without trainer.distillation.top_k",
        {**TEACHER, f"{DISTILLATION}.loss_weight": 0.5, f"{DISTILLATION}.top_k": 4},
    ),
    Case(
        "pairs have no teacher",
        {**DPO, f"{DISTILLATION}.enable": True},
        f"{DISTILLATION}.enable", 'has no effect without trainer.mode="rl" or "sft"',
        TEACHER,
    ),
    Case(
        "an engine judges at temperature 1",
        {**TEACHER, **ENGINE, "generator.sampling_params.temperature": 0.7},
        f"{DISTILLATION}.backend", "gives log-probabilities of samples at temperature 1, and the policy has 0.7",
        {**TEACHER, **ENGINE},
    ),
    Case(
        "an engine judges by whole distributions",
        {**TEACHER, **ENGINE, "generator.sampling_params.top_k": 20},
        f"{DISTILLATION}.backend", "over the whole vocabulary, and sampling leaves tokens out",
        {**TEACHER, "generator.sampling_params.top_k": 20},
    ),
    Case(
        "an engine tells of so many tokens",
        {**TEACHER, **ENGINE, f"{DISTILLATION}.top_k": 500}, f"{DISTILLATION}.top_k", "expected at most 256",
        {**TEACHER, **ENGINE, f"{DISTILLATION}.top_k": 100},
    ),
    Case(
        "an engine tells of its own tokens",
        {**TEACHER, **ENGINE, f"{DISTILLATION}.top_k": 4, f"{DISTILLATION}.top_k_from_teacher": False},
        f"{DISTILLATION}.top_k_from_teacher", 'expected true with backend="vllm"',
        {**TEACHER, **ENGINE, f"{DISTILLATION}.top_k": 4},
    ),
    Case(
        "an engine judges what was chosen",
        {**TEACHER, **ENGINE, f"{DISTILLATION}.include_prompt": True},
        f"{DISTILLATION}.include_prompt", 'expected false with backend="vllm"',
        {**TEACHER, **MEGATRON_CORE, f"{DISTILLATION}.include_prompt": True, f"{DISTILLATION}.top_k": 4},
    ),
    Case(
        "an engine has one node of its own",
        {**TEACHER, **ENGINE, f"{DISTILLATION}.engine.tensor_parallel_size": 2, OVER: 2}, OVER, 'expected 1 with backend="vllm"',
        {**TEACHER, **MEGATRON_CORE, OVER: 2},
    ),
    Case(
        "nodes have equally many ranks of a copy",
        {**TEACHER, f"{DISTILLATION}.placement.fsdp_size": 3, OVER: 2}, OVER, "expected a divisor of the ranks of a copy of the teacher, 3",
        {**TEACHER, f"{DISTILLATION}.placement.fsdp_size": 4, OVER: 2},
    ),
    Case(
        "an element of a pool has one node",
        {**TEACHER, f"{DISTILLATION}.placement.fsdp_size": 2, OVER: 2, f"{POOLS}.teacher.replicas": 1},
        f"{POOLS}.teacher.replicas", "an element of a pool has one node, and a copy of the teacher 2",
        {**TEACHER, f"{DISTILLATION}.placement.fsdp_size": 2, f"{POOLS}.teacher.replicas": 1},
    ),
    Case(
        "an engine is on one node",
        {**TEACHER, **ENGINE, **GPUS, f"{DISTILLATION}.engine.tensor_parallel_size": 8},
        f"{DISTILLATION}.engine.tensor_parallel_size", "8 ranks share a copy of the teacher on one node",
        {**TEACHER, **ENGINE, **GPUS, f"{DISTILLATION}.engine.tensor_parallel_size": 4},
    ),
    Case(
        "an engine has no FSDP2",
        {**TEACHER, **ENGINE, f"{DISTILLATION}.placement.fsdp_size": 2},
        f"{DISTILLATION}.placement.fsdp_size", 'has no effect without trainer.distillation.backend="fsdp2"',
        {**TEACHER, **ENGINE, f"{DISTILLATION}.placement.num_replicas": 2},
    ),
    Case(
        "Megatron-core computes in two types",
        {**TEACHER, **MEGATRON_CORE, f"{DISTILLATION}.fsdp_config.mixed_precision.param_dtype": "fp16"},
        f"{DISTILLATION}.fsdp_config.mixed_precision.param_dtype", "expected bf16 or fp32",
        {**TEACHER, **MEGATRON_CORE, f"{DISTILLATION}.fsdp_config.mixed_precision.param_dtype": "fp32"},
    ),
    Case(
        "a copy of Megatron-core is on one node",
        {**TEACHER, **MEGATRON_CORE, **GPUS, f"{DISTILLATION}.placement.pipeline_parallel_size": 4},
        f"{DISTILLATION}.placement", "8 ranks share a copy of the teacher on one node, which has 4 GPUs",
        {**TEACHER, **MEGATRON_CORE, **GPUS, f"{DISTILLATION}.placement.pipeline_parallel_size": 2},
    ),
    Case(
        "parallel sizes are Megatron-core's",
        {**TEACHER, f"{DISTILLATION}.placement.tensor_parallel_size": 2},
        f"{DISTILLATION}.placement.tensor_parallel_size", 'has no effect without trainer.distillation.backend="megatron"',
        {**TEACHER, **MEGATRON_CORE},
    ),
    Case(
        "FSDP2's shards are not Megatron-core's",
        {**TEACHER, **MEGATRON_CORE, f"{DISTILLATION}.fsdp_config.cpu_offload": True},
        f"{DISTILLATION}.fsdp_config.cpu_offload", 'has no effect without trainer.distillation.backend="fsdp2"',
        {**TEACHER, **MEGATRON_CORE, f"{DISTILLATION}.micro_batch_size_per_gpu": 2},
    ),
    Case(
        "a teacher that reads the policy's tokens takes its longest sample",
        {**TEACHER, **ENGINE, f"{DISTILLATION}.engine.max_model_len": 50},
        f"{DISTILLATION}.engine.max_model_len", "has no effect without trainer.distillation.cross_tokenizer",
        {**TEACHER, **ENGINE, f"{DISTILLATION}.cross_tokenizer": True, f"{DISTILLATION}.engine.max_model_len": 50},
    ),
    Case(
        "micro-batches are not an engine's",
        {**TEACHER, **ENGINE, f"{DISTILLATION}.micro_batch_size_per_gpu": 2},
        f"{DISTILLATION}.micro_batch_size_per_gpu", 'has no effect without trainer.distillation.backend="fsdp2" or "megatron"',
        {**TEACHER, f"{DISTILLATION}.micro_batch_size_per_gpu": 2},
    ),
    Case(
        "settings of an engine that there is not",
        {**TEACHER, f"{DISTILLATION}.engine.tensor_parallel_size": 2},
        f"{DISTILLATION}.engine.tensor_parallel_size", 'has no effect without trainer.distillation.backend="vllm"',
        {**TEACHER, **ENGINE, f"{DISTILLATION}.engine.tensor_parallel_size": 2},
    ),
    Case(
        "bounds of a reward model's scores have an order",
        {**JUDGE, f"{MODEL}.clip_min": 6.0}, f"{MODEL}.clip_min", "expected at most clip_max (5.0), found 6.0",
        {**JUDGE, f"{MODEL}.clip_min": 5.0},
    ),
    Case(
        "a reward model that is alone counts",
        {**JUDGE, f"{MODEL}.weight": 0.0}, f"{MODEL}.weight", "0 would make every reward 0",
        {**JUDGE, f"{MODEL}.weight": 0.0, f"{MODEL}.use_environment": True},
    ),
    Case(
        "no scorer sees the greedy response",
        {**JUDGE, f"{ALGORITHM}.advantage_estimator": "remax"}, f"{MODEL}.model", "not the greedy response",
        {**JUDGE, f"{ALGORITHM}.advantage_estimator": "rloo"},
    ),
    Case(
        "a reward model beside a teacher counts",
        {**JUDGE, **TEACHER}, f"{MODEL}.model", "set trainer.distillation.use_rewards=true",
        {**JUDGE, **TEACHER, f"{DISTILLATION}.use_rewards": True},
    ),
    Case(
        "two rewards of one name",
        {**JUDGE, **REWARD_SERVICE, f"{MODEL}.use_environment": True}, f"{MODEL}.model", 'has a reward "reward_model" too',
        {**JUDGE, **SERVICE, f"{MODEL}.use_environment": True},
    ),
    Case(
        "a service beside a reward model that is alone",
        {**JUDGE, **SERVICE}, "environment.remote_reward.enable", "a reward model scores instead",
        {**JUDGE, **SERVICE, f"{MODEL}.use_environment": True},
    ),
    Case(
        "named rewards beside a reward model that is alone",
        {**JUDGE, "environment.reward_function": {"gsm8k": 1.0}}, "environment.reward_function", "a reward model scores instead",
        {**JUDGE, "environment.eval_reward_function": {"gsm8k": 1.0}},
    ),
    Case(
        "an environment beside a reward model that is alone plays in evaluation",
        {**JUDGE, "environment.env_class": "gsm8k", "environment.eval_reward_function": {"gsm8k": 1.0}},
        "environment.env_class", "a reward model scores instead",
        {**JUDGE, "environment.env_class": "gsm8k"},
    ),
    Case(
        "a reward model that is alone scores one turn",
        {**JUDGE, "generator.max_turns": 3}, "generator.max_turns", "has no effect with environment.reward_model alone",
        {**JUDGE, "generator.max_turns": 3, f"{MODEL}.use_environment": True},
    ),
    Case(
        "what filters is among the rewards, a reward model's too",
        {**JUDGE, **FILTERS, f"{ALGORITHM}.filter_reward_metric": ["taste"]},
        f"{ALGORITHM}.filter_reward_metric", "whose rewards are reward_model",
        {**JUDGE, **FILTERS, f"{ALGORITHM}.filter_reward_metric": ["reward_model"]},
    ),
    Case(
        "a copy of the reward model is on one node",
        {**JUDGE, **GPUS, f"{MODEL}.ranks_per_replica": 8}, f"{MODEL}.ranks_per_replica", "8 ranks share a copy of the reward model on one node",
        {**JUDGE, **GPUS, f"{MODEL}.ranks_per_replica": 4},
    ),
    Case(
        "there are as many copies as the run needs",
        {**JUDGE, f"{MODEL}.num_replicas": 2, **TEACHER, f"{DISTILLATION}.use_rewards": True, "slurm.min_scorers": 2},
        "slurm.min_scorers", "expected at most 1, the copies of the teacher (trainer.distillation.placement.num_replicas), found 2",
        {**JUDGE, f"{MODEL}.num_replicas": 2, "slurm.min_scorers": 2},
    ),
    Case(
        "a pool of scorers counts among the copies",
        {**JUDGE, f"{POOLS}.reward_model.replicas": 1, "slurm.min_scorers": 3},
        "slurm.min_scorers", "expected at most 2, the copies of the reward model (environment.reward_model.num_replicas and slurm.elastic_scorers",
        {**JUDGE, f"{POOLS}.reward_model.replicas": 2, "slurm.min_scorers": 3},
    ),
    Case(
        "a model has a copy somewhere",
        {**TEACHER, f"{DISTILLATION}.placement.num_replicas": 0},
        f"{DISTILLATION}.placement.num_replicas", "expected at least 1, or copies of an elastic pool (slurm.elastic_scorers.teacher.replicas)",
        {**TEACHER, f"{DISTILLATION}.placement.num_replicas": 0, f"{POOLS}.teacher.replicas": 1},
    ),
    Case(
        "a pool has copies of a model that there is",
        {f"{POOLS}.reference.replicas": 2},
        f"{POOLS}.reference.replicas", "no reference judges finished samples on nodes of its own",
        {**APART, f"{POOLS}.reference.replicas": 2},
    ),
    Case(
        "hpcrl says what a pool of scorers waits for",
        {**TEACHER, f"{POOLS}.teacher.extra": {"dependency": "singleton"}},
        f"{POOLS}.teacher.extra.dependency", "hpcrl sets this option of sbatch itself",
        {**TEACHER, f"{POOLS}.teacher.extra": {"reservation": "r"}},
    ),
    Case(
        "a weight of the reward model wants one",
        {f"{MODEL}.weight": 0.5}, f"{MODEL}.weight", "has no effect without environment.reward_model.model",
        {**JUDGE, f"{MODEL}.weight": 0.5},
    ),
    Case(
        "a reward model scores later than a group is compared",
        {**JUDGE, f"{MODEL}.use_environment": True, GROUP: {"rank": 1.0}}, GROUP, "scores it later",
        {**JUDGE, f"{MODEL}.use_environment": True},
    ),
    Case(
        "a greedy response is in no group",
        {GROUP: {"rank": 1.0}, f"{ALGORITHM}.advantage_estimator": "remax"}, GROUP, "not the greedy response",
        {GROUP: {"rank": 1.0}},
    ),
    Case(
        "a teacher alone wants no rewards of groups",
        {**TEACHER, GROUP: {"rank": 1.0}}, GROUP, "rewards count for nothing with a teacher alone",
        {**TEACHER, GROUP: {"rank": 1.0}, f"{DISTILLATION}.use_rewards": True},
    ),
    Case(
        "rewards of groups have names",
        {GROUP: {"ranks": 1.0}}, GROUP, 'found "ranks"; did you mean rank',
        {GROUP: {"rank": 1.0, "mine:ranks": 0.0}},
    ),
    Case(
        "some reward of groups has a weight",
        {GROUP: {"rank": 0.0}}, GROUP, "every weight is 0", {GROUP: {"rank": 0.0, "own": 1.0}},
    ),
    Case(
        "rows of datasets are in no groups",
        {**SFT, GROUP: {"rank": 1.0}}, GROUP, 'has no effect without trainer.mode="rl"', SFT,
    ),
    Case(
        "pairs are compared by somebody",
        {GROUP: {"pairwise_judge": 1.0}}, f"{COMPARING}.model", "required by pairwise_judge",
        {GROUP: {"pairwise_judge": 1.0}, f"{COMPARING}.model": "j", f"{COMPARING}.comparisons": 3},
    ),
    Case(
        "rubrics are graded by somebody",
        {"environment.reward_function": {"gsm8k": 1.0, "rubric_judge": 0.5}}, f"{COMPARING}.model", "required by rubric_judge",
        {"environment.reward_function": {"gsm8k": 1.0, "rubric_judge": 0.5}, f"{COMPARING}.model": "j"},
    ),
    Case(
        "a response is graded once",
        {"environment.reward_function": {"rubric_judge": 1.0}, GROUP: {"rank": 1.0, "rubric_judge": 0.5}, f"{COMPARING}.model": "j"},
        GROUP, "rubric_judge grades each response already",
        {"environment.reward_function": {"rubric_judge": 1.0}, GROUP: {"rank": 1.0, "own": 0.5}, f"{COMPARING}.model": "j"},
    ),
    Case(
        "comparisons are those of pairs",
        {GROUP: {"rank": 1.0}, f"{COMPARING}.comparisons": 3},
        f"{COMPARING}.comparisons", "has no effect without pairwise_judge in environment.group_reward_function",
        {GROUP: {"rank": 1.0}},
    ),
    Case(
        "values of groups are named as those of samples",
        {GROUP: {"rank": 1.0}, "environment.reward_function": {"gsm8k": 1.0}, f"{ALGORITHM}.dynamic_sampling.type": "filter", f"{ALGORITHM}.filter_reward_metric": ["ranks"]},
        f"{ALGORITHM}.filter_reward_metric", "whose rewards are gsm8k, rank",
        {GROUP: {"rank": 1.0}, "environment.reward_function": {"gsm8k": 1.0}, f"{ALGORITHM}.dynamic_sampling.type": "filter", f"{ALGORITHM}.filter_reward_metric": ["rank"]},
    ),
    Case(
        "a reward model judges what is sampled",
        {**SFT, **JUDGE}, f"{MODEL}.model", 'has no effect without trainer.mode="rl"',
        JUDGE,
    ),
    Case(
        "rows of datasets earn no rewards",
        {**OF_ROWS, f"{DISTILLATION}.use_rewards": True},
        f"{DISTILLATION}.use_rewards", 'has no effect without trainer.mode="rl"',
        OF_ROWS,
    ),
    Case(
        "the teacher of rows is named",
        {**SFT, f"{DISTILLATION}.enable": True, f"{DISTILLATION}.top_k": 4, f"{DISTILLATION}.loss_weight": 0.5},
        f"{DISTILLATION}.model_path", "required with trainer.distillation.enable: the teacher",
        OF_ROWS,
    ),
    Case(
        "the teacher of rows tells several tokens",
        {**SFT, **TEACHER},
        f"{DISTILLATION}.top_k", "expected how many of the teacher's most probable tokens are learned",
        OF_ROWS,
    ),
    Case(
        "the teacher of rows is heard",
        {**SFT, **TEACHER, f"{DISTILLATION}.top_k": 4},
        f"{DISTILLATION}.loss_weight", 'expected above 0 with trainer.mode="sft"',
        OF_ROWS,
    ),
    Case(
        "the teacher of rows is in the place of the reference",
        {**OF_ROWS, "trainer.ref.model.path": "r"},
        "trainer.ref.model.path", "the teacher is in the place of the reference",
        {**TEACHER, "trainer.ref.model.path": "r"},
    ),
]  # fmt: skip
