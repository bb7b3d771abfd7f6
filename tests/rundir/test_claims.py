"""One of several jobs has a run: claims in the run directory."""

from __future__ import annotations

import json
from multiprocessing import get_context
from multiprocessing.synchronize import Barrier
from pathlib import Path

import pytest

from hpcrl.errors import RunError
from hpcrl.rundir.claims import RunClaim, claim, give_back, read_claim
from hpcrl.rundir.layout import Run


def test_a_run_is_claimed_given_back_and_claimed_by_another_job(tmp_path: Path) -> None:
    run = Run(tmp_path)
    assert read_claim(run) == RunClaim(0, None)
    assert claim(run, "7_0.0", read_claim(run))
    assert read_claim(run) == RunClaim(1, "7_0.0")
    give_back(run, "8_0.0")
    assert read_claim(run) == RunClaim(1, "7_0.0"), "only the job that has it gives it back"
    give_back(run, "7_0.0")
    assert read_claim(run) == RunClaim(2, None)
    assert claim(run, "8_0.0", read_claim(run))
    assert not claim(run, "7_0.1", RunClaim(2, None)), "it has seen no later claim, and there is one"
    assert read_claim(run) == RunClaim(3, "8_0.0")


def claim_each(job: int, runs: list[Run], together: Barrier, had: Path) -> None:
    """Claim run after run, each at the moment at which the others do; note which ones this job has."""
    own = list[bool]()
    for run in runs:
        together.wait(60)
        own.append(claim(run, f"{job}_0.0", RunClaim(0, None)))
    had.write_text(json.dumps(own))


def test_of_several_that_claim_at_once_one_has_the_run(tmp_path: Path) -> None:
    runs = [Run(tmp_path / str(number)) for number in range(100)]
    for run in runs:
        run.claims.mkdir(parents=True)
    context = get_context("fork")
    together, notes = context.Barrier(3), [tmp_path / f"{job}.json" for job in range(3)]
    jobs = [context.Process(target=claim_each, args=(job, runs, together, note)) for job, note in enumerate(notes)]
    for job in jobs:
        job.start()
    for job in jobs:
        job.join()
    assert [job.exitcode for job in jobs] == [0, 0, 0]
    for run, *had in zip(runs, *(json.loads(note.read_text()) for note in notes), strict=True):
        assert sorted(had) == [False, False, True]
        assert read_claim(run) == RunClaim(1, f"{had.index(True)}_0.0")


@pytest.mark.parametrize("text", ["", "{", "[]", '{"start": 7}', "{}"])
def test_a_damaged_claim_names_its_file_and_the_remedy(tmp_path: Path, text: str) -> None:
    run = Run(tmp_path)
    assert claim(run, "7_0.0", read_claim(run))
    (run.claims / "000002.json").write_text(text)
    with pytest.raises(RunError, match=r"000002\.json is damaged.*remove it: the claim before it then counts"):
        read_claim(run)
