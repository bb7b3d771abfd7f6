"""Node agent: the one task that Slurm starts on each node of a run.

It takes its role from the plan by its node id, starts that role's processes, supervises them, and ends when the attempt has an outcome:

    trainer node    torchrun jobs/train.py (one rank: without torchrun); on node 0 also jobs/controller.py; where engines have the trainer's
                    devices, jobs/rollout.py as on a rollout node
    rollout node    jobs/rollout.py, one per replica; one that fails is started again. On the further nodes of an engine that is on several:
                    jobs/engine_node.py
    reward node     jobs/reward.py, one per service of the reward model; one that fails is started again, and ends the attempt when it fails
                    too often
    sandbox node    jobs/sandbox.py, the server of the node's sandboxes; a rollout node may have one too
    scorer node     torchrun jobs/scorer.py (one rank: without torchrun), one per copy of the model; as on a rollout node. Of a copy on several
                    nodes the first one decides when its ranks start (multi_node.py)

A stop request (TERM, USR2, control/stop.json) reaches the processes through the stop file, a signal to the trainer's ranks, and the
controller; the trainer saves and leaves. The first agent that sees the end writes the outcome; every agent then ends its processes.
"""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import closing, suppress
from pathlib import Path

from hpcrl.config import Config
from hpcrl.errors import DeviceError, HpcrlError, RunError, SandboxError
from hpcrl.launch.agent.child import Child, Restarts, concerns_the_run
from hpcrl.launch.agent.growth import GrowthWatch
from hpcrl.launch.agent.held_nodes import HeldNodes
from hpcrl.launch.agent.idle import await_end
from hpcrl.launch.agent.multi_node import ScorerParts
from hpcrl.launch.agent.patience import FilesystemPatience
from hpcrl.launch.agent.preflight import check_node, make_room
from hpcrl.launch.agent.processes import NodeProcesses
from hpcrl.launch.agent.start import BatchScript, NodeContext, await_attempt, listen, log_to
from hpcrl.launch.agent.watchdog import Neighbours, Stall, Watchdog
from hpcrl.launch.doctor.disk_space import Sizes
from hpcrl.launch.inputs import require_same_inputs
from hpcrl.launch.layouts import AttemptLayout
from hpcrl.launch.nodes import Node, make_plan, needed_nodes
from hpcrl.launch.requeue.epilogue import ended_before, settle
from hpcrl.launch.requeue.requests import other_jobs
from hpcrl.launch.requeue.requeue import claimed_start, set_dependency
from hpcrl.launch.retention import end_of_run
from hpcrl.rundir.checkpoints import Retention
from hpcrl.rundir.checksums import require_unchanged
from hpcrl.rundir.commit import read_json, write_json
from hpcrl.rundir.layout import Run
from hpcrl.rundir.ledger import (
    Attempt,
    Kind,
    outcome_of,
    read_attempts,
    report_outcome,
)
from hpcrl.rundir.process_names import SANDBOX
from hpcrl.runtime.followers import Followers
from hpcrl.runtime.process_status import CONTROLLER, GIVEN_UP, StatusWriter, read_process_status, trainer_left
from hpcrl.runtime.signals import ask_to_stop, stop_asked, stop_cause
from hpcrl.upload.send import commands as upload_commands

_POLL_S = 0.3
_CONTROL_S = 1.0  # a request that is not there yet is looked for in a listing, which hundreds of nodes do
_MARGIN_S = 30.0
_RENDEZVOUS_TRIES = 5
_CONSEQUENCE_S = 3.0
_AGAIN_S = 2.0
_DUMP_S = 2.0
_NICENESS = 10  # of what only goes along with the run
# Errors of ranks whose peer is gone: the peer's own report is awaited before one of these counts as the cause.
_CONSEQUENCES = ("closed by peer", "reset by peer", "Broken pipe", "TCPStore", "NCCL")


class NodeAgent:
    """Processes of one node in one attempt.

    Args:
        held: nodes of which this agent keeps the record; None: another agent does.
    """

    def __init__(
        self,
        run: Run,
        config: Config,
        context: NodeContext,
        attempt: Attempt,
        signals: list[int],
        node: Node | None = None,
        sizes: Sizes | None = None,
        held: HeldNodes | None = None,
    ) -> None:
        self._run, self._config, self._context, self._attempt = run, config, context, attempt.number
        self._sizes, self._held = sizes, held
        plan = make_plan(config)
        self._node = node or plan[context.index]
        if held:
            held.assign([node] if node else plan, lends=config.trainer.placement.lend)
        self._grace_s = config.slurm.signal_seconds - _MARGIN_S
        self._processes = NodeProcesses(run, config, context, attempt.number, self._node, self._grace_s)
        self._parts = ScorerParts(run, attempt.number, self._node, self._processes)
        self._watchdog = Watchdog(self._processes.heartbeats, config.slurm.patience)
        self._neighbours = Neighbours(
            run, self._attempt, self._node.index, needed_nodes(plan, config.slurm.elastic.replicas), attempt.hosts
        )
        uploads_here = self._node.index == 0 and config.slurm.upload.by == "run"
        commands = upload_commands(run, config.trainer.upload) if uploads_here else {}
        self._uploads = Followers(run, self._attempt, commands, _NICENESS)
        self._restarts = {name: Restarts(config.slurm.replica_restarts) for name in self._node.workers}
        self._left: dict[str, set[float]] = {}
        self._saving_s = config.slurm.patience.save_seconds or float("inf")
        self._stop_reason: str | None = None
        self._stop_deadline = float("inf")
        self._signalled_ranks = float("-inf")
        self._signals = signals
        self._stacks_shown = read_json(run.stacks_request)
        self._looked = float("-inf")
        self.alone = False

    def supervise(self) -> None:
        """Start this node's processes and return when the attempt has an outcome.

        Raises:
            RunError: the run directory cannot be read or written for a minute.
            DataError: a replica would start again with another configuration or code than was submitted.
        """
        patience = FilesystemPatience(self._run)
        try:
            check_node(self._run, self._config, self._node, self._context, self._sizes)
            self._start()
            while True:
                with patience.tolerating():
                    if self._ends():
                        return
                    self._look()
                time.sleep(_POLL_S)
        finally:
            self._end()

    def _look(self) -> None:
        due = time.monotonic() - self._looked > _CONTROL_S
        if due or self._signals or self._stop_reason:
            self._look_for_stop()
        self._look_at_children()
        self._look_for_stalls()
        self._look_at_neighbours()
        if due:
            if self._node.parts > 1:
                self._parts.look()
            self._show_stacks()
            if self._held:
                self._held.renew()
            self._looked = time.monotonic()

    def _ends(self) -> bool:
        return outcome_of(self._run, self._attempt) is not None

    def _report(self, kind: Kind, message: str, *, blamed: bool = False) -> None:
        host = self._context.hosts[self._context.index] if blamed else ""
        report_outcome(self._run, self._attempt, kind, message, f"agent-{self._node.index}", host)

    def _start(self) -> None:
        if self._node.index == 0:
            self._processes.start_controller()
            self._processes.publish_rendezvous()
        self._uploads.start()
        for name in self._restarts:
            self._start_worker(name)

    def _start_worker(self, name: str) -> None:
        self._restarts[name].started()
        self._watchdog.forget(name)
        self._left.pop(name, None)
        self._processes.start_worker(name)

    def _look_for_stop(self) -> None:
        reason = stop_asked(self._run, self._attempt)
        if self._signals and reason is None:
            reason = "interrupted"
        if reason and self._stop_reason is None:
            if reason == "interrupted":
                ask_to_stop(self._run, self._attempt, reason, stop_cause(self._run, self._attempt))
                self._let_other_requests_start()
            self._stop_deadline = time.monotonic() + self._saving_s
        if reason and self._stop_reason not in (reason, "cancelled"):  # a cancellation overrides a requeue in progress
            self._stop_reason = reason
            print(f"stopping: {reason}", flush=True)
        if signal.SIGUSR2 in self._signals:  # so long before its time limit, Slurm ends the job without requeuing it
            self._signals = []
            self._stop_deadline = min(self._stop_deadline, time.monotonic() + self._grace_s)
        if (
            self._stop_reason and time.monotonic() - self._signalled_ranks > _AGAIN_S
        ):  # Slurm may have signalled this agent alone
            self._signalled_ranks = time.monotonic()
            self._watchdog.signal(signal.SIGUSR2, "rank-")
        if time.monotonic() > self._stop_deadline:
            self._report_stop("it did not leave in time after the stop request")

    def _let_other_requests_start(self) -> None:
        """Free the run's other requests where Slurm ends this job: it may kill the batch script, which else does that, before its turn."""
        if signal.SIGTERM in self._signals and self._node.index == 0 and not self._context.local:
            others = other_jobs(self._run, self._context.job_id)
            threading.Thread(target=set_dependency, args=(others, None), daemon=True).start()

    def _look_at_children(self) -> None:
        if self._node.role == "trainer" and not (self._stop_reason and not self._processes.rendezvous):
            self._processes.follow_rendezvous()
        for name, child in list(self._processes.children.items()):
            status = child.poll()
            if status is None or self._stop_reason or (status == 0 and not self._left_too_early(name)):
                continue
            if name == self._node.follows:
                continue
            if name in self._restarts and not concerns_the_run(status):
                self._worker_failed(child)
            else:
                self._failed(child)
                return
        for name, restarts in self._restarts.items():
            if restarts.due is not None and time.monotonic() >= restarts.due and not self._stop_reason:
                require_unchanged(self._run)  # long after the others of its attempt
                self._start_worker(name)
        if self._node.index == 0:
            self._look_for_the_end()

    def _left_too_early(self, name: str) -> bool:
        """Return whether a replica or a service was ended on its node by a third party: exit code 0, without a stop request or the run's end.

        The controller tells of the end before it publishes it, maybe long before where nodes are busy: a process status that it has renewed
        twice since would have the end.
        """
        status = read_process_status(self._run, CONTROLLER, self._attempt) if name in self._restarts else None
        if status is None:
            return False
        seen = self._left.setdefault(name, set())
        seen.add(status.renewed)
        return len(seen) > 2 and status.facts.get("stop", "") is None

    def _look_for_the_end(self) -> None:
        if self._stop_reason and not self._processes.rendezvous:
            self._report_stop("stopped before it began")
        elif self._stop_reason and trainer_left(self._run, self._attempt):
            # not torchrun's end, which comes minutes later where the torchrun of another node has failed
            self._report_stop("saved and stopped")
        elif self._stop_reason and self._processes.ended("trainer-0"):
            self._report_stop("the trainer ended before it could save")
        elif self._processes.ended("trainer-0") and self._processes.ended("controller"):
            self._report("done", "finished")

    def _report_stop(self, message: str) -> None:
        cause = stop_cause(self._run, self._attempt)
        message += f" ({cause})" if cause else ""
        self._report("cancelled" if self._stop_reason == "cancelled" else "interrupted", message)

    def _worker_failed(self, child: Child) -> None:
        from hpcrl.runtime.controller_client import (
            ControllerClient,  # its HTTP client is not for `hpcrl submit` to load
        )

        restarts, error = self._restarts[child.name], child.first_error()
        # with the controller, which looks whether enough are left
        registered = not child.name.startswith(("reward", "part", SANDBOX))
        restarts.ended()
        if child.name.startswith(SANDBOX) and child.poll() == SandboxError.exit_code:  # of a node without sandboxes
            restarts.give_up()
        if restarts.given_up and child.name.startswith("reward"):
            self._failed(child)
            return
        del self._processes.children[child.name]
        child.end(0.0)
        self._watchdog.forget(child.name)
        what = GIVEN_UP if restarts.given_up else f"to be started again ({restarts.used})"
        print(f"{error}; {what}", flush=True)
        StatusWriter(self._run, child.name, self._attempt).write(f"{what}: {error}", restarts=restarts.used)
        if registered:
            with closing(ControllerClient(self._run, self._attempt)) as controller:
                controller.leave(child.name)  # it may have had no time to report that itself

    def _failed(self, child: Child) -> None:
        taken = child.name == "trainer-0" and "EADDRINUSE" in child.log_tail()
        if taken and self._processes.rendezvous < _RENDEZVOUS_TRIES:
            print(
                f"the port of rendezvous {self._processes.rendezvous} was taken meanwhile; choosing another", flush=True
            )
            self._processes.publish_rendezvous()
            return
        error = child.first_error()
        consequence = any(text in error for text in _CONSEQUENCES)
        if consequence:
            time.sleep(_CONSEQUENCE_S)
            meeting = read_json(self._run.rendezvous(self._attempt))
            if child.name.startswith("trainer") and meeting and meeting["number"] != self._processes.rendezvous:
                return  # node 0 had to choose another port: this torchrun met somebody else
            self._look_for_stop()
            if self._stop_reason:
                return
        blamed = not consequence and not concerns_the_run(child.poll() or 0)  # what users wrote fails on any node
        message = f"{error} on {self._context.hosts[self._context.index]}{self._processes.recorder.found()}"
        self._report("failed", message, blamed=blamed)

    def _look_for_stalls(self) -> None:
        living = [name for name, child in self._processes.children.items() if child.poll() is None]
        training = f"trainer-{self._node.index}" in living
        ranks = [f"rank-{self._node.first_rank + rank}" for rank in range(self._node.ranks) if training]
        expected = [name for name in living if not name.startswith("trainer") and name != self._node.follows] + ranks
        for stall in self._watchdog.look(expected):
            if stall.process in self._restarts:
                print(f"{stall}; ending it", flush=True)
                self._watchdog.signal(signal.SIGUSR1, stall.process)
                time.sleep(_DUMP_S)
                self._processes.children[stall.process].kill_group(signal.SIGKILL)
                self._watchdog.forget(stall.process)
            else:
                self._hangs(stall)

    def _hangs(self, stall: Stall) -> None:
        write_json(self._run.stacks_request, {"attempt": self._attempt, "by": str(stall)})
        self._show_stacks()
        time.sleep(_DUMP_S)
        where = self._run.stacks(self._attempt, stall.process)
        message = f"{stall} on {self._context.hosts[self._context.index]}; the stacks of all processes: {where.parent}"
        message += self._processes.recorder.found()
        if self._stop_reason:
            self._report_stop(message)
        else:
            # in a collective all ranks stand still, and the first to be noticed is not to blame
            self._report("hang", message)

    def _look_at_neighbours(self) -> None:
        if lost := self._neighbours.lost():
            self.alone = self._node.index != 0
            if self._stop_reason:
                self._report_stop(lost)
            else:
                self._report("failed", lost)

    def _show_stacks(self) -> None:
        """Let this node's processes write down their stacks, and what NCCL did, if that was requested since the last look."""
        request = read_json(self._run.stacks_request)
        if request != self._stacks_shown:
            self._stacks_shown = request
            if request and request["attempt"] == self._attempt:
                self._watchdog.signal(signal.SIGUSR1)
                self._processes.recorder.write()

    def _end(self) -> None:
        outcome = None
        with suppress(OSError):  # without the filesystem too, no process is left behind
            outcome = outcome_of(self._run, self._attempt)
        patience = 0.0 if outcome and outcome.kind in ("failed", "hang", "lost") else 15.0
        self._processes.end(patience)
        done = outcome is not None and outcome.kind == "done"
        self._uploads.end(60.0 * self._config.slurm.upload.wait_minutes if done else 0.0, self._is_wanted_back)
        trainer = self._config.trainer
        if done and self._node.index == 0 and trainer.keep_when_done != "all" and not self._is_wanted_back():
            end_of_run(self._run, trainer.keep_when_done, Retention.of(trainer), trainer.upload, self._attempt)
        print(f"ended: {outcome.kind if outcome else 'no outcome'}", flush=True)
        self._neighbours.leave()

    def _is_wanted_back(self) -> bool:
        """Return whether a user or Slurm asks for this node, on which only uploads continue."""
        return bool(self._signals) or stop_asked(self._run, self._attempt) is not None


def main(path: str, sizes: Sizes | None = None, layouts: Sequence[AttemptLayout] = ()) -> None:
    """Run the agent of this node for the run at `path`; ends the process.

    Args:
        sizes: of files of the run, about.
        layouts: that its attempts may take, the fewest nodes first; none: the only one.
    """
    signals = listen()
    run, context = Run(Path(path)), NodeContext.here()
    script = BatchScript(signals) if context.index == 0 and not context.local else None
    before = ended_before(run, context.job)
    again = context.restarts or context.job != claimed_start(context.job)
    if before and (again or not read_attempts(run)):
        print(f"attempt {before.attempt} ended as {before.kind}; nothing to do", flush=True)
        sys.exit(0)
    attempt = await_attempt(run, context, layouts)
    log_to(run.log(attempt.number, f"agent-{context.index}"))
    if context.index >= len(attempt.hosts):  # its errors are none of the attempt
        if attempt.idle and await_end(run, context, attempt):
            settle(run, context.job)
        sys.exit(0)
    message, host, agent = "the agent ended without an outcome; its log says why", "", None
    held = HeldNodes(run, context, attempt) if context.index == 0 else None
    try:
        # the other nodes wait for it no longer than a minute
        status = StatusWriter(run, "agent-0", attempt.number) if context.index == 0 else None
        if status:
            require_unchanged(run, lambda: status.write("comparing configuration and code"))
        whole = Config.from_toml([run.config])
        config = whole.at(attempt.sizes)
        if status:
            require_same_inputs(run, config, lambda: status.write("comparing datasets and models"))
            make_room(run, config, attempt.number)
        if len(attempt.hosts) < (wanted := len(make_plan(config))):
            raise RunError(
                f"the job has {len(attempt.hosts)} node(s), and the run needs {wanted}: Slurm was asked for as many"
            )
        if context.index == 0:
            GrowthWatch(run, whole, context, attempt, layouts).start()
        agent = NodeAgent(run, config, context, attempt, signals, sizes=sizes, held=held)
        agent.supervise()
    except HpcrlError as error:
        message = f"{type(error).__name__}: {error}"
        host = context.hosts[context.index] if isinstance(error, DeviceError) else ""
    finally:
        if outcome_of(run, attempt.number) is None:
            report_outcome(run, attempt.number, "failed", message, f"agent-{context.index}", host)
    outcome = outcome_of(run, attempt.number)
    # the node with the batch script is gone, and with it who would requeue the job
    if agent and agent.alone:
        settle(run, context.job)
    if script:
        script.require_its_end()
    if held and context.local:
        held.end()
    sys.exit(0 if outcome and outcome.kind in ("done", "cancelled", "interrupted") else 1)
