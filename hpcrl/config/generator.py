"""Section `generator`: the inference engines and how they sample."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(frozen=True, kw_only=True)
class InferenceEngineConfig:
    model_dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Type of the weights in the engine."""

    num_engines: int = 1
    """Replicas that generate."""

    tensor_parallel_size: int = 1
    """GPUs that share one replica's weights."""

    enable_prefix_caching: bool = True
    """Reuse the key-value cache of equal prompt beginnings under the same weights."""

    enable_chunked_prefill: bool = True
    """Let long prompts share a batch with decoding."""

    max_num_batched_tokens: int = 8192
    """Tokens per forward pass of the engine."""

    enforce_eager: bool = True
    """Run without compiled graphs: faster start, slower generation."""

    gpu_memory_utilization: float = 0.8
    """Share of a GPU's memory that the engine may use; no effect on CPU."""

    max_num_seqs: int = 1024
    """Sequences that the engine decodes together."""

    engine_init_kwargs: dict[str, Any] = field(default_factory=dict)
    """Further options of the vLLM server, by their names there."""


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    max_generate_length: int = 1024
    """Tokens per response at most."""

    temperature: float = 1.0
    """Divides the logits before sampling; 0: greedy."""

    top_p: float = 1.0
    """Sample among the most probable tokens that together reach this probability."""

    top_k: int = -1
    """Sample among this many most probable tokens; -1: all."""

    min_p: float = 0.0
    """Drop tokens less probable than this share of the most probable one."""

    repetition_penalty: float = 1.0
    """Above 1: tokens that already occurred become less probable."""

    stop: list[str] | None = None
    """Texts that end a response."""


@dataclass(frozen=True, kw_only=True)
class GeneratorConfig:
    inference_engine: InferenceEngineConfig = field(default_factory=InferenceEngineConfig)

    n_samples_per_prompt: int = 5
    """Samples per group in training."""

    eval_n_samples_per_prompt: int = 1
    """Samples per prompt in evaluation."""

    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    """Arguments of the tokenizer's chat template."""

    sampling_params: SamplingParams = field(default_factory=SamplingParams)
    """Sampling in training."""

    eval_sampling_params: SamplingParams | None = None
    """Sampling in evaluation; unset: greedy, with the max_generate_length of training."""
