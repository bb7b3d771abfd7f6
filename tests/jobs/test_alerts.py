"""A whole run on this machine that stops itself: an alert is raised, its command runs, and what was trained is saved."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpcrl.rundir.alerts import read_alerts
from hpcrl.rundir.commit import committed, write_text
from hpcrl.rundir.layout import Run, step_of
from hpcrl.rundir.ledger import read_outcome
from tests.jobs.small_run import SMALL, curve, finish, hpcrl, logs_of
from tests.paths import QUICKSTART


@pytest.mark.slow
def test_an_alert_stops_a_run_that_has_saved(place: Path, tmp_path: Path) -> None:
    program = tmp_path / "told.sh"
    write_text(program, '#!/bin/sh\necho "$HPCRL_ALERT_NAME $HPCRL_ALERT_STEP $1" >> told\n', mode=0o700)
    settings = [
        "trainer.alerts.rules.always={kind='above', metric='policy/policy_entropy', value=0, steps=2, stop=true}",
        f"trainer.alerts.command=['{program}', 'run $HOME']",
        "trainer.max_steps=500",
        "trainer.ckpt_interval=400",
        "trainer.eval_interval=0",
    ]
    done = hpcrl("submit", str(QUICKSTART), "--local", "trainer.run_name=told", *SMALL, *settings, cwd=place)
    assert done.returncode == 0, done.stderr
    run = Run.open(place / "runs" / "quickstart" / "told")
    assert finish(run, 1, 120) == "cancelled", logs_of(run)
    (alert,) = read_alerts(run)
    assert (alert.name, alert.begin.step, alert.told) == ("always", 2, True)
    assert (run.path / "told").read_text() == "always 2 run $HOME\n"
    outcome = read_outcome(run)
    assert outcome is not None
    assert outcome.message.startswith("saved and stopped (alert always: policy/policy_entropy is ")
    steps = list(curve(run, "timing/step"))
    assert 2 <= len(steps) < 400
    assert committed(run.checkpoints, step_of) == [outcome.step] == steps[-1:]
    status = hpcrl("status", "told", cwd=place).stdout
    assert status.startswith("told: cancelled: saved and stopped (alert always: ")
    assert "always at step 2: policy/policy_entropy is " in status
    assert "! always at step 2" in hpcrl("status", cwd=place).stdout
