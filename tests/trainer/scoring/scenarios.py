"""What ranks of a scorer do in tests (tests/trainer/ranks.py)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from hpcrl.algorithms.reductions import Reduction
from hpcrl.config import Config, TrainerConfig
from hpcrl.config.scorers import REWARD, TEACHER, scorer_sets
from hpcrl.config.validate import build
from hpcrl.data.batch_file import read_batch
from hpcrl.data.score_file import GroupRewards, RowScores
from hpcrl.data.token_file import open_tokens
from hpcrl.rundir.layout import Run
from hpcrl.trainer.backends.fsdp.sharding import local
from hpcrl.trainer.batching import MicroBatchLimit
from hpcrl.trainer.distributed import World
from hpcrl.trainer.read_batch import load_mini_batches
from hpcrl.trainer.scoring.hints import score_by_hints
from hpcrl.trainer.scoring.model import ScoringModel
from hpcrl.trainer.scoring.reward import RewardScoringModel
from hpcrl.trainer.scoring.rows import RowTeacher
from tests.trainer.material import score, views
from tests.trainer.scenarios import make_engine, whole


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
            rows |= {
                f"{name}.{at}.{kind}": column for at, row in enumerate(own) for kind, column in columns(row).items()
            }
    save_file(rows, Path(options["out"]) / f"{world.rank}.safetensors", {"passes": str(len(passes))})


def columns(row: RowScores) -> dict[str, torch.Tensor]:
    """Return what a model says of a row, by the names of what it is."""
    return {kind: torch.from_numpy(column.copy()) for kind, column in vars(row).items() if column is not None}


def rows_written(world: World, options: dict[str, Any]) -> None:
    """Write what a teacher says of the rows of a run."""
    from tests.trainer.backends.test_supervised import config

    tokens = open_tokens(Run(Path(options["run"])).dataset("train-0"))
    teacher = RowTeacher(config(options["model"], options["changes"]), world)
    teacher.write(Run(Path(options["out"])).teacher_file("train-0"), tokens, lambda _: None)
    if options["changes"].get("strategy") == "megatron":
        from tests.trainer.backends.megatron.leave import leave_groups  # its imports take seconds

        leave_groups(world)


def held(world: World, options: dict[str, Any]) -> None:
    """Write how many bytes of a teacher's weights the first rank has."""
    config = build(Config, options["config"])
    (scorers,) = (each for each in scorer_sets(config) if each.role == TEACHER)
    model = ScoringModel(Run(Path("unused")), config, scorers, world)._model
    if world.first:
        Path(options["out"]).write_text(str(sum(local(each).nbytes for each in model.parameters())))


def hinted(world: World, options: dict[str, Any]) -> None:
    """Let the policy judge the samples of step 1 by their hints; each rank tells of its trained tokens, by group and sample."""
    run = Run.open(options["run"])
    distillation = {"enable": True, "self_teacher": {"model": "policy"}, **options["distillation"]}
    section = {"algorithm": {"use_kl_loss": False}, "distillation": distillation}
    engine = make_engine(world, options["model"], {"trainer": section})
    trainer = build(
        TrainerConfig, {"policy": {"model": {"path": options["model"]}}, "policy_mini_batch_size": 4, **section}
    )
    file, limit = read_batch(run.batch(1)), MicroBatchLimit(2, options.get("tokens"), options.get("shared", False))
    assert file is not None
    (mini,) = load_mini_batches(run, file.batch, trainer, (limit, limit), world, Reduction())
    score(engine, mini, limit, old=True, reference=False)
    shares = score_by_hints([mini], engine, trainer.distillation, (limit, limit), lambda: None)
    found, scores = {"hinted": torch.tensor(shares["distillation/hinted"])}, mini.rows.scores
    mask = mini.rows.whole().sampling_mask
    assert mask is not None
    columns = {
        "logprobs": scores.teacher_logprobs, "old": scores.old_logprobs, "labels": mini.rows.labels, "ids": scores.teacher_ids,
        "top": scores.teacher_top, "contrasts": scores.contrasts, "unmasked": (mask < 0).all(1).float(),
    }  # fmt: skip
    for view in views([mini.rows]):
        for name, column in columns.items():
            if column is not None:
                trained = view.of(mini.rows.loss_mask) > 0
                found[f"{view.ref.group}.{view.ref.index}.{name}"] = view.of(column)[trained].clone()
    save_file(found, Path(options["out"]) / f"{world.rank}.safetensors")


def averaged(world: World, options: dict[str, Any]) -> None:
    """Move the reference by a quarter of the way to a policy that was trained, save it, and restore it elsewhere."""
    section = {
        "algorithm": {"use_kl_loss": False},
        "distillation": {"enable": True, "self_teacher": {"model": "ema"}},
        "policy": {"fsdp_config": {"mixed_precision": {"param_dtype": "bf16"}}},
    }
    engine, other = (make_engine(world, options["model"], {"trainer": section}) for _ in range(2))
    assert engine._reference is not None
    found = {f"first.{name}": whole(value) for name, value in engine._reference.named_parameters()}
    for parameter in engine._model.parameters():
        local(parameter.data).add_(0.01 * torch.randn(local(parameter).shape))
    engine.reset_reference(fresh_optimizer=False, rate=0.25)
    saved = Path(options["run"]) / "saved"
    saved.mkdir()
    engine.save(saved, world.control)
    other.restore(saved)
    models = {"policy": engine._model, "average": engine._reference, "restored": other._reference}
    for kind, model in models.items():
        assert model is not None
        found |= {f"{kind}.{name}": whole(value) for name, value in model.named_parameters()}
    save_file(found, options["out"])
