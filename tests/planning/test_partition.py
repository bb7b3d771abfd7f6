"""The parameters of each rank are as many as Megatron-core builds there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from hpcrl.config.rules.megatron_groups import ParallelLayout, layers_of_stages
from hpcrl.config.sections.megatron import MegatronModelConfig
from hpcrl.config.sections.model import FSDPConfig, LoraConfig, ModelConfig, PolicyConfig
from hpcrl.config.validate import build
from hpcrl.errors import DataError
from hpcrl.planning.memory import Shapes, Weight
from hpcrl.planning.partition import StageParameters, stage_parameters
from hpcrl.planning.shapes import shapes
from hpcrl.trainer.models.hf import CriticSource, ModelSource
from tests.trainer.launcher import run_ranks

RANKS = 4
TENSOR, PIPELINE, EXPERT = "tensor_model_parallel_size", "pipeline_model_parallel_size", "expert_model_parallel_size"
BASE = {
    "vocab_size": 131,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": 1,
}
TIED = BASE | {"model_type": "qwen2", "tie_word_embeddings": True}
LLAMA = BASE | {"model_type": "llama", "tie_word_embeddings": False}
QWEN3 = BASE | {"model_type": "qwen3", "tie_word_embeddings": False, "head_dim": 16}
EXPERTS = QWEN3 | {"model_type": "qwen3_moe", "num_experts": 4, "moe_intermediate_size": 24}
ADAPTERS = {"lora": {"rank": 4}}
EACH = ADAPTERS | {"lora_type": "canonical_lora"}
OF_EXPERTS = {"lora": {"rank": 4, "target_parameters": ["experts"]}}
CASES: list[tuple[dict[str, Any], dict[str, int]] | tuple[dict[str, Any], dict[str, int], dict[str, Any]]] = [
    (TIED, {}),
    (TIED, {TENSOR: 2}),
    (TIED, {TENSOR: 2, PIPELINE: 2}),
    (TIED, {PIPELINE: 4}),
    (LLAMA, {TENSOR: 2, PIPELINE: 2}),
    (QWEN3, {TENSOR: 2, "context_parallel_size": 2}),
    (EXPERTS, {}),
    (EXPERTS, {EXPERT: 4}),
    (EXPERTS, {TENSOR: 2, EXPERT: 2, "expert_tensor_parallel_size": 1}),
    (EXPERTS, {TENSOR: 2, EXPERT: 2, "expert_tensor_parallel_size": 2}),
    (EXPERTS, {EXPERT: 2, PIPELINE: 2}),
    (TIED, {TENSOR: 2, PIPELINE: 2}, ADAPTERS),
    (TIED, {TENSOR: 2, PIPELINE: 2}, EACH),
    (EXPERTS, {EXPERT: 2, PIPELINE: 2}, ADAPTERS),
    (EXPERTS, {TENSOR: 2, EXPERT: 2, "expert_tensor_parallel_size": 1}, OF_EXPERTS),
]


def saved(folder: Path, entries: dict[str, Any], lora: LoraConfig | None = None) -> Shapes:
    AutoConfig.for_model(**entries).save_pretrained(folder)
    policy = PolicyConfig(model=ModelConfig(path="", lora=lora or LoraConfig()))
    return shapes(ModelSource(path=str(folder), role="trainer.policy"), FSDPConfig(), policy)


def test_parts_are_what_megatron_core_builds(tmp_path: Path) -> None:
    pytest.importorskip("megatron.core")
    plain = {TENSOR: 1, PIPELINE: 1, "context_parallel_size": 1, EXPERT: 1}
    of_models, cases = list[Shapes](), list[dict[str, Any]]()
    for number, (model, sizes, *given) in enumerate(CASES):
        adapters: dict[str, Any] = {"lora": {}, "lora_type": "lora"} | dict(*given)
        of_models.append(saved(tmp_path / str(number), model, build(LoraConfig, adapters["lora"])))
        cases.append({"model": str(tmp_path / str(number)), "sizes": plain | sizes, **adapters})
    done = run_ranks(
        RANKS, json.dumps({"cases": cases, "out": str(tmp_path)}), script="planning/partition_scenarios.py"
    )
    assert done.returncode == 0, done.stderr
    built = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(RANKS)]
    for number, (model, sizes, *_) in enumerate(CASES):
        section = build(MegatronModelConfig, dict(sizes))
        layout, stages = ParallelLayout.of(section, RANKS), layers_of_stages(model["num_hidden_layers"], section)
        assert stages is not None
        one_A = cases[number]["lora_type"] == "lora"
        found = stage_parameters(of_models[number].weights, layout, stages, one_A=one_A)
        for stage, part in enumerate(found):
            for rank in layout.ranks_of_stage(stage):
                *counts, of_experts, others = built[rank][number]
                assert counts == [part.experts, part.dense, part.frozen], (sizes, rank)
                if not cases[number]["lora"]:  # beside which Muon moves nothing
                    assert [of_experts, others] == [part.expert_matrices, part.dense_matrices] != [0, 0], (sizes, rank)


def test_all_ranks_together_have_the_model_and_its_padding_once(tmp_path: Path) -> None:
    whole = saved(tmp_path, LLAMA)
    layout = ParallelLayout(ranks=8, tensor=2, context=1, pipeline=4, expert=1, expert_tensor=2)
    found = stage_parameters(whole.weights, layout, [1, 1, 1, 1])
    norms = 4 * 2 * 32 + 32  # not split
    assert sum(part.count for part in found) * 2 == whole.count + norms + 2 * 32
    interleaved = stage_parameters(whole.weights, ParallelLayout(8, 2, 1, 2, 1, 2), [2, 2], per_stage=1)
    assert interleaved == stage_parameters(whole.weights, ParallelLayout(8, 2, 1, 2, 1, 2), [2, 2])


def test_layers_of_an_interleaved_schedule_are_dealt_in_turn() -> None:
    weights = [Weight(f"model.layers.{layer}.norm.weight", (10**layer,)) for layer in range(8)]
    layout = ParallelLayout(ranks=2, tensor=1, context=1, pipeline=2, expert=1, expert_tensor=1)
    assert stage_parameters(weights, layout, [4, 4], per_stage=2) == [
        StageParameters(110011, 0),
        StageParameters(11001100, 0),
    ]
    assert stage_parameters(weights, layout, [2, 6], per_stage=3) == [
        StageParameters(10001, 0),
        StageParameters(11101110, 0),
    ]
    assert stage_parameters(weights, layout, [3, 5]) == [StageParameters(111, 0), StageParameters(11111000, 0)]


def test_the_head_of_a_critic_is_whole(tmp_path: Path) -> None:
    AutoConfig.for_model(**TIED).save_pretrained(tmp_path)
    source = CriticSource(path=str(tmp_path), role="trainer.critic", head="value_head", seed=1)
    critic = shapes(source, FSDPConfig(), PolicyConfig(model=ModelConfig(path="")))
    layout = ParallelLayout(ranks=2, tensor=1, context=1, pipeline=2, expert=1, expert_tensor=1)
    first, last = stage_parameters(critic.weights, layout, [2, 2], value_head="value_head")
    assert first.count + last.count == critic.count
    assert first.dense - last.dense == 131 * 32 - 32 - 32  # the embedding there; the last norm and the head here


def test_a_parameter_that_is_not_known_is_named() -> None:
    layout = ParallelLayout(ranks=2, tensor=2, context=1, pipeline=1, expert=1, expert_tensor=2)
    with pytest.raises(DataError, match=r"how Megatron's ranks share model.layers.0.self_attn.sinks is not known"):
        stage_parameters([Weight("model.layers.0.self_attn.sinks", (4,))], layout, [1])
