"""A worker whose engine shares the trainer's devices: it sleeps when the controller says so, and wakes with the next version."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hpcrl.engines.vllm.server import Server
from hpcrl.observe.metrics import merged
from hpcrl.rundir.layout import Run
from tests.rollout.conftest import WithEngine
from tests.rollout.controller import FakeController
from tests.rollout.material import wait_for
from tests.rollout.test_worker import assert_said_by, controller, item, publish, run, start

__all__ = ["controller", "run"]  # fixtures


def test_an_engine_sleeps_while_the_trainer_has_its_devices(
    run: Run, controller: FakeController, server: Server, with_engine: WithEngine[Any], models: list[Path]
) -> None:
    """What it was given with the news is generated and handed over first; it wakes with the next version, and reports meanwhile."""
    controller.work.append(item("g1"))
    controller.trains = True
    thread, failed = start(run, server, with_engine)
    try:
        wait_for(lambda: controller.leases >= 3, 60, f"it does not ask for the lease, {failed}")
        assert [meta.group_id for meta in controller.completed] == ["g1"]
        wait_for(
            lambda: any(one["state"] == "asleep" for one in controller.reports), 30, "it does not say that it sleeps"
        )
        publish(run, 1, models[1])
        controller.work.append(item("g2"))
        controller.version, controller.trains = 1, False
        wait_for(lambda: len(controller.completed) == 2, 30, f"no g2, {failed}")
    finally:
        controller.stop = "finished"
        thread.join(30)
    assert not failed
    assert not thread.is_alive()
    for version, meta in enumerate(controller.completed):
        assert (meta.oldest_version, meta.newest_version) == (version, version)
        assert_said_by(models[version], run, meta)
    metrics = merged(run)
    assert metrics[0]["generate/asleep_seconds/rollout-5"] > 0
    assert metrics[0]["weights/sleep_seconds/rollout-5"] > 0
    assert metrics[1]["weights/wake_seconds/rollout-5"] > 0
