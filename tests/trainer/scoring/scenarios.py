"""What ranks of a scorer do in tests (tests/trainer/ranks.py)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from hpcrl.config import Config
from hpcrl.config.scorers import REWARD, TEACHER, scorer_sets
from hpcrl.config.validate import build
from hpcrl.data.batch_file import read_batch
from hpcrl.data.score_file import GroupRewards
from hpcrl.rundir.layout import Run
from hpcrl.trainer.backends.fsdp.sharding import local
from hpcrl.trainer.distributed import World
from hpcrl.trainer.scoring.model import ScoringModel
from hpcrl.trainer.scoring.reward import RewardScoringModel


def scores(world: World, options: dict[str, Any]) -> None:
    """Score the groups of step 1; each rank writes what it found into options["out"]."""
    run = Run.open(options["run"])
    config = Config.from_toml([run.config])
    (scorers,) = scorer_sets(config)
    file = read_batch(run.batch(1))
    assert file is not None
    passes = list[int]()
    make = RewardScoringModel if scorers.role == REWARD else ScoringModel
    rows = dict[str, torch.Tensor]()
    for name, own in make(run, config, scorers, world).scores(file.batch.groups, lambda: passes.append(1)).items():
        if isinstance(own, GroupRewards):
            rows[name] = torch.tensor(own.scores)
        else:
            rows |= {f"{name}.{at}": torch.from_numpy(row.logprobs.copy()) for at, row in enumerate(own)}
    save_file(rows, Path(options["out"]) / f"{world.rank}.safetensors", {"passes": str(len(passes))})


def held(world: World, options: dict[str, Any]) -> None:
    """Write how many bytes of a teacher's weights the first rank has."""
    config = build(Config, options["config"])
    (scorers,) = (each for each in scorer_sets(config) if each.role == TEACHER)
    model = ScoringModel(Run(Path("unused")), config, scorers, world)._model
    if world.first:
        Path(options["out"]).write_text(str(sum(local(each).nbytes for each in model.parameters())))
