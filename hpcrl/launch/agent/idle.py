"""Keeps a node that the attempt's layout does not use in its job until the attempt ends.

Slurm may end the tasks of the other nodes some time after the first task of a step has ended (WaitTime in slurm.conf).
"""

from __future__ import annotations

import time

from hpcrl.launch.agent.patience import FilesystemPatience
from hpcrl.launch.agent.start import NodeContext
from hpcrl.launch.agent.watchdog import Neighbours
from hpcrl.rundir.layout import Run
from hpcrl.rundir.ledger import Attempt, outcome_of, report_outcome

_POLL_S = 1.0


def await_end(run: Run, context: NodeContext, attempt: Attempt) -> bool:
    """Wait until the attempt has an outcome; return whether its first node was lost, and this agent has written it.

    The name of the agent's process status is its own: the first element of an elastic pool has the number of this node.

    Raises:
        RunError: the run directory cannot be read for a minute, which is no outcome of the attempt, whose nodes may well read it.
    """
    print(
        f"idle: the layout of attempt {attempt.number} has {len(attempt.hosts)} of {len(context.hosts)} nodes",
        flush=True,
    )
    neighbours = Neighbours(run, attempt.number, context.index, [], context.hosts, f"agent-idle-{context.index}")
    patience = FilesystemPatience(run)
    while True:
        with patience.tolerating():
            if outcome_of(run, attempt.number) is not None:
                return False
            if lost := neighbours.lost():
                report_outcome(run, attempt.number, "failed", lost, f"agent-{context.index}")
                return True
        time.sleep(_POLL_S)
