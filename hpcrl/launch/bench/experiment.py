"""Makes the experiment of a bench: its settings and its prompts."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from hpcrl.config import Config
from hpcrl.config.load import read
from hpcrl.config.sections.slurm import SlurmConfig
from hpcrl.config.validate import build
from hpcrl.errors import ConfigError, RunError
from hpcrl.launch.bench.folder import PROJECT, Bench
from hpcrl.launch.bench.models import tiny_model
from hpcrl.rundir.commit import make_directory, write_text
from hpcrl.rundir.layout import Run, root_of

SAVED_EVERY = 5
"""Steps between checkpoints."""
_ALPHABET, _LETTERS, _ROWS = "abcdefghijkl", 5, 2048
_EPOCHS, _STEPS = 10_000, 1000  # the bench ends the run; where that was killed itself, the last step does
_LEAST_MINUTES = 5  # of slurm.time_minutes
_TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


def make_experiment(
    name: str, files: Sequence[Path], overrides: Sequence[str], *, nodes: int, minutes: int, model: str | None
) -> tuple[Bench, Config]:
    """Write the folder of a bench, and return it with the configuration of its run.

    Args:
        name: of the run where the settings give it none.
        files: TOML files of the site, which may also change what is trained.
        nodes: of the run; on one trainer and engine take turns.
        minutes: after which an attempt ends at the latest.
        model: path or name of the policy; None: random weights of a size that fits on GPUs, else the quickstart's model.

    Raises:
        ConfigError: what is wrong with the settings.
        RunError: the folder exists.
    """
    given = read(files, overrides, Config).tree
    slurm = build(SlurmConfig, given.get("slurm", {}))
    if slurm.requests:
        raise ConfigError(
            "slurm.requests: a bench asks for nodes once; add slurm.requests=default, and the partition that is to be measured"
        )
    named = given.get("trainer", {})
    name, project = str(named.get("run_name") or name), str(named.get("project_name") or PROJECT)
    bench = Bench(Run(root_of(slurm.root).absolute() / project / name).bench)
    placed = "policy_num_nodes" in named.get("placement", {})
    base = {"trainer.run_name": name, **_settings(bench, slurm, nodes, minutes, model, placed=placed)}
    config = Config.from_dict(read(files, overrides, Config, base).tree)
    make_directory(bench.path.parent)
    try:
        bench.path.mkdir(mode=0o700)
    except FileExistsError:
        raise RunError(f"{bench.path} exists from another bench; choose another trainer.run_name") from None
    write_text(bench.prompts, "".join(json.dumps(row) + "\n" for row in _rows()))
    if config.trainer.policy.model.path == str(bench.model):
        bench.model.mkdir()
        for file in _TOKENIZER:
            shutil.copyfile(tiny_model() / file, bench.model / file)
    write_text(bench.config, config.to_toml())
    return bench, config


def _settings(
    bench: Bench, slurm: SlurmConfig, nodes: int, minutes: int, model: str | None, *, placed: bool
) -> dict[str, Any]:
    """Return the settings of the run by their paths; files and overrides of the user replace them.

    Args:
        placed: these say how many nodes each role has, as a run with scorers does.
    """
    ranks = max(1, slurm.gpus)
    place: dict[str, Any] = {"trainer.placement.colocate_all": True} if nodes == 1 else {"slurm.nodes": nodes}
    if placed:
        place = {}
    common: dict[str, Any] = {
        "data.train_data": [str(bench.prompts)],
        "slurm.time_minutes": max(_LEAST_MINUTES, minutes),
        "trainer.project_name": PROJECT,
        "trainer.epochs": _EPOCHS,
        "trainer.max_steps": _STEPS,
        "trainer.eval_interval": -1,
        "trainer.eval_before_train": False,
        "trainer.ckpt_interval": SAVED_EVERY,
        "trainer.max_prompt_length": 64,
        "trainer.algorithm.use_kl_loss": False,
        "trainer.policy.optimizer_config.lr": 1e-6,
        "trainer.placement.policy_num_gpus_per_node": ranks,
        "generator.inference_engine.num_engines": ranks,
        "environment.env_class": "sort_letters",
    }
    if slurm.gpus:
        return common | place | {
            "trainer.policy.model.path": model or str(bench.model),
            "trainer.train_batch_size": 16 * ranks,
            "trainer.policy_mini_batch_size": 16 * ranks,
            "generator.n_samples_per_prompt": 8,
            "generator.sampling_params.max_generate_length": 1024,
        }  # fmt: skip
    return common | place | {
        "trainer.policy.model.path": model or str(tiny_model()),
        "trainer.train_batch_size": 16,
        "trainer.policy_mini_batch_size": 16,
        "trainer.gradient_checkpointing": False,
        "trainer.policy.fsdp_config.mixed_precision.param_dtype": "fp32",
        "generator.n_samples_per_prompt": 4,
        "generator.inference_engine.backend": "transformers",
        "generator.inference_engine.model_dtype": "float32",
        "generator.sampling_params.max_generate_length": 16,
    }  # fmt: skip


def _rows() -> Iterator[dict[str, Any]]:
    draw = random.Random(0)
    for _ in range(_ROWS):
        word = "".join(draw.choices(_ALPHABET, k=_LETTERS))
        answer = {"method": "rule", "ground_truth": "".join(sorted(word))}
        yield {"prompt": [{"role": "user", "content": f"sort: {word}"}], "reward_spec": answer}
