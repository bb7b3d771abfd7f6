"""Loss of validation sets, for runs that learn from datasets."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import cast

from hpcrl.config import Config
from hpcrl.config.sections.data import DataConfig
from hpcrl.data.token_file import TokenFile
from hpcrl.data.tokenize import validation_rows
from hpcrl.rundir.commit import write_json
from hpcrl.rundir.layout import Run
from hpcrl.trainer.backends.base import CriticEngine, PolicyEngine
from hpcrl.trainer.backends.schedule import is_due
from hpcrl.trainer.batching import Limits, RowRef, planned
from hpcrl.trainer.distributed import World
from hpcrl.trainer.offline.build import Measure, measure_of
from hpcrl.trainer.offline.unpaired import by_row
from hpcrl.trainer.packing import MiniBatch, pack
from hpcrl.trainer.stop import StopConsensus

ALL = "all"
"""Stands for all sets together."""


@dataclass(frozen=True)
class Validation:
    """Schedule and settings of validation.

    Attributes:
        interval: trainer.eval_interval; 0 or less: never.
        rows_at_once: of a set, which are laid end to end.
        pairs: rows are pairs, which stay together.
        reference: the measure compares with the reference.
        values: it is of the values of a reward model.
        unpaired: answers have labels.
    """

    run: Run
    data: DataConfig
    limits: Limits
    interval: int
    before_train: bool
    rows_at_once: int
    measure: Measure
    pairs: bool = False
    reference: bool = False
    values: bool = False
    unpaired: bool = False

    @classmethod
    def of(cls, run: Run, config: Config, limits: Limits) -> Validation:
        trainer = config.trainer
        return cls(
            run, config.data, limits, trainer.eval_interval, trainer.eval_before_train, trainer.eval_batch_size,
            measure_of(trainer), pairs=trainer.pairwise, reference=trainer.compares_with_reference, values=trainer.trains_reward_model,
            unpaired=trainer.unpaired,
        )  # fmt: skip

    def is_due(self, step: int, total: int, world: World) -> bool:
        """Return whether the sets are to be evaluated after a step, and have not been. All ranks call it."""
        due = self.before_train if step == 0 else is_due(self.interval, step, total)
        return self.interval > 0 and due and not world.rank0_broadcast(self.run.eval_losses(step).is_file)

    def losses(self, policy: PolicyEngine, step: int, world: World, consensus: StopConsensus) -> dict[str, float]:
        """Return eval/<set>/loss after a step, and the measure's other metrics, of each set and of all; empty without sets.

        All ranks call it.

        Raises:
            DataError: a set is missing or damaged.
            Stopping: the run is to stop; the next attempt evaluates the step.
        """
        before = partial(consensus, "validate.micro_batch")
        with policy.evaluated():
            sets = {name: self.sums(policy, parts, before) for name, parts in self._sets().items()}
        if not sets:  # it is evaluated by generating alone
            return {}
        sets[ALL] = _added(sets.values())
        found = {
            f"eval/{name}/{metric}": value
            for name, sums in sets.items()
            for metric, value in self.measure.means(sums).items()
        }
        world.rank0_broadcast(lambda: write_json(self.run.eval_losses(step), found))
        return found

    def _sets(self) -> dict[str, list[tuple[TokenFile, int]]]:
        sets = validation_rows(self.run, self.data)
        return {name: [(part.file, row) for part in parts for row in part.places] for name, parts in sets.items()}

    def sums(
        self, policy: PolicyEngine, rows: Sequence[tuple[TokenFile, int]], before: Callable[[], None]
    ) -> dict[str, float]:
        """Return the measure's sums over rows, of all ranks.

        Args:
            before: is called before each micro-batch.
        """
        taken = iter(rows)
        chunks = iter(lambda: list(islice(taken, self.rows_at_once)), [])
        return _added([self._of_chunk(policy, chunk, before) for chunk in chunks])

    def _of_chunk(
        self, policy: PolicyEngine, rows: Sequence[tuple[TokenFile, int]], before: Callable[[], None]
    ) -> dict[str, float]:
        data = policy.data
        refs = [
            RowRef(at, index, length)
            for at, (file, row) in enumerate(rows)
            for index, length in enumerate(file.lengths(row))
        ]
        plan = planned(refs, data.size, self.limits, pairs=self.pairs)
        own = plan.shares[data.rank]
        read = {at: rows[at][0].read(rows[at][1]) for at in {ref.group for ref in own}}
        samples = pack([read[ref.group][ref.index] for ref in own], own)
        if self.limits[0].shared:
            samples.share_prefixes()
        if self.unpaired:
            samples.scores.desirable = by_row(
                samples, [rows[ref.group][0].rewards(rows[ref.group][1])[ref.index] for ref in own]
            )
        mini = MiniBatch(plan, samples, data.rank)
        if self.reference:
            samples.scores.ref_logprobs = mini.scored(partial(policy.logprobs, reference=True), before)
        forward = cast(CriticEngine, policy).values if self.values else policy.logprobs
        sums = self.measure.sums(samples, mini.scored(forward, before))
        return dict(zip(sums, data.sum(list(sums.values())), strict=True))


def _added(several: Collection[dict[str, float]]) -> dict[str, float]:
    names = next(iter(several), {})
    return {name: sum(one[name] for one in several) for name in names}
