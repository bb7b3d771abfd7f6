"""Reads the progress of a run from its process statuses and its checkpoints."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hpcrl.observe.summary import pace_of
from hpcrl.rundir.checkpoints import newest_of_line
from hpcrl.rundir.commit import COMMIT
from hpcrl.rundir.layout import Run
from hpcrl.rundir.process_names import WORKER
from hpcrl.runtime.process_status import LEFT, ProcessStatus
from hpcrl.units import duration

SILENT_S = 60.0
_PHASES = {
    "load_rows": "reading samples",
    "fwd_logprobs_values_reward": "computing log-probabilities",
    "compute_advantages_and_returns": "estimating advantages",
    "critic_train": "training the critic",
    "policy_train": "training",
    "wait_for_critic": "waiting for the critic",
    "wait_for_policy": "waiting for the policy",
    "update_ref_with_policy": "updating the reference",
    "sync_weights": "publishing weights",
    "offload": "leaving the GPU to engines",
    "onload": "taking the GPU back",
    "save_checkpoints": "writing a checkpoint",
    "save_hf_model": "exporting",
    "dump_data_batch": "writing dumps",
    "eval": "evaluating",
}
"""Words for phases of the trainer's timeline."""


@dataclass(frozen=True)
class Progress:
    """Progress of a run; None is unknown.

    Attributes:
        activity: state of the trainer's process status.
        step, total: step in work or done last, of so many.
        seconds_per_step: in total (hpcrl/observe/summary.py).
        ready, replicas: rollout replicas that serve, of so many.
        checkpoint: name of the newest checkpoint, s000041 after step 41.
        checkpoint_age: seconds since its commit.
        silence: seconds since a process of the attempt last renewed its status.
        within: phase of the trainer in its step, with micro-batches, or of the controller for which it waits; empty: not known.
    """

    activity: str
    step: int | None
    total: int | None
    seconds_per_step: float | None
    ready: int
    replicas: int | None
    checkpoint: str | None
    checkpoint_age: float | None
    silence: float | None
    within: str = ""

    @property
    def eta(self) -> float | None:
        """Seconds until the last step is done."""
        if self.seconds_per_step is None or self.step is None or self.total is None:
            return None
        return max(0, self.total - self.step + 1) * self.seconds_per_step

    def __str__(self) -> str:
        parts = [self.activity or "starting", *([self.within] if self.within else [])]
        if self.step and self.total and "/" not in self.activity:
            parts.append(f"step {self.step}/{self.total}")
        if self.seconds_per_step is not None:
            parts.append(f"{self.seconds_per_step:.1f} s/step")
        if self.step is not None and self.activity not in LEFT:
            parts.append(f"ETA {duration(self.eta) if self.eta is not None else 'unknown'}")
        if self.replicas:
            parts.append(f"replicas {self.ready}/{self.replicas}")
        if self.checkpoint is not None and self.checkpoint_age is not None:
            parts.append(f"last commit {duration(self.checkpoint_age)} ago ({self.checkpoint})")
        elif self.step:
            parts.append("nothing committed yet")
        if self.silence is not None and self.silence > SILENT_S:
            parts.append(f"silent for {duration(self.silence)}")
        return " · ".join(parts)


def progress_of(run: Run, statuses: Sequence[ProcessStatus], ended: bool) -> Progress:
    """Return how far a run is.

    Args:
        statuses: of the processes of its newest attempt.
        ended: whether that has ended, and replicas are of no interest.
    """
    by_name = {status.process: status for status in statuses}
    trainer, controller = by_name.get("trainer"), by_name.get("controller")
    facts = trainer.facts if trainer else {}
    total = facts.get("total") or (controller.facts.get("total_steps") if controller else None)
    newest = newest_of_line(run)
    # ages by the clock of the file server, and not by those of the nodes
    ages = {status.process: _age(run.status_file(status.process)) for status in statuses}
    ready = [
        status
        for status in statuses
        if status.process.startswith(WORKER) and "version" in status.facts and (ages[status.process] or 0) < SILENT_S
    ]
    known = [age for age in ages.values() if age is not None]
    return Progress(
        activity=trainer.state if trainer else "",
        step=facts.get("step"),
        total=total,
        seconds_per_step=None if ended else pace_of(run),
        ready=len(ready),
        replicas=controller.facts.get("replicas") if controller and not ended else None,
        checkpoint=newest.name if newest else None,
        checkpoint_age=_age(newest / COMMIT) if newest else None,
        silence=min(known) if known else None,
        within="" if ended else _within(facts, controller.facts if controller else {}),
    )


def _within(trainer: Mapping[str, Any], controller: Mapping[str, Any]) -> str:
    phase = trainer.get("phase", "")
    if phase == "wait_for_generation_buffer":
        return _awaited(controller)
    words = _PHASES.get(phase, "")
    if trainer.get("begun"):
        of = f"/{trainer['expected']}" if trainer.get("expected") else ""
        words += f", micro-batch {trainer['begun']}{of}"
    return words


def _awaited(controller: Mapping[str, Any]) -> str:
    if controller.get("waits_for_evaluation"):
        return f"evaluating, {controller['eval_open']} rows left"
    if controller.get("unscored"):
        return f"scoring, {controller['unscored']} groups left"
    if "batch_size" in controller and controller.get("running"):
        return f"generating, {controller['finished']}/{controller['batch_size']} groups"
    return ""


def _age(path: os.PathLike[str]) -> float | None:
    try:
        return max(0.0, time.time() - os.stat(path).st_mtime)
    except FileNotFoundError:
        return None
