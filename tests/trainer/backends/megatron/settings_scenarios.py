"""What tests/trainer/backends/megatron/test_settings.py runs in its ranks: settings_scenarios.py JSON, as scenarios.py beside this folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from hpcrl.config import TrainerConfig
from hpcrl.config.sections.megatron import MegatronModelConfig
from hpcrl.config.validate import build
from hpcrl.trainer.backends.build import build_policy
from hpcrl.trainer.backends.megatron import shims
from hpcrl.trainer.backends.megatron.engine import MegatronPolicy
from hpcrl.trainer.backends.megatron.process_groups import join_groups
from hpcrl.trainer.distributed import World
from tests.trainer.backends.megatron.leave import leave_groups
from tests.trainer.scenarios import main

_INTERLEAVED = {"pipeline_model_parallel_size": 2, "pipeline_layers_per_stage": 1}
_EXPERTS = {"tensor_model_parallel_size": 2, "expert_model_parallel_size": 2, "expert_tensor_parallel_size": 1}
LAYOUTS: dict[str, dict[str, Any]] = {
    "tensor_model_parallel_size": {"tensor_model_parallel_size": 2},
    "pipeline_model_parallel_size": {"pipeline_model_parallel_size": 2},
    "pipeline_layers_per_stage": _INTERLEAVED,
    "context_parallel_size": {"context_parallel_size": 2},
    "expert_model_parallel_size": {"expert_model_parallel_size": 2},
    "expert_tensor_parallel_size": _EXPERTS,
}


def groups(world: World, options: dict[str, Any]) -> None:
    """Write the sizes of the groups that each setting makes, and where each rank is among those that train other samples."""
    from megatron.core import parallel_state  # not before hpcrl's package, which quiets it

    told = {}
    for name, sizes in LAYOUTS.items():
        data = join_groups(MegatronModelConfig(**sizes), 2 if sizes is _INTERLEAVED else None, world, 1)
        of_rank = world.all_gather(lambda data=data: [data.rank, data.size, data.is_leader])
        told[name] = {
            "tensor": parallel_state.get_tensor_model_parallel_world_size(),
            "pipeline": parallel_state.get_pipeline_model_parallel_world_size(),
            "context": parallel_state.get_context_parallel_world_size(),
            "expert": parallel_state.get_expert_model_parallel_world_size(),
            "expert_tensor": parallel_state.get_expert_tensor_parallel_world_size(),
            "virtual": parallel_state.get_virtual_pipeline_model_parallel_world_size(),
            "rank": [rank for rank, _, _ in of_rank],
            "size": data.size,
            "leads": [leads for _, _, leads in of_rank],
        }
        leave_groups(world)
    if world.first:
        Path(options["out"]).write_text(json.dumps(told))


def engine(world: World, options: dict[str, Any]) -> None:
    """Write how often a step empties the cache."""
    emptied, calls = {}, []
    # there is no cache here that could be seen to be empty
    torch.cuda.empty_cache = lambda: calls.append(None)
    for setting in (None, False, True):
        megatron = {"dtype": "fp32", "empty_cuda_cache": setting}
        policy = {"model": {"path": options["model"]}, "megatron_config": megatron}
        table = {"strategy": "megatron", "policy": policy, "algorithm": {"use_kl_loss": False}}
        made = build_policy(build(TrainerConfig, table), 1.0, world)
        assert isinstance(made, MegatronPolicy)
        made.schedule(1)
        calls.clear()
        made.step()
        emptied[json.dumps(setting)] = len(calls)
    if world.first:
        Path(options["out"]).write_text(json.dumps({"emptied": emptied}))


if __name__ == "__main__":
    shims.install()
    main({"groups": groups, "engine": engine})
