"""The controller's state and what each request does to it. It handles metadata only, never tokens.

    workers   claim groups, complete them           trainer   asks for the next batch, tells what it published
    batches   written here, one file per step       evaluation   queued here when a version that is due appears

Methods are quick and not thread-safe; api.py calls them one at a time.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from hpcrl.controller.admission import Admission, staleness
from hpcrl.controller.describe import describe, describe_dropped
from hpcrl.controller.dynamic_sampling import DynamicSampling
from hpcrl.controller.evaluation import EvalQueue, is_due, scores
from hpcrl.controller.failures import Failures
from hpcrl.controller.history import group_id, group_index, read_history
from hpcrl.controller.roster import Floor, Roster, Worker
from hpcrl.controller.sampling import PromptStream
from hpcrl.errors import CommitError, DataError, HpcrlError, RunError
from hpcrl.observe.metrics import MetricsWriter
from hpcrl.run.commit import committed, discard, read_json, write_json
from hpcrl.run.fence import require_newest
from hpcrl.run.layout import Run, step_of, version_of
from hpcrl.types import Batch, GroupMeta, Prompt, Work

FINISHED = "finished"


@dataclass(frozen=True)
class Schedule:
    """The numbers that the controller works by.

    Attributes:
        batch_size: groups per step.
        n_samples, eval_n_samples: samples per group.
        staleness: bound in steps.
        order_seed: of the order of training prompts; None keeps the dataset's own.
        groups_at_once: training groups that are generated at the same time at most; None for no bound but the staleness.
        eval_prompts_at_once: prompts that are evaluated at the same time at most.
        eval_interval: steps between evaluations; 0 or less for none.
        sampling: what becomes of groups whose samples are all equally good.
        baselines: whether groups have the reward of a greedy response.
        floor: when there are too few replicas to go on.
        max_failed_ratio: share of samples whose environments may fail.
    """

    batch_size: int
    n_samples: int
    staleness: int
    total_steps: int
    seed: int
    eval_interval: int
    eval_before_train: bool
    eval_n_samples: int
    order_seed: int | None
    groups_at_once: int | None
    eval_prompts_at_once: int
    sampling: DynamicSampling = field(default_factory=DynamicSampling)
    baselines: bool = False
    floor: Floor = field(default_factory=Floor)
    max_failed_ratio: float = 0.5


class Service:
    """One attempt's controller.

    Attributes:
        stop: why the run ends; None while it goes on.
        failure: why it cannot go on.
    """

    def __init__(
        self, run: Run, attempt: int, schedule: Schedule, train: list[Prompt], validation: list[Prompt]
    ) -> None:
        self._run, self._attempt, self._schedule = run, attempt, schedule
        self._train, self._validation = train, validation
        self._stream = PromptStream(len(train), schedule.batch_size, schedule.seed, schedule.order_seed)
        self._admission = Admission(
            schedule.batch_size, schedule.staleness, schedule.total_steps, schedule.groups_at_once
        )
        self._metrics: MetricsWriter | None = None
        self._batches: dict[int, Batch] = {}
        self._described: set[int] = set()
        self._version: int | None = None
        self._eval = EvalQueue(schedule.eval_prompts_at_once)
        self._pruned = self._started = self._taken_back = 0
        self._roster = Roster()
        self._failures = Failures(schedule.max_failed_ratio, schedule.batch_size)
        self.stop: str | None = None
        self.failure: HpcrlError | None = None

    @property
    def version(self) -> int | None:
        """The newest published version, or None before the trainer has started."""
        return self._version

    @property
    def floor(self) -> Floor:
        return self._schedule.floor

    @property
    def workers(self) -> dict[str, Worker]:
        return self._roster.workers

    @property
    def total_steps(self) -> int:
        return self._schedule.total_steps

    @property
    def steps_per_epoch(self) -> int:
        return self._stream.steps_per_epoch

    def start(self, step: int) -> int:
        """The trainer is ready to continue after `step`; return the number of steps of the run."""
        if self._metrics is not None:  # the answer to the first request got lost
            assert step == self._started, f"started after step {self._started}, now after {step}"
            return self._schedule.total_steps
        if step > self.total_steps:
            raise RunError(
                f"training would continue after step {step}, but this run ends at step {self.total_steps}; raise trainer.max_steps "
                "or trainer.epochs, or start from an earlier checkpoint"
            )
        bound = self._schedule.staleness
        self._pruned = min(step, self._oldest_checkpoint())

        def keep(following: int, meta: GroupMeta) -> bool:
            return 0 <= staleness(following, meta) <= bound and self._usable(meta)

        history = read_history(self._run, step, self._schedule.batch_size, self._usable, keep, self._pruned)
        for path in self._run.evals.glob("v*"):
            if (version_of(path) or 0) > step:  # of a policy that will be trained anew
                discard(path)
        self._admission.restore(history.composed, history.used, history.finished)
        self._batches = history.batches
        self._metrics = MetricsWriter(self._run, "controller", self._attempt, step)
        self._started = step
        self._sift(history.finished)
        self.published(step)
        return self._schedule.total_steps

    def published(self, version: int) -> None:
        """weights/v<version> is there (or, for version 0, the initial model is the newest)."""
        if version == self._version:  # the answer to the first request got lost
            return
        self._version = version
        for step in [step for step in self._batches if step <= version]:
            del self._batches[step]
        s = self._schedule
        due = is_due(version, s.total_steps, s.eval_interval, s.eval_before_train) and self._validation
        if due and not (self._run.evals_of(version) / "summary.json").exists():
            discard(self._run.evals_of(version))
            self._eval.begin(version, len(self._validation))
        self._compose()
        self._finish_if_done()

    def claim(self, name: str, version: int, capacity: int) -> list[Work]:
        """Return the groups that worker `name` may begin with its engine at `version`; evaluation goes first.

        Only the newest version begins groups: an engine that has just started, or was away, holds older weights.

        Args:
            capacity: training groups that the worker has room for; as many samples fit if they are for evaluation.
        """
        if version != self._version or self.stop or self.failure:
            return []
        per_group, per_row = self._schedule.n_samples, self._schedule.eval_n_samples
        room = max(capacity * per_group // per_row, min(capacity, 1))
        share = self._share(name, self._eval.open) - self._eval.running_at(name)
        rows = self._eval.claim(name, version, min(room, share))
        left = max(0, capacity - -(-len(rows) * per_row // per_group))
        in_flight = self._schedule.batch_size * (1 + self._schedule.staleness)
        share = self._share(name, in_flight) - self._admission.running_at(name)
        work = [self._eval_work(row) for row in rows]
        return work + [self._train_work(i) for i in self._admission.claim(name, version, min(left, share))]

    def _share(self, name: str, work: int) -> int:
        """Return how much of the work there is is for one worker, so that all that are there take part in it."""
        return -(-work // len({name, *self.workers}))

    def _train_work(self, index: int) -> Work:
        prompt = self._train[self._stream.row(index)]
        return Work(group_id(index), "train", prompt, self._schedule.n_samples, self._stream.sampling_seed(index))

    def _eval_work(self, row: int) -> Work:
        return Work(
            self._eval.name(row),
            "eval",
            self._validation[row],
            self._schedule.eval_n_samples,
            self._schedule.seed + row,
        )

    def complete(self, groups: list[GroupMeta]) -> dict[str, str]:
        """Take finished groups; return those that are not wanted, with the reason."""
        rejected, taken = {}, dict[int, GroupMeta]()
        for meta in groups:
            if meta.kind == "eval":
                reason = self._eval.complete(meta)
            else:
                self._run.inside(meta.path)
                index = group_index(meta.group_id)
                reason = "unknown group" if index is None else self._admission.complete(index, meta)
                if index is not None and not reason:
                    taken[index] = meta
            if reason:
                rejected[meta.group_id] = reason
            else:
                self.failure = self.failure or self._failures.add(meta)
        self._sift(taken)
        self._compose()
        self._conclude_evaluation()
        self._finish_if_done()
        return rejected

    def batch(self, step: int) -> str | None:
        """Return the path of the batch of `step`, relative to the run directory, or None while it is not complete.

        While an evaluation is open nothing is trained, so that its scores belong to one version.
        """
        batch = self._batches.get(step)
        if batch is None or self._eval.open:
            return None
        if step not in self._described:
            assert self._metrics is not None
            position = {"trainer/global_step": step, "trainer/epoch": self._epoch(batch)}
            dropped = describe_dropped(batch) if self._schedule.sampling.config.type else {}
            self._metrics.write(step, describe(batch) | dropped | position | self._replicas())
            self._described.add(step)
        return str(self._run.batch(step).relative_to(self._run.path))

    def _replicas(self) -> dict[str, float]:
        return {
            "replicas/ready": len(self.workers),
            "replicas/total": max(self.floor.replicas, len(self.workers)),
            "replicas/restarts": self._roster.restarts,
            "replicas/groups_taken_back": self._taken_back,
        }

    def committed(self) -> None:
        """A checkpoint is committed: samples that only checkpoints older than the newest two could train again are removed."""
        due = range(self._pruned + 1, self._oldest_checkpoint() + 1)
        values = [read_json(self._run.batch(step)) for step in due]
        names = {name for value in values if value for name in Batch.from_json(value).generated}
        # one pass over the folders: looking for each file in each of them takes minutes on a shared filesystem
        for path in self._run.samples.glob("*/g*.safetensors") if names else ():
            if path.stem in names:
                path.unlink(missing_ok=True)
        self._pruned += len(due)

    def _oldest_checkpoint(self) -> int:
        """Return the step of the older one of the two newest checkpoints, or 0 where there are not two."""
        kept = committed(self._run.checkpoints, step_of)[-2:]
        return kept[0] if len(kept) == 2 else 0

    def seen(self, name: str, version: int, state: str) -> Worker:
        """A worker has called; return it."""
        return self._roster.seen(name, version, state)

    def reconcile(self, name: str, version: int, holding: list[str]) -> None:
        """A worker holds what it says: take back what an answer that never arrived gave to it, and let it go on with what was
        taken from it while it was silent."""
        indices = [index for group in holding if (index := group_index(group)) is not None]
        self._admission.release(name, indices)
        self._admission.reclaim(name, version, indices)
        self._eval.release(name, holding)

    def expire(self) -> list[str]:
        """Take the groups of silent workers back; return the names of those workers."""
        silent = self._roster.silent()
        for name in silent:
            self.leave(name)
        return silent

    def leave(self, name: str) -> int:
        """A worker ends: others get its groups. Returns how many."""
        if not self._roster.remove(name):
            return 0
        lost = len(self._admission.release(name)) + len(self._eval.release(name))
        self._taken_back += lost
        return lost

    def status(self) -> dict[str, object]:
        return {
            "version": self._version,
            "composed": self._admission.composed,
            "total_steps": self._schedule.total_steps,
            "running": self._admission.running,
            "finished": self._admission.finished,
            "dropped": len(self._admission.dropped),
            "eval_open": self._eval.open,
            "stop": self.stop,
            "workers": {name: {"version": w.version, "state": w.state} for name, w in self.workers.items()},
        }

    def _usable(self, group: GroupMeta) -> bool:
        """Return whether a group of an earlier attempt, perhaps with other settings, has all that is asked of one now."""
        return self._schedule.sampling.can_judge(group) and not (self._schedule.baselines and group.baseline is None)

    def _sift(self, finished: Mapping[int, GroupMeta]) -> None:
        """Drop what is not worth training of groups that have just been finished."""
        try:
            self._admission.drop([i for i, meta in finished.items() if not self._schedule.sampling.keeps(meta)])
        except DataError as error:
            self.failure = error

    def _compose(self) -> None:
        sampling, size = self._schedule.sampling, self._schedule.batch_size
        while not self.failure and (ready := self._admission.ready()) is not None:
            step, indices = self._admission.composed + 1, [index for index, _ in ready]
            try:
                chosen = sampling.chosen(step, [meta for _, meta in ready])
            except DataError as error:
                self.failure = error
                return
            if chosen is None:
                self._admission.drop(indices)
                continue
            trained = {meta.group_id for meta in chosen}
            replaced = [meta for _, meta in ready if meta.group_id not in trained]
            dropped = {meta.group_id: sampling.worth(meta) for meta in [*self._admission.dropped, *replaced]}
            batch = Batch(step, chosen, self._admission.cursor, dropped)
            try:
                require_newest(self._run, self._attempt)
            except CommitError as error:  # these are the batches of another by now
                self.failure = error
                return
            write_json(self._run.batch(step), batch.to_json())
            self._admission.take(indices)
            self._batches[step] = batch
        kept, dropped = self._admission.finished, len(self._admission.dropped)
        if sampling.exhausted(size, kept, dropped):
            self.failure = RunError(sampling.explain(self._admission.composed + 1, kept, dropped))

    def _conclude_evaluation(self) -> None:
        if (groups := self._eval.conclude()) is None:
            return
        assert self._metrics is not None
        version = self._eval.version
        metrics = scores(groups)
        self._metrics.write(version, metrics)
        write_json(self._run.evals_of(version) / "summary.json", metrics)

    def _epoch(self, batch: Batch) -> int:
        """Return the epoch of the last prompt that a batch trains."""
        indices = [index for group in batch.groups if (index := group_index(group.group_id)) is not None]
        return self._stream.epoch(max(indices))

    def _finish_if_done(self) -> None:
        if self._version == self._schedule.total_steps and not self._eval.open and self.stop is None:
            self.stop = FINISHED
