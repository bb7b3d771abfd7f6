"""Computes a teacher's log-probabilities of the rows that a run will learn, on this machine.

What `hpcrl score` asks of jobs/score.py lies in a directory of its own, laid out as a run directory:

    config.toml     of the run
    score.json      what decides what the teacher says; written before the rest, and compared when a run that reads it is submitted
    dataset/        the rows as tokens
    teacher/        what the teacher says of each dataset (hpcrl/trainer/offline/teacher_file.py)
    logs/0/         output of torchrun and the ranks
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace

from hpcrl.config import Config
from hpcrl.data.token_cache import TokenCache
from hpcrl.data.tokenize import AHEAD, Recipe, Tokenizer, tokenize_datasets
from hpcrl.errors import ConfigError, RunError
from hpcrl.launch.local.foreground import job, run_here
from hpcrl.launch.sharing import made_for
from hpcrl.launch.submit.preflight import check_files
from hpcrl.launch.submit.teacher import FACTS, facts_of
from hpcrl.rundir.commit import write_json, write_text
from hpcrl.rundir.layout import Run, root_of, token_cache

PROCESS = "score"


def score(config: Config, ranks: int, place: Run, report: Callable[[str], None]) -> None:
    """Compute the teacher's log-probabilities on this machine.

    Args:
        ranks: that share the teacher.
        place: a directory that is made.

    Raises:
        ConfigError: the configuration has no teacher of rows.
        RunError: the directory is there.
    """
    if not config.trainer.teaches_rows:
        raise ConfigError(
            'trainer.distillation.enable: expected true, with trainer.mode="sft": a teacher of the rows of data.train_data'
        )
    if place.path.exists():
        raise RunError(f"{place.path} exists; move it away, or choose another --output")
    check_files(config)
    with made_for(config.slurm.readable_by, place.path):
        _score(config, ranks, place, report)


def _score(config: Config, ranks: int, place: Run, report: Callable[[str], None]) -> None:
    write_text(place.config, config.to_toml())
    write_json(place.path / FACTS, facts_of(config))
    data = config.data
    training = replace(config, trainer=replace(config.trainer, eval_interval=0))
    tokenize_datasets(
        training,
        Tokenizer(
            place, 0, Recipe.of(config), data.num_workers, data.prefetch_factor or AHEAD,
            cache=TokenCache(token_cache(root_of(config.slurm.root))) if data.cache else None,
        ),
    )  # fmt: skip
    torchrun = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", f"--log-dir={place.path / 'logs'}",
    ]  # fmt: skip
    devices = {} if config.slurm.gpus else {"CUDA_VISIBLE_DEVICES": ""}
    run_here(place, PROCESS, [*torchrun, str(job("score")), str(place.path)], devices, report)
