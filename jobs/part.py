"""One node's part of an engine that is on several nodes: python jobs/part.py RUN

consumes   endpoints/, where the rollout worker on the engine's first node says where its processes meet
waits for  that, and then for a newer one, for which the part is started anew
produces   nothing; what vLLM says is in logs/<attempt>/engine-part-<number>.log
ends       with 0 on SIGTERM; with the exit code of hpcrl/errors.py when vLLM has ended, which ends the engine
"""

from __future__ import annotations

import os
import signal
import sys
import time
from dataclasses import replace

from hpcrl.config import Config
from hpcrl.errors import EngineError, HpcrlError
from hpcrl.rollout.engines.vllm.nodes import last_ended, note_ended, read_meeting
from hpcrl.rollout.engines.vllm.server import Server, server_options
from hpcrl.rundir.layout import Run
from hpcrl.runtime.heartbeat import Heartbeat
from hpcrl.runtime.process_status import SERVING, StatusWriter, ending_told
from hpcrl.runtime.scratch import Scratch
from hpcrl.runtime.signals import die_with_parent

_LOOK_S = 1.0


def main(path: str) -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    run, attempt, number = Run.open(path), int(os.environ["HPCRL_ATTEMPT"]), int(os.environ["HPCRL_PART"])
    status = StatusWriter(run, f"part-{number}", attempt, Heartbeat(run, attempt, f"part-{number}"))
    with ending_told(status):
        follow(run, Config.from_toml([run.config]), attempt, number, status)


def follow(run: Run, config: Config, attempt: int, number: int, status: StatusWriter) -> None:
    """Start this part whenever the engine is started, until the run ends or it fails.

    Raises:
        EngineError: vLLM has ended here.
    """
    nodes = config.engine_nodes
    replica, place = divmod(number, nodes - 1)
    options, log = server_options(run, config), run.log(attempt, f"engine-part-{number}")
    scratch, server, joined = Scratch("engine"), None, last_ended(run, attempt, number)
    try:
        while True:
            meeting = read_meeting(run, attempt, replica)
            if meeting is not None and meeting.number > joined:
                if server:
                    server.stop()
                joined = meeting.number
                server = Server(replace(options, part=meeting.part(nodes, place + 1)), scratch.path, log)
            elif server and not server.alive():
                raise server.failure("ended")
            status.write(f"{SERVING} rollout-{replica}" if server else f"waiting for rollout-{replica}")
            time.sleep(_LOOK_S)
    except EngineError:
        note_ended(run, attempt, number, joined)
        raise
    finally:
        if server:
            server.stop()
        scratch.remove()


if __name__ == "__main__":
    die_with_parent()
    try:
        main(sys.argv[1])
    except HpcrlError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
