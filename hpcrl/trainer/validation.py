"""The loss of validation sets: what supervised fine-tuning is evaluated by."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice

from hpcrl.config import Config, DataConfig
from hpcrl.data.group_file import as_tensors
from hpcrl.data.token_file import TokenFile
from hpcrl.data.tokenize import validation_rows
from hpcrl.rundir.commit import write_json
from hpcrl.rundir.layout import Run
from hpcrl.trainer.backends.base import PolicyEngine
from hpcrl.trainer.backends.schedule import is_due
from hpcrl.trainer.batching import Limits, SampleRef, assign_to_ranks, plan_mini_batch
from hpcrl.trainer.distributed import World
from hpcrl.trainer.packing import MiniBatch, pack
from hpcrl.trainer.stop import StopConsensus

ALL = "all"
"""Stands for all sets together."""


@dataclass(frozen=True)
class Validation:
    """When which rows are evaluated.

    Attributes:
        interval: trainer.eval_interval; 0 or less: never.
        rows_at_once: of a set, which are laid end to end.
    """

    run: Run
    data: DataConfig
    limits: Limits
    interval: int
    before_train: bool
    rows_at_once: int

    @classmethod
    def of(cls, run: Run, config: Config, limits: Limits) -> Validation:
        trainer = config.trainer
        return cls(run, config.data, limits, trainer.eval_interval, trainer.eval_before_train, trainer.eval_batch_size)

    def is_due(self, step: int, total: int, world: World) -> bool:
        """Return whether the sets are to be evaluated after a step, and have not been. All ranks call it."""
        due = self.before_train if step == 0 else is_due(self.interval, step, total)
        return self.interval > 0 and due and not world.rank0_broadcast(self.run.eval_losses(step).is_file)

    def losses(self, policy: PolicyEngine, step: int, world: World, consensus: StopConsensus) -> dict[str, float]:
        """Return eval/<set>/loss after a step, the mean over the trained tokens of each set, and of all; nothing where there are no sets.

        All ranks call it.

        Raises:
            DataError: a set is missing or damaged.
            Stopping: the run is to stop; the next attempt evaluates the step.
        """
        sets, sums = validation_rows(self.run, self.data), dict[str, list[float]]()
        if not sets:  # it is evaluated by generating alone
            return {}
        for name, parts in sets.items():
            sums[name] = [0.0, 0.0]
            rows = ((part.file, row) for part in parts for row in part.places)
            while chunk := list(islice(rows, self.rows_at_once)):
                loss, tokens = self._loss(policy, chunk, partial(consensus, "validate.micro_batch"))
                sums[name] = [sums[name][0] + loss, sums[name][1] + tokens]
        sums[ALL] = [sum(column) for column in zip(*sums.values(), strict=True)]
        found = {f"eval/{name}/loss": loss / tokens for name, (loss, tokens) in sums.items()}
        world.rank0_broadcast(lambda: write_json(self.run.eval_losses(step), found))
        return found

    def _loss(
        self, policy: PolicyEngine, rows: Sequence[tuple[TokenFile, int]], before: Callable[[], None]
    ) -> tuple[float, float]:
        """Return the loss of some rows, summed over their trained tokens, and how many these are, of all ranks."""
        data = policy.data
        refs = [SampleRef(at, 0, file.length(row)) for at, (file, row) in enumerate(rows)]
        plan = plan_mini_batch(assign_to_ranks(refs, data.size, self.limits[0]), *self.limits)
        own = plan.shares[data.rank]
        samples = pack([as_tensors(file.read(row)) for file, row in (rows[ref.group] for ref in own)], own)
        logprobs_P = MiniBatch(plan, samples, data.rank).scored(policy.logprobs, before)
        mask_P = samples.loss_mask.double()
        loss, tokens = data.sum([-(logprobs_P.double() * mask_P).sum().item(), mask_P.sum().item()])
        return loss, tokens
