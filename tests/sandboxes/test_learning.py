"""configs/fix_line.toml as it is, as an ordinary user: a tiny policy learns by the tools of a sandbox.

Slow; see docs/development.md.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import httpx
import pytest

from hpcrl.rundir.layout import Run
from tests.jobs.small_run import curve, eval_score, logs_of
from tests.paths import CONFIGS, ROOT
from tests.sandboxes.material import python_of_users

STEPS = 12


def hpcrl(*words: str, cwd: Path, timeout: float = 600) -> subprocess.CompletedProcess[str]:
    """Run a command with a Python that the ordinary user of the tests has."""
    packages = f"{ROOT}:{Path(httpx.__file__).parents[1]}"
    environment = os.environ | {"PYTHONPATH": packages, "TMPDIR": str(cwd), "HOME": str(cwd)}
    command = [python_of_users(), "-m", "hpcrl.cli.main", *words]
    return subprocess.run(
        command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=timeout, check=False
    )


@pytest.mark.slow
def test_a_policy_learns_to_correct_a_line(user: Path) -> None:
    """Greedy decoding writes `+` at the start, which is right for a third of the scripts."""
    subprocess.run([python_of_users(), CONFIGS / "fix_line" / "image.py", "image"], cwd=user, check=True)
    added = hpcrl("image", "add", "shell", "image", "--root", "runs", cwd=user)
    assert added.returncode == 0, added.stderr
    words = ["submit", str(CONFIGS / "fix_line.toml"), "--local", "--follow", "trainer.run_name=learns"]
    done = hpcrl(*words, cwd=user, timeout=3600)
    run = Run(user / "runs" / "fix_line" / "learns")
    assert done.returncode == 0, done.stderr + logs_of(run)
    before, after = eval_score(run, 0), eval_score(run, STEPS)
    print(f"fix_line: {before:.3f} -> {after:.3f}")
    assert set(curve(run, "generate/failed_samples").values()) == {0.0}
    assert before == pytest.approx(1 / 3)
    assert after >= 0.9
