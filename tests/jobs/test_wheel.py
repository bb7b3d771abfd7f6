"""The wheel holds all that a run needs: beside the packages of requirements.lock alone, it runs the cells of docs/python.ipynb and the code of docs/python.md."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from hpcrl.rundir.layout import Run
from tests.environments import locked, make_environment
from tests.jobs.small_run import curve, logs_of
from tests.paths import ROOT

DOCS = ROOT / "docs"
_IN_ORDER = """
import json, sys
cells, namespace = json.load(sys.stdin), {"__name__": "__main__"}
for number, cell in enumerate(cells):
    exec(compile(cell, f"cell {number}", "exec"), namespace)
run = namespace["run"]
print(json.dumps([run.metrics(), [sample.name for sample in run.samples(order="worst", most=3)], run.state().kind]))
"""


def notebook_cells() -> list[str]:
    cells = json.loads((DOCS / "python.ipynb").read_text())["cells"]
    return ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]


def page_blocks() -> list[str]:
    """Return the code of the page, without the block that submits to Slurm."""
    blocks = re.findall(r"^```python\n(.*?)^```", (DOCS / "python.md").read_text(), re.MULTILINE | re.DOTALL)
    assert "hpcrl.submit(" in blocks[0]
    return blocks[1:]


def call(*command: str | Path, cwd: Path, timeout: float = 120) -> str:
    variables = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "HPCRL_ROOT")}
    done = subprocess.run(
        list(map(str, command)), cwd=cwd, env=variables, capture_output=True, text=True, timeout=timeout, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def install_wheel(place: Path) -> Path:
    """Make an environment with the wheel and the packages of requirements.lock alone; return its folder of programs."""
    pip = (sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check")
    call(*pip, "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", place, ROOT, cwd=place)
    (wheel,) = place.glob("hpcrl-*.whl")
    clean = place / "clean"
    make_environment(clean, locked())
    (packages,) = clean.glob("lib/python*/site-packages")
    (packages / "hpcrl.pth").unlink()  # the checkout
    call(*pip, "--python", clean / "bin/python", "install", "--no-deps", wheel, cwd=place)
    where = call(clean / "bin/python", "-c", "import hpcrl; print(hpcrl.__file__)", cwd=place).strip()
    assert Path(where).is_relative_to(packages)
    return clean / "bin"


def test_an_installed_wheel_makes_an_experiment(place: Path) -> None:
    programs = install_wheel(place)
    assert "arithmetic" in call(programs / "hpcrl", "env", "ls", cwd=place)
    call(programs / "hpcrl", "init", "mine", "--kind", "environment", cwd=place)
    call(programs / "python", "mine/make_rows.py", cwd=place)
    call(programs / "hpcrl", "config", "validate", "mine/experiment.toml", cwd=place)


@pytest.mark.faults_slow
def test_an_installed_wheel_runs_the_notebook_and_the_page_as_they_stand(place: Path) -> None:
    programs = install_wheel(place)
    cells = [*notebook_cells(), *page_blocks()]
    assert len(cells) == 9
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [programs / "python", "-c", _IN_ORDER],
        input=json.dumps(cells),
        cwd=DOCS,  # where a notebook's kernel starts
        env=variables | {"HPCRL_ROOT": str(place / "runs")},
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    run = Run(place / "runs" / "quickstart" / "notebook")
    assert done.returncode == 0, done.stderr + logs_of(run)
    *_, printed = done.stdout.splitlines()
    metrics, worst, kind = json.loads(printed)

    assert kind == "done"
    assert [row["step"] for row in metrics] == [0, 1, 2], "0 is the evaluation before training"
    for name in ("reward/avg_raw_reward", "policy/grad_norm"):
        assert {row["step"]: row[name] for row in metrics if name in row} == curve(run, name)
        assert list(curve(run, name)) == [1, 2]
    shown = call(programs / "hpcrl", "samples", run.path, "--worst", "-n", "3", "--json", cwd=place)
    assert worst == [sample["name"] for sample in json.loads(shown)]
    assert "did you mean trainer.seed?" in done.stdout
    assert not (run.path.parent / "other").exists(), "the refused submission"
    assert not (run.path / "code" / "hpcrl" / "_tiny_model").exists()
