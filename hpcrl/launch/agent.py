"""The node agent: the one task that Slurm starts on each node of a run.

It takes its role from the plan by its node id, starts that role's processes, supervises them, and ends when the attempt has an outcome:

    trainer node    torchrun jobs/train.py; on node 0 also jobs/controller.py
    rollout node    jobs/rollout.py, one per replica; one that fails is started again

A stop request (TERM, USR2, control/stop.json) reaches the processes through the stop file, a signal to the trainer's ranks, and the
controller; the trainer saves and leaves. Whoever sees the end first writes the outcome; every agent ends its processes when it is there.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path

from hpcrl.config import Config
from hpcrl.errors import HpcrlError, RunError
from hpcrl.launch.child import Child
from hpcrl.launch.environment import Environments
from hpcrl.launch.finish import ended_before, settle
from hpcrl.launch.network import choose_port, node_address
from hpcrl.launch.place import Place
from hpcrl.launch.plan import Node, make_plan, trainer_nodes
from hpcrl.launch.replica import Restarts, concerns_the_run
from hpcrl.launch.watchdog import Neighbours, Stall, Watchdog
from hpcrl.run.awake import AwakeClock
from hpcrl.run.commit import read_json, write_json
from hpcrl.run.layout import Run
from hpcrl.run.lease import CONTROLLER, GIVEN_UP, RENEW_S, LeaseWriter, read_lease, trainer_left
from hpcrl.run.ledger import (
    Attempt,
    Kind,
    find_attempt,
    open_attempt,
    outcome_of,
    read_attempts,
    report_outcome,
)
from hpcrl.run.stop_request import ask_to_stop, stop_asked

_POLL_S = 0.3
_SHARED_S = 90.0
_MARGIN_S = 30.0
_RENDEZVOUS_TRIES = 5
_CONSEQUENCE_S = 3.0
_AGAIN_S = 2.0
_DUMP_S = 2.0
_TROUBLE_S = 60.0
# Errors of ranks whose peer is gone: the peer's own report is awaited before one of these counts as the cause.
_CONSEQUENCES = ("closed by peer", "reset by peer", "Broken pipe", "TCPStore", "NCCL")


class Agent:
    """Processes of one node in one attempt."""

    def __init__(
        self, run: Run, config: Config, place: Place, attempt: Attempt, signals: list[int], node: Node | None = None
    ) -> None:
        self._run, self._place, self._attempt = run, place, attempt.number
        plan = make_plan(config)
        self._node = node or plan[place.index]
        self._trainer_nodes = trainer_nodes(plan)
        self._address = "127.0.0.1" if place.local else node_address(config.slurm.network_interface)
        interface = None if place.local else config.slurm.network_interface
        self._scratch = Path(tempfile.mkdtemp(prefix="hpcrl-agent-"))
        pulses = self._scratch / "pulses"
        pulses.mkdir()
        self._environments = Environments(
            config, self._node, self._attempt, self._address, interface, pulses, place.local
        )
        self._watchdog = Watchdog(pulses, config.slurm.patience)
        self._neighbours = Neighbours(run, self._attempt, self._node.index, self._trainer_nodes, attempt.hosts)
        self._children: dict[str, Child] = {}
        self._restarts = {
            f"rollout-{replica}": Restarts(config.slurm.replica_restarts) for replica in self._node.replicas
        }
        self._left: dict[str, float] = {}
        self._rendezvous = 0
        self._grace_s = config.slurm.signal_seconds - _MARGIN_S
        self._saving_s = config.slurm.patience.save_seconds or float("inf")
        self._stop_reason: str | None = None
        self._stop_deadline = float("inf")
        self._told_ranks = float("-inf")
        self._signals = signals
        self._stacks_shown = read_json(run.stacks_request)
        self.alone = False

    def supervise(self) -> None:
        """Start this node's processes and return when the attempt has an outcome.

        Raises:
            RunError: the run directory cannot be read or written for a minute.
        """
        trouble, clock = None, AwakeClock(_TROUBLE_S)
        try:
            self._start()
            while True:
                try:
                    if self._ends():
                        return
                    self._look()
                    trouble = None
                except OSError as error:  # a filesystem server that restarts must not cost the attempt
                    trouble = clock.now() if trouble is None else trouble
                    if clock.now() - trouble > _TROUBLE_S:
                        raise RunError(f"{self._run.path} cannot be used since {_TROUBLE_S:.0f} s: {error}") from error
                    print(f"waiting for the filesystem: {error}", flush=True)
                time.sleep(_POLL_S)
        finally:
            self._end()

    def _look(self) -> None:
        self._look_for_stop()
        self._look_at_children()
        self._look_for_stalls()
        self._look_at_neighbours()
        self._show_stacks()

    def _ends(self) -> bool:
        return outcome_of(self._run, self._attempt) is not None

    def _report(self, kind: Kind, message: str, *, blamed: bool = False) -> None:
        host = self._place.hosts[self._place.index] if blamed else ""
        report_outcome(self._run, self._attempt, kind, message, f"agent-{self._node.index}", host)

    def _start(self) -> None:
        if self._node.index == 0:
            command = [sys.executable, self._job("controller"), str(self._run.path)]
            self._spawn("controller", command, signal.SIGINT, deaf=True)
            self._publish_rendezvous()
        for name in self._restarts:
            self._start_replica(name)

    def _start_replica(self, name: str) -> None:
        self._restarts[name].started()
        self._watchdog.forget(name)
        self._left.pop(name, None)
        command = [sys.executable, self._job("rollout"), str(self._run.path)]
        self._spawn(name, command, HPCRL_REPLICA=name.removeprefix("rollout-"))

    def _job(self, name: str) -> str:
        return str(self._run.code / "jobs" / f"{name}.py")

    def _spawn(
        self,
        name: str,
        command: list[str],
        stop_signal: signal.Signals = signal.SIGTERM,
        deaf: bool = False,
        **environment: str,
    ) -> None:
        print(f"starting {name}: {' '.join(command)}", flush=True)
        log = self._run.log(self._attempt, name)
        everything = {**self._environments.of(name), **environment}
        self._children[name] = Child(name, command, everything, log, stop_signal, deaf)

    def _publish_rendezvous(self) -> None:
        value = {"number": self._rendezvous + 1, "address": self._address, "port": choose_port(self._address)}
        write_json(self._run.rendezvous(self._attempt), value)

    def _follow_rendezvous(self) -> None:
        """Start torchrun where node 0 says, and anew where node 0 had to choose another port."""
        meeting = read_json(self._run.rendezvous(self._attempt))
        if meeting is None or meeting["number"] == self._rendezvous:
            return
        self._rendezvous, name = meeting["number"], f"trainer-{self._node.index}"
        if old := self._children.pop(name, None):
            old.end(0.0)
        command = [
            sys.executable, "-m", "torch.distributed.run", f"--log-dir={self._scratch}", "--signals-to-handle=SIGHUP",
            f"--nnodes={self._trainer_nodes}", f"--node-rank={self._node.index}", f"--nproc-per-node={self._node.ranks}",
            f"--master-addr={meeting['address']}", f"--master-port={meeting['port']}", "--max-restarts=0",
            self._job("train"), str(self._run.path),
        ]  # fmt: skip
        # The ranks hear of a stop by themselves. torchrun would end at the second SIGTERM, and they with it, while they save.
        patience = str(round(self._grace_s))
        self._spawn(name, command, signal.SIGHUP, deaf=True, TORCH_ELASTIC_SHUTDOWN_TIMEOUT=patience)

    def _look_for_stop(self) -> None:
        reason = stop_asked(self._run, self._attempt)
        if self._signals and reason is None:
            reason = "interrupted"
        if reason and self._stop_reason is None:
            if reason == "interrupted":
                ask_to_stop(self._run, self._attempt, reason)
            self._stop_deadline = time.monotonic() + self._saving_s
        if reason and self._stop_reason != reason:  # whoever cancels what is being requeued means it
            self._stop_reason = reason
            print(f"stopping: {reason}", flush=True)
        if signal.SIGUSR2 in self._signals:  # so long before its time limit, Slurm ends the job without requeuing it
            self._signals = []
            self._stop_deadline = min(self._stop_deadline, time.monotonic() + self._grace_s)
        if self._stop_reason and time.monotonic() - self._told_ranks > _AGAIN_S:  # Slurm may have told this agent alone
            self._told_ranks = time.monotonic()
            self._watchdog.signal(signal.SIGUSR2, "rank-")
        if time.monotonic() > self._stop_deadline:
            self._report_stop("it did not leave in time after the stop request")

    def _look_at_children(self) -> None:
        if self._node.role == "trainer" and not (self._stop_reason and not self._rendezvous):
            self._follow_rendezvous()
        for name, child in list(self._children.items()):
            status = child.poll()
            if status is None or self._stop_reason or (status == 0 and not self._left_too_early(name)):
                continue
            if name in self._restarts and not concerns_the_run(status):
                self._replica_failed(child)
            else:
                self._failed(child)
                return
        for name, restarts in self._restarts.items():
            if restarts.due is not None and time.monotonic() >= restarts.due and not self._stop_reason:
                self._start_replica(name)
        if self._node.index == 0:
            self._look_for_the_end()

    def _left_too_early(self, name: str) -> bool:
        """Return whether a replica ended in order that was not told to, but by somebody on its node: the run is not at its end."""
        if name not in self._restarts:
            return False
        since = self._left.setdefault(name, time.monotonic())
        if time.monotonic() - since < 2 * RENEW_S:  # what the controller says of the end may be on its way
            return False
        lease = read_lease(self._run, CONTROLLER, self._attempt)
        return lease is not None and lease.facts.get("stop", "") is None

    def _look_for_the_end(self) -> None:
        if self._stop_reason and not self._rendezvous:
            self._report_stop("stopped before it began")
        elif self._stop_reason and trainer_left(self._run, self._attempt):
            # not torchrun's end, which comes minutes later where the torchrun of another node has failed
            self._report_stop("saved and stopped")
        elif self._stop_reason and self._ended("trainer-0"):
            self._report_stop("the trainer ended before it could save")
        elif self._ended("trainer-0") and self._ended("controller"):
            self._report("done", "finished")

    def _ended(self, name: str) -> bool:
        return name in self._children and self._children[name].poll() is not None

    def _report_stop(self, message: str) -> None:
        self._report("cancelled" if self._stop_reason == "cancelled" else "interrupted", message)

    def _replica_failed(self, child: Child) -> None:
        from hpcrl.run.call import Controller  # its HTTP client is not for `hpcrl submit` to load

        restarts, error = self._restarts[child.name], child.first_error()
        del self._children[child.name]
        child.end(0.0)
        self._watchdog.forget(child.name)
        restarts.ended()
        what = GIVEN_UP if restarts.given_up else f"to be started again ({restarts.used})"
        print(f"{error}; {what}", flush=True)
        LeaseWriter(self._run, child.name, self._attempt).say(f"{what}: {error}", restarts=restarts.used)
        Controller(self._run, self._attempt).leave(child.name)  # it may have had no time to say so itself

    def _failed(self, child: Child) -> None:
        taken = child.name == "trainer-0" and "EADDRINUSE" in child.said()
        if taken and self._rendezvous < _RENDEZVOUS_TRIES:
            print(f"the port of rendezvous {self._rendezvous} was taken meanwhile; choosing another", flush=True)
            self._publish_rendezvous()
            return
        error = child.first_error()
        consequence = any(text in error for text in _CONSEQUENCES)
        if consequence:
            time.sleep(_CONSEQUENCE_S)
            meeting = read_json(self._run.rendezvous(self._attempt))
            if child.name.startswith("trainer") and meeting and meeting["number"] != self._rendezvous:
                return  # node 0 had to choose another port: this torchrun met somebody else
            self._look_for_stop()
            if self._stop_reason:
                return
        blamed = not consequence and not concerns_the_run(child.poll() or 0)  # what users wrote fails on any node
        self._report("failed", f"{error} on {self._place.hosts[self._place.index]}", blamed=blamed)

    def _look_for_stalls(self) -> None:
        first = self._node.index * self._node.ranks
        living = [name for name, child in self._children.items() if child.poll() is None]
        training = f"trainer-{self._node.index}" in living
        ranks = [f"rank-{first + rank}" for rank in range(self._node.ranks) if training]
        expected = [name for name in living if not name.startswith("trainer")] + ranks
        for stall in self._watchdog.look(expected):
            if stall.process in self._restarts:
                print(f"{stall}; ending it", flush=True)
                self._watchdog.signal(signal.SIGUSR1, stall.process)
                time.sleep(_DUMP_S)
                self._children[stall.process].kill_group(signal.SIGKILL)
                self._watchdog.forget(stall.process)
            else:
                self._hangs(stall)

    def _hangs(self, stall: Stall) -> None:
        write_json(self._run.stacks_request, {"attempt": self._attempt, "by": str(stall)})
        self._show_stacks()
        time.sleep(_DUMP_S)
        where = self._run.stacks(self._attempt, stall.process)
        told = f"{stall} on {self._place.hosts[self._place.index]}; the stacks of all processes: {where.parent}"
        if self._stop_reason:
            self._report_stop(told)
        else:
            self._report(
                "hang", told
            )  # in a collective all ranks stand still, and the first to be noticed is not to blame

    def _look_at_neighbours(self) -> None:
        if lost := self._neighbours.lost():
            self.alone = self._node.index != 0
            if self._stop_reason:
                self._report_stop(lost)
            else:
                self._report("failed", lost)

    def _show_stacks(self) -> None:
        """Let this node's processes write down their stacks, where somebody has asked for it since the last time."""
        request = read_json(self._run.stacks_request)
        if request != self._stacks_shown:
            self._stacks_shown = request
            if request and request["attempt"] == self._attempt:
                self._watchdog.signal(signal.SIGUSR1)

    def _end(self) -> None:
        outcome = outcome_of(self._run, self._attempt)
        patience = 0.0 if outcome and outcome.kind in ("failed", "hang", "lost") else 15.0
        for child in self._children.values():
            child.ask()
        for name, child in self._children.items():
            child.end(10.0 if name.startswith("rollout") else patience)
        shutil.rmtree(self._scratch, ignore_errors=True)
        print(f"ended: {outcome.kind if outcome else 'no outcome'}", flush=True)


def _await_attempt(run: Run, place: Place) -> Attempt:
    """Return the attempt of this start; node 0 opens it, the others see it through the shared filesystem."""
    if place.index == 0:
        return open_attempt(run, place.job, place.hosts)
    deadline = time.monotonic() + _SHARED_S
    while time.monotonic() < deadline:
        os.listdir(run.path)  # a fresh listing makes NFS drop what it remembers of the directory
        if attempt := find_attempt(run, place.job):
            return attempt
        time.sleep(0.2)
    raise RunError(
        f"{place.hosts[place.index]} does not see in {run.attempts} what {place.hosts[0]} wrote {_SHARED_S:.0f} s ago: "
        "slurm.root must lie on a filesystem that all nodes share"
    )


def log_to(path: Path) -> None:
    """Append what this process prints to the file at `path`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)


def listen() -> list[int]:
    """Return a list that gets each SIGTERM and SIGUSR2 from now on, in place of what submitit does with them."""
    signals = list[int]()
    for number in (signal.SIGTERM, signal.SIGUSR2):
        signal.signal(number, lambda got, _frame: signals.append(got))
    signal.signal(signal.SIGCONT, lambda _got, _frame: None)  # submitit would count it
    return signals


def main(path: str) -> None:
    """Run the agent of this node for the run at `path`; ends the process."""
    signals = listen()
    run, place = Run(Path(path)), Place.here()
    before = ended_before(run, place.job)
    if before and (place.restarts or not read_attempts(run)):
        print(f"attempt {before.attempt} ended as {before.kind}; nothing to do", flush=True)
        sys.exit(0)
    attempt = _await_attempt(run, place)
    log_to(run.log(attempt.number, f"agent-{place.index}"))
    message, agent = "the agent ended without an outcome; its log says why", None
    try:
        agent = Agent(run, Config.from_toml([run.config]), place, attempt, signals)
        agent.supervise()
    except HpcrlError as error:
        message = f"{type(error).__name__}: {error}"
    finally:
        if outcome_of(run, attempt.number) is None:
            report_outcome(run, attempt.number, "failed", message, f"agent-{place.index}")
    outcome = outcome_of(run, attempt.number)
    if agent and agent.alone:  # the node with the batch script is gone, and with it who would requeue the job
        settle(run, place.job)
    sys.exit(0 if outcome and outcome.kind in ("done", "cancelled", "interrupted") else 1)
