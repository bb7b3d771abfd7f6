"""Dumps of a step's data before it is trained: trainer.dump_data_batch.

    dumps/s000042/
      mini-0-rank-1.safetensors   the samples of the first optimizer step that rank 1 trains, laid end to end
      manifest.json, COMMIT       as of a checkpoint: a dump is complete, or has no COMMIT

Each file has the tensors of a MicroBatch (hpcrl/types.py) of all these samples, [P] for P tokens (sampling_mask [P, K], head_rows [R]).
Entry p of all but token_ids and positions is about the token after token p. What does not exist, such as old_logprobs where the policy is
its own old policy or
values without a critic, is not in the file. Further tensors are `teacher_logprobs` [P] with a teacher, `entropies` [P] of the policy in
nats where samples were generated, and `rewards` [P] of the advantages. For B samples there are `lengths`, `groups` (indices in
batches/s000042.json) and `samples` (rows of the group's file), [B]. The header has `group_ids`, a JSON list of B texts.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import torch

from hpcrl.errors import CommitError
from hpcrl.rundir.commit import abandon, begin, discard, finish, staging
from hpcrl.rundir.layout import Run, step_of
from hpcrl.rundir.ledger import require_newest
from hpcrl.rundir.space import explained
from hpcrl.trainer.distributed import World
from hpcrl.trainer.packing import MiniBatch, PackedRows
from hpcrl.trainer.saving.committer import save_tensors
from hpcrl.types import Batch


class Dumps:
    """The dumps of one run, seen from all its trainer ranks. All ranks call every method.

    Args:
        attempt: 0 writes beside the run's attempts, whatever these do.
    """

    def __init__(self, run: Run, attempt: int, world: World) -> None:
        self._run, self._attempt, self._world = run, attempt, world

    def resume(self, step: int) -> None:
        """Remove the dumps of steps after `step`, which are trained again, and what was never finished."""

        def remove() -> None:
            self._fence()
            with explained(self._run.dumps):
                for path in list(self._run.dumps.iterdir()) if self._run.dumps.is_dir() else []:
                    number = step_of(path)
                    if path.name.startswith(".") or (number is not None and number > step):
                        discard(path, self._fence)

        self._world.rank0_broadcast(remove)

    def write(self, batch: Batch, minis: Sequence[MiniBatch], data: World) -> None:
        """Write the mini-batches of a step, each rank its samples.

        Args:
            data: the ranks that they were dealt to.

        Raises:
            CommitError: on every rank: they could not be written, and nothing is left of them; or a newer attempt has begun.
        """
        world, target = self._world, self._run.dump(batch.step)
        try:
            world.rank0_broadcast(lambda: self._begin(target))
            world.all_gather(lambda: self._write_own(target, batch, minis if data.is_leader else (), data.rank))
            world.rank0_broadcast(lambda: self._finish(target, batch.step))
        except CommitError:
            if world.first:
                abandon(target, self._attempt, self._fence)
            raise

    def _begin(self, target: Path) -> None:
        self._fence()
        with explained(target):
            begin(target, self._attempt)

    def _write_own(self, target: Path, batch: Batch, minis: Sequence[MiniBatch], rank: int) -> None:
        with explained(target):
            for number, mini in enumerate(minis):
                ids = [batch.groups[ref.group].group_id for ref in mini.rows.refs]
                path = staging(target, self._attempt) / f"mini-{number}-rank-{rank}.safetensors"
                save_tensors(_tensors(mini.rows), path, {"group_ids": json.dumps(ids)})

    def _finish(self, target: Path, step: int) -> None:
        with explained(target):
            finish(target, self._attempt, fence=self._fence, step=step)

    def _fence(self) -> None:
        if self._attempt:
            require_newest(self._run, self._attempt)


def _tensors(samples: PackedRows) -> dict[str, torch.Tensor]:
    packed, size = samples.whole(), len(samples.token_ids)  # 0 without samples, which `whole` gives a token
    columns = {name: value[:size] for name, value in vars(packed).items() if isinstance(value, torch.Tensor)}
    penalties_P = samples.scores.penalties
    rewards_P = samples.rewards if penalties_P is None else (samples.rewards.double() - penalties_P).float()
    return {
        **{name: value.contiguous() for name, value in columns.items()},
        **{
            name: value for name, value in samples.scores.present().items() if name in ("entropies", "teacher_logprobs")
        },
        "rewards": rewards_P,
        "lengths": torch.tensor(samples.lengths, dtype=torch.int64),
        "groups": torch.tensor([ref.group for ref in samples.refs], dtype=torch.int64),
        "samples": torch.tensor([ref.index for ref in samples.refs], dtype=torch.int64),
    }
