"""Messages to the controller, driven through its real application without sockets: a small run is played, and what is said is spoilt.

Whatever is said with the right key, and in whatever order: nothing is unhandled, a refused message changes nothing, the run does not fail,
and honest processes can bring it to its end afterwards.
"""

from __future__ import annotations

import asyncio
import json
import os
import pickle
import random
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import asdict, dataclass, field, replace
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from hpcrl.config.sections.algorithm import DynamicSamplingConfig
from hpcrl.controller import api
from hpcrl.controller.api import Api
from hpcrl.controller.dynamic_sampling import DynamicSampling
from hpcrl.controller.replicas import MinReplicas
from hpcrl.controller.schedule import Schedule
from hpcrl.controller.score_queue import ScoreQueue
from hpcrl.controller.service import Service
from hpcrl.rundir.commit import write_text
from hpcrl.rundir.layout import Run
from hpcrl.runtime.controller_client import FINISHED
from hpcrl.runtime.http_server import Guard, Signed
from hpcrl.runtime.token import NONCE, SIGNATURE, AttemptKey, Sender
from hpcrl.types import Prompt
from tests.fuzz.spoil import spoilt, spoilt_bytes

REPLICAS, STEPS, BATCH, SAMPLES, EVALUATED = 3, 3, 2, 2, 3
JUDGES = ["teacher-1", "reference-2"]
MESSAGES = 150
"""Of one run."""
_LONGEST_ANSWER = 20_000
_IN_MEMORY = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None  # each batch is written through to its disk
Message = tuple[str, bytes]


@dataclass(frozen=True)
class Scene:
    """The run that is played; a failure is written down with it."""

    staleness: int = 0
    surplus: int = 0
    evaluates: bool = True
    baselines: bool = False
    sampling: str | None = None
    scorers: int = 0

    @classmethod
    def drawn(cls, chance: random.Random) -> Scene:
        return cls(
            chance.randrange(3),
            chance.choice([0, 0, 1]),
            chance.random() < 0.7,
            chance.random() < 0.2,
            chance.choice([None, None, "filter", "replace"]),
            chance.choice([0, 0, 1, 2]),
        )

    def schedule(self) -> Schedule:
        return Schedule(
            batch_size=BATCH,
            n_samples=SAMPLES,
            staleness=self.staleness,
            total_steps=STEPS,
            seed=1,
            eval_interval=2 if self.evaluates else 0,
            eval_before_train=True,
            eval_n_samples=1,
            order_seed=1,
            groups_at_once=None,
            eval_prompts_at_once=2,
            surplus=self.surplus,
            sampling=DynamicSampling(DynamicSamplingConfig(type=self.sampling, max_sample_batches=0)),
            baselines=self.baselines,
            min_replicas=MinReplicas(replicas=REPLICAS),
            max_failed_ratio=1.0,
        )


class Unsound(AssertionError):
    """The controller did with a message what it must not do."""


@dataclass
class Controller:
    """A controller of its own run.

    Attributes:
        said: all messages so far.
        counts: of answers, by status.
    """

    run: Run
    scene: Scene
    said: list[Message] = field(default_factory=list)
    counts: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        prompts = [Prompt(f"p{i}", [{"role": "user", "content": str(i)}], "e", {}, "letters") for i in range(5)]
        scores = ScoreQueue(JUDGES[: self.scene.scorers])
        self.service = Service(self.run, 1, self.scene.schedule(), prompts, prompts[:EVALUATED], scores=scores)
        self._api = Api(self.service, save_seconds=1)
        self._guard = Guard(self._api.routes(), Signed("secret", self.run.name, 1))
        self._sender = Sender(AttemptKey.of("secret", self.run.name, 1))
        self._before = self._state()

    def _state(self) -> bytes:
        return pickle.dumps((self.service, self._api._trainer_got_end, list(self._api._waiting)))

    async def say(self, path: str, body: bytes, *, alone: bool = True, **headers: str) -> dict[str, Any]:
        """Send a message and look at what becomes of it; return the answer, empty if it was refused.

        Args:
            alone: whether nothing else is asked meanwhile.
            headers: that are put in the place of the right ones.

        Raises:
            Unsound: see the top of this module.
        """
        self.said.append((path, body))
        status, content = await self._ask(path, body, {**self._sender.headers(path, body), **headers})
        self.counts[status] = self.counts.get(status, 0) + 1
        if status not in (200, 400, 401, 404, 409, 413):
            raise Unsound(f"answered with {status}")
        if len(content) > _LONGEST_ANSWER:
            raise Unsound(f"an answer of {len(content)} bytes")
        answer = json.loads(content)
        if status == 200 and path == "/complete":
            self._look_at_groups(body)
        if alone:
            state = self._state()
            if status != 200 and state != self._before:
                raise Unsound(f"refused ({answer['error']}), and yet something has changed")
            self._before = state
        if status != 200 and not (answer["error"].isprintable() and len(answer["error"]) < 1500):
            raise Unsound(f"this cannot be printed: {answer['error']!r:.200}")
        if self.service.failure:
            raise Unsound(f"the run fails: {self.service.failure}")
        if len(self.service.workers) > REPLICAS:
            raise Unsound(f"{len(self.service.workers)} workers of {REPLICAS}")
        return answer if status == 200 else {}

    def _look_at_groups(self, body: bytes) -> None:
        for group in json.loads(body)["groups"]:
            n = SAMPLES if group["kind"] == "train" else 1
            numbers = [*group["rewards"], *group.get("raw_rewards", ()), group["seconds"]]
            numbers += [value for sample in group.get("env_metrics", ()) for value in sample.values()]
            lengths = group["lengths"] + group["response_lengths"] + group.get("shared", [])
            versions = [0, group["oldest_version"], group["newest_version"], self.service.version or 0]
            fit = len(group["rewards"]) == len(group["response_lengths"]) == n
            fit = fit and len(group["lengths"]) == sum(group.get("rows") or [1] * n)
            fit = fit and len(group.get("shared") or group["lengths"]) == len(group["lengths"])
            if not (
                fit and all(abs(one) <= 1e30 for one in numbers) and min(lengths) >= 0 and versions == sorted(versions)
            ):
                raise Unsound(f"a group like this was taken: {group!r:.600}")

    async def _ask(self, path: str, body: bytes, headers: dict[str, str]) -> tuple[int, bytes]:
        sent: list[Any] = []

        async def receive() -> dict[str, Any]:
            return {"type": "http.request", "body": body, "more_body": False}

        async def send(message: Any) -> None:
            sent.append(message)

        fields = [(name.encode(), value.encode("latin-1")) for name, value in headers.items()]
        scope = {"type": "http", "path": path, "method": "POST", "headers": fields}
        asked = asyncio.create_task(self._guard(scope, receive, send))
        await asyncio.wait([asked])
        if error := asked.exception():
            raise Unsound(f"unhandled {error!r:.300}") from error
        return sent[0]["status"], sent[1]["body"]

    async def call(self, route: str, **payload: Any) -> dict[str, Any]:
        return await self.say(f"/{route}", json.dumps(payload).encode())

    async def conclude(self) -> None:
        """Everybody who was there falls silent, and honest processes bring the run to its end; another attempt reads what is left."""
        for worker in self.service.workers.values():
            worker.seen -= 1e6
        for name in self.service.expire():
            self._api._answer(name)
            name.encode()
        for scorer in self.service.scores.registry.workers.values():
            scorer.seen -= 1e6
        self.service.scores.expire()
        self._before = self._state()
        if self.service.version is None:
            await self.call("start", step=0)
        held = 0  # of an engine that starts
        for _ in range(60 * STEPS):
            if self.service.stop == FINISHED:
                break
            held = await self._go_on(held)
        else:
            raise Unsound(f"the run does not come to its end: {self.service.status()}")
        await self.call("next", step=STEPS + 1)
        prompts, scores = (self.service.work._train, self.service._validation), ScoreQueue(JUDGES[: self.scene.scorers])
        again = Service(self.run, 2, self.scene.schedule(), *prompts, scores=scores)
        again.start(STEPS)

    async def _go_on(self, held: int) -> int:
        """Have an engine of this version and a trainer do what they can; return the version that the engine loads then."""
        version = self.service.version or 0
        answer = await self.call("claim", worker="rollout-0", version=held, capacity=9, holding=[])
        groups = [finished(work, held, self.scene, number) for number, work in enumerate(answer["work"])]
        await self.call("complete", worker="rollout-0", groups=groups)
        for scorer in self.service.scores.scorers:
            given = await self.call("claim_scores", scorer=scorer, samples=99, holding=[], wait=0.0)
            await self.call("scored", scorer=scorer, digests={group["group_id"]: "0" * 32 for group in given["groups"]})
        if version < STEPS and (await self.call("next", step=version + 1, wait=0))["path"]:
            await self.call("published", version=version + 1)
        return held if answer["version"] is None else answer["version"]


def finished(work: dict[str, Any], version: int, scene: Scene, number: int = 0) -> dict[str, Any]:
    n = work["n_samples"]
    return {
        "group_id": work["group_id"],
        "kind": work["kind"],
        "replica": 0,
        "path": f"samples/0/{work['group_id']}.safetensors",
        "rewards": [float(number + sample) for sample in range(n)],
        "lengths": [5] * n,
        "response_lengths": [2] * n,
        "stop_reasons": ["stop"] * n,
        "oldest_version": version,
        "newest_version": version,
        "data_source": "letters",
        "seconds": 0.5,
        "env_metrics": [{"correct": 1.0}] * n,
        "raw_rewards": [1.0] * n,
        "baseline": 0.5 if scene.baselines else None,
        "failures": [],
        "rows": [1] * n,
        "shared": [0] * n,
    }


class Player:
    """Says what workers and a trainer would say, and now and then something that resembles it."""

    def __init__(self, controller: Controller, chance: random.Random) -> None:
        self._controller, self._chance = controller, chance
        self._work: dict[str, dict[str, Any]] = {}

    async def play(self, messages: int) -> None:
        await self._controller.call("start", step=0)
        while len(self._controller.said) < messages:
            if self._chance.random() < 0.03:  # those that wait are answered by what others say
                said = [self._message() for _ in range(3)]
                answers = await asyncio.gather(*(self._controller.say(*one, alone=False) for one in said))
                self._controller._before = self._controller._state()
            else:
                answers = [await self._controller.say(*self._message(), **self._headers())]
            for answer in answers:
                self._work |= {work["group_id"]: work for work in answer.get("work", ())}

    def _message(self) -> Message:
        chance, said = self._chance, self._controller.said
        if chance.random() < 0.05:
            return chance.choice(said)
        route, payload = self._honest()
        for _ in range(chance.choice([0, 1, 1, 1, 2, 3])):
            payload = spoilt(payload, chance)
        if isinstance(payload, dict) and type(payload.get("wait")) in (int, float) and 0 < payload["wait"] <= 60:
            payload["wait"] = 0.0  # it would be waited for
        if chance.random() < 0.02:
            route = chance.choice(["status", "nothing", "", "next/", "cläim"])
        body = spoilt_bytes(payload, chance)
        return f"/{route}", body

    def _headers(self) -> dict[str, str]:
        if self._chance.random() > 0.01:
            return {}
        return {
            self._chance.choice([NONCE, SIGNATURE, "x-hpcrl-run", "x-hpcrl-attempt"]): self._chance.choice(
                ["", "a-1", "é", "-1"]
            )
        }

    def _honest(self) -> tuple[str, dict[str, Any]]:
        chance, version = self._chance, self._controller.service.version or 0
        worker = f"rollout-{chance.randrange(REPLICAS)}"
        some = chance.sample(sorted(self._work), min(len(self._work), chance.randrange(4)))
        groups = [self._group(self._work[name], version) for name in some]
        calls, scorer = {"worker": worker, "version": version}, f"scorer-{chance.randrange(2)}"
        return chance.choices(
            [
                ("claim", {**calls, "capacity": chance.randrange(4), "holding": some}),
                ("complete", {"worker": worker, "groups": groups}),
                ("report", {**calls, "state": "ready v0", "holding": some}),
                ("leave", {"worker": worker}),
                ("start", {"step": 0}),
                ("published", {"version": chance.randrange(STEPS + 1)}),
                ("next", {"step": chance.randrange(1, STEPS + 2), "wait": 0.0}),
                ("committed", {"step": version}),
                ("status", {}),
                ("claim_scores", {"scorer": scorer, "samples": chance.randrange(9), "holding": some, "wait": 0.0}),
                ("scored", {"scorer": scorer, "digests": dict.fromkeys(some, f"{chance.randrange(9):032x}")}),
            ],
            [6, 10, 3, 1, 1, 2, 3, 1, 1, 2, 4],
        )[0]

    def _group(self, work: dict[str, Any], version: int) -> dict[str, Any]:
        chance = self._chance
        group = finished(work, chance.randrange(version + 1), self._controller.scene, chance.randrange(3))
        group["newest_version"] = version
        if chance.random() < 0.2:
            rows = [chance.randrange(1, 3) for _ in group["rows"]]
            group |= {"rows": rows, "lengths": [3] * sum(rows), "shared": [2] * sum(rows), "failures": ["it raised"]}
        return group


@contextmanager
def controller_of(scene: Scene) -> Iterator[Controller]:
    """A controller of a run of its own, which nobody waits for."""
    with (
        TemporaryDirectory(dir=_IN_MEMORY) as folder,
        pytest.MonkeyPatch.context() as patch,
        redirect_stdout(StringIO()),  # what a controller's log has of workers
    ):
        patch.setattr(api, "WAIT_S", 0.0)
        run = Run(Path(folder) / "project" / "run")
        write_text(run.config, "")
        controller = Controller(run, scene)
        yield controller
        if controller.service._metrics:
            controller.service._metrics.close()


@dataclass
class Failure:
    """Messages after which the controller was unsound, and why."""

    scene: Scene
    messages: list[Message]
    why: str

    def text(self) -> str:
        said = [[path, body.decode("latin-1")] for path, body in self.messages]
        return json.dumps({"why": self.why, "scene": asdict(self.scene), "messages": said}, indent=1) + "\n"


def play(seed: str) -> dict[int, int] | Failure:
    """Play one run; return how many messages got which status, or what was found, as short as it can be."""
    chance = random.Random(seed)
    with controller_of(Scene.drawn(chance)) as controller:
        try:
            asyncio.run(_play(controller, chance))
        except Unsound as unsound:
            return _shortest(Failure(controller.scene, list(controller.said), str(unsound)))
        return controller.counts


async def _play(controller: Controller, chance: random.Random) -> None:
    await Player(controller, chance).play(MESSAGES)
    await controller.conclude()


def replay(scene: Scene, messages: list[Message]) -> str | None:
    """Say these messages one after the other; return what is unsound, or None."""

    async def say_all(controller: Controller) -> None:
        for path, body in messages:
            await controller.say(path, body)
        await controller.conclude()

    with controller_of(scene) as controller:
        try:
            asyncio.run(say_all(controller))
        except Unsound as unsound:
            return str(unsound)
    return None


def read_failure(text: str) -> Failure:
    value = json.loads(text)
    return Failure(
        Scene(**value["scene"]), [(path, body.encode("latin-1")) for path, body in value["messages"]], value["why"]
    )


def _shortest(failure: Failure) -> Failure:
    """Return the failure without the messages that it does not take."""
    if replay(failure.scene, failure.messages) is None:
        return failure  # it took several at a time
    at = len(failure.messages) - 1
    while at >= 0:
        fewer = failure.messages[:at] + failure.messages[at + 1 :]
        if (why := replay(failure.scene, fewer)) is not None:
            failure = replace(failure, messages=fewer, why=why)
        at = min(at - 1, len(failure.messages) - 1)
    return failure
