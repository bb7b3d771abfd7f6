"""The HTTP server: the routes of vLLM 0.31 that hpcrl calls, on a unix socket, behind the middleware that it is given.

/health and /metrics are answered here, by whatever state the core is in: vLLM does so too.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import importlib
import itertools
import json
import multiprocessing
import os
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from vllm import core
from vllm.knobs import knob

_POLL_S = 0.02


def note(what: str, samples: int) -> None:
    """Count what was asked for and answered, beside the file of the knobs: what is generated twice is not to be seen in the run."""
    with Path(os.environ["STAND_IN"]).with_suffix(f".{what}").open("a") as file:
        file.write(f"{samples}\n")


def flood(megabytes: int) -> None:
    for _ in range(megabytes):
        print("\n".join(["INFO it says this once more".ljust(127)] * (1 << 13)), flush=True)


class Nothing:
    """What a request has said before it says everything at once."""

    @staticmethod
    def num_output_tokens() -> int:
        return 0


class Waiting:
    """The requests that have yet to be answered, as vLLM keeps them."""

    def __init__(self) -> None:
        self.request_states: dict[str, SimpleNamespace] = {}

    def add(self, request_id: str, samples: int) -> list[str]:
        names = [f"{index}_{request_id}" for index in range(samples)]
        for index, name in enumerate(names):
            self.request_states[name] = SimpleNamespace(
                external_req_id=f"generate-tokens-{request_id}",
                request_index=index,
                detokenizer=Nothing,
                parent_req=None,
            )
        return names


class Engine:
    """The core, as its server sees it."""

    core_engines = (b"\0\0",)

    def __init__(self) -> None:
        spawn = multiprocessing.get_context("spawn")  # as vLLM does: hpcrl's main module is imported first
        self._core, theirs = spawn.Pipe()
        self.process = spawn.Process(target=core.run, args=(theirs,), name="EngineCore", daemon=True)
        self.process.start()
        theirs.close()
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._numbers = itertools.count()
        self.going = asyncio.Event()
        self.going.set()
        self.running = self.tokens = 0
        self.asleep: set[str] = set()
        self.output_processor = Waiting()
        self.manifest: dict[str, Any] = {}

    def listen(self) -> None:
        asyncio.get_running_loop().add_reader(self._core.fileno(), self._hear)

    def _hear(self) -> None:
        try:
            number, answer = self._core.recv()
        except (EOFError, ConnectionResetError):
            print("ERROR vllm.v1.engine.exceptions.EngineDeadError: EngineCore ended", flush=True)
            os._exit(1)
        self._waiting.pop(number).set_result(answer)

    async def ask(self, verb: str, payload: Any = None) -> Any:
        number, answer = next(self._numbers), asyncio.get_running_loop().create_future()
        self._waiting[number] = answer
        self._core.send((number, verb, payload))
        return await answer

    async def generate(self, request: Request) -> Response:
        asked = await request.json()
        params = asked["sampling_params"]
        if "prompt_logprobs" in params:
            return JSONResponse({"error": "it sleeps"}, 500) if self.asleep else self.probed()
        self.running += 1
        names = self.output_processor.add(asked["request_id"], params["n"])
        note("asked", params["n"])
        try:
            due = time.monotonic()
            while time.monotonic() < due + knob("latency_s", 0.0):
                await asyncio.sleep(_POLL_S)
            await self.going.wait()
            flood(int(knob("flood_mb", 0)))
            wanted = {"token_ids": asked["token_ids"], "seed": params["seed"] or 0, "n": params["n"]}
            said = await self.ask("generate", wanted)
            self.tokens += sum(map(len, said))
            note("answered", params["n"])
        finally:
            self.running -= 1
            for name in names:
                del self.output_processor.request_states[name]
        choices = [
            {
                "index": index,
                "token_ids": tokens[: params["max_tokens"]],
                "logprobs": {"content": [{"logprob": core.LOGPROB} for _ in tokens[: params["max_tokens"]]]},
                "finish_reason": "stop" if len(tokens) <= params["max_tokens"] else "length",
            }
            for index, tokens in enumerate(said)
        ]
        return JSONResponse({"choices": choices})

    async def health(self, _: Request) -> Response:
        return Response()

    async def metrics(self, _: Request) -> Response:
        return PlainTextResponse(
            f'vllm:num_requests_running{{engine="0"}} {self.running}\n'
            f'vllm:generation_tokens_total{{engine="0"}} {self.tokens}\n'
        )

    async def resume(self, _: Request) -> Response:
        self.going.set()
        return JSONResponse({})

    async def start_update(self, _: Request) -> Response:
        return JSONResponse({})

    async def sleep(self, request: Request) -> Response:
        if request.query_params.get("mode", "abort") != "keep":  # as with --enable-return-routed-experts
            return JSONResponse({"error": "only supports resetting running requests after pause(mode='keep')"}, 500)
        self.asleep = {"weights", "kv_cache"}
        self.going.clear()  # what runs is kept, and goes on
        return Response()

    async def wake_up(self, request: Request) -> Response:
        if knob("short_of_memory", False):
            return JSONResponse({"error": "CUDA Error: out of memory"}, 500)
        self.asleep -= set(request.query_params.getlist("tags"))
        if not self.asleep:
            self.going.set()
        return Response()

    async def update(self, request: Request) -> Response:
        if "weights" in self.asleep:
            return JSONResponse({"error": "it has no memory for weights"}, 500)
        self.manifest = json.loads((Path((await request.json())["update_info"]["path"]) / "manifest.json").read_text())
        return JSONResponse({})

    async def finish_update(self, request: Request) -> Response:
        if not knob("stale", False):
            await self.ask("finish", (await request.json())["weight_version"])
        return JSONResponse({})

    @property
    def engine_core(self) -> Engine:
        """Itself, as the client of its only core."""
        return self

    async def _call_utility_async(self, method: str, *args: Any, engine: bytes) -> Any:
        assert engine in self.core_engines
        if method == "pause_scheduler":
            assert args == ("keep", False)
            self.going.clear()
            return None
        if method == "reset_prefix_cache":
            if self.going.is_set():
                raise RuntimeError("only supports resetting running requests after pause(mode='keep')")
            return True
        assert (method, args[0]) == ("collective_rpc", "weight_proof")
        tensors = json.dumps(sorted(self.manifest["tensors"].items()))
        digest = hashlib.blake2b(tensors.encode(), digest_size=16).hexdigest()
        return [
            {"rank": 0, "of": 1, "version": self.manifest["version"], "digest": digest, "share": [0, 1], "wrong": []}
        ]

    def probed(self) -> Response:
        """Say of the trainer's probe what the trainer does: the weights change nothing here."""
        probe = self.manifest["probe"]
        said = zip(probe["token_ids"][1:], probe["logprobs"], strict=True)
        places = [{str(token): {"logprob": value}} for token, value in said]
        return JSONResponse({"prompt_logprobs": [None, *places], "choices": []})

    async def weight_info(self, _: Request) -> Response:
        return JSONResponse({"weight_version": await self.ask("version")})

    def app(self, middleware: str) -> Starlette:
        module, _, name = middleware.rpartition(".")
        get, post = ["GET"], ["POST"]
        app = Starlette(
            middleware=[Middleware(getattr(importlib.import_module(module), name))],
            routes=[
                Route("/health", self.health, methods=get),
                Route("/metrics", self.metrics, methods=get),
                Route("/weight_info", self.weight_info, methods=get),
                Route("/inference/v1/generate", self.generate, methods=post),
                Route("/resume", self.resume, methods=post),
                Route("/sleep", self.sleep, methods=post),
                Route("/wake_up", self.wake_up, methods=post),
                Route("/start_weight_update", self.start_update, methods=post),
                Route("/update_weights", self.update, methods=post),
                Route("/finish_weight_update", self.finish_update, methods=post),
            ],
        )
        app.state.engine_client = self
        return app


async def serve(socket: str, middleware: str) -> None:
    engine = Engine()
    engine.listen()
    app = engine.app(middleware)
    await uvicorn.Server(uvicorn.Config(app, uds=socket, log_level="warning", lifespan="off")).serve()
    engine.process.kill()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--uds", required=True)
    parser.add_argument("--middleware", required=True)
    options, others = parser.parse_known_args()
    print(f"the stand-in engine, replica {os.environ.get('HPCRL_REPLICA')}: {json.dumps(others)}", flush=True)
    if knob("out_of_memory", False):
        print("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.", flush=True)
        sys.exit(1)
    time.sleep(knob("start_s", 0.0))
    asyncio.run(serve(options.uds, options.middleware))
