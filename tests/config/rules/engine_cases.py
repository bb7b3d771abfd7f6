"""Combinations of engine settings that only hpcrl has rules about."""

from __future__ import annotations

from tests.config.rules.skyrl_cases import ENGINE, LORA, Case

ENGINES = [
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
