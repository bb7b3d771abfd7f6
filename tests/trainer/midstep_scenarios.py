"""What the tests of stop requests run under torchrun: midstep_scenarios.py JSON, a list of attempts of runs, each on the same ranks.

Each attempt is jobs/train.py's own work with the real controller; a fault point signals every rank.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from hpcrl.config import Config
from hpcrl.run import fault
from hpcrl.run.checkpoints import line_of
from hpcrl.run.commit import committed
from hpcrl.run.layout import Run, position_of, step_of
from hpcrl.run.lease import read_leases
from hpcrl.run.pulse import Pulse
from hpcrl.trainer.stop import Agreement
from hpcrl.trainer.world import World, joined
from jobs.train import STOP, work
from tests.trainer.test_job import controller


def attempt(world: World, options: dict[str, Any]) -> None:
    """Make one attempt; rank 0 appends what is left of it to out."""
    run, number = Run.open(options["run"]), options["attempt"]
    os.environ["HPCRL_FAULT"] = options.get("fault", "")
    fault._passed.clear()
    STOP.seen, STOP.since, STOP.at_stake = False, None, False
    agreement = Agreement(world, STOP, Pulse(run, number, f"rank-{world.rank}"))
    with controller(run, number) if world.first else nullcontext():
        work(run, number, Config.from_toml([run.config]), world, agreement, lambda: None)
    if world.first:
        said = next(lease.state for lease in read_leases(run, number) if lease.process == "trainer")
        facts = {"said": said, "positions": [position_of(path) for path in line_of(run)], "at_stake": STOP.at_stake}
        facts["exports"] = committed(run.exports, step_of)
        with Path(options["out"]).open("a") as file:
            file.write(json.dumps(facts) + "\n")
    world.barrier()


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO)
    with joined() as world:
        for options in json.loads(Path(sys.argv[1]).read_text()):
            attempt(world, options)
