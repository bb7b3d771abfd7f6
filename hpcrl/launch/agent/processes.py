"""Starts the processes of one node in one attempt, and finds the rendezvous of its torchrun.

A trainer of one rank is started without torchrun, which would be one more process that imports torch and a port that nobody needs.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Mapping
from typing import Any

from hpcrl.config import Config
from hpcrl.launch.agent.child import Child
from hpcrl.launch.agent.environment import Environments, raise_open_files
from hpcrl.launch.agent.network import choose_port, node_address
from hpcrl.launch.agent.nsight import records_engines, records_ranks, under_nsys
from hpcrl.launch.agent.recorder import FlightRecorder
from hpcrl.launch.agent.start import NodeContext
from hpcrl.launch.nodes import Node, make_plan, trainer_nodes
from hpcrl.rundir.commit import make_directory, read_json, write_json
from hpcrl.rundir.layout import Run
from hpcrl.rundir.process_names import JOBS, scorer_name
from hpcrl.runtime.numa import nodes_of_gpus
from hpcrl.runtime.scratch import Scratch, remove_abandoned, weight_copy_dir

_NUMBERS = {
    "rollout": "HPCRL_REPLICA",
    "reward": "HPCRL_SERVICE",
    "scorer": "HPCRL_SCORER",
    "part": "HPCRL_PART",
    "sandbox": "HPCRL_SANDBOXES",
}
_ONE_RANK = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}


class NodeProcesses:
    """Starts the processes of a node, and ends them.

    Args:
        grace_s: how long torchrun lets its ranks save before it kills them.

    Attributes:
        children: the processes that were started last, by name; what has ended stays in it.
        heartbeats: directory of their heartbeats.
        recorder: of the collectives of the ranks.
        rendezvous: number of the rendezvous that torchrun was started for, the trainer's or that of a scorer on several nodes; 0: none yet.
    """

    def __init__(
        self, run: Run, config: Config, context: NodeContext, attempt: int, node: Node, grace_s: float
    ) -> None:
        raise_open_files()
        self._run, self._attempt, self._node, self._grace_s = run, attempt, node, grace_s
        self._trainer_nodes = trainer_nodes(make_plan(config))
        self._one_rank = self._trainer_nodes * node.ranks == 1
        self._profiler = config.trainer.profiler
        self._address = "127.0.0.1" if context.local else node_address(config.slurm.network_interface)
        interface = None if context.local else config.slurm.network_interface
        self._copies = weight_copy_dir(config.generator.inference_engine) if node.replicas else None
        self._scratch = Scratch("agent")
        self.heartbeats = self._scratch.path / "heartbeats"
        self.heartbeats.mkdir()
        self.recorder = FlightRecorder(self._scratch.path / "collectives", run.collectives(attempt))
        self._environments = Environments(
            config, node, attempt, self._address, interface, self.heartbeats, context.local
        )
        self.children: dict[str, Child] = {}
        self.rendezvous = 0

    def start_controller(self) -> None:
        command = [sys.executable, self._job("controller"), str(self._run.path)]
        self._spawn("controller", command, signal.SIGINT, ignore_sigterm=True)

    def start_worker(self, name: str) -> None:
        """Start rollout-<replica>, part-<number>, reward-<service>, sandbox-<server>, or the ranks of scorer-<number>."""
        job, number = name.split("-")
        command, variables = [self._job(JOBS[job]), str(self._run.path)], {_NUMBERS[job]: number}
        if job == "scorer" and self._node.parts > 1:
            meeting = self.publish_rendezvous(name)
            self.rendezvous = meeting["number"]
            command = [*self._ranks_of_scorer(meeting), *command]
        elif job == "scorer" and self._node.torchrun:
            command = [*self._ranks_of_scorer(None), *command]
        elif job == "scorer":
            variables |= _ONE_RANK
        command = [sys.executable, *command]
        if job != "sandbox" and records_engines(self._profiler, self._node):
            command = self._under_nsys(command, name, "--cuda-graph-trace=node")  # the kernels of each graph too
        self._spawn(name, command, signal.SIGTERM, False, **variables)

    def follow_scorer(self, name: str) -> None:
        """Start this node's ranks of a scorer whose first ranks are on another node, and restart them with those.

        Args:
            name: as of `Node.follows`.
        """
        number = self._node.scorers[0]
        meeting = read_json(self._run.rendezvous(self._attempt, scorer_name(number)))
        if meeting is None or meeting["number"] == self.rendezvous:
            return
        self.rendezvous = meeting["number"]
        if old := self.children.pop(name, None):
            old.end(0.0)
        command = [sys.executable, *self._ranks_of_scorer(meeting), self._job(JOBS["scorer"]), str(self._run.path)]
        self._spawn(name, command, signal.SIGTERM, False, **{_NUMBERS["scorer"]: str(number)})

    def _ranks_of_scorer(self, meeting: Mapping[str, Any] | None) -> list[str]:
        """Return the words with which torchrun starts a scorer's ranks on this node.

        Args:
            meeting: where it meets those on other nodes; None: there are none.
        """
        place = ["--standalone"]
        if meeting is not None:
            place = [f"--nnodes={self._node.parts}", f"--node-rank={self._node.part}"]
            place += [f"--master-addr={meeting['address']}", f"--master-port={meeting['port']}"]
        shared = [f"--log-dir={self._scratch.path}", "--max-restarts=0", f"--nproc-per-node={self._node.scorer_ranks}"]
        return ["-m", "torch.distributed.run", *place, *shared, *self._binding(scorer_name(self._node.scorers[0]))]

    def _binding(self, process: str) -> list[str]:
        """Return the option of torchrun that binds each rank to the cores near its GPU, where it can."""
        if not self._node.gpus or not nodes_of_gpus(self._environments.of(process)["CUDA_VISIBLE_DEVICES"]):
            return []
        return ["--numa-binding=node"]

    def _under_nsys(self, command: list[str], process: str, *more: str) -> list[str]:
        report = self._run.nsys_report(self._attempt, process)
        make_directory(report.parent)
        return under_nsys(command, report, *more)

    def _job(self, name: str) -> str:
        return str(self._run.code / "jobs" / f"{name}.py")

    def _spawn(
        self,
        name: str,
        command: list[str],
        stop_signal: signal.Signals = signal.SIGTERM,
        ignore_sigterm: bool = False,
        **environment: str,
    ) -> None:
        print(f"starting {name}: {' '.join(command)}", flush=True)
        log = self._run.log(self._attempt, name)
        everything = {**self._environments.of(name), **environment}
        self.children[name] = Child(name, command, everything, log, stop_signal, ignore_sigterm)

    def publish_rendezvous(self, scorer: str = "") -> dict[str, Any]:
        """Publish the next rendezvous of the trainer's, or a scorer's, torchruns, and return it; those of earlier attempts are removed.

        Called on the first of them.
        """
        value = {"number": self.rendezvous + 1, "address": self._address, "port": choose_port(self._address)}
        write_json(self._run.rendezvous(self._attempt, scorer), value)
        for earlier in range(1, self._attempt):
            self._run.rendezvous(earlier, scorer).unlink(missing_ok=True)
        return value

    def follow_rendezvous(self) -> None:
        """Start the ranks by torchrun at the rendezvous of node 0, and again where node 0 had to choose another port."""
        meeting = read_json(self._run.rendezvous(self._attempt))
        if meeting is None or meeting["number"] == self.rendezvous:
            return
        self.rendezvous, name = meeting["number"], f"trainer-{self._node.index}"
        if old := self.children.pop(name, None):
            old.end(0.0)
        ranks = [sys.executable, "-u", self._job(JOBS["trainer"]), str(self._run.path)]
        more = self.recorder.prepare()
        if records_ranks(self._profiler, self._node):
            ranks = self._under_nsys(ranks, "rank-%q{RANK}")
        if self._one_rank:
            more |= _ONE_RANK
        else:
            ranks = [
                sys.executable, "-m", "torch.distributed.run", f"--log-dir={self._scratch.path}", "--signals-to-handle=SIGHUP",
                f"--nnodes={self._trainer_nodes}", f"--node-rank={self._node.index}", f"--nproc-per-node={self._node.ranks}",
                f"--master-addr={meeting['address']}", f"--master-port={meeting['port']}", "--max-restarts=0", *self._binding(name), "--no-python", *ranks,
            ]  # fmt: skip
            more |= {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(round(self._grace_s))}
        # The ranks get the stop request themselves. torchrun would end at the second SIGTERM, and they with it, while they save.
        self._spawn(name, ranks, signal.SIGHUP, ignore_sigterm=True, **more)

    def ended(self, name: str) -> bool:
        """Return whether a process was started and has ended."""
        return name in self.children and self.children[name].poll() is not None

    def end(self, patience_s: float) -> None:
        """End all processes: replicas and services have 10 s for it, the others `patience_s`."""
        for child in self.children.values():
            child.request_stop()
        for name, child in self.children.items():
            child.end(10.0 if name in self._node.workers else patience_s)
        self._scratch.remove()
        remove_abandoned(*filter(None, [self._copies]))  # of those that had to be killed
