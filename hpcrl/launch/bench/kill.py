"""Kills a process of a run on its node, for `hpcrl bench`, and prints the time.

python -m hpcrl.launch.bench.kill RUN_DIRECTORY ATTEMPT PROCESS
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

from hpcrl.errors import RunError
from hpcrl.launch.attach.profile_remote import find
from hpcrl.rundir.layout import Run


def main(path: str, attempt: str, process: str) -> None:
    try:
        pid = find(Run(Path(path)), int(attempt), process)
    except RunError as error:
        sys.exit(f"hpcrl: {error}")
    os.kill(pid, signal.SIGKILL)
    print(time.time())


if __name__ == "__main__":
    main(*sys.argv[1:])
