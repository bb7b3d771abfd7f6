"""A tiny PI0.5 learns to reach from success alone, by actions that a flow makes, and goes on after a preemption."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpcrl.rundir.commit import read_json
from hpcrl.rundir.layout import Run
from tests.jobs.small_run import curve, finish, hpcrl, logs_of, wait_for
from tests.paths import CONFIGS

pytest.importorskip("mujoco")

REACH = CONFIGS / "reach_pi05.toml"
STEPS = 40


@pytest.mark.slow
@pytest.mark.parametrize("method", ["flow_sde", "flow_cps"])
def test_an_arm_learns_to_reach(place: Path, method: str) -> None:
    settings = [f"trainer.run_name={method}", f"vla.pi05.noise_method={method}", f"trainer.hf_save_interval={STEPS}"]
    done = hpcrl("submit", str(REACH), "--local", "--follow", *settings, cwd=place, timeout=1800)
    run = Run(place / "runs" / "reach_pi05" / method)
    assert done.returncode == 0, done.stdout + done.stderr + logs_of(run)
    before, after = (eval_score(run, version) for version in (0, STEPS))
    print(f"{method}: success in evaluation {before:.3f} -> {after:.3f}")
    assert before < 0.5
    assert after > 0.8
    assert (run.export(STEPS) / "config.json").is_file()
    assert set(curve(run, "policy/logprob_mismatch")) == set(range(1, STEPS + 1))
    assert max(curve(run, "policy/logprob_mismatch").values()) < 1e-3
    shown = hpcrl("samples", str(run.path), cwd=place)
    assert "Task: reach, State:" in shown.stdout, shown.stderr


@pytest.mark.faults_slow
def test_a_run_goes_on_after_a_preemption(place: Path) -> None:
    settings = ["trainer.run_name=stopped", "trainer.max_steps=6", "trainer.ckpt_interval=2", "trainer.eval_interval=0"]
    done = hpcrl("submit", str(REACH), "--local", *settings, cwd=place)
    assert done.returncode == 0, done.stderr
    run = Run.open(place / "runs" / "reach_pi05" / "stopped")
    wait_for(lambda: len(curve(run, "policy/final_loss")) >= 3, lambda: logs_of(run), 300)
    assert hpcrl("cancel", str(run.path), cwd=place).returncode == 0  # saves and stops, as Slurm's signal makes it do
    finish(run, 1)
    assert hpcrl("resume", str(run.path), cwd=place).returncode == 0
    assert finish(run, 2, 400) == "done"
    assert sorted(curve(run, "policy/final_loss")) == [1, 2, 3, 4, 5, 6]


def eval_score(run: Run, version: int) -> float:
    summary = read_json(run.evals_of(version) / "summary.json")
    assert summary is not None, f"version {version} was not evaluated"
    return summary["eval/all/avg_score"]
