"""Agent of one element of the evaluation job (slurm.evaluation), a job array beside the run's own.

It evaluates the versions that wait and leaves its node when none does. The end of its batch script (launch/requeue/evaluation.py) queues it
again as long as more may come. Slurm may take it away at any time: finished rows are on disk.
"""

from __future__ import annotations

import fcntl
import os
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import IO

from hpcrl.config import Config
from hpcrl.errors import HpcrlError
from hpcrl.launch.agent.child import Child, Restarts, concerns_the_run
from hpcrl.launch.agent.environment import Environments
from hpcrl.launch.agent.network import node_address
from hpcrl.launch.agent.patience import FilesystemPatience
from hpcrl.launch.agent.start import NodeContext, log_to, serve_element
from hpcrl.launch.nodes import Node
from hpcrl.launch.requeue.elastic import AGAIN, ended, replaced
from hpcrl.launch.requeue.evaluation import FAILED, nothing_to_do, waiting_versions
from hpcrl.launch.retention import end_of_run
from hpcrl.observe.alerts.monitor import monitor_process
from hpcrl.observe.conclude import conclude_generated
from hpcrl.observe.metrics import values_of
from hpcrl.observe.trackers.base import senders, trackers_of
from hpcrl.rundir.attempt_config import attempt_config
from hpcrl.rundir.checkpoints import Retention, retire
from hpcrl.rundir.checksums import require_unchanged
from hpcrl.rundir.commit import make_directory
from hpcrl.rundir.evaluations import begun_evaluations
from hpcrl.rundir.layout import Run
from hpcrl.rundir.ledger import read_attempts, read_outcome, require_newest
from hpcrl.rundir.process_names import evaluation_name
from hpcrl.runtime.followers import Followers
from hpcrl.runtime.scratch import Scratch

_POLL_S, _GRACE_S, _SENDING_S = 0.5, 15.0, 600.0


def main(path: str, element: int) -> None:
    """Evaluate what waits for one element of the run at `path`; ends the process."""
    run = Run(Path(path))
    serve_element(lambda context, signals: serve(run, element, context, signals))


def serve(run: Run, element: int, context: NodeContext, signals: list[int]) -> int:
    """Evaluate until no version waits or a signal comes; return the exit status of the agent."""
    array, patience = os.environ["SLURM_ARRAY_JOB_ID"], FilesystemPatience(run)
    while not signals:
        with patience.tolerating():
            status = _serve_once(run, array, element, context, signals)
            if status is not None:
                return status
            continue
        time.sleep(_POLL_S)
    return AGAIN


def _serve_once(run: Run, array: str, element: int, context: NodeContext, signals: list[int]) -> int | None:
    """Conclude or evaluate what waits; return the exit status of the agent, or None where more may wait."""
    if why := nothing_to_do(run, array, element):
        print(f"nothing to do: {why}", flush=True)
        if not replaced(run, array) and ended(run):
            _follow(run, signals)
            _delete_the_rest(run)
        return 0
    success_reward = attempt_config(run).generator.success_reward
    if conclude_generated(run, evaluation_name(element), success_reward):
        return None
    if not waiting_versions(run, element):
        print("no version waits; another job may use this node", flush=True)
        return AGAIN
    attempt = read_attempts(run)[-1].number
    log_to(run.log(attempt, f"agent-{evaluation_name(element)}"))
    require_unchanged(run)
    return _evaluate(run, element, attempt, context, signals) or None


def _evaluate(run: Run, element: int, attempt: int, context: NodeContext, signals: list[int]) -> int:
    """Run jobs/evaluation.py, again where it fails for a reason of its own; return 0, also after a signal, `FAILED`, or the exit status of an error of the run."""
    config, name = attempt_config(run, attempt), evaluation_name(element)
    restarts, scratch = Restarts(config.slurm.replica_restarts), Scratch("agent")
    command = [sys.executable, str(run.code / "jobs" / "evaluation.py"), str(run.path), str(element)]
    environment = _environment(config, attempt, context, scratch.path)
    try:
        while not signals:
            print(f"starting {name}: {' '.join(command)}", flush=True)
            child = Child(name, command, environment, run.log(attempt, name))
            while child.poll() is None and not signals:
                time.sleep(_POLL_S)
            child.end(_GRACE_S)
            if signals or not (status := child.poll()):
                break
            restarts.ended()
            print(child.first_error(), flush=True)
            if concerns_the_run(status):
                return status
            if restarts.given_up:
                return FAILED
            while restarts.due is not None and time.monotonic() < restarts.due and not signals:
                time.sleep(_POLL_S)
            restarts.started()
        return 0
    finally:
        scratch.remove()


def _environment(config: Config, attempt: int, context: NodeContext, heartbeats: Path) -> dict[str, str]:
    """Return the environment of the job's process, which has all devices of the element."""
    slurm, engine = config.slurm, config.generator.inference_engine
    cpus, _, _ = slurm.element(slurm.evaluation, config.replicas_per_node)
    own, gpus = replace(config, slurm=replace(slurm, cpus_per_task=cpus)), engine.gpus if slurm.gpus else 0
    node = Node(0, "rollout", 0, (config.lent_replicas.stop,), gpus, 0)
    address = "127.0.0.1" if context.local else node_address(slurm.network_interface)
    environments = Environments(own, node, attempt, address, slurm.network_interface, heartbeats, context.local)
    return environments.of(node.workers[0])


def _follow(run: Run, signals: list[int]) -> None:
    """Bring the scores to TensorBoard, trackers and alerts, as the controller of a run that goes on does; one element at a time."""
    from hpcrl.observe.tensorboard.follower import Follower

    if not (attempts := read_attempts(run)):
        return
    attempt, trainer = attempts[-1].number, attempt_config(run).trainer
    commands = senders(run, trackers_of(trainer.logger)) | monitor_process(run, attempt, trainer)
    make_directory(run.evals)
    with (run.evals / ".lock").open("a") as lock:
        _hold(lock, signals)
        with Follower(run), Followers(run, attempt, commands) as followers:
            followers.end(_SENDING_S, lambda: bool(signals))


def _hold(lock: IO[str], signals: list[int]) -> None:
    """Lock a file until it is closed, once no other element holds it; a filesystem without locks has none."""
    while not signals:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            time.sleep(_POLL_S)
        except OSError:
            return


def _delete_the_rest(run: Run) -> None:
    """Delete what trainer.keep_when_done does not keep of a run that is done, and what only its evaluations still needed."""
    outcome = read_outcome(run) if run.config.is_file() else None
    if outcome is None or outcome.kind != "done" or begun_evaluations(run):
        return
    trainer = attempt_config(run).trainer
    retention, fence = Retention.of(trainer), partial(require_newest, run, outcome.attempt)
    if trainer.keep_when_done != "all":
        end_of_run(run, trainer.keep_when_done, retention, trainer.upload, outcome.attempt)
    elif retention.metric:
        try:
            retire(run, retention, values_of(run, retention.metric), fence)
        except HpcrlError as error:  # the run is done all the same
            print(f"checkpoints that only evaluations needed stay: {error}", flush=True)
