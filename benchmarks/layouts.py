"""The first table of docs/performance.md: what to set for which model and length of samples on nodes of eight GPUs of 80 GB.

    python benchmarks/layouts.py [--models NAME ...]

Nothing is measured. For each model and length the layouts below are gone through, those that cost least time first, until one fits by the estimate
of `hpcrl plan` and leaves a tenth of the GPU free: on one node, then on two, four and eight. The engine is the smallest one with room for
SAMPLES of the longest samples at the same time. Models are built from what their config.json says, without weights.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from hpcrl.config import Config
from hpcrl.engines.vllm.plan import engine_sizes
from hpcrl.planning.estimate import estimate
from hpcrl.planning.memory import Shapes
from hpcrl.planning.shapes import model_shapes

GIB = 2**30
GPU_GIB = 80
SAMPLES = 16
NODES = (1, 2, 4, 8)
LENGTHS = (8192, 32768, 131072)
_QWEN3 = {
    "model_type": "qwen3", "vocab_size": 151936, "max_position_embeddings": 131072, "num_key_value_heads": 8, "head_dim": 128,
    "num_attention_heads": 32, "tie_word_embeddings": False,
}  # fmt: skip
_MIXTURE = {**_QWEN3, "model_type": "qwen3_moe", "num_key_value_heads": 4, "num_experts": 128, "num_experts_per_tok": 8}
MODELS: dict[str, dict[str, Any]] = {
    "Qwen3-0.6B": _QWEN3 | {
        "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16, "tie_word_embeddings": True,
    },
    "Qwen3-4B": _QWEN3 | {"hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36, "tie_word_embeddings": True},
    "Qwen3-8B": _QWEN3 | {"hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36},
    "Qwen3-14B": _QWEN3 | {
        "hidden_size": 5120, "intermediate_size": 17408, "num_hidden_layers": 40, "num_attention_heads": 40,
    },
    "Qwen3-32B": _QWEN3 | {
        "hidden_size": 5120, "intermediate_size": 25600, "num_hidden_layers": 64, "num_attention_heads": 64,
    },
    "Qwen3-30B-A3B": _MIXTURE | {
        "hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768, "num_hidden_layers": 48,
    },
}  # fmt: skip
"""What the config.json of each says about its shape."""

LAYOUTS: tuple[tuple[str, ...], ...] = (
    ("trainer.gradient_checkpointing=false",),
    (),
    ("trainer.policy.activation_offload=true",),
    *(
        (f"trainer.policy.sequence_parallel_size={ranks}", *offload)
        for ranks in (2, 4, 8)
        for offload in ((), ("trainer.policy.activation_offload=true",))
    ),
)
"""By what they cost: nothing computed again, all but the inputs of layers (the default), these kept by the host, samples shared by ranks."""


def config_of(model: str, longest: int, nodes: int, *settings: str) -> Config:
    """Return an experiment with GRPO and no reference, whose passes are one of the longest samples."""
    return Config.from_toml(
        [],
        [
            f"trainer.policy.model.path={model}", 'data.train_data=["rows.jsonl"]', "trainer.algorithm.use_kl_loss=false",
            f"trainer.max_tokens_per_micro_batch={longest}", f"trainer.max_prompt_length={longest // 8}", "trainer.eval_interval=0",
            f"generator.sampling_params.max_generate_length={longest - longest // 8}", f"trainer.placement.policy_num_nodes={nodes}",
            "trainer.placement.policy_num_gpus_per_node=8", "slurm.gpus_per_node=8", f"slurm.gpu_memory_gb={GPU_GIB}",
            "environment.env_class=gsm8k", *settings,
        ],
    )  # fmt: skip


def layout(model: str, longest: int, shapes: Shapes) -> tuple[int, tuple[str, ...], float] | None:
    """Return the nodes, settings and GiB of a rank of the first layout that fits; None: none does."""
    for nodes in NODES:
        for settings in LAYOUTS:
            need = estimate(config_of(model, longest, nodes, *settings), {"policy": shapes}).total
            if need <= 0.9 * GPU_GIB * GIB:
                return nodes, settings, need / GIB
    return None


def engine(model: str, longest: int, shapes: Shapes) -> tuple[int, int]:
    """Return the GPUs of the smallest replica with room for SAMPLES samples, or of the largest on a node, and for how many it has room."""
    room = 0
    for size in (1, 2, 4, 8):
        config = config_of(model, longest, 1, f"generator.inference_engine.tensor_parallel_size={size}")
        share = config.engine_memory_share(shared=config.trainer.placement.colocate_all) * GPU_GIB * GIB
        room = engine_sizes(config.generator.inference_engine, shapes, share).tokens // longest
        if room >= SAMPLES:
            return size, room
    return 8, room


def rows(models: Iterable[str]) -> Iterator[str]:
    """Yield the rows of the table."""
    with tempfile.TemporaryDirectory() as folder:
        for name in models:
            (Path(folder) / "config.json").write_text(json.dumps(MODELS[name]))
            shapes = model_shapes(config_of(folder, LENGTHS[0], 1).trainer, lambda _: Path(folder))["policy"]
            for longest in LENGTHS:
                size, room = engine(folder, longest, shapes)
                found = layout(folder, longest, shapes)
                nodes, settings, gib = (
                    (str(found[0]), found[1], f"{found[2]:.1f}") if found else (f"> {NODES[-1]}", (), "-")
                )
                shown = ", ".join(f"`{each.removeprefix('trainer.').replace('=', ' = ')}`" for each in settings)
                yield f"| {name} | {longest:,} | {nodes} | {shown or 'defaults'} | {gib} | {size} | {room} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    print(
        "| model | longest sample, tokens | trainer nodes | settings of `[trainer]` | GiB per GPU | GPUs of a replica | samples it has room for |"
    )
    print("|---|---|---|---|---|---|---|")
    for row in rows(parser.parse_args().models):
        print(row, flush=True)


if __name__ == "__main__":
    main()
