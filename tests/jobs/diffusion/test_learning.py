"""A tiny Stable Diffusion 3 learns to paint redder pictures from rewards alone, by DiffusionNFT and by Flow-GRPO, learns pictures of a dataset, and goes on
after a preemption."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpcrl.rundir.layout import Run
from tests.jobs.small_run import curve, eval_score, hpcrl, logs_of, stopped_and_resumed
from tests.paths import CONFIGS

pytest.importorskip("diffusers")

TINY, LEARNED = CONFIGS / "diffusion_tiny.toml", CONFIGS / "diffusion_sft_tiny.toml"
STEPS = 30
DIFFUSERS = "trainer.policy.diffusers."
GRPO = [
    f"{DIFFUSERS}algorithm=grpo",
    f"{DIFFUSERS}sample.solver=flow",
    f"{DIFFUSERS}sample.deterministic_sampling=false",
    f"{DIFFUSERS}sample.noise_level=0.7",
    f"{DIFFUSERS}timesteps_fraction=1.0",
]
WAYS = {"nft": [], "flow_grpo": GRPO}


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_pictures_become_redder(place: Path, way: str) -> None:
    named = [f"trainer.run_name={way}", f"trainer.hf_save_interval={STEPS}", "trainer.multi_modal_log_interval=10"]
    done = hpcrl("submit", str(TINY), "--local", "--follow", *named, *WAYS[way], cwd=place, timeout=1800)
    run = Run(place / "runs" / "diffusion" / way)
    assert done.returncode == 0, done.stdout + done.stderr + logs_of(run)
    before, after = (eval_score(run, version) for version in (0, STEPS))
    print(f"{way}: redness of evaluation {before:.3f} -> {after:.3f}")
    assert after > before + 0.05
    assert (run.export(STEPS) / "adapter").is_dir()
    assert set(curve(run, "policy/logprob_mismatch")) == (set() if way == "nft" else set(range(1, STEPS + 1)))
    shown = hpcrl("samples", str(run.path), cwd=place)
    assert "denoising steps" in shown.stdout, shown.stderr


@pytest.mark.slow
def test_pictures_of_a_dataset_are_learned(place: Path) -> None:
    done = hpcrl("submit", str(LEARNED), "--local", "--follow", "trainer.run_name=sft", cwd=place, timeout=1800)
    run = Run(place / "runs" / "diffusion" / "sft")
    assert done.returncode == 0, done.stdout + done.stderr + logs_of(run)
    losses = curve(run, "eval/all/loss")
    print(f"sft: loss of evaluation {losses[0]:.3f} -> {losses[200]:.3f}")
    assert losses[200] < 0.2 * losses[0]


@pytest.mark.faults_slow
@pytest.mark.parametrize(("config", "steps"), [(TINY, 6), (LEARNED, 200)], ids=["rewards", "dataset"])
def test_a_run_goes_on_after_a_preemption(place: Path, config: Path, steps: int) -> None:
    numbers = f"trainer.max_steps={steps}", f"trainer.ckpt_interval={steps // 3}"
    stopped_and_resumed(place, config, "diffusion", [*numbers, "trainer.eval_interval=0"], steps)
