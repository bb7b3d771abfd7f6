"""Fault points do what the environment says, at the passing that it names, and nothing else."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import time

import pytest

from hpcrl.faults import fault

PASS_THREE_TIMES = "from hpcrl.faults import fault\nfor i in range(3):\n  fault('here'); print('passed', i, flush=True)"


def run(wanted: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "HPCRL_FAULT": wanted}
    return subprocess.run(
        [sys.executable, "-c", PASS_THREE_TIMES], env=environment, capture_output=True, text=True, check=False
    )


def test_kill_at_the_named_passing() -> None:
    done = run("here@2:kill")
    assert done.returncode == -signal.SIGKILL
    assert "passed 0" in done.stdout
    assert "passed 1" not in done.stdout


def test_nothing_elsewhere_and_nothing_without_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "passed 2" in run("there:kill here@4:kill").stdout
    monkeypatch.delenv("HPCRL_FAULT", raising=False)
    fault("here")


def test_raise_and_sleep(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HPCRL_FAULT", "full:raise=ENOSPC slow:sleep=0.2 wrong:explode")
    with pytest.raises(OSError, match="full") as raised:
        fault("full")
    assert raised.value.errno == errno.ENOSPC
    began = time.monotonic()
    fault("slow")
    assert time.monotonic() - began >= 0.2
    with pytest.raises(ValueError, match="explode"):
        fault("wrong")
