"""Scenarios run at the same time, each on nodes of its own of one cluster: they mostly wait, for Slurm and for imports.

A test here that takes `scenario` is a scenario. The first of them that pytest comes to starts them all, in their order and a few at a time;
each test then waits for its own scenario's end and has its result.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from tests.faults.history import assert_ended, curves_of
from tests.faults.scenario import Scenario
from tests.slurm.conftest import DevCluster, lent, needs_slurm  # noqa: F401  the last is a fixture

AT_ONCE = 4
NODES = 10
USUAL_NODES = 2


class Scenarios:
    """All scenarios of this session."""

    def __init__(self, cluster: DevCluster, directory: Callable[[str], Path], items: list[pytest.Function]) -> None:
        self._cluster, self._directory = cluster, directory
        self._free = [f"n{i}" for i in range(1, NODES + 1)]
        self._changed = threading.Condition()
        self.ended = threading.Event()
        self._pool = ThreadPoolExecutor(AT_ONCE, thread_name_prefix="scenario")
        self.uninterrupted = self._pool.submit(self._run, "uninterrupted", Place(USUAL_NODES, ()), _uninterrupted)
        self._futures: dict[str, Future[Any]] = {}
        for item in items:
            self._futures[item.nodeid] = self._pool.submit(self._run, item.name, _place(item), item.obj, **_given(item))

    def _run(self, name: str, place: Place, test: Callable[..., Any], **parameters: Any) -> Any:
        path = self._directory(name)
        with self._own(place) if place.options else self._taken(place.nodes) as (cluster, taken):
            others = [] if place.options else [f"n{i}" for i in range(1, NODES + 1) if f"n{i}" not in taken]
            scenario = Scenario(cluster, taken, others, path, self.ended, lambda: self.uninterrupted.result())
            try:
                return test(scenario=scenario, **parameters)
            finally:
                scenario.end()

    @contextmanager
    def _own(self, place: Place) -> Iterator[tuple[DevCluster, list[str]]]:
        with (
            TemporaryDirectory(prefix="hpcrl-") as directory,  # sockets want a short path
            lent(Path(directory), place.nodes, *place.options) as cluster,
        ):
            yield cluster, [f"n{i}" for i in range(1, place.nodes + 1)]

    @contextmanager
    def _taken(self, count: int) -> Iterator[tuple[DevCluster, list[str]]]:
        with self._changed:
            self._changed.wait_for(lambda: len(self._free) >= count or self.ended.is_set())
            # in the order in which Slurm lists them, whatever order they came back in
            taken, self._free = sorted(self._free[:count], key=lambda name: int(name[1:])), self._free[count:]
        try:
            yield self._cluster, taken
        finally:
            with self._changed:
                self._free = [*self._free, *taken]
                self._changed.notify_all()

    def result(self, item: pytest.Item) -> Any:
        return self._futures[item.nodeid].result()

    def close(self) -> None:
        self.ended.set()
        with self._changed:
            self._changed.notify_all()
        self._pool.shutdown(cancel_futures=True)


@dataclass(frozen=True)
class Place:
    """What a scenario needs: how many nodes, and options of a cluster that is its own (none: it shares the one of all)."""

    nodes: int
    options: tuple[str, ...]


def _place(item: pytest.Function) -> Place:
    nodes, own = item.get_closest_marker("nodes"), item.get_closest_marker("own_cluster")
    return Place(nodes.args[0] if nodes else USUAL_NODES, own.args if own else ())


def _given(item: pytest.Function) -> dict[str, Any]:
    return dict(item.callspec.params) if hasattr(item, "callspec") else {}


def _uninterrupted(scenario: Scenario) -> dict[str, dict[int, float]]:
    """Run the one that nothing happens to, which the others are compared with."""
    run = scenario.submit(name="uninterrupted")
    assert_ended(scenario, run)
    return curves_of(run)


@pytest.fixture(scope="session")
def scenarios(
    needs_slurm: None,  # noqa: ARG001, F811
    tmp_path_factory: pytest.TempPathFactory,
    request: pytest.FixtureRequest,
) -> Iterator[Scenarios]:
    items = [item for item in request.session.items if isinstance(item, pytest.Function) and _is_scenario(item)]
    with lent(tmp_path_factory.mktemp("faults"), NODES) as cluster:
        scenarios = Scenarios(cluster, lambda name: tmp_path_factory.mktemp(re.sub(r"\W+", "-", name)[:32]), items)
        try:
            yield scenarios
        finally:
            scenarios.close()


def _is_scenario(item: pytest.Function) -> bool:
    return item.path.parent == Path(__file__).parent and "scenario" in item.fixturenames


@pytest.fixture
def scenario(scenarios: Scenarios) -> Scenarios:
    """What a scenario is given is made where it runs; a test only asks for the result."""
    return scenarios


def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    if not _is_scenario(pyfuncitem):
        return None
    pyfuncitem.funcargs["scenario"].result(pyfuncitem)
    return True
