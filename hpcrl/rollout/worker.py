"""The loop of a rollout worker: claim groups, keep the engine's weights at the newest version, generate, hand over.

    consumes   work from the controller, weights/v<k>
    waits for  the controller (a claim waits there for work or for a newer version)
    produces   samples/<replica>/<group>.safetensors, evals/v<k>/<replica>.jsonl, metrics/rollout-<replica>.jsonl

A claim's work is begun before a newer version that the same answer names is loaded: it was granted to the version at hand.
Running training groups go on under the new weights; running evaluation is waited for, since a score belongs to one version.
"""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpcrl.config import EnvironmentConfig, GeneratorConfig
from hpcrl.data.chat import decoder, load_tokenizer
from hpcrl.data.rollouts import Decode
from hpcrl.data.samples import write_group
from hpcrl.errors import CommitError, EngineError
from hpcrl.observe.metrics import MetricsWriter
from hpcrl.rollout.client import EngineClient
from hpcrl.rollout.dump import append_evaluated
from hpcrl.rollout.generate import GroupGenerator
from hpcrl.rollout.meter import Meter
from hpcrl.rollout.pressure import Pressure
from hpcrl.rollout.progress import watch_progress
from hpcrl.rollout.server import Server
from hpcrl.rollout.threads import in_thread
from hpcrl.rollout.weights import fetch
from hpcrl.run.call import Controller, headers, read_token
from hpcrl.run.layout import Run
from hpcrl.run.lease import RENEW_S, LeaseWriter
from hpcrl.types import GroupMeta, Work

_WATCH_S = 0.5
_LOAD_S = 1.0


@dataclass(frozen=True)
class Post:
    """Where a worker stands.

    Attributes:
        scratch: node-local directory for weights on their way in.
        capacity: training groups of n_samples each that are in flight at most; fewer while the engine's cache is full.
        stall_s, load_s: how long the engine may show no progress, and while it takes in weights.
        dump_evals: whether texts and scores of evaluation samples are written.
        baselines: whether training groups get the reward of a greedy response.
    """

    run: Run
    attempt: int
    replica: int
    scratch: Path
    capacity: int
    n_samples: int
    dump_evals: bool
    baselines: bool = False
    stall_s: float = 300.0
    load_s: float = 1800.0

    @property
    def name(self) -> str:
        return f"rollout-{self.replica}"


async def work(
    post: Post,
    server: Server,
    model: str,
    config: GeneratorConfig,
    environment: EnvironmentConfig,
    lease: LeaseWriter,
) -> None:
    """Work with a server that is ready until the controller says stop; as `Worker.run`.

    Args:
        model: HF directory or hub id of the tokenizer.
    """
    engine = EngineClient(server.socket, headers(read_token(post.run), post.run.name, post.attempt))
    tokenizer = load_tokenizer(model, config.chat_template)
    generator = GroupGenerator(engine, tokenizer, config, environment, post.baselines)
    try:
        await Worker(post, server, engine, generator, lease, decoder(tokenizer)).run()
    finally:
        await engine.close()


class Worker:
    """One replica at work."""

    def __init__(
        self,
        post: Post,
        server: Server,
        engine: EngineClient,
        generator: GroupGenerator,
        lease: LeaseWriter,
        decode: Decode,
    ) -> None:
        self._post, self._server, self._engine, self._generator = post, server, engine, generator
        self._decode = decode
        self._lease, self._controller = lease, Controller(post.run, post.attempt)
        self._flight: dict[asyncio.Task[GroupMeta], Work] = {}
        self._metrics: MetricsWriter | None = None
        self._meter = Meter()
        self._pressure = Pressure(post.capacity)
        self._newest = 0
        self._stop: str | None = None
        self._news = asyncio.Event()

    async def run(self) -> None:
        """Work until the controller says stop.

        Raises:
            EngineError: the engine died or refused a request.
            HpcrlError: an environment, a weight directory or the controller failed.
        """
        loops = [asyncio.create_task(loop()) for loop in self._loops()]
        try:
            await asyncio.wait(loops, return_when=asyncio.FIRST_COMPLETED)
            for loop in loops:
                if loop.done():
                    loop.result()
        except EngineError as error:
            if self._server.alive() and await self._engine.healthy():
                raise
            raise self._server.failure("died") from error
        finally:
            left = asyncio.all_tasks() - {asyncio.current_task()}
            for task in left:
                task.cancel()
            # those that have failed too: asyncio would tell of each, after the reason for which this worker ends
            await asyncio.gather(*left, *self._flight, return_exceptions=True)
            if self._metrics:
                self._write_metrics()
                self._metrics.close()

    def _loops(self) -> list[Callable[[], Coroutine[Any, Any, None]]]:
        return [self._serve, self._tell, self._watch, self._progress, self._relieve]

    async def _serve(self) -> None:
        claim: asyncio.Task[dict[str, Any]] | None = None
        update: asyncio.Task[None] | None = None
        while self._stop is None:
            free, behind = self._free(), self._newest > self._engine.version
            evaluating = any(item.kind == "eval" for item in self._flight.values())
            # a claim under way may be answered with work for the version at hand; with news it is answered at once
            if behind and update is None and claim is None and not evaluating:
                update = asyncio.create_task(self._update(self._newest))
            if not behind and claim is None and free > 0:
                claim = asyncio.create_task(self._claim(free))
            news = asyncio.create_task(self._news.wait())
            waited = [task for task in (news, claim, update, *self._flight) if task is not None]
            await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
            news.cancel()
            self._news.clear()
            await self._hand_over()
            if update is not None and update.done():
                update.result()
                update = None
            if claim is not None and claim.done():
                answer, claim = claim.result(), None
                self._hear(answer)
                self._begin([Work.from_json(item) for item in answer["work"]])

    def _free(self) -> int:
        """Return how many more training groups there is room for."""
        return max(0, self._pressure.limit - self._groups())

    def _groups(self) -> int:
        """Return the training groups in flight, or as many as have the samples of what is."""
        samples = sum(item.n_samples for item in self._flight.values())
        return -(-samples // self._post.n_samples)

    async def _claim(self, capacity: int) -> dict[str, Any]:
        holding = [item.group_id for item in self._flight.values()]
        answer = await self._call("claim", version=self._engine.version, capacity=capacity, holding=holding)
        # taken from this worker while it was silent, and given to it anew: a second result would replace the first one's file
        return answer | {"work": [item for item in answer["work"] if item["group_id"] not in holding]}

    def _call(self, route: str, **payload: Any) -> Awaitable[dict[str, Any]]:
        return in_thread(self._controller.call, route, worker=self._post.name, **payload)

    def _hear(self, answer: dict[str, Any]) -> None:
        """Note what an answer says of the run: whether it ends, and which version is the newest (none before the trainer starts)."""
        version = answer["version"]
        if self._metrics is None and version is not None:
            self._metrics = MetricsWriter(self._post.run, self._post.name, self._post.attempt, version)
        for task, item in self._flight.items():
            if item.group_id in answer["unwanted"]:
                task.cancel()
        if answer["stop"] or (version or 0) > self._newest:
            self._stop, self._newest = answer["stop"], max(self._newest, version or 0)
            self._news.set()

    def _begin(self, work: list[Work]) -> None:
        for item in work:
            self._flight[asyncio.create_task(self._generate(item))] = item
        self._meter.working(bool(self._flight))

    async def _generate(self, work: Work) -> GroupMeta:
        group = await self._generator.generate(work)
        self._meter.tokens += sum(group.response_lengths)
        run, replica = self._post.run, self._post.replica
        if work.kind == "eval":
            path = run.eval_dump(group.oldest_version, replica)
            if self._post.dump_evals:
                append_evaluated(path, group, self._decode)
            return group.meta(replica, str(path.relative_to(run.path)))
        path = run.samples_of(replica) / f"{work.group_id}.safetensors"
        meta = group.meta(replica, str(path.relative_to(run.path)))
        await in_thread(write_group, path, group.samples, meta)
        return meta

    async def _hand_over(self) -> None:
        done = [task for task in self._flight if task.done()]
        groups = [task.result().to_json() for task in done if not task.cancelled()]
        for task in done:
            del self._flight[task]
        self._meter.working(bool(self._flight))
        if groups:
            await self._call("complete", groups=groups)

    async def _update(self, version: int) -> None:
        started, local = time.monotonic(), self._post.scratch / "weights"
        try:
            await in_thread(fetch, self._post.run.weights_of(version), local)
        except CommitError:
            self._hear(await self._call("lease", version=self._engine.version, state="fetching weights"))
            if self._newest == version:
                raise
            return  # so slow that the version was retired meanwhile: on to the newest
        fetched = time.monotonic() - started
        self._write_metrics()
        pause = await self._engine.update_weights(local, version)
        await in_thread(shutil.rmtree, local)
        self._meter.start({"weights/fetch_seconds": fetched, "weights/pause_seconds": pause})

    def _write_metrics(self) -> None:
        if self._metrics and self._meter.tokens:  # nothing is to be said of a version that was only passed through
            limit = {"generate/groups_at_once": self._pressure.limit}
            self._metrics.write(self._engine.version, self._meter.values() | limit)

    async def _tell(self) -> None:
        while True:
            running, version = len(self._flight), self._engine.version
            holding = [item.group_id for item in self._flight.values()]
            state = f"generating {running} groups" if running else f"ready v{version}"
            self._lease.say(state, version=version, groups=running, **self._meter.values())
            self._hear(await self._call("lease", version=version, state=state, holding=holding))
            await asyncio.sleep(RENEW_S)

    async def _relieve(self) -> None:
        while True:
            await asyncio.sleep(_LOAD_S)
            load = None
            with suppress(EngineError):  # whether it hangs is seen by _progress
                load = await self._engine.load()
            if load and self._pressure.look(load, self._groups()):
                self._news.set()

    async def _progress(self) -> None:
        await watch_progress(self._engine, self._post.stall_s, self._post.load_s)

    async def _watch(self) -> None:
        while self._server.alive():
            await asyncio.sleep(_WATCH_S)
        raise EngineError("the inference engine ended")
