"""Host memory, compared with what a process is known to hold."""

from __future__ import annotations

import subprocess
import sys

from hpcrl.runtime.memory import resident, resident_with_children

PROGRAM = "import subprocess, sys; held = b'x' * (80 << 20); print(flush=True); input()"
PARENT = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {PROGRAM!r}])"


def test_a_process_and_what_it_has_started() -> None:
    process = subprocess.Popen([sys.executable, "-c", PARENT], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout
    process.stdout.readline()
    assert 1 << 20 < resident(process.pid) < 60 << 20
    assert 80 << 20 < resident_with_children(process.pid) < 200 << 20
    process.communicate(b"\n", timeout=20)
    assert resident_with_children(process.pid) == 0
    assert resident() > 1 << 20
