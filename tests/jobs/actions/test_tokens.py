"""OpenVLA-OFT that is shown what is measured of its arm: a run on two ranks trains what one does, and is replayed, evaluated and exported."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from hpcrl.rundir.layout import Run
from tests.jobs.small_run import curve, hpcrl, logs_of
from tests.paths import CONFIGS
from tests.vla.material import parallel

pytest.importorskip("mujoco")

REACH, STEPS = CONFIGS / "reach_vla", 3
SHORT = [
    *(f"trainer.{name}={size}" for name, size in (("max_steps", STEPS), ("ckpt_interval", STEPS), ("eval_interval", 0), ("hf_save_interval", STEPS))),
    *("trainer.train_batch_size=4", "trainer.policy_mini_batch_size=4", "trainer.algorithm.use_kl_loss=true"),
    *('vla.vla_type="openvla-oft"', "vla.use_proprio=true"),
]  # fmt: skip


@pytest.mark.faults_slow
def test_two_ranks_train_what_one_does(place: Path) -> None:
    model = parallel(REACH / "model", place / "model", [-1.0], [1.0])
    runs = list[Run]()
    for ranks in (1, 2):
        own = [f"trainer.placement.policy_num_gpus_per_node={ranks}", f"trainer.policy.fsdp_config.fsdp_size={ranks}"]
        named = [f"trainer.run_name=on{ranks}", f"trainer.policy.model.path={model}", *SHORT, *own]
        done = hpcrl("submit", str(CONFIGS / "reach_vla.toml"), "--local", "--follow", *named, cwd=place, timeout=600)
        runs.append(Run(place / "runs" / "reach_vla" / f"on{ranks}"))
        assert done.returncode == 0, done.stdout + done.stderr + logs_of(runs[-1])
    one, two = runs
    for name in ("policy/final_loss", "policy/grad_norm", "reward/avg_raw_reward"):
        assert list(curve(one, name)) == list(range(1, STEPS + 1)), name
        assert curve(two, name) == pytest.approx(curve(one, name), rel=1e-4, abs=1e-6), name
    assert max(curve(two, "policy/logprob_mismatch").values()) < 1e-5

    again = hpcrl("replay", str(one.path), "--step", str(STEPS), cwd=place)
    assert again.stdout.splitlines()[-1] == "no difference", again.stdout + again.stderr
    exported = json.loads((one.export(STEPS) / "config.json").read_text())
    assert (exported["parallel_decoding"], exported["use_proprio"], exported["proprio_dim"]) == (True, True, 1)
    rows = place / "rows.parquet"
    pq.write_table(pq.read_table(CONFIGS / "reach" / "data" / "validation.parquet").slice(0, 4), rows)
    done = hpcrl("eval", str(one.path), "--data", str(rows), "-o", "evaluated", "--json", cwd=place)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["failures"] == []
    shown = hpcrl("samples", "evaluated", "--eval", "-n", "1", cwd=place)
    assert "<action " in shown.stdout
    assert shown.stderr == "", "transformers has nothing to say of such models"
