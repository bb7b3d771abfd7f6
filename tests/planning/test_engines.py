"""What a replica needs of each of its GPUs: parts of the weights by how it is split, and room for keys and values beside them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from hpcrl.config import Config, InferenceEngineConfig
from hpcrl.config.load import nested
from hpcrl.config.validate import build
from hpcrl.engines.vllm.plan import engine_sizes
from hpcrl.planning.backend import describe_engines
from hpcrl.planning.memory import Shapes, Weight, Width

GIB = 2**30
BASE: dict[str, Any] = {
    "data.train_data": ["t"],
    "trainer.eval_interval": 0,
    "trainer.policy.model.path": "m",
    "slurm.gpus_per_node": 8,
    "slurm.gpu_memory_gb": 0.01,
}
ENGINE = "generator.inference_engine"
WIDTH = Width(layers=4, hidden=64, heads=4, kv_heads=2, head=16, ffn=128, vocabulary=1000)
EMBEDDING, ATTENTION, EXPERTS, ROUTER, NORM = 64_000, 4096, 8 * 64 * 128, 8 * 64, 64


def layer(number: int) -> list[Weight]:
    prefix = f"model.layers.{number}"
    return [
        Weight(f"{prefix}.self_attn.q_proj.weight", (64, 64)),
        Weight(f"{prefix}.mlp.experts.down_proj", (8, 64, 128)),
        Weight(f"{prefix}.mlp.gate.weight", (8, 64)),
        Weight(f"{prefix}.input_layernorm.weight", (64,)),
    ]


SHAPES = Shapes(
    "Mixture",
    [
        Weight("model.embed_tokens.weight", (1000, 64)),
        *(weight for number in range(4) for weight in layer(number)),
        Weight("model.norm.weight", (64,)),
        Weight("lm_head.weight", (1000, 64)),
    ],
    WIDTH,
)


def weights_of(**engine: Any) -> float:
    return engine_sizes(InferenceEngineConfig(**engine), SHAPES, GIB).weights


def test_weights_are_shared_as_vllm_shares_them() -> None:
    whole = 2 * EMBEDDING + NORM + 4 * (ATTENTION + EXPERTS + ROUTER + NORM)
    assert weights_of() == 2 * whole == 2 * SHAPES.count
    assert weights_of(model_dtype="float32") == 4 * whole
    assert weights_of(tensor_parallel_size=2) == 2 * (
        EMBEDDING + NORM + 4 * (ATTENTION / 2 + EXPERTS / 2 + ROUTER + NORM)
    )
    assert weights_of(pipeline_parallel_size=2) == 2 * (EMBEDDING + 2 * (ATTENTION + EXPERTS + ROUTER + NORM))
    assert weights_of(pipeline_parallel_size=3) == weights_of(pipeline_parallel_size=2), "the first has two layers"
    assert weights_of(data_parallel_size=4) == 2 * (whole - 3 * EXPERTS), "a copy of everything but experts"
    quantized = weights_of(quantization="fp8")
    assert quantized == 2 * whole - 4 * (ATTENTION + EXPERTS), "neither ends, norms nor routers"


def test_keys_and_values_take_the_rest() -> None:
    one = engine_sizes(InferenceEngineConfig(), SHAPES, GIB / 2)
    assert one.token == 2 * 4 * 2 * 16 * 2
    assert one.tokens == int((GIB / 2 - one.weights) / one.token)
    shared = InferenceEngineConfig(tensor_parallel_size=4, pipeline_parallel_size=2)
    assert engine_sizes(shared, SHAPES, GIB).token == one.token / 4, "half the layers, and one of two heads"
    assert replace(one, share=one.weights - 1).tokens == 0


def told(**settings: Any) -> list[str]:
    given = {
        f"{ENGINE}.{name}" if name in InferenceEngineConfig.__dataclass_fields__ else name: value
        for name, value in settings.items()
    }
    found = describe_engines(build(Config, nested({**BASE, **given})), SHAPES)
    return found[0] if found else []


def test_the_plan_says_what_has_room() -> None:
    first, share, room = told(tensor_parallel_size=2, data_parallel_size=2, quantization="fp8")
    assert first == "each replica: 4 GPU(s) (tensor 2 x data 2 parallel), weights in bfloat16, quantized as fp8"
    assert "90% are the engine's (gpu_memory_utilization): 0.00 GiB for weights" in share
    assert room.startswith("  room for keys and values of ")
    _, _, warning = told(**{"slurm.gpu_memory_gb": 0.0015})
    assert warning.startswith("  warning: what is left has room for ")
    assert told(**{"slurm.gpu_memory_gb": None})[1].startswith("  memory of the device: unknown")


@pytest.mark.parametrize(
    "settings",
    [
        {"slurm.gpus_per_node": 0},
        {"backend": "transformers"},
        {"remote_urls": ["http://a"]},
        {"trainer.mode": "sft", "trainer.max_length": 64},
    ],
)
def test_nothing_is_said_of_engines_that_have_no_gpus_of_the_run(settings: dict[str, Any]) -> None:
    assert told(**settings) == []
