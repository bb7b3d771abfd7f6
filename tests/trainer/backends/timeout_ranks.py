"""What tests/trainer/backends/test_timeouts.py runs in its ranks: timeout_ranks.py FILE JSON, the timeouts in seconds of each group of theirs."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from hpcrl.config.sections.megatron import MegatronModelConfig
from hpcrl.config.sections.slurm import PatienceConfig
from hpcrl.rundir.commit import write_json
from hpcrl.trainer.backends.fsdp.sharding import _mesh
from hpcrl.trainer.backends.megatron import shims
from hpcrl.trainer.backends.megatron.process_groups import join_groups, tensor_group
from hpcrl.trainer.distributed import joined
from tests.trainer.backends.megatron.leave import leave_groups


def seconds(group: dist.ProcessGroup) -> float:
    """Return for how long torch waits in a collective of a gloo group."""
    return group._get_backend(torch.device("cpu")).options._timeout.total_seconds()


def main(file: Path, patience: PatienceConfig) -> None:
    with joined(patience=patience) as world:
        assert dist.group.WORLD is not None
        copies, shards = _mesh(2, world).get_all_groups()
        shims.install()
        join_groups(MegatronModelConfig(tensor_model_parallel_size=2), None, world, 1)
        found = {
            "all ranks": dist.group.WORLD,
            "control": world.control,
            "behind": world.with_new_group().control,
            "copies": copies,
            "shards": shards,
            "tensor": tensor_group(),
        }
        sizes = {name: group.size() for name, group in found.items()}
        if world.first:
            write_json(file, {"timeouts": {name: seconds(group) for name, group in found.items()}, "sizes": sizes})
        leave_groups(world)


if __name__ == "__main__":
    main(Path(sys.argv[1]), PatienceConfig(**json.loads(sys.argv[2])))
