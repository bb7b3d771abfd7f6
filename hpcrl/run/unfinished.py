"""What a checkpoint inside a step says about the settings that its batch was begun with; without torch, for `hpcrl resume` asks too.

checkpoints/s000041u2/batch.json has them under "settings"; hpcrl/trainer/midstep.py writes it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hpcrl.config.trainer import TrainerConfig
from hpcrl.run.checkpoints import line_of
from hpcrl.run.commit import read_json
from hpcrl.run.layout import Run, position_of

FACTS = "batch.json"


def settings_of(trainer: TrainerConfig) -> dict[str, Any]:
    """Return what a half-trained batch depends on, by names below `trainer`, as JSON gives it back."""
    names = ("policy_mini_batch_size", "critic_mini_batch_size", "update_epochs_per_batch")
    found = {name: getattr(trainer, name) for name in names}
    found |= {f"algorithm.{name}": value for name, value in asdict(trainer.algorithm).items()}
    found["critic.model.path"] = trainer.critic.model.path
    return json.loads(json.dumps(found))


def changed_since(settings: Mapping[str, Any], trainer: TrainerConfig) -> dict[str, Any]:
    """Return the settings that a batch was begun with and that differ now; what only one version of hpcrl has is no difference."""
    now = settings_of(trainer)
    return {name: settings[name] for name in sorted(settings.keys() & now.keys()) if settings[name] != now[name]}


def lost_with(run: Run, trainer: TrainerConfig) -> tuple[list[Path], dict[str, Any]]:
    """Return the newest checkpoints, newest first, from which training cannot go on with these settings, and what those were begun with."""
    lost, changed = list[Path](), dict[str, Any]()
    for path in reversed(line_of(run)):
        facts = read_json(path / FACTS) if (position_of(path) or (0, 0))[1] else None
        differs = changed_since(facts["settings"], trainer) if facts else {}
        if not differs:
            break
        lost.append(path)
        changed |= differs
    return lost, changed
