"""Where a scenario runs: nodes of the test cluster of its own, a folder, and the verbs that a person or a fault has there.

A run on it is a real one (agents, controller, rollout workers, torchrun), of a tiny model; its engines are the stand-in's unless told.
"""

from __future__ import annotations

import json
import random
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomli
import tomli_w

from hpcrl.launch.requeue.requests import requests_of
from hpcrl.rundir.commit import write_text
from hpcrl.rundir.layout import Run
from hpcrl.rundir.ledger import Outcome, outcome_of
from tests.jobs.small_run import HPCRL, logs_of
from tests.paths import CONFIGS
from tests.processes import ancestors_of, command_of, is_srun, parent_of, processes_of, replica_of, variable
from tests.slurm.conftest import DevCluster

STAND_IN = Path(__file__).parent / "stand_in"
STEPS, BATCH, SAMPLES = 12, 4, 2
LATENCY_S = 0.15  # of a group, which paces the steps
QUIET_S = 0.2
START_S = 150.0  # an attempt imports torch four times, beside three other scenarios on two cores


def in_first_attempt(line: str) -> str:
    """Return the shell line that runs `line` at the first start of a job only."""
    return f'if [ -z "$SLURM_RESTART_COUNT" ]; then {line}; fi'


def fault(points: str) -> str:
    """Return the shell line that arms fault points (hpcrl/faults.py)."""
    return f"export HPCRL_FAULT='{points}'"


class TakenDownError(Exception):
    """The tests are being ended while this scenario runs."""


@dataclass
class Scenario:
    """One scenario's place.

    Attributes:
        nodes: names of the nodes that are its own.
        others: names of all other nodes of the cluster.
        path: its folder.
        ended: set when the tests end early.
        uninterrupted: waits for the run that nothing happens to, and returns its values by name and step.
    """

    cluster: DevCluster
    nodes: list[str]
    others: list[str]
    path: Path
    ended: threading.Event
    uninterrupted: Callable[[], dict[str, dict[int, float]]]

    @property
    def _knobs(self) -> Path:
        return self.path / "knobs.json"

    @property
    def _stand_in_lines(self) -> list[str]:
        return [f"export PYTHONPATH='{STAND_IN}' STAND_IN='{self._knobs}'"]

    # ---- what a person does

    def submit(
        self,
        settings: dict[str, Any] | None = None,
        *arguments: str,
        name: str = "run",
        setup: Sequence[str] = (),
        pinned: bool = True,
        stand_in: bool = True,
    ) -> Run:
        """Submit a run on this scenario's nodes and return it at once.

        Args:
            settings: by dotted path, over those of `experiment`; None leaves one out.
            setup: shell lines for its batch script.
            pinned: whether it takes all nodes of the scenario, rather than as many of them as it needs.
            stand_in: whether its engines are the stand-in's rather than vLLM's.
        """
        done = self.try_submit(settings, *arguments, name=name, setup=setup, pinned=pinned, stand_in=stand_in)
        assert done.returncode == 0, done.stdout + done.stderr
        return self.run_of(name)

    def try_submit(
        self,
        settings: dict[str, Any] | None = None,
        *arguments: str,
        name: str = "run",
        setup: Sequence[str] = (),
        pinned: bool = True,
        stand_in: bool = True,
    ) -> subprocess.CompletedProcess[str]:
        self.write_experiment(name, settings, setup, pinned, stand_in)
        return self.hpcrl("submit", f"{name}.toml", *arguments)

    def write_experiment(
        self,
        name: str,
        settings: dict[str, Any] | None = None,
        setup: Sequence[str] = (),
        pinned: bool = True,
        stand_in: bool = True,
    ) -> None:
        lines = [*(self._stand_in_lines if stand_in else []), "export HF_HUB_OFFLINE=1", *setup]
        write_text(self.path / f"{name}.toml", tomli_w.dumps(self._experiment(name, settings or {}, lines, pinned)))

    def _experiment(self, name: str, settings: dict[str, Any], setup: list[str], pinned: bool) -> dict[str, Any]:
        rows = self.path / "rows.jsonl"
        write_rows(rows, 640)
        if not self._knobs.exists():
            self.knobs()
        tree = tomli.loads(_EXPERIMENT)
        told = {
            "data.train_data": [str(rows)],
            "data.val_data": [str(rows)],
            "trainer.run_name": name,
            "trainer.policy.model.path": str(CONFIGS / "quickstart" / "model"),
            "slurm.root": str(self.path / "runs"),
            "slurm.setup": setup,
            **self._where(pinned),
            **settings,
        }
        for path, value in told.items():
            *sections, key = path.split(".")
            section = tree
            for part in sections:
                section = section.setdefault(part, {})
            if value is None:
                section.pop(key, None)
            else:
                section[key] = value
        return tree

    def _where(self, pinned: bool) -> dict[str, str]:
        """Return the settings that keep a run to this scenario's nodes: on all of them, or on any that Slurm chooses."""
        if pinned:
            return {"slurm.extra.nodelist": ",".join(self.nodes)}
        return {"slurm.extra.exclude": ",".join(self.others)} if self.others else {}

    def run_of(self, name: str = "run") -> Run:
        return Run(self.path / "runs" / "faults" / name)

    def hpcrl(self, *arguments: str, timeout: float = 600) -> subprocess.CompletedProcess[str]:
        """Call hpcrl on the login node."""
        return self.cluster.run([HPCRL, *arguments], timeout, self.path)

    def told(self, *arguments: str) -> str:
        done = self.hpcrl(*arguments)
        return done.stdout + done.stderr

    def slurm(self, *command: str, timeout: float = 60) -> str:
        """Return what a command of Slurm prints; it must succeed."""
        return self.cluster.ask(command, timeout)

    def job_of(self, run: Run) -> str:
        return json.loads(run.submission.read_text())["job_id"]

    def queued(self, run: Run) -> str:
        """Return Slurm's state of the run's job and why it waits, empty when it has left the queue."""
        array, _, element = self.job_of(run).partition("_")
        done = self.cluster.run(["squeue", "-h", "-r", "-t", "all", "-j", array, "-o", "%K %T %r"])
        states = [line.split(maxsplit=1)[1] for line in done.stdout.splitlines() if line.split()[0] == element]
        return "".join(state for state in states if state.split()[0] not in _OVER)

    # ---- what happens to a run

    def knobs(self, **told: Any) -> None:
        """Tell the engines of this scenario's runs how to behave from now on (stand_in/vllm/knobs.py)."""
        write_text(self._knobs, json.dumps({"latency_s": LATENCY_S, **told}))

    def preempt(self, seconds: float = 2, nodes: Sequence[str] | None = None) -> str:
        """Let a job of a higher partition take nodes of this scenario, all unless told, as soon as it can; return its id."""
        wanted = self.nodes if nodes is None else nodes
        options = [f"-N{len(wanted)}", "-w", ",".join(wanted), "--exclusive", "-t1", "-o", "/dev/null"]
        return self.slurm("sbatch", "--parsable", "-p", "high", *options, "--wrap", f"sleep {seconds}")

    def cut(self, node: str) -> None:
        """Take a node off the network."""
        self.slurm("ip", "link", "set", node, "down")

    def join(self, node: str) -> None:
        self.slurm("ip", "link", "set", node, "up")

    def noted(self, what: str) -> int:
        """Return how many samples the engines were asked for, or answered (stand_in/vllm/server.py)."""
        return sum(map(int, self._knobs.with_suffix(f".{what}").read_text().split()))

    def processes(self, run: Run, *words: str) -> list[int]:
        """Return the processes of a run whose command line has all of `words`."""
        return [pid for pid in processes_of(run) if all(word in command_of(pid) for word in words)]

    def rank(self, run: Run, number: int = 0) -> int:
        """Return the process of a trainer rank."""
        return self._one(
            [pid for pid in self.processes(run, "/jobs/train.py") if variable(pid, "RANK") == str(number)],
            f"rank {number}",
        )

    def torchrun(self, run: Run) -> int:
        return self._one(self.processes(run, "torch.distributed.run"), "torchrun")

    def controller(self, run: Run) -> int:
        return self._one(self.processes(run, "/jobs/controller.py"), "controller")

    def worker(self, run: Run, replica: int = 0) -> int:
        return self._one(
            [pid for pid in self.processes(run, "/jobs/rollout.py") if replica_of(pid) == str(replica)],
            f"rollout-{replica}",
        )

    def engine(self, run: Run, replica: int = 0) -> int:
        """Return the process of a replica's HTTP server."""
        return self._one(
            [pid for pid in self.processes(run, "hpcrl.engines.vllm.main") if replica_of(pid) == str(replica)],
            f"engine {replica}",
        )

    def engine_core(self, run: Run, replica: int = 0) -> int:
        return self._one(
            [pid for pid in self.processes(run, "spawn_main") if replica_of(pid) == str(replica)], f"core {replica}"
        )

    def agents(self, run: Run) -> list[int]:
        """Return the node agents, which alone get Slurm's signals under proctrack/cgroup."""
        return [pid for pid in self.processes(run, "submitit.core._submit") if not is_srun(pid)]

    def sruns(self, run: Run) -> list[int]:
        return [pid for pid in self.processes(run, "submitit.core._submit") if is_srun(pid)]

    def batch_shell(self, run: Run) -> int:
        parents = {parent_of(pid) for pid in self.sruns(run)} - set(self.sruns(run))
        return self._one(list(parents), "batch shell")

    def agent(self, run: Run, node: int = 0) -> int:
        return self._one(
            [pid for pid in self.agents(run) if variable(pid, "SLURM_NODEID") == str(node)], f"agent {node}"
        )

    def daemons(self, node: str) -> list[int]:
        """Return the slurmd of a node of this scenario's cluster."""
        root = json.loads((self.cluster.directory / "cluster.json").read_text())["pid"]
        return [
            int(path.name)
            for path in Path("/proc").glob("[0-9]*")
            if command_of(int(path.name)).endswith(f"slurmd -D -N {node}") and root in ancestors_of(int(path.name))
        ]

    def _one(self, found: list[int], what: str) -> int:
        assert len(found) == 1, f"{what}: expected one process, found {[(pid, command_of(pid)) for pid in found]}"
        return found[0]

    # ---- waiting

    def pause(self, seconds: float) -> None:
        if self.ended.wait(seconds):
            raise TakenDownError("a pause")

    def wait(self, condition: Callable[[], Any], what: str, seconds: float = START_S, run: Run | None = None) -> Any:
        """Return the first true value of `condition`."""
        asked = time.monotonic()
        deadline = asked + seconds
        while not (value := condition()):
            if self.ended.is_set():
                raise TakenDownError(what)
            now = time.monotonic()
            assert now < deadline, f"not within {seconds:.0f} s: {what}\n{self.report(run)}"
            time.sleep(max(QUIET_S, 3 * (now - asked)))  # a question to Slurm takes time from those that it waits for
            asked = time.monotonic()
        return value

    def reach(self, run: Run, step: int) -> None:
        """Wait until the batch of `step` is there, and so the step before it trained."""
        self.wait(run.batch(step).exists, f"the batch of step {step}", START_S, run)

    def wait_until_forgotten(self, run: Run) -> None:
        """Wait until Slurm no longer knows the run's job."""
        command = ["scontrol", "show", "job", self.job_of(run)]
        self.wait(lambda: self.cluster.run(command).returncode != 0, "Slurm forgets it", 90, run)

    def outcome(self, run: Run, attempt: int, seconds: float = START_S) -> Outcome:
        """Return how an attempt ended, once it has."""
        return self.wait(lambda: outcome_of(run, attempt), f"attempt {attempt} ends", seconds, run)

    def report(self, run: Run | None = None) -> str:
        """Return all that is known, for the message of a failed assertion."""
        nodes = self.cluster.run(["sinfo", "-N", "-o", "%N %T %E"]).stdout
        parts = [self.cluster.run(["squeue"]).stdout, nodes, self.told("status")]
        for one in [run] if run else [self.run_of(p.stem) for p in self.path.glob("runs/faults/[!.]*")]:
            parts += [self.told("status", str(one.path)), f"processes: {list(map(command_of, processes_of(one)))}"]
            parts += [logs_of(one)]
            parts += [path.read_text(errors="replace")[-3000:] for path in one.slurm.resolve().glob("*.out")]
        return "\n".join(parts)

    def end(self) -> None:
        """Take away what still runs here."""
        self.cluster.run(["sh", "-c", f"scancel -f $(squeue -h -o %A -w {','.join(self.nodes)})"])
        for path in self.path.glob("runs/*/[!.]*/submission.json"):
            self.cluster.run(["scancel", *requests_of(json.loads(path.read_text())).values()])


_OVER = ("COMPLETED", "CANCELLED", "FAILED", "TIMEOUT", "NODE_FAIL", "PREEMPTED", "BOOT_FAIL", "OUT_OF_MEMORY")
_EXPERIMENT = f"""
[trainer]
project_name = "faults"
max_steps = {STEPS}
train_batch_size = {BATCH}
policy_mini_batch_size = {BATCH // 2}
micro_train_batch_size_per_gpu = 2
max_prompt_length = 16
gradient_checkpointing = false
eval_interval = 0
ckpt_interval = 3
ckpt_mode = "sync"
max_ckpts_to_keep = -1

[trainer.policy.optimizer_config]
lr = 1e-3

[trainer.policy.fsdp_config.mixed_precision]
param_dtype = "fp32"

[generator]
n_samples_per_prompt = {SAMPLES}
on_logprob_mismatch = "warn"  # the stand-in's tokens and numbers are no policy's

[generator.inference_engine]
model_dtype = "float32"

[generator.sampling_params]
max_generate_length = 8

[environment]
env_class = "sort_letters"

[slurm]
partition = "main"
time_minutes = 10
cpus_per_task = 1
exclusive = true
"""


def write_rows(path: Path, count: int) -> None:
    """Write a dataset of so many rows."""
    source, rows = random.Random(7), []
    for _ in range(count):
        word = "".join(source.choices("abcdefghijkl", k=5))
        truth = {"method": "rule", "ground_truth": "".join(sorted(word))}
        rows.append({"prompt": [{"role": "user", "content": f"sort: {word}"}], "reward_spec": truth})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
