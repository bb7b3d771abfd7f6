"""The clock that stands still while its process is stopped."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

from hpcrl.runtime.heartbeat import SuspendAwareClock

LOOKS = """
import time
from hpcrl.runtime.heartbeat import SuspendAwareClock
clock, end = SuspendAwareClock(0.2), time.monotonic() + 3
while time.monotonic() < end:
    time.sleep(0.05)
    now = clock.now()
    print("looked", flush=True)
print(now)
"""


def test_it_runs_with_its_process() -> None:
    before = time.monotonic()
    clock = SuspendAwareClock(60.0)
    after = time.monotonic()
    for _ in range(5):
        time.sleep(0.05)
        least = time.monotonic() - after
        shown = clock.now()
        assert least <= shown <= time.monotonic() - before


def test_it_stands_still_while_its_process_is_stopped() -> None:
    with subprocess.Popen([sys.executable, "-c", LOOKS], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "looked\n"
        os.kill(process.pid, signal.SIGSTOP)
        time.sleep(2)
        os.kill(process.pid, signal.SIGCONT)
        said, _ = process.communicate(timeout=20)
    assert float(said.splitlines()[-1]) < 2.0
