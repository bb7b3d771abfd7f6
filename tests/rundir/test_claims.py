"""One of several jobs has a run: claims in the run directory."""

from __future__ import annotations

import os
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


def test_of_several_that_claim_at_once_one_has_the_run(tmp_path: Path) -> None:
    for number in range(100):
        run = Run(tmp_path / str(number))
        run.claims.mkdir(parents=True)
        children = []
        for job in range(3):
            child = os.fork()
            if child == 0:
                os._exit(0 if claim(run, f"{job}_0.0", RunClaim(0, None)) else 1)
            children.append(child)
        ends = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
        assert sorted(ends) == [0, 1, 1]
        assert read_claim(run) == RunClaim(1, f"{ends.index(0)}_0.0")


@pytest.mark.parametrize("text", ["", "{", "[]", '{"start": 7}', "{}"])
def test_a_damaged_claim_names_its_file_and_the_remedy(tmp_path: Path, text: str) -> None:
    run = Run(tmp_path)
    assert claim(run, "7_0.0", read_claim(run))
    (run.claims / "000002.json").write_text(text)
    with pytest.raises(RunError, match=r"000002\.json is damaged.*remove it: the claim before it then counts"):
        read_claim(run)
