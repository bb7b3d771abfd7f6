"""Learning rates and checkpoints over the steps of a run, of SkyRL and Cosmos-RL."""

from __future__ import annotations

import re
import tempfile
from pathlib import Path
from typing import Any

from hpcrl.rundir.checkpoints import Retention, retire
from hpcrl.rundir.commit import begin, finish, unfenced
from hpcrl.rundir.layout import Run, step_of
from hpcrl.trainer.backends.schedule import is_due, lr_factor
from tests.golden.adapters.converted import cosmos
from tests.golden.case import Case


def learning_rate(case: Case) -> dict[str, Any]:
    """The settings go through the converter, which takes optm_warmup_start_factor for a sign of the later version."""
    total = case.params["training_steps"]
    settings = {f"train.{name}": value for name, value in case.params.items() if name.startswith("optm_")}
    optimizer = cosmos(settings).trainer.policy.optimizer_config
    return {"factor": [lr_factor(optimizer, update, total) for update in range(total + 1)], "error": None}


def checkpoint_saving(case: Case) -> dict[str, Any]:
    given = case.params
    names = ("save_freq", "save_freq_in_epoch", "enable_checkpoint")
    settings = {f"train.ckpt.{name}": given[name] for name in names}
    trainer = cosmos({**settings, "train.ckpt.export_safetensors": False}).trainer
    interval = trainer.checkpoint_interval(given["samples_per_epoch"] // case.inputs["required_rollouts"])
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
