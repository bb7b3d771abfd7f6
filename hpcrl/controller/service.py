"""State of the controller, and its change by each request. It handles metadata only, never tokens.

    workers   claim groups, complete them           trainer   asks for the next batch, reports what it published
    batches   written here, one file per step       evaluation   queued here when a version that is due appears

Methods are quick and not thread-safe; api.py calls them one at a time.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

from hpcrl.controller.admission import Admission, staleness
from hpcrl.controller.batches import BatchComposer
from hpcrl.controller.curriculum import curriculum_of
from hpcrl.controller.dataset_rows import DatasetRows, Mixture
from hpcrl.controller.dispatch import Assignment, Dispatcher
from hpcrl.controller.evaluation import (
    EvalQueue,
    begin_evaluation,
    can_evaluate,
    discard_after,
    eval_is_due,
    finished_rows,
    is_evaluated,
)
from hpcrl.controller.lending import Lending
from hpcrl.controller.metrics import batch_histograms, controller_metrics, replica_metrics, scorer_metrics, step_metrics
from hpcrl.controller.prompt_stream import PromptStream, group_index
from hpcrl.controller.prompts_ahead import PromptsAhead
from hpcrl.controller.recovery import BegunGroups, History, SampleFiles, read_history, remove_samples
from hpcrl.controller.replicas import FailureWindow, MinReplicas, RegisteredWorker, WorkerRegistry
from hpcrl.controller.schedule import Schedule
from hpcrl.controller.schema import Schemas
from hpcrl.controller.score_queue import Rewards, ScoreQueue
from hpcrl.controller.work import WorkMaker
from hpcrl.data.batch_file import FIRST, write_batch
from hpcrl.data.endless import EndlessPrompts
from hpcrl.errors import CommitError, DataError, HpcrlError, RunError
from hpcrl.observe.conclude import write_summary
from hpcrl.observe.metrics import MetricsWriter
from hpcrl.observe.scores import scores
from hpcrl.observe.timeline import IDLE, LOAD
from hpcrl.rundir.checkpoints import samples_removed
from hpcrl.rundir.evaluations import begun_evaluations, give_up_evaluation
from hpcrl.rundir.layout import Run
from hpcrl.rundir.ledger import require_newest
from hpcrl.runtime.controller_client import FINISHED
from hpcrl.types import Batch, GroupMeta, Prompt, Work

WAITS = "wait_for_groups"
"""Phase in which the trainer waits, or will wait, for groups of its batch."""


class Service:
    """One attempt's controller.

    Args:
        train, validation: prompts; none where `rows` are trained.
        mixture: of the datasets of `train`, in their order; None: an epoch has each prompt once.

    Attributes:
        scores: of finished groups.
        work: makes what workers are given.
        ahead: makes prompts; None: all are there.
        lending: of the trainer's GPUs while it waits; of none where the schedule names no workers for it.
        stop: why the run ends; None while it goes on.
        failure: why it cannot go on.
    """

    def __init__(
        self,
        run: Run,
        attempt: int,
        schedule: Schedule,
        train: Sequence[Prompt],
        validation: list[Prompt],
        rows: DatasetRows | None = None,
        scores: ScoreQueue | None = None,
        mixture: Mixture | None = None,
    ) -> None:
        self._run, self._attempt, self._schedule = run, attempt, schedule
        self._n_train, self._validation, self._rows = len(train), validation, rows
        order = schedule.seed, schedule.order_seed, schedule.drop_last
        self._stream = PromptStream(len(rows or mixture or train), schedule.batch_size, *order)
        self._admission = Admission(
            schedule.batch_size, schedule.staleness, schedule.total_steps, schedule.groups_at_once, schedule.surplus
        )
        ready = rows.in_order(self._stream) if rows else None
        self._begun, self._files, self.scores = BegunGroups(run), SampleFiles(), scores or ScoreQueue()
        sampling, judged = schedule.sampling, self.scores.reward
        self._composer = BatchComposer(self._admission, sampling, schedule.batch_size, ready, judged=judged)
        made = isinstance(train, EndlessPrompts)
        self.ahead = PromptsAhead(train, self._admission, schedule.batch_size) if made else None
        self._metrics: MetricsWriter | None = None
        self.work = WorkMaker(schedule, train, validation, mixture, self._stream, self._admission, self._begun)
        self._batches: dict[int, Batch] = {}
        self._checksum = FIRST  # of the newest batch's file
        self._version: int | None = None
        self._loadable: int | None = None
        self._eval = EvalQueue(schedule.eval_prompts_at_once)
        per_group = schedule.n_samples, schedule.eval_n_samples
        workers = {"evaluators": schedule.evaluators, "lent": schedule.lent}
        self._dispatcher = Dispatcher(self._admission, self._eval, *per_group, together=schedule.colocated, **workers)
        self.lending = Lending(schedule.lent, self._admission, self._dispatcher, self._eval, schedule.batch_size)
        self._described = self._pruned = self._started = self._taken_back = 0
        self._registry = WorkerRegistry()
        self._restarting: tuple[str | None, float] = None, 0.0
        self._failure_window = FailureWindow(schedule.max_failed_ratio, schedule.batch_size)
        self.stop: str | None = None
        self.failure: HpcrlError | None = None

    @property
    def version(self) -> int | None:
        """The newest version whose weights are there, or None before the trainer has started."""
        return self._loadable

    @property
    def phase(self) -> str:
        """Current phase of the run, for the timeline."""
        waits = IDLE if self.stop or (self._version or 0) + 1 in self._batches else WAITS
        return LOAD if self._version is None else "evaluate" if self._waits_for_evaluation else waits

    @property
    def colocated(self) -> bool:
        """Whether trainer and engines take turns."""
        return self._schedule.colocated

    @property
    def _waits_for_evaluation(self) -> bool:
        """Whether nothing is trained until an evaluation is over: engines have the devices, too many are open, or it is the last."""
        if not self._eval.open:
            return False
        return self._schedule.colocated or self._eval.full or self._version == self._schedule.total_steps

    def schemas(self) -> Schemas:
        """Return the schemas of messages to this run's controller."""
        s = self._schedule
        return Schemas(s.replicas + len(s.lent), s.total_steps, s.n_samples, s.eval_n_samples, self.scores.scorers)

    @property
    def min_replicas(self) -> MinReplicas:
        return self._schedule.min_replicas

    @property
    def workers(self) -> dict[str, RegisteredWorker]:
        return self._registry.workers

    @property
    def _own(self) -> list[str]:
        """Workers that call and do not wait for a lease of the trainer's GPUs."""
        return [name for name in self.workers if name not in self.lending.lent]

    @property
    def total_steps(self) -> int:
        return self._schedule.total_steps

    @property
    def steps_per_epoch(self) -> int:
        return self._stream.steps_per_epoch

    def history(self, step: int) -> History:
        """Return the state on disk for a training that continues after `step`; another thread may call it before `start`.

        Raises:
            RunError: the run ends before.
            DataError: as `read_history`.
        """
        if step > self.total_steps:
            raise RunError(
                f"training would continue after step {step}, but this run ends at step {self.total_steps}; raise trainer.max_steps "
                "or trainer.epochs, or start from an earlier checkpoint"
            )
        s, bound, pruned = self._schedule, self._schedule.staleness, min(step, samples_removed(self._run))

        def keep(following: int, meta: GroupMeta) -> bool:
            return 0 <= staleness(following, meta) <= bound and self._usable(meta)

        models = self.scores.models
        curriculum = curriculum_of(s, self._stream, self.work.row, self._n_train)
        history = read_history(self._run, step, s.batch_size, self._trainable, keep, pruned, models, curriculum)
        history.finished = {at: self.scores.rewarded(meta, history.rewards) for at, meta in history.finished.items()}
        from_model = self._schedule.engines_begin_with_model
        for version in sorted({*begun_evaluations(self._run), step}):
            possible = version == step or (version < step and can_evaluate(self._run, version, from_model=from_model))
            if possible and self._evaluates(version) and not self._schedule.eval_by_job:
                history.evaluated[version] = finished_rows(self._run, version, self.work.eval_work(version))
        return history

    def start(self, step: int, history: History | None = None) -> int:
        """Start training after `step`, when the trainer is ready; return the number of steps of the run.

        Args:
            history: what `history` returned; None: it is read here.
        """
        if self._metrics is not None:
            if step != self._started:
                raise RunError(
                    f"training has started after step {self._started} already: it cannot start after step {step}"
                )
            return self._schedule.total_steps  # the answer to the first request got lost
        history = history or self.history(step)
        discard_after(self._run, step)
        from_model = self._schedule.engines_begin_with_model
        for version in begun_evaluations(self._run):
            possible = version == step or can_evaluate(self._run, version, from_model=from_model)
            if self._schedule.eval_by_job and possible and self._evaluates(version):
                self._begin_evaluation(version)
            elif version not in history.evaluated:
                print(f"version {version} is not evaluated any more: its weights or its prompts are gone", flush=True)
                give_up_evaluation(self._run, version)
        self._metrics = MetricsWriter(self._run, "controller", self._attempt, step)
        self._admission.restore(history.composed, history.used, history.finished, history.below)
        self._batches, self._checksum, self._files = history.batches, history.checksum, history.files
        self.work.curriculum = history.curriculum
        self._pruned, self._started = min(step, samples_removed(self._run)), step
        try:
            self._composer.drop_unwanted(history.finished.items())
        except DataError as error:
            self.failure = error
        finished = [meta for index, meta in history.finished.items() if self._admission.is_finished(index)]
        self.scores.add(finished, history.scores)
        self._admission.note_left(self._begun.restore(step, self._admission.may_begin, history.evaluated))
        for version, evaluated in history.evaluated.items():
            self._begin_evaluation(version, evaluated)
        self._publish(step)
        return self._schedule.total_steps

    def published(self, version: int, weights: bool = True) -> None:
        """Record that step `version` is trained and, with `weights`, that weights/v<version> can be loaded by engines.

        Raises:
            RunError: it cannot be: the trainer has not started, has no batch of that step, or has published a newer one.
        """
        if self._version is None:
            raise RunError(f"version {version} cannot be published: the trainer has not started")
        if version == self._version:  # the answer to the first request got lost
            return
        newest = self._admission.composed
        if not self._version < version <= newest:
            raise RunError(
                f"version {version} cannot be published: version {self._version} is, and step {newest} is the newest that has a batch"
            )
        self._publish(version, weights=weights)

    def _evaluates(self, version: int) -> bool:
        s = self._schedule
        due = eval_is_due(version, s.total_steps, s.eval_interval, s.eval_before_train)
        return due and bool(self._validation) and not is_evaluated(self._run, version)

    def _begin_evaluation(self, version: int, evaluated: Mapping[str, GroupMeta] | None = None) -> None:
        if not self._schedule.eval_by_job:
            self._eval.begin(version, len(self._validation), evaluated)
        begin_evaluation(self._run, version, self._attempt)

    def _publish(self, version: int, *, weights: bool = True) -> None:
        self._version, self._loadable = version, version if weights else self._loadable
        self._batches = {step: batch for step, batch in self._batches.items() if step > version}
        if version not in self._eval.versions and self._evaluates(version):
            self._begin_evaluation(version)
        self._conclude_evaluations()
        self._compose()
        self._finish_if_done()

    def claim(self, name: str, version: int, capacity: int) -> list[Work]:
        """Return the groups that worker `name` may begin with its engine at `version`.

        Only an engine that is to keep its version begins groups, see `keeps`.

        Args:
            capacity: training groups that the worker has room for; as many samples fit if they are for evaluation.
        """
        if not self._may_begin(name, version):
            return []
        behind, serves = version != self._loadable, self._any_version(name)
        return self._work(self._dispatcher.claim(name, version, capacity, behind=behind, any_version=serves))

    def wanted(self, name: str, held: int) -> int | None:
        """Return the version that the engine of worker `name`, which holds `held`, should have; None before the trainer has started.

        It is the newest one, as long as no evaluation needs another. Of those who hold newer ones, only one worker goes back to rows that a
        lost worker left, and only where nothing can be trained without them. An engine that serves several versions always has the newest.
        """
        if self._loadable is None or self._any_version(name) or not self._dispatcher.evaluates(name):
            return self._loadable
        stays = held == 0 and self._schedule.engines_begin_with_model
        return self._eval.wanted(held, self._loadable, goes_back=self._goes_back(name), stays=stays)

    def _goes_back(self, name: str) -> bool:
        if self._eval.room() <= 0:
            return False
        names = [other for other in self.workers if self._dispatcher.evaluates(other)]
        if self._schedule.engines_begin_with_model and self._eval.room(0) > 0:
            return self._waits_for_evaluation and name == self._starts_again(names)
        waits = self._waits_for_evaluation or name in self._schedule.evaluators
        return waits and name == min(names, default=name)

    def _starts_again(self, names: Collection[str]) -> str | None:
        """Return the worker that starts its engine again for version 0, which has no weights but the model's; None: another one holds it.

        It remains the same one until it is back, or has been away for too long.
        """
        if any(self.workers[name].version == 0 for name in names):
            return None
        chosen, since = self._restarting
        now = self._registry.clock.now()
        away = now - since > self.min_replicas.patience_s
        if chosen is None or (chosen not in self.workers and away):
            chosen = min(names, default=None)
            self._restarting = chosen, now
        return chosen

    def keeps(self, name: str, held: int) -> bool:
        """Return whether the engine of a worker keeps its version: it is the one that it should have, or has rows of its evaluation."""
        evaluates = self._eval.running_at(name) > 0 and not self._any_version(name)
        return evaluates or self.wanted(name, held) in (held, None)

    def _any_version(self, name: str) -> bool:
        return name in self.workers and self.workers[name].any_version

    def wait(self, name: str, version: int, capacity: int) -> None:
        """Queue a worker without work for `assignments`, until it is served, withdraws or leaves."""
        if self._may_begin(name, version):
            self._dispatcher.wait(name, version, capacity)

    def withdraw(self, name: str) -> None:
        """Remove a worker from the queue."""
        self._dispatcher.withdraw(name)

    def outdated(self) -> list[str]:
        """Return the workers in the queue whose engines are to load another version first."""
        waiting = self._dispatcher.waiting()
        return [name for name, held in waiting if held != self._loadable and not self.keeps(name, held)]

    def assignments(self) -> Iterator[tuple[str, list[Work]]]:
        """Yield the assignments of waiting workers; each is served once, and the least loaded first."""
        if self._loadable is not None and not self.stop and not self.failure:
            for name, assignment in self._dispatcher.assignments(self._loadable):
                yield name, self._work(assignment)

    def _may_begin(self, name: str, version: int) -> bool:
        started = self._version is not None and not self.stop and not self.failure
        return started and self.keeps(name, version) and self.lending.begins(name)

    def _work(self, assignment: Assignment) -> list[Work]:
        evaluation = self.work.eval_rows(assignment.version, assignment.rows)
        try:
            return evaluation + [self.work.train_work(index) for index in assignment.indices]
        except DataError as error:  # a function of the user's makes the prompts
            self.failure = self.failure or error
            return evaluation

    def complete(self, groups: list[GroupMeta]) -> dict[str, str]:
        """Add finished groups; return those that are not wanted, with the reason.

        Raises:
            RunError: one of them cannot be; none is taken.
        """
        for meta in groups:
            self._check(meta)
        rejected = {}
        for meta in groups:
            self._files.add(meta)  # also one that is not wanted: its file goes with the group that was
            if reason := self._complete(meta):
                rejected[meta.group_id] = reason
            else:
                self.failure = self.failure or self._failure_window.add(meta)
        self._compose()
        self._conclude_evaluations()
        self._finish_if_done()
        return rejected

    def check_version(self, version: int) -> None:
        """Refuse what was never published. Raises RunError where `version` is newer than the newest."""
        if version > (self._version or 0):
            newest = (
                "the trainer has not started" if self._version is None else f"the newest is version {self._version}"
            )
            raise RunError(f"no engine can hold version {version}: {newest}")

    def _check(self, meta: GroupMeta) -> None:
        """Reject a group that does not match this run, also where it is not waited for."""
        self.check_version(meta.newest_version)
        if self._schedule.baselines and meta.kind == "train" and meta.baseline is None:
            raise RunError(
                f"group {meta.group_id} lacks the reward of a greedy response (baseline), which this run compares with"
            )
        index, evaluates = group_index(meta.group_id), self._eval.running(meta.group_id)
        if evaluates is not None:
            version, row = evaluates
            expected = self._validation[row].data_source
            if (meta.oldest_version, meta.newest_version) != (version, version):
                raise RunError(
                    f"group {meta.group_id} evaluates version {version}, and has tokens of the versions {meta.oldest_version} to "
                    f"{meta.newest_version}"
                )
        elif index is not None and self._admission.wants(index):
            expected = self.work.prompt(index).data_source
        else:
            return
        if meta.data_source != expected:
            raise RunError(f"group {meta.group_id} is of the data source {expected!r}, not {meta.data_source!r}")

    def _complete(self, meta: GroupMeta) -> str | None:
        index = group_index(meta.group_id)
        worker = self._eval.worker_of(meta.group_id) if index is None else self._admission.worker_of(index)
        try:
            reason = self._eval.complete(meta) if index is None else self._composer.complete(index, meta)
        except DataError as error:
            self.failure, reason = error, None
        if index is not None and reason is None and self._admission.is_finished(index):
            self.scores.add([meta])
            self.lending.times.finished(worker)
        if worker is not None:
            self._dispatcher.load_changed(worker)
        self._begun.forget(meta.group_id)
        return reason

    def check_trained(self) -> None:
        """Refuse that training is over where it is not.

        Raises:
            RunError: the last version is not published, and the run does not stop early.
        """
        if self._version != self.total_steps and not self.stop:
            raise RunError(f"training ends after step {self.total_steps}, and the newest version is {self._version}")

    def batch(self, step: int) -> str | None:
        """Return the path of the batch of `step`, relative to the run directory, or None while it may not be trained, or is not complete."""
        batch = self._batches.get(step)
        if batch is None or self._waits_for_evaluation:
            return None
        if step > self._described:
            assert self._metrics is not None
            epoch = self._stream.last_epoch(group.group_id for group in batch.groups)
            position = controller_metrics(step, epoch, self.total_steps, self.steps_per_epoch)
            counts = len(self._own), self._schedule.replicas, self._registry.restarts, self._taken_back
            replicas = replica_metrics(*counts, self.lending)
            found = step_metrics(batch, self._schedule, None if self._rows else replicas | scorer_metrics(self.scores))
            self._metrics.write(step, found | position, None if self._rows else batch_histograms(batch))
            self._described = step
        return str(self._run.batch(step).relative_to(self._run.path))

    def committed(self) -> None:
        """Record a committed checkpoint, and remove samples that only checkpoints older than the newest two could train again."""
        due = range(self._pruned + 1, samples_removed(self._run) + 1)
        remove_samples(self._run, self._files, due)
        self._pruned += len(due)

    def measured(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write further metrics of a step."""
        if self._metrics is not None and metrics:
            self._metrics.write(step, metrics)

    def seen(self, name: str, version: int, state: str, any_version: bool | None = None) -> RegisteredWorker:
        """Record a call of a worker; return it.

        Args:
            any_version: whether its engine evaluates any version beside the newest; None: as before.
        """
        if name not in self.lending.lent:
            self.lending.times.replica_started(self._registry.clock.now())
        if not self.lending.rests(name):
            self._dispatcher.join(name)
        worker = self._registry.seen(name, version, state)
        worker.any_version = worker.any_version if any_version is None else any_version
        return worker

    def wants_lease(self, name: str) -> bool:
        """Return whether a sleeping engine is to have the trainer's GPUs now, see `Lending`."""
        newest, waits = self._loadable, self.phase == WAITS and not self.stop and not self.failure
        # version 0 may have no weights but the model's, with which an engine starts and cannot wake
        if not newest or not waits or name not in self.lending.lent:
            return False
        others = self.lending.lent | self._schedule.evaluators
        own = {each: worker.version for each, worker in self.workers.items() if each not in others}
        return self.lending.wants(name, newest, own, self.total_steps - self._admission.composed)

    def reconcile(self, name: str, version: int, holding: list[str]) -> None:
        """Reconcile a worker's groups with the controller's: lost assignments are taken back, and groups taken while it was silent are
        returned to it."""
        indices = [index for group in holding if (index := group_index(group)) is not None]
        if self._admission.release(name, indices) + self._eval.release(name, holding):
            self._begun.find(name)
        self._admission.reclaim(name, version, indices)
        self._eval.reclaim(name, None if self._any_version(name) else version, holding)

    def unwanted(self, name: str, holding: list[str]) -> list[str]:
        """Return the groups among these that are no longer wanted of a worker: finished by another one, given up, or rows that another
        one evaluates."""

        def wanted(group: str) -> bool:
            index = group_index(group)
            return self._eval.wants(name, group) if index is None else self._admission.wants(index)

        return [group for group in holding if not wanted(group)]

    def expire(self) -> list[str]:
        """Take back the groups of silent workers; return the names of those workers."""
        silent = self._registry.silent()
        for name in silent:
            self.leave(name)
        return silent

    def leave(self, name: str) -> int:
        """Remove a worker or a scorer that ends: others get its groups. Returns how many."""
        if name in self.scores.scorers:
            return self.scores.leave(name)
        self._dispatcher.leave(name)
        if name in self.lending.lent:
            self.lending.leave(name)
        if not self._registry.remove(name):
            return 0
        lost = len(self._admission.release(name)) + len(self._eval.release(name))
        self._taken_back += lost
        self._begun.find(name)
        return lost

    def scored(self, scorer: str, digests: Mapping[str, str], rewards: Rewards | None = None) -> list[str]:
        """Add scores of groups; return those that no longer wait for them; args and errors as of `ScoreQueue.complete`."""
        unwanted = self.scores.complete(scorer, digests, rewards)
        try:
            rewarded = self.scores.groups(set(rewards or ()).difference(unwanted))
            self.scores.forget(self._composer.judge(rewarded))
        except DataError as error:
            self.failure = error
        self._compose()
        return unwanted

    def status(self) -> dict[str, object]:
        return {
            "version": self._version,
            "composed": self._admission.composed,
            "total_steps": self._schedule.total_steps,
            "running": self._admission.running,
            "finished": self._admission.finished,
            "batch_size": self._schedule.batch_size,
            "dropped": self._admission.dropped_count,
            "unscored": self.scores.waiting,
            "eval_open": self._eval.open,
            "waits_for_evaluation": self._waits_for_evaluation,
            "replicas": self._schedule.replicas,
            "stop": self.stop,
            "scorers": self.scores.status(),
            "workers": {name: {"version": w.version, "state": w.state} for name, w in self.workers.items()},
        }

    def _usable(self, group: GroupMeta) -> bool:
        """Return whether a group of an earlier attempt, perhaps with other settings, has all columns and rewards needed now."""
        complete = not self._schedule.baselines or group.baseline is not None
        return self._schedule.sampling.can_judge(group) and complete

    def _trainable(self, group: GroupMeta) -> bool:
        """Return whether a group of a batch of an earlier attempt has all columns and rewards needed now."""
        return self._usable(group) and self.scores.has_all(group, group.scores)

    def _compose(self) -> None:
        while not self.failure:
            try:
                self._composer.complete_ready(self._version)
                composed = self._composer.batch()
                if composed is None or (batch := self.scores.scored(composed)) is None:
                    return
                require_newest(self._run, self._attempt)
            except (CommitError, DataError, RunError) as error:  # CommitError: these are the batches of another by now
                self.failure = error
                return
            if (curriculum := self.work.curriculum) is not None:
                batch = curriculum.compose(batch, self._composer.finished, self._admission.cursor)
            self._checksum = write_batch(self._run, batch, self._checksum)
            if curriculum is not None:
                curriculum.fold(batch)
            self._composer.take()
            self.scores.forget(batch.generated)
            self._batches[batch.step] = batch

    def _conclude_evaluations(self) -> None:
        for version, groups in self._eval.conclude():
            assert self._metrics is not None
            metrics = scores(groups, self._schedule.success_reward)
            self._metrics.write(version, metrics)  # first: where there is a summary, nobody waits for the scores
            write_summary(self._run, version, metrics)

    def _finish_if_done(self) -> None:
        if self._version == self._schedule.total_steps and not self._eval.open and self.stop is None:
            self.stop = FINISHED
