"""Pool agent: the task of one element of an elastic pool, a job array beside the run's own.

It starts a rollout worker, a scorer, or a server of sandboxes, for the newest attempt of the run and for each later one, and restarts a failed
one. It ends with the run; Slurm may take it away at any time, and the end of its batch script (launch/requeue/elastic.py) queues it again.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

from hpcrl.config import Config
from hpcrl.errors import SubmitError, UserCodeError
from hpcrl.launch.agent.agent import NodeAgent
from hpcrl.launch.agent.child import Child
from hpcrl.launch.agent.held_nodes import HeldNodes
from hpcrl.launch.agent.patience import FilesystemPatience
from hpcrl.launch.agent.start import NodeContext, log_to, serve_element
from hpcrl.launch.doctor.disk_space import Sizes
from hpcrl.launch.pools import pooled_node
from hpcrl.launch.requeue.elastic import AGAIN, current_attempt, unwanted
from hpcrl.launch.requeue.requests import requests_of
from hpcrl.launch.scheduler import find_job, queue
from hpcrl.rundir.attempt_config import attempt_config
from hpcrl.rundir.checksums import require_unchanged
from hpcrl.rundir.commit import read_json
from hpcrl.rundir.layout import Run
from hpcrl.rundir.ledger import Attempt, outcome_of
from hpcrl.rundir.process_names import SANDBOX

_POLL_S = 1.0
_ASK_S = 60.0
_IDLE_S = 300.0


class PoolAgent(NodeAgent):
    """One worker of the pool in one attempt."""

    def __init__(
        self,
        run: Run,
        config: Config,
        context: NodeContext,
        attempt: Attempt,
        signals: list[int],
        worker: str,
        sizes: Sizes | None = None,
        held: HeldNodes | None = None,
    ) -> None:
        super().__init__(run, config, context, attempt, signals, pooled_node(config, worker), sizes, held)
        self.left = False

    @property
    def given_up(self) -> bool:
        return all(restarts.given_up for restarts in self._restarts.values())

    def _ends(self) -> bool:
        return self.left or self.alone or self.given_up or super()._ends()

    def _look_for_stop(self) -> None:
        """A signal concerns this element alone; the worker learns from the controller what the run does."""
        if self._signals and not self.left:
            self.left, self._stop_reason = True, "taken away"
            print("this element is taken away", flush=True)

    def _failed(self, child: Child) -> None:
        """This element's place may lack files that others have: only what users wrote ends the attempt from here."""
        if child.poll() == UserCodeError.exit_code:
            super()._failed(child)
        else:
            self._worker_failed(child)

    def _look_at_neighbours(self) -> None:
        """The run may go on without its first node, when Slurm has started it again; so this element reports no outcome."""
        if lost := self._neighbours.lost():
            self.alone = True
            print(lost, flush=True)


def main(path: str, worker: str, sizes: Sizes | None = None) -> None:
    """Keep a worker of the run at `path` going, rollout-<replica>, scorer-<number> or sandbox-<server>; ends the process."""
    run = Run(Path(path))
    serve_element(lambda context, signals: _serve(run, context, worker, signals, sizes))


def _serve(run: Run, context: NodeContext, worker: str, signals: list[int], sizes: Sizes | None) -> int:
    pool = os.environ["SLURM_ARRAY_JOB_ID"]
    idle, asked, lost = time.monotonic(), time.monotonic(), 0
    # what nodes of sandboxes do is no part of the account: they compute nothing of the policy
    held = HeldNodes(run, context, None) if run.config.is_file() and not worker.startswith(SANDBOX) else None
    patience = FilesystemPatience(run)
    while not signals:
        if held:
            held.renew()
        with patience.tolerating():
            if why := unwanted(run, pool):
                print(f"nothing to do: {why}", flush=True)
                return 0
            attempt = current_attempt(run)
            if attempt is not None and attempt.number != lost and outcome_of(run, attempt.number) is None:
                print(f"{worker} in attempt {attempt.number}", flush=True)
                log_to(run.log(attempt.number, f"agent-pool-{worker}"))
                require_unchanged(run)
                config = attempt_config(run, attempt.number)
                agent = PoolAgent(run, config, context, attempt, signals, worker, sizes, held)
                agent.supervise()
                if agent.left:
                    break
                if agent.given_up:
                    return 1
                lost = attempt.number if agent.alone else 0
                idle = asked = time.monotonic()
            elif time.monotonic() - idle > _IDLE_S:
                print("the run does not go on yet; another may use this node", flush=True)
                break
            elif time.monotonic() - asked > _ASK_S:
                asked = time.monotonic()
                if not _queued(run):
                    print("nothing to do: the jobs of the run are gone", flush=True)
                    return 0
        time.sleep(_POLL_S)
    return AGAIN


def _queued(run: Run) -> bool:
    record = read_json(run.submission)
    try:
        if record is None:
            return True
        queued = queue(patience_s=0.0)
        return any(find_job(job, queued).active for job in requests_of(record).values())
    except SubmitError:
        return True
