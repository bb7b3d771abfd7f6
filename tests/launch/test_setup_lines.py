"""Lines of slurm.setup that fail are known to the job, and end nothing."""

from __future__ import annotations

import subprocess
import sys

import pytest

from hpcrl.launch.setup_lines import FAILED, recorded_setup
from tests.paths import ROOT

ASK = f"{sys.executable} -c 'from hpcrl.launch.setup_lines import failed_setup; print(failed_setup())'"


@pytest.mark.parametrize(
    ("setup", "expected"),
    [
        (["module load cuda/13.0", "KEY=secret false", "export KEPT=1"], "line 1 (127), line 2 (1)"),
        (["false || true", "[ -f /none ] && true", "if false; then :; fi", "export KEPT=$(echo 1)"], ""),
        (
            ["load() {\n  return 3\n}", "load KEY=secret", "if true; then", "false", "fi", "export KEPT=1"],
            "line 4 (3), line 6 (1)",
        ),
    ],
)
def test_lines_that_fail(setup: list[str], expected: str) -> None:
    lines = [*recorded_setup(setup), "false", 'echo "$KEPT"', ASK]
    environment = {FAILED: "line 9 (1), ", "PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"}
    done = subprocess.run(
        ["bash", "-c", "\n".join(lines)], capture_output=True, text=True, env=environment, timeout=60, check=True
    )
    assert done.stdout.splitlines() == ["1", expected]


def test_without_a_setup_nothing_is_added() -> None:
    assert recorded_setup([]) == []
