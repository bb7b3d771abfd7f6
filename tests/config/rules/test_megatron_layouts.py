"""Layouts of Megatron-core that cannot be, whatever the model is: refused, with the arithmetic, and not what is next to them."""

from __future__ import annotations

from typing import Any

import pytest

from hpcrl.config import Config
from hpcrl.config.load import nested
from hpcrl.config.rules.combinations import impossible
from hpcrl.config.validate import build

BASE = {"data.train_data": ["t"], "data.val_data": ["v"], "trainer.policy.model.path": "m"}
POLICY, REF = "trainer.policy.megatron_config", "trainer.ref.megatron_config"
WITH_REFERENCE = {
    "trainer.strategy": "megatron",
    "trainer.placement.policy_num_gpus_per_node": 8,
}
EIGHT = {**WITH_REFERENCE, "trainer.algorithm.use_kl_loss": False}
PIPELINE = {**EIGHT, f"{POLICY}.pipeline_model_parallel_size": 2}
INTERLEAVED = {f"{POLICY}.pipeline_schedule": "Interleaved1F1B"}

CASES: list[tuple[dict[str, Any], str, str, dict[str, Any]]] = [
    (
        {**EIGHT, f"{POLICY}.tensor_model_parallel_size": 3, f"{POLICY}.context_parallel_size": 2}, POLICY,
        "3 (tensor) x 1 (pipeline) x 2 (context) = 6 ranks share each sample, which does not divide the 8 ranks",
        {**EIGHT, f"{POLICY}.tensor_model_parallel_size": 4, f"{POLICY}.context_parallel_size": 2},
    ),
    (
        {**PIPELINE, f"{POLICY}.expert_model_parallel_size": 3}, f"{POLICY}.expert_model_parallel_size",
        "3 (expert) x 1 (expert tensor) x 2 (pipeline) = 6 ranks share each copy of the experts, which does not divide the 8 ranks",
        {**PIPELINE, f"{POLICY}.expert_model_parallel_size": 4},
    ),
    (
        {**EIGHT, f"{POLICY}.tensor_model_parallel_size": 2, f"{POLICY}.expert_model_parallel_size": 8},
        f"{POLICY}.expert_model_parallel_size", "8 (expert) x 2 (expert tensor) x 1 (pipeline) = 16 ranks",
        {
            **EIGHT, f"{POLICY}.tensor_model_parallel_size": 2, f"{POLICY}.expert_model_parallel_size": 8,
            f"{POLICY}.expert_tensor_parallel_size": 1,
        },
    ),
    (
        {**EIGHT, **INTERLEAVED, f"{POLICY}.pipeline_layers_per_stage": 2}, f"{POLICY}.pipeline_schedule",
        "needs trainer.policy.megatron_config.pipeline_model_parallel_size above 1",
        {**PIPELINE, **INTERLEAVED, f"{POLICY}.pipeline_layers_per_stage": 2},
    ),
    (
        {**PIPELINE, **INTERLEAVED}, f"{POLICY}.pipeline_layers_per_stage", "required with",
        {**PIPELINE, **INTERLEAVED, f"{POLICY}.pipeline_layers_per_stage": 1},
    ),
    (
        {**PIPELINE, f"{POLICY}.pipeline_layers_per_stage": 2}, f"{POLICY}.pipeline_layers_per_stage", "has no effect with", PIPELINE,
    ),
    (
        {**WITH_REFERENCE, f"{POLICY}.tensor_model_parallel_size": 2, f"{REF}.tensor_model_parallel_size": 1},
        f"{REF}.tensor_model_parallel_size",
        "expected the policy's 2 (whole number), whose ranks the reference shares, found 1 (whole number); leave it out",
        {**WITH_REFERENCE, f"{POLICY}.tensor_model_parallel_size": 2, f"{REF}.tensor_model_parallel_size": 2},
    ),
    (
        {**WITH_REFERENCE, f"{REF}.expert_tensor_parallel_size": 1}, f"{REF}.expert_tensor_parallel_size",
        "expected the policy's null", {**EIGHT, f"{REF}.expert_tensor_parallel_size": 1},
    ),
]  # fmt: skip


@pytest.mark.parametrize(("wrong", "path", "words", "right"), CASES, ids=[case[1] for case in CASES])
def test_each_rule(wrong: dict[str, Any], path: str, words: str, right: dict[str, Any]) -> None:
    problems = impossible(build(Config, nested({**BASE, **wrong})))
    assert [problem.path for problem in problems] == [path]
    assert words in problems[0].message
    assert impossible(build(Config, nested({**BASE, **right}))) == []


def test_layouts_of_another_engine_are_not_looked_at() -> None:
    other = {"trainer.strategy": "fsdp2"}
    for wrong, *_ in CASES:
        problems = impossible(build(Config, nested({**BASE, **wrong, **other})))
        assert all("has no effect with trainer.strategy=fsdp2" in problem.message for problem in problems)


def test_a_reference_has_the_layout_of_the_policy_where_it_names_no_other() -> None:
    sizes = {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2, "expert_tensor_parallel_size": 1}
    given = {f"{POLICY}.{name}": size for name, size in sizes.items()} | {f"{POLICY}.dtype": "fp32"}
    config = build(Config, nested({**BASE, **WITH_REFERENCE, **given, f"{REF}.moe_router_score_function": "sigmoid"}))
    assert impossible(config) == []
    layout = config.trainer.megatron_layout("ref")
    assert {name: getattr(layout, name) for name in sizes} == sizes
    assert config.trainer.ref_model_parallel_size == config.trainer.model_parallel_size == 4
    assert (layout.dtype, layout.moe_router_score_function) == ("bf16", "sigmoid")  # its own
