"""Groups of ranks are Megatron-core's own, and so are the layers of its pipeline stages."""

from __future__ import annotations

import math
from typing import Any

import pytest

from hpcrl.config.rules.megatron_groups import ParallelLayout, layers_of_stages, on_one_rank, padded
from hpcrl.config.sections.megatron import MegatronConfig, MegatronModelConfig
from hpcrl.config.validate import build

LAYOUTS = [
    ParallelLayout(ranks=16, tensor=2, context=2, pipeline=2, expert=2, expert_tensor=1),
    ParallelLayout(ranks=8, tensor=2, context=1, pipeline=2, expert=1, expert_tensor=2),
    ParallelLayout(ranks=12, tensor=1, context=3, pipeline=2, expert=3, expert_tensor=2),
    ParallelLayout(ranks=4, tensor=1, context=1, pipeline=1, expert=4, expert_tensor=1),
    ParallelLayout(ranks=1, tensor=1, context=1, pipeline=1, expert=1, expert_tensor=1),
]


def test_groups_of_a_small_layout() -> None:
    layout = ParallelLayout(ranks=8, tensor=2, context=1, pipeline=2, expert=2, expert_tensor=1)
    groups = layout.groups()
    assert groups["TP"] == [(0, 1), (2, 3), (4, 5), (6, 7)]
    assert groups["DP"] == [(0, 2), (1, 3), (4, 6), (5, 7)]
    assert groups["PP"] == [(0, 4), (1, 5), (2, 6), (3, 7)]
    assert groups["CP"] == [(rank,) for rank in range(8)]
    assert groups["EP"] == [(0, 1), (2, 3), (4, 5), (6, 7)]
    assert groups["EDP"] == [(0, 2), (1, 3), (4, 6), (5, 7)]
    assert [list(layout.ranks_of_stage(stage)) for stage in (0, 1)] == [[0, 1, 2, 3], [4, 5, 6, 7]]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_groups_are_those_of_megatron_core(layout: ParallelLayout) -> None:
    parallel_state = pytest.importorskip("megatron.core.parallel_state")
    order = "tp-cp-ep-dp-pp"  # the default of initialize_model_parallel
    dense = parallel_state.RankGenerator(
        tp=layout.tensor, ep=1, dp=layout.data, pp=layout.pipeline, cp=layout.context, order=order
    )
    experts = parallel_state.RankGenerator(
        tp=layout.expert_tensor, ep=layout.expert, dp=layout.expert_data, pp=layout.pipeline, cp=1, order=order
    )
    theirs = {name: dense.get_ranks(name.lower()) for name in ("TP", "CP", "DP", "PP")}
    theirs |= {name: experts.get_ranks(name.lower().removeprefix("e")) for name in ("ETP", "EDP")}
    theirs["EP"] = experts.get_ranks("ep")
    ours = {name: [list(group) for group in groups] for name, groups in layout.groups().items()}
    assert ours == theirs


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_each_rank_is_in_one_group_of_each_kind(layout: ParallelLayout) -> None:
    for groups in layout.groups().values():
        assert sorted(rank for group in groups for rank in group) == list(range(layout.ranks))
    assert [rank for stage in range(layout.pipeline) for rank in layout.ranks_of_stage(stage)] == list(
        range(layout.ranks)
    )


@pytest.mark.parametrize(
    ("sizes", "layers", "expected"),
    [
        ({}, 28, [28]),
        ({"pipeline_model_parallel_size": 4}, 28, [7, 7, 7, 7]),
        ({"pipeline_model_parallel_size": 3}, 28, None),
        ({"pipeline_model_parallel_size": 3, "first": 8}, 28, [8, 10, 10]),
        ({"pipeline_model_parallel_size": 3, "last": 8}, 28, [10, 10, 8]),
        ({"pipeline_model_parallel_size": 4, "first": 5, "last": 3}, 28, [5, 10, 10, 3]),
        ({"pipeline_model_parallel_size": 2, "first": 5, "last": 23}, 28, [5, 23]),
        ({"pipeline_model_parallel_size": 2, "first": 5, "last": 20}, 28, None),
        ({"pipeline_model_parallel_size": 2, "first": 28}, 28, None),
        ({"pipeline_model_parallel_size": 1, "first": 5, "last": 23}, 28, None),
    ],
)
def test_layers_of_stages(sizes: dict[str, Any], layers: int, expected: list[int] | None) -> None:
    names = {name: sizes.pop(name) for name in ("first", "last") if name in sizes}
    sizes["transformer_config_kwargs"] = {
        f"num_layers_in_{name}_pipeline_stage": count for name, count in names.items()
    }
    found = layers_of_stages(layers, build(MegatronModelConfig, sizes))
    assert found == expected
    assert found is None or sum(found) == layers


def test_padding() -> None:
    assert [padded(count, 4) for count in (0, 1, 4, 5)] == [0, 4, 4, 8]
    multiples = [layout.sample_multiple() for layout in LAYOUTS]
    assert multiples == [8, 2, 6, 1, 1]
    for layout in LAYOUTS:
        assert math.prod((layout.tensor, layout.context, layout.pipeline, layout.data)) == layout.ranks


def test_a_process_alone_has_the_whole_model_computed_as_before() -> None:
    own = {"attention_dropout": 0.1, "num_layers_in_first_pipeline_stage": 3}
    kept = {"dtype": "fp32", "moe_router_score_function": "sigmoid", "model_config_kwargs": {"rms_norm_eps": 1e-5}}
    split = {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2, "context_parallel_size": 2}
    experts = {"expert_model_parallel_size": 2, "expert_tensor_parallel_size": 1}
    stages = {"pipeline_schedule": "Interleaved1F1B", "pipeline_layers_per_stage": 1}
    alone = on_one_rank(MegatronConfig(**kept, **split, **experts, **stages, transformer_config_kwargs=own))
    assert alone == MegatronConfig(**kept, transformer_config_kwargs={"attention_dropout": 0.1})
