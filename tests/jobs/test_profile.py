"""`hpcrl profile` of the processes of a real run."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpcrl.rundir.layout import Run
from hpcrl.rundir.ledger import read_outcome
from tests.jobs.small_run import finish, hpcrl, logs_of, wait_for
from tests.paths import QUICKSTART


@pytest.mark.slow
def test_each_role_is_sampled_while_the_run_goes_on(place: Path) -> None:
    done = hpcrl("submit", str(QUICKSTART), "--local", "trainer.run_name=mine", "trainer.max_steps=30", cwd=place)
    assert done.returncode == 0, done.stderr
    run = Run.open(place / "runs" / "quickstart" / "mine")
    wait_for(lambda: run.batch(2).exists() or read_outcome(run), lambda: logs_of(run), 240)
    for role, expected in (("trainer", "hpcrl/trainer/"), ("rollout", "hpcrl/rollout/"), ("controller", "hpcrl/")):
        found = hpcrl("profile", "mine", "--role", role, "--seconds", "2", "--format", "top", "--idle", cwd=place)
        assert found.returncode == 0, found.stderr
        assert "share of samples" in found.stdout
        assert expected in found.stdout
    assert hpcrl("profile", "mine", "--seconds", "1", cwd=place).stderr == "mine-rank-0.svg\n"
    assert (place / "mine-rank-0.svg").read_text().startswith("<?xml")
    assert finish(run, 1) == "done", logs_of(run)
    over = hpcrl("profile", "mine", "--seconds", "1", cwd=place)
    assert over.returncode == 5
    assert "is done: it has no processes now" in over.stderr
