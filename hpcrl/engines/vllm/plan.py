"""Memory plan of a vLLM replica: bytes of weights per GPU, and tokens of cache in the rest. All numbers are estimates from shapes."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass

from hpcrl.config import Config, InferenceEngineConfig
from hpcrl.planning.devices import memory_of_rank
from hpcrl.planning.memory import Shapes, Weight

_LAYER = re.compile(r"(?:^|\.)layers\.\d+\.")
_KEPT = re.compile(r"(?:norm|gate|router|shared_expert_gate)\.weight$")  # not quantized
_BYTES = {"float32": 4.0, "bfloat16": 2.0, "float16": 2.0}
_QUANTIZED = {"fp8": 1.0, "fp8_per_channel": 1.0, "fp8_per_block": 1.0, "mxfp8": 1 + 1 / 32, "mxfp4": 0.5 + 1 / 32}
"""Bytes of a weight with its share of the scales; OCP Microscaling Formats 1.0: one byte of scale for 32 weights."""


@dataclass(frozen=True)
class EngineSizes:
    """Bytes on the GPU of a replica that has most.

    Attributes:
        weights: of its layers, or its part of them.
        share: what the engine may take of the GPU.
        token: of the keys and values of one token.
    """

    weights: float
    share: float
    token: float

    @property
    def tokens(self) -> int:
        """Tokens whose keys and values have room beside the weights, activations and CUDA graphs not counted."""
        return max(0, int((self.share - self.weights) / self.token))


def engine_sizes(engine: InferenceEngineConfig, shapes: Shapes, memory: float) -> EngineSizes:
    """Return the sizes of a replica.

    Args:
        memory: bytes of a GPU that it may use.
    """
    width, stages = shapes.width, engine.pipeline_parallel_size
    layers = math.ceil(width.layers / stages)
    inside = sum(_bytes(weight, engine) for weight in shapes.weights if _LAYER.search(weight.name))
    ends = {weight.name: _bytes(weight, engine) for weight in shapes.weights if not _LAYER.search(weight.name)}
    outside = sum(ends.values()) if stages == 1 else max(ends.values(), default=0.0)
    heads = max(1, width.kv_heads // engine.tensor_parallel_size)
    return EngineSizes(
        weights=inside * layers / width.layers + outside,
        share=memory,
        token=2 * layers * heads * width.head * _BYTES[engine.model_dtype],
    )


def _bytes(weight: Weight, engine: InferenceEngineConfig) -> float:
    """Return the bytes of a weight on one GPU: a shard of matrices, as vLLM's parallel layers have, of experts by data parallelism too."""
    size = _BYTES[engine.model_dtype]
    matrix = len(weight.shape) > 1
    if matrix and engine.quantization and _LAYER.search(weight.name) and not _KEPT.search(weight.name):
        size = _QUANTIZED[engine.quantization]
    share = engine.tensor_parallel_size if matrix and not _KEPT.search(weight.name) else 1
    if ".experts." in weight.name:
        share *= engine.data_parallel_size
    return size * weight.count / share


def describe_engines(config: Config, shapes: Shapes) -> tuple[list[str], dict[str, int]] | None:
    engine = config.generator.inference_engine
    if engine.remote_urls or config.slurm.gpus == 0:
        return None
    sizes = {
        "tensor": engine.tensor_parallel_size,
        "pipeline": engine.pipeline_parallel_size,
        "data": engine.data_parallel_size,
    }
    how = " x ".join(f"{name} {size}" for name, size in sizes.items() if size > 1)
    quantized = f", quantized as {engine.quantization}" if engine.quantization else ""
    lines = [
        f"each replica: {engine.gpus} GPU(s){f' ({how} parallel)' if how else ''}, weights in {engine.model_dtype}{quantized}"
    ]
    device, source = memory_of_rank(config)
    if device is None:
        return [*lines, f"  memory of the device: unknown ({source})"], {"gpus": engine.gpus}
    share = config.engine_memory_share(shared=config.trainer.placement.colocate_all)
    found = engine_sizes(engine, shapes, share * device)
    numbers = {
        "gpus": engine.gpus,
        "share": round(found.share),
        "weights": round(found.weights),
        "tokens": found.tokens,
    }
    return [*lines, *_room(config, found, device, share, source)], numbers


def _room(config: Config, found: EngineSizes, device: float, share: float, source: str) -> Iterator[str]:
    longest = config.max_model_len
    yield (
        f"  of a GPU's {device / 2**30:,.2f} GiB ({source}) {share:.0%} are the engine's "
        f"(gpu_memory_utilization): {found.weights / 2**30:,.2f} GiB for weights"
    )
    if found.tokens < longest:
        yield (
            f"  warning: what is left has room for {found.tokens:,} tokens, and a sample has up to {longest:,}; raise tensor_parallel_size, "
            "pipeline_parallel_size or gpu_memory_utilization"
        )
    else:
        yield (
            f"  room for keys and values of {found.tokens:,} tokens on each copy of the weights: {found.tokens // longest:,} sample(s) of the "
            f"longest, {longest:,} tokens. Activations and CUDA graphs, which are not counted, take some of it"
        )
