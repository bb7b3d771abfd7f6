"""What holds for all tests, before anything imports torch: how threads wait, which tests share a process under `pytest -n`, and what is made once."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from xdist.remote import Producer
from xdist.scheduler import LoadScopeScheduling

from tests.paths import ON_GPU

# what is expected was computed on CPUs, and ranks are forked from a process that may have begun to use a GPU
if Path("/dev/nvidiactl").exists() and not ON_GPU:
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
# several processes test at a time: waiting threads of one would take the cores from the others
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
# a shell's background job ignores it, and so would all that the tests start and interrupt
signal.signal(signal.SIGINT, signal.default_int_handler)

GROUPS = {
    "tests/faults/": "cluster",
    "tests/slurm/": "cluster",
    "tests/rollout/": "engine",
    "tests/trainer/backends/megatron/": "megatron",
    "tests/trainer/scoring/test_megatron.py": "megatron",
    "tests/trainer/": "ranks",
    "tests/planning/": "ranks",
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


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    order = list(dict.fromkeys(GROUPS.values()))
    places = {group: place for place, group in enumerate(order)}
    items.sort(key=lambda item: places.get(_group(item.nodeid.partition("::")[0]), len(order)))


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
