"""A model that Megatron's ranks cannot share is refused, with the arithmetic and what would do."""

from __future__ import annotations

from typing import Any

import pytest

from hpcrl.config.rules.model_fit import factors, misfits
from hpcrl.config.sections.megatron import MegatronModelConfig
from hpcrl.config.validate import build

DENSE = {
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "num_hidden_layers": 28,
    "intermediate_size": 8960,
    "vocab_size": 151936,
}
EXPERTS = DENSE | {"num_experts": 60, "moe_intermediate_size": 768, "intermediate_size": 5}
TENSOR, PIPELINE, EXPERT = "tensor_model_parallel_size", "pipeline_model_parallel_size", "expert_model_parallel_size"
INTERLEAVED = {"pipeline_schedule": "Interleaved1F1B", PIPELINE: 2}


def told(sizes: dict[str, Any], entries: dict[str, Any]) -> list[tuple[str, str]]:
    return [(found.path, found.message) for found in misfits("here", build(MegatronModelConfig, sizes), entries)]


@pytest.mark.parametrize(
    ("sizes", "entries", "path", "message"),
    [
        (
            {TENSOR: 8},
            DENSE,
            TENSOR,
            "8 does not divide the model's 12 attention heads (12 = 2 x 2 x 3) and 4 key-value heads (4 = 2 x 2); use 1, 2 or 4",
        ),
        (
            {TENSOR: 8},
            {"num_attention_heads": 12},
            TENSOR,
            "8 does not divide the model's 12 attention heads (12 = 2 x 2 x 3) and 12 key-value heads (12 = 2 x 2 x 3); "
            "use 1, 2, 3, 4, 6 or 12",
        ),
        (
            {TENSOR: 2},
            DENSE | {"num_key_value_heads": 1},
            TENSOR,
            "2 does not divide the model's 1 key-value heads; use 1",
        ),
        (
            {TENSOR: 4},
            DENSE | {"intermediate_size": 4866},
            TENSOR,
            "4 does not divide the model's 4,866 columns of the MLP (intermediate_size) (4,866 = 2 x 3 x 811); use 1 or 2",
        ),
        (
            {PIPELINE: 8},
            DENSE,
            PIPELINE,
            "8 does not divide the model's 28 layers (28 = 2 x 2 x 7); use 1, 2, 4, 7, 14 or 28, or give the first or last stage other "
            "layers (here.transformer_config_kwargs.num_layers_in_first_pipeline_stage or num_layers_in_last_pipeline_stage)",
        ),
        (
            {PIPELINE: 4, "transformer_config_kwargs": {"num_layers_in_first_pipeline_stage": 6}},
            DENSE,
            PIPELINE,
            "28 layers of the model without 6 of the first stage (transformer_config_kwargs) are 22, which the other 3 stages of 4 cannot "
            "share equally; change one of them",
        ),
        (
            {**INTERLEAVED, "pipeline_layers_per_stage": 4},
            DENSE,
            "pipeline_layers_per_stage",
            "4 does not cut the 14 layers of a rank (28 layers of the model / 2 stages) into several virtual stages of equal size; "
            "use 1, 2 or 7",
        ),
        (
            {**INTERLEAVED, "pipeline_layers_per_stage": 14},
            DENSE,
            "pipeline_layers_per_stage",
            "14 does not cut the 14 layers of a rank (28 layers of the model / 2 stages) into several virtual stages of equal size; "
            "use 1, 2 or 7",
        ),
        (
            {**INTERLEAVED, "pipeline_layers_per_stage": 1},
            DENSE | {"num_hidden_layers": 2},
            "pipeline_layers_per_stage",
            "1 does not cut the 1 layers of a rank (2 layers of the model / 2 stages) into several virtual stages of equal size; "
            'set pipeline_schedule="1F1B"',
        ),
        (
            {EXPERT: 8},
            EXPERTS,
            EXPERT,
            "8 does not divide the model's 60 experts (60 = 2 x 2 x 3 x 5); use 1, 2, 3, 4, 5, 6, 10, 12, 15, 20, 30 or 60",
        ),
        (
            {"expert_tensor_parallel_size": 5, EXPERT: 2},
            EXPERTS,
            "expert_tensor_parallel_size",
            "5 does not divide the model's 768 columns of each expert (768 = 2 x 2 x 2 x 2 x 2 x 2 x 2 x 2 x 3); use 1, 2, 3, 4, 6, 8, 12, "
            "16, 24, 32, 48, 64 or another divisor",
        ),
        ({EXPERT: 2}, DENSE, EXPERT, "the model has no experts that 2 ranks could share; use 1"),
        (
            {"expert_tensor_parallel_size": 1},
            DENSE,
            "expert_tensor_parallel_size",
            "the model has no experts; leave it out",
        ),
    ],
)
def test_what_cannot_be_divided(sizes: dict[str, Any], entries: dict[str, Any], path: str, message: str) -> None:
    assert told(sizes, entries) == [(f"here.{path}", message)]


@pytest.mark.parametrize(
    ("sizes", "entries"),
    [
        ({}, DENSE),
        ({TENSOR: 4, PIPELINE: 7}, DENSE),
        ({TENSOR: 2, "expert_tensor_parallel_size": 1, EXPERT: 4}, EXPERTS),
        ({PIPELINE: 3, "transformer_config_kwargs": {"num_layers_in_last_pipeline_stage": 8}}, DENSE),
        ({PIPELINE: 5, "transformer_config_kwargs": {"pipeline_model_parallel_layout": "Et*7|t*7|t*7|t*6|tL"}}, DENSE),
        ({**INTERLEAVED, "pipeline_layers_per_stage": 7}, DENSE),
        ({TENSOR: 4}, {"vision_config": {"num_attention_heads": 3}, "text_config": DENSE}),
        ({TENSOR: 7, PIPELINE: 5}, {"model_type": "llama"}),
    ],
)
def test_what_can_be_divided_or_is_not_known(sizes: dict[str, Any], entries: dict[str, Any]) -> None:
    assert told(sizes, entries) == []


def test_a_family_that_megatron_does_not_know_is_told() -> None:
    ((path, message),) = told({TENSOR: 5}, {**DENSE, "model_type": "mamba2"})
    assert path == "here"
    assert message.startswith(
        'the model is of type "mamba2", which the backend megatron does not know; it knows llama, mistral,'
    )
    assert message.endswith("Use fsdp2 in place of megatron, or another model")


def test_several_things_are_told_at_once() -> None:
    found = told({TENSOR: 5, PIPELINE: 5, EXPERT: 7}, EXPERTS)
    assert [path for path, _ in found] == [f"here.{name}" for name in (TENSOR, PIPELINE, EXPERT, TENSOR)]


def test_factors() -> None:
    shown = [factors(count) for count in (1, 2, 13, 12, 151936)]
    assert shown == ["", "", "", " (12 = 2 x 2 x 3)", " (151,936 = 2 x 2 x 2 x 2 x 2 x 2 x 2 x 1187)"]
