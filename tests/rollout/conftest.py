"""One real vLLM server for all tests of this folder: its start takes longer than they do."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest

from hpcrl.rollout.engines.vllm.client import EngineClient
from hpcrl.rollout.engines.vllm.server import Server
from hpcrl.rundir.commit import write_text
from hpcrl.runtime.controller_client import headers
from tests.rollout.material import RUN_NAME, TOKEN, as_version, make_model, options, served

R = TypeVar("R")
WithEngine = Callable[[Callable[[EngineClient], Coroutine[Any, Any, R]]], R]


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Three models of one architecture."""
    folder = tmp_path_factory.mktemp("models")
    return [make_model(folder / str(seed), seed) for seed in (0, 2, 4)]


@pytest.fixture(scope="session")
def token_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("secrets") / "token"
    write_text(path, TOKEN + "\n", mode=0o600)
    return path


@pytest.fixture(scope="session")
def server(models: list[Path], token_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with served(options(str(models[0]), token_file), tmp_path_factory.mktemp("log") / "engine.log") as server:
        yield server


@pytest.fixture
def with_engine(server: Server, models: list[Path]) -> WithEngine[Any]:
    """Run a coroutine function on a client of the server, which holds the first model as version 0."""

    def run(play: Callable[[EngineClient], Coroutine[Any, Any, R]]) -> R:
        async def main() -> R:
            engine = EngineClient(server.socket, headers(TOKEN, RUN_NAME, 1))
            try:
                await engine.update_weights(as_version(models[0], 0))
                return await play(engine)
            finally:
                await engine.close()

        return asyncio.run(main())

    return run


@pytest.fixture
def short_path() -> Iterator[Path]:
    """A place whose path leaves room for the names of sockets."""
    with tempfile.TemporaryDirectory(dir="/tmp") as path:
        yield Path(path)
