"""A tiny PI0.5 learns to reach from success alone, by actions that a flow makes, and goes on after a preemption."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from hpcrl.rundir.layout import Run
from tests.jobs.small_run import curve, eval_score, hpcrl, logs_of, stopped_and_resumed
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
def test_a_run_goes_on_after_a_preemption_and_is_replayed_and_evaluated(place: Path) -> None:
    settings = ["trainer.max_steps=6", "trainer.ckpt_interval=2", "trainer.eval_interval=0"]
    camera = "environment.skyrl_gym.robot.options.camera=true"
    run = stopped_and_resumed(place, REACH, "reach_pi05", [*settings, camera], steps=6)
    again = hpcrl("replay", str(run.path), "--step", "6", cwd=place)
    assert again.stdout.splitlines()[-1] == "no difference", again.stdout + again.stderr
    rows = place / "rows.parquet"
    pq.write_table(pq.read_table(CONFIGS / "reach_pi05" / "data" / "validation.parquet").slice(0, 8), rows)
    done = hpcrl(
        "eval", str(run.path), "--data", str(rows), "-o", "evaluated", "--json", "vla.save_video=true", cwd=place
    )
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert (told["version"], told["failures"]) == (6, [])
    shown = hpcrl("samples", "evaluated", "--eval", "-n", "8", cwd=place).stdout
    assert shown.count("--- picture ") == 8
    assert shown.count("=== e") == 8
