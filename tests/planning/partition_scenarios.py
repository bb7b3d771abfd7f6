"""What the ranks of tests of partitions run: partition_scenarios.py JSON. Each rank counts what Megatron-core builds for it."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from transformers import AutoConfig

from hpcrl.config.sections.megatron import MegatronModelConfig
from hpcrl.trainer.backends.megatron import shims
from hpcrl.trainer.backends.megatron.architecture import architecture_of
from hpcrl.trainer.backends.megatron.models import PolicyModel
from hpcrl.trainer.backends.megatron.process_groups import join_groups
from hpcrl.trainer.backends.megatron.settings import transformer_config
from hpcrl.trainer.distributed import World, joined
from hpcrl.trainer.models.forward import ForwardConfig
from tests.trainer.backends.megatron.leave import leave_groups


def built(entries: dict[str, Any], sizes: dict[str, Any], world: World) -> list[int]:
    """Return the parameters of this rank: of experts, and of all else."""
    architecture, megatron = architecture_of(AutoConfig.for_model(**entries), "it"), MegatronModelConfig(**sizes)
    join_groups(megatron, None, world, 1)
    config = transformer_config(architecture, megatron, "trainer.policy", recompute=False, deterministic=False)
    model = PolicyModel(config, architecture, ForwardConfig(temperature=1.0, chunk_rows=1), None)
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
