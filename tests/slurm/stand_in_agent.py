"""Stands in for the agents of an attempt, as the step of a batch script: notes where two attempts of a run are alive at a time."""

import socket
import sys
import time
from pathlib import Path

from hpcrl.launch.requeue.requeue import start_name
from hpcrl.rundir.layout import Run
from hpcrl.rundir.ledger import open_attempt, report_outcome

run = Run(Path(sys.argv[1]))
attempt, alive = open_attempt(run, start_name(), [socket.gethostname()]), run.path / "alive"
try:
    alive.mkdir()
except FileExistsError:
    (run.path / "two").write_text(start_name())
time.sleep(1)
alive.rmdir()
report_outcome(run, attempt.number, "done", "finished", "agent-0")
