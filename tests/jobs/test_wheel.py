"""The wheel holds all that a run needs: installed into an environment of its own, it writes an experiment and runs it without the checkout."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

from hpcrl.rundir.layout import Run
from tests.jobs.small_run import curve
from tests.paths import ROOT

HERE = sysconfig.get_path("purelib")


def call(*command: str | Path, cwd: Path, timeout: float = 120) -> str:
    variables = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "HPCRL_ROOT")}
    done = subprocess.run(
        list(map(str, command)), cwd=cwd, env=variables, capture_output=True, text=True, timeout=timeout, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_an_experiment_from_an_installed_wheel(place: Path) -> None:
    pip = (sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check")
    call(*pip, "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", place, ROOT, cwd=place)
    (wheel,) = place.glob("hpcrl-*.whl")
    clean = place / "clean"
    venv.create(clean, symlinks=True)
    call(*pip, "--python", clean / "bin/python", "install", "--no-deps", wheel, cwd=place)
    (packages,) = clean.glob("lib/python*/site-packages")
    (packages / "dependencies.pth").write_text(
        HERE + "\n"
    )  # what hpcrl needs, but not the checkout: .pth files do not nest
    where = call(clean / "bin/python", "-c", "import hpcrl; print(hpcrl.__file__)", cwd=place).strip()
    assert Path(where).is_relative_to(packages)
    assert "arithmetic" in call(clean / "bin/hpcrl", "env", "ls", cwd=place)
    call(clean / "bin/hpcrl", "init", "mine", "--kind", "environment", cwd=place)
    call(clean / "bin/python", "mine/make_rows.py", cwd=place)
    settings = ["mine/experiment.toml", "trainer.max_steps=2", "trainer.eval_interval=0", "trainer.run_name=wheel"]
    call(clean / "bin/hpcrl", "submit", "--local", "--follow", *settings, cwd=place, timeout=300)
    run = Run.open(place / "runs" / "mine" / "wheel")
    assert list(curve(run, "reward/avg_raw_reward")) == [1, 2]
    assert not (run.path / "code" / "hpcrl" / "_tiny_model").exists()
