"""Plays environments of NVIDIA's NeMo-Gym (0.4) as a service. It runs by the Python that has nemo-gym and what the named servers need, and needs
nothing of hpcrl.

    python nemo_gym_service.py --rows train.jsonl > rows.jsonl        rows of NeMo-Gym become rows of hpcrl
    python nemo_gym_service.py --port 8080 resources_servers/mcqa/configs/mcqa.yaml …

    [environment.skyrl_gym.agent.service]
    url = "http://127.0.0.1:8080/play"

The servers of these configurations run in this process, without Ray: resources servers, and models that judge. Each sample has an agent of its own,
and a model server `policy_model` that asks hpcrl's endpoint with the sample's key. As NeMo-Gym's servers do, they listen on 127.0.0.1 without keys.
The reward is that of `verify`; metrics are the further numbers of its answer. docs/agents.md says more.
"""

from __future__ import annotations

import argparse
import asyncio
import hmac
import json
import resource
import socket
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, redirect_stdout
from contextvars import ContextVar
from copy import deepcopy
from importlib import import_module
from inspect import isabstract
from math import isfinite
from pathlib import Path
from typing import Any

try:
    import nemo_gym  # noqa: F401
except ModuleNotFoundError:
    sys.exit(
        f"{sys.executable} has no nemo-gym: start this with a Python, 3.12 or later, that has it (pip install nemo-gym)"
    )

import uvicorn
from aiohttp import ClientResponseError
from fastapi import FastAPI, HTTPException, Request
from nemo_gym.config_types import BaseServerConfig, is_server_ref
from nemo_gym.global_config import (
    HEAD_SERVER_KEY_NAME,
    POLICY_MODEL_KEY_NAME,
    GlobalConfigDictParserConfig,
    get_first_server_config_dict,
    get_global_config_dict,
)
from nemo_gym.openai_utils import NeMoGymResponse, NeMoGymResponseCreateParamsNonStreaming
from nemo_gym.server_utils import ServerClient, SimpleServer
from omegaconf import DictConfig, OmegaConf
from responses_api_models.openai_model.app import SimpleModelServer

AGENTS, MODELS, RESOURCES = "responses_api_agents", "responses_api_models", "resources_servers"
# codes of the endpoint: the conversation is at its end, and can be verified
OVER = "context_length_exceeded", "max_turns"
MOST_METRICS = 64
MOST_FILES = 1 << 16
FILES = 32  # of a sample: listeners, and both ends of connections within this process
SAMPLE = ContextVar[DictConfig | None]("SAMPLE", default=None)


class Policy(SimpleModelServer):
    """The package's client of OpenAI's responses, asking the endpoint for one sample."""

    async def responses(self, body: NeMoGymResponseCreateParamsNonStreaming) -> NeMoGymResponse:
        asked = body.model_dump(exclude_unset=True) | {"model": self.config.openai_model}
        try:
            answer = await self._client.create_response(**asked)
        except ClientResponseError as error:
            if error.status == 400 and json.loads(error.response_content)["error"]["code"] in OVER:
                return without_answer(body)
            raise
        for item in answer["output"]:
            if item["type"] == "reasoning":  # the package sends back only what stands in the summary
                item["summary"] = [{"type": "summary_text", "text": part["text"]} for part in item["content"]]
        return NeMoGymResponse.model_validate(answer)


def without_answer(body: NeMoGymResponseCreateParamsNonStreaming) -> NeMoGymResponse:
    """Return an incomplete response with an empty text, after which agents stop."""
    text = {"type": "output_text", "text": "", "annotations": []}
    message = {"type": "message", "id": "over", "role": "assistant", "status": "incomplete", "content": [text]}
    head = {"id": "over", "created_at": 0, "model": POLICY_MODEL_KEY_NAME, "object": "response", "output": [message]}
    end = {"incomplete_details": {"reason": "max_output_tokens"}, "tools": body.tools}
    return NeMoGymResponse.model_validate({**head, **end, "tool_choice": "auto", "parallel_tool_calls": True})


class Quiet(uvicorn.Server):
    """A server beside others in one process: it leaves signals to Python."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


@asynccontextmanager
async def served(app: FastAPI, listener: socket.socket, sample: DictConfig | None = None) -> AsyncIterator[int]:
    """Serve an application, of all samples or of one; yield its port."""
    port = listener.getsockname()[1]

    async def ask(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            SAMPLE.set(sample)
        await app(scope, receive, send)

    server = Quiet(uvicorn.Config(ask, log_level="warning", log_config=None, timeout_graceful_shutdown=1))
    serving = asyncio.create_task(server.serve([listener]))
    try:
        while not server.started:
            if serving.done():
                raise RuntimeError(f"a server did not start: {app.title}")
            await asyncio.sleep(0.01)
        yield port
    finally:
        server.should_exit = True
        await serving


def end_requests(sample: DictConfig) -> None:
    """Cancel the tasks of requests to a sample's servers. Without their connections they would try again, maybe at the ports of another sample."""
    for task in asyncio.all_tasks():
        if task.get_context().get(SAMPLE) is sample:
            task.cancel()


def read_configurations(paths: list[str]) -> DictConfig:
    """Return the configurations, merged as NeMo-Gym merges them, without a policy; they become those of this process."""
    initial = GlobalConfigDictParserConfig.NO_MODEL_GLOBAL_CONFIG_DICT.copy()
    initial["config_paths"] = paths
    read = GlobalConfigDictParserConfig(initial_global_config_dict=initial, skip_load_from_cli=True)
    return get_global_config_dict(read)


class Servers:
    """The servers of the configurations, by their names."""

    def __init__(self, config: DictConfig) -> None:
        self.config = config
        kinds = {name: next(iter(one)) for name, one in config.items() if isinstance(one, DictConfig) and one}
        self.agents = [name for name, kind in kinds.items() if kind == AGENTS]
        self.others = [name for name, kind in kinds.items() if kind in (MODELS, RESOURCES)]
        self.others.remove(POLICY_MODEL_KEY_NAME)
        if not self.agents:
            sys.exit("the configurations have no agent: expected one below responses_api_agents")
        for name in self.others:
            references = map(is_server_ref, get_first_server_config_dict(config, name).values())
            if any(one and one.name == POLICY_MODEL_KEY_NAME for one in references):
                sys.exit(f"{name} asks policy_model, which only agents can: name another model as its judge")
        self.classes = {name: server_class(config, name) for name in (*self.agents, *self.others)}
        self.classes[POLICY_MODEL_KEY_NAME] = Policy
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        files = MOST_FILES if most == resource.RLIM_INFINITY else min(most, MOST_FILES)
        resource.setrlimit(resource.RLIMIT_NOFILE, (files, most))
        self.room = asyncio.Semaphore(max(1, files // FILES))  # further samples wait

    def made(self, name: str, config: DictConfig) -> SimpleServer:
        """Return a server that finds others by a configuration."""
        made, own = self.classes[name], OmegaConf.to_container(get_first_server_config_dict(config, name), resolve=True)
        settings = made.model_fields["config"].annotation.model_validate({**own, "name": name})
        return made(config=settings, server_client=client_of(config))

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Run what all samples share."""
        async with AsyncExitStack() as stack:
            for name in self.others:
                own = get_first_server_config_dict(self.config, name)
                listener = socket.create_server((own["host"], own["port"]))
                await stack.enter_async_context(served(application(self.made(name, self.config)), listener))
            yield

    async def play(self, asked: dict[str, Any]) -> dict[str, Any]:
        """Have an agent play a row with the policy at an endpoint; return the reward and the metrics."""
        row = asked["row"].get("nemo_gym")
        if row is None:
            raise HTTPException(400, "the row has no column nemo_gym: --rows makes rows that have one")
        name = (row.get("agent_ref") or {}).get("name") or self.agents[0]
        if name not in self.agents or (len(self.agents) > 1 and not row.get("agent_ref")):
            raise HTTPException(400, f"agent_ref: expected one of {self.agents}, found {row.get('agent_ref')}")
        endpoint = {"entrypoint": "app.py", "openai_model": asked["model"]}
        endpoint |= {"openai_base_url": asked["base_url"], "openai_api_key": asked["api_key"]}
        config = deepcopy(self.config)
        config[POLICY_MODEL_KEY_NAME] = {MODELS: {"openai_model": endpoint}}
        async with self.room, AsyncExitStack() as stack:
            for one in (POLICY_MODEL_KEY_NAME, name):
                own = get_first_server_config_dict(config, one)
                listener = socket.create_server(("127.0.0.1", 0))
                own["host"], own["port"] = listener.getsockname()
                await stack.enter_async_context(served(application(self.made(one, config)), listener, config))
            stack.callback(end_requests, config)
            answer = await client_of(config).post(name, "/run", json=row)
            content = (await answer.read()).decode()
        if not answer.ok:
            raise HTTPException(500, f"{name} failed with {answer.status}: {content}")
        return score(json.loads(content), row)


def client_of(config: DictConfig) -> ServerClient:
    head = BaseServerConfig.model_validate(config[HEAD_SERVER_KEY_NAME])
    return ServerClient(head_server_config=head, global_config_dict=config)


def application(server: SimpleServer) -> FastAPI:
    app = server.setup_webserver()
    server.setup_exception_middleware(app)
    return app


def server_class(config: DictConfig, name: str) -> type[SimpleServer]:
    """Import the program of a server, from this folder or from the package, and return its class."""
    ((kind, folders),) = config[name].items()
    ((folder, own),) = folders.items()
    places = (Path(place) / kind / folder for place in sys.path)
    # as NeMo-Gym's PYTHONPATH has it
    sys.path += [str(place) for place in places if (place / own["entrypoint"]).exists()]
    module = import_module(f"{kind}.{folder}.{own['entrypoint'].removesuffix('.py')}")
    found = [
        one
        for one in vars(module).values()
        if isinstance(one, type)
        and issubclass(one, SimpleServer)
        and not isabstract(one)
        and one.__module__ == module.__name__
    ]
    if len(found) != 1:
        sys.exit(f"{name}: expected one server in {module.__file__}, found {[one.__name__ for one in found]}")
    return found[0]


def score(verified: dict[str, Any], row: dict[str, Any]) -> dict[str, Any]:
    numbers = {
        name: float(value)
        for name, value in verified.items()
        if isinstance(value, int | float) and isfinite(value) and name not in ("reward", *row)
    }
    return {"reward": verified["reward"], "metrics": dict([*numbers.items()][:MOST_METRICS])}


def service(servers: Servers, token: str | None) -> FastAPI:
    """Return the application that hpcrl asks."""
    app = FastAPI(title="nemo_gym_service")

    @app.post("/play")
    async def play(request: Request) -> dict[str, Any]:
        given = request.headers.get("authorization", "")
        if token and not hmac.compare_digest(given.encode(), f"Bearer {token}".encode()):
            raise HTTPException(401, "expected the token of --token-file")
        playing = asyncio.create_task(servers.play(await request.json()))
        try:
            while not playing.done():
                await asyncio.wait([playing], timeout=1)
                if await request.is_disconnected():
                    break
            return await playing if playing.done() else {}
        finally:
            playing.cancel()

    @app.delete("/play/{session}", status_code=204)
    async def forget(session: str) -> None:
        """Do nothing: the sample's request has ended, and its agent with it."""

    return app


async def serve(servers: Servers, token: str | None, listener: socket.socket, out: Any) -> None:
    async with servers.running(), served(service(servers, token), listener) as port:
        print(f"http://{listener.getsockname()[0]}:{port}/play", file=out, flush=True)
        await asyncio.Event().wait()


def print_rows(path: str) -> None:
    for line in Path(path).read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        given = row["responses_create_params"]["input"]
        items = [{"role": "user", "content": given}] if isinstance(given, str) else given
        prompt = [{"role": one["role"], "content": text_of(one["content"])} for one in items if "role" in one]
        print(json.dumps({"prompt": prompt, "env_class": "agent", "nemo_gym": row}, ensure_ascii=False))


def text_of(content: str | list[dict[str, Any]]) -> str:
    return content if isinstance(content, str) else "".join(part.get("text", "") for part in content)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("configurations", nargs="*", help="as of `gym env start --config`")
    parser.add_argument("--rows", metavar="FILE", help="print the rows of a file as rows of hpcrl, and end")
    parser.add_argument("--host", default="127.0.0.1", help="the address that hpcrl asks")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--token-file", help="a file with the token that hpcrl gives; needed with another --host")
    given = parser.parse_args()
    if given.rows:
        return print_rows(given.rows)
    if given.host != "127.0.0.1" and not given.token_file:
        parser.error("--host: another address than 127.0.0.1 needs a --token-file")
    token = Path(given.token_file).read_text(encoding="utf-8").strip() if given.token_file else None
    sys.path.insert(0, str(Path.cwd()))
    with redirect_stdout(sys.stderr):
        servers = Servers(read_configurations(given.configurations))
        asyncio.run(serve(servers, token, socket.create_server((given.host, given.port)), sys.__stdout__))
    return None


if __name__ == "__main__":
    main()
