"""Runs an evaluation outside of training: of a checkpoint of a run, or of any model in Hugging Face format.

`hpcrl eval` makes a directory for it, laid out as a run directory, in which jobs/eval.py works:

    config.toml            of the run, or of the files that were named; data.val_data and trainer.policy.model.path are what is evaluated
    evaluation.json        what was asked for
    results.json           scores by data source
    evals/v000040/0.jsonl  responses and scores; `hpcrl samples DIRECTORY --eval` shows it
    logs/0/                output of the job and its engine
"""

from __future__ import annotations

import json
import secrets
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from hpcrl.config import Config
from hpcrl.config.errors import raise_together
from hpcrl.config.family import families, family_of
from hpcrl.config.root import source_of
from hpcrl.config.sections.generator import SamplingParams
from hpcrl.config.sections.model import Pretrained
from hpcrl.config.sections.trainer import TrainerConfig
from hpcrl.data.datasets import load_dataset
from hpcrl.data.sources import validation_sources
from hpcrl.errors import ConfigError, RunError
from hpcrl.launch.family import launch_family
from hpcrl.launch.local.foreground import job, run_here
from hpcrl.launch.manage.registry import find_run
from hpcrl.launch.sharing import made_for
from hpcrl.launch.submit.engine import check_engine, position_limit
from hpcrl.launch.submit.models import entries_of, folder_of, on_hub
from hpcrl.launch.submit.vision import check_vision
from hpcrl.rundir.checkpoints import find_checkpoint, line_of, verify_checkpoint
from hpcrl.rundir.commit import is_committed, read_json, write_json, write_text
from hpcrl.rundir.layout import Run, position_of

_EXPORT, _PROCESS = "export", "eval"
_WHOLE = "pipeline"
"""Where an exported policy is completed to what its engine loads."""
_LENGTHS = ("trainer.max_prompt_length", "generator.sampling_params.max_generate_length")
_LENGTHS += ("generator.max_input_length", "generator.eval_sampling_params.max_generate_length")


@dataclass(frozen=True)
class Subject:
    """Model that is evaluated.

    Attributes:
        run: that it is a checkpoint of; None: a model.
        checkpoint: its directory; None: a model, or the one that the run began with.
        model: of a checkpoint it may be made only yet.
        version: steps that the run had trained it.
    """

    run: Run | None
    checkpoint: Path | None
    model: Pretrained
    version: int = 0

    @property
    def name(self) -> str:
        if self.run is None:
            return Path(self.model.path).resolve().name
        return f"{self.run.name} {self.checkpoint.name if self.checkpoint else 'before training'}"


def find_subject(name: str, checkpoint: str | None, root: Path) -> Subject:
    """Find the model of a name: a directory with a model, a run of which one checkpoint is evaluated, or a model's id on the hub.

    Args:
        checkpoint: step, or name of the directory; 0: the model that the run began with; None: the newest.

    Raises:
        RunError: there is no such run or checkpoint.
    """
    if any((Path(name) / file).is_file() for file in {family.model_file for family in families()}):
        return _model(name, str(Path(name).absolute()), checkpoint)
    try:
        run = find_run(name, root)
    except RunError as error:
        if folder_of(Pretrained(name)) is not None or on_hub(Pretrained(name)):
            return _model(name, name, checkpoint)
        raise RunError(
            f"{error}; nor is it a directory with a model, or the id of one in the hub's cache or on the hub"
        ) from error
    if checkpoint in ("0", "s000000"):
        return Subject(run, None, Config.from_toml([run.config]).trainer.policy.model.pretrained)
    line = line_of(run)
    if checkpoint is None and not line:
        raise RunError(f"{run.name} has no committed checkpoint yet; --checkpoint 0 is the model that it began with")
    path = line[-1] if checkpoint is None else find_checkpoint(run, checkpoint)
    verify_checkpoint(path, checksums=False)
    step, _ = position_of(path) or (0, 0)
    return Subject(run, path, Pretrained(str(run.exports / path.name)), step)


def _model(name: str, path: str, checkpoint: str | None) -> Subject:
    if checkpoint is not None:
        raise RunError(f"{name} is a model, which has no checkpoints; leave out --checkpoint, or name the run")
    return Subject(None, None, Pretrained(path))


def configured(
    subject: Subject, data: Sequence[str], n_samples: int | None, files: Sequence[Path], settings: Sequence[str]
) -> Config:
    """Return the configuration of an evaluation: that of the run, if there is one, then files, then settings.

    Args:
        data: datasets.
        n_samples: per prompt; None: as configured.

    Raises:
        ConfigError: names everything that is wrong.
    """
    paths = [str(Path(path).expanduser().absolute()) for path in data]
    ours = [
        f"data.val_data={json.dumps(paths)}",
        "data.test_size=default",
        "trainer.eval_interval=1",
        f"trainer.policy.model.path={json.dumps(subject.model.path)}",
        f"trainer.policy.model.revision={json.dumps(subject.model.revision) if subject.model.revision else ''}",
    ]
    if subject.run is None:
        ours.append(f"data.train_data={json.dumps(paths)}")
    elif (trainer := Config.from_toml([subject.run.config]).trainer).trains_reward_model:
        raise ConfigError(
            f"trainer.mode: {subject.run.name} trains a reward model, which answers no prompts; `hpcrl follow {subject.run.name}` shows what "
            "its validation sets say"
        )
    elif trainer.offline:  # whose val_data are rows, not prompts
        ours.append(f"data.val_prompts={json.dumps(paths)}")
    if n_samples is not None:
        ours.append(f"generator.eval_n_samples_per_prompt={n_samples}")
    base = [] if subject.run is None else [subject.run.config]
    if subject.run is None:
        ours += _fitting(subject.model, files, settings)
    config = Config.from_toml([*base, *files], [*ours, *settings]).largest()
    made = subject.checkpoint is None  # the model of a checkpoint may be made only yet
    problems = [*check_engine(config), *check_vision(config)] if made else []
    raise_together(problems, partial(source_of, [*base, *files], [*ours, *settings]))
    n = config.generator.eval_n_samples_per_prompt
    if n > 1 and config.generator.eval_sampling.temperature == 0 and not family_of(config).greedy_samples_differ:
        raise ConfigError(
            f"generator.eval_n_samples_per_prompt: {n} samples of a prompt would all be the same, because evaluation is greedy here; "
            "add generator.eval_sampling_params.temperature=1.0, or leave it at 1"
        )
    return config


def _fitting(model: Pretrained, files: Sequence[Path], settings: Sequence[str]) -> list[str]:
    """Return default lengths for a model: a third of its length for the prompt, the rest for the response."""
    most = position_limit(entries_of(model) or {})
    prompt, response = TrainerConfig.max_prompt_length, SamplingParams.max_generate_length
    chosen = [name for name in _LENGTHS if source_of(files, settings, name)]
    if most is None or prompt + response <= most or chosen:
        return []
    return [f"{_LENGTHS[0]}={most // 3}", f"{_LENGTHS[1]}={most - most // 3}"]


def default_place(subject: Subject) -> Path:
    """Return a directory that is not there yet, in the run or, for a model, in the current directory."""
    parent = Path("evaluations").absolute() if subject.run is None else subject.run.evaluations
    stem = subject.checkpoint.name if subject.checkpoint else Path(subject.model.path).name
    return parent / f"{stem}-{time.strftime('%m%d-%H%M%S')}"


def evaluate(subject: Subject, config: Config, place: Run, report: Callable[[str], None], root: Path) -> dict[str, Any]:
    """Evaluate on this machine and return the content of results.json.

    Args:
        place: a directory that is made.
        root: of runs, with the images of sandboxes; for a checkpoint that of its run.

    Raises:
        RunError: the directory is there.
    """
    if place.path.exists():
        raise RunError(f"{place.path} exists; move it away, or choose another --output")
    # before anything is made
    sources = validation_sources(config.data, config.data.val_data)
    load_dataset(sources, ("eval",), config.data, config.environment, config.generator.max_turns, first=1)
    with made_for(config.slurm.readable_by, place.path):
        return _evaluate(subject, config, place, report, root)


def _evaluate(
    subject: Subject, config: Config, place: Run, report: Callable[[str], None], root: Path
) -> dict[str, Any]:
    place.token.parent.mkdir(mode=0o700)
    write_text(place.token, secrets.token_hex(32) + "\n", mode=0o600)
    write_text(place.config, config.to_toml())
    asked = {
        "subject": subject.name,
        "version": subject.version,
        "model": str(subject.model),
        "data": config.data.val_data,
        "n_samples": config.generator.eval_n_samples_per_prompt,
        "seed": config.sampling_seed,
        "sampling": asdict(config.generator.eval_sampling),
    }
    if config.sandbox_servers:
        asked["root"] = str((root if subject.run is None else subject.run.root).absolute())
    write_json(place.path / "evaluation.json", asked)
    if subject.run is not None and subject.checkpoint is not None and not is_committed(Path(subject.model.path)):
        report(f"exporting {subject.checkpoint.name}")
        words = ["checkpoint", "export", str(subject.run.path), subject.checkpoint.name]
        run_here(place, _EXPORT, [sys.executable, "-m", "hpcrl.cli.main", *words], {}, report)
    if subject.run is not None and subject.checkpoint is not None:
        export = Path(subject.model.path)
        whole = launch_family(config).evaluated_model(subject.run, export, place.path / _WHOLE)
        if whole != export:
            changed = Config.from_toml([place.config], [f"trainer.policy.model.path={json.dumps(str(whole))}"])
            write_text(place.config, changed.to_toml())
    devices = {} if config.slurm.gpus else {"CUDA_VISIBLE_DEVICES": ""}
    run_here(place, _PROCESS, [sys.executable, str(job("eval")), str(place.path)], devices, report)
    results = read_json(place.path / "results.json")
    assert results is not None, place.path
    return results
