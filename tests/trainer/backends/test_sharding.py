"""Which modules become units of sharding, and where there is none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

from hpcrl.trainer.backends.fsdp.sharding import units
from hpcrl.trainer.distributed import World
from tests.trainer.scenarios import make_engine

LAYERS = ["model.layers.1", "model.layers.0"]


@pytest.mark.parametrize(
    ("wrap_policy", "expected"),
    [
        ({}, LAYERS),
        ({"disable": False}, LAYERS),
        ({"disable": True}, []),
        ({"transformer_layer_cls_to_wrap": ["Qwen2DecoderLayer"]}, LAYERS),
        (
            {"transformer_layer_cls_to_wrap": ["Qwen2MLP", "Qwen2DecoderLayer"]},
            ["model.layers.1.mlp", "model.layers.1", "model.layers.0.mlp", "model.layers.0"],
        ),
        # self_attn has 3136 parameters, mlp 4608, a layer 64 more than both
        ({"min_num_params": 4000}, ["model.layers.0.mlp", "model.layers.1.mlp"]),
        ({"min_num_params": 5000}, ["model.layers.0", "model.layers.1"]),
        ({"min_num_params": 100_000}, []),
    ],
)
def test_units(model_path: Path, wrap_policy: dict[str, Any], expected: list[str]) -> None:
    model = AutoModelForCausalLM.from_pretrained(model_path)
    names = {module: name for name, module in model.named_modules()}
    assert [names[module] for module in units(model, wrap_policy)] == expected


@pytest.mark.parametrize(("dtype", "sharded"), [("fp32", False), ("bf16", True)])
def test_one_rank_has_plain_parameters_unless_they_are_cast(
    model_path: Path, alone: World, dtype: str, sharded: bool
) -> None:
    fsdp = {"mixed_precision": {"param_dtype": dtype}}
    engine = make_engine(alone, str(model_path), {"trainer": {"policy": {"fsdp_config": fsdp}}})
    assert {isinstance(parameter, DTensor) for parameter in engine._model.parameters()} == {sharded}
