"""The loop of a rollout worker: claim groups, keep the engine's weights at the newest version, generate, hand over.

    consumes   work from the controller, weights/v<k>
    waits for  the controller (a claim waits there for work or for a newer version)
    produces   samples/<replica>/g….safetensors, turns/<worker>/, evals/v<k>/<replica>.jsonl and .rows, metrics/rollout-<replica>.jsonl,
timeline/

Work of a claim begins before another version that the same answer names is loaded: it was assigned for the version that the engine holds.
Running training groups go on meanwhile, see `Engine.update_weights`. An update waits until evaluation is handed over, since a score
belongs to one version; the worker asks for more work of the old one meanwhile. An older version, whose evaluation a lost worker has left,
is loaded when nothing runs. An engine that serves several versions, each an adapter, waits for no evaluation: a row names its version. If
the engine does not hold it, it is loaded beside the newest.
Where the engine shares its GPUs (engine_lease.py), it sleeps when the controller recalls the lease. Groups in flight stay as they are, with
their environments, whose time limits stand still. They go on when the lease is granted again, with the version that is wanted then. Rows
of an evaluation are finished before, as they belong to one version. Finished groups are handed over meanwhile.
"""

from __future__ import annotations

import asyncio
import gc
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from secrets import token_hex
from typing import Any

from hpcrl.data.cache_files import EvalRow, append_rows
from hpcrl.data.group_file import group_bytes
from hpcrl.data.rollouts import Decode
from hpcrl.data.weight_files import PublishedWeights
from hpcrl.envs.rewards.remote import Endpoints
from hpcrl.envs.rewards.response import truth_text
from hpcrl.errors import CommitError, EngineError
from hpcrl.faults import fault
from hpcrl.observe.metrics import MetricsWriter
from hpcrl.observe.timeline import ASLEEP, ENVIRONMENT, IDLE, Timeline
from hpcrl.rollout.engine_lease import EngineLease
from hpcrl.rollout.engines.base import Drafts, Engine, Launched
from hpcrl.rollout.engines.watchdog import run_watched
from hpcrl.rollout.evaluate import evaluated_text
from hpcrl.rollout.generate import Generator, Maker
from hpcrl.rollout.generation_cache import GenerationCache
from hpcrl.rollout.group import Group
from hpcrl.rollout.limiter import ConcurrencyLimiter
from hpcrl.rollout.metrics import RolloutMetrics
from hpcrl.rollout.teacher_inputs import TeacherInputs
from hpcrl.rollout.weights.copies import NodeCopies
from hpcrl.rollout.weights.fetch import fetch
from hpcrl.rundir.commit import write_bytes
from hpcrl.rundir.layout import Run
from hpcrl.rundir.process_names import worker_name
from hpcrl.rundir.records import append_text
from hpcrl.runtime.controller_client import FINISHED, ControllerClient
from hpcrl.runtime.process_status import RENEW_S, StatusWriter
from hpcrl.runtime.threads import in_thread
from hpcrl.types import GroupMeta, Work

_LOAD_S = 1.0
_TAKES_IN = "update_weights"


@dataclass(frozen=True)
class WorkerOptions:
    """Options of a worker.

    Attributes:
        capacity: training groups of n_samples each that use the engine at most; fewer while its cache is full. Samples that
            wait for environments or rewards use none.
        stall_s, load_s: how long the engine may show no progress, and while it takes in weights.
        engine_dtype, probe_tolerance: the engine's number type, and generator.inference_engine.probe_tolerance.
        dump_evals: whether texts and scores of evaluation samples are written.
        baselines: whether training groups get the reward of a greedy response.
        copies: of new weights on this node; None: engines read them in the run directory.
        reads_ahead: whether new weights are read into the page cache while the engine still generates.
        from_model: whether version 0 is the model that the engine was started with.
        rewards: returns the reward service of the run that gets the next request; None: the run has none.
        teacher_inputs: of training groups; None: none.
        timeline: of this process; None: nobody looks at one.
        waves: groups begin together, when all that began together before have ended.
        shares_gpus: whether the engine holds a lease of its GPUs, which the controller may recall.
    """

    run: Run
    attempt: int
    replica: int
    capacity: int
    n_samples: int
    dump_evals: bool
    baselines: bool = False
    stall_s: float = 300.0
    load_s: float = 1800.0
    engine_dtype: str = "bfloat16"
    probe_tolerance: float | None = None
    copies: NodeCopies | None = None
    reads_ahead: bool = True
    from_model: bool = True
    rewards: Callable[[], Endpoints] | None = None
    teacher_inputs: TeacherInputs | None = None
    timeline: Timeline | None = None
    waves: bool = False
    shares_gpus: bool = False

    @property
    def name(self) -> str:
        return worker_name(self.replica)


async def run_worker(
    options: WorkerOptions, launched: Launched, maker: Maker, decode: Decode, process_status: StatusWriter
) -> None:
    """Run a worker with a ready engine until the controller stops it; as `Worker.run`.

    Args:
        decode: tokens of rows to text.
    """
    engine = launched.connect(replica=options.name)
    gc.freeze()  # what is loaded stays, and to look through it for garbage takes a quarter of a second each time
    try:
        async with maker(engine) as generator:
            await Worker(options, launched, engine, generator, process_status, decode).run()
    finally:
        await engine.close()


class Worker:
    """One replica: claims, generates, hands over, and follows the newest weights."""

    def __init__(
        self,
        options: WorkerOptions,
        launched: Launched,
        engine: Engine,
        generator: Generator,
        process_status: StatusWriter,
        decode: Decode,
    ) -> None:
        self._options, self._launched, self._engine, self._generator = options, launched, engine, generator
        self._decode = decode
        self._status, self._controller = process_status, ControllerClient(options.run, options.attempt)
        self._cache = GenerationCache(options.run, options.name, engine)
        self._flight: dict[asyncio.Task[Group], Work] = {}
        self._finished: list[Group] = []
        self._delivering: list[Group] = []
        self._metrics: MetricsWriter | None = None
        self._rollout_metrics = RolloutMetrics()
        self._limiter = ConcurrencyLimiter(options.capacity, waves=options.waves)
        self._wanted = 0  # the version that the engine should have
        self._unproven, self._lacks_first = False, not options.from_model
        self._updating: str | None = None
        # of the versions that it is proven to hold
        self._digests = {engine.version: ""} if options.from_model else {}
        self._adding = asyncio.Lock()
        self._stop: str | None = None
        self._lease = EngineLease(self._ask_for_lease, self._note_lease)
        self._drafts = Drafts()
        self._news = asyncio.Event()
        engine.changed, engine.evaluated = self._note_phase, self._evaluated

    async def run(self) -> None:
        """Run until the controller stops the worker.

        Raises:
            EngineError: the engine died or refused a request.
            HpcrlError: an environment, a weight directory or the controller failed.
        """
        options = self._options
        try:
            loops = [self._work(), self._report(), self._adapt_limit(), self._cache.write_periodically()]
            if options.shares_gpus:
                loops.append(self._lease.follow())
            await run_watched(self._launched, self._engine, loops, options.stall_s, options.load_s)
        finally:
            await asyncio.gather(*self._flight, return_exceptions=True)  # they are cancelled, or have failed as well
            if self._stop != FINISHED:
                self._cache.write()
            if self._metrics:
                self._write_metrics()
                self._metrics.close()
            self._controller.close()

    async def _work(self) -> None:
        claim: asyncio.Task[dict[str, Any]] | None = None
        update: asyncio.Task[None] | None = None
        delivery: asyncio.Task[None] | None = None
        rest: asyncio.Task[None] | None = None
        while self._stop is None:
            free, behind, recalled = self._free(), self._behind(), self._lease.recalled
            evaluating = not self._engine.serves_versions and any(item.kind == "eval" for item in self._flight.values())
            if recalled and rest is None and update is None and not self._evaluates():
                rest = asyncio.create_task(self._rest())
            # a claim under way may be answered with work for the version at hand; with news it is answered at once
            if behind and self._metrics and not recalled and not any((rest, update, claim)) and self._may_update():
                update = asyncio.create_task(self._update(self._next_version()))
            if (not behind or evaluating) and claim is None and free > 0 and not recalled:
                claim = asyncio.create_task(self._claim(free))
            news = asyncio.create_task(self._news.wait())
            waited = [task for task in (news, claim, update, rest, delivery, *self._flight) if task is not None]
            self._note_phase()
            await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
            news.cancel()
            self._news.clear()
            self._collect()
            if delivery is not None and delivery.done():
                delivery.result()
                delivery = None
            if delivery is None:
                delivery = self._deliver()
            if update is not None and update.done():
                update.result()
                update = None
            if rest is not None and rest.done():
                rest.result()
                rest = None
            if claim is not None and claim.done():
                answer, claim = claim.result(), None
                self._note_answer(answer)
                self._wanted = self._wanted if answer["version"] is None else answer["version"]  # perhaps an older one
                self._begin([Work.from_json(item) for item in answer["work"]])
        while delivery := delivery or self._deliver():
            await delivery
            delivery = None

    def _behind(self) -> bool:
        """Return whether the engine holds another version than it should, or is about to: it names the old one while it loads."""
        return self._updating is not None or self._lacks_first or self._wanted != self._engine.version

    def _may_update(self) -> bool:
        """Return whether the engine may load weights: evaluation is handed over, and no group gets older tokens."""
        older = self._next_version() < self._engine.version and self._flight
        return not older and (self._engine.serves_versions or not self._evaluates())

    def _evaluated(self) -> set[int]:
        """Return the versions of the rows in flight."""
        return {item.version for item in self._flight.values() if item.version is not None}

    def _next_version(self) -> int:
        """Return the version to load: the one that the engine should have, or its own where it wakes to finish groups before."""
        finishes = self._engine.asleep and bool(self._flight)
        return max(self._wanted, self._engine.version) if finishes else self._wanted

    def _evaluates(self) -> bool:
        return any(item.kind == "eval" for item in (*self._flight.values(), *self._undelivered()))

    async def _rest(self) -> None:
        """Put the engine to sleep, give the lease back, and return when it is granted again: `_update` then wakes the engine."""
        began, self._updating = time.monotonic(), ASLEEP
        self._note_phase()
        fault("lease.recalled")
        if not self._engine.asleep:  # recalled before it woke
            await self._engine.sleep()
        self._set_busy()
        asleep = time.monotonic()
        self._tell_state()
        await self._lease.give_back()
        seconds = {"weights/sleep_seconds": asleep - began, "generate/asleep_seconds": time.monotonic() - asleep}
        self._rollout_metrics.add(seconds)

    def _set_busy(self) -> None:
        """Note in metrics and time limits whether groups in flight make progress."""
        asleep = self._engine.asleep
        self._rollout_metrics.set_busy(bool(self._flight) and not asleep)
        if self._generator.threads:
            clock = self._generator.threads.clock
            clock.stop() if asleep else clock.go_on()

    def _note_phase(self) -> None:
        """Record the engine's phase in the timeline: asleep, loading weights, generating, or waiting for environments, weights or work."""
        if self._options.timeline:
            kinds = {item.kind for item in self._flight.values()}
            working = "evaluate" if "eval" in kinds else "generate" if kinds else self._updating or IDLE
            working = working if self._engine.waiting or not kinds else ENVIRONMENT
            alone = self._updating == _TAKES_IN or self._engine.asleep
            self._options.timeline.enter(self._updating or working if alone else working)

    def _free(self) -> int:
        return self._limiter.room(self._groups())

    def _groups(self) -> int:
        """Return the number of training groups that use the engine, in units of n_samples; in waves all that are in flight."""
        used = (max(0, item.n_samples - self._idle(item)) for item in self._flight.values())
        return -(-sum(used) // self._options.n_samples)

    def _idle(self, item: Work) -> int:
        return 0 if self._options.waves else self._cache.idle(item.group_id)

    async def _claim(self, capacity: int) -> dict[str, Any]:
        holding = self._holding()
        answer = await self._call("claim", capacity=capacity, **self._held())
        # taken from this worker while it was silent, and assigned to it again: a second result would replace the first one's file
        return answer | {"work": [item for item in answer["work"] if item["group_id"] not in holding]}

    def _held(self) -> dict[str, Any]:
        """Return the fields of a message that report what this worker and its engine hold."""
        engine = self._engine
        return {"version": engine.version, "any_version": engine.serves_versions, "holding": self._holding()}

    def _holding(self) -> list[str]:
        """Return the ids of the groups in flight and of the finished ones that the controller has yet to hear of."""
        return [item.group_id for item in (*self._flight.values(), *self._undelivered())]

    def _undelivered(self) -> list[Work]:
        return [group.work for group in (*self._finished, *self._delivering)]

    def _ask_for_lease(self, awake: bool) -> Awaitable[dict[str, Any]]:
        return self._call("lease", awake=awake)

    def _note_lease(self, answer: dict[str, Any]) -> None:
        self._stop, self._wanted = answer["stop"] or self._stop, max(self._wanted, answer["version"] or 0)
        self._news.set()

    def _call(self, route: str, **payload: Any) -> Awaitable[dict[str, Any]]:
        return in_thread(self._controller.call, route, worker=self._options.name, **payload)

    def _note_answer(self, answer: dict[str, Any]) -> None:
        """Take in what an answer reports: whether the run ends, the version to load (none before the trainer starts), unwanted groups."""
        version, newest = answer["version"], answer["newest"]
        if (
            self._metrics is None and newest is not None
        ):  # training continues there, though an older version may come first
            self._metrics = MetricsWriter(self._options.run, self._options.name, self._options.attempt, newest)
            self._news.set()
        for task, item in self._flight.items():
            if item.group_id in answer["unwanted"]:
                task.cancel()
        # one of two answers that come together may be old; only a claim's is about the version that the engine holds
        if answer["stop"] or (version or 0) > self._wanted:
            self._stop, self._wanted = answer["stop"] or self._stop, max(self._wanted, version or 0)
            self._news.set()

    def _begin(self, work: list[Work]) -> None:
        for item in work:
            self._flight[asyncio.create_task(self._generate(item))] = item
        self._set_busy()

    async def _generate(self, item: Work) -> Group:
        if item.version is not None:
            await self._add_version(item.version)
        return await self._generator.generate(item, await self._cache.begin(item))

    async def _add_version(self, version: int) -> None:
        """Load a version beside the newest for its rows, unless the engine holds it."""
        options, engine = self._options, self._engine
        async with self._adding:
            if version == engine.version or (version in self._digests and engine.holds(version)):
                return
            try:
                weights = await in_thread(fetch, options.run.weights_of(version))
            except CommitError:
                # perhaps another worker has finished the evaluation, and these rows are to be cancelled
                self._note_answer(await self._call("report", state="fetching weights", **self._held()))
                await asyncio.sleep(0)
                raise
            await engine.add_version(weights)
            await engine.probe(weights, options.engine_dtype, options.probe_tolerance)
            self._note_proven(weights)

    def _note_proven(self, weights: PublishedWeights) -> None:
        held = {version: digest for version, digest in self._digests.items() if self._engine.holds(version)}
        self._digests = {**held, weights.version: weights.digest}

    def _collect(self) -> None:
        for task in [task for task in self._flight if task.done()]:
            item = self._flight.pop(task)
            if task.cancelled():  # nobody wants it
                self._cache.remove([item.group_id])
                continue
            group = task.result()
            self._rollout_metrics.kept += group.cached_tokens
            self._rollout_metrics.tokens += sum(group.response_lengths) - group.cached_tokens
            self._finished.append(group)
        self._set_busy()

    def _deliver(self) -> asyncio.Task[None] | None:
        """Begin to hand over all finished groups together; None where none may leave."""
        # nothing leaves that weights may have chosen which are not the version's
        if self._unproven or not self._finished:
            return None
        self._delivering, self._finished = self._finished, []
        return asyncio.create_task(self._hand_over())

    async def _hand_over(self) -> None:
        run, replica = self._options.run, self._options.replica
        metas, contents, size = list[GroupMeta](), list[bytes](), 0
        evaluated = defaultdict[int, list[tuple[Group, GroupMeta]]](list)
        trained = [group for group in self._delivering if group.work.kind == "train"]
        # another attempt may hand over a group once more, and what else is in this file may still be needed then
        path = run.samples_of(replica) / f"{trained[0].work.group_id}-{token_hex(4)}.safetensors" if trained else None
        for group in self._delivering:
            if path is None or group.work.kind == "eval":
                dump = run.eval_dump(group.oldest_version, replica)
                meta = group.meta(replica, str(dump.relative_to(run.path)))
                evaluated[group.oldest_version].append((group, meta))
            else:
                meta = replace(group.meta(replica, str(path.relative_to(run.path))), offset=size)
                truth = truth_text(group.work.prompt.extras)
                content, meta = group_bytes(group.samples, meta, group.judged, truth)
                contents.append(content)
                size += len(content)
            metas.append(meta)
        for version, members in evaluated.items():
            await self._write_evaluated(version, members)
        if path is not None:
            await in_thread(write_bytes, path, b"".join(contents))
            self._rollout_metrics.written += size
            if self._options.timeline:
                self._options.timeline.finish_group()
        await self._call("complete", groups=[meta.to_json() for meta in metas])
        self._cache.remove(group.work.group_id for group in self._delivering)
        self._delivering = []

    async def _write_evaluated(self, version: int, groups: list[tuple[Group, GroupMeta]]) -> None:
        """Write the rows of evaluated groups, and then that they are finished, for the next attempt.

        It evaluates failed ones again: their failure may be why it was started.
        """
        run, replica = self._options.run, self._options.replica
        if self._options.dump_evals:
            # here, as a tokenizer is not for several threads
            text = evaluated_text([group for group, _ in groups], self._decode)
            await in_thread(append_text, run.eval_dump(version, replica), text)
        whole = [(group, meta) for group, meta in groups if group.work.asked and not group.failures]
        if whole and (weights := self._digests.get(version)) is not None:
            rows = [EvalRow(meta, group.work.asked, weights) for group, meta in whole]
            await in_thread(append_rows, run.eval_rows(version, replica), rows)

    async def _update(self, version: int) -> None:
        started, options = time.monotonic(), self._options
        if version == 0 and options.from_model and self._engine.version:
            raise EngineError(
                "the engine starts again: rows of version 0 are left, which has no weights but the model that an engine starts with"
            )
        self._updating = "fetch_weights"
        self._note_phase()
        try:
            source, ahead = options.run.weights_of(version), options.reads_ahead
            weights = await in_thread(fetch, source, options.copies, ahead=ahead)
        except CommitError:
            self._updating = None
            self._note_answer(await self._call("report", version=self._engine.version, state="fetching weights"))
            if self._wanted == version:
                raise
            return  # so slow that the version was retired meanwhile: on to the newest
        size = weights.size / 2**30
        known = {
            "weights/fetch_seconds": time.monotonic() - started,
            "weights/load_gib": size,
            "weights/fetch_gib": size,
        }
        if options.copies and not weights.adapter:
            known |= {"weights/fetch_gib": 0.0, **options.copies.fetched}
        self._write_metrics()
        self._unproven, self._lacks_first = True, False
        self._updating = _TAKES_IN
        self._note_phase()
        known |= await self._engine.update_weights(weights)
        self._updating = None
        self._set_busy()
        self._news.set()  # groups may begin while the version is proven
        if options.copies:
            options.copies.release()
        self._rollout_metrics.start(known)
        differs = await self._engine.probe(weights, options.engine_dtype, options.probe_tolerance)
        self._unproven, self._cache.proven = False, version
        self._note_proven(weights)
        if differs is not None:
            self._rollout_metrics.add({"weights/probe_difference": differs})

    def _write_metrics(self) -> None:
        if self._metrics and self._rollout_metrics.tokens:  # a version that generated nothing has no metrics
            found = {"generate/groups_at_once": self._limiter.limit, **self._rollout_metrics.values()}
            if (drafts := self._engine.drafts) is not None:
                found |= drafts.metrics(self._drafts)
                self._drafts = drafts
            calls = self._generator.threads.take_metrics() if self._generator.threads else {}
            self._metrics.write(self._engine.version, found | calls)

    async def _report(self) -> None:
        while True:
            self._note_answer(await self._call("report", state=self._tell_state(), **self._held()))
            await asyncio.sleep(RENEW_S)

    def _tell_state(self) -> str:
        running, version = len(self._flight), self._engine.version
        awake = f"generating {running} groups" if running else f"ready v{version}"
        state = ASLEEP if self._engine.asleep else awake
        self._status.write(state, version=version, groups=running, **self._rollout_metrics.values())
        return state

    async def _adapt_limit(self) -> None:
        while True:
            await asyncio.sleep(_LOAD_S)
            if self._engine.asleep:
                continue
            load = None
            with suppress(EngineError):  # whether it hangs is seen by the watchdog
                load = await self._engine.load()
            if load:
                self._limiter.update(load, self._groups())
            if self._free() > 0:  # also since samples wait for their environments
                self._news.set()
