"""Runs one node's part of an engine on several nodes: python jobs/engine_node.py RUN

consumes   endpoints/, where the rollout worker on the engine's first node says where its processes meet
waits for  that, and then for a newer one, for which the part is started again
produces   nothing; the engine's output is in logs/<attempt>/engine-part-<number>.log
ends       with 0 on SIGTERM; with the exit code of hpcrl/errors.py when the part has ended, which ends the engine
"""

from __future__ import annotations

import os
import signal
import sys

from hpcrl.errors import HpcrlError
from hpcrl.rollout.engines.launch import nodes_backend
from hpcrl.rundir.attempt_config import attempt_config
from hpcrl.rundir.layout import Run
from hpcrl.runtime.heartbeat import Heartbeat
from hpcrl.runtime.process_status import StatusWriter, ending_told
from hpcrl.runtime.signals import die_with_parent


def main(path: str) -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    run, attempt, number = Run.open(path), int(os.environ["HPCRL_ATTEMPT"]), int(os.environ["HPCRL_PART"])
    status = StatusWriter(run, f"part-{number}", attempt, Heartbeat(run, attempt, f"part-{number}"))
    with ending_told(status):
        config = attempt_config(run, attempt)
        nodes_backend(config).serve_node(run, config, attempt, number, status)


if __name__ == "__main__":
    die_with_parent()
    try:
        main(sys.argv[1])
    except HpcrlError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
