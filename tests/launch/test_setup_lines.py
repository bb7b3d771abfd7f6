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
        (["source <(echo 'false; KEPT=1; return 4')", "export KEPT"], "line 1 (4)"),
        (["set -Eu", "load() {", "false", "KEPT=1", "}", "load", "export KEPT"], ""),
    ],
)
def test_lines_that_fail(setup: list[str], expected: str) -> None:
    lines = [*recorded_setup(setup), "false", 'echo "$KEPT"', ASK]
    environment = {FAILED: "line 9 (1), ", "PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"}
    done = subprocess.run(
        ["bash", "-c", "\n".join(lines)], capture_output=True, text=True, env=environment, timeout=60, check=True
    )
    assert done.stdout.splitlines() == ["1", expected]


def test_record_of_a_command_that_fails_in_a_loop_is_bounded() -> None:
    """A process can still be started: an environment has a length that Linux bounds."""
    lines = [*recorded_setup(["for i in {1..20000}; do false; done"]), ASK]
    environment = {"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"}
    script = "\n".join(lines)
    done = subprocess.run(
        ["bash", "-c", script], capture_output=True, text=True, env=environment, timeout=60, check=True
    )
    assert done.stdout.startswith("line 1 (1), line 1 (1)")
    assert len(done.stdout) < 300


def test_own_trap_of_a_setup_stays() -> None:
    lines = [*recorded_setup(["trap 'echo own' ERR"]), "false", *recorded_setup(["true"]), "false"]
    done = subprocess.run(
        ["bash", "-c", "\n".join([*lines, "true"])], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout == "own\n"


def test_without_a_setup_nothing_is_added() -> None:
    assert recorded_setup([]) == []
