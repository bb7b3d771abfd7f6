"""What a step trains, written down before it is trained: trainer.dump_data_batch.

    dumps/s000042/
      mini-0-rank-1.safetensors   the samples of the first optimizer step that rank 1 trains, laid end to end
      manifest.json, COMMIT       as of a checkpoint: a dump is complete, or has no COMMIT

Each file has the tensors of a MicroBatch (hpcrl/types.py) of all these samples, [P] for P tokens: entry p of all but token_ids and
positions speaks about the token after token p. What is not there, such as old_logprobs where the policy is its own old policy or
values without a critic, is not in the file. Beside them there are `rewards` [P], from which advantages were estimated, and for B samples
`lengths`, `groups` (places in batches/s000042.json) and `samples` (rows of the group's file), [B]; the header has `group_ids`, a JSON list of
B texts.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

import torch
from safetensors.torch import save_file
from torch.nn.functional import pad

from hpcrl.run.commit import begin, discard, finish, staging
from hpcrl.run.layout import Run, step_of
from hpcrl.trainer.packing import Row, pack
from hpcrl.trainer.update import MiniBatch
from hpcrl.trainer.world import World
from hpcrl.types import Batch


class Dumps:
    """The dumps of one run, seen from all its trainer ranks."""

    def __init__(self, run: Run, attempt: int, world: World) -> None:
        self._run, self._attempt, self._world = run, attempt, world

    def resume(self, step: int) -> None:
        """Remove the dumps of steps after `step`, which are trained again, and what was never finished."""
        if self._world.first and self._run.dumps.is_dir():
            for path in list(self._run.dumps.iterdir()):
                number = step_of(path)
                if path.name.startswith(".") or (number is not None and number > step):
                    discard(path)
        self._world.barrier()

    def write(self, batch: Batch, minis: Sequence[MiniBatch], data: World) -> None:
        """Write the mini-batches of a step, each rank its samples.

        Args:
            data: the ranks that they were dealt to.
        """
        target = self._run.dump(batch.step)
        if self._world.first:
            begin(target, self._attempt)
        self._world.barrier()
        for number, mini in enumerate(minis) if data.leads else ():
            ids = [batch.groups[row.pick.group].group_id for row in mini.rows]
            path = staging(target, self._attempt) / f"mini-{number}-rank-{data.rank}.safetensors"
            save_file(_tensors(mini.rows), path, {"group_ids": json.dumps(ids)})
        self._world.barrier()
        if self._world.first:
            finish(target, self._attempt, step=batch.step)


def _tensors(rows: Sequence[Row]) -> dict[str, torch.Tensor]:
    packed = pack(rows)
    size = sum(len(row.sample.token_ids) for row in rows)  # 0 without rows, which `pack` gives a token
    columns = {name: value[:size] for name, value in vars(packed).items() if isinstance(value, torch.Tensor)}
    rewards = [pad(row.rewards.float()[1:], (0, 1)) for row in rows]
    return {
        **{name: value.contiguous() for name, value in columns.items()},
        "rewards": torch.cat(rewards) if rewards else torch.zeros(0),
        "lengths": torch.tensor(packed.lengths[: len(rows)], dtype=torch.int64),
        "groups": torch.tensor([row.pick.group for row in rows], dtype=torch.int64),
        "samples": torch.tensor([row.pick.index for row in rows], dtype=torch.int64),
    }
