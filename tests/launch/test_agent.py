"""The agent of a trainer node over stand-ins for the jobs, with real torchrun."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from hpcrl.config import Config
from hpcrl.run.commit import write_text
from hpcrl.run.layout import Run
from hpcrl.run.ledger import open_attempt, read_outcome

QUICKSTART = Path(__file__).parents[2] / "configs" / "quickstart.toml"

AGENT = """
import sys
from pathlib import Path
from hpcrl.config import Config
from hpcrl.launch.agent import Agent
from hpcrl.launch.place import Place
from hpcrl.run.layout import Run
from hpcrl.run.ledger import read_attempts
run = Run(Path(sys.argv[1]))
place = Place(0, ["here"], "local-1", 0, True)
Agent(run, Config.from_toml([run.config]), place, read_attempts(run)[-1]).supervise()
"""
TRAINER = """
import sys, time
from pathlib import Path
from hpcrl.run.layout import Run
from hpcrl.run.lease import LeaseWriter
lease = LeaseWriter(Run(Path(sys.argv[1])), "trainer", 1)
lease.say("saving")
time.sleep(1)
(Path(sys.argv[1]) / "saved").touch()
lease.say("stopped")
"""
CONTROLLER = """
import sys, time
from pathlib import Path
from hpcrl.run.layout import Run
from hpcrl.run.lease import trainer_left
while not trainer_left(Run(Path(sys.argv[1])), 1):
    time.sleep(0.1)
time.sleep(4)  # the agent sees the trainer end first
sys.exit("RunError: step 3: no good groups")
"""


def test_a_trainer_that_saved_and_left_does_not_hide_the_controllers_failure(tmp_path: Path) -> None:
    run = Run(tmp_path / "run")
    write_text(run.config, Config.from_toml([QUICKSTART]).to_toml())
    open_attempt(run, "local-1", ["here"])
    for name, program in (("train", TRAINER), ("controller", CONTROLLER)):
        write_text(run.code / "jobs" / f"{name}.py", program)
    subprocess.run([sys.executable, "-c", AGENT, str(run.path)], check=True, timeout=120, capture_output=True)
    outcome = read_outcome(run)
    assert outcome is not None
    assert (run.path / "saved").exists()
    assert outcome.kind == "failed"
    assert "controller: RunError: step 3: no good groups" in outcome.message
