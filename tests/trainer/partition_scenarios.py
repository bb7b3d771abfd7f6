"""What the tests of partitions run under torchrun: partition_scenarios.py JSON. Each rank counts what Megatron-core builds for it."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from transformers import AutoConfig

from hpcrl.config.megatron import MegatronModelConfig
from hpcrl.trainer.megatron import shims
from hpcrl.trainer.megatron.architecture import architecture_of
from hpcrl.trainer.megatron.groups import join_groups
from hpcrl.trainer.megatron.models import PolicyModel
from hpcrl.trainer.megatron.settings import transformer_config
from hpcrl.trainer.passes import Passes
from hpcrl.trainer.world import World, joined
from tests.trainer.mcore.leave import leave_groups


def built(entries: dict[str, Any], sizes: dict[str, Any], world: World) -> list[int]:
    """Return the parameters of this rank: of experts, and of all else."""
    architecture, megatron = architecture_of(AutoConfig.for_model(**entries), "it"), MegatronModelConfig(**sizes)
    join_groups(megatron, None, world, 1)
    config = transformer_config(architecture, megatron, "trainer.policy", recompute=False, deterministic=False)
    model = PolicyModel(config, architecture, Passes(temperature=1.0, chunk_rows=1), None)
    counts = [0, 0]
    for name, parameter in model.named_parameters():
        counts[".experts." not in name] += parameter.numel()
    del model
    leave_groups(world)
    return counts


def main() -> None:
    options = json.loads(sys.argv[1])
    with joined() as world:
        if world.device.type != "cuda":
            shims.install()
        found = [built(case["model"], case["sizes"], world) for case in options["cases"]]
        Path(options["out"], f"{world.rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
