"""Combinations of settings of engines, of their endpoint and of agents that ask there, which only hpcrl has rules about."""

from __future__ import annotations

from tests.config.rules.skyrl_cases import ALGORITHM, CRITIC, ENGINE, FOUR_GPUS, GYM, LORA, SFT, Case

REMOTE = {f"{ENGINE}.remote_urls": ["http://a:8000"]}
NGRAM = {f"{ENGINE}.speculative.method": "ngram"}
VLLM_TEACHER = {
    "trainer.distillation.enable": True,
    "trainer.distillation.model_path": "t",
    "trainer.distillation.backend": "vllm",
}

ENGINES = [
    Case(
        "the embedded engine has no drafts",
        {f"{ENGINE}.backend": "transformers", f"{ENGINE}.speculative.method": "ngram"},
        f"{ENGINE}.speculative", 'has no effect with generator.inference_engine.backend="transformers"; leave it out, or set vllm',
        {f"{ENGINE}.backend": "transformers"},
    ),
    Case(
        "drafts of a model want one",
        {f"{ENGINE}.speculative.method": "draft_model"}, f"{ENGINE}.speculative.model", "a directory or a name on the hub",
        {f"{ENGINE}.speculative.method": "draft_model", f"{ENGINE}.speculative.model": "d"},
    ),
    Case(
        "drafts are looked up by at least as few tokens as at most",
        {**NGRAM, f"{ENGINE}.speculative.prompt_lookup_min": 5}, f"{ENGINE}.speculative.prompt_lookup_min",
        "expected at most prompt_lookup_max (4), found 5", {**NGRAM, f"{ENGINE}.speculative.prompt_lookup_min": 4},
    ),
    Case(
        "vLLM has no min_p with drafts",
        {**NGRAM, "generator.eval_sampling_params.min_p": 0.1}, "generator.eval_sampling_params.min_p", "leave one of them out",
        NGRAM,
    ),
    Case(
        "nor biases of logits",
        {**NGRAM, "generator.eval_sampling_params.additional_kwargs": {"logit_bias": {"3": 1.0}}},
        "generator.eval_sampling_params.additional_kwargs.logit_bias", "leave one of them out",
        {**NGRAM, "generator.eval_sampling_params.additional_kwargs": {"presence_penalty": 0.1}},
    ),
    Case(
        "experts of tokens have not been tried with drafts",
        {**NGRAM, "slurm.gpus_per_node": 8, "trainer.policy.experts.router_replay": "R3"},
        f"{ENGINE}.speculative.method", "have not been tried with drafts",
        {**NGRAM, "slurm.gpus_per_node": 8},
    ),
    Case(
        "drafts are the business of who starts the engine",
        {**REMOTE, **NGRAM}, f"{ENGINE}.speculative.method", "whose engines are on no node of the run; leave it out",
        REMOTE,
    ),
    Case(
        "options of vLLM want vLLM",
        {f"{ENGINE}.backend": "transformers", f"{ENGINE}.engine_init_kwargs": {"swap_space": 1}},
        f"{ENGINE}.engine_init_kwargs", 'has no effect with generator.inference_engine.backend="transformers"',
        {f"{ENGINE}.backend": "transformers"},
    ),
    Case(
        "the embedded engine has few further sampling parameters",
        {f"{ENGINE}.backend": "transformers", "generator.sampling_params.additional_kwargs": {"stop_token_ids": [3]}},
        "generator.sampling_params.additional_kwargs.stop_token_ids", "has only ignore_eos and min_tokens",
        {f"{ENGINE}.backend": "transformers", "generator.sampling_params.additional_kwargs": {"ignore_eos": True}},
    ),
    Case(
        "vLLM's highest temperature",
        {"generator.sampling_params.temperature": 2.5},
        "generator.sampling_params.temperature", "expected at most 2, the highest that vLLM takes, found 2.5",
        {"generator.sampling_params.temperature": 2.5, f"{ENGINE}.backend": "transformers"},
    ),
    Case(
        "vLLM's highest temperature in evaluation",
        {"generator.eval_sampling_params.temperature": 2.5},
        "generator.eval_sampling_params.temperature", "the highest that vLLM takes",
        {"generator.eval_sampling_params.temperature": 2.0},
    ),
    Case(
        "vLLM's largest penalties",
        {"generator.eval_sampling_params.additional_kwargs": {"presence_penalty": 3}},
        "generator.eval_sampling_params.additional_kwargs.presence_penalty", "expected a number from -2 to 2, found 3",
        {"generator.eval_sampling_params.additional_kwargs": {"presence_penalty": -2}},
    ),
    Case(
        "nor of logits processors",
        {f"{ENGINE}.engine_init_kwargs": {"logits-processors": ["a:B"]}},
        f"{ENGINE}.engine_init_kwargs.logits-processors", "that the trainer does not compute; leave it out",
        {f"{ENGINE}.engine_init_kwargs": {"swap-space": 1}},
    ),
    Case(
        "a pass of the engine holds all its sequences",
        {f"{ENGINE}.max_num_seqs": 9000}, f"{ENGINE}.max_num_batched_tokens", f"expected at least {ENGINE}.max_num_seqs (9000)",
        {f"{ENGINE}.max_num_seqs": 8192},
    ),
    Case(
        "engine options have one place",
        {f"{ENGINE}.engine_init_kwargs": {"enforce-eager": True}},
        f"{ENGINE}.engine_init_kwargs.enforce-eager", f"set {ENGINE}.enforce_eager instead",
        {f"{ENGINE}.engine_init_kwargs": {"swap-space": 1}},
    ),
    Case(
        "entries of config.json for the engine are a table",
        {f"{ENGINE}.engine_init_kwargs": {"hf_overrides": "{}"}},
        f"{ENGINE}.engine_init_kwargs.hf_overrides", "expected a table",
        {f"{ENGINE}.engine_init_kwargs": {"hf_overrides": {"a": 1}}},
    ),
    Case(
        "engine options that are hpcrl's",
        {f"{ENGINE}.engine_init_kwargs": {"port": 80}}, f"{ENGINE}.engine_init_kwargs.port", "hpcrl sets this option",
        {f"{ENGINE}.engine_init_kwargs": {"swap-space": 1}},
    ),
    Case(
        "nor what turns them off",
        {f"{ENGINE}.engine_init_kwargs": {"no-enable-lora": True}}, f"{ENGINE}.engine_init_kwargs.no-enable-lora", "hpcrl sets this option",
        {f"{ENGINE}.engine_init_kwargs": {"no-async-scheduling": True}},
    ),
    Case(
        "experts are shared by a setting",
        {f"{ENGINE}.engine_init_kwargs": {"enable_expert_parallel": True}},
        f"{ENGINE}.engine_init_kwargs.enable_expert_parallel", f"set {ENGINE}.expert_parallel_size instead",
        {f"{ENGINE}.data_parallel_size": 2, f"{ENGINE}.expert_parallel_size": 2, "slurm.gpus_per_node": 2},
    ),
    Case(
        "whole experts want GPUs",
        {f"{ENGINE}.data_parallel_size": 2, f"{ENGINE}.expert_parallel_size": 2},
        f"{ENGINE}.expert_parallel_size", "without GPUs vLLM 0.31 needs a part of every expert",
        {f"{ENGINE}.data_parallel_size": 2, f"{ENGINE}.expert_parallel_size": 2, "slurm.gpus_per_node": 2},
    ),
    Case(
        "copies of the weights are on this node",
        {f"{ENGINE}.engine_init_kwargs": {"data-parallel-rank": 1}},
        f"{ENGINE}.engine_init_kwargs.data-parallel-rank", "hpcrl sets this option",
        {f"{ENGINE}.data_parallel_size": 2},
    ),
    Case(
        "a teacher's engine has its options in one place too",
        {**VLLM_TEACHER, "trainer.distillation.engine.engine_init_kwargs": {"tensor-parallel-size": 2}},
        "trainer.distillation.engine.engine_init_kwargs.tensor-parallel-size", "set trainer.distillation.engine.tensor_parallel_size instead",
        {**VLLM_TEACHER, "trainer.distillation.engine.engine_init_kwargs": {"quantization": "fp8"}},
    ),
    Case(
        "quantized engines want GPUs",
        {f"{ENGINE}.quantization": "fp8"}, f"{ENGINE}.quantization", "needs GPUs, but slurm.gpus_per_node=0; leave it out, or choose fp8_per_channel",
        {f"{ENGINE}.quantization": "fp8", "slurm.gpus_per_node": 1},
    ),
    Case(
        "quantized engines compute in half precision",
        {f"{ENGINE}.quantization": "fp8", f"{ENGINE}.model_dtype": "float32", "slurm.gpus_per_node": 1},
        f"{ENGINE}.quantization", "needs activations in bfloat16 or float16",
        {f"{ENGINE}.quantization": "fp8", f"{ENGINE}.model_dtype": "float16", "slurm.gpus_per_node": 1},
    ),
    Case(
        "a node has whole copies of the weights, or a part of one",
        {f"{ENGINE}.data_parallel_size": 2, f"{ENGINE}.tensor_parallel_size": 6, "slurm.gpus_per_node": 4},
        f"{ENGINE}.tensor_parallel_size", "a replica needs 12 GPUs",
        {f"{ENGINE}.data_parallel_size": 6, f"{ENGINE}.tensor_parallel_size": 2, "slurm.gpus_per_node": 4},
    ),
    Case(
        "a pool has replicas of one node",
        {f"{ENGINE}.tensor_parallel_size": 4, "slurm.gpus_per_node": 2, "slurm.elastic.replicas": 1},
        "slurm.elastic.replicas", "does not work where a replica is on several nodes",
        {f"{ENGINE}.tensor_parallel_size": 4, "slurm.gpus_per_node": 2},
    ),
    Case(
        "pipeline stages without GPUs are compiled",
        {f"{ENGINE}.pipeline_parallel_size": 2}, f"{ENGINE}.enforce_eager", "where it runs eagerly; set it to false",
        {f"{ENGINE}.pipeline_parallel_size": 2, f"{ENGINE}.enforce_eager": False},
    ),
    Case(
        "a key is for engines of others",
        {f"{ENGINE}.remote_key_file": "key"}, f"{ENGINE}.remote_key_file", f"has no effect without {ENGINE}.remote_urls",
        {**REMOTE, f"{ENGINE}.remote_key_file": "key"},
    ),
    Case(
        "certificates are for TLS",
        {**REMOTE, f"{ENGINE}.remote_ca_file": "ca"}, f"{ENGINE}.remote_ca_file", "has no effect without an https address",
        {f"{ENGINE}.remote_urls": ["https://a"], f"{ENGINE}.remote_ca_file": "ca"},
    ),
    Case(
        "engines of others are asked by somebody",
        {**REMOTE, **SFT}, f"{ENGINE}.remote_urls", 'has no effect with trainer.mode="sft"', SFT,
    ),
    Case(
        "engines of others have addresses",
        {f"{ENGINE}.remote_urls": ["a:80"]}, f"{ENGINE}.remote_urls", "such as https://host:8000, found 'a:80'", REMOTE,
    ),
    Case(
        "each engine of others is one",
        {f"{ENGINE}.remote_urls": ["http://a", "http://a"], f"{ENGINE}.num_engines": 2}, f"{ENGINE}.remote_urls", "each address once",
        {f"{ENGINE}.remote_urls": ["http://a", "http://a:1"], f"{ENGINE}.num_engines": 2},
    ),
    Case(
        "engines of others are as many as there are",
        {**REMOTE, f"{ENGINE}.num_engines": 2}, f"{ENGINE}.num_engines", "expected 1, one for each of", REMOTE,
    ),
    Case(
        "engines of others get whole policies",
        {**REMOTE, f"{LORA}.rank": 8}, f"{ENGINE}.merge_lora", "get whole policies, not adapters",
        {**REMOTE, f"{LORA}.rank": 8, f"{ENGINE}.merge_lora": True},
    ),
    Case(
        "engines of others are on no node of the run",
        {**REMOTE, f"{ENGINE}.weight_copy_dir": "/tmp"}, f"{ENGINE}.weight_copy_dir", f"does not work with {ENGINE}.remote_urls", REMOTE,
    ),
    Case(
        "FlashInfer needs GPUs",
        {f"{ENGINE}.use_flashinfer": True}, f"{ENGINE}.use_flashinfer", "set it to false",
        {f"{ENGINE}.use_flashinfer": True, "slurm.gpus_per_node": 1},
    ),
    Case(
        "only adapters are merged for engines",
        {f"{ENGINE}.merge_lora": True}, f"{ENGINE}.merge_lora", "without trainer.policy.model.lora.rank; leave it out",
        {f"{ENGINE}.merge_lora": True, f"{LORA}.rank": 8},
    ),
    Case(
        "merged adapters are not split",
        {f"{ENGINE}.fully_sharded_loras": True, f"{ENGINE}.merge_lora": True, f"{LORA}.rank": 8},
        f"{ENGINE}.fully_sharded_loras", "has no effect without generator.inference_engine.merge_lora=false; leave it out",
        {f"{ENGINE}.fully_sharded_loras": True, f"{LORA}.rank": 8},
    ),
    Case(
        "ranks that vLLM takes",
        {f"{LORA}.rank_pattern": {"q_proj": 600}, f"{LORA}.rank": 8},
        f"{LORA}.rank", "up to rank 512, found 600; set generator.inference_engine.merge_lora=true",
        {f"{ENGINE}.merge_lora": True, f"{LORA}.rank_pattern": {"q_proj": 600}, f"{LORA}.rank": 8},
    ),
]  # fmt: skip

ENDPOINT = f"{ENGINE}.enable_http_endpoint"
COMMAND = {f"{GYM}.agent.command": ["python", "agent.py"]}
AGENT = {"environment.env_class": "agent", ENDPOINT: True, "generator.max_turns": 3, **COMMAND}
URL, BOX, HOST = "http://127.0.0.1:8080/play", f"{GYM}.agent.container", "generator.inference_engine.http_endpoint_host"
SERVED = {"environment.env_class": "agent", ENDPOINT: True, f"{GYM}.agent.service.url": URL}
BOXED = {**AGENT, f"{BOX}.kind": "apptainer", f"{BOX}.image": "/a.sif"}

ROBOT = {
    "environment.env_class": "robot",
    f"{GYM}.robot.simulator": "gymnasium",
    f"{GYM}.robot.options": {"id": "Reacher-v5"},
    f"{ENGINE}.max_num_seqs": 64,
}

AGENTS = [
    Case("a robot has a simulator", {"environment.env_class": "robot"}, f"{GYM}.robot.simulator", "required by robot", ROBOT),
    Case("a simulator is one that there is", {**ROBOT, f"{GYM}.robot.simulator": "gym"}, f"{GYM}.robot.simulator", "gymnasium", ROBOT),
    Case("gymnasium is told which environment", {**ROBOT, f"{GYM}.robot.options": {}}, f"{GYM}.robot.options", "needs `id`", ROBOT),
    Case("each sample has a simulator", {**ROBOT, f"{ENGINE}.max_num_seqs": 257}, f"{ENGINE}.max_num_seqs", "at most 256", ROBOT),
    Case(
        "an endpoint has one address",
        {ENDPOINT: True, f"{ENGINE}.http_endpoint_host": "0.0.0.0"}, f"{ENGINE}.http_endpoint_host", "expected one address",
        {ENDPOINT: True, f"{ENGINE}.http_endpoint_host": "127.0.0.2"},
    ),
    Case(
        "those who ask at an endpoint have threads",
        {ENDPOINT: True, f"{GYM}.max_env_workers": 0}, f"{GYM}.max_env_workers", "needs threads", {f"{GYM}.max_env_workers": 0},
    ),
    Case("an agent has a program", {**AGENT, f"{GYM}.agent.command": []}, f"{GYM}.agent.command", "required by agent", AGENT),
    Case("an agent has an endpoint", {**AGENT, ENDPOINT: False}, ENDPOINT, "required by agent", {ENDPOINT: False, **COMMAND}),
    Case(
        "an agent's rows are its conversations",
        {**AGENT, "generator.step_wise_trajectories": True}, "generator.step_wise_trajectories", "no effect with agent", AGENT,
    ),
    Case(
        "an agent speaks in messages",
        {**AGENT, "generator.use_conversation_multi_turn": False}, "generator.use_conversation_multi_turn", "asks with messages",
        {"generator.use_conversation_multi_turn": False},
    ),
    Case(
        "what an agent said is judged by rewards that there are",
        {**AGENT, f"{GYM}.agent.reward_function": {"overlong": 1.0}}, f"{GYM}.agent.reward_function", "overlong",
        {**AGENT, f"{GYM}.agent.reward_function": {"gsm8k": 1.0}},
    ),
    Case(
        "one of an agent's rewards counts",
        {**AGENT, f"{GYM}.agent.reward_function": {"gsm8k": 0.0}}, f"{GYM}.agent.reward_function", "every weight is 0",
        {**AGENT, f"{GYM}.agent.reward_function": {"gsm8k": 1.0, "format": 0.0}},
    ),
    Case(
        "an agent has one reward",
        {**AGENT, f"{GYM}.agent.reward": "exit_code", f"{GYM}.agent.reward_function": {"gsm8k": 1.0}},
        f"{GYM}.agent.reward", "not the exit code", {**AGENT, f"{GYM}.agent.reward": "exit_code"},
    ),
    Case(
        "an agent is a program or a service",
        {**AGENT, f"{GYM}.agent.service.url": URL}, f"{GYM}.agent.command", "a service plays and scores", SERVED,
    ),
    Case(
        "a service scores itself",
        {**SERVED, f"{GYM}.agent.reward_function": {"gsm8k": 1.0}}, f"{GYM}.agent.reward_function", "a service plays and scores", SERVED,
    ),
    Case(
        "a service has an address",
        {**SERVED, f"{GYM}.agent.service.url": "http://me:secret@host/play"}, f"{GYM}.agent.service.url", "without a password",
        SERVED,
    ),
    Case(
        "a service on another node reaches the policy",
        {**SERVED, f"{GYM}.agent.service.url": "http://agents:8080/play"}, HOST, 'agents (environment.skyrl_gym.agent.service.url) does not reach the policy at 127.0.0.1; set it to "node"',
        {**SERVED, f"{GYM}.agent.service.url": "http://agents:8080/play", HOST: "node"},
    ),
    Case(
        "a token is for a service",
        {**AGENT, f"{GYM}.agent.service.token_file": "/t"}, f"{GYM}.agent.service.token_file", "no effect without service.url",
        {**SERVED, f"{GYM}.agent.service.token_file": "/t"},
    ),
    Case(
        "a container has an image",
        {**AGENT, f"{BOX}.kind": "apptainer"}, f"{BOX}.image", "set it: ", {**AGENT, f"{BOX}.kind": "apptainer", f"{BOX}.image": "/a.sif"},
    ),
    Case(
        "an image is for a container",
        {**AGENT, f"{BOX}.image": "/a.sif"}, f"{BOX}.image", "no effect without", {**AGENT, f"{BOX}.kind": "enroot", f"{BOX}.image": "/a.sqsh"},
    ),
    Case(
        "a service is in no container of hpcrl's",
        {**SERVED, f"{BOX}.kind": "apptainer", f"{BOX}.image": "/a.sif"}, f"{BOX}.kind", "a service is asked", SERVED,
    ),
    Case(
        "mounts are paths",
        {**BOXED, f"{BOX}.mounts": ["data"]}, f"{BOX}.mounts", "absolute paths", {**BOXED, f"{BOX}.mounts": ["/data:/data:ro"]},
    ),
    Case(
        "mounts of Enroot have no blanks",
        {**BOXED, f"{BOX}.kind": "enroot", f"{BOX}.mounts": ["/a b"]}, f"{BOX}.mounts", "expected paths without blanks",
        {**BOXED, f"{BOX}.kind": "apptainer", f"{BOX}.mounts": ["/a b"]},
    ),
    Case("variables have names", {**BOXED, f"{BOX}.env": ["A=1"]}, f"{BOX}.env", "names of variables", {**BOXED, f"{BOX}.env": ["A"]}),
    Case(
        "an agent's samples have no critic",
        {**AGENT, **CRITIC}, ENDPOINT, "does not work with trainer.critic.model.path", AGENT,
    ),
    Case(
        "an agent's samples have several conversations",
        {**AGENT, "environment.reward_model.model": "rm", "environment.reward_model.use_environment": True}, ENDPOINT,
        "does not work with environment.reward_model.model", AGENT,
    ),
    Case(
        "an agent's samples have one advantage",
        {**AGENT, f"{ALGORITHM}.advantage_estimator": "reinforce++"}, ENDPOINT, "advantage_estimator=reinforce++",
        {**AGENT, **FOUR_GPUS, "trainer.policy_mini_batch_size": 2, "generator.n_samples_per_prompt": 3},
    ),
    Case(
        "weights over the network come into a copy on each node",
        {f"{ENGINE}.weight_sync_backend": "gloo"},
        f"{ENGINE}.weight_sync_backend", f"set {ENGINE}.weight_copy_dir",
        {f"{ENGINE}.weight_sync_backend": "gloo", f"{ENGINE}.weight_copy_dir": "$TMPDIR"},
    ),
    Case(
        "changes of weights are applied to a copy on each node",
        {f"{ENGINE}.full_weights_interval": 10},
        f"{ENGINE}.full_weights_interval", f"set {ENGINE}.weight_copy_dir",
        {f"{ENGINE}.full_weights_interval": 10, f"{ENGINE}.weight_copy_dir": "$TMPDIR"},
    ),
    Case(
        "adapters reach engines as files",
        {f"{ENGINE}.full_weights_interval": 10, f"{ENGINE}.weight_copy_dir": "$TMPDIR", f"{LORA}.rank": 8},
        f"{ENGINE}.full_weights_interval", f"set {ENGINE}.merge_lora=true",
        {f"{ENGINE}.full_weights_interval": 10, f"{ENGINE}.weight_copy_dir": "$TMPDIR", f"{LORA}.rank": 8, f"{ENGINE}.merge_lora": True},
    ),
    Case(
        "stages are those of the network",
        {f"{ENGINE}.weight_sync_timeout_seconds": 5.0},
        f"{ENGINE}.weight_sync_timeout_seconds", "has no effect with",
        {f"{ENGINE}.weight_sync_timeout_seconds": 5.0, f"{ENGINE}.weight_sync_backend": "gloo", f"{ENGINE}.weight_copy_dir": "/dev/shm"},
    ),
    Case(
        "NCCL needs GPUs",
        {f"{ENGINE}.weight_sync_backend": "nccl", f"{ENGINE}.weight_copy_dir": "$TMPDIR"},
        f"{ENGINE}.weight_sync_backend", "nccl needs GPUs",
        {f"{ENGINE}.weight_sync_backend": "nccl", f"{ENGINE}.weight_copy_dir": "$TMPDIR", "slurm.gpus_per_node": 1},
    ),
    Case(
        "NCCL needs GPUs of its own at both ends",
        {
            f"{ENGINE}.weight_sync_backend": "nccl", f"{ENGINE}.weight_copy_dir": "$TMPDIR", "slurm.gpus_per_node": 1,
            "trainer.placement.colocate_all": True,
        },
        f"{ENGINE}.weight_sync_backend", "NCCL refuses two processes of one GPU",
        {
            f"{ENGINE}.weight_sync_backend": "gloo", f"{ENGINE}.weight_copy_dir": "$TMPDIR", "slurm.gpus_per_node": 1,
            "trainer.placement.colocate_all": True,
        },
    ),
]  # fmt: skip
