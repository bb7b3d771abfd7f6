"""What holds for all tests, before anything imports torch: how threads wait, which tests share a process under `pytest -n`, and what is made once."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from xdist.remote import Producer
from xdist.scheduler import LoadScopeScheduling

from tests.paths import ON_GPU, ROOT

# what is expected was computed on CPUs, and ranks are forked from a process that may have begun to use a GPU
if Path("/dev/nvidiactl").exists() and not ON_GPU:
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
# several processes test at a time: waiting threads of one would take the cores from the others
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
# a shell's background job ignores it, and so would all that the tests start and interrupt
signal.signal(signal.SIGINT, signal.default_int_handler)

GROUPS = {
    "tests/planning/": "ranks",  # the longest: what begins last of long groups ends alone
    "tests/faults/": "cluster",
    "tests/slurm/": "cluster",
    "tests/rollout/": "engine",
    "tests/trainer/backends/megatron/": "megatron",
    "tests/trainer/scoring/test_megatron.py": "megatron",
    "tests/trainer/": "ranks",
    "tests/jobs/": "runs",
}
"""Tests of these folders share a process, one after the other, the longest first: a cluster, an engine, ranks start once. Others share one with their file."""


def _group(path: str) -> str:
    return next((group for folder, group in GROUPS.items() if path.startswith(folder)), path)


class GroupScheduling(LoadScopeScheduling):
    """xdist's own `--dist loadgroup` marks the ids of tests, which pytest 9.2 no longer lets it do."""

    def _split_scope(self, nodeid: str) -> str:
        return _group(nodeid.partition("::")[0])


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> GroupScheduling:
    return GroupScheduling(config, log)


def pytest_configure(config: pytest.Config) -> None:
    """Let each worker begin to collect elsewhere: what one has compiled, the others read."""
    worker: dict[str, Any] | None = getattr(config, "workerinput", None)
    if worker and config.args == config.getini("testpaths"):
        tests = ROOT / "tests"
        places = sorted({str(tests / path.relative_to(tests).parts[0]) for path in tests.rglob("test_*.py")})
        begin = len(places) * int(worker["workerid"].removeprefix("gw")) // worker["workercount"]
        config.args = places[begin:] + places[:begin]


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Collect with no garbage collection, which would look at all that is imported again and again."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    order = list(dict.fromkeys(GROUPS.values()))
    places = {group: place for place, group in enumerate(order)}

    def place(item: pytest.Item) -> tuple[int, str]:
        path = item.nodeid.partition("::")[0]
        return places.get(_group(path), len(order)), path  # workers have to agree, wherever they began

    items.sort(key=place)


@pytest.fixture(scope="session")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model."""
    from tests.trainer.material import write_model

    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def alone() -> Iterator[Any]:
    """A World of one rank: this process."""
    from tests.trainer.material import world_of_one

    with world_of_one() as world:
        yield world


@pytest.fixture(scope="session")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Two Ranks that live as long as the tests."""
    from tests.trainer.ranks import Ranks

    ranks = Ranks(tmp_path_factory.mktemp("ranks"))
    yield ranks
    ranks.close()
