"""Environments of other packages, unchanged, with the policy of a run behind them; `make agents` installs those packages."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from hpcrl.data.group_file import read_group
from hpcrl.rundir.layout import Run
from tests.jobs.agents.test_agents import running
from tests.jobs.small_run import curve, groups_in, hpcrl, logs_of
from tests.paths import CONFIGS, QUICKSTART, ROOT

ENVIRONMENTS = Path(os.environ.get("HPCRL_AGENTS", ROOT / ".venv-agents"))
LOCAL = {
    "taskset": {"id": "sort-letters-v1"},
    "agent": {"harness": {"id": "null"}, "runtime": {"type": "subprocess"}},
}
SORTING = Path(__file__).parent / "sorting"
SMALL = (
    *("trainer.train_batch_size=2", "trainer.policy_mini_batch_size=2", "generator.n_samples_per_prompt=2"),
    *("trainer.max_steps=2", "trainer.eval_interval=0", "generator.inference_engine.enable_http_endpoint=true"),
    *("generator.inference_engine.served_model_name=policy", "environment.skyrl_gym.max_env_workers=2"),
)


def trained(place: Path, name: str, python: Path, rows: str, *settings: str) -> Run:
    """Return a run of two steps whose samples a program of a package's own Python has played."""
    (place / "rows.jsonl").write_text(rows)
    command = json.dumps([str(python), str(CONFIGS / "agents" / f"{name}_agent.py")])
    chosen = [
        *(f"trainer.run_name={name}", f"environment.skyrl_gym.agent.command={command}"),
        *(f"data.train_data={json.dumps([str(place / 'rows.jsonl')])}", "data.val_data=[]"),
    ]
    done = hpcrl("submit", str(QUICKSTART), "--local", "--follow", *chosen, *SMALL, *settings, cwd=place, timeout=900)
    run = Run(place / "runs" / "quickstart" / name)
    assert done.returncode == 0, done.stderr + logs_of(run)
    assert set(curve(run, "generate/failed_samples").values()) <= {0.0}
    return run


@pytest.fixture
def python(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The Python that has a package; its programs are found, and modules of this test."""
    found = ENVIRONMENTS / request.param / "bin" / "python"
    monkeypatch.setenv("PATH", f"{found.parent}:{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", str(SORTING))
    return found


@pytest.mark.agents
@pytest.mark.parametrize("python", ["verifiers"], indirect=True)
def test_an_environment_of_verifiers(place: Path, python: Path) -> None:
    """Its own harness asks, its own rubric scores; the rows have what was said, and nothing else."""
    program = [python, CONFIGS / "agents" / "verifiers_agent.py", json.dumps(LOCAL)]
    made = subprocess.run(program, capture_output=True, text=True, check=True)
    run = trained(place, "verifiers", python, made.stdout)
    assert set(curve(run, "environment/letters_in_place")) == {1, 2}
    groups = groups_in(run)
    assert len(groups) >= 4
    for path, meta in groups:
        rows = read_group(path, None, meta)
        assert meta.owners == [0, 1]
        for row, sample in zip(rows, meta.samples, strict=True):
            assert row.loss_mask.sum() > 0
            assert (sample.reward == 1.0) == (sample.env_metrics["letters_in_place"] == 1.0)


@pytest.mark.agents
@pytest.mark.parametrize("python", ["openenv"], indirect=True)
def test_an_environment_of_openenv(place: Path, python: Path) -> None:
    """Its server steps and rewards; the turns of an episode are one row."""
    with running(SORTING / "openenv_server.py", python) as url:
        rows = [
            {
                "prompt": [{"role": "system", "content": "sort"}],
                "env_class": "agent",
                "openenv": {"base_url": url, "reset": {"word": word}, "shows": "text", "says": "answer"},
            }
            for word in ("llabk", "cabde", "gfeda", "mbnac")
        ]
        written = "".join(json.dumps(row) + "\n" for row in rows)
        turns = ("generator.max_turns=3", "generator.max_input_length=64", "trainer.max_prompt_length=32")
        run = trained(place, "openenv", python, written, *turns)
    assert set(curve(run, "environment/steps")) == {1, 2}
    for path, meta in groups_in(run):
        rows = read_group(path, None, meta)
        assert meta.owners == [0, 1]
        for row, sample in zip(rows, meta.samples, strict=True):
            assert int((row.loss_mask[1:] > row.loss_mask[:-1]).sum()) == sample.env_metrics["steps"]
