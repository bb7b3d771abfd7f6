"""Leases on a filesystem that refuses to be written to."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpcrl.run import fault
from hpcrl.run.layout import Run
from hpcrl.run.lease import LeaseWriter, read_leases


def test_a_lease_is_not_worth_an_attempt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Run(tmp_path / "run")
    monkeypatch.setattr(fault, "_passed", fault.Counter())
    monkeypatch.setenv("HPCRL_FAULT", "lease@1:raise=ENOSPC lease@2:raise=EDQUOT")
    lease = LeaseWriter(run, "trainer", 1)
    lease.say("loading")
    lease.say("step 1/2")
    assert read_leases(run) == []
    said = [line for line in capsys.readouterr().out.splitlines() if "could not be written" in line]
    assert len(said) == 1, "once is enough"
    assert "No space left on device; `hpcrl status` may not hear of this process" in said[0]
    lease.say("step 2/2")
    assert [one.state for one in read_leases(run)] == ["step 2/2"]
