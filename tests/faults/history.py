"""What has to be true of a run at its end, whatever happened to it: nothing lost, nothing doubled, nothing left."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from hpcrl.observe.metrics import MetricsReader, read_metrics
from hpcrl.observe.timeline import read_spans
from hpcrl.rundir.commit import is_committed, verify
from hpcrl.rundir.layout import Run
from hpcrl.rundir.ledger import read_attempts, read_outcome
from tests.faults.scenario import BATCH, STEPS, Scenario
from tests.jobs.small_run import curve, trained_groups
from tests.processes import processes_of

INTERRUPTED = "resilience/signal_to_commit_seconds"
CURVES = ("policy/policy_loss", "policy/grad_norm", "reward/avg_raw_reward")
LEAVING_S = 400.0  # it may be about to start once more


def assert_ended(scenario: Scenario, run: Run, kind: str = "done") -> None:
    """Assert how a run ended, and that no process and no job of it is left."""
    scenario.wait(lambda: not scenario.queued(run), f"{run.name} leaves the queue", LEAVING_S, run)
    scenario.wait(lambda: not processes_of(run), f"no process of {run.name} is left", 15, run)
    outcome = read_outcome(run)
    assert outcome, scenario.report(run)
    assert outcome.kind == kind, f"{outcome}\n{scenario.report(run)}"
    status = scenario.told("status", run.name)
    assert f"{run.name}: {kind}" in status, status


def assert_nothing_lost(
    scenario: Scenario, run: Run, kind: str = "done", steps: int = STEPS, *, same_values: bool = True
) -> None:
    """Assert that a run has ended, and that its history is that of one that nothing ever happened to.

    Args:
        steps: that it has trained.
        same_values: whether its losses have to be those of the uninterrupted run, to 1e-6.
    """
    assert_ended(scenario, run, kind)
    trained = trained_groups(run)
    assert len(trained) >= steps, f"{len(trained)} batches of {steps}\n{scenario.report(run)}"
    assert_groups_once(run, len(trained) * BATCH)
    if kind == "done":
        assert len(trained) == steps
    assert_commits_load(run, steps)
    assert_single_valued(run, steps)
    if same_values:
        for name, expected in scenario.uninterrupted().items():
            wanted = {step: value for step, value in expected.items() if step <= steps}
            found = {step: value for step, value in curve(run, name).items() if step in wanted}
            assert found == pytest.approx(wanted, rel=1e-6, abs=1e-6), f"{name} differs"


def assert_groups_once(run: Run, count: int | None = None) -> None:
    """Assert that a run has trained the first `count` groups, each once; None: as many as it has trained."""
    groups = Counter(group for step in trained_groups(run) for group in step)
    expected = Counter(f"g{index:08d}" for index in range(len(groups) if count is None else count))
    assert groups == expected, "each group once"


def assert_commits_load(run: Run, newest: int) -> None:
    """Assert that every committed checkpoint has the files that its manifest names, byte for byte, and that the newest is there."""
    for path in checkpoints_of(run):
        verify(path, checksums=True)
    saved = last_saved(run)
    assert saved[0] == newest, f"{saved}, expected the newest checkpoint to be of step {newest}"


def assert_single_valued(run: Run, steps: int) -> None:
    """Assert one value per step and name, for every step, in the metrics and in TensorBoard.

    Of what the trainer reports only how long an interruption took may come twice: an attempt may end before it has trained anything.
    What the controller tells of a batch stands there before it is trained: a run that is cancelled may have that of one more.
    """
    every = list(range(1, steps + 1))
    assert_reported_once(run)
    values = Counter((record.step, name) for record in read_metrics(run) for name in record.metrics)
    assert set(values.values()) == {1}, "one value of each name at each step"
    for name in CURVES:
        assert list(curve(run, name)) in (every, [*every, steps + 1]), name
    events = EventAccumulator(str(run.events), size_guidance={"scalars": 0})
    events.Reload()
    for name in CURVES:
        assert [event.step for event in events.Scalars(name)] == list(curve(run, name)), f"{name} in TensorBoard"
    for name in events.Tags()["scalars"]:
        points = Counter(event.step for event in events.Scalars(name))
        assert max(points.values()) == 1, f"{name} has two points at one step"


def assert_reported_once(run: Run) -> None:
    """Assert that no attempt of the trainer has reported what another one had reported before, and no step anything twice."""
    told = MetricsReader(run).poll()[0]
    reports = Counter(
        (r.step, name) for r in told if r.process == "trainer" for name in r.metrics if name != INTERRUPTED
    )
    assert [key for key, count in reports.items() if count > 1] == [], "trained twice in the history"


def assert_one_attempt_at_a_time(run: Run) -> None:
    """Assert that no process of an attempt did anything once the next one had begun; all nodes have the same clock."""
    spans = read_spans(run)
    for attempt, later in pairwise(read_attempts(run)):
        assert max(span.end for span in spans if span.attempt == attempt.number) <= later.started, later


def curves_of(run: Run) -> dict[str, dict[int, float]]:
    return {name: curve(run, name) for name in CURVES}


def last_trained(run: Run) -> int:
    """Return the newest step with metrics of its training."""
    return max(curve(run, "policy/grad_norm"), default=0)


def last_saved(run: Run) -> tuple[int, int]:
    """Return the step of the newest checkpoint, and the optimizer steps of the next one that it has."""
    return max((_position(path) for path in checkpoints_of(run)), default=(0, 0))


def checkpoints_of(run: Run) -> list[Path]:
    """Return the committed checkpoints, also those inside a step."""
    return [path for path in run.checkpoints.glob("s*") if is_committed(path)]


def _position(path: Path) -> tuple[int, int]:
    step, _, updates = path.name.removeprefix("s").partition("u")
    return int(step), int(updates or 0)
