"""Keeps the record of the nodes that a start of a job holds, for the account of the run (hpcrl/rundir/allocations.py)."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, replace

from hpcrl.launch.agent.start import NodeContext
from hpcrl.launch.nodes import Node
from hpcrl.rundir.allocations import LEFT_OVER, RENEW_S, AllocatedNode, new_allocation, write_allocation
from hpcrl.rundir.layout import Run
from hpcrl.rundir.ledger import Attempt


class HeldNodes:
    """Nodes of one start of a job; its record begins before the roles of the nodes are known. One agent of the job has it.

    Args:
        attempt: which may have returned some of the nodes to Slurm; None: the job is an element of an elastic pool.
    """

    def __init__(self, run: Run, context: NodeContext, attempt: Attempt | None) -> None:
        self._run = run
        self._hosts = [*attempt.hosts, *attempt.idle] if attempt else context.hosts
        returned = attempt.returned if attempt else []
        self._returned = [AllocatedNode(host, LEFT_OVER, [], until=time.time()) for host in returned]
        nodes = [AllocatedNode(host, "node", []) for host in self._hosts]
        self._record = new_allocation(run, context.job, [*nodes, *self._returned], pool=attempt is None)
        self._write()

    def assign(self, nodes: Sequence[Node], *, lends: bool) -> None:
        """Record what the nodes do, in their order; those that the layout has no use for are left over."""
        known = [AllocatedNode(host, n.role, n.devices, lends) for host, n in zip(self._hosts, nodes, strict=False)]
        known += [AllocatedNode(host, LEFT_OVER, []) for host in self._hosts[len(nodes) :]]
        self._record = replace(self._record, nodes=[asdict(node) for node in known + self._returned])
        self._write()

    def renew(self) -> None:
        """Record that they are still held, if that is due."""
        if time.monotonic() - self._renewed >= RENEW_S:
            self._write()

    def _write(self) -> None:
        self._renewed = time.monotonic()
        with suppress(OSError):  # an account is not worth an attempt
            write_allocation(self._run, self._record)

    def end(self) -> None:
        """Record that they are given back; of Slurm's jobs the end of the batch script does that."""
        with suppress(OSError):
            write_allocation(self._run, self._record, over=True)
