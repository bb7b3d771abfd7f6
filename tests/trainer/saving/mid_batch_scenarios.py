"""What the tests of stop requests run in their ranks: mid_batch_scenarios.py JSON, a list of attempts of runs, each on the same ranks.

Each attempt is jobs/train.py's own work with the real controller; a fault point signals every rank, or one.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from hpcrl import faults as fault
from hpcrl.config import Config
from hpcrl.observe.timeline import Timeline
from hpcrl.rundir.checkpoints import line_of
from hpcrl.rundir.commit import committed
from hpcrl.rundir.layout import Run, position_of, step_of
from hpcrl.runtime.heartbeat import Heartbeat
from hpcrl.runtime.process_status import read_process_statuses
from hpcrl.trainer.distributed import World, joined
from hpcrl.trainer.stop import StopConsensus
from jobs.train import STOP, run_trainer
from tests.trainer.test_job import controller


def attempt(world: World, options: dict[str, Any]) -> None:
    """Make one attempt; rank 0 appends what is left of it to out."""
    run, number = Run.open(options["run"]), options["attempt"]
    os.environ["HPCRL_FAULT"] = options["fault"] if options["rank"] in (None, world.rank) else ""
    fault._passed.clear()
    STOP.seen, STOP.since, STOP.has_progress = False, None, False
    consensus = StopConsensus(world, STOP, Heartbeat(run, number, f"rank-{world.rank}"))
    with controller(run, number) if world.first else nullcontext():
        timeline = Timeline(run, f"rank-{world.rank}", number)
        run_trainer(run, number, Config.from_toml([options["config"]]), world, consensus, timeline, lambda _: None)
    has_progress = world.all_gather(lambda: STOP.has_progress)
    if world.first:
        said = next(
            process_status.state
            for process_status in read_process_statuses(run, number)
            if process_status.process == "trainer"
        )
        facts = {
            "said": said,
            "positions": [position_of(path) for path in line_of(run)],
            "has_progress": has_progress,
        }
        facts["exports"] = committed(run.exports, step_of)
        with Path(options["out"]).open("a") as file:
            file.write(json.dumps(facts) + "\n")
    world.barrier()


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO)
    with joined() as world:
        for options in json.loads(Path(sys.argv[1]).read_text()):
            attempt(world, options)
