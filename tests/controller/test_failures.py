"""Environments that fail: a few samples cost nothing, many end the run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from hpcrl.controller.replicas import FailureWindow
from hpcrl.errors import UserCodeError
from hpcrl.observe.metrics import merged
from tests.controller.test_admission import meta
from tests.controller.test_api import finish, make_run
from tests.controller.test_service import service


def failed(index: int, count: int) -> list[str]:
    return [f"group {index}: sample {sample} failed" for sample in range(count)]


@pytest.mark.parametrize(
    ("counts", "ends"), [([0, 2, 0], False), ([0, 2, 1], True), ([4, 4, 0], True), ([2, 0, 0, 0, 2], False)]
)
def test_as_many_of_the_newest_samples_as_a_step_has(counts: list[int], ends: bool) -> None:
    """At most half of four samples in two groups."""
    failures = FailureWindow(0.5, groups=2)
    found = [
        failures.add(replace(meta(at, 0), rewards=[0.0] * 2, failures=failed(at, count)))
        for at, count in enumerate(counts)
    ]
    assert found[0] is None, "one group is not a step"
    assert any(found) == ends


def test_a_run_whose_environment_always_fails_ends_with_the_last_failure(tmp_path: Path) -> None:
    run = make_run(tmp_path / "project" / "run")
    controller = service(run, eval_interval=0, max_failed_ratio=0.25)
    controller.start(0)
    groups = [finish(run, item, 0) for item in controller.claim("rollout-0", 0, 2)]
    assert len(groups) == 2
    controller.complete([replace(groups[0], failures=failed(0, 2))])
    assert controller.failure is None
    controller.complete([groups[1]])
    assert isinstance(controller.failure, UserCodeError)
    assert "2 of the newest 4 samples" in str(controller.failure)
    assert "environment.max_failed_ratio = 0.25; the last: group 0: sample 1 failed" in str(controller.failure)


def test_failed_samples_are_counted(tmp_path: Path) -> None:
    run = make_run(tmp_path / "project" / "run")
    controller = service(run, eval_interval=0)
    controller.start(0)
    first, second = (finish(run, item, 0) for item in controller.claim("rollout-0", 0, 2))
    controller.complete([replace(first, failures=failed(0, 1)), second])
    assert controller.batch(1) is not None
    assert merged(run)[1]["generate/failed_samples"] == 1
