"""Runs from Python: the cells of docs/python.ipynb and the code of docs/python.md, as they stand there."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

from hpcrl.rundir.layout import Run
from tests.jobs.small_run import curve, hpcrl, logs_of
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


def test_the_notebook_and_the_page_run_as_they_stand(place: Path) -> None:
    cells = [*notebook_cells(), *page_blocks()]
    assert len(cells) == 9
    done = subprocess.run(
        [sys.executable, "-c", _IN_ORDER],
        input=json.dumps(cells),
        cwd=DOCS,  # where a notebook's kernel starts
        env=os.environ | {"HPCRL_ROOT": str(place / "runs")},
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
    shown = hpcrl("samples", str(run.path), "--worst", "-n", "3", "--json", cwd=place)
    assert worst == [sample["name"] for sample in json.loads(shown.stdout)]
    assert "did you mean trainer.seed?" in done.stdout
    assert not (run.path.parent / "other").exists(), "the refused submission"
