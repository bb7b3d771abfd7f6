"""Runs that have committed something, without training."""

from __future__ import annotations

import random
from pathlib import Path

from hpcrl.config import Config
from hpcrl.rundir.commit import begin, committed_directory, finish, listing, write_text
from hpcrl.rundir.layout import Run
from hpcrl.rundir.ledger import open_attempt, report_outcome
from hpcrl.upload.store import Patience
from tests.paths import QUICKSTART

ODD_NAMES = ("ü ☃ '\"<&>.json", "a?b#c%2e%2e+d.json", "-rf", " ", "\x01\x7f", "\u202e.json", "x" * 200)
QUICK = Patience(first_s=0.01, total_s=0.2)
EXPORTS = ["trainer.hf_save_interval=1"]


def made_run(folder: Path, settings: list[str], name: str = "sorting") -> Run:
    run = Run(folder / "project" / name)
    write_text(run.config, Config.from_toml([QUICKSTART], [*EXPORTS, *settings]).to_toml())
    open_attempt(run, "local-1", ["here"])
    return run


def write_export(run: Run, step: int, attempt: int = 1, size: int = 3000) -> Path:
    """Commit an export of three files, and return it; the manifest has no checksum of the weights, as that of a run."""
    target = run.export(step)
    directory = begin(target, attempt)
    write_text(directory / "config.json", '{"model_type": "qwen2"}')
    write_text(directory / "tokenizer.json", f'{{"step": {step}}}')
    weights = directory / "model-00001-of-00001.safetensors"
    weights.write_bytes(random.Random(f"{step} {attempt}").randbytes(size))
    files = listing(directory, lambda path: path != weights) | {weights.name: {"size": size}}
    finish(target, attempt, files=files, step=step)
    return target


def write_files(run: Run, step: int, *names: str) -> Path:
    """Commit an export of files with these names, and return it."""
    target = run.export(step)
    with committed_directory(target, 1, step=step) as directory:
        for name in names:
            (directory / name).parent.mkdir(parents=True, exist_ok=True)
            (directory / name).write_text(name)
    return target


def write_checkpoint(run: Run, step: int, attempt: int = 1, size: int = 3000) -> Path:
    target = run.checkpoint(step)
    with committed_directory(target, attempt, step=step) as directory:
        (directory / "policy").mkdir()
        (directory / "policy" / "__0_0.distcp").write_bytes(random.Random(f"{step} {attempt}").randbytes(size))
        (directory / "rng-0.safetensors").write_bytes(b"")
    return target


def end(run: Run) -> None:
    """Let the run be done."""
    report_outcome(run, 1, "done", "finished", "test")
