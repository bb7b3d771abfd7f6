"""Keeps a node that the attempt's layout does not use in its job until the attempt ends.

Slurm may end the tasks of the other nodes some time after the first task of a step has ended (WaitTime in slurm.conf).
"""

from __future__ import annotations

import time

from hpcrl.launch.agent.start import NodeContext
from hpcrl.launch.agent.watchdog import Neighbours
from hpcrl.rundir.layout import Run
from hpcrl.rundir.ledger import Attempt, outcome_of, report_outcome

_POLL_S = 1.0


def await_end(run: Run, context: NodeContext, attempt: Attempt) -> bool:
    """Wait until the attempt has an outcome; return whether its first node was lost, and this agent has written it."""
    print(
        f"idle: the layout of attempt {attempt.number} has {len(attempt.hosts)} of {len(context.hosts)} nodes",
        flush=True,
    )
    neighbours = Neighbours(run, attempt.number, context.index, [], context.hosts)
    while outcome_of(run, attempt.number) is None:
        if lost := neighbours.lost():
            report_outcome(run, attempt.number, "failed", lost, f"agent-{context.index}")
            return True
        time.sleep(_POLL_S)
    return False
