"""The node agent: the one task that Slurm starts on each node of a run.

It takes its role from the plan by its node id, starts that role's processes, supervises them, and ends when the attempt has an outcome:

    trainer node    torchrun jobs/train.py; on node 0 also jobs/controller.py
    rollout node    jobs/rollout.py, one per replica

A stop request (TERM, USR2, control/stop.json) reaches the processes through the stop file and the controller; the trainer saves and leaves.
Whoever sees the end first writes outcome.json; every agent ends its processes when it appears.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

from hpcrl.config import Config, engine_gpus
from hpcrl.errors import HpcrlError, RunError
from hpcrl.launch.child import Child
from hpcrl.launch.network import choose_port, node_address
from hpcrl.launch.place import Place
from hpcrl.launch.plan import Node, make_plan, trainer_nodes
from hpcrl.run.commit import read_json, write_json
from hpcrl.run.layout import Run
from hpcrl.run.lease import trainer_left
from hpcrl.run.ledger import (
    Attempt,
    Kind,
    find_attempt,
    open_attempt,
    outcome_of,
    read_attempts,
    read_outcome,
    report_outcome,
)

_POLL_S = 0.3
_SHARED_S = 90.0
_GRACE_S = 120.0
_RENDEZVOUS_TRIES = 5
_CONSEQUENCE_S = 3.0
# Errors of ranks whose peer is gone: the peer's own report is awaited before one of these counts as the cause.
_CONSEQUENCES = ("closed by peer", "reset by peer", "Broken pipe", "TCPStore", "NCCL")


class Agent:
    """Processes of one node in one attempt."""

    def __init__(self, run: Run, config: Config, place: Place, attempt: Attempt) -> None:
        self._run, self._place, self._attempt = run, place, attempt.number
        plan = make_plan(config)
        self._node: Node = plan[place.index]
        self._trainer_nodes = trainer_nodes(plan)
        self._address = "127.0.0.1" if place.local else node_address(config.slurm.network_interface)
        self._interface = None if place.local else config.slurm.network_interface
        self._cpus, self._width = config.slurm.cpus_per_task, engine_gpus(config.generator.inference_engine)
        self._children: dict[str, Child] = {}
        self._rendezvous = 0
        self._requeued = config.trainer.resume_mode != "none"
        self._stop_reason: str | None = None
        self._stop_deadline = float("inf")
        self._signals: list[int] = []

    def supervise(self) -> None:
        """Start this node's processes and return when the attempt has an outcome."""
        for number in (signal.SIGTERM, signal.SIGUSR2):
            signal.signal(number, lambda got, _frame: self._signals.append(got))
        signal.signal(signal.SIGCONT, lambda _got, _frame: None)  # submitit would count it
        try:
            self._start()
            while (outcome := read_outcome(self._run)) is None or outcome.attempt < self._attempt:
                self._look_for_stop()
                self._look_at_children()
                time.sleep(_POLL_S)
        finally:
            self._end()

    def _report(self, kind: Kind, message: str) -> None:
        report_outcome(self._run, self._attempt, kind, message, f"agent-{self._node.index}")

    def _start(self) -> None:
        node = self._node
        if node.index == 0:
            self._spawn("controller", [sys.executable, self._job("controller"), str(self._run.path)], signal.SIGINT)
            self._publish_rendezvous()
        if node.role == "rollout":
            for replica in node.replicas:
                command = [sys.executable, self._job("rollout"), str(self._run.path)]
                self._spawn(f"rollout-{replica}", command, HPCRL_REPLICA=str(replica))

    def _job(self, name: str) -> str:
        return str(self._run.code / "jobs" / f"{name}.py")

    def _spawn(
        self,
        name: str,
        command: list[str],
        stop_signal: signal.Signals = signal.SIGTERM,
        **environment: str,
    ) -> None:
        print(f"starting {name}: {' '.join(command)}", flush=True)
        log = self._run.log(self._attempt, name)
        everything = {**self._environment(name), **environment}
        self._children[name] = Child(name, command, everything, log, stop_signal)

    def _environment(self, name: str) -> dict[str, str]:
        environment = dict(os.environ, HPCRL_ATTEMPT=str(self._attempt), HPCRL_ADDRESS=self._address)
        node = self._node
        processes = max(1, node.ranks + len(node.replicas))
        if self._interface:
            environment |= {"GLOO_SOCKET_IFNAME": self._interface, "NCCL_SOCKET_IFNAME": self._interface}
        if self._cpus:
            environment["OMP_NUM_THREADS"] = str(max(1, self._cpus // processes))
        visible = [device for device in environment.get("CUDA_VISIBLE_DEVICES", "").split(",") if device]
        if node.gpus and visible:
            mine = visible[node.gpu_offset :] if self._place.local else visible
            if name.startswith("rollout-"):
                position = node.replicas.index(int(name.removeprefix("rollout-")))
                mine = mine[position * self._width : (position + 1) * self._width]
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(mine[: node.ranks or self._width])
        if name == "controller" or not node.gpus:
            environment["CUDA_VISIBLE_DEVICES"] = ""
        return environment

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
            sys.executable, "-m", "torch.distributed.run",
            f"--nnodes={self._trainer_nodes}", f"--node-rank={self._node.index}", f"--nproc-per-node={self._node.ranks}",
            f"--master-addr={meeting['address']}", f"--master-port={meeting['port']}", "--max-restarts=0",
            self._job("train"), str(self._run.path),
        ]  # fmt: skip
        self._spawn(name, command, TORCH_ELASTIC_SHUTDOWN_TIMEOUT=str(round(_GRACE_S)))

    def _look_for_stop(self) -> None:
        request = read_json(self._run.stop)
        asked = request is not None and request["attempt"] == self._attempt
        if self._signals and not asked:
            request, asked = {"attempt": self._attempt, "reason": "interrupted"}, True
            write_json(self._run.stop, request)
        if asked and request and self._stop_reason is None:
            self._stop_reason = request["reason"]
            self._stop_deadline = time.monotonic() + _GRACE_S
            print(f"stopping: {self._stop_reason}", flush=True)
        if time.monotonic() > self._stop_deadline:
            self._report_stop(f"not finished {_GRACE_S:.0f} s after the stop request")

    def _look_at_children(self) -> None:
        if self._node.role == "trainer":
            self._follow_rendezvous()
        for child in list(self._children.values()):
            status = child.poll()
            if status is None:
                continue
            if status != 0 and not (self._stop_reason and self._left_because_of_the_stop(child)):
                self._failed(child)
                return
        if self._node.index == 0 and self._ended("trainer-0"):
            if self._stop_reason:
                self._report_stop("saved and stopped")
            elif self._ended("controller"):
                self._report("done", "finished")

    def _left_because_of_the_stop(self, child: Child) -> bool:
        """torchrun ends with an error of its own when Slurm signals it, also where every rank has saved and left well."""
        if not child.name.startswith("trainer"):
            return True
        return trainer_left(self._run, self._attempt)

    def _ended(self, name: str) -> bool:
        return name in self._children and self._children[name].poll() is not None

    def _report_stop(self, message: str) -> None:
        kind: Kind = "cancelled" if self._stop_reason == "cancelled" else "interrupted"
        if kind == "interrupted" and not self._requeued:
            message += "; not requeued, because trainer.resume_mode is none"
        self._report(kind, message)

    def _failed(self, child: Child) -> None:
        taken = child.name == "trainer-0" and "EADDRINUSE" in child.said()
        if taken and self._rendezvous < _RENDEZVOUS_TRIES:
            print(f"the port of rendezvous {self._rendezvous} was taken meanwhile; choosing another", flush=True)
            self._publish_rendezvous()
            return
        error = child.first_error()
        if any(text in error for text in _CONSEQUENCES):
            time.sleep(_CONSEQUENCE_S)
            meeting = read_json(self._run.rendezvous(self._attempt))
            if child.name.startswith("trainer") and meeting and meeting["number"] != self._rendezvous:
                return  # node 0 had to choose another port: this torchrun met somebody else
        self._report("failed", f"{error} on {self._place.hosts[self._place.index]}")

    def _end(self) -> None:
        outcome = outcome_of(self._run, self._attempt)
        patience = 0.0 if outcome and outcome.kind == "failed" else 15.0
        for child in self._children.values():
            child.ask()
        for name, child in self._children.items():
            child.end(10.0 if name.startswith("rollout") else patience)
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


def main(path: str) -> None:
    """Run the agent of this node for the run at `path`; ends the process."""
    run, place = Run(Path(path)), Place.here()
    attempts = read_attempts(run)
    before = outcome_of(run, attempts[-1].number if attempts else 0)
    if before and before.kind != "interrupted" and (place.restarts or not attempts):
        print(f"attempt {before.attempt} ended as {before.kind}; nothing to do", flush=True)
        sys.exit(0)
    attempt = _await_attempt(run, place)
    log = run.log(attempt.number, f"agent-{place.index}")
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    message = "the agent ended without an outcome; its log says why"
    try:
        Agent(run, Config.from_toml([run.config]), place, attempt).supervise()
    except HpcrlError as error:
        message = f"{type(error).__name__}: {error}"
    finally:
        if outcome_of(run, attempt.number) is None:
            report_outcome(run, attempt.number, "failed", message, f"agent-{place.index}")
    outcome = outcome_of(run, attempt.number)
    sys.exit(1 if outcome is None or outcome.kind == "failed" else 0)
