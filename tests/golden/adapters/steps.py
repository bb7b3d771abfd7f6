"""Learning rates and checkpoints over the steps of a run, of SkyRL and Cosmos-RL."""

from __future__ import annotations

import re
import tempfile
from pathlib import Path
from typing import Any

from hpcrl.config import ModelConfig, OptimizerConfig, PolicyConfig, TrainerConfig
from hpcrl.config.derive import checkpoint_interval
from hpcrl.run.checkpoints import Retention, retire
from hpcrl.run.commit import begin, finish, unfenced
from hpcrl.run.layout import Run, step_of
from hpcrl.trainer.schedule import is_due, lr_factor
from tests.golden.cases import Case


def learning_rate(case: Case) -> dict[str, Any]:
    """Of w warm-up steps, Cosmos-RL's last has the full rate already: there are w - 1 here."""
    given, total = case.params, case.params["training_steps"]
    steps = given["optm_warmup_steps"]
    warmup = round(steps * total) if isinstance(steps, float) else steps
    optimizer = OptimizerConfig(
        num_warmup_steps=max(0, warmup - 1),
        scheduler=given["optm_decay_type"] or "constant_with_warmup",
        decay_ratio=given["optm_decay_ratio"],
        min_lr_factor=given["optm_min_lr_factor"],
        warmup_start_factor=given.get("optm_warmup_start_factor", 0.0),
    )
    return {"factor": [lr_factor(optimizer, update, total) for update in range(total + 1)], "error": None}


def checkpoint_saving(case: Case) -> dict[str, Any]:
    given = case.params
    trainer = TrainerConfig(
        policy=PolicyConfig(model=ModelConfig(path="unused")),
        ckpt_interval=given["save_freq"],
        ckpt_interval_epochs=given["save_freq_in_epoch"] or None,
    )
    epoch = given["samples_per_epoch"] // case.inputs["required_rollouts"]
    interval = checkpoint_interval(trainer, epoch) if given["enable_checkpoint"] else 0
    return {"save": is_due(interval, case.inputs["current_step"], case.inputs["total_steps"])}


def cleanup(case: Case) -> dict[str, Any]:
    """Committed checkpoints, and directories that are none; a new commit has just been made."""
    with tempfile.TemporaryDirectory() as place:
        (Path(place) / "config.toml").touch()
        run, names = Run.open(place), dict[str, str]()
        for name in case.inputs["dirs"]:
            if (step := _step(name)) is None:
                (run.checkpoints / name).mkdir(parents=True)
            else:
                begin(run.checkpoint(step), 1)
                finish(run.checkpoint(step), 1, step=step)
                names[run.checkpoint(step).name] = name
        retire(run, Retention(case.params["max_ckpts_to_keep"]), {}, unfenced)
        return {"remaining": sorted(names.get(path.name, path.name) for path in run.checkpoints.iterdir())}


def step_from_path(case: Case) -> dict[str, Any]:
    path = Path(case.inputs["path"])
    step = _step(path.name)
    found = step_of(path if step is None else path.with_name(f"s{step:06d}"))
    return {"step": -1 if found is None else found}


def _step(name: str) -> int | None:
    found = re.fullmatch(r"global_step_(\d+)", name)
    return int(found[1]) if found else None


ADAPTERS = {
    "lr_factor*": learning_rate,
    "check_checkpoint_saving": checkpoint_saving,
    "checkpoint.cleanup": cleanup,
    "checkpoint.step_from_path": step_from_path,
}
