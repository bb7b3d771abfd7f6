"""Combinations of settings about policies that paint."""

from __future__ import annotations

from typing import Any

from tests.config.rules.skyrl_cases import ALGORITHM, DIFFUSERS, ENGINE, LORA, NO_KL, Case

BACKEND = f"{ENGINE}.backend"
SAMPLE = f"{DIFFUSERS}.sample"
FREE = "trainer.policy.optimizer_config.name"
PICTURES: dict[str, Any] = {
    f"{DIFFUSERS}.enable": True,
    f"{DIFFUSERS}.dtype": "float32",
    f"{SAMPLE}.deterministic_sampling": True,
    f"{LORA}.rank": 8,
    BACKEND: "diffusers",
    "environment.reward_function": {"redness": 1.0},
}
DRAWN = {
    **PICTURES,
    f"{DIFFUSERS}.algorithm": "grpo",
    f"{SAMPLE}.solver": "flow",
    f"{SAMPLE}.deterministic_sampling": False,
}

LEARNED: dict[str, Any] = {f"{DIFFUSERS}.enable": True, f"{DIFFUSERS}.dtype": "float32", "trainer.mode": "sft"}

OF_PICTURES = [
    Case(
        "an engine that paints has a policy that does",
        {BACKEND: "diffusers"}, BACKEND, f"set {DIFFUSERS}.enable=true",
        PICTURES,
    ),
    Case(
        "a policy that paints has an engine that does",
        {**PICTURES, BACKEND: "transformers"}, BACKEND, 'expected "diffusers"',
        PICTURES,
    ),
    Case(
        "pictures have no vocabulary whose probabilities are squared",
        {**PICTURES, **NO_KL, "trainer.algorithm.advantage_estimator": "optimal_token_baseline"},
        "trainer.algorithm.advantage_estimator", "language models",
        {**PICTURES, **NO_KL, "trainer.algorithm.advantage_estimator": "opo"},
    ),
    Case(
        "Megatron-core has no such transformers",
        {**PICTURES, **NO_KL, "trainer.strategy": "megatron"}, "trainer.strategy", "expected fsdp2",
        {**PICTURES, **NO_KL},
    ),
    Case(
        "pairs are answers of language models",
        {**LEARNED, "trainer.mode": "dpo"}, "trainer.mode", 'expected "rl" or "sft"',
        LEARNED,
    ),
    Case(
        "one average is evaluated",
        {**LEARNED, FREE: "ScheduleFreeAdamW", f"{LORA}.rank": 8, f"{DIFFUSERS}.ema.enable": True},
        f"{DIFFUSERS}.ema.enable", "has an average of its own",
        {**LEARNED, FREE: "ScheduleFreeAdamW", f"{LORA}.rank": 8},
    ),
    Case(
        "rows of pictures are no conversations",
        {**LEARNED, "data.format": "text"}, "data.format", 'has no effect with trainer.mode="sft"',
        LEARNED,
    ),
    Case(
        "noise levels are drawn where pictures are learned",
        {**PICTURES, f"{DIFFUSERS}.weighting_scheme": "mode"}, f"{DIFFUSERS}.weighting_scheme", 'belongs to trainer.mode="sft"',
        {**LEARNED, f"{DIFFUSERS}.weighting_scheme": "mode"},
    ),
    Case(
        "pictures have no frames",
        {**PICTURES, f"{DIFFUSERS}.train_frames": 9}, f"{DIFFUSERS}.train_frames", f"has no effect without {DIFFUSERS}.is_video",
        {**PICTURES, f"{DIFFUSERS}.train_frames": 9, f"{DIFFUSERS}.is_video": True},
    ),
    Case(
        "no server makes pictures",
        {**PICTURES, f"{ENGINE}.remote_urls": ["https://host:8000"]},
        f"{ENGINE}.remote_urls", 'has no effect with generator.inference_engine.backend="diffusers"',
        PICTURES,
    ),
    Case(
        "processors have no kernels for encoders in float16",
        {**PICTURES, f"{DIFFUSERS}.dtype": "float16", "slurm.gpus_per_node": 0}, f"{DIFFUSERS}.dtype", "set it to float32",
        {**PICTURES, "slurm.gpus_per_node": 0},
    ),
    Case(
        "solvers of the flow's equation draw nothing",
        {**PICTURES, f"{SAMPLE}.deterministic_sampling": False}, f"{SAMPLE}.deterministic_sampling", "dpm2 needs it; set it to true",
        {**PICTURES, f"{SAMPLE}.deterministic_sampling": False, f"{SAMPLE}.solver": "flow"},
    ),
    Case(
        "steps that are trained by their probabilities are drawn",
        {**DRAWN, f"{SAMPLE}.noise_level": 0.0}, f"{DIFFUSERS}.algorithm", "which only steps have that are drawn",
        DRAWN,
    ),
    Case(
        "the last step of ddim has no probability",
        {**DRAWN, f"{SAMPLE}.solver": "ddim"}, f"{SAMPLE}.solver", "use flow or dance",
        {**DRAWN, f"{SAMPLE}.solver": "dance"},
    ),
    Case(
        "what is kept twice is small",
        {**PICTURES, **NO_KL, f"{LORA}.rank": 0}, f"{LORA}.rank", f'required by {DIFFUSERS}.algorithm="nft"',
        {**DRAWN, **NO_KL, f"{LORA}.rank": 0},
    ),
    Case(
        "what samples are made with is in the adapters",
        {**PICTURES, f"{LORA}.init_method": "pissa"}, f"{LORA}.init_method", "changes weights beside the adapters",
        {**PICTURES, f"{LORA}.init_method": "gaussian"},
    ),
    Case(
        "a denoising step has no vocabulary",
        {**PICTURES, f"{ALGORITHM}.use_entropy_loss": True}, f"{ALGORITHM}.use_entropy_loss", "belongs to language models",
        PICTURES,
    ),
    Case(
        "a reward of texts reads none in pictures",
        {**PICTURES, "environment.reward_function": {"format": 1.0}}, "environment.reward_function", '"format" reads texts',
        {**PICTURES, "environment.reward_function": {"mine.rewards:mine": 1.0}},
    ),
    Case(
        "a reward of pictures sees none in texts",
        {"environment.eval_reward_function": {"redness": 1.0}}, "environment.eval_reward_function", "looks at pictures",
        {"environment.eval_reward_function": {"format": 1.0}},
    ),
    Case(
        "pictures have a reward",
        {**PICTURES, "environment.reward_function": {}}, "environment.reward_function", f"required with {DIFFUSERS}.enable",
        {**PICTURES, "environment.reward_function": {}, "environment.remote_reward.enable": True, "environment.remote_reward.reward_function": {"taste": 1.0}},
    ),
]  # fmt: skip
