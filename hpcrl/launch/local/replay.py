"""Trains a step of a run again by the trainer alone: no engine, no controller, no writes into the run.

What `hpcrl replay` asks of jobs/replay.py lies in a directory of its own, laid out as a run directory:

    config.toml     of the attempt that trained the step, with what was overridden
    replay.json     the run, the step, the checkpoint to begin from
    results.json    metrics of each step, as far as it got
    dumps/          what each step trains, with trainer.dump_data_batch
    logs/0/         output of torchrun and the ranks
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from hpcrl.config import Config
from hpcrl.config.sections.trainer import TrainerConfig
from hpcrl.data.rollouts import require_samples
from hpcrl.data.weight_files import PublishedWeights
from hpcrl.errors import ConfigError, DataError, RunError
from hpcrl.launch.local.foreground import job, run_here, to_stderr
from hpcrl.observe.metrics import merged, read_metrics, values_of
from hpcrl.observe.summary import STEP_SECONDS
from hpcrl.rundir.checkpoints import line_of, verify_checkpoint
from hpcrl.rundir.commit import committed, read_json, write_json, write_text
from hpcrl.rundir.layout import Run, step_of, version_of
from hpcrl.rundir.ledger import read_attempts

PROCESS = "trainer"
TOTAL_STEPS, STEPS_PER_EPOCH = "trainer/total_steps", "trainer/steps_per_epoch"
COMPARED = ("policy/", "loss/", "critic/", "rewards/", "logps/")
"""How the metrics begin that are what a step computes, and not how long it took."""
WEIGHTS = "weights"
"""Key of the digest of the weights that a step leaves, in its results."""


@dataclass(frozen=True)
class Plan:
    """Steps that are trained again.

    Attributes:
        run: path of the run directory.
        checkpoint: what training begins from; None: the initial model.
        first, step: the first step after it, and the last one, which is asked for.
        total_steps, steps_per_epoch: of the run, when it trained that step.
        times: how often, each time from the checkpoint.
        recorded: what the run recorded of each step, by step and name: training ends at the first step with another value; empty: it does not.
        versions: digests of the weights that the run has kept, by step; compared in the same way.
    """

    run: str
    checkpoint: str | None
    first: int
    step: int
    total_steps: int
    steps_per_epoch: int
    times: int
    recorded: dict[str, dict[str, float]] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)


def plan_replay(run: Run, step: int, times: int) -> Plan:
    """Return how a step is trained again: from the newest checkpoint before it, over the steps in between.

    Raises:
        RunError: it was not trained, or what it was trained from is gone.
    """
    totals, epochs = values_of(run, TOTAL_STEPS), values_of(run, STEPS_PER_EPOCH)
    if step not in totals:
        there = f"steps {min(totals)} to {max(totals)} have been" if totals else "none has been yet"
        raise RunError(f"{run.name} has not trained step {step}; {there}")
    checkpoint = _before(run, step)
    first = 1 if checkpoint is None else (step_of(checkpoint) or 0) + 1
    for number in range(first, step + 1):
        require_samples(run, number)
    if checkpoint is not None:
        verify_checkpoint(checkpoint)
    return Plan(
        run=str(run.path),
        checkpoint=None if checkpoint is None else str(checkpoint),
        first=first,
        step=step,
        total_steps=round(totals[step]),
        steps_per_epoch=round(epochs[step]),
        times=times,
    )


def plan_all(run: Run) -> Plan:
    """Return how all steps are trained again whose samples are there and that were trained as the last one was configured.

    Raises:
        RunError: there is none.
    """
    totals = values_of(run, TOTAL_STEPS)
    if not totals:
        raise RunError(f"{run.name} has not trained a step yet")
    last, first = max(totals), max(totals) + 1
    while first > 1 and _has_all(run, first - 1, last):
        first -= 1
    starts = [step_of(path) or 0 for path in line_of(run) if step_of(path) is not None]
    if config_of(run, 1) == config_of(run, last) and Config.from_toml([run.config]).trainer.resume_mode != "from_path":
        starts.insert(0, 0)
    begin = next((start for start in starts if first - 1 <= start < last), None)
    if begin is None:
        raise RunError(
            f"{run.name} has no checkpoint, and samples of all steps after it: they are removed as checkpoints are written; keep more with "
            "trainer.max_ckpts_to_keep, or look at `hpcrl checkpoint ls`"
        )
    plan, recorded = plan_replay(run, last, 1), merged(run)
    checkpoint = run.checkpoint(begin) if begin else None
    if checkpoint is not None:
        verify_checkpoint(checkpoint)
    steps = range(begin + 1, last + 1)
    values = {
        str(step): {name: value for name, value in recorded[step].items() if name.startswith(COMPARED)}
        for step in steps
    }
    versions = {
        str(version): weights.digest
        for version in committed(run.weights, version_of)
        if version in steps
        for weights in [PublishedWeights.read(run.weights_of(version))]
        if not weights.adapter and not weights.base
    }
    path = None if checkpoint is None else str(checkpoint)
    return replace(plan, checkpoint=path, first=begin + 1, recorded=values, versions=versions)


def differences(plan: Mapping[str, Any], result: Mapping[str, Any]) -> list[str]:
    """Return what of a step that was trained again is not as the run recorded it, to the last bit; nothing of a step that is not compared.

    Args:
        plan: the fields of a Plan.
        result: of the step, as `replay` returns them.
    """
    step, metrics = str(result["step"]), result["metrics"]
    recorded, expected = plan["recorded"].get(step, {}), plan["versions"].get(step)
    found = [
        f"{name}: {value!r} and {metrics[name]!r}"
        for name, value in recorded.items()
        if name in metrics and value != metrics[name] and not (math.isnan(value) and math.isnan(metrics[name]))
    ]
    return found if expected == result.get(WEIGHTS) else [*found, f"weights: {expected} and {result.get(WEIGHTS)}"]


def _has_all(run: Run, step: int, last: int) -> bool:
    """Return whether a step has its samples, and was trained with the configuration of the last one."""
    try:
        require_samples(run, step)
    except (DataError, RunError):
        return False
    return config_of(run, step) == config_of(run, last)


def _before(run: Run, step: int) -> Path | None:
    found = [path for path in line_of(run) if (number := step_of(path)) is not None and number < step]
    if found:
        return found[-1]
    trainer = Config.from_toml([config_of(run, step)]).trainer
    if trainer.resume_mode != "from_path" or trainer.resume_path is None:
        return None
    return Path(trainer.resume_path)


def config_of(run: Run, step: int) -> Path:
    """Return the configuration with which a step was trained: a later attempt may have another."""
    records = [record for record in read_metrics(run) if record.process == PROCESS and record.step == step]
    trained = [record.attempt for record in records if STEP_SECONDS in record.metrics]
    attempts = [attempt.number for attempt in read_attempts(run)]
    changed = (run.config_of(number) for number in attempts if number >= max(trained, default=0))
    return next((path for path in changed if path.is_file()), run.config)


def ranks_here(trainer: TrainerConfig, asked: int | None, role: Literal["policy", "ref"] = "policy") -> int:
    """Return how many ranks train on this machine: those of one of the run's nodes, or as many as share a model where that is more.

    Args:
        asked: by the person; None: no number.
        role: of the model.

    Raises:
        ConfigError: so many cannot share the model as the settings say.
    """
    together = trainer.model_parallel_size if role == "policy" else trainer.ref_model_parallel_size
    if trainer.strategy == "megatron":
        sizes = trainer.megatron_layout(role)
        experts = sizes.expert_model_parallel_size * sizes.experts_tensor_size * sizes.pipeline_model_parallel_size
        together = math.lcm(together, experts if sizes.expert_model_parallel_size > 1 else 1)
    else:
        together = math.lcm(together, getattr(trainer, role).fsdp_config.expert_parallel_size)
    if asked is None:
        return -(-trainer.placement.policy_num_gpus_per_node // together) * together
    if asked % together:
        path = f"trainer.{role}"
        given = f"{path}.sequence_parallel_size and {path}.fsdp_config.expert_parallel_size"
        given = f"{path}.megatron_config" if trainer.strategy == "megatron" else given
        raise ConfigError(
            f"--ranks: by {given} {together} ranks share a copy of the model, expected a multiple of that, found {asked}; "
            f"or add settings with smaller sizes"
        )
    return asked


def replay(plan: Plan, config: Config, ranks: int, place: Run) -> list[dict[str, Any]]:
    """Train the steps of the plan on this machine and return its results: `time`, `step` and `metrics`, in order.

    Args:
        place: an empty directory, or one that is made.
    """
    place.path.mkdir(parents=True, exist_ok=True)
    write_text(place.config, config.to_toml())
    write_json(place.path / "replay.json", asdict(plan))
    torchrun = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", f"--log-dir={place.path / 'logs'}",
    ]  # fmt: skip
    devices = {} if config.slurm.gpus else {"CUDA_VISIBLE_DEVICES": ""}
    run_here(place, PROCESS, [*torchrun, str(job("replay")), str(place.path)], devices, to_stderr)
    return read_json(place.path / "results.json") or []
