"""The first report of how an attempt ended is the one that stands, also on a filesystem without hard links."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from hpcrl import faults as fault
from hpcrl.rundir import commit as exclusive
from hpcrl.rundir.commit import place, write_json
from hpcrl.rundir.layout import Run
from hpcrl.rundir.ledger import outcome_of, read_outcomes, report_outcome


@pytest.fixture(params=["links", "EPERM", "EOPNOTSUPP"])
def run(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.setattr(fault, "_passed", fault.Counter())
    if request.param != "links":
        monkeypatch.setenv("HPCRL_FAULT", " ".join(f"link@{n}:raise={request.param}" for n in range(1, 40)))
    return Run(tmp_path / "run")


def test_the_first_report_stands(run: Run) -> None:
    assert report_outcome(run, 1, "failed", "the cause", "trainer-0").message == "the cause"
    assert report_outcome(run, 1, "failed", "a consequence", "agent-1").message == "the cause"
    assert [outcome.message for outcome in read_outcomes(run)] == ["the cause"]


def test_of_many_reports_all_read_the_same_one(run: Run) -> None:
    start, target = threading.Barrier(8), run.outcomes / "1.json"
    read: list[str] = []

    def report(number: int) -> None:
        write_json(run.outcomes / f".{number}", number)
        start.wait()
        place(run.outcomes / f".{number}", target)
        read.append(target.read_text())

    threads = [threading.Thread(target=report, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(read) == 8
    assert len(set(read)) == 1
    assert not [name for name in os.listdir(run.outcomes) if name[1:].isdigit()]


def test_who_claims_and_dies_is_not_waited_for_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(tmp_path / "run")
    monkeypatch.setattr(fault, "_passed", fault.Counter())
    monkeypatch.setenv("HPCRL_FAULT", "link:raise=EPERM")
    monkeypatch.setattr(exclusive, "_PATIENCE_S", 0.2)
    run.outcomes.mkdir(parents=True)
    (run.outcomes / ".1.json.claim").touch()
    report_outcome(run, 1, "lost", "it ended without a word", "the next attempt")
    assert outcome_of(run, 1) is not None
