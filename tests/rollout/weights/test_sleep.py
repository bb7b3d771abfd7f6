"""A worker whose engine shares the trainer's devices: it sleeps when the controller says so, and wakes with the next version."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch

from hpcrl.engines.vllm.server import Server
from hpcrl.observe.metrics import merged
from hpcrl.rundir.layout import Run
from tests.rollout.conftest import WithEngine
from tests.rollout.controller import FakeController
from tests.rollout.material import close, logprobs, rows_of, slowly, wait_for
from tests.rollout.test_worker import assert_said_by, controller, item, publish, run, start

__all__ = ["controller", "run"]  # fixtures


def test_an_engine_sleeps_while_the_trainer_has_its_devices(
    run: Run, controller: FakeController, server: Server, with_engine: WithEngine[Any], models: list[Path]
) -> None:
    """It wakes with the next version, and reports meanwhile."""
    controller.work.append(item("g1"))
    thread, failed = start(run, server, with_engine, shares_gpus=True)
    try:
        wait_for(lambda: len(controller.completed) == 1, 60, f"no g1, {failed}")
        controller.trains = True
        wait_for(lambda: controller.leases >= 3, 60, f"it does not ask for the lease, {failed}")
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


def test_groups_that_sleep_interrupts_go_on_with_the_next_version(
    run: Run, controller: FakeController, server: Server, with_engine: WithEngine[Any], models: list[Path]
) -> None:
    """Each token has its own version."""
    with slowly(models[0]):
        thread, failed = start(run, server, with_engine, shares_gpus=True)
        try:
            controller.work.append(item("g1"))
            wait_for(lambda: not controller.work, 60, f"no g1, {failed}")
            time.sleep(1.0)  # of the 4 that it takes
            controller.trains = True
            wait_for(lambda: state(controller) == "asleep", 60, f"it does not sleep, {failed}")
            held = controller.reports[-1]["holding"]
            assert (held, controller.completed) == (["g1"], [])
            publish(run, 1, models[1])
            controller.version, controller.trains = 1, False
            wait_for(lambda: len(controller.completed) == 1, 60, f"it does not finish g1, {failed}")
        finally:
            controller.stop = "finished"
            thread.join(30)
    assert not failed
    (meta,) = controller.completed
    assert (meta.oldest_version, meta.newest_version) == (0, 1)
    for sample in rows_of(run, meta):
        chosen = sample.loss_mask > 0
        prompt, said = sample.token_ids[~chosen].tolist(), sample.token_ids[chosen].tolist()
        of_each = torch.stack([logprobs(model, prompt, said) for model in models[:2]])
        expected = of_each.gather(0, sample.versions[chosen].long()[None])[0]
        assert close(sample.rollout_logprobs[chosen], expected)


def state(controller: FakeController) -> str:
    return controller.reports[-1]["state"] if controller.reports else ""
