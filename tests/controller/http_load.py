"""A controller in a process of its own, and the requests of many workers and of a trainer to it over HTTP.

Workers claim groups and report each in a request of its own (`Load.groups`: as many together), the trainer takes each batch and publishes at
once. Reports leave at a fixed rate. Nothing is generated or trained.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hpcrl.controller.api import Api
from hpcrl.controller.replicas import MinReplicas
from hpcrl.controller.schedule import Schedule
from hpcrl.controller.service import Service
from hpcrl.rundir.commit import write_text
from hpcrl.rundir.layout import Run
from hpcrl.runtime.http_server import Guard, Signed, bind, serve
from hpcrl.runtime.token import AttemptKey, Sender, read_token
from hpcrl.types import Prompt
from tests.rows import group_meta

_START_S = 60.0


@dataclass(frozen=True)
class Load:
    """What is asked of the controller.

    Attributes:
        rate: finished groups per second.
        seconds: for which they are reported.
        groups: of one request.
        capacity: groups that a worker holds at most.
        samples: of each group.
        batch_size: groups per step.
    """

    rate: float
    seconds: float
    groups: int
    workers: int
    batch_size: int
    capacity: int = 16
    samples: int = 8
    staleness: int = 4


@dataclass
class Result:
    """What was measured.

    Attributes:
        taken: groups that were accepted.
        cpu: processor seconds of the controller.
        steps: batches.
    """

    taken: int = 0
    refused: int = 0
    cpu: float = 0.0
    steps: int = 0


class Connection:
    """A kept-open HTTP connection, without what a real client costs."""

    def __init__(self, port: int, run: Run) -> None:
        self._port = port
        self._sender = Sender(AttemptKey.of(read_token(run), run.name, 1))
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def call(self, route: str, **payload: Any) -> dict[str, Any]:
        if self._streams is None:
            self._streams = await asyncio.open_connection("127.0.0.1", self._port)
        reader, writer = self._streams
        body = json.dumps(payload).encode()
        headers = {"host": "controller", "content-length": len(body), **self._sender.headers(f"/{route}", body)}
        fields = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        writer.write(f"POST /{route} HTTP/1.1\r\n{fields}\r\n".encode() + body)
        head = await reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200"), head
        length = int(head.lower().split(b"content-length:")[1].split(b"\r\n")[0])
        return json.loads(await reader.readexactly(length))

    def close(self) -> None:
        if self._streams:
            self._streams[1].close()


def finished(name: str, version: int, samples: int) -> dict[str, Any]:
    metrics = [{"correct": float(n % 2), "format": 1.0, "turns": 3.0} for n in range(samples)]
    lengths = [700 + 13 * n for n in range(samples)]
    rewards = [float(n % 2) for n in range(samples)]
    path = f"samples/0/{name}.safetensors"
    stops = ["stop"] * samples
    meta = group_meta(
        group_id=name, path=path, rewards=rewards, lengths=lengths, response_lengths=lengths, stop_reasons=stops,
        oldest_version=version, newest_version=version, data_source="bench", seconds=12.5, env_metrics=metrics,
    )  # fmt: skip
    return meta.to_json()


class Drive:
    """The workers and the trainer."""

    def __init__(self, run: Run, port: int, load: Load) -> None:
        self._run, self._port, self._load = run, port, load
        self._held: dict[str, set[str]] = {f"rollout-{number}": set() for number in range(load.workers)}
        self._free = {name: asyncio.Event() for name in self._held}
        self._version = 0
        self._done = deque[tuple[str, str, int]]()  # worker, group, version: generated, to be handed over
        self._supply = asyncio.Event()
        self._idle = list[Connection]()
        self._over = False
        self.result = Result()

    async def run(self) -> Result:
        trainer = asyncio.create_task(self._train())
        workers = [asyncio.create_task(self._claim(name)) for name in self._held]
        await self._supply.wait()
        await self._report()
        self._over = True
        for task in (trainer, *workers):
            task.cancel()
        await asyncio.gather(trainer, *workers, return_exceptions=True)
        return self.result

    async def _train(self) -> None:
        connection = Connection(self._port, self._run)
        await connection.call("start", step=0)
        while not self._over:
            answer = await connection.call("next", step=self._version + 1)
            if answer["path"]:
                self.result.steps += 1
                await connection.call("published", version=self._version + 1)
                self._version += 1

    async def _claim(self, name: str) -> None:
        connection, held = Connection(self._port, self._run), self._held[name]
        while not self._over:
            room, version = self._load.capacity - len(held), self._version
            if room <= 0:
                self._free[name].clear()
                await self._free[name].wait()
                continue
            answer = await connection.call("claim", worker=name, version=version, capacity=room, holding=list(held))
            for work in answer["work"]:
                held.add(work["group_id"])
                self._done.append((name, work["group_id"], version))
            if self._done:
                self._supply.set()

    async def _complete(self) -> None:
        connection = self._idle.pop() if self._idle else Connection(self._port, self._run)
        taking = [self._done.popleft() for _ in range(min(self._load.groups, len(self._done)))]
        groups = [finished(name, version, self._load.samples) for _, name, version in taking]
        answer = await connection.call("complete", worker=taking[0][0], groups=groups)
        self.result.taken += len(answer["accepted"])
        self.result.refused += len(answer["rejected"])
        for worker, name, _ in taking:
            self._held[worker].discard(name)
            self._free[worker].set()
        self._idle.append(connection)

    async def _report(self) -> None:
        began = due = time.monotonic()
        pending, gap = set[asyncio.Task[None]](), self._load.groups / self._load.rate
        while due < began + self._load.seconds:
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            if not self._done:  # the controller has given out all that may begin: what comes next is not late
                await asyncio.sleep(0.001)
                due = max(due, time.monotonic())
                continue
            task = asyncio.create_task(self._complete())
            pending.add(task)
            task.add_done_callback(pending.discard)
            await asyncio.sleep(0)
            due += gap
        await asyncio.gather(*pending)


def serve_controller(directory: str, load: Load) -> None:
    """Print the port, and serve until the parent closes the pipe."""
    run = Run(Path(directory))
    schedule = Schedule(
        batch_size=load.batch_size,
        n_samples=load.samples,
        staleness=load.staleness,
        total_steps=10**6,
        seed=1,
        eval_interval=0,
        eval_before_train=False,
        eval_n_samples=1,
        order_seed=1,
        groups_at_once=None,
        eval_prompts_at_once=1024,
        min_replicas=MinReplicas(replicas=load.workers),
    )
    ask = [{"role": "user", "content": "What is 3 + 4? " * 20}]
    prompts = [Prompt(f"p{number}", ask, "gsm8k", {"answer": "7"}, "bench") for number in range(4 * load.batch_size)]
    listener = bind("127.0.0.1")
    print(listener.getsockname()[1], flush=True)

    async def main() -> None:
        api = Api(Service(run, 1, schedule, prompts, []), save_seconds=1)

        async def until() -> None:
            await asyncio.to_thread(sys.stdin.read)
            await api.end("the load is over")

        await serve(Guard(api.routes(), Signed(read_token(run), run.name, 1)), listener, until())

    asyncio.run(main())


@asynccontextmanager
async def controller(run: Run, load: Load) -> AsyncIterator[tuple[int, subprocess.Popen[str]]]:
    """A controller in a process of its own, and the port it listens on."""
    write_text(run.config, "")
    write_text(run.token, "secret\n", mode=0o600)
    command = [sys.executable, __file__, str(run.path), json.dumps(asdict(load))]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin
        assert process.stdout
        try:
            yield int(await asyncio.to_thread(process.stdout.readline)), process
        finally:
            process.stdin.close()
            process.wait(_START_S)


def processor_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def measure(directory: Path, load: Load) -> Result:
    """Run one load against a controller of its own, whose run directory is `directory`."""
    run = Run(directory)
    async with controller(run, load) as (port, process):
        drive = Drive(run, port, load)
        before = processor_seconds(process.pid)
        result = await drive.run()
        result.cpu = processor_seconds(process.pid) - before
    return result


if __name__ == "__main__":
    serve_controller(sys.argv[1], Load(**json.loads(sys.argv[2])))
