"""Starts and restarts the ranks of a scorer on several nodes together, with one torchrun per node.

The agent of the first node starts the scorer again when it fails, as any other worker, and says where the torchruns meet. The agents of the other
nodes go along: what they start is never started again by themselves. One that fails says so in its process status, because ranks elsewhere
may wait for it without an end, and the first node's agent then ends its own part.
"""

from __future__ import annotations

import signal

from hpcrl.launch.agent.processes import NodeProcesses
from hpcrl.launch.nodes import Node
from hpcrl.rundir.layout import Run
from hpcrl.rundir.process_names import scorer_name
from hpcrl.runtime.process_status import FAILED, StatusWriter, read_process_status

_MEETING = "rendezvous"


class ScorerParts:
    """The part of such a scorer on this node, as its agent sees it.

    Args:
        processes: of this node.
    """

    def __init__(self, run: Run, attempt: int, node: Node, processes: NodeProcesses) -> None:
        self._run, self._attempt, self._node, self._processes = run, attempt, node, processes
        self._status = StatusWriter(run, node.follows, attempt) if node.follows else None

    def look(self) -> None:
        """Go along with the first node, or end what is here where another part of it has failed. To be called every second."""
        if self._status is None:
            self._look_at_others()
        else:
            self._follow(self._status)

    def _follow(self, status: StatusWriter) -> None:
        assert self._node.follows
        self._processes.follow_scorer(self._node.follows)
        child = self._processes.children.get(self._node.follows)
        if child is None:
            status.write(f"waiting for {scorer_name(self._node.scorers[0])}")
            return
        ended, meeting = child.poll(), {_MEETING: self._processes.rendezvous}
        if ended is None:
            status.write(f"with {scorer_name(self._node.scorers[0])}", **meeting)
        elif ended:
            status.write(f"{FAILED}: {child.first_error()}", **meeting)
        else:
            status.write("finished")

    def _look_at_others(self) -> None:
        (name,) = self._node.workers
        child = self._processes.children.get(name)
        if child is None or child.poll() is not None:
            return
        for part in range(1, self._node.parts):
            other = read_process_status(self._run, self._node.part_of_scorer(part), self._attempt)
            if other is None or not other.state.startswith(FAILED):
                continue
            if other.facts.get(_MEETING) == self._processes.rendezvous:
                print(f"{other.process} on {other.host}: {other.state}; ending {name}", flush=True)
                child.kill_group(signal.SIGKILL)
                return
