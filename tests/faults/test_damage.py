"""Files of a run that are damaged while it goes on (scenario 42): whoever reads them next says so, and nothing is trained that was not meant."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from signal import SIGCONT, SIGKILL, SIGSTOP

import pytest

from hpcrl.rundir.layout import Run
from hpcrl.rundir.ledger import read_attempts
from tests.faults.history import assert_nothing_lost
from tests.faults.scenario import Scenario
from tests.jobs.small_run import groups_in, trained_groups
from tests.processes import send

COMPOSED_S = 5.0


def flip(path: Path) -> None:
    """Flip a bit in the middle of a file."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@contextmanager
def stopped(scenario: Scenario, run: Run) -> Iterator[int]:
    """Stop the trainer until a batch comes that it cannot have read; yield its step."""
    ranks = [scenario.rank(run)]
    try:
        send(ranks, SIGSTOP)
        batches = len(trained_groups(run))
        while not scenario.pause(COMPOSED_S) and len(trained_groups(run)) == batches:
            # it was stopped when all that may be composed ahead of it was there
            send(ranks, SIGCONT)
            scenario.wait(lambda count=batches: len(trained_groups(run)) > count, "a step", 60, run)
            send(ranks, SIGSTOP)
            batches = len(trained_groups(run))
        yield batches + 1
    finally:
        send(ranks, SIGCONT)


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "changed": (flip, "is damaged"),
    "cut": (lambda path: path.write_bytes(path.read_bytes()[:-20]), "is damaged"),
    "deleted": (lambda path: path.unlink(), "is missing"),
}


@pytest.mark.faults_slow
@pytest.mark.parametrize("damage", DAMAGES)
def test_42_samples_are_damaged_before_they_are_read(scenario: Scenario, damage: str) -> None:
    """The attempt ends with their name, and the next one generates them again, the same as before."""
    change, said = DAMAGES[damage]
    run = scenario.submit({"trainer.fully_async.max_staleness_steps": 1})
    scenario.reach(run, 4)
    with stopped(scenario, run) as step:
        victim = trained_groups(run)[step - 1][0]
        change(next(path for path, group in groups_in(run) if group.group_id == victim))
    outcome = scenario.outcome(run, 1, 90)
    assert outcome.kind == "failed"
    assert victim in outcome.message
    assert said in outcome.message
    assert_nothing_lost(scenario, run, same_values=False)
    assert len(read_attempts(run)) == 2


@pytest.mark.faults_slow
def test_42_a_batch_is_damaged_before_it_is_read(scenario: Scenario) -> None:
    """The attempt ends with its name, and the next one composes it again."""
    run = scenario.submit({"trainer.fully_async.max_staleness_steps": 1})
    scenario.reach(run, 4)
    with stopped(scenario, run) as step:
        flip(run.batch(step))
    outcome = scenario.outcome(run, 1, 90)
    assert outcome.kind == "failed"
    assert run.batch(step).name in outcome.message
    assert_nothing_lost(scenario, run, same_values=False)


@pytest.mark.faults_slow
@pytest.mark.parametrize("file", ["config.toml", "code/hpcrl/algorithms/losses.py"])
def test_42_a_worker_that_starts_late_does_not_run_what_nobody_submitted(scenario: Scenario, file: str) -> None:
    """Its attempt ends with the file's name; once the file is what it was, the run can be resumed."""
    run = scenario.submit()
    scenario.reach(run, 4)
    path = run.path / file
    meant = path.read_text()
    path.write_text(meant + "\n# an afterthought\n")
    send([scenario.worker(run)], SIGKILL)
    outcome = scenario.outcome(run, 1, 90)
    path.write_text(meant)
    assert outcome.kind == "failed"
    assert f"{file} was changed" in outcome.message
    scenario.wait(lambda: not scenario.queued(run), "its end", 60, run)
    assert "Put it back, or `hpcrl resume run`" in scenario.told("status", str(run.path))
    done = scenario.hpcrl("resume", str(run.path))
    assert done.returncode == 0, done.stdout + done.stderr
    assert_nothing_lost(scenario, run)
