"""Training groups from their beginning to the batch that trains them: admission and dynamic sampling together. Pure logic."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from hpcrl.controller.admission import Admission
from hpcrl.controller.dataset_rows import DATASET
from hpcrl.controller.dynamic_sampling import DynamicSampling
from hpcrl.controller.prompt_stream import group_id, group_index
from hpcrl.errors import RunError
from hpcrl.types import Batch, GroupMeta


class BatchComposer:
    """Decides which finished groups train, and composes the batches of the steps from them.

    Args:
        batch_size: groups per step.
        ready: returns group `index` as it is finished at a version, where nothing has to be generated; None: workers complete groups.
        judged: whether rewards of finished groups are complete only when a reward model has scored them: they are not looked at before.

    Attributes:
        finished: groups that were generated for the batch returned last, dropped ones too.
    """

    def __init__(
        self,
        admission: Admission,
        sampling: DynamicSampling,
        batch_size: int,
        ready: Callable[[int, int], GroupMeta] | None = None,
        *,
        judged: bool = False,
    ) -> None:
        self._admission, self._sampling, self._batch_size, self._ready = admission, sampling, batch_size, ready
        self._judged = judged
        self._chosen = list[int]()
        self.finished = list[GroupMeta]()

    def complete(self, index: int, meta: GroupMeta) -> str | None:
        """Take a finished group, and drop it if it is not worth training; return None, or why it is not wanted."""
        reason = self._admission.complete(index, meta)
        if reason is None:
            self.drop_unwanted([(index, meta)])
        return reason

    def judge(self, groups: Iterable[GroupMeta]) -> list[str]:
        """Add a reward model's scores to finished groups, drop those not worth training, and return those that no step will train."""
        known = [(index, meta) for meta in groups if (index := group_index(meta.group_id)) is not None]
        for index, meta in known:
            if self._admission.is_finished(index):  # else it is too old by now
                self._admission.update(index, meta)
                self.drop_unwanted([(index, meta)])
        return [meta.group_id for index, meta in known if not self._admission.is_finished(index)]

    def _is_rewarded(self, meta: GroupMeta) -> bool:
        return not self._judged or meta.judged

    def complete_ready(self, version: int | None) -> None:
        """Complete the groups that `version`, the newest one if there is any, may begin, where nothing has to be generated."""
        if self._ready is not None and version is not None:
            for index in self._admission.claim(DATASET, version, self._batch_size):
                self.complete(index, self._ready(index, version))

    def drop_unwanted(self, finished: Iterable[tuple[int, GroupMeta]]) -> None:
        """Drop finished groups that are not worth training."""
        rewarded = [(index, meta) for index, meta in finished if self._is_rewarded(meta)]
        self._admission.drop([index for index, meta in rewarded if not self._sampling.keeps(meta)])

    def batch(self) -> Batch | None:
        """Return the batch of the next step, or None while it is not complete. It stays the next one until it is taken.

        Raises:
            DataError: a group lacks what it is to be judged by.
            RunError: as many groups as may be were generated for the step, and yet its batch is not complete.
        """
        admission, sampling = self._admission, self._sampling
        while (ready := admission.ready()) is not None:
            if not all(self._is_rewarded(meta) for _, meta in ready):
                return None
            step, indices = admission.composed + 1, [index for index, _ in ready]
            chosen = sampling.chosen(step, [meta for _, meta in ready])
            if chosen is None:
                admission.drop(indices)
                continue
            trained = {meta.group_id for meta in chosen}
            replaced = [meta for _, meta in ready if meta.group_id not in trained]
            dropped = {meta.group_id: sampling.worth(meta) for meta in [*admission.dropped, *replaced]}
            given_up = [group_id(index) for index in admission.overdue(indices)]
            self._chosen, self.finished = indices, [*admission.dropped, *(meta for _, meta in ready)]
            return Batch(step, chosen, admission.cursor, dropped, given_up)
        kept = admission.finished
        if sampling.exhausted(self._batch_size, kept, admission.dropped_count):
            raise RunError(sampling.explain(admission.composed + 1, kept, admission.dropped_count))
        return None

    def take(self) -> None:
        """Record that the batch returned last is written: its step takes it."""
        self._admission.take(self._chosen)
