"""Stands in for the agents of an attempt, as the step of a batch script: lives until the run's other job has started and yielded, or for a while,
and notes where two attempts of a run are alive at a time.
"""

import socket
import sys
import time
from pathlib import Path

from hpcrl.launch.requeue.requeue import start_name
from hpcrl.rundir.layout import Run
from hpcrl.rundir.ledger import open_attempt, report_outcome

YIELDED = "goes back into the queue"
PATIENCE_S = 20.0

run = Run(Path(sys.argv[1]))
attempt, alive = open_attempt(run, start_name(), [socket.gethostname()]), run.path / "alive"
try:
    alive.mkdir()
except FileExistsError:
    (run.path / "two").write_text(start_name())
deadline = time.monotonic() + PATIENCE_S
while time.monotonic() < deadline and not any(YIELDED in path.read_text() for path in run.slurm.glob("*_batch.out")):
    time.sleep(0.2)
alive.rmdir()
report_outcome(run, attempt.number, "done", "finished", "agent-0")
