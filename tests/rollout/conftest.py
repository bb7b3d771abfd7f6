"""One real vLLM server for all tests of this folder, whose start takes longer than they do, and one embedded engine."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest

from hpcrl.engines.embedded.rollout import Embedded
from hpcrl.engines.vllm.server import Server
from hpcrl.rollout.engines.base import Engine, Launched
from hpcrl.rundir.commit import write_text
from tests.rollout.material import START_S, TOKEN, as_version, embedded_options, make_model, options, served

R = TypeVar("R")
WithEngine = Callable[[Callable[[Any], Coroutine[Any, Any, R]]], R]


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker in this process reports every 200 ms, not every 5 s: reports bring what the controller no longer wants."""
    monkeypatch.setattr("hpcrl.rollout.worker.RENEW_S", 0.2)


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


@pytest.fixture(scope="session")
def embedded(models: list[Path]) -> Iterator[Embedded]:
    engine = Embedded(embedded_options(models[0]))
    engine.wait_ready(START_S)
    yield engine
    engine.stop()


def runner(launched: Launched, model: Path) -> WithEngine[Any]:
    """Return what runs a coroutine function on an engine, which holds the model as version 0."""

    def run(play: Callable[[Engine], Coroutine[Any, Any, R]]) -> R:
        async def main() -> R:
            engine = launched.connect()
            try:
                await engine.update_weights(as_version(model, 0))
                return await play(engine)
            finally:
                await engine.close()

        return asyncio.run(main())

    return run


@pytest.fixture
def with_engine(server: Server, models: list[Path]) -> WithEngine[Any]:
    """Run a coroutine function on a client of the server, which holds the first model as version 0."""
    return runner(server, models[0])


@pytest.fixture(params=["vllm", "transformers"])
def launched(request: pytest.FixtureRequest) -> Launched:
    """Each of the engines."""
    return request.getfixturevalue("server" if request.param == "vllm" else "embedded")


@pytest.fixture
def with_each_engine(launched: Launched, models: list[Path]) -> WithEngine[Any]:
    """The same on each of the engines."""
    return runner(launched, models[0])


@pytest.fixture
def short_path() -> Iterator[Path]:
    """A place whose path leaves room for the names of sockets."""
    with tempfile.TemporaryDirectory(dir="/tmp") as path:
        yield Path(path)
