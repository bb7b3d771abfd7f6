"""The evaluation job of a run, with real engines: what it scores, and what a stopped trainer's versions are scored with."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from hpcrl.config import Config
from hpcrl.controller.evaluation import begin_evaluation
from hpcrl.launch.local.evaluate import configured, evaluate, find_subject
from hpcrl.observe.metrics import merged
from hpcrl.rundir.commit import read_json, write_text
from hpcrl.rundir.evaluations import begun_evaluations
from hpcrl.rundir.layout import Run
from hpcrl.rundir.ledger import open_attempt, report_outcome
from tests.faults.scenario import write_rows
from tests.paths import QUICKSTART, ROOT
from tests.rollout.material import publish

MODEL = QUICKSTART.parent / "quickstart" / "model"
ROWS = 24


def changed_model(path: Path) -> Path:
    """Write the quickstart's model with other weights, as training would leave them."""
    path.mkdir()
    for file in MODEL.iterdir():
        (path / file.name).write_bytes(file.read_bytes())
    torch.manual_seed(3)
    file = path / "model.safetensors"
    tensors = {name: tensor + 0.02 * torch.randn_like(tensor) for name, tensor in load_file(file).items()}
    save_file(tensors, file, {"format": "pt"})
    return path


def waiting_run(folder: Path, backend: str, model: Path) -> Run:
    """Make a run that is done, with two versions that wait: the initial model, and the weights of `model` as version 2."""
    run, rows = Run(folder / "runs" / "tested" / "run"), folder / "rows.jsonl"
    write_rows(rows, ROWS)
    settings = [
        f"data.train_data=['{rows}']",
        f"data.val_data=['{rows}']",
        f"trainer.policy.model.path={MODEL}",
        "trainer.eval_interval=2",
        "environment.env_class=sort_letters",
        "slurm.evaluation.when=after",
        f"generator.inference_engine.backend={backend}",
    ]
    write_text(run.config, Config.from_toml([QUICKSTART], settings).to_toml())
    write_text(run.token, "a-token\n", mode=0o600)
    open_attempt(run, "7_0.0", ["n1"])
    publish(model, run.weights_of(2), 2)
    for version in (0, 2):
        begin_evaluation(run, version, 1)
    report_outcome(run, 1, "done", "finished", "agent-0")
    return run


def run_element(run: Run) -> None:
    environment = {
        "HPCRL_ATTEMPT": "1",
        "PYTHONPATH": str(ROOT),
        "CUDA_VISIBLE_DEVICES": "",
        "HPCRL_ADDRESS": "127.0.0.1",
    }
    command = [sys.executable, str(ROOT / "jobs" / "evaluation.py"), str(run.path), "0"]
    done = subprocess.run(
        command, env=os.environ | environment, capture_output=True, text=True, timeout=900, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.faults_slow
@pytest.mark.parametrize("backend", ["transformers", "vllm"])
def test_scores_of_versions_that_wait_are_those_of_a_stopped_trainer(tmp_path: Path, backend: str) -> None:
    """Both versions with one engine; they enter the metrics."""
    model = changed_model(tmp_path / "trained")
    run = waiting_run(tmp_path, backend, model)
    run_element(run)
    assert begun_evaluations(run) == []
    summaries = {version: read_json(run.eval_summary(version)) for version in (0, 2)}
    assert {step: metrics for step, metrics in merged(run).items() if metrics} == summaries
    assert summaries[0] != summaries[2], "each has weights of its own"
    subject = find_subject(str(model), None, tmp_path)
    config = configured(subject, [str(tmp_path / "rows.jsonl")], None, [run.config], ["slurm.evaluation.when=never"])
    results = evaluate(subject, config, Run(tmp_path / "stopped"), print, tmp_path)
    assert results["metrics"] == summaries[2]
    assert results["prompts"]["all"] == ROWS
