"""What the ranks of tests of partitions run: partition_scenarios.py JSON. Each rank counts what Megatron-core builds for it."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from hpcrl.config.sections.megatron import MegatronModelConfig
from hpcrl.config.sections.model import PolicyConfig
from hpcrl.config.validate import build
from hpcrl.trainer.backends.megatron import shims
from hpcrl.trainer.backends.megatron.architecture import architecture_of
from hpcrl.trainer.backends.megatron.models import PolicyModel
from hpcrl.trainer.backends.megatron.muon import moved_by_muon
from hpcrl.trainer.backends.megatron.process_groups import join_groups
from hpcrl.trainer.backends.megatron.settings import transformer_config
from hpcrl.trainer.backends.megatron.shard_layout import shard_layout
from hpcrl.trainer.backends.megatron.trainable import mark_trained
from hpcrl.trainer.distributed import World, joined
from hpcrl.trainer.models.forward import ForwardConfig
from hpcrl.trainer.models.hf import ModelSource
from tests.trainer.backends.megatron.leave import leave_groups


def built(case: dict[str, Any], world: World) -> list[int]:
    """Return the parameters of this rank that are trained: of experts, and of all else; those that are not; what Muon moves, of both."""
    source, megatron = ModelSource(path=case["model"], role="trainer.policy"), MegatronModelConfig(**case["sizes"])
    architecture = architecture_of(source.config(), "it")
    join_groups(megatron, None, world, 1)
    config = transformer_config(architecture, megatron, "trainer.policy", recompute=False, deterministic=False)
    model = PolicyModel(config, architecture, ForwardConfig(temperature=1.0, chunk_rows=1), None)
    section = build(PolicyConfig, {"model": {"path": "", "lora": case["lora"]}})
    mark_trained([model], architecture, source, section, world, lora_type=case["lora_type"])
    counts, layout = [0, 0, 0, 0, 0], shard_layout([model], architecture)
    for name, parameter in model.named_parameters():
        dense = ".experts." not in name
        counts[dense if parameter.requires_grad else 2] += parameter.numel()
        if moved_by_muon(layout[parameter]):
            counts[3 + dense] += parameter.numel()
    del model
    leave_groups(world)
    return counts


def main() -> None:
    options = json.loads(sys.argv[1])
    with joined() as world:
        if world.device.type != "cuda":
            shims.install()
        found = [built(case, world) for case in options["cases"]]
        Path(options["out"], f"{world.rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
