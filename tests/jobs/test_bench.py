"""`hpcrl bench --local`: a run whose processes are killed, its report, and the same report again."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.jobs.small_run import hpcrl


@pytest.mark.faults_slow
def test_bench_of_this_machine(place: Path) -> None:
    done = hpcrl("bench", "--local", "--nodes", "1", "--minutes", "60", "trainer.run_name=b", cwd=place, timeout=3900)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((place / "b.json").read_text())
    found = {figure["key"]: figure for figure in report["figures"]}
    assert {figure["level"] for figure in report["figures"] if figure["part"] == "correct"} == {"ok"}
    for role in ("rollout", "trainer", "controller"):
        assert found[f"{role}_next_step_seconds"]["value"] > 0
    assert found["resumed_difference"]["value"] == 0
    assert found["estimated_memory"]["value"] > 0
    again = hpcrl("bench", "report", "b", "-o", "again", cwd=place)
    assert again.returncode == 0, again.stderr
    assert json.loads((place / "again" / "b.json").read_text())["figures"] == report["figures"]
    compared = hpcrl("bench", "compare", "b.json", "again/b.json", cwd=place)
    assert compared.returncode == 0, compared.stdout
