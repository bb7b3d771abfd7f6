"""Leases on a filesystem that refuses to be written to."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpcrl import faults as fault
from hpcrl.rundir.layout import Run
from hpcrl.runtime.process_status import StatusWriter, read_process_statuses


def test_a_lease_is_not_worth_an_attempt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Run(tmp_path / "run")
    monkeypatch.setattr(fault, "_passed", fault.Counter())
    monkeypatch.setenv("HPCRL_FAULT", "process_status@1:raise=ENOSPC process_status@2:raise=EDQUOT")
    process_status = StatusWriter(run, "trainer", 1)
    process_status.write("loading")
    process_status.write("step 1/2")
    assert read_process_statuses(run) == []
    said = [line for line in capsys.readouterr().out.splitlines() if "could not be written" in line]
    assert len(said) == 1, "once is enough"
    assert "No space left on device; `hpcrl status` may not show this process" in said[0]
    process_status.write("step 2/2")
    assert [one.state for one in read_process_statuses(run)] == ["step 2/2"]
