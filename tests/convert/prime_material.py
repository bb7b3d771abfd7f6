"""Published configurations of prime-rl, shortened to what they set (examples/basic, examples/advanced, configs, 2025 and 2026)."""

REVERSE_TEXT = """
max_steps = 20
seq_len = 2048
model.name = "PrimeIntellect/Qwen3-0.6B-Reverse-Text-SFT"
wandb = { project = "reverse-text", name = "reverse-text" }
ckpt = {}
inference = {}
trainer.optim.lr = 3e-6
[orchestrator]
batch_size = 128
group_size = 16
train.sampling.max_completion_tokens = 128
renderer.name = "prime-qwen3"
[[orchestrator.train.env]]
name = "reverse-text"
env.taskset = { id = "reverse-text-v1" }
env.agent.harness = { id = "null", runtime = { type = "subprocess" } }
"""

ALPHABET_SORT = """
max_steps = 200
seq_len = 2048
ckpt = {}
model.name = "Qwen/Qwen3-4B-Instruct-2507"
wandb = { project = "alphabet-sort", name = "alphabet-sort" }
trainer = { model = { impl = "auto", ac = { freq = 1 }, lora = { rank = 32, alpha = 64 } }, optim = { lr = 1e-5 } }
inference = {}
[orchestrator]
batch_size = 256
group_size = 16
train.sampling.max_completion_tokens = 768
[[orchestrator.train.env]]
name = "alphabet-sort"
taskset = { id = "alphabet-sort", min_turns = 3, max_turns = 5, task = { power_per_turn = false } }
harness = { id = "null", runtime = { type = "subprocess" } }
"""

WORDLE = """
max_steps = 200
seq_len = 8192
deployment = { num_train_gpus = 2, num_infer_gpus = 6 }
wandb = { project = "wordle", name = "wordle" }
ckpt = {}
model.name = "PrimeIntellect/Qwen3-1.7B-Wordle-SFT"
trainer = {}
inference.parallel.dp = 6
[orchestrator]
batch_size = 512
group_size = 16
train.sampling.max_completion_tokens = 1024
renderer.name = "prime-qwen3"
[[orchestrator.train.env]]
name = "wordle"
env.taskset = { id = "wordle-v1" }
env.player.harness = { id = "null", runtime = { type = "subprocess" } }
"""

HENDRYCKS = """
max_steps = 5000
wandb = { project = "hendrycks-sanity", name = "hendrycks-sanity" }
deployment = { num_train_gpus = 4, num_infer_gpus = 4 }
model.name = "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B"
trainer.model.seq_len = 16384
inference.model.max_model_len = 8192
[orchestrator]
batch_size = 512
group_size = 8
seq_len = 8192
renderer = { name = "default", reasoning_parser = "think" }
eval.interval = 50
[[orchestrator.train.env]]
name = "hendrycks-math"
taskset = { id = "math-env", dataset_name = "mikasenghaas/Sanity-Test-R1D-1.5B", dataset_subset = "default" }
harness = { id = "null", runtime = { type = "subprocess" } }
[[orchestrator.eval.env]]
name = "aime2024"
taskset = { id = "aime24" }
harness = { id = "null", runtime = { type = "subprocess" } }
group_size = 32
"""

WIKI_SEARCH = """
max_steps = 200
seq_len = 4096
deployment = { num_train_gpus = 2, num_infer_gpus = 6 }
model.name = "Qwen/Qwen3-4B-Instruct-2507"
monitors.wandb = { project = "wiki-search", name = "wiki-search" }
ckpt = {}
inference.vllm.tool_call_parser = "hermes"
[trainer]
optim = { lr = 1e-5, weight_decay = 0.0 }
model.lora = { rank = 8, dropout = 0.0, target_modules = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"] }
[orchestrator]
batch_size = 512
concurrency.initial_inflight = 1024
train.group_size = 16
train.sampling.max_completion_tokens = 512
[[orchestrator.train.source]]
name = "wiki-search"
curriculum = { gates = { zero_advantage = { type = "advantage_range" } } }
env.taskset.id = "wiki-search"
env.agent.harness.id = "null"
env.agent.runtime.type = "subprocess"
"""

QWEN_30B_MATH = """
seq_len = 32768
log.level = "debug"
model.name = "Qwen/Qwen3-30B-A3B-Thinking-2507"
weight_broadcast.type = "nccl"
deployment = { type = "multi_node", num_train_nodes = 2, num_infer_nodes = 2 }
slurm.job_name = "math-qwen30b"
ckpt.interval = 100
wandb.project = "qwen30b-math"
inference.parallel.tp = 8
[trainer]
optim = { type = "adamw", lr = 1e-6 }
[trainer.model]
impl = "custom"
attn = "flash_attention_3"
ep = 8
compile = {}
ac_offloading.max_inflight_activations = 5
ac.freq = 1
[orchestrator]
batch_size = 512
oversampling_factor = 2
max_off_policy_steps = 8
train.sampling.max_completion_tokens = 32768
eval.interval = 25
[[orchestrator.train.env]]
name = "math"
env.taskset = { id = "i3_math_v1" }
env.agent.harness = { id = "null", runtime = { type = "subprocess" } }
[[orchestrator.eval.env]]
name = "aime2025"
env.taskset = { id = "aime25-v1" }
env.agent.harness = { id = "null", runtime = { type = "subprocess" } }
"""

ACEREASON = """
inference_gpu_ids = [0, 1, 2, 3, 4, 5]
trainer_gpu_ids = [6, 7]
max_steps = 500
seq_len = 8192
model.name = "deepseek-ai/DeepSeek-R1-Distill-Qwen-7B"
ckpt.interval = 100
wandb = { project = "acereason-math", name = "stage1" }
trainer.model.ac = {}
inference.parallel.dp = 6
[orchestrator]
max_inflight_rollouts = 128
rollouts_per_example = 8
sampling = { temperature = 0.6, max_tokens = 8192 }
eval.interval = 50
[[orchestrator.env]]
id = "math-env"
args = { dataset_name = "nvidia/AceReason-Math", dataset_subset = "default", question_key = "problem" }
[[orchestrator.eval.env]]
id = "math500"
rollouts_per_example = 1
[[orchestrator.eval.env]]
id = "aime2024"
rollouts_per_example = 32
"""

ALPHABET_SORT_2025 = """
max_steps = 100
ckpt = {}
model.name = "Qwen/Qwen3-4B-Instruct-2507"
trainer.model = { impl = "liger_kernel", ac = { freq = 1 }, experimental.lora = { rank = 16, alpha = 64 } }
trainer.weight_broadcast.adapter_only = true
trainer.optim.lr = 1e-5
inference.enable_lora = true
[orchestrator]
batch_size = 512
rollouts_per_example = 8
seq_len = 2048
lora_name = "r16-64-1e-5"
sampling.max_tokens = 768
[[orchestrator.env]]
id = "primeintellect/alphabet-sort"
name = "alphabet-sort"
args = { min_turns = 3, max_turns = 3 }
"""

FOUR_NODES = """
max_steps = 1000
seq_len = 131072
log.level = "debug"
slurm = {}
deployment = { type = "multi_node", num_train_nodes = 2, num_infer_nodes = 2 }
ckpt.interval = 100
weight_broadcast.type = "nccl"
model.name = "Qwen/Qwen3-30B-A3B-Thinking-2507"
inference.vllm.tensor_parallel_size = 8
trainer.optim = { type = "adamw", lr = 1e-6 }
trainer.model = { impl = "custom", attn = "flash_attention_3", ep = 8, cp = 2, compile = {}, ac_offloading = { max_inflight_activations = 5 }, ac = { freq = 1 } }
orchestrator = { batch_size = 512, max_off_policy_steps = 16, concurrency = { initial_inflight = 1024 } }
"""

PUBLISHED = {
    "reverse_text": REVERSE_TEXT,
    "alphabet_sort": ALPHABET_SORT,
    "wordle": WORDLE,
    "hendrycks": HENDRYCKS,
    "wiki_search": WIKI_SEARCH,
    "qwen_30b_math": QWEN_30B_MATH,
    "acereason": ACEREASON,
    "alphabet_sort_2025": ALPHABET_SORT_2025,
    "four_nodes": FOUR_NODES,
}

PROCESSES = {
    "train.toml": """
max_steps = 100
model = { name = "Qwen/Qwen3-4B-Instruct-2507", ac = { freq = 1 }, lora = { rank = 32, alpha = 64, dropout = 0.0 } }
optim.lr = 1e-5
""",
    "orch.toml": """
batch_size = 512
rollouts_per_example = 8
seq_len = 2048
max_steps = 100
mask_truncated_completions = false
model.name = "Qwen/Qwen3-4B-Instruct-2507"
sampling.max_tokens = 768
[[env]]
name = "alphabet-sort"
taskset = { id = "alphabet-sort", max_turns = 3 }
""",
    "infer.toml": """
model.name = "Qwen/Qwen3-4B-Instruct-2507"
parallel.tp = 1
gpu_memory_utilization = 0.8
""",
}
