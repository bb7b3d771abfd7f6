"""Combinations that only hpcrl has rules about."""

from __future__ import annotations

from tests.config.rules.skyrl_cases import (
    ALGORITHM,
    CORRECTION,
    ENGINE,
    FOUR_GPUS,
    GYM,
    LORA,
    MEGATRON,
    PLACEMENT,
    REWARD_SERVICE,
    SERVICE,
    Case,
)

FILTERS = {f"{ALGORITHM}.zero_variance_filter": True}

PREFIXES = {"trainer.shared_prefixes": True, "trainer.max_tokens_per_micro_batch": 4096}

PYXIS = {"slurm.container.kind": "pyxis", "slurm.container.image": "/h.sqsh"}
MOUNTS = "slurm.container.mounts"

OURS = [
    Case(
        "samples share prefixes with FSDP2",
        {**PREFIXES, "trainer.strategy": "megatron", **FOUR_GPUS, f"{ALGORITHM}.use_kl_loss": False},
        "trainer.shared_prefixes", "Megatron-core computes each sample whole; set it to false, or use trainer.strategy=fsdp2",
        {**PREFIXES, **FOUR_GPUS, f"{ALGORITHM}.use_kl_loss": False},
    ),
    Case(
        "padded rows share nothing",
        {**PREFIXES, "trainer.use_sample_packing": False},
        "trainer.shared_prefixes", "padded rows have no tokens in common; set trainer.use_sample_packing to true",
        PREFIXES,
    ),
    Case(
        "a group stays together as far as its tokens let it",
        {"trainer.shared_prefixes": True, "trainer.micro_train_batch_size_per_gpu": 8},
        "trainer.shared_prefixes", "micro-batches that are limited by tokens; set trainer.max_tokens_per_micro_batch",
        PREFIXES,
    ),
    Case(
        "adapters are there before the data",
        {f"{LORA}.rank": 8, f"{LORA}.init_method": "eva"}, f"{LORA}.init_method", "use pissa or olora, which need the weights alone",
        {f"{LORA}.rank": 8, f"{LORA}.init_method": "olora"},
    ),
    Case(
        "a tracker is one that is known, or one's own",
        {"trainer.logger": ["console", "wandbb"]},
        "trainer.logger", 'expected some of tensorboard, console, wandb, mlflow, swanlab, trackio, or your own as "package.module:function", found "wandbb"; did you mean wandb?',
        {"trainer.logger": ["console", "wandb", "mine:tracker"]},
    ),
    Case(
        "adapters of experts have no inputs to drop",
        {f"{LORA}.rank": 8, f"{LORA}.target_parameters": ["experts"], f"{LORA}.dropout": 0.1},
        f"{LORA}.dropout", "no inputs to drop; set it to 0",
        {f"{LORA}.rank": 8, f"{LORA}.target_parameters": ["experts"]},
    ),
    Case(
        "adapted experts are shared as the rest is, or not",
        {
            f"{LORA}.rank": 8, f"{LORA}.target_parameters": ["experts"], "trainer.strategy": "megatron",
            **FOUR_GPUS, f"{ALGORITHM}.use_kl_loss": False, f"{MEGATRON}.tensor_model_parallel_size": 4, f"{MEGATRON}.expert_tensor_parallel_size": 2,
        },
        f"{MEGATRON}.expert_tensor_parallel_size", "expected 1 or tensor_model_parallel_size = 4 with",
        {
            f"{LORA}.rank": 8, f"{LORA}.target_parameters": ["experts"], "trainer.strategy": "megatron",
            **FOUR_GPUS, f"{ALGORITHM}.use_kl_loss": False, f"{MEGATRON}.tensor_model_parallel_size": 4, f"{MEGATRON}.expert_tensor_parallel_size": 1,
        },
    ),
    Case(
        "a copy lies at the same place on each node",
        {f"{ENGINE}.weight_copy_dir": "copies"},
        f"{ENGINE}.weight_copy_dir", "expected an absolute path",
        {f"{ENGINE}.weight_copy_dir": "$TMPDIR/copies"},
    ),
    Case(
        "a number of a loss wants that loss, or one of the user's own",
        {f"{ALGORITHM}.clip_ratio_c": 10.0},
        f"{ALGORITHM}.clip_ratio_c", "has no effect without trainer.algorithm.policy_loss_type=dual_clip",
        {f"{ALGORITHM}.clip_ratio_c": 10.0, f"{ALGORITHM}.policy_loss_type": "mine:loss"},
    ),
    Case(
        "a section of a loss wants that loss",
        {f"{ALGORITHM}.clip_cov.clip_ratio": 0.1},
        f"{ALGORITHM}.clip_cov.clip_ratio", "policy_loss_type=clip_cov",
        {f"{ALGORITHM}.clip_cov.clip_ratio": 0.1, f"{ALGORITHM}.policy_loss_type": "clip_cov"},
    ),
    Case(
        "sapo does not clip",
        {f"{ALGORITHM}.eps_clip_high": 0.3, f"{ALGORITHM}.policy_loss_type": "sapo"},
        f"{ALGORITHM}.eps_clip_high", "regular or dual_clip or gspo",
        {f"{ALGORITHM}.eps_clip_high": 0.3},
    ),
    Case(
        "a weight of the entropy wants the entropy",
        {f"{ALGORITHM}.entropy_loss_coef": 0.1},
        f"{ALGORITHM}.entropy_loss_coef", "use_entropy_loss=true",
        {f"{ALGORITHM}.entropy_loss_coef": 0.1, f"{ALGORITHM}.use_entropy_loss": True},
    ),
    Case(
        "a target of the KL divergence wants a weight that adapts",
        {f"{ALGORITHM}.kl_ctrl.kl_target": 0.3},
        f"{ALGORITHM}.kl_ctrl.kl_target", 'kl_ctrl.type="adaptive"',
        {
            f"{ALGORITHM}.kl_ctrl.kl_target": 0.3, f"{ALGORITHM}.kl_ctrl.type": "adaptive",
            f"{ALGORITHM}.use_kl_in_reward": True, f"{ALGORITHM}.use_kl_loss": False,
        },
    ),
    Case(
        "bounds of a mask want that mask",
        {f"{CORRECTION}.geo_mask_high": 1.1},
        f"{CORRECTION}.geo_mask_high", 'sequence_mask_metric="geometric"',
        {f"{CORRECTION}.geo_mask_high": 1.1, f"{CORRECTION}.sequence_mask_metric": "geometric"},
    ),
    Case(
        "a longest sample wants the reduction that divides by it",
        {f"{ALGORITHM}.max_seq_len": 9},
        f"{ALGORITHM}.max_seq_len", "seq_mean_token_sum_norm",
        {f"{ALGORITHM}.max_seq_len": 9, f"{ALGORITHM}.loss_reduction": "seq_mean_token_sum_norm"},
    ),
    Case("training needs data", {"data.train_data": []}, "data.train_data", "expected at least one dataset", {}),
    Case(
        "evaluation needs data",
        {"data.val_data": []}, "trainer.eval_interval", "name a dataset there or set trainer.eval_interval=0",
        {"data.val_data": [], "trainer.eval_interval": 0},
    ),
    Case(
        "files have no subsets",
        {"data.subset": "main", "data.train_data": ["t.jsonl"]}, "data.subset", "has no effect on files",
        {"data.subset": "main", "data.train_data": ["openai/gsm8k"]},
    ),
    Case(
        "prompts that are evaluated are a share or a number",
        {"data.val_size": 1.5}, "data.val_size", "expected a share below 1 or a whole number of prompts",
        {"data.val_size": 2},
    ),
    Case(
        "prompts set aside are a share or a number",
        {"data.test_size": 1.5, "data.val_data": []}, "data.test_size", "expected a share below 1 or a whole number of prompts",
        {"data.test_size": 2, "data.val_data": []},
    ),
    Case(
        "a seed belongs to an order",
        {"data.shuffle": False, "data.shuffle_seed": 1}, "data.shuffle_seed", "has no effect without data.shuffle=true",
        {"data.shuffle": True, "data.shuffle_seed": 1},
    ),
    Case(
        "prompt and answer are two columns",
        {"data.response_column": "prompt"}, "data.response_column", "expected another column than data.prompt_column",
        {"data.response_column": "answer"},
    ),
    Case(
        "sampling parameters have one place",
        {"generator.sampling_params.additional_kwargs": {"top_k": 3}},
        "generator.sampling_params.additional_kwargs.top_k", "set generator.sampling_params.top_k instead",
        {"generator.sampling_params.additional_kwargs": {"ignore_eos": True}},
    ),
    Case(
        "sampling parameters that are hpcrl's",
        {"generator.eval_sampling_params.additional_kwargs": {"n": 3}},
        "generator.eval_sampling_params.additional_kwargs.n", "hpcrl sets this sampling parameter itself",
        {"generator.eval_sampling_params.additional_kwargs": {"length_penalty": 1.0}},
    ),
    Case(
        "training computes what was sampled",
        {"trainer.algorithm.temperature": 0.9, "generator.sampling_params.temperature": 0.8},
        "trainer.algorithm.temperature", "expected generator.sampling_params.temperature (0.8)",
        {"trainer.algorithm.temperature": 0.8, "generator.sampling_params.temperature": 0.8},
    ),
    Case(
        "vLLM raises lower temperatures",
        {"generator.sampling_params.temperature": 0.001}, "generator.sampling_params.temperature", "expected at least 0.01",
        {"generator.sampling_params.temperature": 0.01, "generator.eval_sampling_params.temperature": 0.001},
    ),
    Case(
        "the trainer does not know of penalties",
        {"generator.sampling_params.repetition_penalty": 1.1},
        "generator.sampling_params.repetition_penalty", "generator.eval_sampling_params may have it",
        {"generator.eval_sampling_params.repetition_penalty": 1.1},
    ),
    Case(
        "nor of what vLLM may do beside them",
        {"generator.sampling_params.additional_kwargs": {"logit_bias": {"3": 1.0}}},
        "generator.sampling_params.additional_kwargs.logit_bias", "changes probabilities in a way that the trainer does not compute",
        {"generator.eval_sampling_params.additional_kwargs": {"logit_bias": {"3": 1.0}}},
    ),
    Case(
        "a sampling mask has an end",
        {"generator.sampling_params.top_k": 257}, "generator.sampling_params.top_k", "expected at most 256, or -1, found 257",
        {"generator.sampling_params.top_k": 256, "generator.eval_sampling_params.top_k": 257},
    ),
    Case(
        "the tokens that top_p leaves out are recorded with top_k",
        {"generator.sampling_params.top_p": 0.9}, "generator.sampling_params.top_p", "set generator.sampling_params.top_k from 1 to 256",
        {"generator.sampling_params.top_p": 0.9, "generator.sampling_params.top_k": 64},
    ),
    Case(
        "so are those that a least length leaves out",
        {"generator.sampling_params.additional_kwargs": {"min_tokens": 3}},
        "generator.sampling_params.additional_kwargs.min_tokens", "leaves tokens out, which the trainer has to know",
        {"generator.sampling_params.additional_kwargs": {"min_tokens": 3}, "generator.sampling_params.top_k": 20},
    ),
    Case(
        "a path is for resuming from it",
        {"trainer.resume_path": "/c"}, "trainer.resume_path", 'set trainer.resume_mode="from_path" or leave it out',
        {"trainer.resume_path": "/c", "trainer.resume_mode": "from_path"},
    ),
    Case(
        "bounds of tokens come in pairs",
        {f"{CORRECTION}.token_mask_is_threshold_low": 0.5}, f"{CORRECTION}.token_mask_is_threshold_high", "set both or none",
        {f"{CORRECTION}.token_mask_is_threshold_low": 0.5, f"{CORRECTION}.token_mask_is_threshold_high": 2.0},
    ),
    Case(
        "bounds of ratios have an order",
        {f"{CORRECTION}.geo_mask_low": 1.02, f"{CORRECTION}.sequence_mask_metric": "geometric"},
        f"{CORRECTION}.geo_mask_low", "expected at most geo_mask_high (1.01), found 1.02",
        {f"{CORRECTION}.geo_mask_low": 1.01, f"{CORRECTION}.sequence_mask_metric": "geometric"},
    ),
    Case(
        "dppo has its own importance ratio",
        {f"{CORRECTION}.tis_ratio_type": "token", f"{ALGORITHM}.policy_loss_type": "dppo"},
        f"{CORRECTION}.tis_ratio_type", "the ratio to the rollout already",
        {f"{CORRECTION}.sequence_mask_metric": "geometric", f"{ALGORITHM}.policy_loss_type": "dppo"},
    ),
    Case(
        "bounds of advantages have an order",
        {f"{ALGORITHM}.advantage_clip_low": 1.0, f"{ALGORITHM}.advantage_clip_high": -1.0},
        f"{ALGORITHM}.advantage_clip_low", "expected at most advantage_clip_high (-1.0)",
        {f"{ALGORITHM}.advantage_clip_low": -1.0, f"{ALGORITHM}.advantage_clip_high": 1.0},
    ),
    Case(
        "bounds of covariances have an order",
        {f"{ALGORITHM}.clip_cov.clip_cov_lb": 5.0, f"{ALGORITHM}.policy_loss_type": "clip_cov"},
        f"{ALGORITHM}.clip_cov.clip_cov_lb", "expected less than clip_cov_ub (5.0)",
        {f"{ALGORITHM}.clip_cov.clip_cov_lb": 4.0, f"{ALGORITHM}.policy_loss_type": "clip_cov"},
    ),
    Case(
        "bounds of rewards have an order",
        {**SERVICE, "environment.remote_reward.clip_min": 6.0}, "environment.remote_reward.clip_min", "expected at most clip_max (5.0)",
        {**SERVICE, "environment.remote_reward.clip_min": 5.0},
    ),
    Case(
        "settings of a service that is not asked",
        {"environment.remote_reward.scale": 2.0}, "environment.remote_reward.scale", "has no effect without environment.remote_reward.enable",
        {**SERVICE, "environment.remote_reward.scale": 2.0},
    ),
    Case(
        "a service that pays nothing",
        {**SERVICE, "environment.remote_reward.reward_function": {"ocr": 0.0}}, "environment.remote_reward.reward_function", "every weight is 0",
        {**SERVICE, "environment.remote_reward.reward_function": {"ocr": 1.0, "taste": 0.0}},
    ),
    Case(
        "a service and named rewards",
        {**SERVICE, "environment.reward_function": {"gsm8k": 1.0}}, "environment.reward_function", "leave one of them out",
        {**SERVICE, "environment.eval_reward_function": {"gsm8k": 1.0}},
    ),
    Case(
        "a service and an environment",
        {**SERVICE, "environment.env_class": "search"}, "environment.env_class", "a service scores instead",
        SERVICE,
    ),
    Case(
        "a metric that no function of the service reports",
        {**SERVICE, **FILTERS, f"{ALGORITHM}.filter_reward_metric": ["taste"]},
        f"{ALGORITHM}.filter_reward_metric", '"taste" is not in environment.remote_reward.reward_function, whose rewards are ocr',
        {**SERVICE, **FILTERS, f"{ALGORITHM}.filter_reward_metric": ["ocr"]},
    ),
    Case(
        "a reward model has one reward",
        {**REWARD_SERVICE, "environment.remote_reward.reward_function": {"ocr": 1.0}},
        "environment.remote_reward.reward_function", 'has only "reward_model", found "ocr"',
        {**REWARD_SERVICE, "environment.remote_reward.reward_function": {"reward_model": 0.5}},
    ),
    Case(
        "a reward model has one score",
        {**REWARD_SERVICE, "environment.remote_reward.score_key": "a+b"},
        "environment.remote_reward.score_key", 'sends only "overall_reward", found "a+b"',
        REWARD_SERVICE,
    ),
    Case(
        "settings of a service that the run does not start",
        {**SERVICE, "environment.remote_reward.service.num_services": 2},
        "environment.remote_reward.service.num_services", "has no effect without environment.remote_reward.service.model",
        {**REWARD_SERVICE, "environment.remote_reward.service.num_services": 2},
    ),
    Case(
        "text2sql has databases",
        {"environment.env_class": "text2sql"}, f"{GYM}.text2sql.db_path", "required by text2sql",
        {"environment.env_class": "text2sql", f"{GYM}.text2sql.db_path": "/sql"},
    ),
    Case(
        "a judge has a name",
        {"environment.env_class": "llm_as_a_judge"}, f"{GYM}.llm_as_a_judge.model", "required by llm_as_a_judge",
        {"environment.env_class": "llm_as_a_judge", f"{GYM}.llm_as_a_judge.model": "j"},
    ),
    Case(
        "a judge has an address",
        {f"{GYM}.llm_as_a_judge.base_url": "host:8000/v1"}, f"{GYM}.llm_as_a_judge.base_url", 'found "host:8000/v1"',
        {f"{GYM}.llm_as_a_judge.base_url": "http://host:8000/v1"},
    ),
    Case(
        "a search service has an address",
        {f"{GYM}.search.search_url": "bm25:docs.jsonl"}, f"{GYM}.search.search_url", "expected an address such as",
        {f"{GYM}.search.search_url": "https://host/retrieve"},
    ),
    Case(
        "documents are searched in one place",
        {f"{GYM}.search.search_url": "http://host/retrieve", f"{GYM}.search.corpus": "/docs.jsonl"}, f"{GYM}.search.corpus", "leave one of them out",
        {f"{GYM}.search.corpus": "/docs.jsonl"},
    ),
    Case(
        "ranks have GPUs",
        {**FOUR_GPUS, "slurm.gpus_per_node": 2}, f"{PLACEMENT}.policy_num_gpus_per_node", "but a node has 2 GPUs",
        {**FOUR_GPUS, "slurm.gpus_per_node": 4},
    ),
    Case(
        "ranks have GPUs of a type",
        {**FOUR_GPUS, "slurm.gpus_per_node": "h100:2"}, f"{PLACEMENT}.policy_num_gpus_per_node", "but a node has 2 GPUs",
        {**FOUR_GPUS, "slurm.gpus_per_node": "h100:4"},
    ),
    Case(
        "a type of GPUs has a number",
        {"slurm.gpus_per_node": "h100"}, "slurm.gpus_per_node", 'expected a number, or type and number such as "h100:8", found',
        {"slurm.gpus_per_node": "nvidia_a100-sxm4-80gb:1"},
    ),
    Case(
        "a replica fits into a node",
        {"slurm.gpus_per_node": 3, f"{ENGINE}.tensor_parallel_size": 4}, f"{ENGINE}.tensor_parallel_size", "a replica needs 4 GPUs",
        {"slurm.gpus_per_node": 4, f"{ENGINE}.tensor_parallel_size": 4},
    ),
    Case(
        "replicas fit into a node",
        {"slurm.gpus_per_node": 4, f"{ENGINE}.tensor_parallel_size": 2, "slurm.replicas_per_node": 3},
        "slurm.replicas_per_node", "3 replicas need 6 GPUs",
        {"slurm.gpus_per_node": 4, f"{ENGINE}.tensor_parallel_size": 2, "slurm.replicas_per_node": 2},
    ),
    Case(
        "as many replicas as are the least",
        {"slurm.min_replicas": 3, f"{ENGINE}.num_engines": 2}, "slurm.min_replicas", "expected at most 2, ",
        {"slurm.min_replicas": 2, f"{ENGINE}.num_engines": 2},
    ),
    Case(
        "replicas that only evaluate leave others",
        {"slurm.eval_replicas": 2, f"{ENGINE}.num_engines": 2}, "slurm.eval_replicas", "expected fewer than",
        {"slurm.eval_replicas": 1, f"{ENGINE}.num_engines": 2},
    ),
    Case(
        "the least are of those that generate",
        {"slurm.eval_replicas": 1, f"{ENGINE}.num_engines": 2, "slurm.min_replicas": 2}, "slurm.min_replicas", "expected at most 1, ",
        {"slurm.eval_replicas": 1, f"{ENGINE}.num_engines": 3, "slurm.min_replicas": 2},
    ),
    Case(
        "replicas that only evaluate need evaluations",
        {"slurm.eval_replicas": 1, f"{ENGINE}.num_engines": 2, "trainer.eval_interval": -1}, "slurm.eval_replicas", "eval_interval",
        {"slurm.eval_replicas": 1, f"{ENGINE}.num_engines": 2, "trainer.eval_interval": 5},
    ),
    Case(
        "lent engines wake with new weights",
        {"trainer.placement.lend": True, "trainer.fully_async.max_staleness_steps": 1, "trainer.fully_async.sync_weight_interval": 2},
        "trainer.placement.lend", "sync_weight_interval=1",
        {"trainer.placement.lend": True, "trainer.fully_async.max_staleness_steps": 1},
    ),
    Case(
        "a trainer lends GPUs that a replica fits on",
        {"trainer.placement.lend": True, f"{ENGINE}.tensor_parallel_size": 2}, "trainer.placement.lend", "a replica needs 2 GPUs",
        {"trainer.placement.lend": True, f"{ENGINE}.tensor_parallel_size": 1},
    ),
    Case(
        "replicas that only evaluate take no turns",
        {**FOUR_GPUS, "slurm.eval_replicas": 1, f"{ENGINE}.num_engines": 4, "trainer.placement.colocate_all": True},
        "slurm.eval_replicas", "colocate_all",
        {**FOUR_GPUS, "slurm.eval_replicas": 1, f"{ENGINE}.num_engines": 4},
    ),
    Case(
        "replicas of the run's own or elastic ones",
        {f"{ENGINE}.num_engines": 0}, f"{ENGINE}.num_engines", "or replicas of an elastic pool",
        {f"{ENGINE}.num_engines": 0, "slurm.elastic.replicas": 2, "slurm.min_replicas": 2},
    ),
    Case(
        "sbatch options of the pool have one place",
        {"slurm.elastic.extra": {"mem": "4G"}}, "slurm.elastic.extra.mem", "set slurm.elastic.mem_gb instead",
        {"slurm.elastic.extra": {"exclusive": True}},
    ),
    Case(
        "sbatch options of the pool that are hpcrl's",
        {"slurm.elastic.extra": {"gpus-per-node": 1}}, "slurm.elastic.extra.gpus-per-node", "hpcrl sets this option of sbatch itself",
        {"slurm.elastic.extra": {"reservation": "x"}},
    ),
    Case(
        "a line that a group may read has no secret",
        {"slurm.readable_by": "lab", "slurm.setup": ["export WANDB_API_KEY=3f2a"]}, "slurm.setup", '"export WANDB_API_KEY=$(cat FILE)" in slurm.setup',
        {"slurm.readable_by": "lab", "slurm.setup": ["export WANDB_API_KEY=$(cat ~/.key)", "export TOKENIZERS=x"]},
    ),
    Case(
        "a secret may begin with a slash or a dollar, and lie in quotes",
        {"slurm.readable_by": "lab", "slurm.setup": ["export AWS_SECRET_ACCESS_KEY=/ab+c"]}, "slurm.setup", "AWS_SECRET_ACCESS_KEY would be read",
        {"slurm.readable_by": "lab", "slurm.setup": [
            'export A_TOKEN="$(cat ~/.key)" B_TOKEN=$A_TOKEN C_TOKEN="${B_TOKEN}"', "export SSL_KEY='/etc/my.key' D_TOKEN=~/.key",
        ]},
    ),
    Case(
        "a secret in quotes may begin with a dollar",
        {"slurm.readable_by": "lab", "slurm.setup": ["export A_PASSWORD='$x &1'"]}, "slurm.setup", "A_PASSWORD would be read",
        {"slurm.readable_by": "lab", "slurm.setup": ['export A_PASSWORD="$x"']},
    ),
    Case(
        "an option of a program may be a secret too",
        {"slurm.readable_by": "lab", "slurm.setup": ["hf auth login --token=hf_3f2a"]}, "slurm.setup", "token would be read",
        {"slurm.readable_by": "lab", "slurm.setup": [
            "export NCCL_IB_PKEY=1", "export UCX_IB_PKEY=0x8001", "sort --key=2 f", "export SSL_KEY=/etc/ssl/my.key",
        ]},
    ),
    Case(
        "a variable that a container of a run that a group may read gets is no secret",
        {"slurm.readable_by": "lab", "slurm.container.kind": "apptainer", "slurm.container.image": "/h.sif",
         "slurm.container.arguments": ["--env=WANDB_API_KEY=3f2a"]},
        "slurm.container.arguments", "WANDB_API_KEY would be read",
        {"slurm.readable_by": "lab", "slurm.container.kind": "apptainer", "slurm.container.image": "/h.sif",
         "slurm.container.arguments": ["--env=NCCL_IB_PKEY=1"]},
    ),
    Case(
        "a variable that sbatch gives to a run that a group may read is no secret",
        {"slurm.readable_by": "lab", "slurm.extra.export": "ALL,WANDB_API_KEY=3f2a"}, "slurm.extra.export", "WANDB_API_KEY would be read",
        {"slurm.readable_by": "lab", "slurm.extra.export": "ALL,NCCL_IB_PKEY=1"},
    ),
    Case(
        "the interpreter of a container has a setting of its own",
        {"slurm.python": "/env/bin/python", "slurm.container.image": "/h.sif", "slurm.container.kind": "apptainer"},
        "slurm.python", "set slurm.container.python",
        {"slurm.python": "/env/bin/python"},
    ),
    Case(
        "a list of Pyxis is one word with its value", {**PYXIS, "slurm.container.arguments": ["--container-env", "A"]},
        "slurm.container.arguments", "write --container-env=VALUE as one word", {**PYXIS, "slurm.container.arguments": ["--container-env=A"]},
    ),
    Case(
        "a container has a kind",
        {"slurm.container.image": "/h.sif"}, "slurm.container.kind", 'set it to "apptainer" or "pyxis"',
        {"slurm.container.image": "/h.sif", "slurm.container.kind": "apptainer"},
    ),
    Case(
        "a container has an image",
        {"slurm.container.kind": "pyxis"}, "slurm.container.image", "slurm.container.kind is pyxis",
        {"slurm.container.image": "/h.sqsh", "slurm.container.kind": "pyxis"},
    ),
    Case(
        "mounts of a container",
        {"slurm.container.mounts": ["data"]}, "slurm.container.mounts", "found 'data'",
        {"slurm.container.mounts": ["/data", "/a:/b", "/c:/d:ro"]},
    ),
    Case("mounts of Pyxis have no blanks", {**PYXIS, MOUNTS: ["/a b"]}, MOUNTS, "paths without blanks", {**PYXIS, MOUNTS: ["/a"]}),
    Case(
        "GPUs that are not counted are those of whole nodes",
        {"slurm.gpus_per_node": 4, "slurm.gpu_option": "none", "slurm.cpus_per_task": 8}, "slurm.gpu_option", "set slurm.exclusive=true",
        {"slurm.gpus_per_node": 4, "slurm.gpu_option": "none", "slurm.cpus_per_task": 8, "slurm.exclusive": True},
    ),
    Case(
        "a run that is told to leave has done something before",
        {"slurm.signal_seconds": 200, "slurm.time_minutes": 5}, "slurm.signal_seconds", "at most half of slurm.time_minutes (150 s), found 200",
        {"slurm.signal_seconds": 200, "slurm.time_minutes": 10},
    ),
    Case(
        "each request leaves time to save",
        {"slurm.signal_seconds": 200, "slurm.time_minutes": 10, "slurm.requests": {"a": {"time_minutes": 5}}},
        "slurm.signal_seconds", "at most half of slurm.requests.a.time_minutes (150 s), found 200",
        {"slurm.signal_seconds": 200, "slurm.time_minutes": 10, "slurm.requests": {"a": {"time_minutes": 20}}},
    ),
    Case(
        "a time limit that a request inherits leaves time to save",
        {"slurm.signal_seconds": 200, "slurm.time_minutes": 5, "slurm.requests": {"a": {"time_minutes": 20}, "b": {}}},
        "slurm.signal_seconds", "at most half of slurm.time_minutes (150 s), found 200",
        {"slurm.signal_seconds": 200, "slurm.time_minutes": 5, "slurm.requests": {"a": {"time_minutes": 20}}},
    ),
    Case(
        "requests have GPUs, or none has",
        {"slurm.gpus_per_node": "h100:8", "slurm.requests": {"a": {"gpus_per_node": 0}}},
        "slurm.requests.a.gpus_per_node", "in all of its requests or in none; slurm.gpus_per_node has 8 GPUs, found 0",
        {"slurm.gpus_per_node": "h100:8", "slurm.requests": {"a": {"gpus_per_node": "a100:4"}, "b": {}}},
    ),
    Case(
        "a request with less time than an attempt may start with",
        {"slurm.time_min_minutes": 20, "slurm.requests": {"a": {"time_minutes": 10}}},
        "slurm.time_min_minutes", "expected at most slurm.requests.a.time_minutes (10), found 20",
        {"slurm.time_min_minutes": 20, "slurm.requests": {"a": {"time_minutes": 20}}},
    ),
    Case(
        "names of requests are parts of names of jobs",
        {"slurm.requests": {"a b": {}}}, "slurm.requests.a b", "expected a name of at most 32 letters",
        {"slurm.requests": {"a-b_1": {}}},
    ),
    Case(
        "sbatch options of a request have one place",
        {"slurm.requests": {"a": {"extra": {"mem": "4G"}}}}, "slurm.requests.a.extra.mem", "set slurm.mem_gb, which holds for all requests, instead",
        {"slurm.requests": {"a": {"extra": {"reservation": "x"}}}},
    ),
    Case(
        "which jobs wait for which is up to hpcrl where there are several requests",
        {"slurm.extra": {"dependency": "singleton"}, "slurm.requests": {"a": {}}}, "slurm.extra.dependency", "hpcrl sets this option of sbatch itself",
        {"slurm.extra": {"dependency": "singleton"}},
    ),
    Case(
        "a shortened time limit leaves as much time",
        {"slurm.signal_seconds": 200, "slurm.time_min_minutes": 5}, "slurm.signal_seconds", "at most half of slurm.time_min_minutes (150 s), found 200",
        {"slurm.signal_seconds": 200, "slurm.time_min_minutes": 10},
    ),
    Case(
        "the least time limit is not above the time limit",
        {"slurm.time_minutes": 20, "slurm.time_min_minutes": 30}, "slurm.time_min_minutes", "expected at most slurm.time_minutes (20), found 30",
        {"slurm.time_minutes": 20, "slurm.time_min_minutes": 20},
    ),
    Case(
        "sbatch options have one place",
        {"slurm.extra": {"cpus-per-task": 4}}, "slurm.extra.cpus-per-task", "set slurm.cpus_per_task instead",
        {"slurm.extra": {"licenses": "x"}},
    ),
    Case(
        "sbatch options that are hpcrl's",
        {"slurm.extra": {"array": "0-3"}}, "slurm.extra.array", "hpcrl sets this option of sbatch itself",
        {"slurm.extra": {"licenses": "x"}},
    ),
    Case(
        "rewards are known",
        {"environment.reward_function": {"boxed_meth": 1.0}}, "environment.reward_function", 'found "boxed_meth"; did you mean boxed_math?',
        {"environment.reward_function": {"boxed_math": 1.0, "format": 0.0, "mine.rewards:taste": -0.5}},
    ),
    Case(
        "rewards of evaluation are known",
        {"environment.eval_reward_function": {"chess": 1.0}}, "environment.eval_reward_function", "expected names of single_choice, ",
        {"environment.eval_reward_function": {"gsm8k": 1.0}},
    ),
    Case(
        "a reward counts",
        {"environment.reward_function": {"gsm8k": 0.0, "format": 0.0}}, "environment.reward_function", "every weight is 0",
        {"environment.reward_function": {"gsm8k": 1.0, "format": 0.0}},
    ),
    Case(
        "what filters is among the rewards",
        {"environment.reward_function": {"gsm8k": 1.0}, **FILTERS, f"{ALGORITHM}.filter_reward_metric": ["format"]},
        f"{ALGORITHM}.filter_reward_metric", '"format" is not in environment.reward_function, whose rewards are gsm8k',
        {"environment.reward_function": {"gsm8k": 1.0, "format": 0.0}, **FILTERS, f"{ALGORITHM}.filter_reward_metric": ["format"]},
    ),
    Case(
        "an environment or rewards pay",
        {"environment.reward_function": {"gsm8k": 1.0}, "environment.env_class": "mine.envs:Mine"},
        "environment.env_class", "so that mine.envs:Mine has no effect",
        {"environment.eval_reward_function": {"gsm8k": 1.0}, "environment.env_class": "mine.envs:Mine"},
    ),
    Case(
        "a name of hpcrl's environments stays theirs",
        {"environment.names": {"countdown": "mine.envs:Mine"}},
        "environment.names", '"countdown" is an environment of hpcrl',
        {"environment.names": {"my_countdown": "mine.envs:Mine"}, "environment.env_class": "my_countdown"},
    ),
    Case(
        "a name leads to a class",
        {"environment.names": {"calc": "mine.envs.Mine"}},
        "environment.names", 'its "package.module:Class", found "calc" = "mine.envs.Mine"',
        {"environment.names": {"calc": "mine.envs:Mine"}},
    ),
    Case(
        "a name is no import path, whose rows would run other code",
        {"environment.names": {"other.envs:Other": "mine.envs:Mine"}},
        "environment.names", 'expected a name without ":"',
        {"environment.names": {"Other-v0": "mine.envs:Mine"}},
    ),
    Case(
        "a name of the user's is known",
        {"environment.names": {"calc": "mine.envs:Mine"}, "environment.env_class": "clac"},
        "environment.env_class", "did you mean calc",
        {"environment.names": {"calc": "mine.envs:Mine"}, "environment.env_class": "calc"},
    ),
    Case(
        "the overlong penalty is listed",
        {"environment.overlong_reward.penalty_factor": 0.5}, "environment.overlong_reward.penalty_factor", "without overlong in",
        {
            "environment.overlong_reward": {"penalty_factor": 0.5, "buffer_length": 1024},
            "environment.reward_function": {"gsm8k": 1.0, "overlong": 1.0},
        },
    ),
    Case(
        "the buffer of the overlong penalty is within the longest response",
        {"environment.reward_function": {"overlong": 1.0}}, "environment.overlong_reward.buffer_length",
        "expected at most the longest response (generator.sampling_params.max_generate_length = 1024), found 4096",
        {"environment.reward_function": {"overlong": 1.0}, "generator.sampling_params.max_generate_length": 4096},
    ),
    Case(
        "the buffer of the overlong penalty is within the longest response of evaluation",
        {
            "environment.eval_reward_function": {"overlong": 1.0}, "environment.overlong_reward.buffer_length": 512,
            "generator.eval_sampling_params.max_generate_length": 300,
        },
        "environment.overlong_reward.buffer_length", "generator.eval_sampling_params.max_generate_length = 300",
        {"environment.eval_reward_function": {"overlong": 1.0}, "environment.overlong_reward.buffer_length": 512},
    ),
]  # fmt: skip
