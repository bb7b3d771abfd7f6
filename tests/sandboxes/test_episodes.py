"""Episodes in sandboxes that outlive their worker and their sandbox's node: one tiny run over real servers, with the files of a run."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest

from hpcrl.config import EnvironmentConfig, GeneratorConfig
from hpcrl.data.cache_files import named_digests, read_turns, turn_files
from hpcrl.rollout.engines.base import Engine, Generation
from hpcrl.rollout.generate import GroupGenerator
from hpcrl.rollout.generation_cache import GenerationCache
from hpcrl.rollout.group import Group
from hpcrl.rollout.own_services import sandboxes_of
from hpcrl.rundir.layout import Run
from hpcrl.rundir.process_names import worker_name
from hpcrl.sandboxes.images import ImageStore
from hpcrl.sandboxes.snapshots import KEPT_S, SnapshotStore
from hpcrl.types import Prompt, Work
from tests.golden.adapters.rollout import Letters
from tests.sandboxes.test_environment import call
from tests.sandboxes.test_job import make_run, serves, serving, until

TOKENIZER = Letters()
ROW = {
    "image": "tiny",
    "tests": {"command": 'test "$(cat /log)" = "one two three"', "seconds": 60},
    "setup": "printf one > /log",
}
TURNS = 6


def shell(command: str) -> str:
    return call("shell", command=command)


FIRST = [shell("printf ' two' >> /log"), shell("cat /log")]
"""What is said, and answered, before the worker is killed."""

LATER = {
    "g0": [shell("cat /log"), shell("printf ' three' >> /log"), call("submit")],
    "g1": [shell("printf ' three' >> /log; sleep 5"), call("submit")],
}
"""What is said afterwards, by group."""


class Policy:
    """An engine that says what it is to.

    Attributes:
        asked: how often it was asked.
        before: what is awaited before an answer, by the number of those before it.
    """

    version = 0

    def __init__(self, said: Sequence[str]) -> None:
        self._said, self.asked = said, 0
        self.before = dict[int, Callable[[], Awaitable[object]]]()

    async def generate(self, *_: object) -> list[Generation]:
        at, self.asked = self.asked, self.asked + 1
        if at in self.before:
            await self.before[at]()
        ids = [*TOKENIZER.encode(self._said[at]), TOKENIZER.eos_token_id]
        return [Generation(ids, [0.0] * len(ids), "stop", [0] * len(ids))]


class Node:
    """The process that serves the sandboxes of a run."""

    def __init__(self, run: Run, temporary: Path, stack: ExitStack) -> None:
        self._run, self._temporary, self._stack = run, temporary, stack
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        process = self._process = self._stack.enter_context(serving(self._run, self._temporary))
        until(lambda: serves(self._run, process), process)

    def kill(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGKILL)
        self._process.wait()


@pytest.fixture
def run(user: Path, image: Path) -> Run:
    run = make_run(user)
    ImageStore(run.root).add("tiny", image, temporary=user)
    return run


@pytest.fixture
def node(run: Run, user: Path) -> Iterator[Node]:
    with ExitStack() as stack:
        node = Node(run, user / "temporary", stack)
        node.start()
        yield node
        node.kill()


def work(run: Run, group: str) -> Work:
    prompt = Prompt("row0", [{"role": "user", "content": "Write."}], "sandbox", ROW)
    turns = [str(path.relative_to(run.path)) for path in turn_files(run).get(group, [])]
    return Work(group, "train", prompt, 1, seed=0, turns=turns)


def generator(run: Run, engine: Any) -> GroupGenerator:
    config = GeneratorConfig(max_turns=TURNS, n_samples_per_prompt=1)
    return GroupGenerator(
        engine, TOKENIZER, config, EnvironmentConfig(), sandboxes=sandboxes_of(run, 1, 1, worker_name(0))
    )


async def killed(run: Run, group: str) -> None:
    """Generate as a worker that is killed when the third turn is asked for."""
    engine, reached = Policy(FIRST), asyncio.Event()

    async def stay() -> None:
        reached.set()
        await asyncio.Event().wait()

    engine.before[len(FIRST)] = stay
    cache, item = GenerationCache(run, "rollout-0", cast(Engine, engine)), work(run, group)
    generating = asyncio.create_task(generator(run, engine).generate(item, await cache.begin(item)))
    waiting = asyncio.create_task(reached.wait())
    await asyncio.wait([generating, waiting], return_when=asyncio.FIRST_COMPLETED)
    assert reached.is_set(), await generating
    cache.write()
    generating.cancel()
    await asyncio.gather(generating, return_exceptions=True)


async def gone_on(run: Run, group: str, engine: Policy) -> Group:
    """Generate as the next worker, which finds what the one before has left."""
    cache, item = GenerationCache(run, "rollout-1", cast(Engine, engine)), work(run, group)
    found = await generator(run, engine).generate(item, await cache.begin(item))
    cache.write()
    cache.remove([item.group_id])
    return found


async def all_killed(run: Run) -> None:
    await asyncio.gather(*(killed(run, group) for group in LATER))


async def all_gone_on(run: Run, node: Node) -> dict[str, Group]:
    """Generate both groups. The node is killed while g1 runs a command that has changed a file, and before g0 submits."""
    engines = {group: Policy(said) for group, said in LATER.items()}

    async def again() -> None:
        await asyncio.to_thread(node.kill)
        await asyncio.to_thread(node.start)

    async def amid() -> None:
        while not engines["g1"].asked:
            await asyncio.sleep(0.05)
        await asyncio.sleep(1.0)
        await again()

    engines["g0"].before = {1: amid, 2: again}
    found = await asyncio.gather(*(gone_on(run, group, engine) for group, engine in engines.items()))
    assert {group: engine.asked for group, engine in engines.items()} == {"g0": 3, "g1": 2}, "the first were found"
    return dict(zip(engines, found, strict=True))


def collect(run: Run) -> set[str]:
    """Remove old snapshots that nothing names, when all are old; return those that stay."""
    for path in run.snapshots.rglob("*"):
        os.utime(path, (time.time() - 2 * KEPT_S,) * 2)
    SnapshotStore(run.snapshots).collect(partial(named_digests, run))
    return {path.name.partition(".")[0] for path in run.snapshots.iterdir() if path.is_file()}


def test_an_episode_goes_on_after_the_ends_of_its_worker_and_of_its_sandbox(run: Run, node: Node) -> None:
    asyncio.run(all_killed(run))
    kept = [read_turns(path) for files in turn_files(run).values() for path in files]
    assert [len(one.turns) for one in kept] == [len(FIRST)] * len(LATER)
    states = [json.loads(answer["state"]) for one in kept for answer in one.answers]
    assert {state["left"] for state in states} == {TURNS, TURNS - 1, TURNS - 2}
    node.kill()  # with the sandboxes of the first workers
    node.start()
    (run.snapshots / f"{'f' * 64}.tar.gz").write_bytes(b"of an episode that is over")
    assert collect(run) == {state["snapshot"] for state in states}

    groups = asyncio.run(all_gone_on(run, node))
    for group, answers in (("g0", ["(no output)", "one two", "one two", "(no output)"]), ("g1", ["(no output)", "one two", "(no output)"])):  # fmt: skip
        found = groups[group]
        assert [one["content"] for one in found.conversations[0] if one["role"] == "tool"] == answers
        assert (found.failures, found.raw_rewards) == ([], [1.0]), "what each command has done is there once"
        assert found.cached_tokens == sum(len(text) + 1 for text in FIRST)
    assert not turn_files(run)
    assert collect(run) == set(), "the groups are handed over"
