"""What the tests of partitions run under torchrun: partition_scenarios.py JSON. Each rank counts what Megatron-core builds for it."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer import TransformerConfig
from torch.nn.functional import silu
from transformers import AutoConfig

from hpcrl.config.parallel import padded
from hpcrl.trainer.world import joined


def built(entries: dict[str, Any], sizes: dict[str, Any]) -> list[int]:
    """Return the parameters of this rank: of experts, and of all else."""
    hf = AutoConfig.for_model(**entries)
    parallel_state.initialize_model_parallel(**sizes, order="tp-cp-ep-dp-pp")
    model_parallel_cuda_manual_seed(1, inference_rng_tracker=True, force_reset_rng=True)
    experts = getattr(hf, "num_experts", None)
    config = TransformerConfig(
        num_layers=hf.num_hidden_layers,
        hidden_size=hf.hidden_size,
        num_attention_heads=hf.num_attention_heads,
        num_query_groups=hf.num_key_value_heads,
        kv_channels=getattr(hf, "head_dim", None) or hf.hidden_size // hf.num_attention_heads,
        ffn_hidden_size=hf.intermediate_size,
        num_moe_experts=experts,
        moe_ffn_hidden_size=hf.moe_intermediate_size if experts else None,
        normalization="RMSNorm",
        gated_linear_unit=True,
        activation_func=silu,
        add_bias_linear=False,
        add_qkv_bias=hf.model_type == "qwen2",
        qk_layernorm=hf.model_type in ("qwen3", "qwen3_moe"),
        use_cpu_initialization=True,
        pipeline_dtype=torch.float32,
        **sizes,
    )
    spec = get_gpt_layer_local_spec(
        num_experts=experts, moe_grouped_gemm=False, qk_layernorm=config.qk_layernorm, normalization="RMSNorm"
    )
    model = GPTModel(
        config,
        spec,
        vocab_size=padded(hf.vocab_size, sizes["tensor_model_parallel_size"]),
        max_sequence_length=64,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=hf.tie_word_embeddings,
        position_embedding_type="rope",
    )
    counts = [0, 0]
    for name, parameter in model.named_parameters():
        counts[".experts." not in name] += parameter.numel()
    parallel_state.destroy_model_parallel()
    return counts


def main() -> None:
    options = json.loads(sys.argv[1])
    if not torch.cuda.is_available():
        setattr(torch.Tensor, "cuda", lambda tensor: tensor)  # noqa: B010 - the last stage moves a tied head there, which is only counted here
    with joined() as world:
        found = [built(case["model"], case["sizes"]) for case in options["cases"]]
        Path(options["out"], f"{world.rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
